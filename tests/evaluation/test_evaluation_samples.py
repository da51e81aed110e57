import json

import pytest
import torch
from click.testing import CliRunner

from dit_repro.cli import main
from dit_repro.diffusion import NoiseSchedule
from dit_repro.evaluation import Protocol, evaluate, load_classifier
from dit_repro.latents import ImageSource, load_autoencoder
from dit_repro.models import create_model, save_released_checkpoint
from dit_repro.sampling import Guidance, SampleSet, draw_labels

LINEAR = NoiseSchedule.linear(1000)


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = create_model("DiT-nano/4", input_size=8, num_classes=10)
        torch.nn.init.normal_(made.final_layer.linear.weight, std=0.02)
    return made.eval()


def draw(model, folder, count=30, schedule=LINEAR, **settings):
    return SampleSet(model, draw_labels(count, 10), schedule, load_autoencoder("embedded"), folder, "random",
                     **{"steps": "2", **settings})


def test_an_image_is_the_same_whoever_asks_for_it_and_is_sampled_once(model, tmp_path, monkeypatch):
    monkeypatch.setattr("dit_repro.sampling.sample_set.BLOCK", 10)
    whole = draw(model, tmp_path / "a").images(range(30))
    assert whole.shape == (30, 3, 32, 32)
    other, seen = draw(model, tmp_path / "b"), []
    hook = model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    assert torch.equal(other.images([25, 3, 29]), whole[[25, 3, 29]])
    assert sum(seen) == 2 * 20                     # two blocks, two steps
    assert torch.equal(other.images(range(30)), whole)
    assert torch.equal(draw(model, tmp_path / "b").images(range(5, 15)), whole[5:15])
    assert torch.equal(draw(model, tmp_path / "b", count=20).images(range(20)), whole[:20])
    assert sum(seen) == 2 * 30
    hook.remove()
    assert len(set(map(bytes, whole.flatten(1).numpy()))) == 30
    assert not torch.equal(other.images(range(4), lambda latents: 1.5 * latents), whole[:4])


def test_scores_of_a_sample_set_carry_what_it_was_sampled_with(model, tmp_path):
    reference = ImageSource.embedded("test", limit_per_class=4)
    samples = draw(model, tmp_path, guidance=Guidance(1.5))
    scores = evaluate(samples, reference, load_classifier(), cache=tmp_path / "features", **samples.protocol)
    assert scores.protocol.num_steps == 2
    assert "scale=1.5" in scores.protocol.guidance
    assert (scores.protocol.label_policy, scores.protocol.seeds) == ("random", "0 to 29")
    assert scores.protocol.autoencoder_sha256 == load_autoencoder("embedded").sha256
    same = evaluate(samples.images(range(30)), reference, load_classifier(), **samples.protocol)
    assert same.frechet == pytest.approx(scores.frechet, abs=1e-9)


def test_every_change_of_a_sampler_changes_fingerprint_and_cache(model, tmp_path):
    extractor = load_classifier()
    other = create_model("DiT-nano/4", input_size=8, num_classes=10)
    sets = [draw(model, tmp_path), draw(other, tmp_path), draw(model, tmp_path, steps="3"),
            draw(model, tmp_path, schedule=NoiseSchedule.cosine(1000)), draw(model, tmp_path, method="ddim"),
            draw(model, tmp_path, guidance=Guidance(2.0)), draw(model, tmp_path, guidance=Guidance(2.0, channels=None)),
            draw(model, tmp_path, variance="fixed_small"), draw(model, tmp_path, first_seed=7)]
    prints = {Protocol.of(extractor, num_generated=30, num_reference=40, reference_sha256="", **samples.protocol)
              .fingerprint for samples in sets}
    assert len(prints) == len({samples.identity["sha256"] for samples in sets}) == len(sets)
    assert draw(model, tmp_path / "elsewhere", batch_size=7).identity == sets[0].identity


def test_a_checkpoint_is_scored_by_one_command(model, tmp_path, monkeypatch):
    monkeypatch.setenv("DIT_REPRO_WORKSPACE", str(tmp_path / "workspace"))
    save_released_checkpoint(model, tmp_path / "model.safetensors")
    arguments = ["fid", "run", str(tmp_path / "model.safetensors"), "--reference", "embedded", "--features",
                 "classifier", "--count", "12", "--steps", "2", "--out", str(tmp_path / "scores.json")]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 1
    assert "--autoencoder is missing" in ran.output
    monkeypatch.setattr("dit_repro.latents.ImageSource.embedded", lambda split, real=ImageSource.embedded: real(
        split, limit_per_class=4))
    ran = CliRunner().invoke(main, [*arguments, "--autoencoder", "embedded"])
    assert ran.exit_code == 0, ran.output
    assert "12 images against 40" in ran.output
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["protocol"]["checkpoint_sha256"] == draw(model, tmp_path).protocol["checkpoint_sha256"]
