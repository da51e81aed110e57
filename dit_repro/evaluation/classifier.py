"""A small classifier of Fashion-MNIST: judges samples offline, and stands in for Inception with its three heads."""
import json
from functools import cache
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dit_repro.evaluation.features import FeatureExtractor, Features
from dit_repro.files import atomic_write, sha256, write_json
from dit_repro.progress import progress

EMBEDDED = Path(__file__).parent / "embedded"
EPOCHS, BATCH_SIZE, PEAK_LEARNING_RATE, WEIGHT_DECAY = 22, 256, 0.2, 5e-4


class ConvNorm(nn.Sequential):
    """Convolution and batch norm."""

    def __init__(self, channels: int, out_channels: int, kernel: int = 3, stride: int = 1):
        super().__init__(nn.Conv2d(channels, out_channels, kernel, stride, kernel // 2, bias=False),
                         nn.BatchNorm2d(out_channels))


class SmallClassifier(FeatureExtractor):
    """0.2 M parameters, images of 32x32. Heads: pool (N, 96), spatial (N, 8*8*4), logits (N, K) without a bias."""
    id = "small classifier"
    resize = "none"
    spatial_channels = 4

    def __init__(self, class_names: tuple[str, ...]):
        super().__init__()
        self.class_names = tuple(class_names)
        self.stem = ConvNorm(3, 32, kernel=5, stride=2)   # halved at once: 10,000 images in seconds on one core
        self.down1 = ConvNorm(32, 64, stride=2)
        self.block1 = ConvNorm(64, 64)
        self.down2 = ConvNorm(64, 96, stride=2)
        self.block2 = ConvNorm(96, 96)
        self.head = nn.Linear(96, len(class_names), bias=False)
        self.to(memory_format=torch.channels_last)

    def heads(self, images: Tensor) -> Features:
        if images.shape[1:] != (3, 32, 32):
            raise ValueError(f"the small classifier sees 32x32 pixels in 3 channels, found {tuple(images.shape[1:])}")
        x = (images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)  # (N, 3, 32, 32)
        x = F.relu(self.stem(x))               # (N, 32, 16, 16)
        x = F.relu(self.down1(x))              # (N, 64, 8, 8)
        x = F.relu(x + self.block1(x))
        spatial = x[:, :4].movedim(1, -1)      # (N, 8, 8, 4): a few channels, as ADM takes 7 of Inception's
        x = F.relu(self.down2(x))              # (N, 96, 4, 4)
        x = F.relu(x + self.block2(x))
        pool = x.mean((2, 3))                  # (N, 96)
        return Features(pool, spatial.flatten(1), self.head(pool))


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip half of the images, shift by up to 2 pixels, blur half and add noise: float (N, 3, 32, 32) in 0..255.

    Blur and noise because decoded latents have both, and a judge that has seen only sharp images would punish the
    autoencoder instead of the model.
    """
    n, _, height, width = images.shape

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    columns = torch.arange(width).expand(n, width)
    columns = torch.where(draw(n, 1) < 0.5, columns, width - 1 - columns)
    shift_y, shift_x = torch.randint(-2, 3, (2, n, 1), generator=generator)
    rows = (torch.arange(height) + shift_y) % height     # the border is 2 black pixels, so wrapping shows nothing
    columns = (columns + shift_x) % width
    x = images[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).float()
    strength = draw(n, 1, 1, 1) * (draw(n, 1, 1, 1) < 0.5)
    x = x.lerp(F.avg_pool2d(x, 3, 1, 1), strength)
    noise = torch.randn(x.shape, generator=generator) * 8 * draw(n, 1, 1, 1)
    return (x + noise).clamp(0, 255)


def train_classifier(images: Tensor, labels: np.ndarray, class_names: tuple[str, ...], epochs: int = EPOCHS,
                     seed: int = 0) -> SmallClassifier:
    """Train on uint8 images (N, 3, 32, 32) and labels (N,) by SGD with a one-cycle rate, in bfloat16; 5 CPU minutes."""
    labels = torch.as_tensor(labels)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = SmallClassifier(class_names).train()
    optimizer = torch.optim.SGD(classifier.parameters(), PEAK_LEARNING_RATE, momentum=0.9, nesterov=True,
                                weight_decay=WEIGHT_DECAY)
    steps = epochs * (-(-len(images) // BATCH_SIZE))
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, steps, pct_start=0.2)
    with progress(total=steps, desc="train classifier", unit="step") as bar:
        for _ in range(epochs):
            for batch in torch.randperm(len(images), generator=generator).split(BATCH_SIZE):
                x = augment(images[batch], generator)
                with torch.autocast("cpu", torch.bfloat16):
                    logits = classifier.heads(x).logits
                loss = F.cross_entropy(logits.float(), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                rate.step()
                bar.update()
    return classifier.eval()


def accuracy(classifier: SmallClassifier, images: Tensor, labels: np.ndarray) -> float:
    """Share of uint8 images (N, 3, 32, 32) that land in their class (N,)."""
    return (classifier(images).logits.argmax(1) == torch.as_tensor(labels)).double().mean().item()


def save_classifier(classifier: SmallClassifier, folder: Path = EMBEDDED, **measured: float) -> None:
    """Write classifier.safetensors and classifier.json, with its hash, class names and what was measured."""
    folder = Path(folder)
    state = {name: tensor.contiguous() for name, tensor in classifier.state_dict().items()}
    with atomic_write(folder / "classifier.safetensors", "wb") as file:
        file.write(safetensors.torch.save(state))
    write_json(folder / "classifier.json", {"class_names": list(classifier.class_names), **measured,
                                            "sha256": sha256(folder / "classifier.safetensors")})


@cache
def load_classifier(folder: Path = EMBEDDED) -> SmallClassifier:
    """The embedded classifier, frozen, in eval mode; loaded once. Raises ValueError on weights of another hash."""
    path, described = Path(folder) / "classifier.safetensors", Path(folder) / "classifier.json"
    facts = json.loads(described.read_text())
    if (found := sha256(path)) != facts["sha256"]:
        raise ValueError(f"{path}: SHA-256 {found[:12]}.., but {described.name} says {facts['sha256'][:12]}..: "
                         "restore both files, or train them again with `dit-repro embed classifier`")
    classifier = SmallClassifier(facts["class_names"])
    classifier.load_state_dict(safetensors.torch.load_file(path))
    classifier.sha256 = found
    return classifier.requires_grad_(False).eval()
