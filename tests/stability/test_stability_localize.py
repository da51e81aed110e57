from dataclasses import replace

import pytest
import torch

from dit_repro.latents import ImageSource, load_autoencoder
from dit_repro.stability import FAULTS, capture_state, capture_step, localize_first_broken, state_before
from dit_repro.stability.replay import relative_error


@pytest.fixture(scope="module")
def autoencoder():
    return load_autoencoder("embedded")


@pytest.fixture(scope="module")
def images():
    """Eight embedded images, tinted: grey ones cannot tell one order of channels from another."""
    tint = torch.tensor([1.0, 0.7, 0.4])[:, None, None]
    return (ImageSource.embedded("test").images(range(8)) * tint).round().to(torch.uint8)


@pytest.fixture(scope="module")
def start(tiny_run):
    return state_before(tiny_run, 12)


# What happens before the network is in float32 whatever the precision.
IN_BF16 = [name for name, fault in FAULTS.items() if fault.stage.split()[0] in ("activation", "gradients", "update")]


@pytest.mark.parametrize("fault, precision", [*((name, "fp32") for name in FAULTS),
                                              *((name, "bf16") for name in IN_BF16)])
def test_planted_fault_is_found_and_named(start, tiny_run, autoencoder, images, fault, precision):
    state, store = start
    pixels = {"images": images, "autoencoder": autoencoder} if FAULTS[fault].needs_images else {}
    capture = capture_state(state, tiny_run.config(), store, fault=fault, precision=precision, **pixels)
    finding = localize_first_broken(capture, pixels.get("autoencoder"))
    hidden = precision == "bf16" and FAULTS[fault].below_bf16
    assert finding.stage == (None if hidden else FAULTS[fault].stage), finding.table().to_string()


@pytest.mark.parametrize("settings", [
    {"seed": 1}, {"seed": 2, "precision": "bf16"}, {"seed": 3, "precision": "fp16"},
    {"seed": 4, "clip_norm": 0.05, "micro_batch_size": 3, "schedule": "cosine", "weight_decay": 0.1}], ids=str)
def test_clean_steps_name_nothing(train, settings):
    run = train(**settings)
    for step in (1, 12):
        finding = localize_first_broken(capture_step(run, step))
        assert finding.first is None, finding.table().to_string()


def test_clean_images_name_nothing_and_a_store_is_checked_against_its_images(start, tiny_run, autoencoder, images):
    state, store = start
    capture = capture_state(state, tiny_run.config(), store, images=images, autoencoder=autoencoder)
    assert localize_first_broken(capture, autoencoder).first is None
    stored = replace(capture, batch={name: tensor for name, tensor in capture.batch.items() if name != "images"})
    assert localize_first_broken(stored, autoencoder, images).first is None
    assert localize_first_broken(stored, autoencoder, images.flip(1)).stage == "channel order"
    assert localize_first_broken(stored, autoencoder, images.flip(0)).stage == "encoder"
    with pytest.raises(ValueError, match="holds no images"):
        localize_first_broken(stored, autoencoder)


def test_of_two_faults_the_earlier_is_named_and_the_later_still_shows(start, tiny_run):
    state, store = start
    good, bad = (capture_state(state, tiny_run.config(), store, fault=fault) for fault in (None, "velocity target"))
    late = capture_state(state, tiny_run.config(), store, fault="stale average")
    both = {name: (late if name.startswith("ema.") else bad).record[name] for name in good.record}
    finding = localize_first_broken(replace(bad, record=both))
    assert [check.stage for check in finding.checks if check.broken] == ["target", "EMA"]
    assert "velocity" in finding.first.hint


def test_draw_of_another_step_is_named(start, tiny_run):
    state, store = start
    capture = capture_state(state, tiny_run.config(), store)
    other = replace(capture, batch={**capture.batch, "t": capture.batch["t"].roll(1)})
    assert (localize_first_broken(other).first.stage, localize_first_broken(other).first.quantity) == ("draws", "t")


def test_a_step_on_other_kernels_names_nothing(start, tiny_run):
    """Other kernels round differently, as other hardware would."""
    state, store = start
    with torch.backends.mkldnn.flags(enabled=False):
        captures = [capture_state(state, tiny_run.config(), store, precision=name) for name in ("fp32", "bf16")]
    here = capture_state(state, tiny_run.config(), store)
    assert any(not torch.equal(here.record[name], value) for name, value in captures[0].record.items())
    for capture in captures:
        assert localize_first_broken(capture).first is None, localize_first_broken(capture).table().to_string()


def test_what_is_not_finite_is_named_with_its_reason(start, tiny_run, train):
    state, store = start
    capture = capture_state(state, tiny_run.config(), store)
    broken = {**capture.before, "model.blocks.1.mlp.fc1.weight": torch.full((128, 32), torch.nan)}
    finding = localize_first_broken(replace(capture, before=broken))
    assert finding.stage == "state before" and "blocks.1.mlp.fc1.weight" in finding.first.hint
    half = train(precision="fp16")
    state, store = state_before(half, 9)
    state.scaler.load_state_dict({**state.scaler.state_dict(), "scale": 2.0**60})
    finding = localize_first_broken(capture_state(state, half.config(), store))
    assert finding.stage == "gradients" and "out of this format's range" in finding.first.hint


def test_one_broken_sample_is_not_averaged_away():
    reference = torch.ones(1000, 4)
    value = reference.clone()
    value[7, 0] = 1.5
    assert relative_error([value], [reference]) == pytest.approx(0.25)
    value[7, 0] = torch.nan
    assert relative_error([value], [reference]) == float("inf")
    assert relative_error([reference[:5]], [reference]) == float("inf")
