# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # U-Net or transformer
#
# **Question.** DiT's claim is that a diffusion model does not need a U-Net. What does the U-Net bring at equal cost, on the same latents, with the same draws? And which of the rules that a lesson on U-Net training hands down survive a measurement?
#
# **Answer.** Trained alike for a short while both networks learn the task, and the chapter says which is ahead, with the spread over seeds. Of the lesson's rules several are sound, several are right about something else than what they say, and a few are contradicted by arithmetic that takes a line of code.
#
# *Claimed in:* the lesson, all sections; the paper, section 1. *Time:* laptop 3.5 to 4.5 min on two cores, 13 short runs and their samples, and a minute when these are in the workspace already; at the paper profile days.

# %% tags=["parameters"]
profile: str = "laptop"  # smoke, laptop, gpu or paper
data: str = ""  # a folder of IDX files or of class folders; empty: what the profile says
autoencoder: str = ""  # "embedded", an SD-VAE name or a local folder; empty: what the profile says
clip: str = ""  # a folder with CLIP's weights, for a real CLIP score beside the agreement; empty: not scored

# %%
from dit_repro.book import start

run = start(globals())

# %%
import time
from dataclasses import replace
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from torch import nn

from dit_repro.book.figures import draw_baselines, sample_grid
from dit_repro.diffusion import NoiseSchedule, Objective, loss_of_unit_gaussian, training_losses
from dit_repro.evaluation import FeatureStatistics, frechet_distance, standard_error
from dit_repro.evaluation.clip import ClipScore, describe_classes
from dit_repro.models import count_macs, count_parameters
from dit_repro.profiles import DEVICE, get_profile
from dit_repro.sampling import Guidance, sample, wilson_interval
from dit_repro.training import launch, launch_each, loss_by_timestep
from dit_repro.training.batches import draw_batch
from dit_repro.training.state import build_model

# %%
settings = get_profile(profile, data=data, autoencoder=autoencoder)
numbers, schedule = settings.backbones, NoiseSchedule.linear(1000)
vae, judge, features_of = settings.data.autoencoder(), settings.data.judge(), settings.data.features()
clip_score = ClipScore(clip, DEVICE) if clip else None   # now: a wrong folder costs no training
train_store, test_store = (settings.data.store(split, vae) for split in ("train", "test"))
held_out = settings.data.source("test")
base = settings.training(train_store, num_steps=numbers.num_steps, global_batch_size=numbers.batch_size,
                         log_every=numbers.log_every, checkpoint_every=numbers.checkpoint_every,
                         archive_every=numbers.checkpoint_every, ema_decay=numbers.ema_decay, on_alarm="record",
                         compile=settings.train.compile and bool(numbers.processes))

# %% [markdown]
# ## Equal cost
#
# `MiniUNet` follows the lesson's drawing {cite}`ronneberger2015unet,ho2020denoising,rombach2022high`. Residual blocks of group norm, SiLU and convolution, twice; the timestep is added between the two as one number a channel. Between levels the resolution halves. At the coarser levels a transformer block follows, with self-attention and with cross-attention to four tokens of the label. On the way up each level gets the features of the way down beside its own. Block by block it is tested against diffusers. Its widths are chosen so that a forward pass costs as many multiply-accumulates as the DiT's.

# %%
names = {"DiT": base.model, "U-Net": numbers.unet}
rows = {}
for kind, name in names.items():
    model = build_model(replace(base, model=name))
    rows[kind] = {"model": name, "multiply-accumulates": count_macs(model), "parameters": count_parameters(model)}
cost = pd.DataFrame(rows).T
for column, metric in (("multiply-accumulates", "macs_unet_over_dit"), ("parameters", "parameters_unet_over_dit")):
    run.record(metric, cost[column]["U-Net"] / cost[column]["DiT"])
cost.style.format({"multiply-accumulates": "{:,}", "parameters": "{:,}"})


# %%
def stepper(name: str):
    """A training step on one batch, to be called again and again."""
    config = replace(base, model=name)
    model, batch = build_model(config).to(DEVICE), draw_batch(config, train_store, 1).map(lambda v: v.to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)

    def step():
        began = time.perf_counter()
        losses = training_losses(model, batch.x0, batch.t, batch.y, schedule, config.objective, noise=batch.noise)
        losses.total.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began
    return step


steppers = {kind: stepper(name) for kind, name in names.items()}
seconds = np.array([[step() for step in steppers.values()] for _ in range(numbers.timing_steps + 1)])[1:]  # in turn
ratios = seconds[:, 1] / seconds[:, 0]
run.record("seconds_a_step_dit", np.median(seconds[:, 0]))
run.record("seconds_a_step_unet", np.median(seconds[:, 1]))
run.record("seconds_unet_over_dit", np.median(ratios), interval=(ratios.min(), ratios.max()))

# %% tags=["hide-input"]
run.say("""The U-Net costs {macs_unet_over_dit:.1%} of the DiT's multiply-accumulates and has {parameters_unet_over_dit:.2f} times its parameters. Timed in turn in one process a step takes {seconds_a_step_dit:.3f} s with the DiT and {seconds_a_step_unet:.3f} s with the U-Net, a ratio of **{seconds_unet_over_dit:.2f}** ({seconds_unet_over_dit.low:.2f} to {seconds_unet_over_dit.high:.2f} over the turns). Equal multiply-accumulates are not equal seconds, and the ratio belongs to this device.""")

# %% [markdown]
# ## What a cell can see
#
# The lesson argues for the U-Net by its receptive field: a 3x3 convolution adds two cells, so a stack of them needs 32 layers before an output cell sees 64 cells, while one convolution at an 8x8 bottleneck touches 24x24 of them, "over a third of the image". The gradient of one output cell with respect to the input says exactly what that cell depends on.
#
# > **Predict first.** After 32 convolutions the middle cell sees a width of 64. What does a corner see? And how much of a 64x64 latent is 24x24?

# %%
def cells_seen(layers: list, size: int, place: float) -> int:
    """Rows of a (size, size) input on which the output cell at `place`, from 0 (corner) to 0.5 (middle), depends."""
    network = nn.Sequential(*layers).double()
    for parameter in network.parameters():
        nn.init.constant_(parameter, 1 / 9)  # all positive: nothing cancels
    x = torch.ones(1, 1, size, size, dtype=torch.float64, requires_grad=True)
    y = network(x)
    cell = int(place * y.shape[-1])
    y[0, 0, cell, cell].backward()
    return int((x.grad[0, 0] != 0).any(1).sum())


def convolutions(count: int, **options) -> list:
    return [nn.Conv2d(1, 1, 3, padding=1, bias=False, **options) for _ in range(count)]


run.record("reach_of_32_convolutions", cells_seen(convolutions(32), 129, 0.5))
run.record("corner_reach_of_32_convolutions", cells_seen(convolutions(32), 64, 0))
run.record("bottleneck_reach", cells_seen([nn.AvgPool2d(8), *convolutions(1)], 64, 0.5))
run.record("bottleneck_reach_strided", cells_seen([*convolutions(3, stride=2), *convolutions(1)], 128, 0.5))
run.record("bottleneck_share_of_image", run["bottleneck_reach"] ** 2 / 64**2)
run.record("bottleneck_share_of_width", run["bottleneck_reach"] / 64)

