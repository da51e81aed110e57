# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Latents: what the transformer sees instead of pictures
#
# **Question.** DiT never sees a pixel. It trains on the output of a frozen autoencoder, computed once and stored. What does that cost, what does it buy, and which details of the store change the result?
#
# **Answer.** The autoencoder throws detail away before training starts, and no amount of training brings it back: this chapter measures how much. In return a training image is read as a few hundred numbers instead of being encoded again at every visit. Three details decide whether the rest of the book works: the scale of the latents, the side on which the flip is done, and whether the store keeps the two moments of each latent or one frozen sample of it.
#
# *Claimed in:* the paper, sections 3.1 and 4; the replication post, "The architecture, faithfully" and "two bugs in the measurement itself"; the lesson's training loop. *Time:* laptop 1 to 1.5 min on two cores after a first encoding of 15 s; at the paper profile ImageNet is encoded once, in hours.

# %% tags=["parameters"]
profile: str = "laptop"  # smoke, laptop, gpu or paper
data: str = ""  # a folder of IDX files or of class folders; empty: what the profile says
autoencoder: str = ""  # "embedded", an SD-VAE name or a local folder; empty: what the profile says

# %%
from dit_repro.book import start

run = start(globals())

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import torch

from dit_repro.book.figures import sample_grid
from dit_repro.latents import load_autoencoder
from dit_repro.latents.autoencoder import RELEASED
from dit_repro.profiles import DEVICE, get_profile

settings = get_profile(profile, data=data, autoencoder=autoencoder)
vae = settings.data.autoencoder()
held_out = settings.data.source("test")

# %% [markdown]
# ## The pictures, and what comes back
#
# Fashion-MNIST is small enough to travel inside the package: grey photographs of clothes, 28x28 pixels, padded to 32x32 and repeated to three channels, so that every line below is the line that runs on ImageNet. The autoencoder maps each image to a grid of latents, eight by eight cells of four numbers, and maps the grid back.
#
# > **Predict first.** An image has 784 pixels that are not padding, its latent has 256 numbers. Which of the ten classes loses most on the way there and back: bags, with their prints and straps, or trousers, which are mostly outline?

# %%
chosen = np.concatenate([np.flatnonzero(held_out.labels == label)[:1] for label in np.unique(held_out.labels)[:10]])
images = held_out.images(chosen)  # (10, 3, H, W) uint8
mean = vae.encode(images).chunk(2, 1)[0]  # (10, 4, h, w)
decoded = vae.decode(mean * vae.scale_factor)
difference = (127.5 + (decoded.float() - images) / 2).round().to(torch.uint8)
grid = sample_grid(torch.stack([images, decoded, difference]), ["image", "decoded", "error"],
                   [held_out.class_names[label] for label in held_out.labels[chosen]])
run.figure(grid, name="reconstructions", caption="One held-out image a class, what the autoencoder returns, "
           "and the difference at half size around grey. Lettering and weave go; the outline stays.")

# %% [markdown]
# The common yardstick is the peak signal-to-noise ratio, 10 log10 of the squared range over the mean squared error. Padding is reproduced almost without error and flatters the figure, so it is computed again without the border. A second yardstick matters more to a generator: how often a classifier that never met the autoencoder still recognizes what comes out.

# %%
probe = settings.latents.probe_images
some = np.random.default_rng(0).permutation(len(held_out))[:probe]
images, labels = held_out.images(some), torch.from_numpy(held_out.labels[some])  # (N, 3, H, W), (N,)
border = 2 if held_out.resolution == 32 else 0
decoded = torch.cat([vae.decode(vae.encode(part).chunk(2, 1)[0] * vae.scale_factor) for part in images.split(256)])
inner = slice(border, held_out.resolution - border)
error = (decoded.float() - images).square()  # (N, 3, H, W)
run.record("psnr_full", 10 * torch.log10(255**2 / error.mean()))
run.record("psnr_inner", 10 * torch.log10(255**2 / error[..., inner, inner].mean()))
by_class = [10 * torch.log10(255**2 / error[labels == label][..., inner, inner].mean()) for label in held_out.labels[chosen]]

