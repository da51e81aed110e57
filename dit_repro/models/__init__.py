"""Chapter 2: the networks, their size, and exchange of weights with the released checkpoint and diffusers."""
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from dit_repro.models.dit import (
    DIT_CONFIGS,
    DiT,
    DiTConfig,
    patchify,
    sincos_position_grid,
    timestep_embedding,
    unpatchify,
)
from dit_repro.models.interop import from_diffusers, to_diffusers, use_released_timesteps
from dit_repro.models.released import load_released_checkpoint, save_released_checkpoint
from dit_repro.models.unet import UNET_CONFIGS, MiniUNet, UNetConfig

__all__ = [
    "DIT_CONFIGS",
    "UNET_CONFIGS",
    "DiT",
    "DiTConfig",
    "MiniUNet",
    "UNetConfig",
    "count_macs",
    "count_parameters",
    "create_model",
    "from_diffusers",
    "load_released_checkpoint",
    "patchify",
    "save_released_checkpoint",
    "sincos_position_grid",
    "timestep_embedding",
    "to_diffusers",
    "unpatchify",
    "use_released_timesteps",
]


def create_model(name: str, *, input_size: int = 32, in_channels: int = 4, num_classes: int = 1000,
                 learn_sigma: bool = True, init: str = "paper") -> nn.Module:
    """A freshly initialized DiT by its name in the paper, such as "DiT-B/2", or MiniUNet; model(x, t, y) as `DiT` says.

    `init="pytorch"` is PyTorch's default initialization except for the zeros of adaLN-Zero and the final layer of DiT.
    Inside `torch.device("meta")` nothing is allocated, which is enough for counting.
    """
    if name not in DIT_CONFIGS | UNET_CONFIGS:
        raise ValueError(f"unknown model {name!r}, expected one of {', '.join(DIT_CONFIGS | UNET_CONFIGS)}")
    kind, config = (DiT, DIT_CONFIGS[name]) if name in DIT_CONFIGS else (MiniUNet, UNET_CONFIGS[name])
    return kind(config, input_size, in_channels, num_classes, learn_sigma, init)


def count_parameters(model: nn.Module) -> int:
    """All parameters, the frozen position table included, as the paper counts them (Table 4)."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module) -> int:
    """Multiply-accumulates of one forward pass of one image: every matrix product and convolution that really runs.

    The module runs on shapes alone, so nothing is computed or allocated. One multiply-accumulate is two flops; the
    paper's "Gflops" (Table 4) are multiply-accumulates.
    """
    shapes = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    x = torch.empty(1, model.in_channels, model.input_size, model.input_size, device="meta")
    t = y = torch.zeros(1, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        functional_call(model, shapes, (x, t, y))
    return counter.get_total_flops() // 2
