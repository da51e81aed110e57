import json
import re
from dataclasses import replace

import pytest
import torch
from tiny_training import tiny_config

from dit_repro.diffusion import NoiseSchedule, Objective
from dit_repro.training import TrainConfig
from dit_repro.training.config import NUM_TIMESTEPS


def test_defaults_are_the_papers_recipe():
    config = TrainConfig("latents")
    assert (config.learning_rate, config.weight_decay, config.betas) == (1e-4, 0.0, (0.9, 0.999))
    assert (config.global_batch_size, config.num_steps) == (256, 400_000)
    assert (config.ema_decay, config.label_dropout) == (0.9999, 0.1)
    assert (config.clip_norm, config.schedule, config.ema_warmup) == (None, "linear", False)
    assert config.objective == Objective()


def test_json_round_trip_keeps_every_value():
    config = tiny_config("latents", objective=Objective(learn_sigma=False, min_snr_gamma=5.0), betas=(0.8, 0.95),
                         micro_batch_size=2, clip_norm=1.0, schedule="cosine", init="pytorch")
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(("text", "named"), [
    ('{"latents": "l", "lerning_rate": 1}', "lerning_rate"),
    ('{"latents": "l", "objective": {"vb": 1}}', "objective.vb"),
    ('{"model": "DiT-B/2"}', "latents"),
    ("[1]", "JSON object"),
    ("{", "not JSON"),
])
def test_a_config_file_that_cannot_be_meant_names_what_is_wrong(text, named):
    with pytest.raises(ValueError, match=named):
        TrainConfig.from_json(text)


@pytest.mark.parametrize("change", [
    {"num_steps": 0}, {"num_steps": 1.5}, {"num_steps": True}, {"num_steps": "10"}, {"learning_rate": 0.0},
    {"learning_rate": "fast"}, {"schedule": "sigmoid"}, {"precision": "fp8"}, {"betas": (0.9,)}, {"betas": (0.9, 1.0)},
    {"label_dropout": 1.0}, {"ema_decay": 1.0}, {"clip_norm": 0.0}, {"micro_batch_size": 0}, {"keep_last": 0},
    {"checkpoint_every": 3}, {"archive_every": 6}, {"on_alarm": "ignore"}, {"alarm_loss_ratio": 1.0}, {"seed": -1},
    {"fused": 1},
])
def test_a_value_out_of_range_or_of_the_wrong_type_is_named(change):
    (name, value), = change.items()
    with pytest.raises(ValueError, match=re.escape(f"{name} = {value!r}: expected")):
        tiny_config("latents", **change)


@pytest.mark.parametrize("changes", [
    {"on_alarm": "rollback", "archive_every": 0}, {"on_alarm": "skip", "precision": "fp16"},
    {"preview_every": 4, "parallel": "fsdp"},
])
def test_settings_that_contradict_each_other_are_refused(changes):
    with pytest.raises(ValueError, match="expected"):
        tiny_config("latents", **changes)


def test_overrides_reach_every_field_and_keep_types():
    config = tiny_config("latents").override([
        "learning_rate=3e-4", "model=DiT-S/2", "objective.vb_weight=0", "flip=false", "clip_norm=null",
        "betas=[0.9, 0.95]", "weight_decay=1"])
    assert (config.learning_rate, config.model, config.objective.vb_weight, config.flip) == (3e-4, "DiT-S/2", 0, False)
    assert (config.clip_norm, config.betas, config.weight_decay) == (None, (0.9, 0.95), 1.0)
    for bad in ("learning_rat=1", "objective.x=1", "flip", "num_steps=many", "other.vb_weight=1"):
        with pytest.raises(ValueError, match=bad.split("=")[0]):
            config.override([bad])


def test_only_what_makes_another_run_counts_as_a_difference():
    config = tiny_config("latents")
    elsewhere = replace(config, latents="moved", num_steps=50, micro_batch_size=4, keep_last=9, parallel="fsdp")
    assert not config.differences(elsewhere) and config.digest() == elsewhere.digest()
    other = replace(config, seed=1, objective=Objective(vb_weight=0.0))
    assert set(config.differences(other)) == {"seed", "objective"} and config.digest() != other.digest()


def test_the_noise_schedule_is_the_one_that_is_named_over_the_papers_thousand_steps():
    linear, cosine = (tiny_config("latents", schedule=name).noise_schedule() for name in ("linear", "cosine"))
    assert torch.equal(linear.betas, NoiseSchedule.linear(1000).betas) and len(linear.betas) == NUM_TIMESTEPS == 1000
    assert torch.equal(cosine.betas, NoiseSchedule.cosine(1000).betas)


def test_each_part_of_a_recipe_is_in_the_config_and_can_be_switched_alone():
    paper = TrainConfig(latents="store")
    first = paper.with_recipe("post-first")
    assert set(first.differences(paper)) == {"schedule", "objective", "init"}
    assert first.with_recipe("paper") == paper
    written = json.loads(first.override(["schedule=linear"]).to_json())
    assert (written["schedule"], written["objective"]["learn_sigma"], written["init"]) == ("linear", False, "pytorch")
    with pytest.raises(ValueError, match=r"post-second.*paper, post-first"):
        paper.with_recipe("post-second")
