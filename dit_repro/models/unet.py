"""A small U-Net with the call of a DiT: the design that DiT replaced, at matched cost (chapter 9).

Group norm, SiLU, additive timestep and concatenated skips as in Ho et al. 2020 (arXiv 2006.11239, appendix B);
self-attention and cross-attention at the low resolutions as in Rombach et al. 2022 (arXiv 2112.10752, appendix).
"""
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dit_repro.models.dit import TimestepEmbedder, check_inputs


@dataclass(frozen=True)
class UNetConfig:
    """A U-Net by its levels; between two of them the resolution halves."""
    channels: tuple[int, ...]   # of each level, the finest first
    first_attention: int        # attention at this level and at the coarser ones
    heads: int
    label_tokens: int = 4       # what cross-attention reads: one token would leave the softmax nothing to choose
    groups: int = 8             # of every group norm
    scale_shift: bool = False   # adaptive group norm: the timestep scales channels as well as shifting them
    skips: bool = True          # False puts zeros where a skip would be, so that shapes and cost stay as they are


UNET_CONFIGS = {   # beside each the DiT whose multiply-accumulates it matches
    "MiniUNet-S": UNetConfig((40, 80, 128), 1, 4),           # DiT-nano/2 at 8x8x4, within 1%
    "MiniUNet-M": UNetConfig((160, 320, 640), 1, 8),          # DiT-S/2 at 8x8x4, within 3%
    "MiniUNet-B": UNetConfig((320, 640, 1024, 1024), 1, 8),   # DiT-B/2 at 32x32x4, within 1%
}
for _name, _config in list(UNET_CONFIGS.items()):
    UNET_CONFIGS[f"{_name}/no-skips"] = replace(_config, skips=False)
    UNET_CONFIGS[f"{_name}/adaptive"] = replace(_config, scale_shift=True)


class ResBlock(nn.Module):
    """Two convolutions around an identity; the timestep enters between them, one number (or two) a channel."""

    def __init__(self, in_channels: int, out_channels: int, config: UNetConfig, width: int):
        super().__init__()
        self.scale_shift = config.scale_shift
        self.norm1 = nn.GroupNorm(config.groups, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_proj = nn.Linear(width, (2 if config.scale_shift else 1) * out_channels)
        self.norm2 = nn.GroupNorm(config.groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor, c: Tensor) -> Tensor:   # (N, in, H, W), (N, D)
        h = self.conv1(F.silu(self.norm1(x)))   # (N, out, H, W)
        time = self.time_proj(F.silu(c))[:, :, None, None]   # (N, out or 2 out, 1, 1)
        if self.scale_shift:
            scale, shift = time.chunk(2, dim=1)
            h = self.norm2(h) * (1 + scale) + shift
        else:
            h = self.norm2(h + time)
        return self.shortcut(x) + self.conv2(F.silu(h))   # (N, out, H, W)


class Attention(nn.Module):
    """Every position asks every position of x, or every token of a context; (N, T, D) -> (N, T, D)."""

    def __init__(self, width: int, heads: int, context_width: int | None = None):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(context_width or width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)   # (N, heads, T or K, D / heads)
                   for part in (self.q(x), *self.kv(x if context is None else context).chunk(2, dim=-1)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention to the label's tokens and an MLP on the positions of a feature map."""

    def __init__(self, channels: int, config: UNetConfig, context_width: int):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))
        self.self_attn = Attention(channels, config.heads)
        self.cross_attn = Attention(channels, config.heads, context_width)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU("tanh"), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:   # (N, D, H, W), (N, K, E)
        tokens = x.flatten(2).transpose(1, 2)   # (N, H*W, D)
        tokens = tokens + self.self_attn(self.norm1(tokens))
        tokens = tokens + self.cross_attn(self.norm2(tokens), context)
        tokens = tokens + self.mlp(self.norm3(tokens))
        return tokens.transpose(1, 2).reshape(x.shape)   # (N, D, H, W)


