"""Feature extractors: images in, the three heads of an Inception-style network out."""
import io
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dit_repro.files import sha256 as sha256_of

INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION_FILE}"
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


class Features(NamedTuple):
    """What a feature extractor gives for N images, float32 on the CPU."""
    pool: Tensor     # (N, D): Frechet distance, precision and recall, kernel distance
    spatial: Tensor  # (N, h*w*c) flattened as NHWC: spatial Frechet distance
    logits: Tensor   # (N, K): Inception Score


@contextmanager
def full_float32():
    """Run convolutions and matrix products in full float32: TF32 moves a score and is on by default on a GPU."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


class FeatureExtractor(nn.Module):
    """Base class: a subclass sets `id`, `sha256`, `resize` and writes `heads`; a call does the rest.

    Calling it on images uint8 (N, 3, H, W) runs `heads` in batches, in eval mode, without gradient and without TF32.
    Raises ValueError on images of another type or shape, and on none.
    """
    id: str        # goes into the protocol and the name of the score
    sha256: str    # of the weights
    resize: str    # what happens to an image before the first layer
    batch_size = 256
    spatial_channels = 1        # c of the spatial head, what runs fastest in it
    packages = ("torch",)       # whose versions can move a score

    def heads(self, images: Tensor) -> Features:
        """Features of one batch: images (N, 3, H, W), uint8 or float in 0..255, on the device of the weights."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Features:
        if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            found = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(f"{self.id} features: expected uint8 images of shape (N, 3, H, W), found {found}")
        if len(images) == 0:
            raise ValueError(f"{self.id} features: no image given")
        self.eval()
        device = next(self.parameters()).device
        with torch.no_grad(), full_float32():
            batches = [self.heads(batch.to(device)) for batch in images.split(self.batch_size)]
        return Features(*(torch.cat(head).float().cpu() for head in zip(*batches)))


def find_inception_weights(path: str | Path | None = None) -> Path:
    """The file of Inception's weights, in torch's hub cache without a path; FileNotFoundError says how to get it."""
    path = Path(path or Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE)
    if not path.is_file():
        raise FileNotFoundError(f"no Inception weights at {path}. Download {INCEPTION_URL} (96 MB) to that place, "
                                "or pass weights_path")
    return path


