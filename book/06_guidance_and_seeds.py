# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Guidance, seeds, and samplers that do not walk off the map
#
# **Question.** The post's previews came out as flat color for some classes, at some guidance scales, from some seeds, while the loss was sound. What breaks such a sample, and which of the published remedies mends it, at what price?
#
# **Answer.** One division. The cosine schedule ends where almost nothing of the image is left, and the sampler's first step multiplies the network's error there by a number that follows from the schedule alone; whether that throws a trajectory off the data depends on that error. Remedies that bound the step are set beside remedies aimed elsewhere, and the tables say what each mends.
#
# *Claimed in:* the post, "Solid-black samples, guidance scale, and why it isn't collapse"; the lesson, "Why 1,000 training timesteps but 25 at inference". *Time:* laptop about 4 min on two cores, half of it training, beside the run of chapter 3; at the paper profile a day on one GPU.

# %% tags=["parameters"]
profile: str = "laptop"  # smoke, laptop, gpu or paper
data: str = ""  # a folder of IDX files or of class folders; empty: what the profile says
autoencoder: str = ""  # "embedded", an SD-VAE name or a local folder; empty: what the profile says
seed: int = 0  # first of the samples' seeds

# %%
from dit_repro.book import start

run = start(globals())

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from dit_repro.book.figures import Filmstrip, sample_grid
from dit_repro.diffusion import NoiseSchedule
from dit_repro.files import workspace
from dit_repro.profiles import DEVICE, get_profile
from dit_repro.sampling import CollapseDetector, Guidance, clamp_x0, dense_start, error_gain, sweep
from dit_repro.training import launch

settings = get_profile(profile, data=data, autoencoder=autoencoder)
plan, vae, judge = settings.sweeps, settings.data.autoencoder(), settings.data.judge()
train_store, test_store = (settings.data.store(split, vae) for split in ("train", "test"))
names = train_store.class_names[: plan.classes]
linear, cosine = NoiseSchedule.linear(1000), NoiseSchedule.cosine(1000)

# %% [markdown]
# ## Two runs
#
# Chapter 3's run follows the paper. The second follows the post's first recipe. Three choices differ, and they are all in one table; everything else, down to the order of the images and the noise of each step, is the same.

# %%
config = settings.training(train_store)
folder = launch(config, settings.run_path("first_steps", config))
post_config = replace(config.with_recipe("post-first"), num_steps=plan.num_steps)
post = launch(post_config, settings.run_path("post_first", post_config), plan.processes)
end, linear_end = plan.num_steps, min(plan.num_steps, config.num_steps)
cosine_trained = post.load_model(end, ema=False).to(DEVICE)
linear_trained = folder.load_model(linear_end, ema=False).to(DEVICE)
pd.DataFrame({name: [str(getattr(value, "learn_sigma", value)) for value in pair]
              for name, pair in config.differences(post_config).items()},
             index=["chapter 3", "the post's first recipe"]).T.rename({"objective": "learned variance"})

# %% [markdown]
# ## What counts as collapsed
#
# "Solid black" is what one failure looks like through one decoder. A detector should know what real images do and call the rest collapsed. This one takes four numbers of each image, the deviation of its pixels, the share of pixels at black or white, the share of latents outside the data, and the deviation of its latents, and puts each threshold where all but a small share of real images lie inside. No threshold is typed. The largest latent of real images is measured along the way; it is the range for clamping later.
#
# Thresholds come from training images. What they cost is measured on test images, which are real, so every alarm is false.

# %%
def real_latents(store, count):
    """Latents of `count` images in random order, and their labels."""
    some = np.random.default_rng(0).permutation(len(store))[:count]
    noise = torch.randn(len(some), *store.latent_shape, generator=torch.Generator().manual_seed(0))
    return store.latents(some, np.zeros(len(some), bool), noise), torch.from_numpy(store.labels[some])


def decode(latents):
    return torch.cat([vae.decode(part) for part in latents.split(plan.batch_size)]).cpu()


known, _ = real_latents(train_store, plan.real_images)
detector = CollapseDetector.fit(decode(known), known, plan.quantile)
held_out, held_out_labels = real_latents(test_store, plan.real_images)
false_alarms = detector.false_positive_rate(decode(held_out), held_out)
alarm = false_alarms.loc["collapsed"]
run.record("false_positive_rate", alarm.rate, interval=(alarm.low, alarm.high), seeds=int(alarm.images))
run.record("data_limit", detector.limit)
false_alarms.style.format({"images": "{:.0f}", "count": "{:.0f}", "rate": "{:.2%}", "low": "{:.2%}", "high": "{:.2%}"})

# %% tags=["hide-input"]
run.say("""Real latents stay within ±{data_limit:.2f}. The detector calls {false_positive_rate:.2%} of real test images collapsed (95% interval {false_positive_rate.low:.2%} to {false_positive_rate.high:.2%}). Rates below that mean nothing.""")

# %% [markdown]
# ## The post's tables
#
# The post sampled with all 1,000 steps. Here a chain keeps the noisiest timesteps of the 1,000, each one, and takes the rest in a few strides: its first steps are exactly those of the full chain; whether those are the ones that matter is measured below. Each image has one seed, and a cell of a sweep is kept on disk under its weights and settings, so a second run of this page samples nothing.
#
# > **Predict first.** The post saw half of the seeds fail for a class. If the cause were in the class embedding, what would the table of seeds look like? If it were in guidance, what would its column for scale 1.0 look like?

