# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Construction: a transformer that starts as the identity
#
# **Question.** What exactly is a DiT, down to the order of sines and cosines, and how do you know that yours is the paper's?
#
# **Answer.** A vision transformer on patches of the latent, whose every block is switched off at the start and switched on by the condition. Its twelve published sizes can be rebuilt from four numbers each; the multiply-accumulates counted below are the paper's, and the parameters printed in the replication post are not.
#
# *Claimed in:* the paper, section 3.2 and Table 4; the post, "The architecture, faithfully"; the lesson, "Timestep embedding". *Time:* laptop 2 to 3.5 min on two cores, nearly all of it the table of harm at the end.

# %% tags=["parameters"]
profile: str = "laptop"  # smoke, laptop, gpu or paper
data: str = ""  # a folder of IDX files or of class folders; empty: what the profile says
autoencoder: str = ""  # "embedded", an SD-VAE name or a local folder; empty: what the profile says

# %%
from dit_repro.book import start

run = start(globals())

# %%
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from dit_repro.models import (
    DIT_CONFIGS,
    count_macs,
    count_parameters,
    create_model,
    patchify,
    sincos_position_grid,
    timestep_embedding,
    unpatchify,
)
from dit_repro.profiles import get_profile

settings = get_profile(profile, data=data, autoencoder=autoencoder)
vae = settings.data.autoencoder()   # now: what is missing is said before anything runs
torch.manual_seed(0)
model = create_model("DiT-nano/2", input_size=8, num_classes=10)

# %% [markdown]
# ![Two drawings. Above, the network: a noisy latent becomes tokens, positions are added, blocks follow one another, a final layer and unpatchify give the noise; timestep and label add up to one condition, which enters every block. Below, one block: the condition makes two shifts, two scales and two gates, and the gates, zero at the start, close the attention and the MLP branch.](../figures/dit-block.svg)
#
# *The network and one of its blocks, with the shapes that the code below has. N images, C channels and S cells a side of the latent, T tokens of width D, patches of p cells a side. Orange and dashed is the condition; a black 0 marks what is zero at the start.*
#
# ## From latent to tokens and back
#
# The latent is cut into patches, each patch becomes one token, and after the last block each token is laid back as a patch. With patch size 2 an 8x8 latent gives 16 tokens, a 32x32 latent 256. Halving the patch quadruples the tokens and, with them, the work, while the parameters hardly change: this is the axis along which the paper's figure of compute against quality runs.

# %%
latent = torch.arange(2 * 4 * 8 * 8, dtype=torch.float32).reshape(2, 4, 8, 8)  # (N, C, H, W)
tokens = patchify(latent, 2)  # (N, T, p*p*C)
assert torch.equal(unpatchify(tokens, 2), latent)
list(latent.shape), list(tokens.shape)

# %% [markdown]
# ## Where a token is
#
# Tokens carry no order, so a fixed table of sines and cosines is added to them. The function in the official code that fills the first half of the channels is named for the height, but the mesh it is given makes that half follow the *column*. Trained from scratch nobody would notice: it is a relabelling. Loaded with the released weights the pictures come out transposed in their coordinates and wrong everywhere.

# %%
grid = sincos_position_grid(128, 8)  # (T, D), T = 8 x 8
similarity = grid @ grid.T / grid.square().sum(1)  # (T, T)
figure, axes = plt.subplots(1, 2, figsize=(8, 3), width_ratios=[1.6, 1])
axes[0].imshow(grid.T, aspect="auto", cmap="RdBu_r", interpolation="nearest")
axes[0].set(xlabel="token, row by row", ylabel="channel")
axes[0].axhline(63.5, color="black", linewidth=1)
for panel in axes:
    panel.grid(False)
picture = axes[1].imshow(similarity[27].reshape(8, 8), cmap="viridis", interpolation="nearest")
axes[1].set(xlabel="column", ylabel="row", title="similarity to token (3, 3)")
figure.colorbar(picture, ax=axes[1], shrink=0.8)
run.figure(figure, name="position-grid", caption="Left: the position table of an 8x8 grid. Channels above the line repeat "
           "every eight tokens, so they encode the column; those below change once a row. Right: nearby cells look alike.")
