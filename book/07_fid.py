# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # FID: a score that has to be measured before it measures
#
# **Question.** The post's harness had two faults: it sampled the released model on the wrong noise schedule, and it filled the GPU with graphs. Only a model of known quality gave the first away. What does a harness need so that such a number cannot pass for a result?
#
# **Answer.** It has to know what it reads when nothing is wrong, how far the number of images alone lifts it, what each known mistake does to it, and under which protocol a number was made, so that it can refuse to compare two that were made differently. All of that can be had from one pass of features.
#
# *Claimed in:* the post, "Measuring the gap properly" and "Retraining with the actual recipe"; the lesson, "Measuring whether it worked". *Time:* laptop 2 to 2.5 min on two cores, beside the run of chapter 3; at the paper profile hours on one GPU, most of them sampling.

# %% tags=["parameters"]
profile: str = "laptop"  # smoke, laptop, gpu or paper
data: str = ""  # a folder of IDX files or of class folders; empty: what the profile says
autoencoder: str = ""  # "embedded", an SD-VAE name or a local folder; empty: what the profile says
reference: str = ""  # an .npz of the ADM evaluator to compare with; empty: images of the data
official: str = ""  # the released DiT-XL-2-256x256.pt, to sample on both schedules; empty: not done
first_recipe: str = ""  # folder of a run by the post's first recipe, past step 353,000; empty: not done
seed: int = 0  # of the labels

# %%
from dit_repro.book import start

run = start(globals())

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from dit_repro.diffusion import NoiseSchedule
from dit_repro.evaluation import FeatureStatistics, evaluate, extract, frechet_distance
from dit_repro.files import workspace
from dit_repro.models import load_released_checkpoint
from dit_repro.profiles import DEVICE, get_profile
from dit_repro.training import RunFolder, launch

settings = get_profile(profile, data=data, autoencoder=autoencoder)
plan, cache = settings.scores, workspace() / "features"
vae, features, judge = settings.data.autoencoder(), settings.data.features(), settings.data.judge()
released = load_released_checkpoint(official) if official else None   # now: a wrong file costs no sampling
early = [step for step in RunFolder(first_recipe).checkpoints() if 350_000 <= step <= 360_000] if first_recipe else []
if first_recipe and not early:
    raise ValueError(f"first_recipe={first_recipe}: no checkpoint of steps 350,000 to 360,000 there; the post scored step 353,000")
train_store = settings.data.store("train", vae)
config = settings.training(train_store)
folder = launch(config, settings.run_path("first_steps", config))
steps = [step for step in folder.checkpoints() if step % config.archive_every == 0 and step <= config.num_steps]

# %% [markdown]
# ## A number
#
# The Fréchet distance {cite}`heusel2017gans` takes two sets of images through one network, keeps the mean and the covariance of the features of each, and measures how far apart two normal distributions with these moments are: |μ − ν|² + tr(S) + tr(T) − 2 tr((ST)^½). On the 2,048 pool features of one particular Inception network of 2015 it is called FID. On any other network it is not, and this harness does not print that name there: offline the features are those of the small classifier, and their distances compare with each other only.
#
# The samples come from chapter 3's run, without guidance as in the post's scores, labels drawn at random. They go from the sampler to uint8 to features, and no picture is written. What is kept is one file of latents for each 250 images, so that a killed run continues and a second one is quick.

# %%
from dit_repro.sampling import SampleSet, draw_labels

linear, cosine = NoiseSchedule.linear(1000), NoiseSchedule.cosine(1000)
labels = draw_labels(plan.samples, train_store.num_classes, "random", seed)


def drawn(model, count: int = plan.samples_a_row, schedule=linear, steps=settings.sampling.steps) -> SampleSet:
    return SampleSet(model.to(DEVICE), labels[:count], schedule, vae, workspace() / "samples", "random", steps=steps,
                     batch_size=settings.sampling.batch_size)


against = reference or settings.data.source(plan.reference_split)


def score(samples: SampleSet, mode: str = "adm"):
    return evaluate(samples, against, features, mode, cache=cache, reference_count=1_281_167, **samples.protocol)


final = drawn(folder.load_model(steps[-1]), plan.samples)
final_scores = score(final)
print(final_scores.report())

# %% [markdown]
# The line says what it is, over how many images a side, with an interval and with a fingerprint of everything that could move it. With Inception features the same line begins FID-10K, or FID-50K: the number of images is part of the name. What the line cannot say is whether the number is good.
#
# ## What it reads when nothing is wrong
#
# The post's own first question was the right one: how far apart are two sets of *real* images? It should be nothing, and at 2,000 images it was 35.8.
#
# > **Predict first.** By what factor does the distance between two real sets fall when both grow from 2,000 to 10,000 images? And does it depend on the network?

# %%
from dit_repro.evaluation import expected_floor, noise_floor