# %%
cosine_chain = dense_start(cosine, plan.steps, plan.dense)
shared = {"folder": workspace() / "sweeps", "decode": vae.decode, "detector": detector, "batch_size": plan.batch_size}
plain = {"model": cosine_trained, "schedule": cosine_chain, "steps": cosine_chain.num_steps}


def each_class(count):
    """Labels, seeds and names of samples that have the same `count` seeds in each class."""
    return {"labels": torch.arange(len(names)).repeat_interleave(count), "class_names": names,
            "seeds": [*range(seed, seed + count)] * len(names)}


by_seed = sweep(["guidance"], {("none",): {}}, **plain, **shared, **each_class(plan.seeds))
run.figure(sample_grid(*by_seed.grid("class", "seed"), size=48), name="seeds", export=True,
           caption=f"The post's first recipe after {end:,} steps, no guidance. Rows are classes, columns are seeds.",
           alt="Grid of samples. Collapsed ones, flat or blotched, lie scattered over rows and columns: "
           f"{int(by_seed.rows.collapsed.sum())} of {len(by_seed.rows)}.")


# %%
def as_the_post(rows, row, column):
    """Mean pixel of the first image of each pair, with a cross where it has collapsed."""
    first = rows.drop_duplicates([row, column])
    first = first.assign(shown=[f"{mean:.1f}{' ×' if bad else ''}" for mean, bad in zip(first.mean_pixel, first.collapsed)])
    return first.pivot(index=row, columns=column, values="shown")


rates = by_seed.rates("class")
seed_decides = (rates["count"] > 0) & (rates["count"] < rates.images)
run.record("classes_where_seed_decides", seed_decides.mean())
run.record("collapse_rate_unguided", by_seed.rows.collapsed.mean(), seeds=plan.seeds)
run.record("class_rate_lowest", rates.rate.min())
run.record("class_rate_highest", rates.rate.max())
run.record("largest_latent", by_seed.rows.largest_latent.max())
as_the_post(by_seed.rows, "class", "seed").loc[list(names)]

# %% tags=["hide-input"]
run.say("""A cross marks a collapsed sample; the number is its mean pixel, as in the post. {collapse_rate_unguided:.0%} of these samples collapsed, {class_rate_lowest:.0%} of the class that fared best and {class_rate_highest:.0%} of the one that fared worst. In {classes_where_seed_decides:.0%} of the classes some seeds fail and some do not, with the same weights and the same label. The largest latent among them is {largest_latent:,.0f}, where the data end at {data_limit:.1f}. The mean pixel is the post's own gauge, made for samples that come out black; a cross does not need that color.""")

# %%
by_scale = sweep(["scale"], {(scale,): {"guidance": Guidance(scale)} for scale in plan.scales}, **plain, **shared,
                 **each_class(plan.scale_seeds))
scale_rates = by_scale.rates("class", "scale").rate.unstack()  # (class, scale)
run.record("guidance_scales_safe_for_all_classes", int((scale_rates == 0).all().sum()))
run.record("classes_rescued_by_guidance", int((scale_rates.iloc[:, 1:].min(axis=1) < scale_rates.iloc[:, 0]).sum()))
for label, scale in (("unguided", plan.scales[0]), ("most_guided", plan.scales[-1])):
    row = by_scale.rates("scale").loc[scale]
    run.record(f"scale_rate_{label}", row.rate, interval=(row.low, row.high), seeds=plan.scale_seeds)
goldfish, tiger = (next((name for name in train_store.class_names if name in known), None)
                   for known in (("goldfish", "n01443537"), ("tiger", "n02129604")))
if goldfish in names:  # the post's class; only ImageNet has it
    at_2 = by_scale.rates("class", "scale").loc[(goldfish, 2.0)]
    run.record("goldfish_mean_pixel_scale_2", at_2.mean_pixel, seeds=plan.scale_seeds)
if tiger:
    tigers = sweep(["guidance"], {("none",): {}}, **plain, **shared, labels=train_store.class_names.index(tiger),
                   seeds=range(64))
    run.record("tiger_collapse_rate", tigers.rows.collapsed.mean(), seeds=64)
as_the_post(by_scale.rows, "scale", "class")[list(names)]

# %% tags=["hide-input"]
run.say("""At scale 1 {scale_rate_unguided:.0%} of samples collapsed, at the largest scale {scale_rate_most_guided:.0%}. Of the scales tried {guidance_scales_safe_for_all_classes} leave every class whole. """
        + ("No class does better with guidance than without: where the post saw guidance rescue a tiger, here it rescues none; the next section shows why it need not."
           if run["classes_rescued_by_guidance"] == 0 else
           "{classes_rescued_by_guidance} of the classes lose fewer samples at some scale above 1 than without guidance, as the post's tiger did."))

# %%
archives = [step for step in post.checkpoints() if step % post_config.archive_every == 0 and step <= end]
shown = sorted({archives[i] for i in np.linspace(0, len(archives) - 1, 3).round().astype(int)})
loaded = {(step, ema): lambda step=step, ema=ema: post.load_model(step, ema=ema).to(DEVICE)
          for step in shown for ema in (False, True)}
by_step = sweep(["step", "weights", "scale"], {
    (step, "average" if ema else "raw", scale): {"model": model, "guidance": Guidance(scale)}
    for (step, ema), model in loaded.items() for scale in (plan.scales[0], plan.scales[-1])},
    schedule=cosine_chain, steps=cosine_chain.num_steps, labels=range(len(names)), seeds=range(seed, seed + len(names)), **shared)
