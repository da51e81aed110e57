# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Folklore, tested
#
# **Question.** A blog post on training diffusion models gives advice of the kind that everybody has heard: a noise offset makes samples sharp, a batch of one collapses in float32, a loss whose spread falls below 0.005 has stopped, small sets are copied, duplicates hurt, never reset the seed. Which of it holds when it is measured?
#
# **Answer.** Each piece of advice becomes one small experiment with its control, the same starting weights and the same seeds on both sides, and a number that decides. What is worth keeping from the page are two detectors, for a model that ignores its labels and for one that repeats its training images; both live in the package and run on any run folder.
#
# *Claimed in:* the blog, throughout. *Time:* laptop 2 to 2.5 min on two cores after chapter 3.

# %% tags=["parameters"]
profile: str = "laptop"  # smoke, laptop, gpu or paper
data: str = ""  # a folder of IDX files or of class folders; empty: what the profile says
autoencoder: str = ""  # "embedded", an SD-VAE name or a local folder; empty: what the profile says

# %%
from dit_repro.book import start

run = start(globals())

# %%
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from dit_repro.book.figures import sample_grid
from dit_repro.evaluation import FeatureStatistics, condition_information, find_copies, frechet_distance
from dit_repro.profiles import DEVICE, get_profile
from dit_repro.sampling import CollapseDetector, Guidance, sample, wilson_interval
from dit_repro.training import launch, launch_each, loss_by_timestep
from dit_repro.training.brief import train_each

settings = get_profile(profile, data=data, autoencoder=autoencoder)
numbers = settings.folklore
vae, judge, extractor = settings.data.autoencoder(), settings.data.judge(), settings.data.features()
train, held_out = (settings.data.source(split) for split in ("train", "test"))
train_store, test_store = (settings.data.store(split, vae) for split in ("train", "test"))

# %% [markdown]
# ## One checkpoint, many continuations
#
# The blog fine-tunes models that somebody else has trained. So does this chapter: all its runs start from the end of chapter 3's, so that an effect is seen on a model that draws well. Two of the questions, on the noise offset and on small batches, keep the optimizer's state and go on as a fork of the run. Draws depend on the seed and the step alone; runs of a seed see the same images, timesteps and plain noise where their batches are equal.

# %%
first_config = settings.training(train_store)
first = launch(first_config, settings.run_path("first_steps", first_config))
schedule = first_config.noise_schedule()
plain = {"learning_rate": numbers.rate, "global_batch_size": numbers.batch_size, "on_alarm": "record", "compile": False,
         "archive_every": 0, "export_ema_every": 0, "num_steps": first_config.num_steps + numbers.num_steps}
small = {**plain, "learning_rate": numbers.small_rate, "num_steps": first_config.num_steps + numbers.small_steps}
FORKS = {
    "plain": plain,
    "offset": {**plain, "objective": replace(first_config.objective, noise_offset=numbers.noise_offset)},
    "batch of 1, fp32": {**small, "global_batch_size": 1, "precision": "fp32"},
    "batch of 1, bf16": {**small, "global_batch_size": 1, "precision": "bf16"},
    "batch of 4, fp32": {**small, "global_batch_size": 4, "precision": "fp32"},
}
seeds = range(1, numbers.seeds + 1)  # chapter 3 had seed 0
forks = {}
for name, changes in FORKS.items():
    for seed in seeds:
        path = settings.run_path("folklore", replace(first_config, seed=seed, **changes))
        fork = first.fork(path, first_config.num_steps, seed=seed, **changes)
        forks[name, seed] = (fork.config(), path)
forks = launch_each(forks, numbers.processes)

# %% [markdown]
# The others change the images or the order of the draws, which no fork may. They take the weights alone, with a fresh optimizer, and count their steps from one: fine-tuning as it is mostly done.