splits = ("test",) if len(settings.data.source("test")) >= plan.real_images else ("train", "test")
real = torch.cat([extract(settings.data.source(split), features, cache=cache).pool for split in splits])  # (N, D)
real = real[torch.randperm(len(real), generator=torch.Generator().manual_seed(0))[:plan.real_images]]
floors = noise_floor(real, plan.counts, plan.repeats)  # (counts, repeats)
real_statistics = FeatureStatistics(real.shape[1]).update(real)
predicted = [expected_floor(real_statistics, count) for count in plan.counts]
figure, axes = plt.subplots(figsize=(7, 3.4))
axes.errorbar(plan.counts, floors.mean(1), yerr=floors.std(1), marker="o", capsize=2, label="measured, ± 1 sd of one draw")
axes.plot(plan.counts, predicted, "--", color="#6b6b73", label="predicted from the variances")
axes.set(xscale="log", yscale="log", xlabel="images on each side", ylabel="Fréchet distance, real to real")
axes.legend()
run.figure(figure, name="floor", export=True, caption="Disjoint random sets of real images against each other. A perfect "
           "generator would score this. The dashed line uses no second set: it follows from the eigenvalues of one covariance.",
           alt=f"Fréchet distance against the number of images, both logarithmic: {floors.mean(1)[0]:.2g} at {plan.counts[0]:,} images and "
           f"{floors.mean(1)[-1]:.2g} at {plan.counts[-1]:,}, with error bars, beside a dashed prediction.")

# %%
few, many = plan.counts.index(plan.few), plan.counts.index(plan.many)
for name, row in (("few", few), ("many", many)):
    run.record(f"floor_{name}", floors[row].mean(), seeds=plan.repeats, interval=np.quantile(floors[row], [0.025, 0.975]))
run.record("few", plan.few)
run.record("many", plan.many)
run.record("frechet_floor_small_over_large_n", floors[few].mean() / floors[many].mean())
run.record("floor_over_prediction", floors[many].mean() / predicted[many])
run.record("floor_scatter_few", floors[few].std() / floors[few].mean())
run.record("dimensions", real.shape[1])
run.record("post_floor_ratio", 35.8 / 7.4)
if features.id == "Inception":
    run.record("fid_2k_real_vs_real", floors[plan.counts.index(2_000)].mean(), seeds=plan.repeats)
    run.record("fid_10k_real_vs_real", floors[plan.counts.index(10_000)].mean(), seeds=plan.repeats)

# %% tags=["hide-input"]
run.say("""Two real sets of {few:,} are **{floor_few:.3f}** apart (95% of the draws: {floor_few.low:.3f} to {floor_few.high:.3f}), two of {many:,} **{floor_many:.4f}**: a factor of {frechet_floor_small_over_large_n:.1f}, where the post's 35.8 and 7.4 make {post_floor_ratio:.2f}.

The factor hardly depends on the network; the height does. To first order the floor at N images a side is 2 tr(S)/N from the means, plus a sum over all pairs of eigenvalues a, b of S, of ab/(a + b) each, those of an eigenvalue with itself twice, from the covariances. Measured over predicted at {many:,} it is {floor_over_prediction:.2f}. For D independent features of variance one the formula gives (2D + D(D + 1)/2)/N: it grows with the *square* of the number of features, so Inception's 2,048 need far more images than the small classifier's 96. This page uses {dimensions}.

One draw of the floor scatters by {floor_scatter_few:.0%} at {few:,}: here a single real-against-real number is a rough one. The more features carry variance, the smaller the scatter; the post gives one draw and no spread.""")

# %% [markdown]
# ## Fewer images than features
#
# With N at or below D the covariance has no inverse and its product with another has no proper square root. Most tools call a matrix square root all the same; where the result is not finite some add 10⁻⁶ to both diagonals. This harness never forms the root: with S = AAᵀ and T = BBᵀ the trace is the sum of the singular values of AᵀB, which is as exact for two images as for two million. Sets of features whose distance is known in closed form show the difference.

# %%
from scipy.linalg import sqrtm

from dit_repro.evaluation.frechet import features_at_known_distance


def by_square_root(a: FeatureStatistics, b: FeatureStatistics, epsilon: float) -> float:
    s, t = (x.covariance.numpy() + epsilon * np.eye(x.dim) for x in (a, b))
    return float((a.mean - b.mean).square().sum() + np.trace(s + t) - 2 * np.trace(sqrtm(s @ t)).real)


