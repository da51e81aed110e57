"""Benchmarks against peers from PyPI, in one process and in turn, so that the machine's load falls on both alike.

Ratios are of CPU time, which a shared machine disturbs less than wall time. These are no tests: `dit-repro bench all`
prints each reading with its target.
"""
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import torch

from dit_repro.allocator import keep_freed_memory
from dit_repro.diffusion import NoiseSchedule, Objective, training_losses
from dit_repro.evaluation import FeatureStatistics, frechet_distance
from dit_repro.evaluation.frechet import features_at_known_distance
from dit_repro.files import write_json
from dit_repro.latents import ImageSource, LatentStore, load_autoencoder
from dit_repro.latents.store import FORMAT, FORMAT_VERSION
from dit_repro.models import DIT_CONFIGS, create_model, to_diffusers
from dit_repro.sampling import Guidance, sample
from dit_repro.speed.report import Reading
from dit_repro.training.ema import EMA


def in_turn(functions: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each function, called in turn `repeats` times after one call to warm up."""
    times = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if repeat:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def training_step(model_name: str, batch_size: int, input_size: int) -> dict[str, Callable]:
    """One step of ours and of the same-size diffusers model: the same loss, each library's optimizer and EMA habits."""
    from diffusers import DiTTransformer2DModel
    from diffusers.training_utils import EMAModel

    config = DIT_CONFIGS[model_name]
    model = create_model(model_name, input_size=input_size, num_classes=10)
    peer = DiTTransformer2DModel(
        num_attention_heads=config.heads, attention_head_dim=config.width // config.heads, num_layers=config.depth,
        in_channels=4, out_channels=8, sample_size=input_size, patch_size=config.patch_size, num_embeds_ada_norm=10)
    peer.train()
    draw = torch.Generator().manual_seed(0)
    x0, noise = torch.randn((2, batch_size, 4, input_size, input_size), generator=draw)
    t, y = torch.randint(1000, (batch_size,), generator=draw), torch.randint(10, (batch_size,), generator=draw)
    schedule = NoiseSchedule.linear()

    def step_of(predict, optimizer, average):
        def step():
            training_losses(predict, x0, t, y, schedule, Objective(), noise=noise).total.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average()
        return step

    ema, peer_ema = EMA(model, 0.9999), EMAModel(peer.parameters(), decay=0.9999)
    trained = [p for p in model.parameters() if p.requires_grad]
    return {"ours": step_of(model, torch.optim.AdamW(trained, 1e-4, fused=True), lambda: ema.update(model, 1)),
            "peer": step_of(lambda x, t, y: peer(x, t, y).sample, torch.optim.AdamW(peer.parameters(), 1e-4),
                            lambda: peer_ema.step(peer.parameters()))}


def bench_step() -> Iterator[Reading]:
    """Training steps against diffusers' DiTTransformer2DModel, both in a process that is set up as the trainer's."""
    keep_freed_memory()
    for name, batch_size, input_size, target in (("DiT-nano/2", 128, 8, 1.3), ("DiT-S/2", 2, 32, 1.0)):
        times = in_turn(training_step(name, batch_size, input_size), repeats=5)
        yield Reading(f"training step of {name}, diffusers against ours", times["peer"] / times["ours"], "x",
                      at_least=target, note=f"{times['ours']:.3f} s of CPU for {batch_size} images")


def bench_sampling() -> Iterator[Reading]:
    """50 guided steps against DiTPipeline with the same weights, decoding included."""
    from diffusers import DiTPipeline

    model, autoencoder = create_model("DiT-nano/2", input_size=8, num_classes=10).eval(), load_autoencoder("embedded")
    labels, schedule = list(range(10)), NoiseSchedule.linear()
    with tempfile.TemporaryDirectory() as folder:
        to_diffusers(model, Path(folder) / "pipeline", autoencoder.model)
        pipeline = DiTPipeline.from_pretrained(Path(folder) / "pipeline", low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    times = in_turn({
        "ours": lambda: autoencoder.decode(sample(model, labels, schedule, "50", method="ddim", seeds=labels,
                                                  guidance=Guidance(4.0, channels=None))),
        "peer": lambda: pipeline(labels, guidance_scale=4.0, num_inference_steps=50, output_type="np")}, repeats=3)
    yield Reading("50 guided steps of DiT-nano/2, DiTPipeline against ours", times["peer"] / times["ours"], "x",
                  at_least=1.3, note=f"{times['ours']:.2f} s of CPU for 10 images")


def write_random_store(folder: Path, rows: int, sparse: bool = False, side: int = 8) -> LatentStore:
    """A store of random moments, of latents (4, side, side); sparse files take no space and read as zero."""
    folder.mkdir(parents=True)
    shards, shard_size = [], 8192
    for start in range(0, rows, shard_size):
        count = min(shard_size, rows - start)
        file = f"shard-{len(shards):05d}.npy"
        moments = np.lib.format.open_memmap(folder / file, "w+", "float16", (count, 2, 8, side, side))
        if not sparse:
            moments[:] = np.random.default_rng(start).standard_normal(moments.shape, dtype=np.float32)
        shards.append({"file": file, "rows": count})
    np.save(folder / "labels.npy", np.arange(rows) % 10)
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, "complete": True, "count": rows, "shards": shards,
                "class_names": [str(i) for i in range(10)], "latent_shape": [4, side, side], "scale_factor": 1.0,
                "dtype": "float16"}
    write_json(folder / "manifest.json", manifest)
    return LatentStore.open(folder)


def bench_store() -> Iterator[Reading]:
    """Batches of 128 random rows against one .npy file an image; growth to the number of ImageNet's images.

    All sides are warm: they read the same 100 batches over and over, 20 in a turn, so that pages are in memory and
    mapped, and code is in the caches. The share of a training step alone is of one batch after a step, cold.
    The peer is a feature-extraction script's folder at its best: one np.load an image, labels not read from files.
    """
    def reader(read, rows, in_a_turn=20):
        draw = np.random.default_rng(rows)
        batches = [(draw.integers(0, rows, 128), draw.random(128) < 0.5) for _ in range(100)]
        for batch in batches:
            read(*batch)
        turns = itertools.cycle(batches)
        return lambda: [read(*batch) for batch in itertools.islice(turns, in_a_turn)]

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "files").mkdir()

        def from_files(indices, flipped):
            pairs = zip(indices.tolist(), flipped.tolist())
            arrays = [np.load(folder / "files" / f"{i}.npy")[int(f)] for i, f in pairs]
            return torch.from_numpy(np.stack(arrays)).float()  # (128, 8, 8, 8)

        stores = {rows: write_random_store(folder / str(rows), rows) for rows in (20_000, 200_000)}
        written = 0
        for rows, store in stores.items():
            for i in range(written, rows):
                np.save(folder / "files" / f"{i}.npy", np.zeros((2, 8, 8, 8), "float16"))
            written = rows
            times = in_turn({"ours": reader(store.moments, rows), "peer": reader(from_files, rows)}, repeats=15)
            yield Reading(f"reading 128 of {rows:,} rows, a file an image against the store",
                          times["peer"] / times["ours"], "x", at_least=20,
                          note=f"{50 * times['ours']:.3f} ms a batch, warm")
        times = in_turn({"read": reader(store.moments, rows, in_a_turn=1),
                         "step": training_step("DiT-nano/2", 128, 8)["ours"]}, repeats=5)
        yield Reading("reading a batch, share of a nano training step", 100 * times["read"] / times["step"], "%",
                      at_most=2, note=f"{1e3 * times['read']:.2f} ms after a step, cold")
        growth = {}
        for side in (8, 32):   # rows of 1 KB, as the embedded images', and of 16 KB, as ImageNet's at 256 pixels
            small = write_random_store(folder / f"small-{side}", 20_000, sparse=True, side=side)
            large = write_random_store(folder / f"large-{side}", 1_280_000, sparse=True, side=side)
            times = in_turn({"small": reader(small.moments, len(small)), "large": reader(large.moments, len(large)),
                             "part": reader(large.moments, len(small))}, repeats=30)
            growth[side] = times["large"] / times["small"], times["part"] / times["small"]
        yield Reading("reading 128 of 1,280,000 rows of ImageNet's size against 128 of 20,000", growth[32][0], "x",
                      at_most=1.2,
                      note=f"{50 * times['large']:.2f} ms a batch, warm; {growth[8][0]:.2f}x for rows of 1 KB, but "
                           f"{growth[8][1]:.2f}x for the large store's first 20,000, so what grows is the processor's "
                           f"way to pages far apart, not the index")


