"""The same network from the same parameters, computed in another way: rungs that are more than a switch."""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dit_repro.models import DiT, unpatchify


class BatchedModulation(DiT):
    """A DiT whose blocks' modulations are one matrix product. The weights are joined anew in each pass, at a cost."""

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x).contiguous() + self.pos_embed   # (N, T, D)
        c = self.t_embedder(t) + self.y_embedder(y)   # (N, D)
        layers = [block.adaLN_modulation[1] for block in self.blocks]
        weight = torch.cat([layer.weight for layer in layers])   # (6DL, D) for L blocks
        bias = torch.cat([layer.bias for layer in layers])
        modulations = F.linear(F.silu(c), weight, bias).unflatten(1, (len(layers), 1, -1))   # (N, L, 1, 6D)
        for block, modulation in zip(self.blocks, modulations.unbind(1)):
            x = block.modulated(x, modulation)   # (N, T, D)
        return unpatchify(self.final_layer(x, c), self.config.patch_size)   # (N, out, S, S)


def use_fp8(model: nn.Module) -> None:
    """Products of the blocks in fp8 with torchao's layers, in place; ImportError without torchao."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model.blocks, module_filter_fn=lambda module, name: "adaLN" not in name)
