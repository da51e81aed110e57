"""Released checkpoints of every kind, and exchange with diffusers, against diffusers' own model and pipeline."""
import argparse
import json
import re

import pytest
import torch
from click.testing import CliRunner
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import nn

from dit_repro.cli import main
from dit_repro.models import (
    DIT_CONFIGS,
    DiT,
    DiTConfig,
    create_model,
    from_diffusers,
    load_released_checkpoint,
    save_released_checkpoint,
    to_diffusers,
    use_released_timesteps,
)

SMALL = DiTConfig(depth=2, width=128, heads=4, patch_size=2)
CONFIGS = {   # patch, heads, classes, channels and variance all vary
    "learned variance": (SMALL, {"input_size": 8, "num_classes": 10}),
    "noise only, patch 4": (DiTConfig(1, 96, 3, 4), {"input_size": 16, "num_classes": 3, "learn_sigma": False}),
    "a thousand classes": (DiTConfig(3, 72, 1, 2), {"input_size": 8, "in_channels": 3, "num_classes": 1000}),
}


def random_model(config=SMALL, seed=0, **settings):
    torch.manual_seed(seed)
    model = DiT(config, **{"input_size": 8, "num_classes": 10, **settings}).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.05)
    return model


def inputs(model):
    torch.manual_seed(1)
    x = torch.randn(4, model.in_channels, model.input_size, model.input_size)
    return x, torch.tensor([0, 10, 500, 999]), torch.tensor([0, 1, model.num_classes - 1, model.num_classes])


@torch.no_grad()
def assert_same_outputs(model, other):
    x, t, y = inputs(model)
    theirs = other(x, timestep=t, class_labels=y).sample if isinstance(other, DiTTransformer2DModel) else other(x, t, y)
    expected = model(x, t, y)
    assert expected.std() > 0.01   # an agreement of zeros would mean nothing
    torch.testing.assert_close(theirs, expected, atol=1e-5, rtol=1e-5)


def tiny_autoencoder():
    # channels_last, as latents.load_autoencoder leaves it, while weight files must be contiguous
    return AutoencoderKL(block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
                         up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, latent_channels=4,
                         scaling_factor=0.5).to(memory_format=torch.channels_last)


# ---- released checkpoints ----

def write(kind, path, model, other):
    """One file of each kind that exists in the wild; `other` is what must not be loaded by default."""
    state, rest = model.state_dict(), other.state_dict()
    training = {"model": rest, "ema": state, "opt": {"state": {}}, "args": argparse.Namespace(model="DiT-S/2")}
    flat = {f"ema.{k}": v for k, v in state.items()} | {f"model.{k}": v for k, v in rest.items()}
    contents = {
        "plain": state,
        "official training": training,
        "compiled": {f"_orig_mod.{k}": v for k, v in state.items()},
        "ddp": {**training, "ema": {f"module._orig_mod.{k}": v for k, v in state.items()}},
        "blocks compiled": {k.replace(".attn.", "._orig_mod.attn."): v for k, v in state.items()},
        "safetensors": state,
        "training safetensors": {**flat, "optimizer.exp_avg.pos_embed": torch.zeros(1)},
    }
    (save_file if "safetensors" in kind else torch.save)(contents[kind], path)


@pytest.mark.parametrize("kind", ["plain", "official training", "compiled", "ddp", "blocks compiled", "safetensors",
                                  "training safetensors"])
def test_every_kind_of_checkpoint_loads_and_computes_the_same(kind, tmp_path):
    model = random_model(learn_sigma=False)
    path = tmp_path / ("a.safetensors" if "safetensors" in kind else "a.pt")
    write(kind, path, model, random_model(seed=5, learn_sigma=False))
    loaded = load_released_checkpoint(path)
    assert not loaded.training and not loaded.pos_embed.requires_grad and loaded.blocks[0].attn.qkv.weight.requires_grad
    assert (loaded.config, loaded.num_classes, loaded.input_size, loaded.learn_sigma) == (SMALL, 10, 8, False)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
    assert_same_outputs(model, loaded)