rows = {}
for count in (real.shape[1] // 2, real.shape[1], 4 * real.shape[1]):
    *sets, exact = features_at_known_distance(count, real.shape[1])
    a, b = (FeatureStatistics(real.shape[1]).update(x) for x in sets)
    rows[count] = {"singular values": frechet_distance(a, b), "matrix square root": by_square_root(a, b, 0),
                   "the same + 1e-6": by_square_root(a, b, 1e-6)}
    rows[count] = {name: abs(value / exact - 1) for name, value in rows[count].items()}
errors = pd.DataFrame(rows).T.rename_axis("images")
run.record("error_singular_values", errors["singular values"].max())
run.record("error_square_root", errors["matrix square root"].max())
run.record("error_square_root_epsilon", errors["the same + 1e-6"].max())
errors.style.format("{:.0e}").set_caption("relative error")

# %% tags=["hide-input"]
run.say("""The largest relative errors are {error_singular_values:.0e} by singular values, {error_square_root:.0e} by the square root, {error_square_root_epsilon:.0e} with the epsilon. At Inception's size, `dit-repro bench frechet` makes the same comparison. An error of the second's size matters only where it reaches a score's printed digits. The third is another matter: an epsilon that is added only where a square root happens to fail moves a score by an amount that depends on the features' scale, and on the luck of rounding whether it moves at all.""")

# %% [markdown]
# ## The same lift, in every score
#
# The bias is not a property of real images. Any set scores too high by an amount that falls with N, so a table may only compare rows of one N. From one array of features the whole curve is free: subsets of growing size against one reference. Plotted against 1/N it is nearly a line, and where the line meets zero is the distance at infinitely many samples {cite}`chong2020effectively`.

# %%
from dit_repro.evaluation import distance_by_count, extrapolate, kernel_distance

if reference:
    reference_statistics = FeatureStatistics.load(reference, 1_281_167)
else:
    reference_statistics = extract(against, features, cache=cache, keep=10_000).statistics
generated = extract(final, features, cache=cache)
counts = sorted({max(count, 4) for count in (len(final) // 20, len(final) // 8, len(final) // 4, len(final) // 2, len(final))})
curve = distance_by_count(generated.pool, reference_statistics, counts, plan.repeats).mean(1)
limits = {"floor": extrapolate(plan.counts[-4:], floors.mean(1)[-4:]), "samples": extrapolate(counts[-4:], curve[-4:])}
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2))
for axes, title, x, y in ((panels[0], "real to real", plan.counts[-4:], floors.mean(1)[-4:]), (panels[1], "samples to real", counts, curve)):
    grid = np.linspace(0, 1 / min(x[-4:]), 50)
    axes.plot(1 / np.asarray(x[-4:]), y[-4:], "o")
    for degree, style in ((1, "-"), (2, "--")):
        fit = np.polynomial.Polynomial.fit(1 / np.asarray(x[-4:]), y[-4:], degree)
        axes.plot(grid, fit(grid), style, label={1: "linear", 2: "quadratic"}[degree])
    axes.set(xlabel="1 / images", ylabel="Fréchet distance", title=title, xlim=(0, None))
    axes.locator_params(axis="x", nbins=5)
panels[0].legend()
run.figure(figure, name="extrapolation", caption="Distance against 1/N, fitted on the four largest N. Left both sides grow and "
           "the truth is zero; right the samples grow against a fixed reference.")

# %%
for name, fits in limits.items():
    for degree, value in fits.items():
        run.record(f"{name}_at_infinity_{degree}", value)
kernel, kernel_std = kernel_distance(*real[:2 * plan.few].split(plan.few), subset_size=min(1_000, plan.few))
run.record("kernel_floor_few", kernel, interval=(kernel - 2 * kernel_std, kernel + 2 * kernel_std))
run.record("samples_smallest_count", counts[0])
run.record("samples_count", len(final))
run.record("frechet_few_samples", curve[0])
run.record("frechet_all_samples", curve[-1])
run.record("samples_bias_share", 1 - limits["samples"]["linear"] / curve[-1])

# %% tags=["hide-input"]
zero = "zero within its scatter" if abs(kernel) < 2 * kernel_std else "not quite zero"
run.say(f"""The check comes first: the floor, whose truth is zero, is extrapolated to {{floor_at_infinity_linear:+.4f}} by the line and {{floor_at_infinity_quadratic:+.4f}} by the parabola. The same samples score {{frechet_few_samples:.2f}} when {{samples_smallest_count:,}} of them are used and {{frechet_all_samples:.3f}} with all {{samples_count:,}}; the two fits put the limit at {{samples_at_infinity_linear:.3f}} and {{samples_at_infinity_quadratic:.3f}}, so that {{samples_bias_share:.0%}} of the score at full count is bias. The limit still contains what the finite reference adds. Both fits are printed because their difference is the only sign of how far to trust either.

A score without this lift exists: the kernel distance, which takes an unbiased mean over pairs. Two real sets of {{few:,}} have {{kernel_floor_few:+.5f}}, and subsets of them {{kernel_floor_few.low:+.5f}} to {{kernel_floor_few.high:+.5f}}: {zero}. Its expectation is zero at any N; what it gives up is every published number to compare with.""")

# %% [markdown]
# ## The first bug: a stranger's model on our schedule
#
# The post sampled the released model, trained on the linear schedule, with its own cosine one: FID 170.9, and 42.7 after the correction. Nothing fails when that happens. The network is asked about a noise level by its timestep number and shown another one. The same thing done to our model, with the same seeds and labels:

# %%
from dit_repro.book.figures import sample_grid

row, wrong = drawn(folder.load_model(steps[-1])), drawn(folder.load_model(steps[-1]), schedule=cosine)
row_scores, wrong_scores = score(row), score(wrong)
rows = [int(position) for position in np.unique(labels[:len(row)], return_index=True)[1][:8]]
names = [train_store.class_names[labels[position]] for position in rows]
shown = torch.stack([samples.images(rows) for samples in (row, wrong)])  # (schedule, class, 3, H, W)
run.figure(sample_grid(shown, ["linear", "cosine"], names), name="wrong-schedule",
           caption="The same weights, labels and seeds, sampled on the schedule they were trained on and on another.")

# %%
run.record("samples_in_a_row", len(row))
run.record("frechet_linear", row_scores.frechet, interval=row_scores.interval)
run.record("frechet_cosine", wrong_scores.frechet, interval=wrong_scores.interval)
run.record("frechet_cosine_over_linear", wrong_scores.frechet / row_scores.frechet)
run.record("post_schedule_ratio", 170.9 / 42.7)
run["frechet_cosine_over_linear"]

# %% tags=["hide-input"]
run.say("""On its own schedule the model scores **{frechet_linear:.2f}** with {samples_in_a_row:,} images, on the other **{frechet_cosine:.2f}**, {frechet_cosine_over_linear:.1f} times as much; the post's two numbers have a ratio of {post_schedule_ratio:.1f}. A score alone could not have told the post that its harness was at fault, and a model of known score did: that is the use of an anchor.""")

# %% [markdown]
# ## The second bug: results that remember
#
# The post's script decoded with trainable parameters, moved each result to the CPU, kept it, and filled the GPU. It need not keep pictures for that. Below an evaluation loop keeps nothing but the features, one small vector an image. Each small tensor holds a reference to the graph that made it, and the graph holds every activation of decoder and classifier.
#
# > **Predict first.** How many megabytes does one batch cost when only its features are kept?

# %%
import gc

from dit_repro.allocator import memory_in_use


def growth(grad: bool) -> list[float]:
    """Memory in use after each batch, in MB above the start."""
    vae.model.requires_grad_(True)  # never frozen, as in the post
    gc.collect()
    began, kept, curve = memory_in_use(), [], []
    with torch.set_grad_enabled(grad):
        for _ in range(plan.leak_batches):
            latents = final.latents(range(plan.leak_batch_size)).to(DEVICE)
            images = 127.5 * vae.model.decode(latents / vae.scale_factor).sample + 127.5  # not rounded: that cuts the graph
            kept.append(judge.heads(images).pool.cpu())
            curve.append((memory_in_use() - began) / 2**20)
    vae.model.requires_grad_(False)
    return curve


# %%
began, streamed = memory_in_use(), []


def watched(positions) -> torch.Tensor:
    streamed.append((memory_in_use() - began) / 2**20)
    return final.images([i % len(final) for i in positions])  # the same images again: only their number matters


curves = {"no_grad": growth(False)}
extract(watched, features, count=features.batch_size * plan.leak_batches)
curves |= {f"this harness, {features.batch_size} a batch": streamed, "graphs kept": growth(True)}
figure, axes = plt.subplots(figsize=(7, 3.2))
for name, curve_mb in curves.items():
    axes.plot(range(1, len(curve_mb) + 1), curve_mb, marker="o", label=name, **({"markersize": 10, "fillstyle": "none"}
              if name == "no_grad" else {}))
axes.set(xlabel="batches scored", ylabel="memory above the start, MB", xticks=range(1, plan.leak_batches + 1))
axes.legend()
run.figure(figure, name="leak", caption="Memory while scoring. The only difference between no_grad and graphs kept is the switch; "
           "both keep the same few features.")
run.record("kept_graph_megabytes_per_batch", np.polyfit(range(plan.leak_batches), curves["graphs kept"], 1)[0])
run.record("without_graph_megabytes_per_batch", round(np.polyfit(range(plan.leak_batches), curves["no_grad"], 1)[0], 2) + 0.0)
run.record("kept_feature_kilobytes_per_batch", plan.leak_batch_size * judge(final.images([0])).pool.shape[1] * 4 / 1024)
run.record("leak_batch_size", plan.leak_batch_size)
del curves

# %% tags=["hide-input"]
run.say("""Each batch of {leak_batch_size} adds **{kept_graph_megabytes_per_batch:.0f} MB** to hold {kept_feature_kilobytes_per_batch:.0f} KB of features; under `no_grad` it adds {without_graph_megabytes_per_batch:.1f} MB. Here a feature extractor cannot be called with gradients on, its call sees to that, and the pass keeps one batch of images and one shard of features whatever the count; a test holds its memory flat from 2,000 to 50,000 images.""")

# %% [markdown]
# ## The post's table
#
# Early against late, averaged against raw, at one N, beside the score that the same number of real images would get against the same reference.

# %%
archives = sorted({steps[i] for i in np.linspace(0, len(steps) - 1, plan.checkpoints).round().astype(int)})
held_out = extract(settings.data.source("test"), features, cache=cache).pool
perfect = distance_by_count(held_out, reference_statistics, [min(len(row), len(held_out))], plan.repeats)[0]
sets, table = {}, []
for step in archives:
    for weights in ("raw", "average"):
        sets[step, weights] = samples = drawn(folder.load_model(step, ema=weights == "average"))
        made, logits = score(samples), extract(samples, judge, cache=cache).logits
        table.append({"step": step, "weights": weights, "distance": made.frechet, "low": made.interval[0], "high": made.interval[1],
                      "precision": made.precision, "recall": made.recall, "kernel distance": made.kernel_distance,
                      "in class": (logits.argmax(1) == samples.labels).double().mean().item()})
table = pd.DataFrame(table)
table.style.hide().format({**dict.fromkeys(["distance", "low", "high"], "{:.2f}"), **dict.fromkeys(["precision", "recall", "in class"], "{:.1%}"),
                           "kernel distance": "{:.4f}"})

# %%
figure, axes = plt.subplots(figsize=(7, 3.2))
for offset, weights in ((-0.1, "raw"), (0.1, "average")):
    rows = table[table.weights == weights]
    axes.errorbar(np.arange(len(rows)) + offset, rows.distance, yerr=[rows.distance - rows.low, rows.high - rows.distance], fmt="o",
                  capsize=3, label=f"{weights} weights")
axes.axhspan(*np.quantile(perfect, [0.025, 0.975]), color="#6b6b73", alpha=0.25, label="real images")
axes.set(xticks=range(len(archives)), xticklabels=archives, xlim=(-0.5, len(archives) - 0.5), xlabel="step", yscale="log", ylabel="Fréchet distance")
axes.legend()
run.figure(figure, name="table", export=True, caption="Checkpoints with 95% intervals, and what as many held-out images score. An interval "
           "says what other seeds would change, not what another training run would.",
           alt="Fréchet distance on a logarithmic scale against the step of the checkpoint, raw and averaged weights side by side with "
           "intervals, above a gray band of what real images score.")

# %%
best = table.loc[table.distance.idxmin()]
late = table[table.step == archives[-1]].set_index("weights")
run.record("frechet_real_same_count", perfect.mean(), seeds=plan.repeats, interval=np.quantile(perfect, [0.025, 0.975]))
run.record("frechet_best", best.distance, interval=(best.low, best.high))
run.record("frechet_best_over_real", best.distance / perfect.mean())
run.record("frechet_average_late", late.distance["average"], interval=(late.low["average"], late.high["average"]))
run.record("frechet_raw_late", late.distance["raw"], interval=(late.low["raw"], late.high["raw"]))
run.record("best_step", int(best.step))
if features.id == "Inception":
    run.record("fid_raw_minus_ema", late.distance["raw"] - late.distance["average"])
apart = late.high["average"] < late.low["raw"] or late.high["raw"] < late.low["average"]
overlap = "Their intervals do not overlap." if apart else "Their intervals overlap: at this N they cannot be told apart."

# %% tags=["hide-input"]
run.say(f"""The best row, the {best.weights} weights at step {{best_step:,}}, scores **{{frechet_best:.2f}}** ({{frechet_best.low:.2f}} to {{frechet_best.high:.2f}}); as many real images score {{frechet_real_same_count:.3f}}, a factor of {{frechet_best_over_real:.0f}}. At the last step the average has {{frechet_average_late:.2f}} and the raw weights {{frechet_raw_late:.2f}}. {overlap} The post's gap, 135.964 over a floor of 7.4, was real by the same comparison.""")

# %% [markdown]
# ## An interval, two modes, and a refusal
#
# The interval comes from the derivative of the distance in each image's weight and costs one matrix product. A bootstrap, which draws the images again with replacement and computes everything anew, must agree with it.
#
# Published scores are in the manner of the ADM evaluator {cite}`dhariwal2021diffusion`: Inception Score over chunks of 5,000 in file order, distances of precision and recall {cite}`kynkaanniemi2019improved` in float16. Mode `adm` does that, mode `strict` takes both out, and the difference is worth knowing once.

# %%
from dit_repro.evaluation import bootstrap_interval

resampled = bootstrap_interval(extract(row, features, cache=cache).pool, reference_statistics)
run.record("interval_width_first_order", row_scores.interval[1] - row_scores.interval[0])
run.record("interval_width_bootstrap", resampled[1] - resampled[0])
strict = score(final, "strict")
names = ["inception_score", "precision", "recall"]
pd.DataFrame({scores.protocol.mode: {name: getattr(scores, name) for name in names} for scores in (final_scores, strict)})

# %%
for other, vary in ((row_scores, ()), (wrong_scores, ("num_generated", "seeds")), (strict, ())):
    try:
        final_scores.protocol.compare(other.protocol, vary)
    except ValueError as refusal:
        print(refusal, end="\n\n")
row_scores.protocol.compare(wrong_scores.protocol, vary=["sampler"])  # what is varied on purpose is named: nothing is said

# %% tags=["hide-input"]
run.say("""The interval of the last row is {interval_width_first_order:.2f} wide by the derivative and {interval_width_bootstrap:.2f} by 200 bootstrap draws. The refusals above name the fields that differ. What is varied on purpose has to be named, and is then allowed: the last line of the cell compares two schedules.""")

# %% [markdown]
# ## From the command line, on several processes
#
# The same scores without a notebook. Images are numbered, each with a label and a seed of its own, so any process can draw any of them; ranks take shards in turn, none is padded, and the shards' sums are merged exactly. The command below draws features again on its own and has to arrive at the number above. The gpu and paper profiles score 50,000 images on all GPUs; with Inception features that is FID-50K.

# %%
import json
import subprocess
import sys
import tempfile

ranks = max(torch.cuda.device_count(), 1 if profile == "smoke" else 2)
torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
with tempfile.TemporaryDirectory() as scratch:
    reference_statistics.save(f"{scratch}/reference.npz")
    command = ["dit_repro", "fid", "run", str(folder.path), "--step", str(steps[-1]), "--count", str(plan.command_images),
               "--steps", settings.sampling.steps, "--seed", str(seed), "--autoencoder", settings.data.autoencoder_name,
               "--features", "classifier" if settings.data.is_fashion_mnist else "inception",
               *(["--stand-ins"] if settings.data.stand_ins else []),
               "--reference", f"{scratch}/reference.npz", "--cache", scratch, "--out", f"{scratch}/scores.json"]
    done = subprocess.run([sys.executable, "-m", *torchrun, *command], capture_output=True, text=True)
    print(done.stdout if done.returncode == 0 else done.stderr[-2000:])
    commanded = json.loads(Path(f"{scratch}/scores.json").read_text())

# %%
run.record("command_ranks", ranks)
run.record("command_images", plan.command_images)
run.record("command_distance", commanded["frechet"], interval=commanded["interval"])
same_images = frechet_distance(extract(final, features, cache=cache).statistics, reference_statistics)
if plan.command_images == plan.samples:
    run.record("command_minus_notebook", abs(commanded["frechet"] - same_images))

# %% tags=["hide-input"]
equal = "; the notebook's own differs by {command_minus_notebook:.0e}" if plan.command_images == plan.samples else ""
run.say(f"""On {'one process' if ranks == 1 else '{command_ranks} processes'} the command scores {{command_images:,}} images at {{command_distance:.4f}}{equal}. The statistics of the reference went to it as an .npz with `mu` and `sigma`, the format that other tools write; without images in it there is nothing to measure precision and recall against, so those are left out, not made up.""")

# %% [markdown]
# ## What each mistake does
#
# The doctor plants known mistakes in a set whose truth is known, one half of the real images playing the samples, and in samples, and measures what each does to which score. A harness that passes shows the directions that theory demands; the sizes are worth reading, because a fault of a small size is the one that survives.
#
# > **Predict first.** Order these by harm: JPEG at quality 75, halving and doubling the size, truncating instead of rounding, the raw weights in place of the average, a decoder whose scale is 10% off.

# %%
from dit_repro.evaluation import diagnose

source = settings.data.source(plan.reference_split)
some = np.random.default_rng(0).permutation(len(source))[:plan.doctor_images]
suspects = {"raw weights, not the average": sets[steps[-1], "raw"], "cosine schedule": wrong,
            "decoder scale 10% off": lambda positions: row.images(positions, lambda latents: 1.1 * latents)}
findings = diagnose(features, source.images(some), source.labels[some], healthy=row, suspects=suspects, rehearse=settings.data.stand_ins)
pd.DataFrame([{"fault": f.fault, "score": f.score, "before": f.before, "after": f.after, "noise": f.noise,
               "direction": f.direction, "verdict": f.verdict} for f in findings]).style.hide().format(
    "{:.4g}", subset=["before", "after", "noise"])

# %%
planted = [f for f in findings if f.before > 0]
ratios = np.array([f.after / f.before for f in planted])
order = ratios.argsort()
color = {"up": "#b5482a", "down": "#2a6fb5", "same": "#8a8a92"}
figure, axes = plt.subplots(figsize=(7.5, 0.34 * len(planted) + 0.8))
for place, index in enumerate(order):
    f = planted[index]
    axes.barh(place, np.log10(ratios[index]), color=color[f.direction], xerr=2 * f.noise / f.after / np.log(10), capsize=2)
axes.set(yticks=range(len(planted)), yticklabels=[f"{planted[i].fault}: {planted[i].score.replace('Frechet', 'Fréchet')}" for i in order],
         xlabel="score after / before (± 2 standard errors)")
low, high = np.floor(np.log10(ratios.min())), np.ceil(np.log10(ratios.max()))
axes.set(xticks=(ticks := np.arange(low, high + 1)), xticklabels=[f"{10**t:g}" for t in ticks])
axes.axvline(0, color="#26262b", linewidth=1)
run.figure(figure, name="sensitivity", export=True, caption="What each planted mistake does to one score. Red: up by more than two "
           "standard errors, blue: down, gray: not told from noise.",
           alt="Horizontal bars, one a planted mistake and score, of the score after it over the score before, logarithmic and sorted: "
           + ", ".join(f"{sum(f.direction == way for f in planted)} {way}" for way in color) + ".")

# %%
by_fault = {(f.fault, f.score): f for f in findings}
distance = "Frechet distance"
for name, fault in (("jpeg", "JPEG of quality 75"), ("resize", "halved and doubled in size"),
                    ("truncation", "truncated instead of rounded"), ("scale", "decoder scale 10% off"),
                    ("raw_weights", "raw weights, not the average"), ("permuted", "labels permuted")):
    finding = by_fault[fault, distance]
    run.record(f"doctor_{name}_ratio", finding.after / finding.before)
run.record("doctor_identity", by_fault["same images on both sides", distance].after)
run.record("doctor_wrong", sum(f.verdict == "wrong" for f in findings))
sorted_score = by_fault["sorted by class, mode adm", "Inception Score"]
run.record("doctor_sorted_factor", sorted_score.before / sorted_score.after)
run.record("doctor_findings", len(findings))

# %% tags=["hide-input"]
run.say("""Of {doctor_findings} findings {doctor_wrong} go a way they must not. Identity is {doctor_identity:.0e}. Permuting the labels leaves the distance at {doctor_permuted_ratio:.3f} times what it was: it is blind to whether samples are what they were asked to be, and only the distances by class below see it. Truncation, the difference between two lines of published code, makes {doctor_truncation_ratio:.2f}; a wrong decoder scale {doctor_scale_ratio:.2f}; raw weights {doctor_raw_weights_ratio:.2f}; halving and doubling {doctor_resize_ratio:.1f}; JPEG {doctor_jpeg_ratio:.1f}. Truncation, size and JPEG are planted in real images, near the floor, where a small distance makes a large factor; scale and weights in samples, far above it. An .npz sorted by class divides the Inception Score by {doctor_sorted_factor:.1f} in the published mode.

`dit-repro fid doctor` makes this table for any extractor, and with the two public files of ADM's README and Inception weights it re-scores them against the published FID 3.94 and Inception Score 215.8, and says pass or fail. That has not been run here: neither the weights nor the files are at hand.""")

# %% [markdown]
# ## Class by class
#
# The post wanted to know whether its remaining gap sat in a few broken classes. The labels of its cached samples had not been kept, but a seed had drawn them, so drawing them again gives them back. It then took the standard deviation of each image's pixels as a cheap sign of collapse.

# %%
from dit_repro.evaluation import class_frechet, pixel_std, rank_classes, replay_labels, second_mode

replayed = replay_labels(seed, len(final), train_store.num_classes)
seen = extract(final, judge, cache=cache).logits.argmax(1)
run.record("replayed_labels_equal_share", (replayed == labels).double().mean())
run.record("replayed_agreement", (seen == replayed).double().mean())
run.record("wrong_seed_agreement", (seen == replay_labels(seed + 1, len(final), train_store.num_classes)).double().mean())
spread = torch.cat([pixel_std(final.images(range(i, min(i + 250, len(final))))) for i in range(0, len(final), 250)])
ranked = rank_classes(spread, replayed, train_store.class_names)
held_out_source = settings.data.source("test")
some = np.random.default_rng(0).permutation(len(held_out_source))[:len(final)]
real_spread = pixel_std(held_out_source.images(some))
real_ranked = rank_classes(real_spread, held_out_source.labels[some], train_store.class_names)
both = ranked.assign(**{f"{name}, real": real_ranked[name] for name in ("mean", "lowest")})
both.head(10).style.format("{:.3f}", subset=["mean", "lowest", "mean, real", "lowest, real"])

# %%
figure, axes = plt.subplots(figsize=(7, 0.28 * len(ranked.head(12)) + 1))
for place, name in enumerate(ranked.index[:12]):
    own = spread[replayed == list(train_store.class_names).index(name)]
    axes.plot(own, place + 0.3 * (torch.rand(len(own), generator=torch.Generator().manual_seed(0)) - 0.5), ".", markersize=3,
              alpha=0.5, color="#2a6fb5")
    if name in real_ranked.index:
        axes.plot(real_ranked["mean"][name], place, "|", markersize=14, color="#26262b")
axes.axvline(0, color="#b5482a", linewidth=1)
axes.set(yticks=range(len(ranked.head(12))), yticklabels=ranked.index[:12], xlabel="standard deviation of an image's pixels, 1 = full range",
         xlim=(-0.01, None))
run.figure(figure, name="pixel-std", caption="Each sample's pixel deviation, the lowest class at the bottom; bars mark the mean of real images. A collapsed sample "
           "would lie on the red line.")

# %%
modes, class_modes = second_mode(spread), second_mode(ranked["mean"]) if len(ranked) >= 10 else None
planted = second_mode(np.r_[spread, np.full(max(len(spread) // 10, 2), 0.005)])
near = float(real_spread.min()) / 2  # a collapsed image has 0; of as many real ones none has less than twice this
run.record("collapsed_samples", int((spread < near).sum()))
run.record("collapse_threshold", near)
run.record("lowest_sample_std", spread.min())
run.record("lowest_real_std", real_spread.min())
run.record("lowest_class_pixel_std", ranked["mean"].iloc[0])
run.record("second_mode_p_value", modes.p_value)
run.record("second_mode_p_value_real", second_mode(real_spread).p_value)
run.record("second_mode_p_value_planted", planted.p_value)
run.record("class_std_second_mode_p_value", class_modes.p_value if class_modes else 1.0)

# %%
lowest = spread.argsort()[:8].tolist()
run.figure(sample_grid(final.images(lowest)[None], ["samples"], [f"{spread[i]:.3f}" for i in lowest]), name="lowest-std",
           caption="The eight samples of the lowest pixel deviation, out of all that were scored, with its value.")

# %% tags=["hide-input"]
power = "so it would have seen such a group" if run["second_mode_p_value_planted"] < 0.05 else "so it could not have seen such a group"
none = "None" if run["collapsed_samples"] == 0 else "{collapsed_samples:,}"
images = ("Over single images the dip test finds a second mode in the samples (p = {second_mode_p_value:.3f}) and in real images p = {second_mode_p_value_real:.3f}: the data have it too."
          if run["second_mode_p_value"] < 0.05 and run["second_mode_p_value_real"] < 0.05 else
          "Over single images the dip test gives p = {second_mode_p_value:.3f} for the samples and {second_mode_p_value_real:.3f} for real images.")
run.say(f"""A share of {{replayed_labels_equal_share:.0%}} of the labels comes back, and a classifier that does not know them agrees with {{replayed_agreement:.1%}}; with labels of a wrong seed it would be {{wrong_seed_agreement:.1%}}, which is how to check a replay when nothing was kept.

**{none}** of {{samples_count:,}} samples lie below {{collapse_threshold:.3f}}, half of the lowest deviation among as many real images ({{lowest_real_std:.3f}}); the lowest sample has {{lowest_sample_std:.3f}}. The lowest class mean is {{lowest_class_pixel_std:.3f}}. {images} With a tenth of black samples planted it gives {{second_mode_p_value_planted:.3f}}, {power}. Class means give p = {{class_std_second_mode_p_value:.2f}}, from few classes, so that only a gross split would show.""")

# %% [markdown]
# ### A distance for each class
#
# Pixel deviation says nothing about quality. A Fréchet distance by class does, at a price: a class has few images, so the floor is high and differs between classes. Both distances below are to one half of a class's held-out images: from as many samples, and from the other half. Only the excess compares.

# %%
group = -(-train_store.num_classes // 2) if settings.data.stand_ins else 1   # a rehearsal has too few images of a class
by_class = class_frechet(generated.pool, replayed // group, held_out, held_out_source.labels // group, train_store.class_names)
shown = by_class.iloc[::-1].tail(20)
figure, axes = plt.subplots(figsize=(7, 0.28 * len(shown) + 1))
axes.barh(range(len(shown)), shown.distance, color="#2a6fb5", label="samples")
axes.barh(range(len(shown)), shown.floor, color="#c9c5bd", label="other real half")
axes.set(yticks=range(len(shown)), yticklabels=shown.index, xlabel="Fréchet distance to one half of the class")
axes.legend()
run.figure(figure, name="by-class", caption="Distance of each class and the floor under it, ranked by their difference.")
run.record("class_images_fewest", int(by_class.images.min()))
run.record("class_floor_mean", by_class.floor.mean())
run.record("class_floor_range", by_class.floor.max() / by_class.floor.min())
run.record("class_excess_worst", by_class.excess.iloc[0])
run.record("class_excess_best", by_class.excess.iloc[-1])
run.record("class_excess_worst_share", by_class.excess.iloc[0] / by_class.excess.sum())

# %% tags=["hide-input"]
run.say(f"""With {{class_images_fewest}} images or more a class the floor averages {{class_floor_mean:.2f}} and differs {{class_floor_range:.1f}}-fold between classes: without it the ranking would partly be one of classes. Above it, {by_class.index[0]} is worst with {{class_excess_worst:.2f}} and {by_class.index[-1]} best with {{class_excess_best:.2f}}. The worst class holds {{class_excess_worst_share:.0%}} of the summed excess, where an even spread over {len(by_class)} classes would give {1 / len(by_class):.0%}.""")

# %% [markdown]
# ## With Inception
#
# Everything above runs unchanged when the data are class folders: features become Inception's, read as the ADM evaluator reads them, and the small classifier's place as judge is taken by a classifier of timm's whose logits follow the folders' names. The weights of both are looked for locally, checked, and never downloaded; the error says what to get and where to put it. Given the released checkpoint, the cell below repeats the post's validation; given a run by the post's first recipe, its first score.

# %%
if official:
    run.record("fid_2k_official_linear", score(drawn(released, 2_000, linear, "250")).frechet)
    run.record("fid_2k_official_cosine", score(drawn(released, 2_000, cosine, "250")).frechet)
if first_recipe:
    weights = RunFolder(first_recipe).load_model(min(early, key=lambda step: abs(step - 353_000)))
    run.record("fid_2k_first_recipe", score(drawn(weights, 2_000, cosine, "250")).frechet)
    run.record("fid_10k_first_recipe", score(drawn(weights, 10_000, cosine, "250")).frechet)

# %% [markdown]
# <details><summary>Answers to the predictions</summary>
#
# The floor falls as 1/N, five times from 2,000 to 10,000, on any network; its height is set by how many features carry variance. A batch whose features alone are kept costs more than one whose images are kept, since the classifier's activations come on top of the decoder's; the megabytes stand below that figure. The order of harm is read off the figure of the doctor.
# </details>
#
# **Exercise.** Two models are scored, one at 10,000 images and one at 50,000, and nothing can be sampled again. The features of the first are on disk. Which of the two numbers can be moved to the other's N, and with which function of this chapter?
#
# <details><summary>Answer</summary>
#
# Neither exactly. `extrapolate` takes the first to infinity from its own subsets, and a line through the same points gives its score at 50,000. The second could only be brought down to 10,000 with its features, `distance_by_count` at one count. A number without its features stays where it is.
# </details>

# %% [markdown]
# ## Claims of this chapter

# %%
run.claims()

# %% [markdown]
# ## What could not be shown at this scale
#
# No Inception weights, no ImageNet, no released checkpoint and none of ADM's public sample files were at hand, so no number on this page is an FID, and the post's six are unconfirmed. What carries over is not their size but their logic: the 1/N law of the floor, the exactness below the dimension, the direction of each planted fault. With the data, `dit-repro run 07 --profile paper -p data=IMAGENET -p official=DiT-XL-2-256x256.pt -p first_recipe=RUN` records them, and `torchrun --nproc-per-node=8 -m dit_repro fid run ... --count 50000` is the paper's FID-50K.