first_half = grid[:, :64].reshape(8, 8, 64)
run.record("first_half_encodes_column", bool((first_half == first_half[:1]).all()))

# %% [markdown]
# ## Which timestep it is
#
# The timestep enters as 256 sinusoids of the raw integer, cosines first, frequencies falling geometrically with exponent i/128. Two slips are common: dividing by 127 instead of 128, and sines first.
#
# > **Predict first.** The lesson gives two reasons against feeding the number t itself: its size, and that neighbours are too close after division by 1,000. How different are the embeddings of t = 500 and t = 501 compared with t and a step ten times as long?

# %%
t = torch.arange(0, 1000, 4)
waves = timestep_embedding(t, 256)  # (250, 256)
figure, axes = plt.subplots(1, 2, figsize=(8, 3), width_ratios=[1.6, 1])
axes[0].imshow(waves.T, aspect="auto", cmap="RdBu_r", extent=(0, 1000, 256, 0), interpolation="nearest")
axes[0].set(xlabel="timestep", ylabel="channel: cosines, then sines")
axes[0].grid(False)
gaps = torch.arange(0, 101)
distance = (timestep_embedding(500 + gaps, 256) - timestep_embedding(torch.tensor([500]), 256)).norm(dim=1)
axes[1].plot(gaps, distance, label="sinusoids")
axes[1].plot(gaps, gaps / 1000, label="t / 1000")
axes[1].set(xlabel="steps from t = 500", ylabel="distance")
axes[1].legend()
run.figure(figure, name="timestep-fingerprint", caption="Left: the fingerprint of every timestep. Right: how far two "
           "timesteps are apart, as sinusoids and as one scaled number.")

# %%
frequencies = torch.exp(-math.log(10_000) * torch.arange(160, dtype=torch.float64) / 160)  # the lesson's width, 320
run.record("fastest_period_d320", 2 * math.pi / frequencies[0])
run.record("slowest_period_d320", 2 * math.pi / frequencies[-1])
everywhere = torch.arange(1000.0)
run.record("raw_timestep_scale_ratio", everywhere.square().mean().sqrt() / timestep_embedding(everywhere).square().mean().sqrt())
neighbor_distance = distance[1] / timestep_embedding(torch.tensor([500]), 256).norm()
run.record("neighbor_distance", neighbor_distance)
run.record("number_distance", 1 / 500)  # of t, or of t / 1000: relative as well
run.record("neighbor_distance_ratio", neighbor_distance / run["number_distance"])

# %% tags=["hide-input"]
run.say("""At the lesson's width of 320 the periods run from **{fastest_period_d320:.2f}** to **{slowest_period_d320:,.0f}** timesteps; it says 6.3 and about 59,000. Between timesteps 500 and 501 the fingerprint moves by {neighbor_distance:.0%} of its length, t/1000 by {number_distance:.1%} of its value. As a plain number t is {raw_timestep_scale_ratio:,.0f} times as large as the sinusoids. What either does to training is measured at the end of this chapter.""")

# %% [markdown]
# ## The block
#
# A block is attention and an MLP, each around a residual connection. The condition, timestep plus label, is turned by one linear layer into six vectors: shift, scale and gate for either half. The layer starts at zero, so every gate is zero and each block returns its input; the final layer starts at zero too, so the whole network returns zero. The following cell does not take this on trust.

# %%
x, t, y = torch.randn(16, 4, 8, 8), torch.randint(0, 1000, (16,)), torch.randint(0, 11, (16,))
tokens, condition = torch.randn(16, 16, 128), torch.randn(16, 128)
with torch.no_grad():
    run.record("output_max_abs_at_init", model(x, t, y).abs().max())
    identity = [(block(tokens, condition) - tokens).abs().max().item() for block in model.blocks]
run.record("block_max_change_at_init", max(identity))