def find_timm_weights(path: str | Path, name: str) -> Path:
    """The file of the weights of timm's network `name`; FileNotFoundError says how to get it."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no weights of {name} at {path}: fetch model.safetensors of "
                                f"https://huggingface.co/timm/{name} (102 MB for a ResNet-50) and put it there")
    return path


class InceptionFeatures(FeatureExtractor):
    """The 2015 Inception network of FID, as the ADM evaluator reads it, with torch-fidelity's port of the graph.

    Heads: pool (N, 2048), spatial (N, 17*17*7 = 2023), logits (N, 1008) without the bias. Images of any size are
    resized to 299x299 inside, by TensorFlow 1 bilinear. Weights are read from torch's hub cache unless `weights_path`
    is given, and never downloaded. Raises FileNotFoundError saying where to get them, ValueError on another file; with
    `sha256` None any weights of this layout do, and what they score is not called FID.
    """
    id = "Inception"
    resize = "TensorFlow 1 bilinear to 299"
    batch_size, spatial_channels = 64, 7
    packages = ("torch", "torch-fidelity")

    def __init__(self, weights_path: str | Path | None = None, sha256: str | None = INCEPTION_SHA256):
        super().__init__()
        path = find_inception_weights(weights_path)
        self.sha256 = sha256_of(path)
        if sha256 is None and self.sha256 != INCEPTION_SHA256:
            self.id = "stand-in for Inception"
        elif self.sha256 != (sha256 or INCEPTION_SHA256):
            raise ValueError(f"{path}: SHA-256 is {self.sha256}, expected {sha256}. "
                             f"Download {INCEPTION_URL} (96 MB) again")
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        trusted = io.BytesIO()  # the constructor unpickles what it is given: give it tensors that were read safely
        torch.save(torch.load(path, map_location="cpu", weights_only=True), trusted)
        trusted.seek(0)
        self.network = FeatureExtractorInceptionV3("inception", ["2048", "logits_unbiased"], trusted)
        self.network.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)

    def _keep_spatial(self, module, inputs, output: Tensor) -> None:
        self._spatial = output[:, :7].movedim(1, -1).flatten(1)  # (N, 17*17*7): ADM stores its statistics as NHWC

    def heads(self, images: Tensor) -> Features:
        pool, logits = self.network(images)
        return Features(pool, self._spatial, logits)


DINOV2 = "vit_large_patch14_dinov2.lvd142m"   # features that never saw an ImageNet label


class TimmFeatures(FeatureExtractor):
    """A network as timm names and stores it: a classifier to judge samples with, or DINOv2 for a second opinion.

    Heads: pool (N, D), what its classifier sees; spatial (N, h*w*7), seven channels of the last feature map; logits
    (N, K), where (N, 0) is a network without classes. `class_names` are the folder names of the data, in label order:
    a logit's index is then the label, also where the data hold a part of ImageNet. `size` is the square that images are
    resized to, the network's own if None. Raises FileNotFoundError saying where to get weights, ValueError on another
    file than .safetensors and on a class that the network does not know.
    """
    batch_size, spatial_channels = 32, 7
    packages = ("torch", "timm")

    def __init__(self, weights_path: str | Path, name: str, size: int | None = None,
                 class_names: Sequence[str] | None = None):
        super().__init__()
        path = find_timm_weights(weights_path, name)
        if path.suffix != ".safetensors":
            raise ValueError(f"{path}: expected a .safetensors file, the format that cannot run code")
        import timm
        config = timm.get_pretrained_cfg(name)
        self.id, self.sha256, self.size = f"timm {name}", sha256_of(path), size or config.input_size[-1]
        self.resize = f"bicubic with antialias to {self.size}"
        if config.fixed_input_size:   # a vision transformer's position table is made for one size, and resampled
            self.network = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(path)},
                                             img_size=self.size)
        else:
            self.network = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(path)})
        self.columns = None if class_names is None else imagenet_columns(class_names, name)
        for key, values in (("mean", config.mean), ("std", config.std)):
            self.register_buffer(key, torch.tensor(values).view(1, 3, 1, 1) * 255)

    def heads(self, images: Tensor) -> Features:
        x = nn.functional.interpolate(images.float(), (self.size, self.size), mode="bicubic", antialias=True)
        last = self.network.forward_features((x.clamp(0, 255) - self.mean) / self.std)
        pool = self.network.forward_head(last, pre_logits=True)                     # (N, D)
        logits = self.network.get_classifier()(pool) if self.network.num_classes else pool[:, :0]
        if last.ndim == 3:                                                          # tokens (N, prefix + h*w, D)
            spatial = last[:, getattr(self.network, "num_prefix_tokens", 0):, :self.spatial_channels]
        else:                                                                       # (N, C, h, w), rarely (N, h, w, C)
            spatial = last if getattr(self.network, "output_fmt", "NCHW") == "NHWC" else last.movedim(1, -1)
            spatial = spatial[..., :self.spatial_channels]
        return Features(pool, spatial.flatten(1), logits if self.columns is None else logits[:, self.columns])


def imagenet_columns(class_names: Sequence[str], name: str) -> list[int]:
    """The logit of each class of the data: timm's ImageNet-1k networks have them in the order of sorted wnids."""
    import timm
    from timm.data import ImageNetInfo
    known = {wnid: index for index, wnid in enumerate(ImageNetInfo("imagenet-1k").label_names())}
    if (num_classes := timm.get_pretrained_cfg(name).num_classes) != len(known):
        raise ValueError(f"{name} has {num_classes} classes, expected the {len(known)} of ImageNet-1k: take one whose "
                         "name ends in _in1k")
    if unknown := [class_name for class_name in class_names if class_name not in known]:
        raise ValueError(f"class folder {unknown[0]!r} ({len(unknown)} such): {name} knows ImageNet-1k's classes, "
                         "whose folders are named as n01440764. Other data need a classifier of their own, a "
                         "subclass of FeatureExtractor")
    return [known[class_name] for class_name in class_names]
