"""A captured step beside the same step taken again: where the two differ, and by how much."""
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from dit_repro.stability.capture import Capture, take_again

# The walk, in the order in which a step computes: (stage, prefix of the record's names).
WALK = (("latent scale", "latents"), ("latent sample", "latents"), ("labels", "labels"),
        ("coefficients", "coefficient."), ("broadcast", "x_t"), ("target", "target"), ("activation", "activation."),
        ("output", "output"), ("prediction type", "prediction"), ("raw loss", "loss.mse"), ("raw loss", "loss.vb"),
        ("weighted loss", "loss.weight"), ("weighted loss", "loss.total"), ("gradients", "gradient."),
        ("clipping", "clipped."), ("moments", "moment.exp_avg."), ("moments", "moment.exp_avg_sq."),
        ("update", "update."), ("EMA", "ema."))


def replay(capture: Capture | str | Path, precision: str | None = None, overrides: Iterable[str] = ()):
    """Take a captured step again and compare: a pandas DataFrame with a row a quantity, in the order of a step.

    precision: "fp64", "fp32", "tf32", "bf16" or "fp16"; None: the capture's own. overrides: "setting=value" of
    TrainConfig, such as "clip_norm=0.1". `difference` is the largest relative one of any sample or parameter; nothing
    is anchored, so it grows along the step as it does in training. Norms are those of the captured and the new values.
    """
    import pandas
    capture = capture if isinstance(capture, Capture) else Capture.load(capture)
    again = take_again(capture, precision, overrides)
    rows = []
    for stage, prefix in WALK[1:]:
        for quantity, names in quantities({**capture.record, **again}, prefix).items():
            pairs = [(capture.record.get(name), again.get(name)) for name in names]
            captured, new = (math.hypot(*(math.nan if tensor is None else float(tensor.double().norm())
                                          for tensor in side)) for side in zip(*pairs))
            missing = any(tensor is None for pair in pairs for tensor in pair)   # clipped, where only one of them clips
            difference = math.nan if missing else relative_error(*zip(*pairs))
            rows.append({"stage": stage, "quantity": quantity, "captured": captured, "again": new,
                         "difference": difference})
    return pandas.DataFrame(rows)


def relative_error(values: list[Tensor], references: list[Tensor]) -> float:
    """The largest relative distance of any row: a sample, or a parameter where there are several tensors.

    Rows are compared by norm, so that one broken sample is not averaged away. A row smaller than a millionth of the
    largest, or a sample's scalar below the batch's root mean square, is measured against that instead.
    """
    if any(value is None or value.shape != reference.shape for value, reference in zip(values, references)):
        return float("inf")
    pairs = [(value.double(), reference.double()) for value, reference in zip(values, references)]
    if len(pairs) == 1:
        rows = [pair.flatten(1) if pair.ndim > 1 else pair[:, None] for pair in pairs[0]]
        difference, size = (rows[0] - rows[1]).norm(dim=1), rows[1].norm(dim=1)
        floor = size.square().mean().sqrt() if rows[1].shape[1] == 1 else 1e-6 * size.max()
    else:
        difference = torch.stack([(value - reference).norm() for value, reference in pairs])
        size = torch.stack([reference.norm() for _, reference in pairs])
        floor = 1e-6 * size.max()
    ratios = torch.where(difference == 0, 0.0, difference / size.clamp(min=floor))
    return float(ratios.max()) if ratios.isfinite().all() else float("inf")


def quantities(record: dict, prefix: str) -> dict[str, list[str]]:
    """Names under a prefix, one quantity each; those of parameters are one quantity together."""
    names = [name for name in record if name == prefix or (prefix.endswith(".") and name.startswith(prefix))]
    one_each = prefix in ("coefficient.", "activation.") or not prefix.endswith(".")
    return {name: [name] for name in names} if one_each else ({prefix.rstrip("."): names} if names else {})