# %%
classes = min(settings.sampling.classes, train_store.num_classes)
of_each = [np.flatnonzero(train.labels == label)[: numbers.copy_per_class] for label in range(classes)]
few = train.take(np.concatenate(of_each))
unique = np.random.default_rng(4).permutation(len(train))[: numbers.unique_images]
tenth = unique[: max(1, len(unique) // 10)]  # the duplicates repeat these
extra = np.random.default_rng(5).choice(tenth, round(len(unique) * 0.3 / 0.7))
stores = {"few": settings.data.encoded("few", few, vae),
          "unique": settings.data.encoded("unique", train.take(unique), vae),
          "duplicated": settings.data.encoded("duplicated", train.take(np.concatenate([unique, extra])), vae)}


def tuning(store, seed, num_steps, batch_size=numbers.batch_size):
    config = settings.training(store, seed=seed, num_steps=num_steps, global_batch_size=batch_size, compile=False)
    return partial(first.load_model, ema=False), replace(config, learning_rate=numbers.rate)


tunings = {("few", 0): tuning(stores["few"], 0, numbers.copy_steps)}
tunings |= {(name, seed): tuning(stores[name], seed, numbers.num_steps)
            for name in ("unique", "duplicated") for seed in seeds}
tunings |= {("draws", seed): tuning(train_store, seed, numbers.seed_steps, first_config.global_batch_size)
            for seed in (first_config.seed, *seeds)}
tuned = dict(zip(tunings, train_each([*tunings.values()], processes=numbers.processes)))
{"forks": len(forks), "fine-tuned": len(tuned), "model": first_config.model, "trained before": first_config.num_steps}

# %% [markdown]
# ## The yardsticks
#
# All models draw the same guided samples from the same noise, and the same judge looks at them. Real images, sent through the autoencoder as samples are, say what is usual. Where an experiment has several seeds, the range in parentheses is that of the seeds, and a direction is named only where all of them agree.

# %%
labels = torch.arange(classes).repeat_interleave(numbers.per_class)


def decode(latents):
    return torch.cat([vae.decode(part) for part in latents.split(settings.sampling.batch_size)])


def real_latents(store, indices, flipped=False):
    noise = torch.zeros(len(indices), *store.latent_shape)
    return store.latents(indices, np.full(len(indices), flipped), noise)


def some(items, seed, count=numbers.real_images):
    return np.random.default_rng(seed).permutation(len(items))[:count]


def draw(model, scale=settings.sampling.guidance_scale):
    """Latents on the CPU, and decoded images, of a model's raw weights: the same labels and seeds each time."""
    latents = sample(model.to(DEVICE), labels, schedule, steps=numbers.steps, seeds=range(len(labels)),
                     guidance=Guidance(scale, channels=None), batch_size=settings.sampling.batch_size).cpu()
    return latents, decode(latents)

# %%
unseen = extractor(decode(real_latents(test_store, some(test_store, 0)))).pool  # (N, D)
usual = real_latents(train_store, some(train_store, 1))
usual_images = decode(usual)
detector = CollapseDetector.fit(usual_images, usual, quantile=max(0.001, 1 / len(usual)))


def statistics(features):
    return FeatureStatistics(features.shape[1]).update(features)


def distance(images) -> float:
    return frechet_distance(statistics(extractor(images).pool), statistics(unseen))


def over_seeds(values) -> dict:
    """Mean and range of the seeds' values, for run.record."""
    return {"value": np.mean(values), "seeds": len(values), "interval": (min(values), max(values))}


def agreed(values, above: str, below: str, neutral=0.0) -> str:
    """Which of two sentences the seeds agree on, if they do."""
    signs = set(np.sign(np.array(values) - neutral))
    return {(1.0,): above, (-1.0,): below, (0.0,): "no difference in any seed"}.get(
        tuple(signs), "the seeds disagree, so no effect is shown")

# %%
model = first.load_model(ema=False).to(DEVICE)
start_latents, start_images = draw(model)
run.record("frechet_at_the_start", distance(start_images), note=f"{len(labels)} samples")
run.record("collapse_rate_at_the_start", detector.detect(start_images, start_latents).collapsed.mean())

# %% tags=["hide-input"]
run.say("""Before anything is continued, the checkpoint's samples lie {frechet_at_the_start:.2f} from held-out images
and chapter 6's detector calls {collapse_rate_at_the_start:.0%} of them collapsed, at these few sampling steps.""")

# %% [markdown]
# ## A noise offset sharpens
#
# A noise offset adds one random number per channel to all cells of the noise. It was proposed so that models can draw very dark and very bright pictures. The blog says that it gives sharper edges and higher contrast.
#
# > **Predict first.** The offset changes the lowest spatial frequency of the noise and no other. What should it do to edges?

# %%
def sharpness(images) -> float:
    """Mean square difference of neighboring pixels, along both axes, in units of the full range."""
    pixels = images.float() / 255  # (N, 3, H, W)
    return ((pixels.diff(dim=-1) ** 2).mean() + (pixels.diff(dim=-2) ** 2).mean()).item()


def contrast(images) -> float:
    return images.float().std((1, 2, 3)).mean().item()


without, with_offset = ([draw(forks[name, seed].load_model(ema=False))[1] for seed in seeds]
                        for name in ("plain", "offset"))
pairs = list(zip(with_offset, without))
sharper = [sharpness(offset) / sharpness(plain) for offset, plain in pairs]
further = [distance(offset) - distance(plain) for offset, plain in pairs]
run.record("sharpness_offset_over_plain", **over_seeds(sharper))
run.record("contrast_offset_over_plain", **over_seeds([contrast(offset) / contrast(plain) for offset, plain in pairs]))
run.record("frechet_offset_minus_plain", **over_seeds(further))
run.record("sharpness_plain_over_real", np.mean([*map(sharpness, without)]) / sharpness(usual_images))

# %%
columns = [start_images, without[0], with_offset[0]]
rows = range(min(classes, 10))
pictures = torch.stack([images[:: numbers.per_class][: len(rows)] for images in columns], 1)  # (class, run, 3, H, W)
run.figure(sample_grid(pictures, train_store.class_names[: len(rows)], ["start", "plain", "offset"], size=56),
           name="offset", caption="The first sample of each class: from the checkpoint, and from the runs that went on "
           "without and with a noise offset.")

# %% tags=["hide-input"]
run.say("""Neighboring pixels differ {sharpness_offset_over_plain:.2f} times as much with the offset
({sharpness_offset_over_plain.low:.2f} to {sharpness_offset_over_plain.high:.2f} over the seeds), and contrast is
{contrast_offset_over_plain:.2f} times as high. The Fréchet distance changes by {frechet_offset_minus_plain:+.2f}
({frechet_offset_minus_plain.low:+.2f} to {frechet_offset_minus_plain.high:+.2f}). """
        + "On sharpness: " + agreed(sharper, "sharper", "less sharp", neutral=1) + ". On distance: "
        + agreed(further, "further from real images", "nearer to real images") + """. For scale: without an offset
samples have {sharpness_plain_over_real:.2f} times the sharpness of decoded real images.""")

# %% [markdown]
# ## A batch of one, in float32 and in bf16
#
# The blog's author had a model that gave grey smudges at step 5,000 with a batch of one, and blames "float32 accumulation artifacts" for it; bf16 and a batch of four fixed it. That changed two things at once. Here only the precision changes, then only the batch; bf16 has eight significant bits where float32 has twenty-four.

# %%
few_at_once = [name for name in FORKS if name.startswith("batch")]
by_seed = {}
for name in few_at_once:
    for seed in seeds:
        latents, images = draw(forks[name, seed].load_model(ema=False))
        collapsed = detector.detect(images, latents).collapsed.mean()
        by_seed[name, seed] = {"collapsed": collapsed, "distance": distance(images),
                               "picture": images[:: numbers.per_class]}
table = pd.DataFrame(by_seed).T.drop(columns="picture").astype(float).groupby(level=0, sort=False).mean()


def changes(column, name, other):
    return [by_seed[name, seed][column] - by_seed[other, seed][column] for seed in seeds]


precision = changes("collapsed", few_at_once[0], few_at_once[1])
batch = changes("collapsed", few_at_once[0], few_at_once[2])
run.record("collapse_rate_float32_minus_bf16", **over_seeds(precision))
run.record("frechet_float32_minus_bf16", **over_seeds(changes("distance", few_at_once[0], few_at_once[1])))
run.record("collapse_rate_batch_1_minus_4", **over_seeds(batch))
run.record("frechet_batch_1_minus_4", **over_seeds(changes("distance", few_at_once[0], few_at_once[2])))
table.style.format({"collapsed": "{:.1%}", "distance": "{:.2f}"})

# %%
pictures = torch.stack([by_seed[name, seeds[0]]["picture"][: len(rows)] for name in few_at_once], 1)
run.figure(sample_grid(pictures, train_store.class_names[: len(rows)], few_at_once, size=56), name="batch-of-one",
           caption="The same seeds of the same run, gone on with in batches of one and of four.")

# %% tags=["hide-input"]
run.say("""At a batch of one the rate of collapse in float32 differs from that in bf16 by
{collapse_rate_float32_minus_bf16:+.1%} ({collapse_rate_float32_minus_bf16.low:+.1%} to
{collapse_rate_float32_minus_bf16.high:+.1%} over the seeds), the Fréchet distance by {frechet_float32_minus_bf16:+.2f}.
In float32 a batch of one differs from a batch of four by {collapse_rate_batch_1_minus_4:+.1%}
({collapse_rate_batch_1_minus_4.low:+.1%} to {collapse_rate_batch_1_minus_4.high:+.1%}) and
{frechet_batch_1_minus_4:+.2f}. """
        + "On precision: " + agreed(precision, "float32 is the worse", "bf16 is the worse") + ". On the batch: "
        + agreed(batch, "a batch of one is the worse", "a batch of four is the worse") + ".")

# %% [markdown]
# ## A spread below 0.005 is a plateau
#
# The blog's alarm is an absolute number for the standard deviation of the loss from step to step. The loss of a step is a mean over a batch, and each image has its own timestep, so most of its spread has nothing to do with progress: it is sampling, and falls with the square root of the batch. The next cell takes the finished run of chapter 3, long on its plateau, and measures its loss on many batches with no training in between.

# %%
from dit_repro.diffusion import training_losses
from dit_repro.training.batches import draw_batch

losses = []
with torch.no_grad():
    for step in range(1, numbers.loss_batches + 1):
        batch = draw_batch(replace(first_config, seed=1), train_store, step).map(lambda tensor: tensor.to(DEVICE))
        losses.append(training_losses(model, batch.x0, batch.t, batch.y, schedule, first_config.objective,
                                      noise=batch.noise).mse.cpu())
losses = torch.stack(losses)  # (batches, images)
run.record("loss_std_at_plateau", losses.mean(1).std(), note=f"batch {first_config.global_batch_size}")
run.record("loss_std_one_image", losses.std())
run.record("batch_at_which_std_is_0_005", float((losses.std() / 0.005) ** 2))

# %%
flat = losses.flatten()
sizes = [size for size in (1, 4, 16, 64, 128, 256) if len(flat) >= 8 * size]
spreads = [flat[: len(flat) // size * size].view(-1, size).mean(1).std().item() for size in sizes]
figure, axes = plt.subplots(figsize=(7, 3))
axes.loglog(sizes, spreads, "o", label="measured")
axes.loglog(sizes, flat.std().item() / np.sqrt(sizes), "--", color="#6b6b73",
            label="one image's spread over the root of the batch")
axes.axhline(0.005, color="C3", linewidth=1, label="the blog's 0.005")
axes.set(xlabel="images in a batch", ylabel="standard deviation of the loss")
axes.set_xticks(sizes, sizes)
axes.legend()
run.figure(figure, name="loss-spread", caption="Spread of the loss from batch to batch on a plateau, by batch size.")

# %% tags=["hide-input"]
run.say("""On its plateau this run's loss has a standard deviation of **{loss_std_at_plateau:.4f}** from step to
step. One image's has {loss_std_one_image:.3f}, so 0.005 is reached at a batch of
{batch_at_which_std_is_0_005:,.0f}, on a plateau or not: with this run's batches the alarm """
        + ("fires" if run["loss_std_at_plateau"] < 0.005 else "never fires")
        + """. The number measures the batch.""")

# %% [markdown]
# ## A good loss may hide an ignored label
#
# This warning is worth its place. Most of the noise that a model predicts can be predicted without knowing the class; so the loss says little about whether the class is used. What tells is to ask a judge: how much does the class seen in a sample say about the class asked for? The answer is in bits, and shuffled labels show how many bits chance gives.

# %%
probe = some(test_store, 2, numbers.loss_images)
x0, y = real_latents(test_store, probe), torch.from_numpy(test_store.labels[probe])
timesteps = range(10, 1000, 110)
loss_with, loss_without = (loss_by_timestep(model, x0, asked, schedule, timesteps).mean().item()
                           for asked in (y, torch.full_like(y, train_store.num_classes)))
run.record("loss_ratio_without_labels", loss_without / loss_with)


def information(images):
    return condition_information(judge(images).logits.argmax(1).cpu(), labels)


used = information(start_images)
ignored = information(draw(model, scale=0)[1])  # at scale 0 the label is never seen
run.record("condition_bits", used.bits, note=f"{len(labels)} samples")
run.record("condition_bits_chance", used.chance)
run.record("condition_bits_ignored", ignored.bits, note=f"{len(labels)} samples")
run.record("condition_bits_ignored_chance", ignored.chance)

# %% tags=["hide-input"]
run.say("""Taking the labels away multiplies the model's held-out loss by {loss_ratio_without_labels:.3f}. In its guided
samples the judged class carries **{condition_bits:.2f} bits** about the label, with {condition_bits_chance:.2f} to be
had by chance; in samples that never saw their label, {condition_bits_ignored:.2f} with
{condition_bits_ignored_chance:.2f} by chance. `condition_information` is the detector, and
`dit-repro stability check RUN` applies it.""")

# %% [markdown]
# ## Small sets are copied
#
# Eighty images were enough for the author's model to repeat them within 500 steps of fine-tuning. Whether a sample is a copy is decided by comparison: held-out images say how near an image that was never seen comes to the training set; a sample nearer than all but one in a hundred of those is called a copy. The control is the model before: it saw the same images among all the others.

# %%
everything = np.arange(len(few))
few_images = torch.cat([decode(real_latents(stores["few"], everything, flipped)) for flipped in (False, True)])
few_features = extractor(few_images).pool  # mirrored ones too: they are in the training set
copied_images = draw(tuned["few", 0])[1]
copied_features = extractor(copied_images).pool


def copies_in(features):
    found = find_copies(features, few_features, unseen, quantile=max(0.01, 1 / len(unseen)))
    interval = wilson_interval(round(found.share * len(features)), len(features))
    return found.ratio, {"value": found.share, "interval": interval}


ratio, share = copies_in(copied_features)
ratio_before, share_before = copies_in(extractor(start_images).pool)
run.record("copied_samples_share", **share)
run.record("copied_samples_ratio", ratio)
run.record("copied_samples_share_full_set", **share_before)
run.record("copied_samples_ratio_full_set", ratio_before)
run.record("copy_set_size", len(few))
run.record("full_set_size", len(train))

# %%
nearest = torch.cdist(copied_features.double(), few_features.double()).argmin(1).cpu()
shown = np.arange(0, len(labels), max(1, len(labels) // 10))[:10]
pairs = torch.stack([start_images[shown], copied_images[shown], few_images[nearest[shown]]])
names = [train_store.class_names[label] for label in labels[shown]]
run.figure(sample_grid(pairs.transpose(0, 1), names, ["before", "after", "nearest"], size=56), name="copies",
           caption="Samples before and after fine-tuning on {copy_set_size} images, and the one of those images, or "
           "its mirror image, that is nearest to the second in feature space.")

# %% tags=["hide-input"]
verdict = ("most samples are copies" if run["copied_samples_share"] > 0.5 else
           "some are copied, most are not" if share["interval"][0] > 0.01 else "copying is not shown in so few steps")
run.say("""Fine-tuned on {copy_set_size} images, the model gives samples of which {copied_samples_share:.0%} are copies
by this test (95% interval {copied_samples_share.low:.0%} to {copied_samples_share.high:.0%}): """ + verdict + """. They
lie {copied_samples_ratio:.2f} times as far from the training images as unseen images do. Before, trained on
{full_set_size} images, the same test against the same {copy_set_size} gave {copied_samples_share_full_set:.0%} and
{copied_samples_ratio_full_set:.2f}. `dit-repro stability check RUN` makes this test too.""")

# %% [markdown]
# ## Duplicates hurt
#
# The claim: a set of which three in ten are duplicates trains worse than a smaller one without. Both sets below hold the same unique images; one also holds copies of a tenth of them. Steps, batch and starting weights are equal.

# %%
by_set = {name: [distance(draw(tuned[name, seed])[1]) for seed in seeds] for name in ("unique", "duplicated")}
worse = np.subtract(by_set["duplicated"], by_set["unique"])
run.record("duplicate_share", len(extra) / (len(unique) + len(extra)))
run.record("unique_images", len(unique))
run.record("frechet_duplicated_minus_unique", **over_seeds(worse))
run.record("frechet_unique", **over_seeds(by_set["unique"]))

# %% tags=["hide-input"]
run.say("""{unique_images} unique images give a Fréchet distance of {frechet_unique:.2f}. With {duplicate_share:.0%}
duplicates it changes by {frechet_duplicated_minus_unique:+.2f} ({frechet_duplicated_minus_unique.low:+.2f} to
{frechet_duplicated_minus_unique.high:+.2f}): """ + agreed(worse, "duplicates hurt", "duplicates do not hurt") + ".")

# %% [markdown]
# ## The seed carries over
#
# When fine-tuning goes on from a checkpoint, the blog wants the random seed carried on and not reset. The weights know nothing of the generator that drew their noise. A reset seed does one thing: the images, timesteps and noise of chapter 3's first steps come again in the same order. That can be done in one way only, so one continuation with the seed reset is held against several whose draws are new.

# %%
again = distance(draw(tuned["draws", first_config.seed])[1])
new = [distance(draw(tuned["draws", seed])[1]) for seed in seeds]
reset = np.subtract(again, new)
run.record("frechet_seed_reset_minus_carried", **over_seeds(reset))
run.record("frechet_new_draws", **over_seeds(new))

# %% tags=["hide-input"]
run.say("""Continuations with new draws end at a Fréchet distance of {frechet_new_draws:.2f}
({frechet_new_draws.low:.2f} to {frechet_new_draws.high:.2f}). Resetting the seed changes it by
{frechet_seed_reset_minus_carried:+.2f} ({frechet_seed_reset_minus_carried.low:+.2f} to
{frechet_seed_reset_minus_carried.high:+.2f}): """
        + agreed(reset, "it is worse than each of them", "it is better than each of them")
        + ". One run against few can show a large effect only.")

# %% [markdown]
# ## Crop to squares, do not stretch
#
# No training is needed for this one. A model learns the pictures it is given. Real images are made wide by a margin at either side, then brought back to a square by cutting the margin off or by squeezing, and the distance to the untouched images is what no training could win back.

# %%
import torch.nn.functional as F

originals = train.images(some(train, 6))  # (N, 3, R, R)
margin = train.resolution // 4
wide = F.pad(originals.float(), (margin, margin, 0, 0), mode="replicate")  # (N, 3, R, 1.5 R)
stretched = F.interpolate(wide, size=originals.shape[2:], mode="bicubic", antialias=True)
real = statistics(extractor(held_out.images(some(held_out, 0))).pool)  # not decoded, like these


def from_real(pixels) -> float:
    return frechet_distance(statistics(extractor(pixels.round().clamp(0, 255).to(torch.uint8)).pool), real)


for_stretched, for_cropped = from_real(stretched), from_real(wide[..., margin:-margin])
run.record("frechet_stretched", for_stretched)
run.record("frechet_cropped", for_cropped)
run.record("frechet_stretched_minus_cropped", for_stretched - for_cropped)

# %% tags=["hide-input"]
run.say("""Squeezed images are {frechet_stretched:.2f} away from held-out ones, cropped ones
{frechet_cropped:.2f}, which is the floor of two sets of this size. """
        + ("The advice holds" if run["frechet_stretched_minus_cropped"] > 0 else "The advice does not hold")
        + """, for pictures whose content lies in the middle.""")

# %% [markdown]
# <details><summary>Answer to the prediction</summary>
#
# Nothing directly: an offset is constant over the picture, and an edge is a difference of neighbors. Any effect on edges must come by way of contrast, or of a model that has less capacity left for them.
# </details>
#
# **Exercise.** The duplicates above are exact. Which of the two detectors of this chapter would notice a model that has learned the duplicated tenth by heart, and what would you hold it against?
#
# <details><summary>Answer</summary>
#
# `find_copies` with the duplicated images as training set and the unique ones that were not duplicated as held-out set: both were trained on, so a difference between them is the duplication alone.
# </details>

# %% [markdown]
# ## Claims of this chapter

# %%
run.claims()

# %% [markdown]
# ## What could not be shown at this scale
#
# The blog fine-tunes text-to-image models with captions, adapters and cross-attention dropout; here labels stand for captions and a whole small network for adapters. An effect that needs thousands of steps of fine-tuning at 512 pixels would not show in continuations of a hundred. Where the seeds disagree the page says that no effect was shown, not that there is none.
