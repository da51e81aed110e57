import functools
import itertools

import numpy as np
import pytest
import torch
from tiny_training import tiny_config
from torch import nn

from dit_repro.training import RunFolder, Trainer
from dit_repro.training.checkpoints import checkpoint_path, read_checkpoint
from dit_repro.training.ema import EMA
from dit_repro.training.state import build_model


def walk(warmup, num_steps=60, decay=0.9):
    """A layer whose weights wander, its EMA, and the weights after every step, the initial ones first."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    ema, weights = EMA(model, decay, warmup), [model.weight.detach().double().numpy().copy()]
    for step in range(1, num_steps + 1):
        with torch.no_grad():
            model.weight += torch.randn_like(model.weight)
        ema.update(model, step)
        weights.append(model.weight.detach().double().numpy().copy())
    return model, ema, weights


def test_ema_is_the_weighted_sum_of_its_definition():
    _, ema, weights = walk(warmup=False)
    n = len(weights) - 1
    expected = 0.9**n * weights[0] + sum(0.1 * 0.9 ** (n - k) * weights[k] for k in range(1, n + 1))
    np.testing.assert_allclose(ema.tensors["weight"].numpy(), expected, rtol=2e-5, atol=2e-6)


def test_warmup_follows_its_schedule_and_then_the_decay():
    _, ema, weights = walk(warmup=True, num_steps=120)
    expected = weights[0]
    for step, weight in enumerate(weights[1:], 1):
        decay = (1 + step) / (10 + step) if step < 80 else 0.9   # they meet at step 80
        expected = decay * expected + (1 - decay) * weight
    assert ema.decay_at(79) < 0.9 == ema.decay_at(81)
    np.testing.assert_allclose(ema.tensors["weight"].numpy(), expected, rtol=2e-5, atol=2e-6)


def test_applied_weights_are_the_average_and_the_training_weights_return_after_an_error():
    model, ema, _ = walk(warmup=False)
    raw, average = model.weight.detach().clone(), ema.tensors["weight"].clone()
    with pytest.raises(KeyError), ema.applied_to(model):
        assert torch.equal(model.weight, average)
        raise KeyError
    assert torch.equal(model.weight, raw) and torch.equal(ema.tensors["weight"], average)


def test_distance_is_that_of_all_weights_together():
    model, ema, _ = walk(warmup=False)
    gap = torch.cat([(ema.tensors[n] - p).flatten() for n, p in model.named_parameters()]).norm()
    size = torch.cat([p.flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(ema.squared_distances(model).sqrt(), torch.stack([gap, size]).detach())


def test_ema_refuses_a_wrapper_and_follows_parameters_that_were_replaced():
    model = nn.Linear(2, 2)
    ema = EMA(model, 0.0)
    with pytest.raises(RuntimeError, match=r"module\.|weight|bias"):
        ema.update(nn.Sequential(model), 1)
    model.weight = nn.Parameter(torch.full((2, 2), 7.0))   # a reference from the start would see the old one
    ema.update(model, 1)
    assert torch.equal(ema.tensors["weight"], torch.full((2, 2), 7.0))


@pytest.mark.parametrize("compiled", [False, True])
def test_ema_of_a_run_is_the_average_of_the_weights_it_went_through(latents, tmp_path, monkeypatch, compiled):
    eager = functools.partialmethod(nn.Module.compile, backend="eager")   # the same wrapping without a C++ compiler
    monkeypatch.setattr(nn.Module, "compile", eager)
    config = tiny_config(latents, num_steps=6, compile=compiled, log_every=1, checkpoint_every=1, archive_every=1)
    Trainer(config, tmp_path / "run").run()
    states = [read_checkpoint(checkpoint_path(tmp_path / "run/checkpoints", "step", step))[0] for step in range(1, 7)]
    initial = build_model(config).state_dict()   # step 1 counts: the average starts at the initial weights
    states.insert(0, {f"{section}.{name}": w for name, w in initial.items() for section in ("model", "ema")})
    for before, after in itertools.pairwise(states):
        for name in (name.removeprefix("model.") for name in after if name.startswith("model.")):
            expected = 0.9 * before[f"ema.{name}"].double() + 0.1 * after[f"model.{name}"].double()
            torch.testing.assert_close(after[f"ema.{name}"].double(), expected, rtol=1e-5, atol=1e-7)
    names = {name.removeprefix("model.") for name in states[0] if name.startswith("model.")}
    assert set(RunFolder(tmp_path / "run").load_model().state_dict()) == names
    assert not torch.equal(states[-1]["ema.final_layer.linear.weight"], states[-1]["model.final_layer.linear.weight"])