step_rates = by_step.rates("step", "weights", "scale").rate.unstack(["weights", "scale"])
run.record("rate_last_raw", step_rates.loc[shown[-1], ("raw", plan.scales[0])])
run.record("rate_last_average", step_rates.loc[shown[-1], ("average", plan.scales[0])])
step_rates.style.format("{:.0%}")

# %% tags=["hide-input"]
run.say("""Share collapsed, by checkpoint, weights and scale. At the last checkpoint {rate_last_raw:.0%} of the raw weights' samples collapsed and {rate_last_average:.0%} of the averaged weights'.""" + (" Averaged weights are the worse choice this early: they still hold a share of the initial network, and its error with it." if run["rate_last_average"] > run["rate_last_raw"] else ""))

# %% [markdown]
# ## One division
#
# The sampler turns predicted noise into a predicted image, x₀ = (x − √(1−a) ε) / √a. At the last timestep a, the share of image variance, is small, so an error in ε becomes a huge error in x₀. What of it reaches the next state follows from the posterior's mean, and most of it cancels: an error of one in ε moves the next state by β / √((1−β)(1−a)). There is no network in that expression.
#
# > **Predict first.** The linear schedule's last β is 0.02, the cosine schedule's is clipped at 0.999. By how much does each multiply the error of its first step, over 1,000 steps? Over 25?

# %%
gains = {(schedule.name, steps): error_gain(schedule.respaced(steps))
         for schedule in (linear, cosine) for steps in ("1000", "250", "25")}
for (name, steps), gain in gains.items():
    run.record(f"first_gain_{name}_{steps}", gain[-1])
run.record("first_gain_cosine_without_last", error_gain(cosine.respaced("ddim25"))[-1])
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for axes, steps in zip(panels, ("1000", "25")):
    for schedule in (linear, cosine):
        axes.semilogy(schedule.respaced(steps).timesteps, gains[schedule.name, steps], label=schedule.name,
                      marker="o" if steps == "25" else None, markersize=3)
    axes.set(title=f"{steps} steps", xlabel="timestep")
panels[0].set(ylabel="gain of an error in ε")
panels[0].legend()
run.figure(figure, name="gain", export=True, caption="What an error of one in the predicted noise adds to the next state, by the "
           "schedule alone. The chain runs from right to left. The cosine schedule's first step stands at the right edge.",
           alt="Two panels, 1,000 and 25 steps: gain on a logarithmic scale against the timestep for both schedules. At the last timestep "
           "the linear one ends at {first_gain_linear_1000:.2f} and {first_gain_linear_25:.2f}, the cosine at {first_gain_cosine_1000:.1f} "
           "and {first_gain_cosine_25:,.0f}.")

# %%
from dit_repro.sampling import sample_states, trace
from dit_repro.training import loss_by_timestep

labels = torch.arange(len(names)).repeat(plan.seeds)
seeds = range(seed, seed + len(labels))
followed = trace(sample_states(cosine_trained, labels, cosine_chain, cosine_chain.num_steps, seeds=seeds), cosine, held_out,
                 detector.limit)
error = loss_by_timestep(cosine_trained, held_out[:256], held_out_labels[:256], cosine, [999]).mean().sqrt()
linear_error = loss_by_timestep(linear_trained, held_out[:256], held_out_labels[:256], linear, [999]).mean().sqrt()
run.record("error_at_last_timestep", error)
run.record("error_at_last_timestep_linear", linear_error)
run.record("kick_predicted", error * run["first_gain_cosine_1000"])
run.record("kick_predicted_linear", linear_error * run["first_gain_linear_1000"])
run.record("kick_measured", max(0, followed.steps.norm[1] ** 2 - 1) ** 0.5)

# %% tags=["hide-input"]
run.say("""The first gain is {first_gain_linear_1000:.2f} for the linear schedule and **{first_gain_cosine_1000:.1f}** for the cosine over 1,000 steps; over 25 steps {first_gain_linear_25:.2f} and **{first_gain_cosine_25:,.0f}**. From there the cosine's gain falls fast, and along most of the chain it is the smaller of the two. The network's own error at timestep 999 is {error_at_last_timestep:.3f}, that of the linear run {error_at_last_timestep_linear:.3f}: one timestep of a thousand, so a loss curve hardly shows it. Times the gain it is a kick of **{kick_predicted:.2f}** standard deviations, against {kick_predicted_linear:.4f} on the linear schedule. Measured on the states after the first step the kick is {kick_measured:.2f}. In training the input's deviation was near one at every timestep, so a kick that is no small part of one makes an input such as the network never saw.

Guidance cannot help at this step. It multiplies the difference of two predictions of the same noise, and where all is noise that difference is error. Nor can a longer chain: it lowers the gain only as far as {first_gain_cosine_1000:.1f}, since β is clipped at 0.999.""")

# %% [markdown]
# ## A trajectory that fails beside one that does not
#
# The same label can end either way. Here are both kinds from one batch: the largest value of the predicted image at each step, before any clamp.

