"""Every number of every experiment, at four scales, with what to expect beside it.

`smoke` only shows that each cell runs. `laptop` is what the published pages show: every phenomenon, measured on two CPU
cores. `gpu` is one GPU before the paper's run is paid for. `paper` is the replication itself.
"""
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dit_repro.evaluation import FeatureExtractor, load_classifier
from dit_repro.files import workspace
from dit_repro.latents import Autoencoder, ImageSource, LatentStore, encode_to_store, load_autoencoder
from dit_repro.latents.images import IDX_STEMS
from dit_repro.training import TrainConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"   # of models, autoencoder and judge in a notebook


@dataclass(frozen=True)
class Data:
    """Where images come from, and the autoencoder that turns them into latents."""
    path: str = "embedded"              # or a folder: the four IDX files, or train/ and val/ with class folders
    autoencoder_name: str = "embedded"  # or an SD-VAE's name, or a local folder
    resolution: int = 32                # pixels; only class folders are resized
    limit_per_class: int | None = None  # embedded images only; None: all 1,600 + 400

    def source(self, split: str) -> ImageSource:
        """The images of split "train" or "test"."""
        if self.path == "embedded":
            return ImageSource.embedded(split, self.limit_per_class)
        folder = Path(self.path)
        if any(folder.glob(f"{IDX_STEMS[split]}-images-idx3-ubyte*")):
            return ImageSource.idx(folder, split)
        tree = folder / {"train": "train", "test": "val"}[split]
        if not tree.is_dir():
            raise FileNotFoundError(f"data={self.path}: expected the four Fashion-MNIST IDX files, or train/ and val/ "
                                    f"with a folder for each class (ImageNet's layout); found no {tree}")
        return ImageSource.folder(tree, self.resolution, on_damaged="skip")

    def autoencoder(self) -> Autoencoder:
        return load_autoencoder(self.autoencoder_name, DEVICE)

    def judge(self) -> FeatureExtractor:
        """What looks at samples: features for distances, and logits whose index is the label."""
        return load_classifier().to(DEVICE)

    def store(self, split: str, autoencoder: Autoencoder) -> LatentStore:
        """The latents of a split: encoded now, resumed, or found in the workspace, where all chapters share them."""
        source = self.source(split)
        name = f"{split}-{source.identity['sha256'][:8]}-{autoencoder.sha256[:8]}-{source.resolution}"
        return encode_to_store(source, autoencoder, workspace() / "latents" / name)


@dataclass(frozen=True)
class Latents:
    """Chapter 1."""
    probe_images: int = 4_000           # held-out images for PSNR, accuracy and statistics
    timing_batch: int = 512             # images in one timed call
    leak_batches: int = 12              # decoded batches kept; their graphs take about 136 MB each at laptop


@dataclass(frozen=True)
class Construction:
    """Chapter 2's table of harm: a short training for each mistake."""
    num_steps: int = 80
    batch_size: int = 64
    seeds: int = 3                      # correct runs; their spread is the yardstick
    loss_images: int = 256              # held-out images behind a loss


@dataclass(frozen=True)
class Sampling:
    """How previews and scores are sampled."""
    steps: str = "25"                   # respaced DDPM steps; the paper's tables use 250
    guidance_scale: float = 4.0         # the replication post's previews of XL/2; its previews of B/2 used 1.5
    per_class: int = 25                 # images of each class behind a score
    classes: int = 10                   # classes sampled; the post previewed 8 of ImageNet's 1,000
    checkpoints: int = 5                # archived checkpoints that are sampled, first and last among them
    batch_size: int = 250               # images at once
    loss_images: int = 512              # held-out images behind a loss by timestep
    covariance_images: int = 8_000      # training latents behind the covariance baseline


@dataclass(frozen=True)
class Profile:
    """One scale of the whole book."""
    name: str
    data: Data
    train: TrainConfig                  # chapter 3's run; `training` fills in what the latents decide
    latents: Latents = field(default_factory=Latents)
    construction: Construction = field(default_factory=Construction)
    sampling: Sampling = field(default_factory=Sampling)

    def training(self, store: LatentStore, **changes) -> TrainConfig:
        """The profile's run on `store`, with fields of TrainConfig changed."""
        channels, size, _ = store.latent_shape
        return replace(self.train, latents=str(store.path), num_classes=store.num_classes, input_size=size,
                       in_channels=channels, **changes)

    def run_path(self, name: str, config: TrainConfig) -> Path:
        """The folder of a run in the workspace: one for each setting that makes it another run."""
        return workspace() / "runs" / f"{name}-{self.name}-{config.digest()[:8]}"


# At a rate of 1e-3, a third of this one, 65% of guided samples land in their class in the end, not nine of ten.
# The post's 50,000 steps at an EMA decay of 0.9999 are five times 1 / (1 - decay); so are 1,000 steps at 0.995.
LAPTOP_RUN = TrainConfig(
    latents="", model="DiT-nano/2", num_steps=1_000, global_batch_size=128, learning_rate=3e-3, ema_decay=0.995,
    log_every=20, checkpoint_every=100, archive_every=100, keep_last=1)

PROFILES = {
    "smoke": Profile(
        "smoke", Data(limit_per_class=100),
        replace(LAPTOP_RUN, num_steps=40, global_batch_size=32, ema_decay=0.9, log_every=5, checkpoint_every=10,
                archive_every=10),
        Latents(probe_images=200, timing_batch=64, leak_batches=3),
        Construction(num_steps=2, batch_size=16, seeds=2, loss_images=32),
        Sampling(steps="4", per_class=2, checkpoints=2, loss_images=32, covariance_images=500)),
    "laptop": Profile("laptop", Data(), LAPTOP_RUN),
    "gpu": Profile(
        "gpu", Data(),
        TrainConfig(latents="", model="DiT-S/2", num_steps=5_000, ema_decay=0.999, precision="bf16", compile=True,
                    log_every=50, checkpoint_every=500, archive_every=500),
        construction=Construction(num_steps=1_000, batch_size=256),
        sampling=Sampling(per_class=500, batch_size=1_000)),
    "paper": Profile(
        "paper", Data(path="imagenet", autoencoder_name="stabilityai/sd-vae-ft-ema", resolution=256),
        TrainConfig(latents="", model="DiT-B/2", num_steps=50_000, precision="bf16", compile=True, archive_every=5_000,
                    export_ema_every=5_000),   # chapter 8 goes on to 400,000; the paper: FID-50K 43.47 there
        Latents(leak_batches=4), Construction(num_steps=2_000, batch_size=256),
        Sampling(steps="250", guidance_scale=1.5, per_class=10, batch_size=64, classes=8)),
}


def get_profile(name: str, data: str = "", autoencoder: str = "") -> Profile:
    """The profile `name`; `data` and `autoencoder`, where given, replace what it reads. ValueError lists the names."""
    if name not in PROFILES:
        raise ValueError(f"unknown profile {name!r}; the profiles are {', '.join(PROFILES)}")
    profile = PROFILES[name]
    changes = {key: value for key, value in (("path", data), ("autoencoder_name", autoencoder)) if value}
    return replace(profile, data=replace(profile.data, **changes))