class Level(nn.Module):
    """A residual block and, at the coarser levels, attention after it."""

    def __init__(self, in_channels: int, out_channels: int, attention: bool, config: UNetConfig, width: int):
        super().__init__()
        self.res = ResBlock(in_channels, out_channels, config, width)
        self.attn = TransformerBlock(out_channels, config, width) if attention else None

    def forward(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        x = self.res(x, c)   # (N, out, H, W)
        return x if self.attn is None else self.attn(x, context)


class MiniUNet(nn.Module):
    """Noise predictor: x (N, C, S, S), timesteps t (N,), labels y (N,) int64 -> (N, out_channels, S, S), as `DiT`.

    The timestep reaches every residual block; the label only the attention of the coarser levels, as tokens. Raises
    ValueError for an input size that does not halve often enough, and for inputs as `DiT` does.
    """
    num_timesteps = 1000

    def __init__(self, config: UNetConfig, input_size: int = 32, in_channels: int = 4, num_classes: int = 1000,
                 learn_sigma: bool = True, init: str = "paper"):
        super().__init__()
        channels, width = config.channels, 4 * config.channels[0]   # width: of timestep and label tokens
        step = 2 ** (len(channels) - 1)
        if input_size % step:
            raise ValueError(f"input size {input_size} does not halve {len(channels) - 1} times: "
                             f"use a multiple of {step}, such as {input_size // step * step + step}")
        self.config, self.input_size, self.in_channels, self.num_classes = config, input_size, in_channels, num_classes
        self.learn_sigma = learn_sigma
        self.out_channels = in_channels * (2 if learn_sigma else 1)

        self.t_embedder = TimestepEmbedder(width)
        self.y_embedder = nn.Embedding(num_classes + 1, config.label_tokens * width)   # the last row is the null class
        self.stem = nn.Conv2d(in_channels, channels[0], 3, padding=1)
        self.down, self.downsample = nn.ModuleList(), nn.ModuleList()
        self.up, self.upsample = nn.ModuleList(), nn.ModuleList()
        for i, out in enumerate(channels[:-1]):
            attention = i >= config.first_attention
            self.down.append(Level(channels[max(i - 1, 0)], out, attention, config, width))
            self.downsample.append(nn.Conv2d(out, out, 3, stride=2, padding=1))
            self.upsample.append(nn.Conv2d(channels[i + 1], out, 3, padding=1))   # after doubling the resolution
            self.up.append(Level(2 * out, out, attention, config, width))   # coarse features beside the skip's
        self.mid = nn.ModuleList([Level(channels[-2], channels[-1], True, config, width),
                                  Level(channels[-1], channels[-1], False, config, width)])
        self.norm = nn.GroupNorm(config.groups, channels[0])
        self.out = nn.Conv2d(channels[0], self.out_channels, 3, padding=1)
        self.initialize(init)

    @property
    def blocks(self) -> list[Level]:
        """What FSDP shards, and compiles, one at a time."""
        return [*self.down, *self.mid, *self.up]

    @torch.no_grad()
    def initialize(self, init: str = "paper") -> None:
        """`paper`: as ADM, whose output and residual branches begin at zero; `pytorch`: the defaults throughout."""
        if init not in ("paper", "pytorch"):
            raise ValueError(f"init {init!r}: expected 'paper' or 'pytorch'")
        if init == "pytorch":
            return
        blocks = [m for m in self.modules() if isinstance(m, (ResBlock, TransformerBlock))]
        last = [layer for block in blocks for layer in (
            (block.conv2,) if isinstance(block, ResBlock) else
            (block.self_attn.out, block.cross_attn.out, block.mlp[2]))]
        for layer in (*last, self.out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        check_inputs(self, x, t, y)
        c = self.t_embedder(t)   # (N, E)
        context = self.y_embedder(y).unflatten(1, (self.config.label_tokens, -1))   # (N, K, E)
        h, skips = self.stem(x), []   # (N, channels[0], S, S)
        for level, downsample in zip(self.down, self.downsample):
            h = level(h, c, context)   # (N, channels[i], S / 2^i, S / 2^i)
            skips.append(h)
            h = downsample(h)
        for level in self.mid:
            h = level(h, c, context)   # (N, channels[-1], S / 2^L, S / 2^L)
        for level, upsample, skip in zip(reversed(self.up), reversed(self.upsample), reversed(skips)):
            h = upsample(F.interpolate(h, scale_factor=2, mode="nearest"))   # (N, channels[i], S / 2^i, S / 2^i)
            h = level(torch.cat([h, skip if self.config.skips else torch.zeros_like(skip)], 1), c, context)
        return self.out(F.silu(self.norm(h)))   # (N, out, S, S)
