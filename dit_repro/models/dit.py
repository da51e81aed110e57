"""DiT, the diffusion transformer with adaLN-Zero blocks (Peebles and Xie, arXiv 2212.09748, section 3.2).

Parameter names and shapes are those of the released checkpoint. The model holds no randomness: label dropout belongs
to the caller, who replaces labels by the null class `num_classes`.
"""
import math
from dataclasses import dataclass
from functools import partial

import torch
from timm.layers import Attention, Mlp, PatchEmbed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class DiTConfig:
    """One row of the paper's Table 4; the last three columns are what the paper obtained, for comparison."""
    depth: int
    width: int
    heads: int
    patch_size: int
    paper_params_millions: int | None = None
    paper_gmacs: float | None = None   # multiply-accumulates at 32x32x4, 1e9; the paper's column says "Gflops"
    paper_fid: float | None = None     # FID-50K after 400K steps at batch 256, no guidance


DIT_CONFIGS = {
    "DiT-S/8": DiTConfig(12, 384, 6, 8, 33, 0.36, 153.60),
    "DiT-S/4": DiTConfig(12, 384, 6, 4, 33, 1.41, 100.41),
    "DiT-S/2": DiTConfig(12, 384, 6, 2, 33, 6.06, 68.40),
    "DiT-B/8": DiTConfig(12, 768, 12, 8, 131, 1.42, 122.74),
    "DiT-B/4": DiTConfig(12, 768, 12, 4, 130, 5.56, 68.38),
    "DiT-B/2": DiTConfig(12, 768, 12, 2, 130, 23.01, 43.47),
    "DiT-L/8": DiTConfig(24, 1024, 16, 8, 459, 5.01, 118.87),
    "DiT-L/4": DiTConfig(24, 1024, 16, 4, 458, 19.70, 45.64),
    "DiT-L/2": DiTConfig(24, 1024, 16, 2, 458, 80.71, 23.33),
    "DiT-XL/8": DiTConfig(28, 1152, 16, 8, 676, 7.39, 106.41),
    "DiT-XL/4": DiTConfig(28, 1152, 16, 4, 675, 29.05, 43.01),
    "DiT-XL/2": DiTConfig(28, 1152, 16, 2, 675, 118.64, 19.47),
    "DiT-nano/4": DiTConfig(6, 128, 4, 4),   # not in the paper: trains in minutes on two CPU cores
    "DiT-nano/2": DiTConfig(6, 128, 4, 2),
    "DiT-deep/2": DiTConfig(16, 48, 3, 2),   # deep and narrow: chapter 5 makes it diverge
}


def timestep_embedding(t: Tensor, dim: int = 256, max_period: float = 10_000, frequency_shift: int = 0) -> Tensor:
    """Sinusoids of the raw timestep, cosines first: t (N,) -> (N, dim) float32.

    Frequency i is max_period ** -(i / (dim/2 - frequency_shift)). The released DiT uses shift 0; diffusers uses 1.
    """
    half = dim // 2
    exponent = -math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device)
    angles = t[:, None].float() * torch.exp(exponent / (half - frequency_shift))  # (N, dim/2), float32 always
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def sincos_position_grid(dim: int, grid_size: int) -> Tensor:
    """Fixed position of each token, row by row: (grid_size ** 2, dim) float32, computed in float64.

    The first half of the channels encodes the column, the second the row, each sines first: the order of the released
    checkpoint, opposite to the timestep's.
    """
    if dim % 4:
        raise ValueError(f"position grid of width {dim}: the width must be a multiple of 4 (sin and cos of two axes)")
    frequencies = 10_000 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))  # (D/4,)
    token = torch.arange(grid_size**2)
    column, row = token % grid_size, token // grid_size
    angles = [position[:, None] * frequencies for position in (column, row)]  # 2 x (T, D/4)
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1).float()