# %% tags=["hide-input"]
run.say("""Thirty-two convolutions reach {reach_of_32_convolutions} cells, so the middle of a 64-wide latent sees all of it; a corner sees {corner_reach_of_32_convolutions} rows of 64 and would need 63 layers. One convolution on a map pooled by eight does touch {bottleneck_reach} cells a side, {bottleneck_reach_strided} where the pooling is done by strided convolutions as in the lesson's own network. But {bottleneck_reach} of 64 is {bottleneck_share_of_width:.1%} of the *width*; of the image it is **{bottleneck_share_of_image:.1%}**.""")

# %% [markdown]
# A DiT has no such question, since its first attention already connects every token with every other. The price of attention is the lesson's next topic: 16.8 million entries for one head at 64x64, while the 77 tokens of a prompt cost next to nothing. Entries are one count; multiply-accumulates are another, counted here from real attention modules with the widths of Stable Diffusion 1.5.

# %%
from diffusers import UNet2DConditionModel
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch.utils.flop_counter import FlopCounterMode

from dit_repro.models.unet import Attention


def macs_of(module, *inputs) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*inputs)
    return counter.get_total_flops() // 2


rows = []
with torch.device("meta"):  # shapes only
    for size, width in ((64, 320), (32, 640), (16, 1280), (8, 1280)):
        x, text = torch.empty(1, size**2, width), torch.empty(1, 77, 768)
        rows.append({"positions": f"{size}x{size}", "self, entries": size**4, "cross, entries": size**2 * 77,
                     "self, macs": macs_of(Attention(width, 8), x),
                     "cross, macs": macs_of(Attention(width, 8, 768), x, text)})
    stable_diffusion = UNet2DConditionModel(cross_attention_dim=768)
attention = pd.DataFrame(rows).set_index("positions")
attention.style.format("{:,}")

# %%
transformers = [m for m in stable_diffusion.modules() if isinstance(m, Transformer2DModel)]
run.record("attention_entries_64", attention["self, entries"]["64x64"])
run.record("cross_over_self_entries_32", attention["cross, entries"]["32x32"] / attention["self, entries"]["32x32"])
run.record("cross_over_self_macs_32", attention["cross, macs"]["32x32"] / attention["self, macs"]["32x32"])
run.record("parameters_sd_1_5_millions", count_parameters(stable_diffusion) / 1e6)
run.record("transformer_share_of_sd_1_5", sum(map(count_parameters, transformers)) / count_parameters(stable_diffusion))

# %% tags=["hide-input"]
run.say("""The largest matrix has {attention_entries_64:,} entries, as the lesson says. At 32x32 the cross-attention has {cross_over_self_entries_32:.1%} of the self-attention's entries and **{cross_over_self_macs_32:.0%}** of its multiply-accumulates, because queries and outputs are projected at every position whatever they attend to. """
        + ("So text is cheap in memory and not nearly free in arithmetic." if run["cross_over_self_macs_32"] > 0.1 else
           "So text is nearly free by either count.")
        + """ And of the {parameters_sd_1_5_millions:.0f} million parameters of that U-Net, {transformer_share_of_sd_1_5:.0%} are in transformer blocks: """
        + ("the majority is in the convolutions." if run["transformer_share_of_sd_1_5"] < 0.5 else "the majority."))


# %% [markdown]
# ## The two networks, trained alike
#
# Same latents, same order, same noise, same timesteps for a seed; the paper's recipe at the profile's rate; {cite}`peebles2023scalable` against the design it replaces. The runs are short, so what is compared is the beginning of training. The same cell trains the variants that the next sections need.

# %%
seeds, few = range(numbers.seeds), range(numbers.variant_seeds)
configs = {(kind, seed): replace(base, model=name, seed=seed) for seed in seeds for kind, name in names.items()}
configs |= {("min-SNR", seed): replace(base, seed=seed, objective=Objective(min_snr_gamma=5.0)) for seed in seeds}
configs |= {("no skips", seed): replace(base, model=f"{numbers.unet}/no-skips", seed=seed) for seed in few}
configs |= {("adaptive", seed): replace(base, model=f"{numbers.unet}/adaptive", seed=seed) for seed in few}
runs = launch_each({key: (config, settings.run_path("backbones", config)) for key, config in configs.items()}, numbers.processes)
arms = list(dict.fromkeys(kind for kind, _ in runs))
{"runs": len(runs), "steps": base.num_steps, "images a step": base.global_batch_size, "seeds": numbers.seeds}

# %%
timesteps = torch.arange(20, 1000, 140)
some = np.random.default_rng(0).permutation(len(test_store))[: numbers.loss_images]
noise = torch.randn(len(some), *test_store.latent_shape, generator=torch.Generator().manual_seed(0))
x0, y0 = test_store.latents(some, np.zeros(len(some), bool), noise), torch.from_numpy(test_store.labels[some])
losses = {key: loss_by_timestep(folder.load_model(base.num_steps).to(DEVICE), x0, y0, schedule, timesteps).mean(1).numpy()
          for key, folder in runs.items()}


def over_seeds(values: dict, first: str, second: str):
    """Ratio first / second, seed by seed: its geometric mean, the lowest and highest seed, and how many: for `record`."""
    shared = [seed for kind, seed in values if kind == first and (second, seed) in values]
    ratio = np.array([np.mean(values[first, seed]) / np.mean(values[second, seed]) for seed in shared], float)
    value = float(np.exp(np.log(ratio).mean()).clip(ratio.min(), ratio.max()))
    return {"value": value, "interval": (float(ratio.min()), float(ratio.max())), "seeds": len(ratio)}


run.record("loss_dit_over_unet", **over_seeds(losses, "DiT", "U-Net"))
for name, some in (("low", timesteps < 400), ("high", timesteps > 500)):
    run.record(f"loss_dit_over_unet_{name}_t", **over_seeds({key: value[some] for key, value in losses.items()}, "DiT", "U-Net"))

# %%
figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.4))
for kind in arms[:2]:
    curves = pd.concat([runs[kind, seed].metrics() for seed in seeds]).groupby("step").mse.mean()
    panels[0].plot(curves.index, curves, label=kind)
    rows = np.stack([losses[kind, seed] for seed in seeds]) / loss_of_unit_gaussian(schedule)[timesteps].numpy()
    panels[1].errorbar(timesteps, rows.mean(0), yerr=np.ptp(rows, axis=0) / 2, capsize=2, marker="o", markersize=3, label=kind)
panels[1].axhline(1, color="#6b6b73", linestyle="--", linewidth=1, label="knows only the variance")
panels[0].set(xlabel="step", ylabel="training noise MSE", ylim=(0, 1.05))
draw_baselines(panels[0], {"zero predictor": 1.0, "knows only the variance": loss_of_unit_gaussian(schedule).mean().item()})
panels[0].legend(loc="center right")
panels[1].set(xlabel="timestep", ylabel="held-out MSE over the baseline's", yscale="log")
panels[1].legend(loc="upper center")
run.figure(figure, name="losses", caption="Left, the training loss of both networks, mean over seeds. Right, the held-out loss of the "
           "averaged weights by timestep, over the loss of a predictor that knows only the variance; bars span the seeds.")


# %%
def decode(latents, size: int = settings.sampling.batch_size):
    return torch.cat([vae.decode(part) for part in latents.split(size)])