# %% tags=["hide-input"]
run.say("""Largest output of the network at the start: **{output_max_abs_at_init}**. Largest change that any of its blocks makes to its input: **{block_max_change_at_init}**. Not small: zero.""")

# %%
from dit_repro.diffusion import NoiseSchedule, Objective, training_losses

noise = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(0))
losses = training_losses(model, x, t, y.clamp(max=9), NoiseSchedule.linear(1000), Objective(), noise=noise)
losses.total.mean().backward()
moved = {name: p.grad.abs().max().item() > 0 for name, p in model.named_parameters() if p.grad is not None}
run.record("parameters_with_gradient_at_start", sum(moved.values()))
run.record("parameter_tensors", len(moved))
run.record("loss_at_start", losses.mse.mean())

# %% tags=["hide-input"]
run.say("""With all outputs zero the loss is the mean square of the noise itself: one in expectation, {loss_at_start:.3f} for this draw. Only {parameters_with_gradient_at_start} of {parameter_tensors} parameter tensors receive any gradient in the first step, those of the last linear layer. The rest wakes up one step later, from the end of the network to its start.""")

# %% [markdown]
# ## How large it is
#
# Twelve configurations, four sizes times three patch sizes. The parameters are counted from the layout of the released checkpoint, position table included; the multiply-accumulates from every matrix product and convolution that a forward pass of one 32x32x4 latent executes. The paper calls the second column Gflops. It holds multiply-accumulates: a flop count would be twice that, and a utilization computed from it half as good as it looks.

# %%
rows = []
for name, config in DIT_CONFIGS.items():
    with torch.device("meta"):  # shapes only: nothing is allocated
        network = create_model(name)
    rows.append({"model": name, "depth": config.depth, "width": config.width, "heads": config.heads,
                 "parameters": count_parameters(network), "paper, M": config.paper_params_millions,
                 "GMACs": count_macs(network) / 1e9, "paper, G": config.paper_gmacs})
table = pd.DataFrame(rows).set_index("model")
table.style.format({"parameters": "{:,}", "paper, M": "{:.0f}", "GMACs": "{:.2f}", "paper, G": "{:.2f}"}, na_rep="")

# %%
published = table.dropna()
run.record("configurations", len(published))
run.record("parameters_dit_b_2", int(table.parameters["DiT-B/2"]))
run.record("parameters_dit_xl_2", int(table.parameters["DiT-XL/2"]))
run.record("parameter_ratio_xl_2_to_b_2", run["parameters_dit_xl_2"] / run["parameters_dit_b_2"])
run.record("flops_dit_xl_2_billions", 2 * table.GMACs["DiT-XL/2"])
run.record("parameters_worst_gap_millions", (published.parameters / 1e6 - published["paper, M"]).abs().max())
run.record("macs_worst_gap_billions", (published.GMACs - published["paper, G"]).abs().max())

# %% tags=["hide-input"]
run.say("""No multiply-accumulate count of the {configurations} differs from the paper's column by more than **{macs_worst_gap_billions:.3f}** billion, and no parameter count by more than {parameters_worst_gap_millions:.2f} million. Read as floating-point operations, XL/2's 118.64 would be {flops_dit_xl_2_billions:.2f}.

The post gives 130.7 million parameters for B/2, "exactly" the paper's, and 675.8 million for XL/2. Counted, the released layout has **{parameters_dit_b_2:,}** and **{parameters_dit_xl_2:,}**. The ratio {parameter_ratio_xl_2_to_b_2:.2f} is right all the same. The differences, about 0.2 and 0.7 million, are too small to matter for quality and too large for "exactly": the post's model is not quite the paper's, and chapter 8 comes back to what else was not.""")

# %%
figure, axes = plt.subplots(figsize=(7, 3.4))
for size, group in published.groupby(published.index.str[4:].str.split("/").str[0], sort=False):
    axes.loglog(group.GMACs, group.parameters / 1e6, marker="o", label=size)
    axes.annotate(f" {size}", (group.GMACs.iloc[-1], group.parameters.iloc[-1] / 1e6), va="center")
