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
# **Answer.** Each piece of advice becomes one small experiment with its control, the same draws on both sides where there are two, and a number that decides. What is worth keeping from the page are two detectors, for a model that ignores its labels and for one that repeats its training images; both live in the package and run on any run folder.
#
# *Claimed in:* the blog, throughout. *Time:* smoke 15 s; laptop about 5 min on two cores.

# %% tags=["parameters"]
profile: str = "laptop"  # smoke, laptop, gpu or paper
data: str = ""  # a folder of IDX files or of class folders; empty: what the profile says
autoencoder: str = ""  # "embedded", an SD-VAE name or a local folder; empty: what the profile says

# %%
from dit_repro.book import start

run = start(globals())

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from dit_repro.book.figures import sample_grid
from dit_repro.diffusion import NoiseSchedule, Objective
from dit_repro.evaluation import FeatureStatistics, condition_information, find_copies, frechet_distance
from dit_repro.profiles import DEVICE, get_profile
from dit_repro.sampling import CollapseDetector, Guidance, sample, wilson_interval
from dit_repro.training import launch, loss_by_timestep

settings = get_profile(profile, data=data, autoencoder=autoencoder)
numbers, short = settings.folklore, settings.recipe
vae, judge, extractor = settings.data.autoencoder(), settings.data.judge(), settings.data.features()
train, held_out = (settings.data.source(split) for split in ("train", "test"))
train_store, test_store = (settings.data.store(split, vae) for split in ("train", "test"))
schedule = NoiseSchedule.linear(1000)

# %% [markdown]
# ## The yardsticks
#
# All experiments draw the same guided samples from their runs and look at them with the same judge. Real images say what is usual.

# %%
classes = min(settings.sampling.classes, train_store.num_classes)
labels = torch.arange(classes).repeat_interleave(short.per_class)
some = np.random.default_rng(0).permutation(len(held_out))[: short.reference_images]
reference_features = extractor(held_out.images(some)).pool  # (N, D)
reference = FeatureStatistics(reference_features.shape[1]).update(reference_features)


def decode(latents):
    return torch.cat([vae.decode(part) for part in latents.split(settings.sampling.batch_size)])


guided_as_usual = Guidance(settings.sampling.guidance_scale, channels=None)


def draw(model, guidance=guided_as_usual):
    """Latents on the CPU, and decoded images, of a model: the same labels and seeds each time."""
    latents = sample(model.to(DEVICE), labels, schedule, steps=short.steps, seeds=range(len(labels)), guidance=guidance,
                     batch_size=settings.sampling.batch_size).cpu()
    return latents, decode(latents)


def distance(images) -> float:
    return frechet_distance(FeatureStatistics(reference_features.shape[1]).update(extractor(images).pool), reference)

# %%
def trained(store=train_store, seed=0, **changes):
    """A short run: chapter 8's settings with some changed, and shared with it where none are."""
    settings_ = {"num_steps": short.num_steps, "global_batch_size": short.batch_size, "log_every": short.log_every,
                 "clip_norm": None, "on_alarm": "record", **changes}
    last = settings_["num_steps"]
    config = settings.training(store, seed=seed, checkpoint_every=min(short.checkpoint_every, last),
                               archive_every=min(short.checkpoint_every, last), **settings_)
    name = "recipe" if store is train_store else store.path.name.partition("-")[0]  # other latents are another run
    return launch(config, settings.run_path(name, config), short.processes)


def difference(name: str, changed, plain, **details):
    """Record the mean difference of two lists, a pair a seed, with the range of the pairs."""
    pairs = np.array(changed) - np.array(plain)
    run.record(name, pairs.mean(), seeds=len(pairs), interval=(pairs.min(), pairs.max()), **details)


def said(name: str, more: str, less: str, neutral: float = 0.0) -> str:
    """Which of two sentences the seeds agree on, if they do."""
    low, high = (float(run.fill(f"{{{name}.{side}:.9f}}")) for side in ("low", "high"))
    return more if low > neutral else less if high < neutral else "no difference in any seed" if low == high == neutral else "the seeds disagree, so no effect is shown"

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