def bench_disk() -> Iterator[Reading]:
    """Random rows of ImageNet's size from files that are not in memory: what the disk delivers for a byte asked."""
    def delivered(read, folder, rows):
        for file in folder.glob("*.npy"):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())   # only clean pages can be given up
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = process.io_counters().read_bytes
        read(rows, np.zeros(len(rows), bool))
        return (process.io_counters().read_bytes - before) / (len(rows) * 2 * 8 * 32 * 32)

    process = psutil.Process()
    if not hasattr(process, "io_counters") or not hasattr(os, "posix_fadvise"):   # as on macOS, and on Windows
        return
    with tempfile.TemporaryDirectory() as folder:
        store = write_random_store(Path(folder) / "store", 8192, side=32)
        rows, others = np.random.default_rng(0).permutation(8192)[:128].reshape(2, 64)
        array = np.load(store.path / "shard-00000.npy", mmap_mode="r")   # (8192, 2, 8, 32, 32), as numpy maps it
        shares = {"ours": delivered(store.moments, store.path, rows),
                  "peer": delivered(lambda rows, flipped: array[rows, flipped.astype(int)], store.path, others)}
        if shares["ours"]:   # else the file system is in memory
            yield Reading("bytes the disk delivers for a byte of a random row", shares["ours"], "x", at_most=2,
                          note=f"{shares['peer']:.0f}x where numpy maps the file, read-ahead included")