axes.set(xlabel="multiply-accumulates of one forward pass, 1e9", ylabel="parameters, millions",
         xticks=[0.3, 1, 3, 10, 30, 100], xticklabels=[0.3, 1, 3, 10, 30, 100],
         yticks=[30, 100, 300, 1000], yticklabels=[30, 100, 300, 1000])
run.figure(figure, name="sizes", caption="The twelve models. Along a line only the patch size changes, 8, 4, 2 from left to "
           "right: sixteen times the work with the same parameters.")

# %% [markdown]
# ## A table of harm
#
# The post could not explain its remaining distance from the paper and suspected details of reimplementation. Here are the ones that reimplementations get wrong, planted one at a time and measured in the two situations in which they can occur.
#
# *Loaded*: a model trained correctly for some hundred steps, then read by code with the mistake. That is what happens to the released weights in somebody's reimplementation. *Trained*: the mistake is there from the first step, and the model has the chance to grow around it. The measure is the loss on held-out latents, averaged over timesteps, and how much of it several runs that differ in their seed alone already spread over.
#
# > **Predict first.** Which of the mistakes below ruin a loaded model and do nothing at all to one that is trained with them?

# %%
from dataclasses import replace
from functools import partial

from dit_repro.diffusion import NoiseSchedule
from dit_repro.models.mistakes import INIT_MISTAKES, MISTAKES, apply_mistake
from dit_repro.training import loss_by_timestep
from dit_repro.training.brief import build_with, train_each
from dit_repro.training.state import build_model

train_store, test_store = (settings.data.store(split, vae) for split in ("train", "test"))
harm = settings.construction
config = settings.training(train_store, num_steps=harm.num_steps, global_batch_size=harm.batch_size,
                           model="DiT-nano/2")
some = np.random.default_rng(0).permutation(len(test_store))[: harm.loss_images]
noise = torch.randn(len(some), *test_store.latent_shape, generator=torch.Generator().manual_seed(0))
x0 = test_store.latents(some, np.zeros(len(some), bool), noise)  # (N, C, h, w), held out
labels = torch.from_numpy(test_store.labels[some])


def held_out_loss(model) -> float:
    timesteps = range(10, 1000, 110)
    return loss_by_timestep(model, x0, labels, NoiseSchedule.linear(1000), timesteps, seed=1).mean().item()

# %%
wrong = [mistake for mistake in (*MISTAKES, *INIT_MISTAKES) if not mistake.relabels]  # the others cannot be told apart
seeds = [replace(config, seed=seed) for seed in range(harm.seeds)]
models = train_each([*((partial(build_model, seeded), seeded) for seeded in seeds),
                     *((partial(build_with, mistake, config), config) for mistake in wrong)], "seeds and mistakes", harm.processes)
correct, mistaken = models[: harm.seeds], dict(zip(wrong, models[harm.seeds:]))
baseline = np.array([held_out_loss(model) for model in correct])
run.record("correct_loss", baseline.mean(), seeds=harm.seeds, interval=(baseline.min(), baseline.max()))
rows = []
for mistake in (*MISTAKES, *INIT_MISTAKES):
    row = {"mistake": mistake.name}
    if mistake in MISTAKES:  # what is initialized differently can still be loaded
        loaded = build_model(config)
        loaded.load_state_dict(correct[0].state_dict())
        row["loaded"] = held_out_loss(apply_mistake(loaded, mistake)) - baseline[0]
    if mistake in mistaken:
        row["trained"] = held_out_loss(mistaken[mistake]) - baseline[0]
    rows.append(row)

# %%
damage = pd.DataFrame(rows).set_index("mistake")
spread = np.ptp(baseline)
figure, panels = plt.subplots(1, 2, figsize=(9, 4.8), sharey=True)
for axes, column in zip(panels, ("loaded", "trained")):
    known = damage[column].dropna()
    axes.barh(known.index, known, color=np.where(known.abs() > spread, "C1", "C0"))
    axes.axvspan(-spread, spread, color="#6b6b73", alpha=0.25, linewidth=0)
    axes.set(xlabel="added held-out loss", title=column)
    axes.set_xscale("symlog", base=100, linthresh=2 * spread)  # linear within twice the spread
    axes.grid(axis="y", visible=False)