offset = {"objective": Objective(noise_offset=numbers.noise_offset)}
plain_images, offset_images = ([draw(trained(seed=seed, **changes).load_model(ema=False))[1] for seed in range(numbers.seeds)]
                               for changes in ({}, offset))
ratios = [sharpness(changed) / sharpness(plain) for changed, plain in zip(offset_images, plain_images)]
run.record("sharpness_offset_over_plain", np.mean(ratios), seeds=numbers.seeds, interval=(min(ratios), max(ratios)))
contrast = [changed.float().std((1, 2, 3)).mean().item() / plain.float().std((1, 2, 3)).mean().item()
            for changed, plain in zip(offset_images, plain_images)]
run.record("contrast_offset_over_plain", np.mean(contrast), seeds=numbers.seeds, interval=(min(contrast), max(contrast)))
difference("frechet_offset_minus_plain", [*map(distance, offset_images)], [*map(distance, plain_images)])
real_sharpness = sharpness(decode(train_store.latents(np.random.default_rng(7).permutation(len(train_store))[:256], np.zeros(256, bool), torch.zeros(256, *train_store.latent_shape))))
run.record("sharpness_plain_over_real", np.mean([sharpness(images) for images in plain_images]) / real_sharpness)

# %%
pictures = torch.stack([torch.stack([batch[0][row * short.per_class] for batch in (plain_images, offset_images)])
                        for row in range(min(classes, 10))])
run.figure(sample_grid(pictures, train_store.class_names[: len(pictures)], ["plain", "offset"], size=56), name="offset",
           caption="The same seeds from a run without and a run with a noise offset.")

# %% tags=["hide-input"]
run.say("""Neighboring pixels differ {sharpness_offset_over_plain:.2f} times as much with the offset ({sharpness_offset_over_plain.low:.2f} to {sharpness_offset_over_plain.high:.2f} over the seeds), and contrast is {contrast_offset_over_plain:.2f} times as high. The Fréchet distance changes by {frechet_offset_minus_plain:+.1f} ({frechet_offset_minus_plain.low:+.1f} to {frechet_offset_minus_plain.high:+.1f}). """
        + "On sharpness: " + said("sharpness_offset_over_plain", "sharper", "less sharp", 1) + ". On distance: "
        + said("frechet_offset_minus_plain", "further from real images", "nearer to real images") + """. For scale: samples of the plain runs have {sharpness_plain_over_real:.2f} times the sharpness of decoded real images.""")

# %% [markdown]
# ## A batch of one, in float32 and in bf16
#
# The blog's author had a model that gave grey smudges at step 5,000 with a batch of one, and blames "float32 accumulation artifacts" for it; bf16 and a batch of four fixed it. That changed two things at once. Here only the precision changes; bf16 has eight bits where float32 has twenty-four.

# %%
some = np.random.default_rng(1).permutation(len(train_store))[: short.detector_images]
real_latents = train_store.latents(some, np.zeros(len(some), bool), torch.zeros(len(some), *train_store.latent_shape))
detector = CollapseDetector.fit(decode(real_latents), real_latents, quantile=max(0.001, 1 / len(some)))
small = []
for batch_size, precision in ((1, "fp32"), (1, "bf16"), (4, "fp32")):
    for seed in range(numbers.seeds):
        folder = trained(seed=seed, num_steps=numbers.batch_1_steps, global_batch_size=batch_size, precision=precision,
                         learning_rate=numbers.batch_1_rate)
        latents, images = draw(folder.load_model(ema=False))
        small.append({"batch": batch_size, "precision": precision, "seed": seed, "distance": distance(images),
                      "collapsed": detector.detect(images, latents).collapsed.mean()})
table = pd.DataFrame(small).groupby(["batch", "precision"])[["collapsed", "distance"]].mean()
by_seed = pd.DataFrame(small).set_index(["batch", "precision", "seed"]).sort_index()
difference("collapse_rate_float32_minus_bf16", by_seed.collapsed[1, "fp32"], by_seed.collapsed[1, "bf16"])
difference("collapse_rate_batch_1_minus_4", by_seed.collapsed[1, "fp32"], by_seed.collapsed[4, "fp32"])
table.style.format({"collapsed": "{:.1%}", "distance": "{:.1f}"})