# %%
far = 2 * detector.limit  # beyond this a sample has left the data, not only brushed its edge
failed = ~(followed.latents.abs().flatten(1).amax(1) <= far).cpu().numpy()
steps_taken = np.arange(len(followed.steps))
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for axes, chosen, title in zip(panels, (~failed, failed), ("stay", "leave")):
    axes.set(title=f"{chosen.sum()} that {title}", xlabel="sampling step", yscale="log")
    for column, color, name in ((3, "C1", "largest value"), (0, "C0", "median value")):
        axes.plot([], [], color=color, label=name)
        axes.plot(steps_taken, followed.x0[:, chosen, column], color=color, alpha=0.3, linewidth=0.8)
    axes.axhline(detector.limit, color="#6b6b73", linestyle="--", linewidth=1)
panels[0].set(ylabel="|predicted x₀|")
panels[0].legend()
run.figure(figure, name="trajectories", export=True, caption="Predicted x₀ along the chain, each line an image. Dashed: the largest "
           "value in real data. The first prediction is far outside in both; the question is whether it comes back.",
           alt=f"Two panels on one logarithmic scale, largest and median value of the predicted image against the sampling step: {(~failed).sum()} "
           f"images that end near the data, and {failed.sum()} whose largest value ends above twice the dashed line.")
run.record("failed_share", failed.mean(), seeds=len(failed))
left = followed.exits[failed]
run.record("exits_in_first_steps", float((left["input"] >= 990).mean()) if failed.any() else 1.0,
           note="share of failing trajectories whose input leaves the forward process at timestep 990 or above")
exited = left["input"].dropna()
run.record("median_exit_timestep", float(exited.median()) if len(exited) else -1.0, note="-1: none left")
run.record("stayed_though_input_left", followed.exits["input"][~failed].notna().mean() if not failed.all() else 0.0)

# %% tags=["hide-input"]
run.say("""{failed_share:.0%} of these trajectories end beyond twice the range of the data. """ + ("""In {exits_in_first_steps:.0%} of them the network's input had a value outside the forward process within the first ten of 1,000 timesteps, half of those by timestep {median_exit_timestep:.0f}; of the trajectories that stayed this happened to {stayed_though_input_left:.0%}. """ if run["median_exit_timestep"] >= 0 else "")
        + ("" if not failed.any() else "Nothing gathers slowly over the chain: a failing trajectory is off the data before the image has begun." if run["exits_in_first_steps"] > 0.5 else "Most leave later than that."))

# %% [markdown]
# ## Schedule, variance, clamp: which is it?
#
# The post changed its schedule, its variance and its initialization together, saw the collapse end, and could not say which had done it. Much of this can be separated without training anything. The variance is a setting of the sampler: a learned one lies between the two fixed ones, so trying both ends brackets it. And a network can be sampled at the noise levels of the *other* schedule, if it is given the timestep at which its own schedule is equally noisy. Then weights, initialization and objective are held fixed and only the levels change.

# %%
from itertools import product

from dit_repro.sampling import at_levels_of

trained_on = {"linear": (linear_trained, linear), "cosine": (cosine_trained, cosine)}
chains = {"linear, few steps": linear.respaced(plan.plain_steps), "cosine, few steps": cosine.respaced(plan.plain_steps),
          "cosine, full start": cosine_chain}
cells = {}
for trained, (model, own) in trained_on.items():
    for variance in ("fixed_small", "fixed_large") + (("learned",) if model.learn_sigma else ()):
        for (levels, chain), clamp in product(chains.items(), ("no clamp", "clamp")):
            schedule = at_levels_of(chain, own)
            cells[trained, variance, levels, clamp] = {
                "model": model, "schedule": schedule, "steps": schedule.num_steps, "variance": variance,
                "x0_transform": clamp_x0(detector.limit) if clamp == "clamp" else None}
some = torch.arange(len(names)).repeat(plan.few_per_class)
causes = sweep(["trained on", "variance", "levels", "clamp"], cells, **shared, labels=some,
               seeds=range(seed, seed + len(some)))
causes = causes.rows.assign(left=~(causes.rows.largest_latent <= far))
cause_rates = causes.groupby(["trained on", "variance", "levels", "clamp"], sort=False).left.mean().unstack(["levels", "clamp"])
cause_rates.style.format("{:.0%}")

# %%
outside = causes.groupby(["trained on", "levels", "clamp"]).left.mean()
few_linear, few_cosine, full_start = chains
run.record("outside_linear_weights_linear_levels", outside["linear", few_linear, "no clamp"])
run.record("outside_linear_weights_cosine_levels", outside["linear", few_cosine, "no clamp"])
run.record("outside_linear_weights_full_start", outside["linear", full_start, "no clamp"])
run.record("outside_cosine_weights_linear_levels", outside["cosine", few_linear, "no clamp"])
run.record("outside_cosine_weights_cosine_levels", outside["cosine", few_cosine, "no clamp"])
run.record("outside_cosine_weights_full_start", outside["cosine", full_start, "no clamp"])
unclamped = causes[causes.clamp == "no clamp"].groupby(["trained on", "levels", "variance"]).left.mean()
run.record("largest_effect_of_variance", (unclamped.groupby(level=[0, 1]).max() - unclamped.groupby(level=[0, 1]).min()).max())
run.record("outside_with_clamp", causes[causes.clamp == "clamp"].left.mean())

