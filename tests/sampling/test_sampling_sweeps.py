from functools import partial
from pathlib import Path

import diffusers
import pandas as pd
import pytest
import torch
from torch import nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.sampling import (
    CollapseDetector,
    Guidance,
    cells,
    clamp_x0,
    dynamic_threshold,
    sample,
    sweep,
    wilson_interval,
)

LINEAR, COSINE = NoiseSchedule.linear(1000), NoiseSchedule.cosine(1000)


class Tiny(nn.Module):
    """With gain 1 the exact model of unit normal data, but labels of 5 and above, the null one too, are driven out."""
    in_channels, input_size, num_classes, learn_sigma = 4, 4, 10, False

    def __init__(self, gain=1.0):
        super().__init__()
        self.gain, self.calls, self.fail_at = nn.Parameter(torch.tensor(gain)), 0, None

    def forward(self, x, t, y):
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        a = LINEAR.alphas_cumprod[t].float().view(-1, 1, 1, 1)
        return self.gain * (1 - a).sqrt() * x - torch.where(y >= 5, 3.0, 0.0).view(-1, 1, 1, 1)


def decode(latents):
    return (128 + 30 * latents[:, :3]).round().clamp(0, 255).to(torch.uint8)


REAL = torch.randn(1000, 4, 4, 4, generator=torch.Generator().manual_seed(0))
DETECTOR = CollapseDetector.fit(decode(REAL), REAL, quantile=0.01)
CELLS = {(name, scale): {"labels": label, "guidance": Guidance(scale)}
         for name, label in (("inside", 1), ("outside", 7)) for scale in (1.0, 4.0)}
CELL = {("a cell",): {}}


def run(model, folder, cells=CELLS, names=("class", "scale"), **changes):
    shared = {"model": model, "schedule": LINEAR, "steps": "5", "seeds": [3, 4, 5], **changes}
    return sweep(names, cells, folder, decode=decode, detector=DETECTOR, **shared)


def calls(model, *arguments, **changes) -> int:
    """Forward passes that a sweep needs."""
    before = model.calls
    run(model, *arguments, **changes)
    return model.calls - before


def test_rows_are_what_sample_and_the_detector_give(tmp_path):
    result = run(Tiny(), tmp_path, steps="50")
    assert list(result.rows.columns[:4]) == ["class", "scale", "label", "seed"]
    assert list(result.rows.seed) == [3, 4, 5] * 4 and list(result.rows.label) == [1] * 6 + [7] * 6
    drawn = sample(Tiny(), [7, 7, 7], LINEAR, "50", seeds=[3, 4, 5], guidance=Guidance(4.0))
    assert torch.equal(result.latents[9:], drawn) and torch.equal(result.images[9:], decode(drawn))
    expected = pd.concat([DETECTOR.statistics(decode(drawn), drawn), DETECTOR.detect(decode(drawn), drawn)], axis=1)
    pd.testing.assert_frame_equal(result.rows.loc[9:, list(expected)].reset_index(drop=True), expected)
    collapsed = result.rows[result.rows.collapsed]
    assert list(collapsed.index) == list(range(3, 12))  # guidance drives even the label inside away from the null one
    assert all(collapsed[kind][i] for i, kind in collapsed.result.items())
    assert set(result.rows.result[~result.rows.collapsed]) == {"image"}


def test_second_sweep_reads_the_same_from_disk_and_calls_no_model(tmp_path):
    model = Tiny()
    first = run(model, tmp_path)
    made = model.calls
    second = run(model, tmp_path)
    assert model.calls == made > 0
    pd.testing.assert_frame_equal(first.rows, second.rows)  # with the seconds of the first
    assert torch.equal(first.latents, second.latents)


def test_interrupted_sweep_keeps_its_cells_and_goes_on_with_the_next(tmp_path):
    model = Tiny()
    whole = calls(Tiny(), tmp_path / "whole")
    model.fail_at = 13  # in the third of four cells of five passes
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "cut")
    assert len(list((tmp_path / "cut").iterdir())) == 2
    model.fail_at = None
    assert calls(model, tmp_path / "cut") == whole - 10
    assert not any(child._forward_pre_hooks for child in model.modules())


def test_other_weights_are_other_cells_and_equal_weights_the_same(tmp_path):
    first = run(Tiny(1.0), tmp_path)
    assert calls(Tiny(1.0), tmp_path) == 0
    other = Tiny(0.8)
    second = run(other, tmp_path)
    assert other.calls > 0 and not torch.equal(first.latents, second.latents)
    with torch.no_grad():
        other.gain.fill_(1.0)  # the same object, other weights
    assert torch.equal(run(other, tmp_path).latents, first.latents)


