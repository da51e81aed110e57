"""Where a profile's images, latents and judges come from."""
from dataclasses import dataclass
from pathlib import Path

import torch

from dit_repro.evaluation import FeatureExtractor, InceptionFeatures, TimmFeatures, load_classifier
from dit_repro.files import workspace
from dit_repro.latents import Autoencoder, ImageSource, LatentStore, encode_to_store, load_autoencoder
from dit_repro.latents.images import IDX_STEMS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"   # of models, autoencoder and judge in a notebook


@dataclass(frozen=True)
class Data:
    """Where images come from, and the autoencoder that turns them into latents."""
    path: str = "embedded"              # or a folder: the four IDX files, or train/ and val/ with class folders
    autoencoder_name: str = "embedded"  # or an SD-VAE's name, or a local folder
    resolution: int = 32                # pixels; only class folders are resized
    limit_per_class: int | None = None  # embedded images only; None: all 1,600 + 400
    judge_name: str = "resnet50.a1_in1k"  # timm's name of the classifier that judges class folders

    @property
    def is_fashion_mnist(self) -> bool:
        """Embedded or in IDX files, so that the small classifier knows it; else class folders."""
        return self.path == "embedded" or any(Path(self.path).glob(f"{IDX_STEMS['train']}-images-idx3-ubyte*"))

    def source(self, split: str) -> ImageSource:
        """The images of split "train" or "test"."""
        if self.path == "embedded":
            return ImageSource.embedded(split, self.limit_per_class)
        if self.is_fashion_mnist:
            return ImageSource.idx(self.path, split)
        return ImageSource.folder(self._tree(split), self.resolution, on_damaged="skip")

    def _tree(self, split: str) -> Path:
        tree = Path(self.path) / {"train": "train", "test": "val"}[split]
        if not tree.is_dir():
            raise FileNotFoundError(f"data={self.path}: expected the four Fashion-MNIST IDX files, or train/ and val/ "
                                    f"with a folder for each class (ImageNet's layout); found no {tree}")
        return tree

    def autoencoder(self) -> Autoencoder:
        return load_autoencoder(self.autoencoder_name, DEVICE)

    def judge(self) -> FeatureExtractor:
        """What looks at samples: features for distances, and logits whose index is the label.

        For class folders a classifier of timm's, with weights in the workspace; FileNotFoundError says which and where.
        """
        if self.is_fashion_mnist:
            return load_classifier().to(DEVICE)
        weights = workspace() / "weights" / f"{self.judge_name}.safetensors"
        wnids = sorted(path.name for path in self._tree("train").glob("[!.]*") if path.is_dir())
        return TimmFeatures(weights, self.judge_name, class_names=wnids).to(DEVICE)

    def features(self) -> FeatureExtractor:
        """What Frechet distances are measured in: Inception, so that they are FIDs, or the small classifier."""
        return self.judge() if self.is_fashion_mnist else InceptionFeatures().to(DEVICE)

    def store(self, split: str, autoencoder: Autoencoder) -> LatentStore:
        """The latents of a split: encoded now, resumed, or found in the workspace, where all chapters share them."""
        return self.encoded(split, self.source(split), autoencoder)

    def encoded(self, name: str, source: ImageSource, autoencoder: Autoencoder) -> LatentStore:
        """The latents of any source, such as a part of a split; `name` only helps to recognize the folder."""
        name = f"{name}-{source.identity['sha256'][:8]}-{autoencoder.sha256[:8]}-{source.resolution}"
        return encode_to_store(source, autoencoder, workspace() / "latents" / name)
