"""Where a profile's images, latents and judges come from."""
from dataclasses import dataclass
from pathlib import Path

from dit_repro.evaluation import FeatureExtractor, InceptionFeatures, TimmFeatures, load_classifier
from dit_repro.evaluation.features import (
    INCEPTION_SHA256,
    find_inception_weights,
    find_timm_weights,
    imagenet_columns,
)
from dit_repro.files import workspace
from dit_repro.latents import Autoencoder, ImageSource, LatentStore, encode_to_store, load_autoencoder
from dit_repro.latents.images import IDX_STEMS, first_of_each_class
from dit_repro.training.parallel import DEVICE

WHERE_IMAGENET = (
    "ImageNet-1k is had from https://image-net.org/download-images after registration: ILSVRC2012_img_train.tar "
    "(138 GB) and ILSVRC2012_img_val.tar (6.3 GB). Unpack them into train/ and val/, in folders named by wnid such as "
    "n01440764, and name the folder that holds the two with -p data=FOLDER. Latents of 256 pixels take 44 GB more in "
    "the workspace (DIT_REPRO_WORKSPACE moves it) and are made once, in hours on one GPU")


@dataclass(frozen=True)
class Data:
    """Where images come from, and the autoencoder that turns them into latents."""
    path: str = "embedded"              # or a folder: the four IDX files, or train/ and val/ with class folders
    autoencoder_name: str = "embedded"  # or an SD-VAE's name, or a local folder
    resolution: int = 32                # pixels; only class folders are resized
    limit_per_class: int | None = None  # of a split, not of IDX files; None: all
    judge_name: str = "resnet50.a1_in1k"  # timm's name of the classifier that judges class folders
    stand_ins: bool = False             # whether other weights of Inception's layout do; scores then say so

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
        source = ImageSource.folder(self._tree(split), self.resolution, on_damaged="skip")
        return source.take(first_of_each_class(source.labels, self.limit_per_class)) if self.limit_per_class else source

    def _tree(self, split: str) -> Path:
        tree = Path(self.path) / {"train": "train", "test": "val"}[split]
        if not tree.is_dir():
            raise FileNotFoundError(
                f"data={self.path}: expected the four Fashion-MNIST IDX files, or train/ and val/ with a folder for "
                f"each class (ImageNet's layout); found no {tree.absolute()}. " + WHERE_IMAGENET)
        return tree

    def autoencoder(self) -> Autoencoder:
        """Called first by every chapter that reads data, so that what is missing is known before hours are spent.

        FileNotFoundError lists all of it: autoencoder, images, and the weights of judge and Inception. ValueError for
        class folders that the judge does not know, or with the embedded autoencoder, which knows grey clothes alone.
        """
        if self.autoencoder_name == "embedded" and not self.is_fashion_mnist:
            raise ValueError(f"data={self.path}: the embedded autoencoder was trained on grey clothes of 32 pixels; "
                             "for class folders name another, as -p autoencoder=stabilityai/sd-vae-ft-ema")
        found, missing = [], []
        looks = [lambda: load_autoencoder(self.autoencoder_name, DEVICE)]
        if not self.is_fashion_mnist:
            looks += [lambda: [self._tree(split) for split in ("train", "test")],
                      lambda: find_timm_weights(self._judge_weights, self.judge_name), find_inception_weights]
        for look in looks:
            try:
                found.append(look())
            except FileNotFoundError as error:
                missing.append(str(error))
        if missing:
            raise FileNotFoundError("\n".join([f"{len(missing)} inputs are missing:", *missing]))
        if not self.is_fashion_mnist:
            imagenet_columns(self._class_folders, self.judge_name)
        return found[0]

    @property
    def _class_folders(self) -> list[str]:
        return sorted(path.name for path in self._tree("train").glob("[!.]*") if path.is_dir())

    @property
    def _judge_weights(self) -> Path:
        return workspace() / "weights" / f"{self.judge_name}.safetensors"

    def judge(self) -> FeatureExtractor:
        """What looks at samples: features for distances, and logits whose index is the label.

        For class folders a classifier of timm's, with weights in the workspace; FileNotFoundError says which and where.
        """
        if self.is_fashion_mnist:
            return load_classifier().to(DEVICE)
        return TimmFeatures(self._judge_weights, self.judge_name, class_names=self._class_folders).to(DEVICE)

    def features(self) -> FeatureExtractor:
        """What Frechet distances are measured in: Inception, so that they are FIDs, or the small classifier."""
        return self.judge() if self.is_fashion_mnist else InceptionFeatures(
            sha256=None if self.stand_ins else INCEPTION_SHA256).to(DEVICE)

    def store(self, split: str, autoencoder: Autoencoder) -> LatentStore:
        """The latents of a split: encoded now, resumed, or found in the workspace, where all chapters share them."""
        return self.encoded(split, self.source(split), autoencoder)

    def encoded(self, name: str, source: ImageSource, autoencoder: Autoencoder) -> LatentStore:
        """The latents of any source, such as a part of a split; `name` only helps to recognize the folder."""
        name = f"{name}-{source.identity['sha256'][:8]}-{autoencoder.sha256[:8]}-{source.resolution}"
        return encode_to_store(source, autoencoder, workspace() / "latents" / name)
