"""The autoencoder between pixels and latents: loading a released one, and training the embedded one."""
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dit_repro.files import sha256
from dit_repro.latents.images import EMBEDDED, ImageSource
from dit_repro.progress import progress

RELEASED = ("stabilityai/sd-vae-ft-ema", "stabilityai/sd-vae-ft-mse")  # one encoder, two decoders
WEIGHTS = "diffusion_pytorch_model"  # + .safetensors or .bin: diffusers' name
BATCH_PIXELS = 2**22  # at once, 64 images of 256x256: their activations in SD's decoder take several GB already


class Autoencoder:
    """A frozen diffusers AutoencoderKL with the pixel and latent conventions of DiT.

    Pixels are uint8 outside and [-1, 1] inside; latents are multiplied by `scale_factor` for near-unit variance.
    id and sha256 (of the weights file) say which one it is; `model` is the AutoencoderKL.
    """

    def __init__(self, model, id: str, sha256: str):
        if model.config.shift_factor is not None:
            raise ValueError(f"autoencoder {id}: shift_factor {model.config.shift_factor} in its config, but DiT never "
                             f"shifts latents. Use one of the Stable Diffusion 1 and 2 family.")
        # channels_last: its convolutions take a third of the time on a CPU
        self.model = model.eval().requires_grad_(False).to(memory_format=torch.channels_last)
        self.id = id
        self.sha256 = sha256
        self.scale_factor = model.config.scaling_factor
        self.latent_channels = model.config.latent_channels
        self.downsampling = 2 ** (len(model.config.block_out_channels) - 1)

    def __str__(self) -> str:
        return f"{self.id} (sha {self.sha256[:8]})"

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Moments (N, 2C, h, w) float32 of images (N, 3, H, W) uint8: mean, then log-variance, before scaling."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"expected images (N, 3, H, W) uint8, got {tuple(images.shape)} {images.dtype}")
        if images.shape[2] % self.downsampling or images.shape[3] % self.downsampling:
            raise ValueError(f"images of {images.shape[2]}x{images.shape[3]} pixels: autoencoder {self.id} needs "
                             f"multiples of {self.downsampling}")
        moments = []
        for part in images.split(self._batch(images.shape[2] * images.shape[3])):
            posterior = self.model.encode(self._to_model(part.to(self.model.device).float() / 127.5 - 1)).latent_dist
            moments.append(torch.cat([posterior.mean, posterior.logvar], 1))  # logvar is clamped to [-30, 20]
        return torch.cat(moments)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images (N, 3, H, W) uint8, on the CPU, of scaled latents (N, C, h, w), rounded to the nearest value."""
        if latents.ndim != 4 or latents.shape[1] != self.latent_channels:
            raise ValueError(f"expected latents (N, {self.latent_channels}, h, w), got {tuple(latents.shape)}")
        images = []
        for part in latents.split(self._batch(latents.shape[2] * latents.shape[3] * self.downsampling**2)):
            decoded = self.model.decode(self._to_model(part / self.scale_factor)).sample  # (n, 3, H, W)
            images.append((127.5 * decoded + 127.5).round().clamp(0, 255).to(torch.uint8).contiguous().cpu())
        return torch.cat(images)

    @staticmethod
    def _batch(pixels: int) -> int:
        return max(1, BATCH_PIXELS // pixels)

    def _to_model(self, x: Tensor) -> Tensor:
        return x.to(self.model.device, self.model.dtype).contiguous(memory_format=torch.channels_last)


def load_autoencoder(name: str | Path, device: str = "cpu") -> Autoencoder:
    """The "embedded" autoencoder, a released one of `RELEASED`, or that of a local diffusers folder; frozen, eval mode.

    Raises FileNotFoundError where the files are not to be had, ValueError where they are not a whole AutoencoderKL, or
    there is no such device.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # theirs lists every backend, or is of a build without CUDA
        raise ValueError(f"device {str(device)!r}: this machine, or this build of PyTorch, has none of that name; "
                         "expected cpu, or cuda or cuda:N with an NVIDIA GPU") from error
    if name == "embedded":
        folder = EMBEDDED / "autoencoder"
    elif name in RELEASED:
        folder = _download(name)
    else:
        folder = Path(name)
        if not folder.is_dir():
            raise FileNotFoundError(f"no autoencoder {str(name)!r}: expected embedded, {', '.join(RELEASED)}, or a "
                                    f"folder with config.json and {WEIGHTS}.safetensors")
    model, weights = _read(folder)
    return Autoencoder(model.to(device), str(name), sha256(weights))


