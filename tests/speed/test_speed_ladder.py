"""The ladder on a CPU and a tiny model: what it reports, what it refuses, and that parity means something."""
import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from dit_repro.cli import main
from dit_repro.models import DIT_CONFIGS, DiTConfig
from dit_repro.speed import gpu_check as check
from dit_repro.speed.ladder import LADDER, Bench, Settings, Step, run_ladder
from dit_repro.speed.report import Reading, ladder_figure, ladder_table

CPU = torch.device("cpu")
RUNGS = {name: changes for name, changes in LADDER.items() if name != "all cores"}   # tests have one core each


@pytest.fixture(scope="module", autouse=True)
def tiny_model():
    DIT_CONFIGS["DiT-ladder/4"] = DiTConfig(depth=2, width=32, heads=2, patch_size=4)
    yield
    del DIT_CONFIGS["DiT-ladder/4"]


@pytest.fixture(scope="module", autouse=True)
def quick_ceiling():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dit_repro.speed.ladder.matmul_ceiling", lambda device, precision: 1e11)
        yield


@pytest.fixture(scope="module")
def result(tiny_model, quick_ceiling):
    return run_ladder("DiT-ladder/4", 4, "cpu", input_size=8, repeats=2, rungs=RUNGS)


def rung(result, kind, name):
    found = [r for r in result["rungs"] if (r["kind"], r["name"]) == (kind, name)]
    assert len(found) == 1
    return found[0]


def test_every_rung_has_numbers_or_a_reason(result):
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert [r["name"] for r in result["rungs"] if r["kind"] == "cumulative"] == ["fp32", *RUNGS]
    for r in result["rungs"]:
        if "why_not" not in r:
            assert 0 < r["fastest"] <= r["seconds"] <= r["slowest"] and r["peak_bytes"] > 0
            assert r["images_per_second"] == pytest.approx(4 / r["seconds"])
            ceiling = result["ceilings"][r["settings"]["precision"]]
            assert r["utilization"] == pytest.approx(result["flops_per_step"] / r["seconds"] / ceiling)


def test_rungs_that_a_cpu_cannot_do_say_so_and_are_left_out_of_later_ones(result):
    for name, reason in (("TF32", "no TF32"), ("CUDA graphs", "compilation is off"), ("compile", "--compile"),
                         ("latents on the device", "memory")):
        assert reason in rung(result, "cumulative", name)["why_not"]
    last = rung(result, "cumulative", "foreach EMA")["settings"]
    assert last == {"precision": "bf16", "threads": 1, "fused": True, "compile": "", "resident": False,
                    "foreach_ema": True, "attention": "fused", "checkpointing": False, "batched_modulation": False,
                    "fp8": False}
    assert rung(result, "alone", "foreach EMA")["settings"]["precision"] == "fp32"
    assert "for CUDA" in rung(result, "variant", "flash attention")["why_not"]


def test_a_rung_that_fails_is_reported_and_the_others_go_on(monkeypatch):
    real = Step.average

    def average(self):
        if self.settings.foreach_ema:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        real(self)

    monkeypatch.setattr(Step, "average", average)
    result = run_ladder("DiT-ladder/4", 2, "cpu", input_size=8, parity=False, alone=False, variants={},
                        rungs={"foreach EMA": RUNGS["foreach EMA"]})
    assert rung(result, "cumulative", "foreach EMA")["why_not"] == "CUDA out of memory. Tried to allocate"
    assert rung(result, "cumulative", "fp32")["speedup"] == 1


def test_no_rung_is_begun_after_the_time_limit():
    result = run_ladder("DiT-ladder/4", 2, "cpu", input_size=8, parity=False, rungs=RUNGS, time_limit=0)
    measured = [r["settings"] for r in result["rungs"] if "seconds" in r]
    assert all(settings == measured[0] for settings in measured)
    assert "0 s for this ladder were over" in rung(result, "cumulative", "fused AdamW")["why_not"]


def test_identical_settings_have_no_loss_difference_and_bf16_has_a_small_one(result):
    bench = Bench("DiT-ladder/4", 4, CPU, 8)
    losses = []
    for precision in ("fp32", "bf16", "fp32"):   # the weights start over each time
        step = Step(bench, Settings(precision))
        step.warm_up(parity=True)
        losses.append(step.losses)
    assert losses[0] == losses[2] != losses[1] and len(losses[0]) == 20
    assert rung(result, "alone", "foreach EMA")["loss_difference"] == 0
    assert 0 < rung(result, "cumulative", "bf16 autocast")["loss_difference"] < 0.01


