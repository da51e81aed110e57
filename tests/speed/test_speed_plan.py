"""The plan against memory that was measured, files that were written, and the paper's table."""
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from dit_repro.cli import main
from dit_repro.diffusion import NoiseSchedule, Objective, training_losses
from dit_repro.models import DIT_CONFIGS, DiTConfig
from dit_repro.profiles import get_profile
from dit_repro.speed.device import peak_above
from dit_repro.speed.ladder import Bench, Settings, Step
from dit_repro.speed.plan import GPUS, activation_bytes, checkpoints_kept, plan_run, training_memory
from dit_repro.training import TrainConfig
from dit_repro.training.checkpoints import size_of
from dit_repro.training.parallel import Ranks
from dit_repro.training.state import TrainState

CPU = torch.device("cpu")
SIZES = [("DiT-nano/2", 8, 8), ("DiT-nano/2", 2, 32), ("DiT-S/4", 2, 32)]   # model, images, latent size


def saved_bytes(model_name, batch_size, input_size, precision, checkpointing):
    """Bytes that autograd keeps of a training loss, parameters apart, each storage once."""
    step = Step(Bench(model_name, batch_size, CPU, input_size), Settings(precision, checkpointing=checkpointing))
    kept = []
    parameters = {p.untyped_storage().data_ptr() for p in step.bench.model.parameters()}
    x0, t, y, noise = step.bench.batches[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = training_losses(step.predict, x0, t, y, NoiseSchedule.linear(), Objective(), noise=noise).total.mean()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    assert loss.requires_grad
    return sum(size for pointer, size in storages.items() if pointer not in parameters), step.bench.model


@pytest.mark.parametrize("size", SIZES)
def test_planned_activations_are_what_autograd_keeps(size):
    kept, model = saved_bytes(*size, "fp32", False)
    assert activation_bytes(model, size[1]) == (pytest.approx(kept, rel=0.002), 0)


@pytest.mark.parametrize("size", SIZES[:2])
def test_planned_activations_under_autocast_and_checkpointing_are_what_autograd_keeps(size):
    kept, model = saved_bytes(*size, "bf16", False)
    assert activation_bytes(model, size[1], "bf16")[0] == pytest.approx(kept, rel=0.02)
    kept, model = saved_bytes(*size, "fp32", True)
    assert activation_bytes(model, size[1], checkpointing=True)[0] == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_planned_peak_is_within_15_percent_of_a_measured_step(size, checkpointing):
    bench = Bench(*size[:2], CPU, size[2])
    step = Step(bench, Settings(fused=True, foreach_ema=True, checkpointing=checkpointing))
    step()   # the optimizer makes its moments
    state = [*bench.model.parameters(), *bench.ema.tensors.values(),
             *(moment for slots in bench.optimizer(True).state.values() for moment in slots.values())]
    measured = peak_above(step, CPU) + sum(tensor.numel() * tensor.element_size() for tensor in state)
    assert training_memory(bench.model, size[1], checkpointing=checkpointing).peak == pytest.approx(measured, rel=0.15)


def test_memory_watch_counts_what_is_alive_at_once():
    def step():
        a = torch.zeros(1000)          # 4,000 bytes
        b = a + 1                      # 8,000
        del a
        c = b * 2                      # 8,000 again
        c.add_(1).view(10, 100)        # nothing new
        return torch.cat([b, c])       # 16,000

    assert peak_above(step, CPU) == 16_000


def test_plan_counts_the_checkpoint_that_a_run_writes(monkeypatch):
    monkeypatch.setitem(DIT_CONFIGS, "DiT-plan/4", DiTConfig(4, 96, 3, 4))
    config = TrainConfig(latents="", model="DiT-plan/4", input_size=8, num_classes=10, num_steps=10)
    state = TrainState(config, Ranks(0, 1, CPU))
    for parameter in state.trained.values():
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    assert plan_run(config).checkpoint == pytest.approx(size_of(state.tensors()), rel=0.05)


def test_plan_keeps_the_last_checkpoints_and_the_archive():
    config = TrainConfig(latents="", num_steps=25_000, checkpoint_every=1_000, keep_last=3, archive_every=10_000)
    assert checkpoints_kept(config) == 5          # 10,000, 20,000, 23,000, 24,000, 25,000
    assert checkpoints_kept(replace(config, archive_every=0)) == 3
    assert checkpoints_kept(replace(config, num_steps=500)) == 1
    exported = plan_run(replace(config, export_ema_every=5_000))
    assert exported.checkpoints == pytest.approx(5 * exported.checkpoint + 5 * exported.checkpoint / 4)


def test_plan_of_the_flagship_matches_what_is_known_of_it():
    xl = TrainConfig(latents="", model="DiT-XL/2", precision="bf16")
    plan = plan_run(xl, gpu="h200")
    assert plan.parameters == 675_129_632 and plan.macs / 1e9 == pytest.approx(118.64, abs=0.05)   # paper, Table 4
    assert plan.memory.peak > GPUS["h100"].memory > plan.memory_checkpointed.peak   # the post: over 80 GB at batch 256
    # Latents: 1,281,167 images, two flips, mean and log-variance of (4, 32, 32), two bytes; eight for a label
    assert plan.latents == 1_281_167 * (2 * 8 * 32 * 32 * 2 + 8)
    # 6 flops a multiply-accumulate at 35% of 989 TFLOP/s
    assert plan.step_seconds == pytest.approx(6 * plan.macs * 256 / (0.35 * 989e12))
    assert plan_run(replace(xl, activation_checkpointing=True), gpu="h200").step_seconds == pytest.approx(
        plan.step_seconds * 4 / 3)


def test_two_gpus_halve_the_time_and_the_activations_but_not_the_state():
    config = TrainConfig(latents="", model="DiT-nano/2", precision="bf16")
    one, two = plan_run(config), plan_run(config, gpus=2)
    assert two.hours == pytest.approx(one.hours / 2) and two.memory.moments == one.memory.moments
    assert two.memory.activations == pytest.approx(one.memory.activations / 2, rel=0.01)
    sharded = plan_run(replace(config, parallel="fsdp"), gpus=2)
    assert sharded.memory.moments == one.memory.moments / 2 and sharded.memory.buckets == 0


def test_plan_refuses_what_it_cannot_know():
    config = TrainConfig(latents="")
    for change, message in (({"gpu": "tpu"}, "unknown GPU 'tpu': expected one of a100, h100"),
                            ({"gpus": 3}, "3 GPUs cannot share a global batch of 256"),
                            ({"utilization": 40}, "utilization 40: expected a share")):
        with pytest.raises(ValueError, match=message):
            plan_run(config, **change)
    with pytest.raises(ValueError, match="no plan for MiniUNet-B"):
        plan_run(replace(config, model="MiniUNet-B"))


def test_plan_command_needs_no_data_and_no_gpu():
    done = CliRunner().invoke(main, ["plan", "--profile", "paper", "--gpu", "h100", "--gpus", "2"])
    assert done.exit_code == 0, done.output
    assert "130,512,416 parameters, 23.01 G" in done.output and "2 x NVIDIA H100" in done.output
    small = CliRunner().invoke(main, ["plan", "--profile", "laptop", "-o", "num_steps=10"])
    assert "for 16,000 images" in small.output and "for 10 steps of 128" in small.output
    refused = CliRunner().invoke(main, ["plan", "-o", "model=DiT-Q/2"])
    assert refused.exit_code == 1 and "DiT-Q/2" in refused.output
    assert get_profile("paper").train.model == "DiT-B/2"
