"""The autoencoder: loading by every route, pixel conventions, and training the embedded one."""
import hashlib
import json
import math
import pickle

import pytest
import safetensors.torch
import torch
from diffusers import AutoencoderKL

from dit_repro.latents import ImageSource, load_autoencoder, psnr, train_autoencoder
from dit_repro.latents.autoencoder import raw_latent_std


def small_model(**changes):
    torch.manual_seed(0)
    return AutoencoderKL(**{
        "in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (8, 8), "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4, "sample_size": 16, **changes})


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("autoencoder")
    small_model().save_pretrained(folder)
    return folder


def random_images(n=3, size=16, seed=0):
    return torch.randint(256, (n, 3, size, size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_encode_gives_the_moments_of_diffusers_on_pixels_in_minus_one_to_one(local):
    autoencoder, images = load_autoencoder(local), random_images()
    with torch.no_grad():
        posterior = small_model().eval().encode(images / 255 * 2 - 1).latent_dist
    moments = autoencoder.encode(images)
    assert moments.shape == (3, 8, 8, 8) and moments.dtype == torch.float32
    torch.testing.assert_close(moments, torch.cat([posterior.mean, posterior.logvar], 1), rtol=1e-4, atol=1e-5)


def test_decode_undoes_the_scale_and_rounds_to_the_nearest_value(local):
    autoencoder = load_autoencoder(local)
    latents = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(1)) * 3
    with torch.no_grad():
        exact = small_model().eval().decode(latents / 0.18215).sample * 127.5 + 127.5
    assert (exact < -0.5).any() or (exact > 0).any()
    images = autoencoder.decode(latents)
    assert images.dtype == torch.uint8 and images.shape == (4, 3, 16, 16)
    assert (images - exact.clamp(0, 255)).abs().max() <= 0.5 + 1e-3  # truncation would be off by nearly 1
    with torch.no_grad():
        autoencoder.model.decoder.conv_out.weight.zero_()
        for bias, value in ((3.0, 255), (-3.0, 0), (0.6 / 127.5, 128), (0.4 / 127.5, 128), (-0.6 / 127.5, 127)):
            autoencoder.model.decoder.conv_out.bias.fill_(bias)
            assert (autoencoder.decode(latents) == value).all()


def test_autoencoder_is_frozen_and_builds_no_graph(local):
    autoencoder = load_autoencoder(local)
    assert not autoencoder.model.training
    assert not any(parameter.requires_grad for parameter in autoencoder.model.parameters())
    latents = torch.zeros(1, 4, 8, 8, requires_grad=True)
    assert not autoencoder.encode(random_images()).requires_grad
    assert not autoencoder.decode(latents).requires_grad and torch.is_grad_enabled()


def test_identity_is_the_name_and_the_checksum_of_the_weights_file(local):
    autoencoder = load_autoencoder(local)
    weights = local / "diffusion_pytorch_model.safetensors"
    assert autoencoder.sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert autoencoder.id == str(local)
    assert (autoencoder.latent_channels, autoencoder.downsampling, autoencoder.scale_factor) == (4, 2, 0.18215)


def test_wrong_tensors_are_refused_with_what_was_expected(local):
    autoencoder = load_autoencoder(local)
    for bad in (random_images().float(), random_images()[:, :1], random_images()[0]):
        with pytest.raises(ValueError, match=r"expected images \(N, 3, H, W\) uint8"):
            autoencoder.encode(bad)
    with pytest.raises(ValueError, match=r"15x15 pixels.*multiples of 2"):
        autoencoder.encode(random_images(size=15))
    with pytest.raises(ValueError, match=r"expected latents \(N, 4, h, w\), got \(1, 8, 8, 8\)"):
        autoencoder.decode(torch.zeros(1, 8, 8, 8))


def write_released_layout(folder):
    """Small random weights under the names and the config of the released Stable Diffusion autoencoders of 2022."""
    model = small_model()
    old_names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = {}
    for key, value in model.state_dict().items():
        for new, old in old_names.items():
            key = key.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
        state[key] = value
    assert "encoder.mid_block.attentions.0.query.weight" in state
    config = {"_class_name": "AutoencoderKL", "_diffusers_version": "0.4.2", "act_fn": "silu",
              **{key: model.config[key] for key in (
                  "block_out_channels", "down_block_types", "in_channels", "latent_channels", "layers_per_block",
                  "norm_num_groups", "out_channels", "sample_size", "up_block_types")}}
    (folder / "config.json").write_text(json.dumps(config))
    return model, state


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_folder_in_the_layout_of_the_released_autoencoders_loads(tmp_path, suffix):
    model, state = write_released_layout(tmp_path)
    if suffix == "bin":
        torch.save(state, tmp_path / "diffusion_pytorch_model.bin")
    else:
        safetensors.torch.save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    autoencoder = load_autoencoder(tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(autoencoder.model.state_dict()[key], value), key
    assert autoencoder.scale_factor == 0.18215  # that config has none: the default of the first Stable Diffusion


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path):
    _, state = write_released_layout(tmp_path)
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    key = "decoder.conv_in.weight"
    for broken in ({k: v for k, v in state.items() if k != key}, {**state, "decoder.extra": torch.zeros(2)},
                   {**state, key: state[key][:1]}):
        safetensors.torch.save_file(broken, weights)
        with pytest.raises(ValueError, match=r"model\.safetensors.*(decoder\.conv_in|decoder\.extra)"):
            load_autoencoder(tmp_path)
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_autoencoder(tmp_path)


def test_pickled_code_in_a_bin_file_is_not_run(tmp_path):
    write_released_layout(tmp_path)
    victim = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return open, (str(victim), "w")

    with open(tmp_path / "diffusion_pytorch_model.bin", "wb") as file:
        pickle.dump({"decoder.conv_in.weight": Payload()}, file, protocol=2)
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_autoencoder(tmp_path)
    torch.save({"decoder.conv_in.weight": Payload()}, tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_autoencoder(tmp_path)
    assert not victim.exists()


def test_folders_that_are_no_autoencoder_are_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected embedded, stabilityai/sd-vae-ft-ema"):
        load_autoencoder("stabilityai/sd-vae")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_autoencoder(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    with pytest.raises(FileNotFoundError, match=r"no diffusion_pytorch_model\.safetensors"):
        load_autoencoder(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors").touch()
    with pytest.raises(ValueError, match="UNet2DModel, expected AutoencoderKL"):
        load_autoencoder(tmp_path)


def test_autoencoder_that_shifts_latents_is_refused(tmp_path):
    small_model(shift_factor=0.1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"shift_factor 0\.1"):
        load_autoencoder(tmp_path)


def test_released_name_without_network_says_where_to_get_it_and_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError) as error:
        load_autoencoder("stabilityai/sd-vae-ft-mse")
    for part in ("https://huggingface.co/stabilityai/sd-vae-ft-mse", "335 MB", "config.json",
                 "diffusion_pytorch_model.safetensors", "folder's path"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_the_hub_is_asked_once_where_it_does_not_answer(tmp_path, monkeypatch):
    asked = []

    def unreachable(url, **_):
        asked.append(url)
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("tried again"))
    with pytest.raises(FileNotFoundError, match=r"could not be reached \(ConnectionError\)"):
        load_autoencoder("stabilityai/sd-vae-ft-mse")
    assert asked == ["https://huggingface.co/stabilityai/sd-vae-ft-mse/resolve/main/config.json"]


@pytest.mark.parametrize("device", ["gpu", "cuda:97", "cpu:x"])
def test_a_device_that_is_not_there_is_named_before_anything_is_loaded(device):
    with pytest.raises(ValueError, match=f"device '{device}': this machine, .* expected cpu, or cuda"):
        load_autoencoder("embedded", device)


def test_released_name_is_read_from_the_local_cache_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--stabilityai--sd-vae-ft-ema"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    _, state = write_released_layout(snapshot)
    safetensors.torch.save_file(state, snapshot / "diffusion_pytorch_model.safetensors")
    autoencoder = load_autoencoder("stabilityai/sd-vae-ft-ema")
    assert autoencoder.id == "stabilityai/sd-vae-ft-ema" and autoencoder.scale_factor == 0.18215


class Shifted:
    """Stands for an autoencoder that is off by `error` everywhere, or only in a border of two pixels."""
    scale_factor = 2.0

    def __init__(self, error, border_only):
        self.error, self.border_only = error, border_only

    def encode(self, images):
        return torch.cat([images, images], 1).float()

    def decode(self, latents):
        images = (latents / self.scale_factor).to(torch.uint8)
        wrong = images + self.error
        if self.border_only:
            wrong[..., 2:-2, 2:-2] = images[..., 2:-2, 2:-2] + 1
        return wrong


def test_psnr_has_its_closed_form_and_leaves_the_border_out():
    images = torch.full((5, 3, 8, 8), 100, dtype=torch.uint8)
    assert psnr(Shifted(10, False), images) == pytest.approx(20 * math.log10(255 / 10))
    assert psnr(Shifted(10, True), images, border=2) == pytest.approx(20 * math.log10(255))


def test_embedded_autoencoder_reaches_26_decibels_on_held_out_images():
    autoencoder, source = load_autoencoder("embedded"), ImageSource.embedded("test", limit_per_class=50)
    images = source.images(range(500))
    assert psnr(autoencoder, images) >= 26
    assert psnr(autoencoder, images, border=2) >= 26
    assert autoencoder.encode(images[:2]).shape == (2, 8, 8, 8)


def test_embedded_autoencoder_has_unit_variance_and_a_small_safetensors_file():
    autoencoder = load_autoencoder("embedded")
    std = raw_latent_std(autoencoder, ImageSource.embedded("train", limit_per_class=50))
    assert std * autoencoder.scale_factor == pytest.approx(1, abs=0.03)  # exact on all 1,600 a class
    from dit_repro.latents.images import EMBEDDED
    files = sorted((EMBEDDED / "autoencoder").iterdir())
    assert [file.name for file in files] == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert files[1].stat().st_size < 2e6


def test_training_starts_from_one_seed_learns_and_ends_with_unit_variance(tmp_path):
    source = ImageSource.embedded("train", limit_per_class=8)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    trained = train_autoencoder(tmp_path, source, num_steps=25)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert raw_latent_std(trained, source) * trained.scale_factor == pytest.approx(1, abs=1e-4)
    images = source.images(range(80))
    grey = torch.full_like(images, int(images.float().mean()))
    baseline = 10 * math.log10(255 ** 2 / (images.float() - grey.float()).square().mean().item())
    assert psnr(trained, images) > baseline + 1
    with pytest.raises(ValueError, match="num_steps is 24, expected at least 25"):
        train_autoencoder(tmp_path, source, num_steps=24)