# %% tags=["hide-input"]
run.say("""Share of samples with a latent beyond twice the range of the data, few steps: weights trained on the linear schedule {outside_linear_weights_linear_levels:.0%} at their own noise levels, **{outside_linear_weights_cosine_levels:.0%}** at the cosine's; weights trained on the cosine schedule {outside_cosine_weights_cosine_levels:.0%} at their own, **{outside_cosine_weights_linear_levels:.0%}** at the linear ones. """
        + ("The levels decide, not the weights: the paper's recipe is not immune, it is never asked the question. " if all(
            run[f"outside_{trained}_weights_cosine_levels"] > 0.1 + run[f"outside_{trained}_weights_linear_levels"]
            for trained in trained_on) else "In this run the levels alone do not decide. ")
        + """With the smaller gain of the full chain's start {outside_linear_weights_full_start:.0%} of the linear weights' samples leave and {outside_cosine_weights_full_start:.0%} of the cosine's: between the two extremes it matters what a network makes of an input it was not trained on. The choice of variance moves a cell by at most {largest_effect_of_variance:.0%}. With the clamp {outside_with_clamp:.1%} remain.

What stays open is training: whether the learned variance or the initialization makes the error at the last timestep itself smaller is not separated here. Chapter 8 trains the recipes apart.""")

# %% [markdown]
# ## The remedies, side by side
#
# Every published remedy on the same seeds. Guidance at the scale that saved the post's tiger. The static clamp that guided-diffusion calls `clip_denoised`, at the range that was measured above. Imagen's dynamic threshold {cite}`saharia2022photorealistic`. Predicted noise divided by a constant {cite}`ning2024elucidating`. A run that goes on from an earlier checkpoint with input perturbation {cite}`ning2023input`. DDIM {cite}`song2021denoising`, and DPM-Solver++ {cite}`lu2022dpmpp` from another library on our schedule.
#
# Two further rows are not in the post. Both keep the network and drop the division: a chain that does not visit the last timestep, and the linear schedule's noise levels.

# %%
from diffusers import DPMSolverMultistepScheduler

from dit_repro.sampling import dynamic_threshold

changed = {"objective": replace(post_config.objective, input_perturbation=plan.input_perturbation), "num_steps": end}
perturbed_config = replace(post_config, **changed)
perturbed = post.fork(settings.run_path("post_first_perturbed", perturbed_config), plan.perturbed_from, **changed)
perturbed = launch(perturbed_config, perturbed.path, plan.processes)
skipping, spaced = cosine.respaced(f"ddim{plan.plain_steps}"), int(plan.plain_steps)
at_linear = at_levels_of(linear, cosine).respaced(plan.plain_steps)
fixes = {
    "none": {},
    f"guidance {plan.scale:g}": {"guidance": Guidance(plan.scale)},
    "epsilon scaling": {"epsilon_scale": plan.epsilon_scale},
    "input perturbation": {"model": perturbed.load_model(end, ema=False).to(DEVICE)},
    "DDIM": {"method": "ddim"},
    "DPM-Solver++": {"method": DPMSolverMultistepScheduler, "schedule": cosine, "steps": spaced},
    "clamp": {"x0_transform": clamp_x0(detector.limit)},
    "dynamic threshold": {"x0_transform": dynamic_threshold(99.5, detector.limit)},
    "last timestep skipped": {"schedule": skipping, "steps": spaced},
    "linear noise levels": {"schedule": at_linear, "steps": spaced},
}

# %%
many = torch.arange(len(names)).repeat(plan.per_class)
mended = sweep(["remedy"], {(name,): plain | changes for name, changes in fixes.items()}, **shared, labels=many,
               seeds=range(seed, seed + len(many)))
run.figure(sample_grid(mended.images.unflatten(0, (len(fixes), -1))[:, : len(names)], list(fixes), names, size=32),
           name="remedies", export=True, caption="The first sample of each class under each remedy, same seeds in every row.",
           alt="Grid of samples, a row a remedy and a column a class. Collapsed samples are flat or blotched, the others show clothes.")

# %%
from dit_repro.evaluation import FeatureStatistics, frechet_distance

test_images = settings.data.source("test")
shown_classes = np.flatnonzero(np.asarray(test_images.labels) < plan.classes)  # samples are of these classes only
real = judge(test_images.images(np.random.default_rng(0).permutation(shown_classes)[: plan.real_images])).pool
reference = FeatureStatistics(real.shape[1]).update(real)


def score(images, labels):
    """Share in the class asked for, and Fréchet distance to test images, in the judge's features."""
    features = judge(images)
    right = (features.logits.argmax(1) == torch.as_tensor(labels)).double().mean().item()
    return right, frechet_distance(FeatureStatistics(real.shape[1]).update(features.pool), reference)


table = mended.rates("remedy")
table[["in class", "distance"]] = [score(mended.where(remedy=name).images, many) for name in table.index]
table.drop(columns="mean_pixel").style.format({
    "images": "{:.0f}", "count": "{:.0f}", "rate": "{:.1%}", "low": "{:.1%}", "high": "{:.1%}", "in class": "{:.1%}",
    "distance": "{:,.1f}", "seconds": "{:.3f}", "evaluations": "{:.0f}"})

# %%
from dit_repro.sampling import difference_interval

none, total = table.loc["none"], len(many)
run.record("perturbed_share", 1 - plan.perturbed_from / end)
run.record("collapse_rate_plain", none.rate, interval=(none.low, none.high), seeds=total)
for name, row in (("guided", f"guidance {plan.scale:g}"), ("scaled", "epsilon scaling"), ("perturbed", "input perturbation"),
                  ("clamped", "clamp"), ("thresholded", "dynamic threshold"), ("skipped", "last timestep skipped"),
                  ("linear_levels", "linear noise levels"), ("ddim", "DDIM"), ("dpm", "DPM-Solver++")):
    rate = table.loc[row]
    low, high = difference_interval(int(none["count"]), int(rate["count"]), total)
    run.record(f"collapse_rate_{name}", rate.rate, interval=(rate.low, rate.high), seeds=total)
    run.record(f"collapse_rate_plain_minus_{name}", none.rate - rate.rate, interval=(low, high), seeds=total)
    run.record(f"in_class_{name}", rate["in class"])
    run.record(f"distance_{name}", rate.distance)