panels[0].set_yticks(range(len(damage)), damage.index)
panels[0].invert_yaxis()
run.figure(figure, name="harm", caption="Loss that each mistake adds to a correctly trained model that is read with it (left) "
           "and to one trained with it (right; relabellings left out). Grey: spread of correct runs over their seeds.")

# %%
run.record("mistakes_planted", len(damage))
run.record("loaded_harmful", int((damage.loaded > spread).sum()))
run.record("trained_harmful", int((damage.trained > spread).sum()))
run.record("seed_spread", spread)
run.record("correct_runs", harm.seeds)
run.record("mistakes_loaded", int(damage.loaded.count()))
run.record("mistakes_trained", int(damage.trained.count()))
run.record("init_added_loss_in_spreads", damage.trained["init: PyTorch's defaults"] / spread)
run.record("raw_timestep_added_loss_in_spreads", damage.trained["timestep: t as a number"] / spread)
run.record("scaled_timestep_added_loss_in_spreads", damage.trained["timestep: t / 1000 as a number"] / spread)
run.record("diffusers_exponent_added_loss", damage.loaded["timestep: exponent i / (half - 1)"])
run.record("worst_loaded", damage.loaded.idxmax())
run.record("worst_trained", damage.trained.idxmax())

# %% tags=["hide-input"]
init, number = run["init_added_loss_in_spreads"], run["scaled_timestep_added_loss_in_spreads"]
run.say("""The {correct_runs} correct runs end at {correct_loss:.4f} on average; largest and smallest are {seed_spread:.4f} apart, and that range is the yardstick. Of {mistakes_loaded} mistakes in a model that is *loaded*, {loaded_harmful} add more than it; worst is "{worst_loaded}". Of {mistakes_trained} *trained* with, {trained_harmful} do; worst is "{worst_trained}". PyTorch's default initialization, which the post began with, adds {init_added_loss_in_spreads:+.1f} times the range: """
        + ("worse than the paper's." if init > 1 else "better than the paper's." if init < -1 else
           "no more than a change of seed.") + """

As a plain number the timestep adds {raw_timestep_added_loss_in_spreads:.1f} times the range. Divided by 1,000, so that neighbors are a thousandth apart, it adds {scaled_timestep_added_loss_in_spreads:.1f} times the range"""
        + (". " if number > 1 else ": a network need not tell 500 from 501. ") + """The exponent with half − 1 is what the diffusers library computes for released DiT weights; read that way this model loses {diffusers_exponent_added_loss:+.4f}.

Reading other people's weights and training one's own are different tests, and the first is the stricter one. A mistake whose bar on the right lies in the grey cannot explain a gap that remains after training with one's own code, as the post's does.""")

# %%
damage.style.format("{:+.4f}", na_rep="")

# %% [markdown]
# <details><summary>Answers to the predictions</summary>
#
# The relabellings: order of the position axes, order of sines and cosines, layout of a patch, and, least of all here, order of shift and scale. Random initial weights do not care which input is which; trained ones do. And the fingerprint does not move in proportion: the fastest waves turn by a whole radian per step and have wrapped round after six, so the right-hand curve rises steeply at first and then flattens, while the slow waves keep counting. A single number moves in proportion.
# </details>
#
# **Exercise.** The null class is one more row of the label table. How many parameters does guidance cost DiT-XL/2, and what fraction of the model is that?
#
# <details><summary>Answer</summary>
#
# One row of width 1,152, under two millionths of the model. The cost of guidance is paid when sampling, in a second forward pass per step.
# </details>

# %% [markdown]
# ## Claims of this chapter

# %%
run.claims()

# %% [markdown]
# ## What could not be shown at this scale
#
# The released checkpoint itself was not loaded: it is not in the package. Its layout is, name by name and shape by shape, and `load_released_checkpoint` is tested on files of that layout; the tests also hold the network's outputs against those of the diffusers library's independent implementation under the same weights.