def test_the_caller_chooses_ema_or_model(tmp_path):
    ema, online = random_model(), random_model(seed=5)
    write("official training", tmp_path / "a.pt", ema, online)
    assert_same_outputs(online, load_released_checkpoint(tmp_path / "a.pt", weights="model"))
    torch.save({"model": online.state_dict()}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"has no 'ema' weights, only 'model': pass weights="):
        load_released_checkpoint(tmp_path / "b.pt")
    with pytest.raises(ValueError, match="weights 'best': expected 'ema' or 'model'"):
        load_released_checkpoint(tmp_path / "b.pt", weights="best")


def test_the_published_layout_of_xl_is_recognized_by_its_shapes(tmp_path):
    model = DiT(DiTConfig(1, 1152, 16, 2))   # one block of XL/2: the published file has 28
    save_released_checkpoint(model, tmp_path / "xl.safetensors")
    loaded = load_released_checkpoint(tmp_path / "xl.safetensors")
    assert loaded.config == DiTConfig(1, 1152, 16, 2) and loaded.num_classes == 1000 and loaded.input_size == 32
    assert loaded.learn_sigma


def test_half_precision_weights_are_loaded_as_float32(tmp_path):
    torch.save(random_model().half().state_dict(), tmp_path / "a.pt")
    assert {p.dtype for p in load_released_checkpoint(tmp_path / "a.pt").parameters()} == {torch.float32}


def test_an_unknown_width_asks_for_a_name(tmp_path):
    torch.save(random_model(DiTConfig(1, 64, 2, 2)).state_dict(), tmp_path / "a.pt")
    widths = sorted({config.width for config in DIT_CONFIGS.values()})   # other tests may have added their own
    with pytest.raises(ValueError, match=re.escape(f"width 64, none of {widths}") + ".*pass name="):
        load_released_checkpoint(tmp_path / "a.pt")
    with pytest.raises(ValueError, match="unknown model 'DiT-9', expected one of DiT-S/8"):
        load_released_checkpoint(tmp_path / "a.pt", name="DiT-9")


def test_mismatches_name_the_first_keys_and_shapes(tmp_path):
    state = random_model().state_dict()
    state["blocks.0.mlp.fc1.weight"] = torch.zeros(512, 100)
    del state["blocks.1.attn.proj.bias"]
    state["blocks.1.norm1.weight"] = torch.ones(128)
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ValueError) as error:
        load_released_checkpoint(tmp_path / "a.pt")
    assert ("blocks.0.mlp.fc1.weight is (512, 100), expected (512, 128); blocks.1.attn.proj.bias is missing, "
            "expected (128,); blocks.1.norm1.weight is (128,), expected no such key") in str(error.value)
    save_released_checkpoint(random_model(), tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"does not fit a DiT of depth 12, width 384, patch 2: pos_embed is \(1, 16, "
                                         r"128\), expected \(1, 16, 384\); .* and \d+ more"):
        load_released_checkpoint(tmp_path / "b.pt", name="DiT-S/2")


class Malicious:
    def __reduce__(self):
        return exec, ("raise SystemExit('code in a checkpoint was run')",)


@pytest.mark.parametrize(("content", "name", "message"), [
    (b"<html>not found</html>", "a.pt", "is not a weights file"),
    (b"", "a.pt", "is not a weights file"),
    (b"\x00" * 40, "a.safetensors", "is not a weights file"),
    (Malicious(), "a.pt", "is not a weights file that loads without running code"),
    (torch.zeros(3), "a.pt", "holds a Tensor, expected a state dict"),
    ({"conv1.weight": torch.zeros(3), "epoch": 3}, "a.pt",
     "is no DiT checkpoint: it has no 'x_embedder.proj.weight'; its first tensors: conv1.weight"),
])
def test_a_file_that_is_no_checkpoint_gets_one_clear_line(content, name, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=message) as error:
        load_released_checkpoint(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nowhere\.pt"):
        load_released_checkpoint(tmp_path / "nowhere.pt")


# ---- diffusers ----

@pytest.mark.parametrize("kind", CONFIGS)
def test_forward_outputs_agree_with_diffusers_both_ways(kind, tmp_path):
    config, settings = CONFIGS[kind]
    model = random_model(config, **settings)
    to_diffusers(model, tmp_path / "pipeline")
    pipeline = DiTPipeline.from_pretrained(tmp_path / "pipeline", vae=None)
    assert_same_outputs(model, use_released_timesteps(pipeline.transformer))   # with conditions and the null label
    back = from_diffusers(tmp_path / "pipeline")
    assert back.num_classes == model.num_classes and back.config == config and not back.training
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in model.state_dict().items())


