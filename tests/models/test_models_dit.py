"""DiT against the paper's tables, closed forms and its own invariants."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dit_repro.models import (
    DIT_CONFIGS,
    DiT,
    DiTConfig,
    count_macs,
    count_parameters,
    create_model,
    patchify,
    sincos_position_grid,
    timestep_embedding,
    unpatchify,
)

# Table 4 of the paper; parameters counted from the released layout, position table included
PAPER = {
    "DiT-S/8": (0.36, 33_148_160), "DiT-S/4": (1.41, 32_945_024), "DiT-S/2": (6.06, 32_963_360),
    "DiT-B/8": (1.42, 130_881_536), "DiT-B/4": (5.56, 130_475_648), "DiT-B/2": (23.01, 130_512_416),
    "DiT-L/8": (5.01, 458_594_816), "DiT-L/4": (19.70, 458_053_760), "DiT-L/2": (80.71, 458_102_816),
    "DiT-XL/8": (7.39, 675_683_072), "DiT-XL/4": (29.05, 675_074_432), "DiT-XL/2": (118.64, 675_129_632),
}
TINY = DiTConfig(depth=2, width=64, heads=2, patch_size=2)


def tiny(**settings):
    torch.manual_seed(0)
    return DiT(TINY, **{"input_size": 8, "num_classes": 10, **settings})


def randomized(model):
    """Every weight nonzero, so that every part of the model is seen in its output."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.05)
    return model


def batch(model, n=4):
    size = model.input_size
    return (torch.randn(n, model.in_channels, size, size), torch.randint(0, 1000, (n,)),
            torch.randint(0, model.num_classes + 1, (n,)))


@pytest.mark.parametrize("name", PAPER)
def test_parameters_and_macs_are_those_of_the_paper(name):
    with torch.device("meta"):
        model = create_model(name)
    gmacs, parameters = PAPER[name]
    assert count_parameters(model) == parameters
    # the column has two decimals: for S/8 half a unit of the last is already 1.4%
    assert abs(count_macs(model) / 1e9 - gmacs) < max(0.005 * gmacs, 0.005)


def test_macs_are_the_sum_over_the_matrix_products_of_the_definition():
    model = tiny()
    tokens, width, depth = 16, 64, 2
    block = tokens * width**2 * (3 + 1 + 4 + 4) + 2 * tokens**2 * width + 6 * width**2   # linears, attention, adaLN
    outside = tokens * 16 * width + 256 * width + width**2 + 2 * width**2 + tokens * width * 32
    assert count_macs(model) == depth * block + outside
    assert next(model.parameters()).device.type == "cpu"   # counting leaves the model where it was


def test_registry_has_the_twelve_models_of_the_paper_with_its_numbers():
    assert {name: config.paper_gmacs for name, config in DIT_CONFIGS.items() if config.paper_gmacs} == {
        name: gmacs for name, (gmacs, _) in PAPER.items()}
    assert DIT_CONFIGS["DiT-XL/2"].paper_fid == 19.47
    nano = DIT_CONFIGS["DiT-nano/2"]
    assert (nano.depth, nano.width, nano.heads) == (6, 128, 4)


@pytest.mark.parametrize("init", ["paper", "pytorch"])
@pytest.mark.parametrize("learn_sigma", [True, False])
def test_output_is_exactly_zero_at_initialization(init, learn_sigma):
    model = create_model("DiT-nano/4", input_size=8, num_classes=10, learn_sigma=learn_sigma, init=init)
    x, t, y = batch(model)
    output = model(x, t, y)
    assert output.shape == (4, 8 if learn_sigma else 4, 8, 8)
    assert torch.equal(output, torch.zeros_like(output))


def test_every_block_is_the_identity_at_initialization_and_not_after_a_nudge():
    model = tiny()
    x, c = torch.randn(3, 16, 64), torch.randn(3, 64)
    for block in model.blocks:
        assert torch.equal(block(x, c), x)
        nn.init.constant_(block.adaLN_modulation[1].bias, 0.1)
        assert not torch.allclose(block(x, c), x, atol=1e-2)


