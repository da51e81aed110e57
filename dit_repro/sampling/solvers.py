"""From a predicted x0 to the next state: DDPM, DDIM, and any diffusers scheduler rebuilt on our schedule."""
import inspect
import math

import numpy as np
import torch
from torch import Tensor

from dit_repro.diffusion import NoiseSchedule


class SeededNoise:
    """Normal noise, one CPU generator per image: an image is its seed's whatever the batch or device."""

    def __init__(self, seeds: list[int], shape: tuple[int, ...], device: torch.device):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.shape, self.device = shape, device

    def __call__(self) -> Tensor:
        noise = torch.empty(len(self.generators), *self.shape)  # (N, C, H, W)
        for row, generator in zip(noise, self.generators):
            row.normal_(generator=generator)
        return noise.to(self.device)


class DDPM:
    """Ancestral sampling (DDPM, algorithm 2) on a respaced schedule; every solver has these attributes and methods."""

    def __init__(self, schedule: NoiseSchedule, variance: str):
        self.schedule, self.variance = schedule, variance
        self.timesteps = schedule.timesteps.flip(0).tolist()            # original timestep of each step, falling
        self.alphas_cumprod = schedule.alphas_cumprod.flip(0).tolist()  # noise level of each step

    def start(self, noise: Tensor) -> Tensor:
        return noise

    def network_input(self, x: Tensor, step: int) -> Tensor:
        """The variance-preserving x_t behind the solver's state."""
        return x

    def advance(self, x: Tensor, step: int, x0: Tensor, eps: Tensor, values: Tensor, draw: SeededNoise) -> Tensor:
        """The next state. `values` is the model's variance output, and without one any tensor of that shape."""
        index = self.schedule.num_steps - 1 - step
        t = torch.full((len(x),), index, device=x.device)
        mean, _, _ = self.schedule.posterior(x0, x, t)
        if index == 0:
            return mean
        return mean + (0.5 * self.schedule.log_variance(self.variance, t, values)).exp() * draw()


class DDIM(DDPM):
    """DDIM, equation 12: deterministic at eta 0, as noisy as DDPM's small variance at 1."""

    def __init__(self, schedule: NoiseSchedule, eta: float):
        super().__init__(schedule, "fixed_small")
        self.eta = eta

    def advance(self, x, step, x0, eps, values, draw):
        last = step == self.schedule.num_steps - 1
        a, before = self.alphas_cumprod[step], 1.0 if last else self.alphas_cumprod[step + 1]
        sigma = self.eta * math.sqrt((1 - before) / (1 - a) * (1 - a / before))
        x = math.sqrt(before) * x0 + math.sqrt(1 - before - sigma**2) * eps
        return x + sigma * draw() if sigma else x