def stock_transformer(share_embedders=True):
    """A diffusers model as diffusers initializes it, nothing of ours in it; the shared embedders tied as in DiT."""
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=32, out_channels=8, num_layers=3,
                                        sample_size=8, num_embeds_ada_norm=10).eval()
    if share_embedders:
        for block in transformer.transformer_blocks[1:]:
            block.norm1.emb.load_state_dict(transformer.transformer_blocks[0].norm1.emb.state_dict())
    return transformer


def test_a_model_made_by_diffusers_alone_is_read_and_agrees(tmp_path):
    transformer = stock_transformer()
    transformer.save_pretrained(tmp_path / "transformer")   # the transformer folder itself, norm_eps 1e-5
    model = from_diffusers(tmp_path / "transformer", frequency_shift=1)
    assert_same_outputs(model, transformer)


def test_diffusers_alone_computes_other_timesteps_than_dit():
    """The reason for `use_released_timesteps`: should diffusers change, this fails and the correction can go."""
    embedder = stock_transformer().transformer_blocks[0].norm1.emb.time_proj
    t = torch.tensor([0.0, 10.0, 999.0])
    model = random_model()
    ours = model.t_embedder
    waves = []
    ours.mlp[0].register_forward_pre_hook(lambda module, args: waves.append(args[0]))
    ours(t)
    ours.frequency_shift = 1
    ours(t)
    assert (waves[0] - embedder(t)).abs().max() > 0.5
    torch.testing.assert_close(waves[1], embedder(t), atol=1e-6, rtol=0)


def test_the_layout_of_the_facebook_folder_is_read(tmp_path):
    """An older config without norm_eps, pickled weights, the position table among them, released timesteps."""
    model = random_model()
    to_diffusers(model, tmp_path / "a")
    folder = tmp_path / "a" / "transformer"
    config = json.loads((folder / "config.json").read_text())
    del config["norm_eps"]
    (folder / "config.json").write_text(json.dumps({**config, "_class_name": "Transformer2DModel",
                                                    "num_vector_embeds": None}))
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    torch.save({**state, "pos_embed.pos_embed": model.pos_embed.data}, folder / "diffusion_pytorch_model.bin")
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    assert_same_outputs(model, from_diffusers(tmp_path / "a"))


def test_weights_in_shards_are_read(tmp_path):
    model = random_model()
    to_diffusers(model, tmp_path / "a")
    folder = tmp_path / "a" / "transformer"
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    for part, keys in enumerate((list(state)[::2], list(state)[1::2]), start=1):
        shard = folder / f"diffusion_pytorch_model-{part:05d}-of-00002.safetensors"
        save_file({key: state[key] for key in keys}, shard)
    assert_same_outputs(model, from_diffusers(folder))


