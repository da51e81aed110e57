"""What reimplementations of DiT get wrong, each as a change to a model: what is a detail worth (chapter 2)?"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dit_repro.models.dit import DiT


@dataclass(frozen=True)
class Mistake:
    """One departure from the released model.

    `apply` changes a DiT in place. Where `relabels` is set the mistake only renames inputs or outputs of a layer whose
    initial weights do not care, so that a model trained with it from the start differs by the luck of the draw alone.
    """
    name: str
    apply: Callable[[DiT], None]
    relabels: bool = False


class RawTimestep(nn.Module):
    """The timestep as one number, in place of its sinusoids."""

    def __init__(self, mlp: nn.Sequential, divisor: float):
        super().__init__()
        self.mlp, self.divisor = mlp, divisor

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp((t.float() / self.divisor)[:, None].expand(-1, self.mlp[0].in_features))  # (N, D)


def _swap_halves(weight: Tensor, dim: int) -> None:
    first, second = weight.chunk(2, dim)
    weight.copy_(torch.cat([second, first], dim))


def _rows_first(model: DiT) -> None:
    _swap_halves(model.pos_embed, dim=2)


def _position_cosines_first(model: DiT) -> None:
    for axis in model.pos_embed.chunk(2, dim=2):
        _swap_halves(axis, dim=2)


def _timestep_sines_first(model: DiT) -> None:
    _swap_halves(model.t_embedder.mlp[0].weight, dim=1)  # the same as swapping its inputs


def _half_minus_one(model: DiT) -> None:
    model.t_embedder.frequency_shift = 1


def _bf16_timestep(model: DiT) -> None:
    model.t_embedder.register_forward_pre_hook(lambda module, inputs: (inputs[0].bfloat16().float(),))


def _raw_timestep(model: DiT) -> None:
    model.t_embedder = RawTimestep(model.t_embedder.mlp, 1)


def _scaled_timestep(model: DiT) -> None:
    model.t_embedder = RawTimestep(model.t_embedder.mlp, model.num_timesteps)


def _norms(model: DiT):
    return [norm for block in model.blocks for norm in (block.norm1, block.norm2)] + [model.final_layer.norm_final]


def _affine_norms(model: DiT) -> None:
    for norm in _norms(model):
        norm.weight = nn.Parameter(torch.ones(norm.normalized_shape))
        norm.bias = nn.Parameter(torch.zeros(norm.normalized_shape))


def _norm_epsilon(model: DiT) -> None:
    for norm in _norms(model):
        norm.eps = 1e-5


def _erf_gelu(model: DiT) -> None:
    for block in model.blocks:
        block.mlp.act = nn.GELU()


def _scale_first(model: DiT) -> None:
    """Modulation read as scale, shift instead of shift, scale."""
    for block in model.blocks:
        for row in block.adaLN_modulation[1].parameters():
            shift1, scale1, gate1, shift2, scale2, gate2 = row.clone().chunk(6)
            row.copy_(torch.cat([scale1, shift1, gate1, scale2, shift2, gate2]))


def _scale_without_one(model: DiT) -> None:
    """x * scale instead of x * (1 + scale): a bias of -1 on every scale."""
    for block in model.blocks:
        for part in (1, 4):
            block.adaLN_modulation[1].bias.chunk(6)[part].sub_(1)
    model.final_layer.adaLN_modulation[1].bias.chunk(2)[1].sub_(1)


def _channels_outermost(model: DiT) -> None:
    """A patch's values read as (channel, row, column) instead of (row, column, channel)."""
    for row in model.final_layer.linear.parameters():
        cells = model.config.patch_size**2
        row.copy_(row.unflatten(0, (model.out_channels, cells)).transpose(0, 1).flatten(0, 1).clone())


def _separate_qkv(model: DiT) -> None:
    """Xavier bound of a square matrix for each of q, k and v, sqrt(6 / 2D), instead of the fused sqrt(6 / 4D)."""
    for block in model.blocks:
        block.attn.qkv.weight.mul_(2**0.5)


def _pytorch_init(model: DiT) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.initialize("pytorch")


def _without_zeros(model: DiT) -> None:
    """adaLN and the final layer initialized like every other linear layer."""
    for linear in (*(block.adaLN_modulation[1] for block in model.blocks), model.final_layer.adaLN_modulation[1],
                   model.final_layer.linear):
        nn.init.xavier_uniform_(linear.weight)


MISTAKES = (
    Mistake("positions: row before column", _rows_first, relabels=True),
    Mistake("positions: cosines before sines", _position_cosines_first, relabels=True),
    Mistake("timestep: sines before cosines", _timestep_sines_first, relabels=True),
    Mistake("timestep: exponent i / (half - 1)", _half_minus_one),
    Mistake("timestep: rounded to bf16", _bf16_timestep),
    Mistake("timestep: t / 1000 as a number", _scaled_timestep),
    Mistake("timestep: t as a number", _raw_timestep),
    Mistake("norms: learned scale and shift", _affine_norms),
    Mistake("norms: epsilon 1e-5", _norm_epsilon),
    Mistake("MLP: exact GELU", _erf_gelu),
    Mistake("modulation: scale before shift", _scale_first, relabels=True),
    Mistake("modulation: x * scale", _scale_without_one),
    Mistake("patches: channel outermost", _channels_outermost, relabels=True),
)
# Mistakes of initialization: they mean nothing to a trained model.
INIT_MISTAKES = (
    Mistake("init: PyTorch's defaults", _pytorch_init),
    Mistake("init: q, k, v as separate matrices", _separate_qkv),
    Mistake("init: no zeros", _without_zeros),
)


@torch.no_grad()
def apply_mistake(model: DiT, mistake: Mistake) -> DiT:
    """`model`, changed in place. Weights that a mistake draws anew are the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mistake.apply(model)
    return model