def test_all_settings_compute_the_same_step():
    bench = Bench("DiT-ladder/4", 4, CPU, 8)

    def weights_and_average(settings):
        bench.reset()
        for average, initial in zip(bench.ema.tensors.values(), bench.model.state_dict().values()):
            average.copy_(initial)
        step = Step(bench, settings)
        for _ in range(3):
            step()
        return [*map(torch.clone, bench.model.parameters()), *map(torch.clone, bench.ema.tensors.values())]

    expected = weights_and_average(Settings())
    for settings in (Settings(fused=True), Settings(foreach_ema=True), Settings(attention="plain"),
                     Settings(checkpointing=True), Settings(resident=True), Settings(batched_modulation=True)):
        for a, b in zip(weights_and_average(settings), expected):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_checkpointing_takes_less_memory():
    bench = Bench("DiT-ladder/4", 256, CPU, 8)   # at smaller batches the gradients are the peak
    peaks = []
    for settings in (Settings(), Settings(checkpointing=True)):
        step = Step(bench, settings)
        step.warm_up(parity=False)
        peaks.append(step.peak_bytes)
    assert peaks[1] < 0.8 * peaks[0]


def test_table_and_figure_show_every_rung(result):
    lines = ladder_table(result)
    assert len(lines) == 2 + len(result["rungs"]) and "not measured: a CPU has no TF32" in "\n".join(lines)
    labels = [label.get_text() for label in ladder_figure(result).axes[0].get_yticklabels()]
    assert labels == ["fp32", "bf16 autocast", "fused AdamW", "foreach EMA"]


def test_ladder_command_writes_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("dit_repro.speed.ladder.LADDER", {"fused AdamW": {"fused": True}})
    monkeypatch.setattr("dit_repro.speed.ladder.VARIANTS", {})
    out = tmp_path / "ladder.json"
    done = CliRunner().invoke(main, ["bench", "ladder", "--model", "DiT-ladder/4", "--batch", "2", "--input-size", "8",
                                     "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["rungs"][1]["name"] == "fused AdamW" and out.with_suffix(".svg").exists()


def test_gpu_check_writes_ladders_and_verdicts_and_names_a_missing_gpu(tmp_path, monkeypatch):
    small = {**check.XL, "baseline": Settings(foreach_ema=True)}
    monkeypatch.setattr(check, "LADDERS", (("DiT-ladder/4", 2, {**small, "input_size": 8}),))
    readings = check.gpu_check(tmp_path / "gpu.json", "cpu")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [target["name"] for target in written["targets"]] == [reading.name for reading in readings]
    assert len(written["ladders"][0]["rungs"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = CliRunner().invoke(main, ["bench", "gpu-check", str(tmp_path / "none.json")])
    assert refused.exit_code == 1 and "no CUDA device here" in refused.output


def test_gpu_check_judges_memory_with_and_without_checkpointing():
    def xl(checkpointing, peak):
        return {"kind": "cumulative", "name": "", "seconds": 1.0, "peak_bytes": peak,
                "settings": {"checkpointing": checkpointing}}

    readings = check.judge({"model": "DiT-XL/2", "batch_size": 256, "rungs": [xl(False, 120e9), xl(True, 90e9)]})
    assert {reading.name.split(",")[1].split()[0]: reading.passed for reading in readings} == {
        "without": True, "with": False}
    ladder = {"model": "DiT-B/2", "batch_size": 256, "rungs": [
        {"kind": "cumulative", "name": name, "seconds": seconds, "speedup": 0.8 / seconds, "peak_bytes": 1}
        for name, seconds in (("fp32", 0.8), ("compile", 0.06), ("foreach EMA", 0.07))]}
    speedup, time = check.judge(ladder)
    assert speedup.value == pytest.approx(0.8 / 0.06) and speedup.passed and time.value == pytest.approx(60)


def test_a_reading_passes_or_misses_its_target():
    assert "target >= 20 x: MISS" in str(Reading("reading", 19.9, "x", at_least=20))
    assert "target <= 2 %: pass" in str(Reading("share", 2.0, "%", at_most=2))
    assert Reading("no target", 1.0, "s").passed


def test_gpu_check_imports_no_package_that_a_bare_gpu_machine_lacks():
    blocked = ("diffusers", "papermill", "pandas", "click", "psutil", "transformers", "torch_fidelity", "IPython",
               "jupytext")
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\nimport dit_repro.speed.gpu_check"
    subprocess.run([sys.executable, "-c", code], check=True)