# %% tags=["hide-input"]
run.say("""At a batch of one float32 collapses {collapse_rate_float32_minus_bf16:+.1%} more often than bf16 ({collapse_rate_float32_minus_bf16.low:+.1%} to {collapse_rate_float32_minus_bf16.high:+.1%} over the seeds). In float32 a batch of one collapses {collapse_rate_batch_1_minus_4:+.1%} more often than a batch of four. """
        + "On precision: " + said("collapse_rate_float32_minus_bf16", "float32 is the worse", "bf16 is the worse") + ". On the batch: "
        + said("collapse_rate_batch_1_minus_4", "one image is too few", "one image is no worse") + ".")

# %% [markdown]
# ## A spread below 0.005 is a plateau
#
# The blog's alarm is an absolute number for the standard deviation of the loss from step to step. The loss of a step is a mean over a batch, and each image has its own timestep, so most of its spread has nothing to do with progress: it is sampling, and falls with the square root of the batch. The next cell takes the finished run of chapter 3, long on its plateau, and measures its loss on many batches of several sizes, with no training in between.

# %%
from dit_repro.diffusion import training_losses
from dit_repro.training.batches import draw_batch

config = settings.training(train_store)
model = launch(config, settings.run_path("first_steps", config)).load_model(config.num_steps, ema=False).to(DEVICE)
losses = []
with torch.no_grad():
    for step in range(1, numbers.loss_batches + 1):
        batch = draw_batch(replace(config, seed=1), train_store, step).map(lambda tensor: tensor.to(DEVICE))
        losses.append(training_losses(model, batch.x0, batch.t, batch.y, schedule, config.objective, noise=batch.noise).mse)