def test_xavier_bound_is_that_of_the_fused_qkv_matrix():
    weight = create_model("DiT-nano/2", input_size=8).blocks[0].attn.qkv.weight
    bound = math.sqrt(6 / (4 * 128))
    assert 0.99 * bound < weight.abs().max() <= bound   # separate matrices would reach sqrt(6 / 2D)
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_patch_embedding_is_initialized_as_the_linear_map_it_is():
    model = create_model("DiT-nano/2", input_size=8)
    bound = math.sqrt(6 / (4 * 2 * 2 + 128))   # nn.init on the 4-d kernel would count the fan-out 4 times
    assert 0.98 * bound < model.x_embedder.proj.weight.abs().max() <= bound
    assert not model.x_embedder.proj.bias.any()


def test_label_table_and_timestep_mlp_start_at_standard_deviation_0_02():
    model = create_model("DiT-nano/2", input_size=8)
    for weight in (model.y_embedder.embedding_table.weight, model.t_embedder.mlp[0].weight,
                   model.t_embedder.mlp[2].weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert not model.t_embedder.mlp[0].bias.any()


def test_pytorch_init_differs_from_the_papers_in_the_label_table():
    assert tiny(init="pytorch").y_embedder.embedding_table.weight.std().item() == pytest.approx(1, rel=0.1)


def test_timestep_embedding_is_cosines_then_sines_with_exponent_i_over_half():
    embedding = timestep_embedding(torch.tensor([0, 1, 500, 999]))
    i = np.arange(128)
    angles = np.array([0, 1, 500, 999])[:, None] * 10_000.0 ** -(i / 128)
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    assert embedding.dtype == torch.float32
    np.testing.assert_allclose(embedding, expected, atol=1e-4)
    # golden: the fastest and second wave at t = 1, and the slowest sine at t = 999
    np.testing.assert_allclose(embedding[1, [0, 1, 128]], [0.5403023, 0.5973753, 0.8414710], atol=1e-6)
    assert embedding[3, -1] == pytest.approx(math.sin(999 * 10_000 ** (-127 / 128)), abs=1e-6)


def test_timestep_embedding_stays_float32_for_half_precision_models():
    model = randomized(tiny()).to(torch.bfloat16)
    x, _, y = batch(model)
    close = [model(x.bfloat16(), torch.full((4,), t), y) for t in (998, 999)]   # equal once rounded to bfloat16
    assert not torch.equal(*close)


def test_position_grid_is_sines_then_cosines_with_the_column_first():
    grid = sincos_position_grid(16, 4)
    frequencies = 10_000.0 ** -(np.arange(4) / 4)
    expected = np.array([[wave(position * frequency) for position in (column, row) for wave in (np.sin, np.cos)
                          for frequency in frequencies] for row in range(4) for column in range(4)])
    np.testing.assert_allclose(grid, expected, atol=1e-7)
    assert grid[1, 0] == pytest.approx(0.8414710) and grid[4, 0] == 0   # token 1 is one column to the right
    assert grid[4, 8] == pytest.approx(0.8414710) and grid[1, 8] == 0   # token 4 is one row down


def test_position_table_is_in_the_state_dict_and_is_never_trained():
    model = randomized(tiny())
    torch.testing.assert_close(model.state_dict()["pos_embed"], sincos_position_grid(64, 4)[None])
    model(*batch(model)).square().sum().backward()
    assert model.pos_embed.grad is None
    assert all(p.grad is not None for name, p in model.named_parameters() if name != "pos_embed")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_unpatchify_inverts_patchify(n, channels, patch, grid):
    x = torch.randn(n, channels, grid * patch, grid * patch)
    tokens = patchify(x, patch)
    assert tokens.shape == (n, grid**2, patch**2 * channels)
    assert torch.equal(unpatchify(tokens, patch), x)


def test_a_token_is_laid_out_row_column_channel():
    x = torch.zeros(1, 3, 4, 4)
    x[0, 2, 0, 3] = 1   # channel 2, first row, last column: token 1, inside it row 0 and column 1
    assert patchify(x, 2)[0, 1].nonzero().tolist() == [[(0 * 2 + 1) * 3 + 2]]


def test_state_dict_has_the_names_of_the_released_checkpoint():
    names = set(tiny().state_dict())
    block = {f"blocks.{n}.{part}.{kind}" for n in range(2) for kind in ("weight", "bias")
             for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")}
    outside = {f"{part}.{kind}" for kind in ("weight", "bias") for part in (
        "x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "final_layer.linear",
        "final_layer.adaLN_modulation.1")}
    assert names == block | outside | {"pos_embed", "y_embedder.embedding_table.weight"}


def test_training_mode_adds_no_randomness():
    model = randomized(tiny()).train()
    inputs = batch(model)
    assert torch.equal(model(*inputs), model(*inputs))
    assert torch.equal(model(*inputs), model.eval()(*inputs))


def test_null_class_is_the_last_row_and_a_condition_of_its_own():
    model = randomized(tiny())
    x, t, _ = batch(model)
    null, first = model(x, t, torch.full((4,), 10)), model(x, t, torch.full((4,), 0))
    assert not torch.allclose(null, first, atol=1e-3)
    model.y_embedder.embedding_table.weight.data[0] = model.y_embedder.embedding_table.weight.data[10]
    assert torch.equal(model(x, t, torch.full((4,), 0)), null)


def test_images_of_a_batch_do_not_see_each_other():
    model = randomized(tiny())
    x, t, y = batch(model)
    together = model(x, t, y)
    torch.testing.assert_close(torch.cat([model(x[i:i + 1], t[i:i + 1], y[i:i + 1]) for i in range(4)]), together)


def test_activation_checkpointing_changes_no_gradient():
    model = randomized(tiny()).double()
    x, t, y = batch(model)
    gradients = []
    for model.checkpoint_activations in (False, True):
        model.zero_grad()
        model(x.double(), t, y).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(*gradients)


def test_model_traces_whole_for_compilation():
    model = randomized(tiny())
    inputs = batch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)   # value checks must not break the graph
    assert torch.equal(compiled(*inputs), model(*inputs))


@pytest.mark.parametrize(("change", "message"), [
    ({"x": torch.zeros(4, 4, 16, 16)}, r"x has shape \(4, 4, 16, 16\), expected \(N, 4, 8, 8\)"),
    ({"x": torch.zeros(4, 3, 8, 8)}, r"expected \(N, 4, 8, 8\)"),
    ({"t": torch.zeros(1)}, r"timesteps and labels of shape \(4,\), got \(1,\) and \(4,\)"),
    ({"y": torch.zeros(3, dtype=torch.int64)}, r"got \(4,\) and \(3,\)"),
    ({"y": torch.zeros(4)}, "labels are torch.float32, expected int64"),
    ({"y": torch.full((4,), 11)}, r"labels span 11..11, expected 0..10"),
    ({"y": torch.full((4,), -1)}, r"labels span -1..-1"),
    ({"t": torch.full((4,), 1000)}, r"timesteps span 1000..1000, expected 0 <= t < 1000"),
    ({"t": torch.full((4,), -0.5)}, "timesteps span -0.5"),
    ({"t": torch.full((4,), float("nan"))}, "timesteps span nan"),
])
def test_inputs_that_do_not_fit_are_named(change, message):
    model = tiny()
    good = dict(zip(("x", "t", "y"), batch(model), strict=True))
    with pytest.raises(ValueError, match=message):
        model(**{**good, **change})


def test_a_size_that_is_no_multiple_of_the_patch_is_refused():
    with pytest.raises(ValueError, match="input size 30 is not a multiple of the patch size 4: use a size such as 32"):
        create_model("DiT-S/4", input_size=30)


def test_an_unknown_model_name_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"unknown model 'DiT-M/2', expected one of DiT-S/8, .*DiT-nano/2"):
        create_model("DiT-M/2")
    with pytest.raises(ValueError, match="init 'xavier': expected 'paper' or 'pytorch'"):
        tiny(init="xavier")
