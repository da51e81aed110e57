"""Stand-ins for what cannot be shipped, laid out as the real thing, so that the real thing meets no new code.

Weights are random and pictures are noise: no number made of them means anything. `python tests/stand_ins.py FOLDER`
writes all of them and prints the command that runs the book on them at the profile `paper-rehearsal`.
"""
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image

from dit_repro.evaluation.features import INCEPTION_FILE
from dit_repro.latents.autoencoder import RELEASED


@contextmanager
def seeded(seed: int = 0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def make_tree(folder: Path, classes: int = 1_000, train: int = 1, val: int = 1) -> Path:
    """ImageNet's layout: train/ and val/ with a folder for each wnid, and JPEGs of several sizes in them."""
    from timm.data import ImageNetInfo

    draw = np.random.default_rng(0)
    for wnid in sorted(ImageNetInfo("imagenet-1k").label_names())[:classes]:
        for split, count, stem in (("train", train, wnid), ("val", val, "ILSVRC2012_val")):
            for number in range(count):
                width, height = draw.integers(64, 160, 2)
                coarse = Image.fromarray(draw.integers(0, 256, (6, 6, 3), dtype=np.uint8))
                path = Path(folder) / split / wnid / f"{stem}_{number:08d}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                coarse.resize((int(width), int(height)), Image.Resampling.BICUBIC).save(path, quality=90)
    return Path(folder)


def make_sd_vae(folder: Path, seed: int = 0, widths: tuple[int, ...] = (128, 256, 512, 512)) -> Path:
    """Stable Diffusion's autoencoder as diffusers saves it: 84 million random parameters at the default widths."""
    from diffusers import AutoencoderKL

    with seeded(seed):
        AutoencoderKL(in_channels=3, out_channels=3, latent_channels=4, block_out_channels=widths, layers_per_block=2,
                      down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
                      norm_num_groups=32 if min(widths) >= 32 else 4, sample_size=256).save_pretrained(folder)
    return Path(folder)


def make_hub(folder: Path, **changes) -> Path:
    """Both released autoencoders in a Hugging Face cache, for HF_HUB_CACHE. They differ in every weight."""
    for seed, name in enumerate(RELEASED):
        repository = Path(folder) / f"models--{name.replace('/', '--')}"
        make_sd_vae(repository / "snapshots" / ("0" * 40), seed, **changes)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text("0" * 40)
    return Path(folder)


def make_judge(folder: Path, name: str = "resnet50.a1_in1k") -> Path:
    """The judge of class folders, as the workspace holds it: `folder` is the workspace."""
    import timm

    path = Path(folder) / "weights" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with seeded():
        safetensors.torch.save_file(timm.create_model(name).state_dict(), path)
    return path


def make_inception(folder: Path) -> Path:
    """Weights of torch-fidelity's layout where torch's hub cache has them: `folder` is TORCH_HOME."""
    import io

    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Unloaded(FeatureExtractorInceptionV3):
        def load_state_dict(self, state_dict):
            pass

    nothing = io.BytesIO()
    torch.save({}, nothing)
    nothing.seek(0)
    path = Path(folder) / "hub" / "checkpoints" / INCEPTION_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with seeded():
        torch.save(Unloaded("random", ["2048"], nothing).state_dict(), path)
    return path


def make_released(path: Path, name: str = "DiT-XL/2", input_size: int = 32) -> Path:
    """A checkpoint in the layout of the released DiT-XL-2-256x256.pt, or of a smaller model."""
    from dit_repro.models import create_model
    from dit_repro.models.released import save_released_checkpoint

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with seeded():
        save_released_checkpoint(create_model(name, input_size=input_size), path)
    return Path(path)


def main(folder: str) -> None:
    root = Path(folder).absolute()
    make_tree(root / "imagenet")
    make_hub(root / "hub")
    make_judge(root / "workspace")
    make_inception(root / "torch")
    made = make_released(root / "DiT-nano-2.pt", "DiT-nano/2", 8)
    print(f"HF_HUB_CACHE={root / 'hub'} TORCH_HOME={root / 'torch'} DIT_REPRO_WORKSPACE={root / 'workspace'} \\\n"
          f"    dit-repro run --profile paper-rehearsal --data {root / 'imagenet'} -p official={made}")


if __name__ == "__main__":
    main(*sys.argv[1:])
