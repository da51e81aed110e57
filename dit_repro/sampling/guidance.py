"""Classifier-free guidance: at which steps, on which channels and how much."""
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Factor on (scale - 1), with u running from 1 (noise) to 0 (image). Each averages 1 over the timesteps, so
# schedules are compared at the same mean guidance (arXiv 2404.13040).
_SCHEDULES = {
    "constant": lambda u: 1.0,
    "linear": lambda u: 2 * (1 - u),
    "cosine": lambda u: 1 + math.cos(math.pi * u),
}


@dataclass(frozen=True)
class Guidance:
    """unconditional + scale * (conditional - unconditional); 1 is no guidance, 0 the unconditional model.

    At scale 1 the unconditional half is not computed; at 0 the conditional half is not, whatever `channels` says.
    """
    scale: float = 1.0
    channels: int | None = 3    # the paper guides three of four channels (appendix A), the rest stay conditional
    interval: tuple[float, float] | None = None  # only at timesteps low..high, ends included (arXiv 2404.07724)
    schedule: str = "constant"  # "linear" and "cosine" grow from none at pure noise to twice as much at the end
    rescale: float = 0.0        # way back, 0 to 1, to the conditional standard deviation (arXiv 2305.08891)

    def __post_init__(self):
        if not 0 <= self.scale < math.inf:
            raise ValueError(f"guidance scale={self.scale}: expected at least 0 (0 unconditional, 1 no guidance)")
        if self.channels is not None and self.channels < 1:
            raise ValueError(f"guidance channels={self.channels}: expected at least 1, or None for all")
        if self.interval is not None and not self.interval[0] <= self.interval[1]:
            raise ValueError(f"guidance interval={self.interval}: expected (lowest timestep, highest timestep)")
        if self.schedule not in _SCHEDULES:
            raise ValueError(f"guidance schedule={self.schedule!r}: expected one of {', '.join(_SCHEDULES)}")
        if self.schedule != "constant" and self.scale < 1:
            raise ValueError(f"guidance scale={self.scale} with schedule={self.schedule!r}: expected at least 1")
        if not 0 <= self.rescale <= 1:
            raise ValueError(f"guidance rescale={self.rescale}: expected 0 to 1")

    def scale_at(self, timestep: float, num_train_steps: int) -> float:
        """The scale in force at an original timestep."""
        if self.interval is not None and not self.interval[0] <= timestep <= self.interval[1]:
            return 1.0
        return 1 + (self.scale - 1) * _SCHEDULES[self.schedule](timestep / max(num_train_steps - 1, 1))


NO_GUIDANCE = Guidance()


def guided_output(model: nn.Module, x: Tensor, timestep: float, labels: Tensor, guidance: Guidance,
                  num_train_steps: int) -> Tensor:
    """The model's output under guidance, (N, C or 2C, H, W): a pass of N where the scale is 1 or 0, else of 2N."""
    scale = guidance.scale_at(timestep, num_train_steps)
    t = torch.full((len(x),), timestep, device=x.device)  # (N,) int64; float32 where a solver asks between two
    null = torch.full_like(labels, model.num_classes)
    if scale in (0, 1):
        return model(x, t, labels if scale == 1 else null)
    output = model(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null]))  # (2N, C or 2C, H, W)
    conditional, unconditional = output.float().chunk(2)
    guided = min(guidance.channels or x.shape[1], x.shape[1])  # the learned variance stays conditional
    c, u = conditional[:, :guided], unconditional[:, :guided]
    eps = u + scale * (c - u)  # (N, guided, H, W)
    if guidance.rescale:
        std_ratio = c.flatten(1).std(1) / eps.flatten(1).std(1)  # (N,)
        eps = eps * (1 + guidance.rescale * (std_ratio - 1)).view(-1, 1, 1, 1)
    return torch.cat([eps, conditional[:, guided:]], 1)