# %%
was, now = (mended.where(remedy=name).rows.collapsed.to_numpy() for name in ("none", f"guidance {plan.scale:g}"))
run.record("rescued_by_guidance", (was & ~now).sum() / max(1, was.sum()), note=f"of {was.sum()} samples that collapse without it")
position = np.arange(len(table))
figure, axes = plt.subplots(figsize=(7, 3.4))
axes.barh(position, 100 * table.rate, xerr=100 * np.maximum(0, [table.rate - table.low, table.high - table.rate]), capsize=2)
axes.set(yticks=position, yticklabels=table.index, xlabel="collapsed, %", xlim=(0, 102))
axes.invert_yaxis()
run.figure(figure, name="remedy-rates", export=True, caption=f"Collapsed samples of {total} under each remedy, with 95% intervals.",
           alt="Horizontal bars, one a remedy: " + ", ".join(f"{name} {rate:.0%}" for name, rate in table.rate.items()) + ".")


# %% tags=["hide-input"]
def effect(name):
    low, high = (run.fill(f"{{collapse_rate_plain_minus_{name}.{bound}:.6f}}") for bound in ("low", "high"))
    return "lowers the rate" if float(low) > 0 else "raises the rate" if float(high) < 0 else "makes no difference that can be told"


run.say("Without a remedy {collapse_rate_plain:.1%} collapse (95% interval {collapse_rate_plain.low:.1%} to {collapse_rate_plain.high:.1%}). "
        + " ".join(f"{title} {effect(name)} ({{collapse_rate_{name}:.1%}})." for title, name in (
            ("Guidance", "guided"), ("Epsilon scaling", "scaled"), ("Input perturbation", "perturbed"),
            ("DDIM", "ddim"), ("DPM-Solver++", "dpm"), ("The clamp", "clamped"), ("The dynamic threshold", "thresholded"),
            ("Skipping the last timestep", "skipped"), ("Sampling at the linear noise levels", "linear_levels")))
        + """ Of what they make, the judge puts {in_class_clamped:.1%} (clamp), {in_class_thresholded:.1%} (threshold), {in_class_skipped:.1%} (skipped) and {in_class_linear_levels:.1%} (linear levels) into the class asked for, at Fréchet distances of {distance_clamped:,.1f}, {distance_thresholded:,.1f}, {distance_skipped:,.1f} and {distance_linear_levels:,.1f}. Not collapsed is not yet good: the clamp keeps a bad first guess inside the data, the last two never make it.

The clamp and the threshold cost no evaluations. Input perturbation was trained for the last {perturbed_share:.0%} of the run only, and aims at errors that gather along a chain; epsilon scaling does too.""" + (" This failure does not gather." if failed.any() and run["exits_in_first_steps"] > 0.5 else ""))

# %% [markdown]
# ## Is there exposure bias as well?
#
# The post blames errors that compound over a long chain, and names the literature for it. That is a claim about chains that do not fail at the first step, so it is tested on chapter 3's finished run: the network's input at each timestep, held against what the forward process would give it, for chains of different lengths. A perfect sampler stays at one.

# %%
settled = folder.load_model(config.num_steps).to(DEVICE)
few = torch.arange(len(names)).repeat(plan.trace_per_class)
traces = {steps: trace(sample_states(settled, few, linear, steps, seeds=range(seed, seed + len(few))), linear, held_out,
                       detector.limit) for steps in plan.trace_steps}
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2))
for steps, found in traces.items():
    for axes, quantity in zip(panels, ("norm_ratio", "variance_ratio")):
        axes.plot(found.steps.timestep, found.steps[quantity], label=f"{steps} steps", linewidth=1)
for axes, name in zip(panels, ("norm", "variance")):
    axes.axhline(1, color="#6b6b73", linestyle="--", linewidth=1)
    axes.set(xlabel="timestep", ylabel=f"{name}, sampled / forward")
panels[0].legend()
run.figure(figure, name="exposure", caption=f"The network's input while sampling over that of the forward process, norm and variance over images, "
           f"{len(few)} images, no guidance. Chains run from right to left.")

# %%
grid = np.arange(50, 1000, 50)


def input_error(found):
    """Root mean square over timesteps of the norm's departure from the forward process."""
    ratio = np.interp(grid, found.steps.timestep[::-1], found.steps.norm_ratio[::-1])
    return float(np.sqrt(np.mean((ratio - 1) ** 2)))


short, long = plan.trace_steps[0], plan.trace_steps[-1]
run.record("input_error_short_chain", input_error(traces[short]))
run.record("input_error_long_chain", input_error(traces[long]))
run.record("error_ratio_long_to_short_chain", run["input_error_long_chain"] / run["input_error_short_chain"], seeds=len(few))
last = traces[long].steps.iloc[-1]
run.record("last_variance_ratio", last.variance_ratio, seeds=len(few), interval=(
    last.variance_ratio - 2 * last.variance_ratio_error, last.variance_ratio + 2 * last.variance_ratio_error))