# %%
def draw(model, labels, scale=numbers.guidance_scale, steps=numbers.steps, method="ddim", schedule=schedule, seeds=None):
    """Decoded images (N, 3, H, W) uint8; image i has seed i, whatever the model, unless `seeds` says otherwise."""
    size = settings.sampling.batch_size
    latents = sample(model, labels, schedule, steps=steps, method=method, guidance=Guidance(scale, channels=None),
                     seeds=range(len(labels)) if seeds is None else seeds, batch_size=size)
    return decode(latents, size)


def statistics(features) -> FeatureStatistics:
    return FeatureStatistics(features.shape[1]).update(features)


def score(images, labels) -> dict:
    """Frechet distance to held-out images, and how many of the samples the judge puts into the class asked for."""
    seen = features_of(images)
    logits = seen.logits if features_of is judge else judge(images).logits
    return {"distance": frechet_distance(statistics(seen.pool), reference), "pool": seen.pool,
            "agreement": (logits.argmax(1) == labels).double().mean().item()}


some = np.random.default_rng(1).permutation(len(held_out))[: numbers.reference_images]
reference = statistics(torch.cat([features_of(held_out.images(part)).pool for part in np.array_split(some, len(some) // 500 + 1)]))
labels = torch.arange(settings.sampling.classes).repeat_interleave(numbers.per_class)
drawn = {key: draw(folder.load_model(base.num_steps).to(DEVICE), labels) for key, folder in runs.items()}
scores = pd.DataFrame({key: score(images, labels) for key, images in drawn.items()}).T

# %%
distances = dict(zip(runs, scores.distance))
run.record("frechet_dit_over_unet", **over_seeds(distances, "DiT", "U-Net"))
for kind, metric in (("DiT", "dit"), ("U-Net", "unet")):
    values, shares = (scores[column][kind].astype(float) for column in ("distance", "agreement"))
    run.record(f"frechet_{metric}", values.mean(), interval=(values.min(), values.max()), seeds=len(values))
    run.record(f"share_in_class_{metric}", shares.mean(), interval=(shares.min(), shares.max()), seeds=len(values))
run.record("standard_error_of_a_distance", standard_error(scores.pool["DiT", 0], reference))
run.record("images_behind_a_distance", len(labels))
run.record("steps_trained", base.num_steps)

# %%
class_names = train_store.class_names[: settings.sampling.classes]
columns = [(kind, seed) for kind in ("DiT", "U-Net") for seed in list(seeds)[:2]]
tiles = [drawn[key].unflatten(0, (len(class_names), -1))[:, place] for key in columns for place in range(2)]
run.figure(sample_grid(torch.stack(tiles, 1), class_names, [kind for kind, _ in columns for _ in range(2)], size=48),
           name="samples", export=True, caption="Guided samples after {steps_trained} steps: two runs of each network, two images of "
           "each. The two images of a class have the same two seeds everywhere.",
           alt="Grid of samples, a row a class; the columns on the left are the DiT's, those on the right the U-Net's.")

# %% tags=["hide-input"]
ahead = "the DiT is ahead" if run["frechet_dit_over_unet"] < 1 else "the U-Net is ahead"
low, high = over_seeds(distances, "DiT", "U-Net")["interval"]
run.say("""After {steps_trained} equal steps the DiT's Fréchet distance is {frechet_dit:.2f} ({frechet_dit.low:.2f} to {frechet_dit.high:.2f} over the seeds) and the U-Net's {frechet_unet:.2f} ({frechet_unet.low:.2f} to {frechet_unet.high:.2f}); the ratio, seed by seed, is **{frechet_dit_over_unet:.2f}** ({frechet_dit_over_unet.low:.2f} to {frechet_dit_over_unet.high:.2f}). A distance here rests on {images_behind_a_distance} images and has a standard error of {standard_error_of_a_distance:.2f}. In their class land {share_in_class_dit:.0%} of the DiT's and {share_in_class_unet:.0%} of the U-Net's samples, and the held-out loss has the ratio {loss_dit_over_unet:.3f} ({loss_dit_over_unet.low:.3f} to {loss_dit_over_unet.high:.3f}). """
        + (f"So this early {ahead}, in every seed. " if (high < 1 or low > 1) else f"On average {ahead}, but not in every seed. ")
        + """Taken apart, the ratio of losses is {loss_dit_over_unet_low_t:.2f} below timestep 400 and {loss_dit_over_unet_high_t:.2f} above 500. """
        + ("The mean loss names one winner and the samples the other, as in chapter 3: the mean is made at the low timesteps, and a sampler begins at the high ones."
           if (run["loss_dit_over_unet"] - 1) * (run["frechet_dit_over_unet"] - 1) < 0 else "The mean loss and the samples agree on the winner."))

# %% [markdown]
# A trained network's receptive field is what it uses, not what it could reach. The gradient of the predicted noise in one middle cell, averaged over held-out inputs, shows it at a noisy and at a nearly clean timestep.

# %%
probes, middle = (800, 100), base.input_size // 2
maps = {}
for kind in names:
    model = runs[kind, 0].load_model(base.num_steps).to(DEVICE)
    for timestep in probes:
        t = torch.full((len(x0),), timestep)
        x = schedule.add_noise(x0, t, noise).to(DEVICE).requires_grad_()
        model(x, t.to(DEVICE), y0.to(DEVICE))[:, : base.in_channels, middle, middle].sum().backward()
        seen = x.grad.abs().sum(1).mean(0).cpu()
        maps[kind, timestep] = seen / seen.sum()
        run.record(f"gradient_from_other_cells_{'dit' if kind == 'DiT' else 'unet'}_{timestep}", 1 - maps[kind, timestep][middle, middle])
figure, panels = plt.subplots(1, 4, figsize=(9.5, 2.7))
for axes, (key, picture) in zip(panels, maps.items()):
    shown = axes.imshow(picture, cmap="viridis", norm="log", vmin=1e-4, vmax=1)
    axes.set(title=f"{key[0]}, timestep {key[1]}", xticks=[], yticks=[])
    axes.grid(False)
figure.colorbar(shown, ax=panels, label="share of the gradient, log", shrink=0.8)
run.figure(figure, name="receptive-field", caption="What the predicted noise in the middle cell depends on: mean absolute gradient "
           "with respect to each input cell, as a share of the whole.")

# %% tags=["hide-input"]
run.say("""At timestep 800 {gradient_from_other_cells_dit_800:.0%} of the DiT's gradient and {gradient_from_other_cells_unet_800:.0%} of the U-Net's come from other cells than the one predicted; at timestep 100 it is {gradient_from_other_cells_dit_100:.0%} and {gradient_from_other_cells_unet_100:.0%}. """
        + ("Both look further when there is less noise. At timestep 800 the input is nearly the noise itself, so the cell all but says its answer; at 100 the picture has to be subtracted first, and the neighbors show the picture."
           if min(run[f"gradient_from_other_cells_{kind}_100"] - run[f"gradient_from_other_cells_{kind}_800"] for kind in ("dit", "unet")) > 0 else
           "The two do not look further with less noise in the same way."))

# %% [markdown]
# ## Cut the skips
#
# "Cut the skip connections and your outputs go soft and blurry", says the lesson, since "the fine detail is genuinely gone by the bottleneck". The variant here puts zeros where a skip would be: same weights at the start, same shapes, same cost. Softness is measured as the energy above half of the highest spatial frequency, of decoded samples and of what the network puts out.
#
# > **Predict first.** The output of this network is noise, not an image. If the output goes soft, what does a sample look like?

# %%
def fine_energy(maps) -> float:
    """Mean energy of maps (N, H, W) above a quarter of a cycle a cell, half of the highest frequency."""
    frequency = torch.fft.fftfreq(maps.shape[-1])
    fine = (frequency[:, None].square() + frequency.square()).sqrt() > 0.25
    return torch.fft.fft2(maps, norm="ortho").abs().square()[:, fine].sum(1).mean().item()


def gray(images):
    return images.float().mean(1) / 255  # (N, H, W)


sharpness = {key: fine_energy(gray(images)) for key, images in drawn.items()}
decoded = decode(x0)  # what the decoder makes of real latents: no sample can be sharper by merit
run.record("sharpness_without_over_with_skips", **over_seeds(sharpness, "no skips", "U-Net"))
run.record("sharpness_unet_over_real", np.mean([sharpness["U-Net", seed] for seed in seeds]) / fine_energy(gray(decoded)))
run.record("sharpness_no_skips_over_real", np.mean([sharpness["no skips", seed] for seed in few]) / fine_energy(gray(decoded)))
run.record("loss_no_skips", np.mean([losses["no skips", seed] for seed in few]), seeds=len(few))
run.record("loss_without_over_with_skips", **over_seeds(losses, "no skips", "U-Net"))
run.record("frechet_without_over_with_skips", **over_seeds(distances, "no skips", "U-Net"))

# %%
def predicted(model, timestep: int):
    """The network's noise for the held-out latents at a timestep, (N, C, h, w), and the decoded x0 that it implies."""
    t = torch.full((len(x0),), timestep)
    x_t = schedule.add_noise(x0, t, noise)
    with torch.no_grad():
        eps = model(x_t.to(DEVICE), t.to(DEVICE), y0.to(DEVICE))[:, : base.in_channels].cpu()
    return eps, decode(schedule.predict_x0(x_t, t, eps))


whole, without = (runs[kind, 0].load_model(base.num_steps).to(DEVICE) for kind in ("U-Net", "no skips"))
predictions = {"U-Net": predicted(whole, 300), "no skips": predicted(without, 300)}
pictures = {"real, decoded": decoded} | {kind: images for kind, (_, images) in predictions.items()}
fine = {kind: fine_energy(eps.flatten(0, 1)) / fine_energy(noise.flatten(0, 1)) for kind, (eps, _) in predictions.items()}
run.record("fine_energy_of_noise_with_skips", fine["U-Net"])
run.record("fine_energy_of_noise_without_skips", fine["no skips"])
run.record("x0_sharpness_without_over_with_skips", fine_energy(gray(pictures["no skips"])) / fine_energy(gray(pictures["U-Net"])))

# %%
plain = loss_by_timestep(whole, x0, y0, schedule, timesteps).mean()
whole.config = replace(whole.config, skips=False)  # cut after training
pictures["cut afterward"] = predicted(whole, 300)[1]
run.record("loss_ratio_cut_after_training", loss_by_timestep(whole, x0, y0, schedule, timesteps).mean() / plain)
levels = len(whole.config.channels) - 1
run.record("bottleneck_numbers_per_latent_number", whole.config.channels[-1] / 4**levels / base.in_channels)
run.record("bottleneck_numbers_per_latent_number_sd", 1280 * 8**2 / (4 * 64**2))
shown = torch.stack([torch.stack([images[place] for images in pictures.values()]) for place in range(min(6, len(x0)))])
run.figure(sample_grid(shown, [train_store.class_names[y] for y in y0[: len(shown)]], list(pictures), size=64), name="skips",
           caption="Clean images predicted in one step from latents at timestep 300: with skips, trained without, and with the skips of the "
           "trained network cut afterward.")

# %% tags=["hide-input"]
ratio, kept = run["x0_sharpness_without_over_with_skips"], run["fine_energy_of_noise_without_skips"] / run["fine_energy_of_noise_with_skips"]
run.say("""Trained without skips the network's held-out loss is {loss_without_over_with_skips:.2f} times as high: {loss_no_skips:.2f}, where a network that answers zero has one. What it puts out is noise, and of the true noise's fine energy its prediction has {fine_energy_of_noise_with_skips:.0%} with skips and **{fine_energy_of_noise_without_skips:.0%}** without. """
        + ("So the output does go soft, as the lesson says. " if kept < 0.9 else "So the output is not soft. ")
        + """Its predictions of the clean image have **{x0_sharpness_without_over_with_skips:.2f}** times the fine energy of those with skips. """
        + ("They are soft as well. " if ratio < 0.9 else
           "They are about as sharp. " if ratio <= 1.1 else
           "They are rough, not soft, since noise that is not predicted is not removed. The lesson's picture is that of a network that predicts the image itself. ")
        + """Whole samples have {sharpness_without_over_with_skips:.2f} times the fine energy ({sharpness_without_over_with_skips.low:.2f} to {sharpness_without_over_with_skips.high:.2f} over the seeds; real latents decoded: with skips {sharpness_unet_over_real:.2f} of theirs, without {sharpness_no_skips_over_real:.2f}) and {frechet_without_over_with_skips:.2f} times the Fréchet distance. """
        + ("With a loss this close to one, though, they are no pictures that could be sharp or blurred. " if run["loss_no_skips"] > 0.5 else "")
        + """Cut after training, the loss is {loss_ratio_cut_after_training:.1f} times what it was.

The lesson's reason needs a caveat. The bottleneck holds {bottleneck_numbers_per_latent_number:.1f} numbers for each number of the latents here, and {bottleneck_numbers_per_latent_number_sd:.0f} in Stable Diffusion 1.5. There is room for every detail; what the skips spare the network is learning to carry it there and back. In a denoiser that is most of the work, because the noise to be predicted is itself nothing but detail.""")

# %% [markdown]
# ## Adaptive group norm
#
# "Stronger conditioning at slightly more cost": the timestep predicts a scale as well as a shift. {cite}`dhariwal2021diffusion` measured it on ImageNet; the DiT's adaLN is the same idea on layer norm.

# %%
adaptive = build_model(replace(base, model=f"{numbers.unet}/adaptive"))
run.record("macs_adaptive_over_additive", count_macs(adaptive) / cost["multiply-accumulates"]["U-Net"])
run.record("loss_adaptive_over_additive", **over_seeds(losses, "adaptive", "U-Net"))
run.record("frechet_adaptive_over_additive", **over_seeds(distances, "adaptive", "U-Net"))

# %% tags=["hide-input"]
low, high = over_seeds(losses, "adaptive", "U-Net")["interval"]
run.say("""It costs {macs_adaptive_over_additive:.3f} times the multiply-accumulates. The held-out loss is **{loss_adaptive_over_additive:.3f}** times that of the shift alone ({loss_adaptive_over_additive.low:.3f} to {loss_adaptive_over_additive.high:.3f}), the Fréchet distance {frechet_adaptive_over_additive:.2f} times ({frechet_adaptive_over_additive.low:.2f} to {frechet_adaptive_over_additive.high:.2f}). """
        + ("Better in every seed." if high < 1 else "Worse in every seed." if low > 1 else "The seeds do not agree on a sign."))

# %% [markdown]
# ## Min-SNR weights
#
# Weighted by min(SNR, 5) / SNR the nearly clean timesteps count less {cite}`hang2023efficient`. The lesson gives two figures: gradients at timestep 50 are nearly three orders of magnitude larger than at 800, and training converges about three times faster. The loss cannot judge the second, since the weights change the loss. Both arms are sampled at every checkpoint, and the question is at which step one arm reaches the distance that the other has at the end.
#
# > **Predict first.** The *loss* at timestep 50 is hundreds of times that at 800. Is the gradient?

# %%
config = settings.training(train_store)
first_steps = launch(config, settings.run_path("first_steps", config))  # chapter 3's run
trained = first_steps.load_model(config.num_steps, ema=False).to(DEVICE)


def gradient(model, timestep: int):
    """Gradient of the noise MSE of the held-out latents at one timestep, all parameters in one vector."""
    t = torch.full((len(x0),), timestep)
    x_t = schedule.add_noise(x0, t, noise).to(DEVICE)
    output = model(x_t, t.to(DEVICE), y0.to(DEVICE))[:, : base.in_channels]
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((output - noise.to(DEVICE)).square().mean(), parameters, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


norms = {timestep: gradient(trained, timestep).norm().item() for timestep in (50, 200, 800)}
run.record("loss_ratio_t50_over_t800", loss_of_unit_gaussian(schedule)[50] / loss_of_unit_gaussian(schedule)[800])
run.record("gradient_ratio_t50_over_t800", norms[50] / norms[800])

# %%
archives = list(range(numbers.checkpoint_every, base.num_steps + 1, numbers.checkpoint_every))
curves = {(kind, seed): [score(draw(runs[kind, seed].load_model(step).to(DEVICE), labels), labels)["distance"]
                         for step in archives[:-1]] + [distances[kind, seed]] for kind in ("DiT", "min-SNR") for seed in seeds}


def steps_to(curve: list, level: float) -> float:
    """The step at which a curve over `archives` first reaches `level`, on straight lines; the last one if never."""
    for i, (before, after) in enumerate(pairwise(curve)):
        if min(before, after) <= level:
            share = (before - level) / (before - after) if before > level else 0
            return archives[i] + share * (archives[i + 1] - archives[i])
    return archives[-1]


def speedup(seed: int) -> float:
    """Steps that plain training needs for each step of min-SNR, at the distance that the worse of the two ends with."""
    plain, weighted = curves["DiT", seed], curves["min-SNR", seed]
    level = max(plain[-1], weighted[-1])
    return steps_to(plain, level) / steps_to(weighted, level)


# %%
speedups = [speedup(seed) for seed in seeds]
run.record("min_snr_step_ratio", np.exp(np.log(speedups).mean()).clip(min(speedups), max(speedups)), interval=(min(speedups), max(speedups)), seeds=len(speedups))
run.record("frechet_min_snr_over_plain", **over_seeds(distances, "min-SNR", "DiT"))
low, high = timesteps < 400, timesteps >= 400
run.record("loss_low_t_min_snr_over_plain", **over_seeds({key: value[low] for key, value in losses.items()}, "min-SNR", "DiT"))
run.record("loss_high_t_min_snr_over_plain", **over_seeds({key: value[high] for key, value in losses.items()}, "min-SNR", "DiT"))

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for kind in ("DiT", "min-SNR"):
    rows = np.array([curves[kind, seed] for seed in seeds])
    axes.errorbar(archives, rows.mean(0), yerr=np.ptp(rows, axis=0) / 2, marker="o", capsize=3,
                  label={"DiT": "plain", "min-SNR": "min-SNR, gamma 5"}[kind])
axes.set(xlabel="step", ylabel="Fréchet distance (small classifier)" if features_of is judge else "Fréchet distance (Inception)")
axes.legend()
run.figure(figure, name="min-snr", caption="Distance of guided samples against steps, same draws for a seed; bars span the seeds.")

# %% tags=["hide-input"]
run.say("""The loss of a network that knows only the variance is {loss_ratio_t50_over_t800:,.0f} times larger at timestep 50 than at 800; that much of the lesson's arithmetic stands. The gradient of the trained network is **{gradient_ratio_t50_over_t800:.1f}** times as large. """ + ("The lesson took a loss that no weight can change for a gradient." if run["gradient_ratio_t50_over_t800"] < 300 else "Here the gradient follows the loss.") + """

Plain training takes **{min_snr_step_ratio:.2f}** steps for a step with min-SNR weights, compared at a distance that both reach ({min_snr_step_ratio.low:.2f} to {min_snr_step_ratio.high:.2f} over the seeds); at the end the ratio of distances is {frechet_min_snr_over_plain:.2f} ({frechet_min_snr_over_plain.low:.2f} to {frechet_min_snr_over_plain.high:.2f}). The held-out loss is {loss_low_t_min_snr_over_plain:.2f} times the plain one below timestep 400 and {loss_high_t_min_snr_over_plain:.2f} times above. """
        + ("The effect is there, and it is not a factor of three in these few steps." if 1.05 < run["min_snr_step_ratio"] < 2.5 else
           "A factor of three it is, or more." if run["min_snr_step_ratio"] >= 2.5 else
           "No speed-up can be seen in these few steps.") + f" With checkpoints at steps {archives[0]} to {archives[-1]} no ratio above {archives[-1] / archives[0]:g} could show. The published factor is for longer training of larger networks.")


# %% [markdown]
# ## Accumulation that forgets to divide
#
# Eight accumulated batches without dividing the loss: the gradient is eight times too large. The lesson calls that "a silent 8× LR increase". Whether it is one depends on the optimizer. Adam divides the gradient's mean by the root of its mean square {cite}`kingma2015adam`, so a constant factor cancels except where epsilon is felt.
#
# > **Predict first.** With AdamW, how much longer is the path of the weights when every gradient is eight times larger?

# %%
def path(change, optimizer=torch.optim.AdamW, steps: int = numbers.update_steps, rate: float = base.learning_rate):
    """How far `steps` optimizer steps move the initial DiT when `change` edits the gradients first: a vector, a loss."""
    model = build_model(base).to(DEVICE).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = torch.cat([p.detach().flatten() for p in parameters])
    stepper = optimizer(parameters, lr=rate)
    for step in range(1, steps + 1):
        batch = draw_batch(base, train_store, step).map(lambda v: v.to(DEVICE))
        losses = training_losses(model, batch.x0, batch.t, batch.y, schedule, base.objective, noise=batch.noise)
        losses.total.mean().backward()
        change(parameters)
        stepper.step()
        stepper.zero_grad()
    return torch.cat([p.detach().flatten() for p in parameters]) - before, losses.mse.mean().item()


# %%
def scaled(factor: float):
    return lambda parameters: torch._foreach_mul_([p.grad for p in parameters], factor)


def clipped(factor: float = 1, norm: float = 1.0):
    def change(parameters):
        scaled(factor)(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, norm)
    return change


paths = {"divided": path(scaled(1)), "not divided": path(scaled(8)), "8 times the rate": path(scaled(1), rate=8 * base.learning_rate)}

# %%
def accumulated(divide: bool):
    """The gradient of a real accumulation of eight micro-batches, as a vector."""
    model = build_model(base).to(DEVICE).train()
    for part in draw_batch(base, train_store, 1).map(lambda v: v.to(DEVICE)).split(base.global_batch_size // 8):
        losses = training_losses(model, part.x0, part.t, part.y, schedule, base.objective, noise=part.noise)
        (losses.total.mean() / (8 if divide else 1)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def length(key) -> float:
    return paths[key][0].norm().item()


run.record("undivided_gradient_ratio", accumulated(False).norm() / accumulated(True).norm())
run.record("undivided_adamw_update_ratio", length("not divided") / length("divided"))
run.record("undivided_adamw_path_difference", (paths["not divided"][0] - paths["divided"][0]).norm().item() / length("divided"))
run.record("adamw_8_times_rate_update_ratio", length("8 times the rate") / length("divided"))
for name, key in (("divided", "divided"), ("undivided", "not divided"), ("8_times_rate", "8 times the rate")):
    run.record(f"loss_{name}", paths[key][1])
steps = {key: path(change, torch.optim.SGD, 1, 1.0)[0].norm().item() for key, change in
         (("plain", scaled(1)), ("undivided", scaled(8)), ("clipped", clipped()), ("undivided, clipped", clipped(8)))}
run.record("undivided_sgd_update_ratio", steps["undivided"] / steps["plain"])
run.record("undivided_clipped_sgd_update_ratio", steps["undivided, clipped"] / steps["clipped"])

# %% tags=["hide-input"]
run.say("""The accumulated gradient is {undivided_gradient_ratio:.4f} times as large without the division, and a step of plain SGD {undivided_sgd_update_ratio:.2f} times as long, {undivided_clipped_sgd_update_ratio:.2f} times where the norm is clipped at 1. With AdamW the weights move **{undivided_adamw_update_ratio:.4f}** times as far; the two paths differ by {undivided_adamw_path_difference:.1%} of their length, which is what epsilon makes of entries as small as itself, and the loss is {loss_undivided:.4f} against {loss_divided:.4f}. Eight times the learning rate is something else: {adamw_8_times_rate_update_ratio:.1f} times as far, and a loss of {loss_8_times_rate:.3f}.

So the bug is real and its consequence, with the optimizer of the lesson's own loop, is not the one described. What it does change under AdamW is everything that looks at the gradient's size: a clipping threshold, an alarm, the logged norm.""")

# %% [markdown]
# ## Half precision
#
# The lesson: fp16 ends at 6.1e-5, diffusion gradients sit near 1e-7, which "rounds to exactly zero". Three numbers are mixed up there. The smallest *normal* fp16 number is 6.1e-5; below it precision fades, bit by bit, down to 6.0e-8; only what is under half of that becomes zero. How many entries of real gradients are where, without and with the loss scale of 65,536 {cite}`micikevicius2018mixed`?

# %%
def gradients(step: int, precision: torch.dtype | None = None, scale: float = 1.0):
    """Gradient of the trained DiT on a training batch, float32 or with the network under autocast: one vector."""
    trained.zero_grad()
    batch = draw_batch(config, train_store, step).map(lambda v: v.to(DEVICE))

    def predict(x, t, y):
        with torch.autocast(DEVICE, precision, enabled=precision is not None):
            return trained(x, t, y)
    losses = training_losses(predict, batch.x0, batch.t, batch.y, schedule, config.objective, noise=batch.noise)
    (scale * losses.total.mean()).backward()
    return torch.cat([p.grad.flatten() for p in trained.parameters() if p.requires_grad])


batches, scale, tiny = range(1, numbers.gradient_batches + 1), 65_536.0, torch.finfo(torch.float16).tiny
trained.train()
exact = torch.stack([gradients(step) for step in batches])  # (batches, parameters)
half, rescued = (torch.stack([gradients(step, torch.float16, s) for step in batches]) for s in (1.0, scale))
nonzero = exact != 0
run.record("fp16_smallest_normal", tiny)
run.record("fp16_of_1e_minus_7", torch.tensor(1e-7).half().item())
run.record("fp16_largest_flushed", 2.0**-25)
run.record("median_gradient_entry", exact[nonzero].abs().float().median())
run.record("gradient_entries_below_normal", (exact[nonzero].abs() < tiny).double().mean())

# %%
def flushed(vectors) -> float:
    """Share of entries that are zero although the float32 gradient is not."""
    return ((vectors == 0) & nonzero).double().sum().item() / nonzero.sum().item()


run.record("fp16_flushed_unscaled", flushed(half))
run.record("fp16_flushed_scaled", flushed(rescued))
run.record("fp16_overflowed_scaled", (~rescued.isfinite()).double().mean())
run.record("fp16_gradient_error_unscaled", (half - exact).norm() / exact.norm())
run.record("fp16_gradient_error_scaled", (rescued.nan_to_num(0, 0, 0) / scale - exact).norm() / exact.norm())
# What arrives at the network's output in the paper's run: 2 (eps_hat - eps) / (256 images of 32 x 32 x 4 numbers)
with torch.no_grad():
    t = torch.linspace(0, 999, len(x0)).long()
    output = trained(schedule.add_noise(x0, t, noise).to(DEVICE), t.to(DEVICE), y0.to(DEVICE))[:, : base.in_channels].cpu()
arriving = 2 * (output - noise) / (256 * 32 * 32 * 4)
run.record("paper_scale_output_gradient", arriving.abs().median())
run.record("paper_scale_output_gradients_flushed", (arriving.half() == 0).double().mean())
run.record("paper_scale_output_gradients_below_normal", (arriving.abs() < tiny).double().mean())

# %% tags=["hide-input"]
run.say("""1e-7 in fp16 is {fp16_of_1e_minus_7:.3g}, not zero: off by a fifth, but there. Zero begins at {fp16_largest_flushed:.1e}. Of the gradient entries of chapter 3's trained network {gradient_entries_below_normal:.0%} are below the normal range; their median is {median_gradient_entry:.1e}. With the network really run in fp16, **{fp16_flushed_unscaled:.2%}** of the entries come out as exactly zero without a loss scale and {fp16_flushed_scaled:.3%} with it ({fp16_overflowed_scaled:.2%} overflow); the gradient as a whole is off by {fp16_gradient_error_unscaled:.2%} and {fp16_gradient_error_scaled:.2%}.

This network is small, and a mean over a small batch of small latents leaves large gradients. In the paper's run each output is one of a million that the loss averages: the median gradient that arrives there would be {paper_scale_output_gradient:.0e} with this network's errors, {paper_scale_output_gradients_below_normal:.0%} of them below the normal range and {paper_scale_output_gradients_flushed:.1%} already zero before the first layer has been passed. """
        + ("That is where the loss scale earns its place, and the lesson's worry is right in kind."
           if run["paper_scale_output_gradients_flushed"] > max(0.01, run["fp16_flushed_unscaled"]) else "Even there few are lost."))

# %% [markdown]
# ### Unscale, then clip
#
# A threshold of 1 is meant for the gradient, not for 65,536 times the gradient.

# %%
norms = torch.stack([vector.norm() for vector in exact])
run.record("gradient_norm_trained", norms.mean())
run.record("clipped_share_before_unscaling", (norms * scale > 1).double().mean())
run.record("clipped_share_after_unscaling", (norms > 1).double().mean())
paths |= {"unscale, clip": path(clipped()),
          "clip, unscale": path(lambda p: (clipped(scale)(p), scaled(1 / scale)(p)))}
run.record("clip_before_unscale_norm", 1 / scale)
unscaled = exact / norms[:, None] / scale
run.record("clip_before_unscale_entries_below_epsilon", (unscaled[nonzero].abs() < 1e-8).double().mean())
run.record("clip_before_unscale_adamw_update_ratio", length("clip, unscale") / length("unscale, clip"))
run.record("loss_unscale_then_clip", paths["unscale, clip"][1])
run.record("loss_clip_then_unscale", paths["clip, unscale"][1])

# %% tags=["hide-input"]
run.say("""Before unscaling **{clipped_share_before_unscaling:.0%}** of the steps are clipped, after it {clipped_share_after_unscaling:.0%}; the norm itself is {gradient_norm_trained:.2f}. Clipped too early, every gradient has the same norm, {clip_before_unscale_norm:.1e} once unscaled. SGD would stand still. AdamW divides a constant factor out, down to where it meets epsilon, 1e-8, and {clip_before_unscale_entries_below_epsilon:.0%} of these entries are smaller than that. From the initial weights it moves **{clip_before_unscale_adamw_update_ratio:.2f}** times as far as in the right order; the loss is {loss_clip_then_unscale:.3f} against {loss_unscale_then_clip:.3f}. """
        + ("So even Adam does not hide this one: the more weights share the norm of 1, the less is left for each of them. "
           if run["clip_before_unscale_adamw_update_ratio"] < 0.8 else "In these steps Adam hides it. ")
        + """What is lost in any case is the gradient's size from step to step, which is what clipping was there to look at.""")

# %% [markdown]
# ## Half-lives
#
# Chapter 3 has the arithmetic of the moving average and what it is worth in samples. Here is the average itself: weights that jump from zero to one, and the steps until it is halfway.

# %%
from dit_repro.training.ema import EMA


def half_life(decay: float) -> int:
    """Steps after which this book's EMA has taken in half of a jump of the weights."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ema, step = EMA(model, decay), 0
    nn.init.ones_(model.weight)
    while ema.tensors["weight"].item() < 0.5:
        step += 1
        ema.update(model, step)
    return step


run.record("ema_half_life_measured_0_999", half_life(0.999))
run.record("ema_half_life_measured_0_9999", half_life(0.9999))

# %% tags=["hide-input"]
run.say("""It takes {ema_half_life_measured_0_999:,} steps at 0.999 and {ema_half_life_measured_0_9999:,} at 0.9999, as the lesson says.""")

# %% [markdown]
# ## Fewer steps, another schedule
#
# Trained on 1,000 timesteps, sampled at 25: the lesson calls that legitimate and warns of a sampler on another schedule. Both are tried on chapter 3's averaged weights; chapter 6 has the long version.

# %%
averaged = first_steps.load_model(config.num_steps).to(DEVICE)
chain_labels = torch.arange(settings.sampling.classes).repeat_interleave(numbers.chain_per_class)
short, long = numbers.chain_steps
chains = {
    f"{short} steps": draw(averaged, chain_labels, 1.0, short, "ddpm"),
    f"{long} steps": draw(averaged, chain_labels, 1.0, long, "ddpm"),
    f"{short}, cosine": draw(averaged, chain_labels, 1.0, short, "ddpm", NoiseSchedule.cosine(1000)),
}
table = pd.DataFrame({name: {**score(images, chain_labels), "contrast": images.float().flatten(1).std(1).mean().item()}
                      for name, images in chains.items()}).T.drop(columns="pool").astype(float)
few_steps, many_steps, mismatched = table.distance
run.record("steps_of_short_chain", int(short))
run.record("steps_of_long_chain", int(long))
run.record("frechet_few_over_many_steps", few_steps / many_steps, seeds=len(chain_labels))
run.record("frechet_mismatched_over_matched", mismatched / few_steps, seeds=len(chain_labels))
run.record("contrast_mismatched_over_matched", table.contrast.iloc[2] / table.contrast.iloc[0])
table.style.format({"distance": "{:.2f}", "agreement": "{:.1%}", "contrast": "{:.1f}"})

# %%
tiles = torch.stack([images.unflatten(0, (len(class_names), -1))[:, 0] for images in chains.values()], 1)
run.figure(sample_grid(tiles, class_names, list(chains), size=56), name="chains", caption="Unguided samples of chapter 3's network: few steps, "
           "many, and few on a schedule that it was not trained with.")

# %% tags=["hide-input"]
run.say("""The distance with {steps_of_short_chain} steps is **{frechet_few_over_many_steps:.2f}** times that with {steps_of_long_chain}. On the cosine schedule the distance is **{frechet_mismatched_over_matched:.1f}** times that of the right one, and the contrast {contrast_mismatched_over_matched:.2f} times. """
        + ("Washed out or over-contrasted, the lesson says; here it is "
           + ("washed out." if run["contrast_mismatched_over_matched"] < 0.95 else "over-contrasted." if run["contrast_mismatched_over_matched"] > 1.05 else "neither, and wrong all the same.")))

# %% [markdown]
# ## What FID does not see
#
# A Fréchet distance compares two heaps of images. Nothing in it knows which image was asked for. The lesson's companion is the CLIP score; with class labels in place of prompts, the analog is the share of samples that a judge puts into the class asked for. A real CLIP score needs CLIP's weights: `-p clip=FOLDER` adds it, with "a photo of a" and the class as the prompt.
#
# > **Predict first.** Guidance rises from 1 to 7. Which of the two scores turns first?

# %%
by_scale = {scale: draw(averaged, labels, scale) for scale in numbers.scales}
sweep = pd.DataFrame({scale: score(images, labels) for scale, images in by_scale.items()}).T
figure, axes = plt.subplots(figsize=(5.4, 3.6))
axes.plot(100 * sweep.agreement, sweep.distance, marker="o")
for scale, row in sweep.iterrows():
    axes.annotate(f"{scale:g}", (100 * row.agreement, row.distance), (-6, 6), textcoords="offset points", ha="right", fontsize=9)
axes.set(xlabel="samples in their class, %", ylabel="Fréchet distance (small classifier)" if features_of is judge else "Fréchet distance (Inception)")
run.figure(figure, name="guidance", export=True, caption="Chapter 3's network, one point a guidance scale (numbers at the points): agreement "
           "against distance, on the same seeds.",
           alt="Line through one point a guidance scale, samples in their class against Fréchet distance: "
           + ", ".join(f"scale {scale:g}, {row.agreement:.0%} and {row.distance:.2f}" for scale, row in sweep.iterrows()) + ".")
lowest, highest, best = min(numbers.scales), max(numbers.scales), sweep.distance.astype(float).idxmin()
run.record("agreement_gain_with_guidance", sweep.agreement[highest] - sweep.agreement[lowest])
run.record("frechet_highest_over_lowest_guidance", sweep.distance[highest] / sweep.distance[lowest])
run.record("best_guidance_scale_by_distance", float(best))

# %%
healthy_scale = numbers.scales[1]
healthy, healthy_score = by_scale[healthy_scale], sweep.loc[healthy_scale]
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
shuffled = score(healthy[order], labels)
run.record("frechet_change_when_labels_shuffled", abs(shuffled["distance"] - healthy_score.distance) / healthy_score.distance)
run.record("agreement_drop_when_labels_shuffled", healthy_score.agreement - shuffled["agreement"])
if clip:
    prompt_of = describe_classes(class_names)
    prompts = [prompt_of[label] for label in labels]
    sweep["CLIP score"] = [clip_score(images, prompts).mean().item() for images in by_scale.values()]
    run.record("clip_score_gain_with_guidance", sweep["CLIP score"][highest] - sweep["CLIP score"][lowest])
    run.record("clip_score_drop_when_labels_shuffled", sweep["CLIP score"][healthy_scale] - clip_score(healthy[order], prompts).mean().item())
run.record("agreement_healthy", healthy_score.agreement, interval=wilson_interval(round(healthy_score.agreement * len(labels)), len(labels)))
sweep.drop(columns="pool").style.format({"distance": "{:.2f}", "agreement": "{:.1%}", "CLIP score": "{:.1f}"})

# %% tags=["hide-input"]
run.say("""From the lowest to the highest guidance the agreement changes by {agreement_gain_with_guidance:+.1%} and the distance is multiplied by **{frechet_highest_over_lowest_guidance:.2f}**; the smallest distance is at {best_guidance_scale_by_distance:g}. """
        + ("They trade off over the whole range." if best == lowest else
           "They improve together at first and trade off only beyond that scale: on a network trained this little, some guidance helps both." if best < highest else
           "Within this range they do not trade off at all."))
run.say("""Deal the same images to the wrong labels: the distance changes by {frechet_change_when_labels_shuffled:.0e} of itself and the agreement falls by **{agreement_drop_when_labels_shuffled:.0%}**. """
        + ("CLIP's score changes by {clip_score_gain_with_guidance:+.2f} with guidance, and falls by {clip_score_drop_when_labels_shuffled:.2f} with the wrong labels." if clip else
           "No CLIP score was taken: its weights were not given."))


# %% [markdown]
# ### The fixed grid
#
# Twenty conditions, four seeds each, drawn at every checkpoint: "catches mode collapse, drift, and overfitting within seconds, which no scalar metric does reliably". To test it, faults are planted in the samples. A scalar sees a fault when it leaves its own 95% interval. The grid sees it when a cell differs from the grid of the checkpoint before by more than any healthy cell does: with fixed seeds, that difference is what an eye looks for.

# %%
def plant(fault: str):
    """The healthy samples with one fault in them."""
    images = healthy.clone().unflatten(0, (len(class_names), -1))  # (class, seed, 3, H, W)
    last = len(class_names) - 1
    if fault == "one class repeats one image":
        images[last] = images[last, :1]
    elif fault == "one class upside down":
        images[last] = images[last].flip(-2)
    elif fault == "one class copies training images":
        mine = np.flatnonzero(train_store.labels == last)[: images.shape[1]]
        flat = train_store.latents(mine, np.zeros(len(mine), bool), torch.zeros(len(mine), *train_store.latent_shape))
        images[last, : len(mine)] = decode(flat)
    elif fault == "one seed is blank":
        images[:, 0] = 0
    elif fault == "two classes exchanged":
        images[[0, last]] = images[[last, 0]]
    elif fault == "all two pixels to the right":
        images = images.roll(2, -1)
    return images.flatten(0, 1)


FAULTS = ("one class repeats one image", "one class upside down", "one class copies training images", "one seed is blank",
          "two classes exchanged", "all two pixels to the right")

# %%
steps_saved = [step for step in first_steps.checkpoints() if step < config.num_steps]
on_grid = torch.arange(len(labels)).unflatten(0, (len(class_names), -1))[:, :4].flatten()
before = draw(first_steps.load_model(max(steps_saved)).to(DEVICE), labels[on_grid], healthy_scale, seeds=on_grid.tolist())


def largest_change(images) -> float:
    """Largest root mean square difference of a cell of the grid from the same cell one checkpoint earlier."""
    return (images[on_grid].float() - before.float()).square().flatten(1).mean(1).sqrt().max().item()


# %%
error, (low, high) = 1.96 * standard_error(healthy_score.pool, reference), wilson_interval(
    round(healthy_score.agreement * len(labels)), len(labels))
rows = {}
for fault in FAULTS:
    images = plant(fault)
    found = score(images, labels)
    rows[fault] = {"distance sees it": abs(found["distance"] - healthy_score.distance) > error,
                   "agreement sees it": not low <= found["agreement"] <= high,
                   "grid shows it": largest_change(images) > largest_change(healthy)}
seen = pd.DataFrame(rows).T
only = seen["grid shows it"] & ~seen["distance sees it"] & ~seen["agreement sees it"]
run.record("faults_planted", len(seen))
run.record("faults_seen_by_distance", int(seen["distance sees it"].sum()))
run.record("faults_seen_by_agreement", int(seen["agreement sees it"].sum()))
run.record("faults_seen_in_grid", int(seen["grid shows it"].sum()))
run.record("faults_seen_only_in_grid", int(only.sum()))
seen.replace({True: "yes", False: ""})

# %%
shown = ["as sampled", *FAULTS]
tiles = torch.stack([(healthy if name == "as sampled" else plant(name)).unflatten(0, (len(class_names), -1))[-1, :4] for name in shown])
run.figure(sample_grid(tiles, shown, [f"seed {i}" for i in range(tiles.shape[1])], size=56), name="fixed-grid",
           caption="The last class of the fixed grid, as sampled and under each planted fault.")

# %% tags=["hide-input"]
run.say("""Of {faults_planted} planted faults the distance notices {faults_seen_by_distance}, the agreement {faults_seen_by_agreement}, the grid {faults_seen_in_grid}; **{faults_seen_only_in_grid}** show in the grid alone. """
        + ("The grid is worth its seconds. " if run["faults_seen_only_in_grid"] else "Here the scalars had them all. ")
        + """It has a weakness too: what changed is seen only by somebody who compares it with the grid before, and a fault that was there from the first checkpoint never changes.""")

# %% [markdown]
# <details><summary>Answers to the predictions</summary>
#
# A corner looks one way only, so it sees half the rows, and 24x24 is a seventh of a 64x64 latent. The gradient does not follow the loss: most of the loss at timestep 50 is error that no weight can remove. With AdamW the path is as long as before, to within what epsilon does. What skips and guidance do at this scale stands in the sections; compare your guess with the numbers there.
# </details>
#
# **Exercise.** The U-Net's label reaches it through cross-attention to four tokens. Set `label_tokens=1`. What is the attention's softmax over one token, and what is left of cross-attention then?
#
# <details><summary>Answer</summary>
#
# The softmax over one entry is 1 for every query, so the queries and keys do nothing and receive no gradient. Each position gets the same value vector: an additive shift by the label, as the timestep's, at the cost of two dead projections.
# </details>

# %% [markdown]
# ## Claims of this chapter

# %%
run.claims()

# %% [markdown]
# ## What could not be shown at this scale
#
# The runs are short: which network is ahead after a few hundred steps says little about 400,000, where the paper made its comparison. Both train at the learning rate of chapter 3, which was chosen for the DiT; a rate for the U-Net was not searched for. With latents of 8x8 cells the U-Net's advantage in receptive field has little to work on, and neither has the quadratic cost of attention. `dit-repro run 09 --profile gpu` repeats everything with DiT-S/2 and a U-Net of its cost, and `--profile paper -p data=IMAGENET` on latents of 32x32, where both questions are open. The divergence "around step 500" and the 150,000 GPU hours of Stable Diffusion were not run.
