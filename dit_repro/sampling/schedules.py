"""What a schedule alone does to a chain of steps, and chains that a count of evenly spaced steps does not give."""
import torch
from torch import Tensor

from dit_repro.diffusion import NoiseSchedule


def error_gain(schedule: NoiseSchedule) -> Tensor:
    """What an error of 1 in the predicted noise adds to the next state of DDPM, at each index: (S,) float64.

    beta / sqrt((1 - beta) (1 - a)), from the posterior's mean with x0 as that noise implies it. No network is in it:
    a schedule whose last beta is near 1 multiplies whatever error the network makes there, unless x0 is bounded.
    """
    return schedule.betas / ((1 - schedule.betas) * (1 - schedule.alphas_cumprod)).sqrt()


def dense_start(schedule: NoiseSchedule, steps: str | int, dense: int = 20) -> NoiseSchedule:
    """`schedule.respaced(steps)` with all of the `dense` noisiest timesteps: a long chain's beginning at little cost.

    The first steps, where the schedules differ most, are then those of the full chain. Sample it with steps=num_steps.
    """
    if schedule.num_steps != schedule.num_train_steps or not 1 <= dense <= schedule.num_steps:
        raise ValueError(f"dense_start: {schedule} and dense={dense}, expected the full schedule and 1 to its length")
    chosen = torch.cat([schedule.respaced(steps).timesteps, schedule.timesteps[-dense:]]).unique()
    kept = schedule.alphas_cumprod[chosen]
    before = torch.cat([torch.ones_like(kept[:1]), kept[:-1]])
    return NoiseSchedule(schedule.name, 1 - kept / before, chosen, schedule.num_train_steps)


def at_levels_of(levels: NoiseSchedule, trained: NoiseSchedule) -> NoiseSchedule:
    """The noise levels of one schedule for a network that was trained on another; `sample` takes it as any schedule.

    At each level the network is given the timestep at which `trained` comes nearest, in log signal-to-noise ratio;
    beyond the noisiest and the cleanest level of `trained` these are its last and its first.
    """
    def log_snr(schedule):
        return (schedule.alphas_cumprod / (1 - schedule.alphas_cumprod)).log()

    nearest = (log_snr(levels)[:, None] - log_snr(trained)).abs().argmin(1)  # (S,)
    return NoiseSchedule(f"{levels.name} levels", levels.betas, trained.timesteps[nearest], trained.num_train_steps)