class DiffusersSolver:
    """A diffusers scheduler, class or instance, with our betas; an instance's other settings are kept.

    Its own clamping is switched off (x0_transform is the place for it) and it is given the noise prediction, so a
    learned variance is not used. Raises ValueError where it takes no betas, or its noise levels are not its timesteps'.
    """

    def __init__(self, method, schedule: NoiseSchedule, steps: str | int):
        kind = method if isinstance(method, type) else type(method)
        accepted = inspect.signature(kind.__init__).parameters
        if "trained_betas" not in accepted:
            raise ValueError(f"method={kind.__name__}: it takes no trained_betas, so cannot follow our schedule")
        if schedule.num_steps != schedule.num_train_steps:
            raise ValueError(f"method={kind.__name__}: expected the full schedule and a count, not {schedule}")
        if not str(steps).isdecimal() or not 1 <= int(steps) <= schedule.num_steps:
            raise ValueError(f"steps={steps!r}: {kind.__name__} needs a count from 1 to {schedule.num_steps}")
        # Private entries name the settings left at default, which from_config would reset: our betas among them.
        config = {} if isinstance(method, type) else {k: v for k, v in method.config.items() if not k.startswith("_")}
        if str(config.get("variance_type")).startswith("learned"):
            raise ValueError(f"method={kind.__name__} with learned variance: it is given noise alone; use \"ddpm\"")
        ours = {"num_train_timesteps": schedule.num_steps, "trained_betas": schedule.betas.tolist(),
                "prediction_type": "epsilon", "clip_sample": False, "thresholding": False}
        self.scheduler = kind.from_config({**config, **{key: ours[key] for key in ours if key in accepted}})
        self.scheduler.set_timesteps(int(steps))
        self.timesteps = self.scheduler.timesteps.tolist()  # floats for some, repeated for two-pass steps
        self.alphas_cumprod = self._noise_levels(schedule)
        self.steps = int(steps)
        self.takes_generator = "generator" in inspect.signature(kind.step).parameters

    def start(self, noise: Tensor) -> Tensor:
        self.scheduler.set_timesteps(self.steps, device=noise.device)  # and forget the batch before
        return noise * self.scheduler.init_noise_sigma

    def network_input(self, x: Tensor, step: int) -> Tensor:
        return self.scheduler.scale_model_input(x, self.scheduler.timesteps[step])

    def advance(self, x, step, x0, eps, values, draw):
        settings = {"generator": draw.generators} if self.takes_generator else {}
        return self.scheduler.step(eps, self.scheduler.timesteps[step], x, **settings).prev_sample

    def _noise_levels(self, schedule: NoiseSchedule) -> list[float]:
        """alphas_cumprod of each step, from the scheduler's own sigmas where it has them."""
        sigmas = ((1 - schedule.alphas_cumprod) / schedule.alphas_cumprod).sqrt().numpy()

        def at(timesteps):
            return np.interp(timesteps, np.arange(len(sigmas)), sigmas)

        timesteps = np.array(self.timesteps)
        levels = at(timesteps)
        if hasattr(self.scheduler, "sigmas"):
            levels = self.scheduler.sigmas[: len(timesteps)].double().numpy()
            # Timesteps may be rounded, sigmas not; further apart than that, x0 and eps would not fit each other.
            low, high = at(timesteps - 1) * (1 - 1e-4), at(timesteps + 1) * (1 + 1e-4)
            if len(levels) != len(timesteps) or not ((low <= levels) & (levels <= high)).all():
                raise ValueError(f"method={type(self.scheduler).__name__}: its noise levels are not those of its "
                                 "timesteps in our schedule, so they cannot meet; try DPMSolverMultistepScheduler")
        return (1 / (1 + levels**2)).tolist()


def create_solver(method, schedule: NoiseSchedule, steps: str | int, eta: float, variance: str | None,
                  learn_sigma: bool):
    """The solver for `method`; raises ValueError where options do not belong together."""
    if eta and method != "ddim":
        raise ValueError(f"eta={eta}: only method=\"ddim\" has an eta, not {method!r}")
    if variance is not None and method != "ddpm":
        raise ValueError(f"variance={variance!r}: only method=\"ddpm\" has a variance, not {method!r}")
    if method == "ddim":
        if not 0 <= eta <= 1:
            raise ValueError(f"eta={eta}: expected 0 (deterministic) to 1")
        return DDIM(schedule.respaced(steps), eta)
    if method == "ddpm":
        variance = variance or ("learned" if learn_sigma else "fixed_small")
        if variance not in ("learned", "fixed_small", "fixed_large"):
            raise ValueError(f"variance={variance!r}: expected \"learned\", \"fixed_small\" or \"fixed_large\"")
        if variance == "learned" and not learn_sigma:
            raise ValueError("variance=\"learned\": this model was built with learn_sigma=False; use \"fixed_small\"")
        return DDPM(schedule.respaced(steps), variance)
    if isinstance(method, str) or not hasattr(method, "from_config"):
        raise ValueError(f"method={method!r}: expected \"ddpm\", \"ddim\", or a diffusers scheduler class or instance")
    return DiffusersSolver(method, schedule, steps)