run.record("chain_long_steps", int(long))
run.record("chain_short_steps", int(short))
run.record("chain_plain_steps", int(plan.plain_steps))

# %%
quick = sweep(["chain"], {("quick",): {"steps": plan.plain_steps}}, **shared, model=settled, schedule=linear, labels=few,
              seeds=range(seed, seed + len(few)))
slow = decode(traces[long].latents.cpu())
run.record("frechet_25_over_1000_steps", score(quick.images, few)[1] / score(slow, few)[1], seeds=len(few),
           note="the same labels and seeds in both sets, so the bias of so few images is nearly the same")

# %% tags=["hide-input"]
run.say("""The input of the {chain_long_steps:,}-step chain departs from the forward process by {input_error_long_chain:.1%} (root mean square over timesteps), that of the {chain_short_steps}-step chain by {input_error_short_chain:.1%}. """
        + ("The long chain's error is {error_ratio_long_to_short_chain:.2f} times the short one's: larger, as the post says." if run["error_ratio_long_to_short_chain"] > 1 else
           "The long chain's error is {error_ratio_long_to_short_chain:.2f} times the short one's: smaller. What a short chain loses by coarse steps outweighs what a long one gathers, at this size.")
        + """ At the end of the long chain the variance over images is {last_variance_ratio:.2f} of the data's ({last_variance_ratio.low:.2f} to {last_variance_ratio.high:.2f}). Samples of a chain of {chain_plain_steps} steps have {frechet_25_over_1000_steps:.2f} times the Fréchet distance of the long chain's.""")

# %% [markdown]
# ## Sampling on the wrong schedule
#
# The timestep tells the network how noisy its input is. Give it the timesteps of another schedule and it is told wrong. The lesson says that this ruins samples; the post's first score of the released model suffered from it (chapter 7). All four cells skip the last timestep, so that what is measured is the mismatch and not the first step.

# %%
some = torch.arange(len(names)).repeat(plan.some_per_class)
mismatch = sweep(["trained on", "sampled on"], {
    (trained, sampled): {"model": trained_on[trained][0], "schedule": trained_on[sampled][1]}
    for trained in trained_on for sampled in trained_on}, **shared, steps=f"ddim{plan.plain_steps}",
    labels=some, seeds=range(seed, seed + len(some)))
rows = []
for trained, (model, _) in trained_on.items():
    for sampled, (_, schedule) in trained_on.items():
        cell = mismatch.where(**{"trained on": trained, "sampled on": sampled})
        losses = loss_by_timestep(model, held_out[:128], held_out_labels[:128], schedule, range(25, 1000, 100))
        rows.append((trained, sampled, losses.mean().item(), cell.rows.collapsed.mean(), *score(cell.images, some)))
mismatched = pd.DataFrame(rows, columns=["trained on", "sampled on", "noise MSE", "collapsed", "in class", "distance"]).set_index(
    ["trained on", "sampled on"])


# %%
def ratio(trained, column):
    """A column on the wrong schedule over the same on the network's own."""
    other = "cosine" if trained == "linear" else "linear"
    return mismatched.loc[(trained, other), column] / mismatched.loc[(trained, trained), column]


run.record("frechet_mismatched_over_matched_linear", ratio("linear", "distance"))
run.record("frechet_mismatched_over_matched_cosine", ratio("cosine", "distance"))
run.record("frechet_mismatched_over_matched", min(ratio(trained, "distance") for trained in trained_on))
run.record("collapsed_linear_on_cosine", mismatched.collapsed["linear", "cosine"], seeds=len(some))
run.record("collapsed_cosine_on_linear", mismatched.collapsed["cosine", "linear"], seeds=len(some))
run.record("loss_mismatched_over_matched_linear", ratio("linear", "noise MSE"))
run.record("loss_mismatched_over_matched_cosine", ratio("cosine", "noise MSE"))
run.record("loss_mismatched_over_matched", min(ratio(trained, "noise MSE") for trained in trained_on))
mismatched.style.format({"noise MSE": "{:.3f}", "collapsed": "{:.0%}", "in class": "{:.1%}", "distance": "{:,.1f}"})

# %% tags=["hide-input"]
run.say("""Off its schedule the Fréchet distance of the linear run is {frechet_mismatched_over_matched_linear:.1f} times its own, that of the cosine run {frechet_mismatched_over_matched_cosine:.1f} times. The collapse detector calls {collapsed_linear_on_cosine:.0%} and {collapsed_cosine_on_linear:.0%} of the two mismatched sets collapsed.""" + (" It cannot be trusted to find a wrong schedule." if min(run["collapsed_linear_on_cosine"], run["collapsed_cosine_on_linear"]) < 0.1 else "") + """ A check that needs no sample is the noise MSE on real latents, noised by the schedule that the sampler is about to use: it is {loss_mismatched_over_matched_linear:.2f} and {loss_mismatched_over_matched_cosine:.2f} times what it is on the right one.""" + (" It takes seconds and belongs before every sampling script." if run["loss_mismatched_over_matched"] > 1.05 else ""))

# %% [markdown]
# ## Guidance in an interval
#
# Guidance costs a second pass at every step. Where all is noise, and again where the image is settled, it buys little, and it may be left out there {cite}`kynkaanniemi2024applying`. Chapter 3's finished run, the middle timesteps only.