losses = torch.cat(losses)  # one an image
run.record("loss_std_at_plateau", losses.view(numbers.loss_batches, -1).mean(1).std(), note=f"batch {config.global_batch_size}")
run.record("loss_std_one_image", losses.std())
run.record("batch_at_which_std_is_0_005", float((losses.std() / 0.005) ** 2))
sizes = [size for size in (1, 4, 16, 64, 128, 256) if len(losses) >= 8 * size]
spreads = [losses[: len(losses) // size * size].view(-1, size).mean(1).std().item() for size in sizes]
figure, axes = plt.subplots(figsize=(7, 3))
axes.loglog(sizes, spreads, "o", label="measured")
axes.loglog(sizes, losses.std().item() / np.sqrt(sizes), "--", color="#6b6b73", label="one image's spread over the root of the batch")
axes.axhline(0.005, color="C3", linewidth=1, label="the blog's 0.005")
axes.set(xlabel="images in a batch", ylabel="standard deviation of the loss")
axes.legend()
run.figure(figure, name="loss-spread", caption="Spread of the loss from batch to batch on a plateau, by batch size.")

# %% tags=["hide-input"]
run.say("""On its plateau this run's loss has a standard deviation of **{loss_std_at_plateau:.4f}** from step to step. One image's has {loss_std_one_image:.3f}, so 0.005 is reached at a batch of {batch_at_which_std_is_0_005:,.0f}, on a plateau or not: """
        + ("at this batch the alarm fires." if run["loss_std_at_plateau"] < 0.005 else "at this batch the alarm never fires.")
        + """ The number measures the batch.""")

# %% [markdown]
# ## A good loss may hide an ignored label
#
# This warning is worth its place. Most of the noise that a model predicts can be predicted without knowing the class; so the loss says little about whether the class is used. What tells is to ask a judge: how much does the class seen in a sample say about the class asked for? The answer is in bits, and shuffled labels show how many bits chance gives.

# %%
probe = np.random.default_rng(2).permutation(len(test_store))[: short.loss_images]
x0 = test_store.latents(probe, np.zeros(len(probe), bool), torch.zeros(len(probe), *test_store.latent_shape))
y = torch.from_numpy(test_store.labels[probe])
timesteps = range(10, 1000, 110)
with_labels, without = (loss_by_timestep(model, x0, asked, schedule, timesteps).mean().item()
                        for asked in (y, torch.full_like(y, train_store.num_classes)))
run.record("loss_ratio_without_labels", without / with_labels)
guided, ignored = draw(model)[1], draw(model, Guidance(scale=0))[1]  # scale 0: the label is never seen
for name, images in (("condition_bits", guided), ("condition_bits_ignored", ignored)):
    found = condition_information(judge(images).logits.argmax(1), labels)
    run.record(name, found.bits, note=f"{len(labels)} samples")
    run.record(f"{name}_chance", found.chance)

# %% tags=["hide-input"]
run.say("""Taking the labels away raises the held-out loss of the model by a factor of {loss_ratio_without_labels:.3f}. In its guided samples the judged class carries **{condition_bits:.2f} bits** about the label, with {condition_bits_chance:.2f} to be had by chance; in samples that never saw their label, {condition_bits_ignored:.2f} with {condition_bits_ignored_chance:.2f} by chance. `condition_information` is the detector, and `dit-repro stability check RUN` applies it.""")

# %% [markdown]
# ## Small sets are copied
#
# Eighty images were enough for the author's model to repeat them. Whether a sample is a copy is decided by comparison: held-out images say how near an image that was never seen comes to the training set; a sample nearer than all but one in a hundred of those is called a copy.

# %%
few_indices = np.concatenate([np.flatnonzero(train.labels == label)[: numbers.copy_per_class] for label in range(classes)])
few = train.take(few_indices)
few_store = settings.data.encoded("few", few, vae)
copying = trained(few_store, num_steps=numbers.copy_steps)
copied_images = draw(copying.load_model(ema=False))[1]
many_images = draw(trained(num_steps=numbers.copy_steps).load_model(ema=False))[1]


def decoded_features(store, indices):
    """Features of real images as the decoder gives them back, like samples."""
    return extractor(decode(store.latents(indices, np.zeros(len(indices), bool), torch.zeros(len(indices), *store.latent_shape)))).pool


few_features = torch.cat([decoded_features(few_store, np.arange(len(few_store))),
                          extractor(decode(few_store.moments(np.arange(len(few_store)), np.ones(len(few_store), bool))
                                           .chunk(2, 1)[0] * vae.scale_factor)).pool])  # flips are copies too
unseen = decoded_features(test_store, np.random.default_rng(3).permutation(len(test_store))[: short.reference_images])
for name, images in (("copied_samples_share", copied_images), ("copied_samples_share_full_set", many_images)):
    copies = find_copies(extractor(images).pool, few_features, unseen)
    run.record(name, copies.share, interval=wilson_interval(round(copies.share * len(images)), len(images)))
    run.record(f"{name}_ratio", copies.ratio)
run.record("copy_set_size", len(few))

# %%

nearest = torch.cdist(extractor(copied_images).pool.double(), few_features[: len(few)].double()).argmin(1)
rows = np.arange(0, len(labels), max(1, len(labels) // 8))[:8]
pairs = torch.stack([copied_images[rows], few.images(nearest[rows].numpy())])
run.figure(sample_grid(pairs, ["sample", "nearest"], [train_store.class_names[label] for label in labels[rows]], size=56), name="copies",
           caption="Samples of the run on {copy_set_size} images, and the training image nearest to each in feature space.")

# %% tags=["hide-input"]
run.say("""Trained on {copy_set_size} images, the model gives samples of which {copied_samples_share:.0%} are copies by this test (95% interval {copied_samples_share.low:.0%} to {copied_samples_share.high:.0%}); they lie {copied_samples_share_ratio:.2f} times as far from the training images as unseen images do. A model trained for as long on everything, held against the same {copy_set_size} images, has {copied_samples_share_full_set:.0%} and {copied_samples_share_full_set_ratio:.2f}. The test calls one unseen image in a hundred a copy.""")

# %% [markdown]
# ## Duplicates hurt
#
# The claim: a set of which three in ten are duplicates trains worse than a smaller one without. Both sets below hold the same unique images; one also holds copies of some of them. Steps, batch and draws are equal.

# %%
unique = np.random.default_rng(4).permutation(len(train))[: numbers.unique_images]
extra = np.random.default_rng(5).choice(unique[: len(unique) // 10], round(len(unique) * 0.3 / 0.7))  # a tenth, many times
stores = {"unique": settings.data.encoded("unique", train.take(unique), vae),
          "duplicated": settings.data.encoded("duplicated", train.take(np.concatenate([unique, extra])), vae)}
run.record("duplicate_share", len(extra) / (len(unique) + len(extra)))
by_set = {name: [distance(draw(trained(store, seed, num_steps=numbers.num_steps, global_batch_size=numbers.batch_size)
                               .load_model(ema=False))[1]) for seed in range(numbers.seeds)] for name, store in stores.items()}
difference("frechet_duplicated_minus_unique", by_set["duplicated"], by_set["unique"])
run.record("frechet_unique", np.mean(by_set["unique"]), seeds=numbers.seeds, interval=(min(by_set["unique"]), max(by_set["unique"])))

# %% tags=["hide-input"]
run.say("""With {duplicate_share:.0%} duplicates the Fréchet distance changes by {frechet_duplicated_minus_unique:+.2f} from {frechet_unique:.1f} ({frechet_duplicated_minus_unique.low:+.2f} to {frechet_duplicated_minus_unique.high:+.2f}): """
        + said("frechet_duplicated_minus_unique", "duplicates hurt", "duplicates do not hurt") + ".")

# %% [markdown]
# ## The seed carries over
#
# When fine-tuning goes on from a checkpoint, the blog wants the random seed carried on and not reset. The weights know nothing of the generator that drew their noise. A reset seed does one thing: the same images, timesteps and noise come again in the same order. Both continuations below start from the same weights with a fresh optimizer.

# %%
from dit_repro.training.brief import train_briefly

continued = {"reset": [], "carried": []}
for seed in range(numbers.seeds):
    folder = trained(seed=seed)
    again = replace(folder.config(), num_steps=numbers.num_steps, global_batch_size=numbers.batch_size)
    for name, next_seed in (("reset", seed), ("carried", seed + 1000)):
        tuned = train_briefly(folder.load_model(ema=False).to(DEVICE), replace(again, seed=next_seed), train_store, name)
        continued[name].append(distance(draw(tuned)[1]))
difference("frechet_seed_reset_minus_carried", continued["reset"], continued["carried"])

# %% tags=["hide-input"]
run.say("""Resetting changes the Fréchet distance by {frechet_seed_reset_minus_carried:+.2f} ({frechet_seed_reset_minus_carried.low:+.2f} to {frechet_seed_reset_minus_carried.high:+.2f}): """ + said("frechet_seed_reset_minus_carried", "resetting hurts", "resetting does not hurt") + ".")

# %% [markdown]
# ## Crop to squares, do not stretch
#
# No training is needed for this one. A model learns the pictures it is given. Real images are made wide by a margin at either side, then brought back to a square by cutting the margin off or by squeezing, and the distance to the untouched images is what no training could win back.

# %%
import torch.nn.functional as F

some = np.random.default_rng(6).permutation(len(train))[: short.reference_images]
originals = train.images(some)  # (N, 3, R, R)
margin = train.resolution // 4
wide = F.pad(originals.float(), (margin, margin, 0, 0), mode="replicate")  # (N, 3, R, 1.5 R)
stretched = F.interpolate(wide, size=originals.shape[2:], mode="bicubic", antialias=True).round().clamp(0, 255).to(torch.uint8)
cropped = wide[..., margin:-margin].to(torch.uint8)
run.record("frechet_stretched", distance(stretched))
run.record("frechet_cropped", distance(cropped))
run.record("frechet_stretched_minus_cropped", run["frechet_stretched"] - run["frechet_cropped"])

# %% tags=["hide-input"]
run.say("""Squeezed images are {frechet_stretched:.2f} away from held-out ones, cropped ones {frechet_cropped:.2f}, which is the floor of two sets of this size. """
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
# The blog fine-tunes text-to-image models with captions, adapters and cross-attention dropout; here labels stand for captions and whole small networks for adapters. An effect that needs thousands of steps of fine-tuning at 512 pixels would not show in runs of a hundred steps. Where the seeds disagree the page says that no effect was shown, not that there is none.