@pytest.mark.parametrize("change", [
    {"seeds": [3, 4, 6]}, {"labels": 2}, {"steps": "4"}, {"schedule": COSINE}, {"method": "ddim"},
    {"method": "ddim", "eta": 0.5}, {"variance": "fixed_large"}, {"guidance": Guidance(2.0)},
    {"guidance": Guidance(1.0, channels=None)}, {"x0_transform": clamp_x0(2.0)}, {"x0_transform": clamp_x0(3.0)},
    {"x0_transform": dynamic_threshold(99.0, 2.0)}, {"epsilon_scale": 1.01},
    {"method": diffusers.DDIMScheduler}, {"method": diffusers.DDIMScheduler(set_alpha_to_one=False)}])
def test_every_setting_that_changes_images_makes_another_cell(tmp_path, change):
    model = Tiny()
    settings = {"names": ("name",), "cells": CELL, "labels": 1}
    run(model, tmp_path, **settings)
    assert calls(model, tmp_path, **{**settings, **change}) > 0
    assert calls(model, tmp_path, **{**settings, **change}) == 0
    assert calls(model, tmp_path, **settings) == 0


def test_names_batches_and_ways_to_say_the_same_find_the_same_cell(tmp_path):
    model = Tiny()
    run(model, tmp_path, names=("name",), cells=CELL, labels=1)
    same = {"steps": 5, "seeds": range(3, 6), "labels": torch.tensor([1, 1, 1]), "batch_size": 2,
            "guidance": Guidance(1), "method": "ddpm", "epsilon_scale": 1}
    assert calls(model, tmp_path, names=("other", "names"), cells={("x", 0): {}}, **same) == 0