# %%
judge = settings.data.judge()
for name, pictures in (("accuracy_pixels", images), ("accuracy_decoded", decoded)):
    right = judge(pictures).logits.argmax(1) == labels
    run.record(name, right.double().mean(), note=f"{len(right)} held-out images")

# %%
if held_out.resolution == 32:  # at 256 pixels the covariance would have 65,536 rows
    train = settings.data.source("train")
    train_pixels = train.images(np.arange(0, len(train), 4))[:, 0]  # (N, 32, 32)
    flat = train_pixels.double().flatten(1) / 255  # (N, 1024)
    directions = torch.linalg.eigh(torch.cov(flat.T)).eigenvectors[:, -256:]  # (1024, 256)
    centered = images[:, 0].double().flatten(1) / 255 - flat.mean(0)
    missed = (centered - centered @ directions @ directions.T).unflatten(1, (32, 32))[:, inner, inner]
    run.record("psnr_pca_inner", -10 * missed.square().mean().log10())
    run.say("""The autoencoder returns held-out images at **{psnr_full:.1f} dB**, {psnr_inner:.1f} dB without the border. Of the originals the classifier recognizes {accuracy_pixels:.1%}, of the decoded images {accuracy_decoded:.1%}.

What limits it? Keeping the 256 leading principal components, the best that any linear map can do with as many numbers, gives {psnr_pca_inner:.1f} dB on the same pixels, so the network uses its bottleneck better than any linear code could. What it drops is weave and lettering: a squared error prefers a smooth guess to a sharp one in the wrong place, and 0.4 million parameters trained for minutes have not reached the end of what 256 numbers can hold. Longer training still helps. It was stopped where a small transformer can still model the latents.""")

# %%
figure, axes = plt.subplots(figsize=(7, 2.8))
order = np.argsort(by_class)
axes.plot(np.array(by_class)[order], [held_out.class_names[held_out.labels[chosen[i]]] for i in order], "o")
axes.set(xlabel="PSNR without the border, dB")
run.figure(figure, name="psnr-by-class", caption="What is lost depends on the class: prints and buckles cost, plain outlines do not.",
           alt=f"One point a class, sorted: PSNR of the decoded image from {min(by_class):.1f} to {max(by_class):.1f} dB.")

# %% [markdown]
# ## Pre-encoding
#
# The autoencoder is frozen, so its output for an image never changes and can be computed once. `encode_to_store` writes the two moments of every image, mean and log-variance, plain and flipped, into memory-mapped shards with a manifest that names the autoencoder, its hash, the scale and the source. A store made with another autoencoder is refused, since two autoencoders' latents have the same shape and nothing else in common.

# %%
store = settings.data.store("train", vae)
manifest = store.manifest
size = sum(path.stat().st_size for path in store.path.iterdir())
run.record("store_bytes_per_image", size / len(store))
run.record("train_images", len(store))
run.record("num_classes", store.num_classes)
run.record("downsampling", vae.downsampling)
run.record("pixel_values_per_latent_value", 3 * held_out.resolution**2 / np.prod(store.latent_shape))
{key: manifest[key] for key in ("autoencoder", "scale_factor", "resolution", "flips", "dtype")}

# %%
batch = settings.latents.timing_batch
pictures = held_out.images(np.arange(batch))
indices = np.random.default_rng(0).permutation(len(store))


def rate(function, repeats: int = 5) -> float:
    function()  # warm up
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    return batch * repeats / (time.perf_counter() - began)


run.record("encode_per_second", rate(lambda: vae.encode(pictures).cpu()))
noise = torch.randn(batch, *store.latent_shape)
run.record("read_per_second", rate(lambda: store.latents(indices[:batch], np.arange(batch) % 2 == 0, noise)))
run.record("read_speedup", run["read_per_second"] / run["encode_per_second"])