def test_the_pipeline_loads_and_samples_with_guidance_and_class_names(tmp_path):
    names = ["T-shirt/top", *(f"class {k}" for k in range(1, 10))]
    to_diffusers(random_model(), tmp_path / "pipeline", tiny_autoencoder(), names)
    pipeline = DiTPipeline.from_pretrained(tmp_path / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    labels = pipeline.get_label_ids(["T-shirt/top", "class 9"])
    assert labels == [0, 9]
    images = pipeline(labels, num_inference_steps=2, output_type="np").images   # guidance 4: its null class is 1000
    assert images.shape == (2, 16, 16, 3)
    assert not (images != images).any()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_scheduler_has_the_schedule_the_model_was_trained_with(schedule, tmp_path):
    to_diffusers(random_model(), tmp_path / "a", schedule=schedule)
    scheduler = DDIMScheduler.from_pretrained(tmp_path / "a" / "scheduler")
    golden = {"linear": (0.078587, 4.0358e-5), "cosine": (0.4923, 2.43e-9)}[schedule]
    assert scheduler.alphas_cumprod[499].item() == pytest.approx(golden[0], rel=1e-2)
    assert scheduler.alphas_cumprod[999].item() == pytest.approx(golden[1], rel=1e-2)
    assert not scheduler.config.clip_sample


def test_pipeline_and_this_package_sample_the_same_image(tmp_path):
    """Two DDIM steps from one noise: the pipeline's loop against the same loop around our model."""
    model = random_model()
    to_diffusers(model, tmp_path / "a", tiny_autoencoder())
    pipeline = DiTPipeline.from_pretrained(tmp_path / "a")
    use_released_timesteps(pipeline.transformer)
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline([3], guidance_scale=1, num_inference_steps=2, generator=torch.Generator().manual_seed(7),
                     output_type="pt").images
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(7))
    scheduler = DDIMScheduler.from_pretrained(tmp_path / "a" / "scheduler")
    scheduler.set_timesteps(2)
    with torch.no_grad():
        for t in scheduler.timesteps:
            noise = model(latents, t[None], torch.tensor([3]))[:, :4]
            latents = scheduler.step(noise, t, latents).prev_sample
        expected = (pipeline.vae.decode(latents / 0.5).sample / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(image, expected, atol=1e-4, rtol=0)


def changed(change):
    model = random_model()
    with torch.no_grad():
        change(model)
    return model


def swap_axes(model):
    model.pos_embed.copy_(model.pos_embed.roll(64, dims=2))


def affine_norms(model):
    for block in model.blocks:
        block.norm1 = nn.LayerNorm(128, eps=1e-6)
        nn.init.constant_(block.norm1.weight, 1.5)


@pytest.mark.parametrize(("model", "settings", "message"), [
    (lambda: nn.Linear(1, 1), {}, "Linear has no counterpart in DiTPipeline"),
    (lambda: random_model(num_classes=1001), {}, "1001 classes: DiTPipeline takes class 1000 for the null class"),
    (lambda: changed(swap_axes), {}, "diffusers computes something else from these weights"),
    (lambda: changed(affine_norms), {}, "diffusers computes something else from these weights"),
    (random_model, {"class_names": ["a"]}, "1 class names for a model of 10 classes"),
    (random_model, {"schedule": "sigmoid"}, "schedule 'sigmoid': expected one of linear, cosine"),
    (lambda: random_model(in_channels=3), {"autoencoder": tiny_autoencoder()}, "4 latent channels, the model 3"),
])
def test_what_diffusers_cannot_express_is_refused_and_nothing_is_written(model, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        to_diffusers(model(), tmp_path / "a", **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        to_diffusers(random_model(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_transformers_that_dit_cannot_express_are_refused(tmp_path):
    stock_transformer(share_embedders=False).save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match=r"transformer_blocks\.1\.norm1\.emb\.class_embedder.* differs from block 0"):
        from_diffusers(tmp_path / "a")
    tiny_autoencoder().save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match="is a AutoencoderKL with norm_type None, expected a DiT"):
        from_diffusers(tmp_path / "b")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        from_diffusers(tmp_path)


def test_convert_command_goes_to_diffusers_and_back(tmp_path):
    model, runner = random_model(), CliRunner()
    write("training safetensors", tmp_path / "run.safetensors", model, random_model(seed=5))
    (tmp_path / "names.txt").write_text("\n".join(f"class {k}" for k in range(10)) + "\n")
    done = runner.invoke(main, ["convert", str(tmp_path / "run.safetensors"), str(tmp_path / "pipeline"), "--to",
                                "diffusers", "--class-names", str(tmp_path / "names.txt")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "pipeline" / "model_index.json").read_text())["id2label"]["9"] == "class 9"
    done = runner.invoke(main, ["convert", str(tmp_path / "pipeline"), str(tmp_path / "plain.pt"), "--to", "released"])
    assert done.exit_code == 0, done.output
    assert_same_outputs(model, load_released_checkpoint(tmp_path / "plain.pt"))
    failed = runner.invoke(main, ["convert", str(tmp_path / "names.txt"), str(tmp_path / "x.pt"), "--to", "released"])
    assert failed.exit_code == 1 and failed.output.startswith("dit-repro: ") and failed.output.count("\n") == 1


def test_a_freshly_created_model_survives_the_round_trip(tmp_path):
    torch.manual_seed(0)
    model = create_model("DiT-nano/4", input_size=8, num_classes=10)   # zero output: nothing to compare, all to keep
    to_diffusers(model, tmp_path / "a")
    back = from_diffusers(tmp_path / "a")
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in model.state_dict().items())