def patchify(x: Tensor, patch_size: int) -> Tensor:
    """Cut into tokens, rows first: (N, C, H, W) -> (N, T, p*p*C), each token laid out (row, column, channel)."""
    n, c, h, w = x.shape
    p = patch_size
    x = x.reshape(n, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1)  # (N, H/p, W/p, p, p, C)
    return x.reshape(n, (h // p) * (w // p), p * p * c)


def unpatchify(tokens: Tensor, patch_size: int) -> Tensor:
    """Inverse of `patchify` for a square image: (N, T, p*p*C) -> (N, C, H, W)."""
    n, t, d = tokens.shape
    p, grid = patch_size, math.isqrt(t)
    x = tokens.reshape(n, grid, grid, p, p, d // p**2).permute(0, 5, 1, 3, 2, 4)  # (N, C, H/p, p, W/p, p)
    return x.reshape(n, d // p**2, grid * p, grid * p)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, x, 1 + scale)   # x * (1 + scale) + shift, in one pass over memory


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int, frequencies: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.frequency_shift = 0   # 1 computes what diffusers computes from the same weights

    def forward(self, t: Tensor) -> Tensor:
        waves = timestep_embedding(t, self.mlp[0].in_features, frequency_shift=self.frequency_shift)
        return self.mlp(waves.to(self.mlp[0].weight.dtype))


class LabelEmbedder(nn.Module):
    def __init__(self, num_classes: int, width: int):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, width)   # the last row is the null class

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)


class DiTBlock(nn.Module):
    """Attention and MLP, each modulated by the condition and gated; with gates at zero it is the identity."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(width, num_heads=heads, qkv_bias=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(width, 4 * width, act_layer=partial(nn.GELU, approximate="tanh"))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:   # (N, T, D), (N, D)
        return self.modulated(x, self.adaLN_modulation(c)[:, None])   # (N, 1, 6D)

    def modulated(self, x: Tensor, modulation: Tensor) -> Tensor:   # (N, T, D), (N, 1, 6D)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)   # each (N, 1, D)
        x = torch.addcmul(x, gate1, self.attn(modulate(self.norm1(x), shift1, scale1)))   # x + gate * branch, (N, T, D)
        return torch.addcmul(x, gate2, self.mlp(modulate(self.norm2(x), shift2, scale2)))   # (N, T, D)


class FinalLayer(nn.Module):
    def __init__(self, width: int, out_features: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, out_features)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:   # (N, T, D), (N, D)
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=-1)   # each (N, 1, D)
        return self.linear(modulate(self.norm_final(x), shift, scale))   # (N, T, p*p*out)


class DiT(nn.Module):
    """Noise predictor: x (N, C, S, S), timesteps t (N,), labels y (N,) int64 -> (N, out_channels, S, S).

    With `learn_sigma` the first C output channels are the noise and the last C the variance (equation 15 of Improved
    DDPM). Labels are 0..num_classes, the last being the null class; timesteps are in [0, num_timesteps).
    Wrong shapes always raise ValueError; wrong values only on the CPU outside torch.compile, where looking is free.
    """
    num_timesteps = 1000

    def __init__(self, config: DiTConfig, input_size: int = 32, in_channels: int = 4, num_classes: int = 1000,
                 learn_sigma: bool = True, init: str = "paper"):
        super().__init__()
        patch, width = config.patch_size, config.width
        if input_size % patch:
            raise ValueError(f"input size {input_size} is not a multiple of the patch size {patch}: "
                             f"use a size such as {input_size // patch * patch + patch}, or a model with another patch")
        self.config, self.input_size, self.in_channels, self.num_classes = config, input_size, in_channels, num_classes
        self.learn_sigma = learn_sigma
        self.out_channels = in_channels * (2 if learn_sigma else 1)
        self.checkpoint_activations = False   # True recomputes each block in the backward pass: less memory, more time

        self.x_embedder = PatchEmbed(input_size, patch, in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.y_embedder = LabelEmbedder(num_classes, width)
        positions = sincos_position_grid(width, input_size // patch)[None]   # (1, T, D)
        self.pos_embed = nn.Parameter(positions, requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock(width, config.heads) for _ in range(config.depth)])
        self.final_layer = FinalLayer(width, patch**2 * self.out_channels)
        self.initialize(init)

    @torch.no_grad()
    def initialize(self, init: str = "paper") -> None:
        """`paper` is the released initialization; `pytorch` keeps the defaults but for the zeros of adaLN-Zero."""
        if init not in ("paper", "pytorch"):
            raise ValueError(f"init {init!r}: expected 'paper' or 'pytorch'")
        if init == "paper":
            for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
                nn.init.xavier_uniform_(linear.weight)   # qkv is one matrix here: bound sqrt(6 / 4D)
                nn.init.zeros_(linear.bias)
            nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))   # a view: as the linear map it is
            nn.init.zeros_(self.x_embedder.proj.bias)
            for weight in (self.y_embedder.embedding_table.weight, self.t_embedder.mlp[0].weight,
                           self.t_embedder.mlp[2].weight):
                nn.init.normal_(weight, std=0.02)
        for linear in (*(block.adaLN_modulation[1] for block in self.blocks),
                       self.final_layer.adaLN_modulation[1], self.final_layer.linear):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        check_inputs(self, x, t, y)
        # The convolution leaves channels before tokens; every later operation would copy.
        x = self.x_embedder(x).contiguous() + self.pos_embed   # (N, T, D)
        c = self.t_embedder(t) + self.y_embedder(y)   # (N, D)
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, c, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, c)   # (N, T, D)
        x = self.final_layer(x, c)   # (N, T, p*p*out)
        return unpatchify(x, self.config.patch_size)   # (N, out, S, S)


def check_inputs(model, x: Tensor, t: Tensor, y: Tensor) -> None:
    """ValueError where x, t or y do not fit a DiT or MiniUNet; values only on the CPU, where looking is free."""
    expected = (len(x), model.in_channels, model.input_size, model.input_size)
    if x.shape != expected:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (N, {', '.join(map(str, expected[1:]))})")
    if t.shape != expected[:1] or y.shape != expected[:1]:
        raise ValueError(f"for {len(x)} images expected timesteps and labels of shape ({len(x)},), "
                         f"got {tuple(t.shape)} and {tuple(y.shape)}")
    if y.is_floating_point():
        raise ValueError(f"labels are {y.dtype}, expected int64 class indices")
    if torch.compiler.is_compiling() or not len(x):
        return
    if y.device.type == "cpu" and not (y.min() >= 0 and y.max() <= model.num_classes):
        raise ValueError(f"labels span {y.min()}..{y.max()}, expected 0..{model.num_classes} "
                         f"({model.num_classes} is the null class)")
    if t.device.type == "cpu" and not (t.min() >= 0 and t.max() < model.num_timesteps):
        raise ValueError(f"timesteps span {t.min()}..{t.max()}, expected 0 <= t < {model.num_timesteps}: raw "
                         "timesteps, not rescaled; a longer schedule sets model.num_timesteps")