def bench_encode() -> Iterator[Reading]:
    """The autoencoder over the embedded images, plain and flipped."""
    autoencoder, images = load_autoencoder("embedded"), ImageSource.embedded("test").images(range(1000))
    autoencoder.encode(images[:64])
    start = time.perf_counter()
    for batch in (*images.split(64), *images.flip(-1).split(64)):
        autoencoder.encode(batch)
    yield Reading("encoding the 20,000 embedded images, plain and flipped", 20 * (time.perf_counter() - start), "s",
                  at_most=30, note="wall time of 1,000 of them, times 20")


def bench_frechet() -> Iterator[Reading]:
    """The Frechet distance at Inception's size against scipy's matrix square root and the closed form."""
    from scipy.linalg import sqrtm

    for count in (2_000, 10_000):
        *sets, exact = features_at_known_distance(count, 2_048)
        a, b = (FeatureStatistics(2_048).update(features) for features in sets)
        answers = {}

        def ours(a=a, b=b, answers=answers):
            a._factor = b._factor = None   # cached by the statistics: made anew in each call
            answers["ours"] = frechet_distance(a, b)

        def peer(a=a, b=b, answers=answers):
            root = sqrtm((a.covariance @ b.covariance).numpy())
            gap = (a.mean - b.mean).square().sum() + (a.covariance + b.covariance).trace()
            answers["peer"] = float(gap) - 2 * np.trace(root).real

        times = in_turn({"ours": ours, "peer": peer}, repeats=1)
        errors = {name: abs(answer / exact - 1) for name, answer in answers.items()}
        name = f"Frechet distance of {count:,} x 2,048 features"
        yield Reading(f"{name}, scipy's sqrtm against ours", times["peer"] / times["ours"], "x", at_least=1.8,
                      note=f"{times['ours']:.1f} s of CPU")
        yield Reading(f"{name}, error against the closed form", errors["ours"], "of it", at_most=1e-9,
                      note=f"scipy's is {errors['peer']:.0e}")


def bench_startup() -> Iterator[Reading]:
    """The command line: how long --help takes."""
    def start():
        subprocess.run([sys.executable, "-m", "dit_repro", "--help"], check=True, stdout=subprocess.DEVNULL)

    times = []
    for _ in range(5):
        before = os.times()
        start()
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    yield Reading("dit-repro --help", statistics.median(times), "s", at_most=0.5, note="of CPU")


def bench_book() -> Iterator[Reading]:
    """Every chapter at its smallest profile, as `dit-repro run --profile smoke` runs it."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "dit_repro", "run", "--profile", "smoke", "--fresh", "--no-build"],
                          capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"the book at smoke failed after {seconds:.0f} s: {done.stderr.strip().splitlines()[-1:]}")
    yield Reading("the whole book at smoke", seconds, "s", at_most=240, note="wall time")


BENCHMARKS = {"step": bench_step, "sampling": bench_sampling, "store": bench_store, "disk": bench_disk,
              "encode": bench_encode, "frechet": bench_frechet, "startup": bench_startup, "book": bench_book}
