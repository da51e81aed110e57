"""The small U-Net against diffusers' blocks, closed forms, its own invariants, and the DiTs whose cost it matches."""
from dataclasses import replace

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.models import UNET_CONFIGS, MiniUNet, UNetConfig, count_macs, count_parameters, create_model
from dit_repro.models.unet import ResBlock, TransformerBlock
from dit_repro.sampling import Guidance, sample
from dit_repro.training import TrainConfig
from dit_repro.training.state import build_model

TINY = UNetConfig((16, 24, 32), 1, 4)


def tiny(config=TINY, **settings):
    torch.manual_seed(0)
    return MiniUNet(config, **{"input_size": 8, "num_classes": 10, **settings})


def randomized(module):
    """Every weight nonzero, so that every part is seen in the output."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module.eval()


def batch(model, n=4):
    torch.manual_seed(2)
    size = model.input_size
    return torch.randn(n, model.in_channels, size, size), torch.randint(0, 1000, (n,)), torch.arange(n)


@pytest.mark.parametrize(("unet", "dit", "size"), [
    ("MiniUNet-S", "DiT-nano/2", 8), ("MiniUNet-M", "DiT-S/2", 8), ("MiniUNet-B", "DiT-B/2", 32)])
def test_multiply_accumulates_match_those_of_a_dit_within_5_percent(unet, dit, size):
    with torch.device("meta"):
        macs = [count_macs(create_model(name, input_size=size, num_classes=10)) for name in (unet, dit)]
    assert abs(macs[0] / macs[1] - 1) < 0.05


def test_macs_are_the_sum_over_the_convolutions_and_matrix_products_of_the_definition():
    model = tiny(UNetConfig((16, 24), 1, 4, label_tokens=3))
    width = 64   # four times the first level's channels

    def res(cells, entering, leaving):
        shortcut = cells * entering * leaving if entering != leaving else 0
        return 9 * cells * (entering * leaving + leaving**2) + width * leaving + shortcut

    def attention(cells, channels):   # q, k, v, out, scores and sums; the same over 3 tokens; an MLP four times as wide
        itself = 4 * cells * channels**2 + 2 * cells**2 * channels
        cross = 2 * cells * channels**2 + 3 * width * 2 * channels + 2 * cells * 3 * channels
        return itself + cross + 8 * cells * channels**2

    time = 256 * width + width**2
    down = 9 * 64 * 4 * 16 + res(64, 16, 16) + 9 * 16 * 16 * 16
    middle = res(16, 16, 24) + attention(16, 24) + res(16, 24, 24)
    up = 9 * 64 * 24 * 16 + res(64, 32, 16) + 9 * 64 * 16 * 8
    assert count_macs(model) == time + down + middle + up


@pytest.mark.parametrize("scale_shift", [False, True])
@pytest.mark.parametrize("out_channels", [16, 24])
def test_residual_block_computes_what_diffusers_computes(scale_shift, out_channels):
    ours = randomized(ResBlock(16, out_channels, replace(TINY, scale_shift=scale_shift), 64))
    peer = ResnetBlock2D(in_channels=16, out_channels=out_channels, temb_channels=64, groups=TINY.groups, eps=1e-5,
                         time_embedding_norm="scale_shift" if scale_shift else "default").eval()
    peer.load_state_dict({name.replace("time_proj", "time_emb_proj").replace("shortcut", "conv_shortcut"): tensor
                          for name, tensor in ours.state_dict().items()})
    x, c = torch.randn(3, 16, 8, 8), torch.randn(3, 64)
    torch.testing.assert_close(ours(x, c), peer(x, c), rtol=1e-5, atol=1e-5)


def test_transformer_block_computes_what_diffusers_computes():
    ours = randomized(TransformerBlock(32, TINY, 64))
    peer = BasicTransformerBlock(32, 4, 8, cross_attention_dim=64, activation_fn="gelu-approximate",
                                 attention_bias=True).eval()
    state = {}
    for name, tensor in ours.state_dict().items():
        if ".kv." in name:
            for part, half in zip("kv", tensor.chunk(2)):
                state[name.replace(".kv.", f".to_{part}.")] = half
        else:
            state[name.replace(".q.", ".to_q.").replace(".out.", ".to_out.0.")
                  .replace("mlp.0", "mlp.net.0.proj").replace("mlp.2", "mlp.net.2")] = tensor
    peer.load_state_dict({name.replace("self_attn", "attn1").replace("cross_attn", "attn2").replace("mlp", "ff"): tensor
                          for name, tensor in state.items()})
    x, context = torch.randn(3, 32, 4, 4), torch.randn(3, 5, 64)
    tokens = peer(x.flatten(2).transpose(1, 2), encoder_hidden_states=context)
    torch.testing.assert_close(ours(x, context), tokens.transpose(1, 2).reshape(x.shape), rtol=1e-5, atol=1e-5)


def test_timestep_embedding_computes_what_diffusers_computes():
    ours = randomized(tiny().t_embedder)
    peer = TimestepEmbedding(256, 64).eval()
    peer.load_state_dict({name.replace("mlp.0", "linear_1").replace("mlp.2", "linear_2"): tensor
                          for name, tensor in ours.state_dict().items()})
    t = torch.tensor([0, 1, 500, 999])
    waves = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)(t)
    torch.testing.assert_close(ours(t), peer(waves), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("learn_sigma", "channels"), [(True, 8), (False, 4)])
def test_output_begins_at_zero_with_a_channel_for_each_prediction(learn_sigma, channels):
    model = tiny(learn_sigma=learn_sigma)
    output = model(*batch(model))
    assert output.shape == (4, channels, 8, 8) and model.out_channels == channels
    assert not output.any()
    assert tiny(learn_sigma=learn_sigma, init="pytorch")(*batch(model)).std() > 0.01


@torch.no_grad()
def test_timestep_label_and_every_cell_reach_the_whole_output():
    model = randomized(tiny())
    x, t, y = batch(model)
    before = model(x, t, y)
    assert ((model(x, t + 1 - 2 * (t == 999).long(), y) - before).flatten(1).abs().amax(1) > 1e-4).all()
    assert ((model(x, t, torch.full_like(y, model.num_classes)) - before).flatten(1).abs().amax(1) > 1e-4).all()
    x[0, 0, 0, 0] += 1
    after = model(x, t, y)
    assert (after[0] - before[0])[:, -1, -1].abs().min() > 1e-7   # the opposite corner, through the attention
    assert torch.equal(after[1:], before[1:])                     # and no other image of the batch


@torch.no_grad()
def test_without_skips_nothing_passes_beside_the_bottleneck():
    changed = {}
    for skips in (True, False):
        model = randomized(tiny(replace(TINY, skips=skips)))
        for conv in model.upsample:
            conv.weight.zero_()   # the way up from the bottleneck is closed
        x, t, y = batch(model)
        changed[skips] = (model(x + 1, t, y) - model(x, t, y)).abs().max()
    assert changed[True] > 1e-3 and changed[False] == 0


def test_variants_begin_with_the_weights_of_the_plain_network_and_cost_as_much():
    plain, cut, adaptive = (tiny(replace(TINY, **change)) for change in ({}, {"skips": False}, {"scale_shift": True}))
    torch.testing.assert_close(dict(cut.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    assert count_macs(cut) == count_macs(plain) < count_macs(adaptive)
    assert count_parameters(adaptive) - count_parameters(plain) == (16 + 24 + 32 + 32 + 24 + 16) * 65


@pytest.mark.parametrize("name", UNET_CONFIGS)
def test_every_named_unet_takes_latents_of_32_cells(name):
    with torch.device("meta"):
        model = create_model(name)
        assert model(torch.empty(2, 4, 32, 32), *torch.zeros(2, 2, dtype=torch.int64)).shape == (2, 8, 32, 32)


def test_inputs_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="input size 10 does not halve 2 times: use a multiple of 4, such as 12"):
        tiny(input_size=10)
    with pytest.raises(ValueError, match="init 'none'"):
        tiny(init="none")
    model = tiny()
    x, t, y = batch(model)
    with pytest.raises(ValueError, match=r"labels span 0\.\.11, expected 0\.\.10"):
        model(x, t, torch.tensor([0, 1, 2, 11]))
    with pytest.raises(ValueError, match=r"x has shape \(4, 4, 4, 4\)"):
        model(x[..., :4, :4], t, y)


def test_a_training_config_builds_it_and_the_sampler_draws_from_it():
    config = TrainConfig(latents="", model="MiniUNet-S", input_size=8, num_classes=10, seed=3)
    model, again = build_model(config), build_model(config)
    torch.testing.assert_close(dict(model.state_dict()), dict(again.state_dict()), rtol=0, atol=0)
    assert isinstance(model, MiniUNet)
    latents = sample(randomized(model), [0, 9], NoiseSchedule.linear(), "4", guidance=Guidance(2.0), seeds=[0, 1])
    assert latents.shape == (2, 4, 8, 8) and latents.isfinite().all()
