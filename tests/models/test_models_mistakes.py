import copy

import pytest
import torch

from dit_repro.models import create_model
from dit_repro.models.mistakes import INIT_MISTAKES, MISTAKES, apply_mistake


@pytest.fixture(scope="module")
def trained():
    """A model whose every weight matters: drawn at random, as if training had left nothing at zero."""
    torch.manual_seed(0)
    model = create_model("DiT-nano/2", input_size=8, num_classes=10).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "pos_embed":
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def output(model):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 4, 8, 8, generator=generator)
    with torch.no_grad():
        return model(x, torch.tensor([3, 301, 657, 999]), torch.tensor([0, 3, 9, 10]))


# Identity weights are what a loaded layer norm would start with, so learned ones change nothing until they are trained.
@pytest.mark.parametrize("mistake", [m for m in MISTAKES if "learned" not in m.name], ids=lambda m: m.name)
def test_each_mistake_changes_what_a_trained_model_computes(trained, mistake):
    before = output(trained)
    changed = output(apply_mistake(copy.deepcopy(trained), mistake))
    assert (changed - before).abs().max() > 1e-6


@pytest.mark.parametrize("mistake", INIT_MISTAKES, ids=lambda m: m.name)
def test_each_init_mistake_changes_the_initial_weights_and_draws_the_same_ones_each_time(mistake):
    torch.manual_seed(0)
    model = create_model("DiT-nano/2", input_size=8, num_classes=10)
    changed, again = (apply_mistake(copy.deepcopy(model), mistake).state_dict() for _ in range(2))
    assert any(not torch.equal(weight, model.state_dict()[name]) for name, weight in changed.items())
    assert all(torch.equal(weight, again[name]) for name, weight in changed.items())


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m.relabels], ids=lambda m: m.name)
def test_a_relabelling_only_moves_numbers_about(trained, mistake):
    changed = apply_mistake(copy.deepcopy(trained), mistake).state_dict()
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight.flatten().sort().values, changed[name].flatten().sort().values)


def test_modulation_without_one_is_what_its_name_says(trained):
    mistake = next(m for m in MISTAKES if m.name == "modulation: x * scale")
    block = apply_mistake(copy.deepcopy(trained), mistake).blocks[0]
    x, c = torch.randn(2, 16, 128), torch.randn(2, 128)
    shift1, scale1, gate1, shift2, scale2, gate2 = trained.blocks[0].adaLN_modulation(c)[:, None].chunk(6, -1)
    expected = x + gate1 * block.attn(block.norm1(x) * scale1 + shift1)
    expected = expected + gate2 * block.mlp(block.norm2(expected) * scale2 + shift2)
    torch.testing.assert_close(block(x, c), expected, rtol=1e-4, atol=1e-5)
