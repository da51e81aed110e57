"""Which classes a set of samples asks for: the two policies that published scores use, and that differ."""
import torch
from torch import Tensor


def draw_labels(count: int, num_classes: int, policy: str = "random", seed: int = 0) -> Tensor:
    """Labels (count,) int64 under a policy.

    "random" draws each uniformly, as the official script does; "balanced" takes every class
    equally often, to within one, in random order, as some papers do. Scores under the two are not comparable.
    """
    if count < 1 or num_classes < 1:
        raise ValueError(f"count={count}, num_classes={num_classes}: expected at least 1 of each")
    generator = torch.Generator().manual_seed(seed)
    if policy == "random":
        return torch.randint(num_classes, (count,), generator=generator)
    if policy != "balanced":
        raise ValueError(f"label policy {policy!r}: expected \"random\" or \"balanced\"")
    spare = torch.randperm(num_classes, generator=generator)[: count % num_classes]   # who is asked for once more
    labels = torch.cat([torch.arange(num_classes).repeat(count // num_classes), spare])
    return labels[torch.randperm(count, generator=generator)]