# %% tags=["hide-input"]
run.say("""Encoding runs at {encode_per_second:,.0f} images a second on this device, reading sampled latents from the store in random order at {read_per_second:,.0f}: **{read_speedup:.0f} times** faster. The store takes {store_bytes_per_image:,.0f} bytes an image, for two moments and two flips.""")

# %% [markdown]
# ## Why 0.18215
#
# The noise schedule adds noise of unit variance and assumes that what it is added to has unit variance too. An autoencoder's latents have whatever variance its training left them with, so they are divided by their standard deviation. For Stable Diffusion's autoencoder that factor is 0.18215, one over a standard deviation of 5.49 measured once on its training data. It is a measurement, not a constant of nature: another autoencoder has another factor.

# %%
some = np.random.default_rng(0).permutation(len(store))[:probe]
moments = store.moments(some, np.zeros(len(some), bool))  # (N, 8, h, w)
mean, logvar = moments.chunk(2, 1)
noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
raw = mean + (logvar / 2).exp() * noise  # (N, 4, h, w)
run.record("raw_std", raw.std())
run.record("scale_factor", store.scale_factor)
run.record("latent_std", (raw * store.scale_factor).std())
run.record("largest_scaled", (raw * store.scale_factor).abs().max())

# %%
figure, axes = plt.subplots(figsize=(7, 3))
bins = np.linspace(-5, 5, 121)
for channel in range(raw.shape[1]):
    axes.hist((raw[:, channel] * store.scale_factor).flatten().numpy(), bins, density=True, histtype="step",
              linewidth=1.6, label=f"channel {channel}")
axes.plot(bins, np.exp(-bins**2 / 2) / np.sqrt(2 * np.pi), color="#6b6b73", linestyle="--", label="standard normal")
axes.set(xlabel="scaled latent", ylabel="density")
axes.legend()
run.figure(figure, name="latent-histogram", caption="Scaled latents by channel against the standard normal. "
           "The scale gives unit variance over all channels together; it centers none and makes none normal.")

# %%
from dit_repro.diffusion import NoiseSchedule

schedule = NoiseSchedule.linear(1000)
figure, axes = plt.subplots(figsize=(7, 3))
for factor, label in ((store.scale_factor, "scaled"), (1.0, "not scaled"), (0.18215, "another autoencoder's 0.18215")):
    signal = (run["raw_std"] * factor) ** 2 * schedule.alphas_cumprod
    axes.semilogy(signal / (1 - schedule.alphas_cumprod), label=f"{label} (factor {factor:.3g})")
axes.set(xlabel="timestep", ylabel="signal-to-noise ratio", ylim=(1e-5, 1e4))
axes.legend()
run.figure(figure, name="snr-by-scale", caption="A wrong scale moves the whole schedule: the network meets noise levels "
           "at other timesteps than the paper's, and ends at another one.",
           alt="Signal-to-noise ratio against the timestep, logarithmic: three curves of one shape, one above the other, a factor each.")

# %% tags=["hide-input"]
run.say("""Raw latents have a standard deviation of {raw_std:.3f}; times the store's factor {scale_factor:.4f} it is **{latent_std:.3f}**. The largest value in the sample is {largest_scaled:.1f}: chapter 6 will need to know where the data end.""")

# %% [markdown]
# ## Moments or one frozen sample
#
# The encoder returns a mean and a variance for each latent, and training samples from them at every visit. A popular fast reimplementation stores one sample per image instead, so the same noise is part of that image for ever. How much noise is that?

# %%
posterior_std = (logvar / 2).exp()
run.record("posterior_share", (posterior_std**2).mean() / raw.var())
part = slice(0, min(256, len(mean)))
from_mean = vae.decode(mean[part] * store.scale_factor).float()
from_sample = vae.decode(raw[part] * store.scale_factor).float()
run.record("sample_psnr", 10 * torch.log10(255**2 / (from_mean - from_sample).square().mean()))