def _download(name: str) -> Path:
    """The folder of a released autoencoder in the Hugging Face cache, filled on first use."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    files = ("config.json", f"{WEIGHTS}.safetensors")
    cached = [try_to_load_from_cache(name, file) for file in files]
    if all(isinstance(path, str) for path in cached):  # else None, or a mark that the hub has no such file
        return Path(cached[1]).parent
    try:
        get_hf_file_metadata(hf_hub_url(name, files[0]), timeout=5)  # asked once: a download tries again for 25 s
        return Path([hf_hub_download(name, file) for file in files][1]).parent
    except Exception as error:  # the hub's client raises its own, the HTTP library's and the system's errors
        raise FileNotFoundError(
            f"autoencoder {name} is not in the local cache and huggingface.co could not be reached "
            f"({type(error).__name__}). Where there is a network, fetch config.json and {WEIGHTS}.safetensors (335 MB) "
            f"from https://huggingface.co/{name}, put both into one folder here, and give that folder's path as the "
            f"autoencoder.") from error


def _read(folder: Path):
    """(AutoencoderKL, path of its weights file); no pickled code is run, and no weight is left at random."""
    from diffusers import AutoencoderKL

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {folder}: expected the folder of a diffusers AutoencoderKL")
    found = [path for suffix in ("safetensors", "bin") if (path := folder / f"{WEIGHTS}.{suffix}").is_file()]
    if not found:
        raise FileNotFoundError(f"no {WEIGHTS}.safetensors (or .bin) in {folder}")
    declared = AutoencoderKL.load_config(folder).get("_class_name")
    if declared != "AutoencoderKL":
        raise ValueError(f"{folder}: config.json is of a {declared}, expected AutoencoderKL")
    try:  # .bin goes through torch.load(weights_only=True)
        model, info = AutoencoderKL.from_pretrained(
            folder, use_safetensors=found[0].suffix == ".safetensors", local_files_only=True,
            low_cpu_mem_usage=False, output_loading_info=True)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # theirs takes many lines
        raise ValueError(f"{found[0]}: cannot be read as weights of config.json's AutoencoderKL ({reason})") from error
    if wrong := [f"{kind} {keys[0]}" for kind, keys in info.items() if keys]:
        raise ValueError(f"{found[0]}: its weights are not those of config.json's AutoencoderKL ({', '.join(wrong)})")
    return model, found[0]


def psnr(autoencoder: Autoencoder, images: Tensor, border: int = 0) -> float:
    """Peak signal-to-noise ratio in dB of images (N, 3, H, W) uint8 decoded from their posterior mean.

    From the squared error averaged over all images. `border` pixels on each side are left out: padding is easy.
    """
    squared_error = []
    inner = slice(border, images.shape[-1] - border)
    for batch in images.split(256):
        mean = autoencoder.encode(batch).chunk(2, 1)[0]
        error = autoencoder.decode(mean * autoencoder.scale_factor).cpu().float() - batch
        squared_error.append(error[..., inner, inner].double().square().mean((1, 2, 3)))
    return 10 * math.log10(255 ** 2 / torch.cat(squared_error).mean().item())


def raw_latent_std(autoencoder: Autoencoder, source: ImageSource) -> float:
    """Standard deviation of sampled, unscaled latents over a source, plain and flipped. DiT scales by one over it."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for indices in torch.arange(len(source)).split(256):
        images = source.images(indices)
        for batch in (images, images.flip(-1)):
            mean, logvar = autoencoder.encode(batch).cpu().chunk(2, 1)
            samples.append(mean + (logvar / 2).exp() * torch.randn(mean.shape, generator=generator))
    return torch.cat(samples).double().std().item()


def train_autoencoder(out: str | Path, source: ImageSource, num_steps: int = 2_000) -> Autoencoder:
    """Train the embedded kind of autoencoder (0.4 M parameters, f=4, 4 channels) and save it as a diffusers folder.

    Loss: squared error on [-1, 1] plus 1e-6 of the KL divergence a latent value. No perceptual or adversarial term:
    it blurs, and at this size nothing else fits. Its scale factor becomes one over the latents' deviation on `source`.
    A KL weight of 1e-4 whitens the latents, and white latents are hard: what a Gaussian model of them cannot predict of
    the noise (`loss_of_gaussian`) rose to 0.17, and DiT-nano learned several times more slowly.
    """
    from diffusers import AutoencoderKL

    if num_steps < 25:
        raise ValueError(f"num_steps is {num_steps}, expected at least 25: the learning rate rises for 5% of them")
    Path(out).mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoencoderKL(
            in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(16, 32, 48), layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
            norm_num_groups=8, mid_block_add_attention=False, sample_size=32).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    learning_rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps, pct_start=0.05)
    generator = torch.Generator().manual_seed(0)
    bar = progress(range(num_steps), desc="autoencoder", unit="step")
    for step in bar:
        x = source.images(torch.randint(len(source), (64,), generator=generator)).float() / 127.5 - 1  # (64, 3, 32, 32)
        flip = torch.rand(64, generator=generator) < 0.5
        x = torch.where(flip[:, None, None, None], x.flip(-1), x).contiguous(memory_format=torch.channels_last)
        posterior = model.encode(x).latent_dist
        latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=generator)
        mse = F.mse_loss(model.decode(latents).sample, x)
        loss = mse + 1e-6 * posterior.kl().mean() / latents[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        learning_rate.step()
        if step % 50 == 0:
            bar.set_postfix(mse=f"{mse.item():.4f}", refresh=False)
    return save_scaled(model, out, source)


def save_scaled(model, out: str | Path, source: ImageSource) -> Autoencoder:
    """Save a trained AutoencoderKL with the scale factor that gives its latents of `source` unit variance."""
    model.register_to_config(scaling_factor=1 / raw_latent_std(Autoencoder(model, str(out), ""), source))
    model.save_pretrained(out)
    return load_autoencoder(out)