# %%
intervals = {"none": Guidance(), "everywhere": Guidance(plan.scale), "interval": Guidance(plan.scale, interval=(200, 800))}
guided = sweep(["guidance"], {(name,): {"guidance": guidance} for name, guidance in intervals.items()}, **shared,
               model=settled, schedule=linear, steps=plan.plain_steps, labels=some, seeds=range(seed, seed + len(some)))
guided_table = guided.rates("guidance")[["rate", "seconds", "evaluations"]]
guided_table[["in class", "distance"]] = [score(guided.where(guidance=name).images, some) for name in intervals]
run.record("interval_evaluations_share", guided_table.evaluations["interval"] / guided_table.evaluations["everywhere"])
run.record("interval_seconds_share", guided_table.seconds["interval"] / guided_table.seconds["everywhere"])
run.record("interval_distance_ratio", guided_table.distance["interval"] / guided_table.distance["everywhere"])
run.record("interval_in_class", guided_table["in class"]["interval"])
run.record("everywhere_in_class", guided_table["in class"]["everywhere"])
guided_table.style.format({"rate": "{:.1%}", "seconds": "{:.3f}", "evaluations": "{:.0f}", "in class": "{:.1%}", "distance": "{:,.1f}"})

# %% tags=["hide-input"]
run.say("""With the interval guided sampling takes {interval_evaluations_share:.0%} of the evaluations and {interval_seconds_share:.0%} of the seconds of guidance at every step. {interval_in_class:.1%} of its samples are in their class, against {everywhere_in_class:.1%}, at {interval_distance_ratio:.2f} times the Fréchet distance.""")

# %% [markdown]
# ## The same seed is the same image
#
# A table of seeds means something only if the seed fixes the image. Here every image has its own generator, so its noise does not depend on which others are drawn beside it. What may still differ is the order in which a matrix product of another batch size adds.

# %%
from dit_repro.sampling import sample

repeated = torch.arange(64) % len(names)
by_batch = {size: sample(settled, repeated[: min(64, 16 * size)], linear, "4", seeds=range(seed, seed + min(64, 16 * size)),
                         batch_size=size).cpu() for size in (1, 7, 64)}
run.record("batch_size_largest_difference", max((by_batch[size] - by_batch[64][: len(by_batch[size])]).abs().max().item()
                                                for size in (1, 7)))

# %% tags=["hide-input"]
run.say("""Sampled in batches of 1, 7 and 64 the latents of a seed differ by at most {batch_size_largest_difference:.1g}.""")

# %% [markdown]
# ## By hand
#
# In a live notebook the next cell is an explorer: choose a class, a scale, a seed and a checkpoint, with the clamp or without, and sample. A page has no kernel; there the strip shows one seed of every class from each checkpoint.

# %%
from dit_repro.sampling import explorer

if run.live:
    display(explorer({f"step {step}, {'average' if ema else 'raw'}": load for (step, ema), load in loaded.items()},  # noqa: F821
                     cosine_chain, names, decode=vae.decode, detector=detector, steps=cosine_chain.num_steps))
strip = []
for step in shown:
    cells = [by_step.where(step=step, weights=kind, scale=plan.scales[0]).images for kind in ("raw", "average")]
    strip.append(torch.stack(cells).permute(0, 2, 3, 1, 4).flatten(3).permute(1, 0, 2, 3).flatten(1, 2))  # (3, 2H, N W)
Filmstrip(strip, [f"step {step}" for step in shown], size=640,
          caption="Above raw, below averaged weights; one seed of " + ", ".join(names) + ". No guidance, no clamp.")

# %% [markdown]
# ## A note on language models
#
# The post sets this failure against language models, whose every step ends in a softmax over a fixed vocabulary: a token cannot diverge. Nothing renormalizes the state of a sampler either, and the section on trajectories counts how many come back. The analogy with repetition under greedy decoding {cite}`holtzman2020curious`, where a distribution that is valid at each step degenerates over many, is another matter where the exits above lie in the first steps. No language model was run.
#
# <details><summary>Answers to the predictions</summary>
#
# A cause in the class embedding would make whole rows of the seed table fail, and one in guidance would leave the column for scale 1.0 whole. Look for both in the tables. The linear schedule multiplies by about β, a fiftieth, over 1,000 steps and by a little under one over 25. The cosine schedule multiplies by 1 / √0.001, about 32, and over 25 steps by more than a thousand, since a respaced chain jumps over all the levels at which the error could have been taken back.
# </details>
#
# **Exercise.** Some libraries rescale a schedule so that the last timestep holds no signal at all, a = 0 {cite}`lin2024common`, and then let the network predict v, a mixture of noise and image, instead of noise. Why can they not keep predicting noise?
#
# <details><summary>Answer</summary>
#
# With a = 0 the division is by zero: the noise is the input itself, and a perfect prediction of it says nothing about the image. The cosine schedule of this chapter comes close to that case: only the clip of β at 0.999 keeps a above zero.
# </details>

# %% [markdown]
# ## Claims of this chapter

# %%
run.claims()

# %% [markdown]
# ## What could not be shown at this scale
#
# Goldfish, tiger and zebra, XL/2 at step 134,000, and a decoder that turns a wreck into solid black. The post's guidance at 4.0 saved a tiger, which the mechanism here does not explain: a network trained for 228,000 steps errs less at the last timestep and may fail elsewhere too. `dit-repro run 06 --profile paper -p data=IMAGENET` trains the post's first recipe and fills the same tables with its classes. The first-gain figures need no network and hold at every size.
