"""What to know before a run on a small set of images is started: said, not enforced."""
import numpy as np

from dit_repro.latents import LatentStore
from dit_repro.training.config import TrainConfig

FEW_IN_A_CLASS = 100    # Fashion-MNIST has 1,600, ImageNet 1,300
FEW_IN_ALL = 2_000      # chapter 10 shows what becomes of a set of 80


def advice(config: TrainConfig, store: LatentStore) -> list[str]:
    """A sentence for each setting that will disappoint: a late average, small classes, copies, no guidance."""
    said = []
    if (left := config.ema_decay ** config.num_steps) > 0.01 and not config.ema_warmup:
        half_life = np.log(0.5) / np.log(config.ema_decay)
        decay = 1 - 5 / config.num_steps   # the initial weights are then e^-5 of the average
        said.append(f"ema_decay = {config.ema_decay:g} has a half-life of {half_life:,.0f} steps, and after "
                    f"{config.num_steps:,} steps {left:.0%} of the average is still the initial weights: sample the "
                    f"raw weights, or set ema_decay = {max(decay, 0):.4g}")
    counts = np.bincount(store.labels, minlength=store.num_classes)
    if len(small := np.flatnonzero(counts < FEW_IN_A_CLASS)):
        some = ", ".join(f"{store.class_names[i]} ({counts[i]})" for i in small[:5])
        more = f" and {len(small) - 5} more" if len(small) > 5 else ""
        said.append(f"{len(small)} of {store.num_classes} classes have fewer than {FEW_IN_A_CLASS} images: {some}"
                    + more)
    if len(store) < FEW_IN_ALL:
        epochs = config.num_steps * config.global_batch_size / len(store)
        said.append(f"{len(store):,} images are seen {epochs:,.0f} times each, and a small set is learned by heart: "
                    "hold samples against it, as `dit-repro stability check` does")
    if config.label_dropout == 0:
        said.append("label_dropout = 0: the null class is never trained, so samples cannot be guided")
    return said