# %% tags=["hide-input"]
run.say("""Sampling adds a share of {posterior_share:.1e} to the latents' variance. Decoded, a sample and the mean agree to {sample_psnr:.0f} dB, which no eye tells apart. This autoencoder was trained with a weight of a millionth on the divergence from a normal prior, and became almost deterministic. So freezing the sample cannot be what separates two replications that use an autoencoder like this one; keeping the moments costs a factor of two in disk and removes the question.""")

# %% [markdown]
# ## Flip, then encode
#
# Flips are the paper's only augmentation. They belong before the encoder: its convolutions were not trained to be symmetric, so the latent of a mirrored image is not the mirrored latent.

# %%
sample = images[: probe // 4]
flipped = torch.cat([vae.encode(part.flip(-1)).chunk(2, 1)[0] for part in sample.split(256)])
mirrored = torch.cat([vae.encode(part).chunk(2, 1)[0].flip(-1) for part in sample.split(256)])
run.record("flip_latent_error", (flipped - mirrored).norm() / flipped.norm())
right = torch.cat([vae.decode(part * vae.scale_factor) for part in flipped.split(256)]).float()
wrong = torch.cat([vae.decode(part * vae.scale_factor) for part in mirrored.split(256)]).float()
target = sample.flip(-1).float()
for name, pictures in (("flip_pixels_psnr", right), ("flip_latents_psnr", wrong)):
    run.record(name, 10 * torch.log10(255**2 / (pictures - target).square().mean()))

# %% tags=["hide-input"]
run.say("""Mirroring the latent instead of the image gives a latent that is off by {flip_latent_error:.0%} of its norm. Decoded it reaches {flip_latents_psnr:.1f} dB instead of {flip_pixels_psnr:.1f} dB. Half of all training latents would be of that kind.""")

# %% [markdown]
# ## The leak
#
# The post's evaluation script filled a GPU: the autoencoder's parameters were never frozen, so each decoded batch carried the graph that made it, and moving the result to the CPU kept the graph alive. On a CPU the same mistake fills main memory. Below, the same number of batches is decoded three ways, the results are kept, and the process's resident memory is read after each batch.
#
# > **Predict first.** A decoded batch of 64 pictures is under a megabyte as bytes. How much does a batch cost when its graph is kept?

# %%
import gc

from dit_repro.allocator import memory_in_use


def memory_growth(frozen: bool, grad: bool) -> list[float]:
    """Memory in use after each decoded batch, in MB above the start."""
    vae.model.requires_grad_(not frozen)
    gc.collect()
    began, growth, kept = memory_in_use(), [], []
    with torch.set_grad_enabled(grad):
        for _ in range(settings.latents.leak_batches):
            latents = torch.randn(settings.latents.leak_batch_size, *store.latent_shape, device=DEVICE)
            kept.append(vae.model.decode(latents).sample.cpu())
            growth.append((memory_in_use() - began) / 2**20)
    vae.model.requires_grad_(False)
    return growth


curves = {"not frozen, no_grad": memory_growth(False, False), "frozen, gradients on": memory_growth(True, True),
          "not frozen, gradients on": memory_growth(False, True)}

# %%
figure, axes = plt.subplots(figsize=(7, 3))
for label, growth in curves.items():
    axes.plot(np.arange(1, len(growth) + 1), growth, marker="o", label=label)
axes.set(xlabel=f"batches of {settings.latents.leak_batch_size} decoded", ylabel="memory above the start, MB")
axes.legend()
run.figure(figure, name="leak", caption="Resident memory while decoded batches are kept. With gradients on and weights "
           "not frozen every batch keeps its activations.",
           alt="Memory against batches, a line a setting. Megabytes after the last batch: "
           + ", ".join(f"{label} {growth[-1]:.0f}" for label, growth in curves.items()) + ".")
slope = {label: round(np.polyfit(np.arange(len(growth)), growth, 1)[0], 1) + 0.0 for label, growth in curves.items()}  # no -0.0
run.record("leak_megabytes_per_batch", slope["not frozen, gradients on"])
run.record("frozen_megabytes_per_batch", slope["frozen, gradients on"])
run.record("no_grad_megabytes_per_batch", slope["not frozen, no_grad"])

# %% tags=["hide-input"]
run.say("""Each batch costs **{leak_megabytes_per_batch:.0f} MB** with its graph and {no_grad_megabytes_per_batch:.1f} MB without. Freezing the weights alone also stops the leak ({frozen_megabytes_per_batch:.1f} MB a batch), because nothing in the graph then needs a gradient; `load_autoencoder` does both.""")

# %% [markdown]
# <details><summary>Answer to both predictions</summary>
#
# Trousers come back best and bags or shirts worst, by several decibels: squared error follows texture. And a kept graph holds every activation of the decoder, a few hundred times the picture it made, as the slope above says.
# </details>
#
# **Exercise.** Give `autoencoder` the path of another `AutoencoderKL` with a different scale and run the chapter again. Which step refuses to continue, and why is that better than going on?
#
# <details><summary>Answer</summary>
#
# Nothing refuses: another autoencoder has another hash, and so another store in the workspace. Opening *this* store with it is what fails, with both names in the message. Without that check the latents would load, train to a reasonable loss, and decode to noise.
# </details>
#
# **Exercise.** ImageNet's latents may not fit into memory, and training reads them in random order. The kernel reads a mapped file with the neighbors of what is asked for, as far as the disk's read-ahead goes (on Linux `cat /sys/block/*/queue/read_ahead_kb`). From that, predict how many bytes the disk delivers for each byte of a row of 16 KB, then run `dit-repro bench disk`.
#
# <details><summary>Answer</summary>
#
# For numpy's mapping of a file, read-ahead over row size, as long as the windows do not overlap; the benchmark's file is only 256 times as large as what is asked of it. The store declares its access to be random and asks for all rows of a batch before it waits for the first. What remains is the edge: a row that does not begin with a page touches five pages of 4 KB where four would hold it.
# </details>

# %% [markdown]
# ## Two released decoders
#
# The paper uses two fine-tuned versions of Stable Diffusion's autoencoder and says that only their decoders differ. Where one of them is in use, the other is loaded and compared weight by weight.

# %%
if vae.id in RELEASED:
    other = load_autoencoder(RELEASED[1 - RELEASED.index(vae.id)]).model.state_dict()
    gaps = {part: max(float((weight - other[name]).abs().max()) for name, weight in vae.model.state_dict().items()
                      if name.startswith(part)) for part in ("encoder.", "quant_conv.", "decoder.")}
    run.record("encoder_max_abs_difference", max(gaps["encoder."], gaps["quant_conv."]))
    run.record("decoder_max_abs_difference", gaps["decoder."])
    run.say("Largest difference in the encoder {encoder_max_abs_difference}, in the decoder {decoder_max_abs_difference}.")
else:
    run.say(f"Not compared here: this run uses the {vae.id} autoencoder.")

# %% [markdown]
# ## Claims of this chapter

# %%
run.claims()

# %% [markdown]
# ## What could not be shown at this scale
#
# The released Stable Diffusion autoencoder and ImageNet are not in the package, so 0.18215 itself, the 32x32x4 latents of a 256-pixel image and the difference between the two released decoders were not measured here. The code that loads them is the code above: `dit-repro run 01 --profile paper -p data=IMAGENET`, where IMAGENET holds `train/` and `val/` with their class folders. The two decoders are compared when the autoencoder is named as released, `stabilityai/sd-vae-ft-ema` or `-mse`, and both are in the local cache.
