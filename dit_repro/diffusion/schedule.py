"""The noise schedule: float64 tables of the forward process and its posterior, and the steps that a sampler takes."""
import itertools
import math

import torch
from torch import Tensor

VARIANCES = ("learned", "fixed_small", "fixed_large")


class NoiseSchedule:
    """Forward process q(x_t | x_0) = N(sqrt(a_t) x_0, 1 - a_t) with a = alphas_cumprod, and its posterior.

    `betas`, `alphas_cumprod`: (T,) float64. `timesteps`: (T,) int64, what the model is given at each index. `t` in
    every method: (N,) int64 *indices* into this schedule. Results are float32, or wider where the input is.
    """

    def __init__(self, name: str, betas, timesteps: Tensor | None = None, num_train_steps: int | None = None):
        betas = torch.as_tensor(betas, dtype=torch.float64)
        if not bool(((betas > 0) & (betas < 1)).all()):
            raise ValueError(f"schedule {name}: betas {betas.min():.3g} to {betas.max():.3g}, expected 0 < beta < 1")
        self.name = name
        self.betas = betas
        self.alphas_cumprod = torch.cumprod(1 - betas, dim=0)
        self.timesteps = torch.arange(len(betas)) if timesteps is None else timesteps
        self.num_train_steps = num_train_steps or len(betas)  # length of the schedule that `timesteps` count in
        self._tables = {torch.device("cpu"): self._build_tables()}

    @classmethod
    def linear(cls, num_steps: int = 1000) -> "NoiseSchedule":
        """DDPM's schedule: beta from 1e-4 to 2e-2 at 1,000 steps, scaled by 1000/T so that a_T stays near zero."""
        if num_steps <= 20:
            raise ValueError(f"linear schedule of {num_steps} steps: the last beta, 20/T, must be below 1; use 21 up")
        scale = 1000 / num_steps
        return cls("linear", torch.linspace(scale * 1e-4, scale * 2e-2, num_steps, dtype=torch.float64))

    @classmethod
    def cosine(cls, num_steps: int = 1000) -> "NoiseSchedule":
        """Improved DDPM, equation 17: a(u) = cos^2((u + 0.008) / 1.008 * pi/2), with beta clipped at 0.999."""
        if num_steps < 1:
            raise ValueError(f"cosine schedule of {num_steps} steps: use at least 1")
        u = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
        curve = torch.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2
        return cls("cosine", (1 - curve[1:] / curve[:-1]).clamp(max=0.999))

    def respaced(self, spec: str | int) -> "NoiseSchedule":
        """The same process seen at fewer steps: betas rebuilt from alphas_cumprod, original timesteps kept.

        "250" or 250 takes evenly spaced steps with both ends (0, 4, 8, ... 995, 999); one step is the last. "ddim50"
        takes a whole stride from 0 (0, 20, ... 980) and exists only where a stride gives that count.
        """
        chosen = torch.tensor(_spaced_indices(spec, self.num_steps))
        kept = self.alphas_cumprod[chosen]
        before = torch.cat([torch.ones(1, dtype=torch.float64), kept[:-1]])
        return NoiseSchedule(self.name, 1 - kept / before, self.timesteps[chosen], self.num_train_steps)

    @property
    def num_steps(self) -> int:
        return len(self.betas)

    def __repr__(self) -> str:
        return f"NoiseSchedule({self.name}, {self.num_steps} of {self.num_train_steps} steps)"

    def add_noise(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t = sqrt(a) x_0 + sqrt(1 - a) noise (DDPM, equation 4)."""
        return self._at("sqrt_a", t, x0) * x0 + self._at("sqrt_1_a", t, x0) * noise

    def predict_x0(self, x_t: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        """The x_0 that x_t and a noise prediction imply; at t = 999, linear, an error in eps grows 157 times."""
        return (x_t - self._at("sqrt_1_a", t, x_t) * eps) / self._at("sqrt_a", t, x_t)

    def predict_eps(self, x_t: Tensor, t: Tensor, x0: Tensor) -> Tensor:
        """The noise that x_t and a prediction of x_0 imply."""
        return (x_t - self._at("sqrt_a", t, x_t) * x0) / self._at("sqrt_1_a", t, x_t)

    def posterior(self, x0: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q(x_{t-1} | x_t, x_0): mean (N, ...), variance (N, 1, ...), log variance (N, 1, ...) (DDPM, equation 7).

        At index 0 the variance is zero; its logarithm is that of index 1, as in the official code.
        """
        mean = self._at("posterior_x0", t, x_t) * x0 + self._at("posterior_x_t", t, x_t) * x_t
        return mean, self._at("posterior_variance", t, x_t), self._at("log_fixed_small", t, x_t)

    def log_variance(self, variance: str, t: Tensor, values: Tensor) -> Tensor:
        """Log variance of the reverse step: "learned", "fixed_small" (the posterior's) or "fixed_large" (beta).

        Learned: `values` (N, C, H, W), -1 to 1 where trained but not bounded, place it between the logarithms of the
        posterior variance and of beta (Improved DDPM, equation 15). Fixed: `values` gives only dtype and rank.
        """
        if variance != "learned":
            return self._at(f"log_{variance}", t, values)
        share = (values + 1) / 2
        return share * self._at("log_beta", t, values) + (1 - share) * self._at("log_fixed_small", t, values)

    def snr(self, t: Tensor) -> Tensor:
        """Signal-to-noise ratio a / (1 - a) of each index, (N,) float64."""
        return self._on(t.device)["snr"][t]

    def model_timesteps(self, t: Tensor) -> Tensor:
        """The original timesteps of indices `t`: what the model is given."""
        return self._on(t.device)["timesteps"][t]

    def _build_tables(self) -> dict[str, Tensor]:
        a, betas = self.alphas_cumprod, self.betas
        before = torch.cat([torch.ones(1, dtype=torch.float64), a[:-1]])
        variance = betas * (1 - before) / (1 - a)
        first = variance[1:2] if len(a) > 1 else betas[:1]  # stands in for index 0, whose logarithm does not exist
        return {
            "timesteps": self.timesteps,
            "sqrt_a": a.sqrt(),
            "sqrt_1_a": (1 - a).sqrt(),
            "snr": a / (1 - a),
            "posterior_x0": betas * before.sqrt() / (1 - a),
            "posterior_x_t": (1 - before) * (1 - betas).sqrt() / (1 - a),
            "posterior_variance": variance,
            "log_beta": betas.log(),
            "log_fixed_small": torch.cat([first, variance[1:]]).log(),
            "log_fixed_large": torch.cat([first, betas[1:]]).log(),
        }

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        """The tables on `device`: copied there once, since a copy at each lookup would stall the accelerator."""
        if device not in self._tables:
            narrow = torch.float32 if device.type == "mps" else None  # that backend has no float64
            self._tables[device] = {
                name: table.to(device, narrow if table.is_floating_point() else None)
                for name, table in self._tables[torch.device("cpu")].items()
            }
        return self._tables[device]

    def _at(self, name: str, t: Tensor, x: Tensor) -> Tensor:
        """Table values for indices `t`, shaped (N, 1, ...) to meet `x`; cast after the gather, never below float32."""
        values = self._on(t.device)[name][t].to(torch.promote_types(x.dtype, torch.float32))
        return values.view(-1, *[1] * (x.ndim - 1))


def _spaced_indices(spec: str | int, num_steps: int) -> list[int]:
    digits = str(spec).removeprefix("ddim")
    if not (digits.isascii() and digits.isdecimal()) or not 1 <= int(digits) <= num_steps:
        raise ValueError(f'steps={spec!r}: expected a count from 1 to {num_steps}, such as 50 or "50", or "ddim50"')
    count = int(digits)
    if str(spec).startswith("ddim"):
        stride = math.ceil(num_steps / count)
        indices = list(range(0, num_steps, stride))
        if len(indices) != count or count == 1:
            raise ValueError(f'steps={spec!r}: no whole stride through {num_steps} gives {count} steps; use "{count}"')
        return indices
    if count == 1:
        return [num_steps - 1]  # the official code would take step 0, where pure noise is not what the model expects
    # A running sum in floats, as the official code has it: its rounding moves one step by one at counts such as 21.
    stride = (num_steps - 1) / (count - 1)
    return [round(position) for position in itertools.accumulate([0.0] + [stride] * (count - 1))]
