"""What a run's samples say that its loss does not: are labels used, are training images repeated?"""
import numpy as np
import torch

from dit_repro.evaluation import FeatureExtractor, condition_information, find_copies
from dit_repro.latents import LatentStore, load_autoencoder
from dit_repro.sampling import Guidance, sample
from dit_repro.training import RunFolder

REAL_IMAGES = 4_000   # training images that samples are held against, as the decoder gives them back


def check_behavior(run: RunFolder, extractor: FeatureExtractor, samples: int = 100, device: str = "cpu") -> list[str]:
    """Draw `samples` guided images over all classes and compare their features with the training images'.

    The class seen in a sample is that of the nearest mean of a class, so any features will do. EMA weights of the
    newest checkpoint, 50 steps, guidance 4: a model that ignores its labels does so most visibly when guided. A label
    that occurs once carries no information, so of many classes some are taken, ten samples of each.
    """
    config = run.config()
    store = LatentStore.open(config.latents)
    autoencoder = load_autoencoder(store.manifest["autoencoder"]["id"], device)
    some = np.sort(np.random.default_rng(0).permutation(len(store))[:REAL_IMAGES])
    latents = store.latents(some, np.zeros(len(some), bool), torch.zeros(len(some), *store.latent_shape))
    real = torch.cat([extractor(autoencoder.decode(part)).pool for part in latents.split(256)])   # (M, D)
    real_labels = torch.from_numpy(np.asarray(store.labels)[some])
    means = torch.stack([real[real_labels == label].mean(0) for label in real_labels.unique()])   # (K, D)

    classes = min(config.num_classes, max(1, samples // 10))
    labels = torch.arange(samples) % classes
    drawn = sample(run.load_model().to(device), labels, config.noise_schedule(), "50",
                   seeds=range(samples), guidance=Guidance(4.0 if config.label_dropout else 1.0))
    features = torch.cat([extractor(autoencoder.decode(part)).pool for part in drawn.split(256)])   # (N, D)
    said = ["labels: one class, or fewer than twenty samples, so there is nothing to compare"]
    if classes > 1:
        found = condition_information(torch.cdist(features, means).argmin(1), labels)
        said = [f"labels: a sample carries {found.bits:.2f} bits about its label, {found.chance:.2f} to be had by "
                "chance: " + ("they are used" if found.bits > found.chance else "THE LABELS ARE IGNORED")]
    if len(real) >= 100:
        copies = find_copies(features, real)
        said.append(f"copies: {copies.share:.0%} of the samples lie nearer to a training image than 99% of training "
                    f"images do to each other; median distance {copies.ratio:.2f} times theirs"
                    + (": TRAINING IMAGES ARE REPEATED" if copies.share > 0.05 else ""))
    else:
        said.append(f"copies: {len(real)} training images are too few to say what distance is ordinary; look at them")
    return said
