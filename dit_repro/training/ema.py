"""The exponential moving average of the weights, which is what gets sampled."""
from contextlib import contextmanager

import torch
from torch import nn

from dit_repro.training.parallel import local


class EMA:
    """ema <- decay * ema + (1 - decay) * weights after every step, from step 1, starting at the initial weights.

    The paper's decay is 0.9999 with no warm-up (section 4). With `warmup`, the decay at a step is at most
    (1 + step) / (10 + step), so that a short run's average forgets its start. `tensors` has the model's state-dict
    keys; under FSDP each rank averages its own shard.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = False):
        self.decay, self.warmup = decay, warmup
        self.tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def decay_at(self, step: int) -> float:
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after step `step` (1 for the first); RuntimeError if the model's names have changed."""
        averages, weights = self._pairs(model)
        torch._foreach_lerp_(averages, weights, 1 - self.decay_at(step))

    @torch.no_grad()
    def squared_distances(self, model: nn.Module) -> torch.Tensor:
        """Squares of |ema - weights| and of |weights|: (2,), of this rank's shards under FSDP."""
        averages, weights = self._pairs(model)
        gaps = torch._foreach_norm(torch._foreach_sub(averages, weights))
        return torch.stack([torch.stack(norms).square().sum() for norms in (gaps, torch._foreach_norm(weights))])

    @contextmanager
    def applied_to(self, model: nn.Module):
        """The model with the averaged weights inside the block; the training weights come back bit for bit."""
        self._swap(model)
        try:
            yield model
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        averages, weights = self._pairs(model)
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, averages)
        torch._foreach_copy_(averages, kept)

    def _pairs(self, model: nn.Module):
        # Looked up anew each time: a model whose parameters were replaced or renamed cannot leave the average behind.
        weights = model.state_dict()
        if weights.keys() != self.tensors.keys():
            names = sorted(weights.keys() ^ self.tensors.keys())
            raise RuntimeError(f"the EMA and the model differ in {len(names)} names, such as {names[0]}: pass the "
                               "model itself, not a wrapper around it")
        return [local(t) for t in self.tensors.values()], [local(weights[name]) for name in self.tensors]