def test_autocast_makes_another_cell(tmp_path):
    model = Tiny()
    run(model, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        assert calls(model, tmp_path) > 0
    assert calls(model, tmp_path) == 0


def test_corrected_sampler_samples_again(tmp_path, monkeypatch):
    model, corrected = Tiny(), tmp_path / "solvers.py"
    run(model, tmp_path / "cells")
    corrected.write_text(Path(cells.solvers.__file__).read_text() + "# corrected\n")
    monkeypatch.setattr(cells.solvers, "__file__", str(corrected))
    assert calls(model, tmp_path / "cells") > 0


class Scheduler:
    """As those of diffusers, whose private settings hold a set in the order of this process's hashes."""
    from_config = None

    def __init__(self, order, untouched):
        self.config = {"solver_order": order, "_use_default_values": untouched}


def test_address_of_a_scheduler_does_not_depend_on_the_process():
    """Else a sweep would start over with each kernel."""
    address = cells._describe(Scheduler(2, ["beta_start", "beta_end"]), "method")
    assert address == cells._describe(Scheduler(2, ["beta_end", "beta_start"]), "method")
    assert address != cells._describe(Scheduler(3, ["beta_start", "beta_end"]), "method")
    private = {name for name in diffusers.DDIMScheduler().config if name.startswith("_")}
    assert "_use_default_values" in private  # what this is about


def test_damaged_cell_is_made_again(tmp_path):
    model = Tiny()
    first = run(model, tmp_path)
    damaged = sorted(tmp_path.iterdir())[1]
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert torch.equal(run(model, tmp_path).latents, first.latents)
    assert calls(model, tmp_path) == 0


def test_model_may_be_loaded_when_its_cells_come_and_is_held_alone(tmp_path):
    import gc
    import weakref
    alive, loaded = [], []

    def load(gain):
        gc.collect()
        assert not any(reference() is not None for reference in alive)
        model = Tiny(gain)
        alive.append(weakref.ref(model))
        loaded.append(gain)
        return model

    loaders = {gain: partial(load, gain) for gain in (0.8, 0.9)}
    cells = {(gain, scale): {"model": loader, "guidance": Guidance(scale)}
             for gain, loader in loaders.items() for scale in (1.0, 4.0)}
    result = sweep(("gain", "scale"), cells, tmp_path, decode=decode, detector=DETECTOR, labels=1, seeds=[3, 4],
                   schedule=LINEAR, steps="5")
    assert loaded == [0.8, 0.9]
    guided = sample(Tiny(0.8), [1, 1], LINEAR, "5", seeds=[3, 4], guidance=Guidance(4.0))
    assert torch.equal(result.latents[2:4], guided)


def test_evaluations_count_passes_of_the_network_an_image(tmp_path):
    guidances = {"off": Guidance(), "on": Guidance(2.0), "interval": Guidance(2.0, interval=(0, 500))}
    cells = {(name,): {"guidance": guidance} for name, guidance in guidances.items()}
    table = run(Tiny(), tmp_path, cells, ("guidance",), labels=1, batch_size=2).rates()
    assert table.evaluations.to_dict() == {"off": 5, "on": 10, "interval": 8}  # of 999, 749, 500, 250, 0 three inside


def test_rates_count_the_images_of_each_group_with_their_interval(tmp_path):
    result = run(Tiny(), tmp_path)
    result.rows["collapsed"] = [True, False, False] + [True] * 3 + [False] * 3 + [True, True, False]
    result.rows["solid"] = False
    table = result.rates()
    assert list(table.index) == list(CELLS)
    assert list(table["count"]) == [1, 3, 0, 2] and list(table["images"]) == [3] * 4
    assert (table.low.iloc[0], table.high.iloc[0]) == wilson_interval(1, 3)
    by_scale = result.rates("scale")
    assert list(by_scale["count"]) == [1, 5] and list(by_scale.rate) == [1 / 6, 5 / 6]
    assert by_scale.mean_pixel[4.0] == pytest.approx(result.rows.mean_pixel[result.rows.scale == 4.0].mean())
    assert list(result.rates("class", "seed", kind="solid")["count"]) == [0] * 6


def test_grid_holds_the_first_image_of_each_pair(tmp_path):
    result = run(Tiny(), tmp_path)
    images, down, across = result.grid("class", "scale")
    assert (down, across) == (["inside", "outside"], [1.0, 4.0])
    assert torch.equal(images.flatten(0, 1), result.images[::3])
    seeds, down, across = result.grid("class", "seed")
    assert across == [3, 4, 5] and torch.equal(seeds[1], result.images[6:9])
    with pytest.raises(ValueError, match="no image for"):
        result.grid("class", "label")


def test_where_keeps_rows_and_their_images_together(tmp_path):
    result = run(Tiny(), tmp_path)
    part = result.where(scale=4.0, seed=4)
    assert list(part.rows["class"]) == ["inside", "outside"] and list(part.rows.index) == [0, 1]
    assert torch.equal(part.images, result.images[[4, 10]]) and torch.equal(part.latents, result.latents[[4, 10]])
    assert torch.equal(part.grid("class", "scale")[0][:, 0], part.images)
    with pytest.raises(ValueError, match="no row with"):
        result.where(scale=3.0)


def test_sweep_may_call_its_cells_by_seed(tmp_path):
    rows = sweep(("seed",), {(seed,): {"seeds": [seed]} for seed in (8, 9)}, tmp_path, decode=decode, detector=DETECTOR,
                 model=Tiny(), labels=1, schedule=LINEAR, steps="5").rows
    assert list(rows.seed) == [8, 9] and list(rows.columns[:2]) == ["seed", "label"]


def test_rows_name_the_class_of_their_label(tmp_path):
    rows = run(Tiny(), tmp_path, CELL, ("name",), labels=[0, 1, 0], class_names=["bag", "shirt"]).rows
    assert list(rows["class"]) == ["bag", "shirt", "bag"]
    assert list(rows.columns[:4]) == ["name", "label", "seed", "class"]


def no_name():
    return lambda x0: x0


@pytest.mark.parametrize("change, said", [
    ({"x0_transform": no_name()}, "x0_transform=.* has no lasting name"),
    ({"stepz": 5}, "unexpected keyword argument 'stepz'"),
    ({"labels": [1, 2]}, "3 seeds for 2 labels"),
    ({"cells": {"cell": {}}}, "expected a tuple of name"),
    ({"cells": {("a", "b"): {}}}, "expected a tuple of name"),
    ({"cells": {("a",): {"steps": "4"}}}, "steps of cell .* is also given for all"),
    ({"cells": {}}, "no cells"),
    ({"names": ("solid",)}, "'solid' is that of a result"),
])
def test_bad_sweep_is_refused_before_anything_is_sampled(tmp_path, change, said):
    model = Tiny()
    with pytest.raises(ValueError, match=said):
        run(model, tmp_path, **{"names": ("name",), "cells": {("good",): {}, ("too",): {}}, "labels": 1, **change})
    assert model.calls == 0


def test_missing_setting_is_named(tmp_path):
    with pytest.raises(ValueError, match="missing a required argument: 'seeds'"):
        sweep(("name",), CELL, tmp_path, decode=decode, detector=DETECTOR, model=Tiny(), labels=1, schedule=LINEAR)
