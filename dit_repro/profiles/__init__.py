"""Every number of every experiment, at four scales, with what to expect beside it, and rehearsals of the larger two.

`smoke` only shows that each cell runs. `laptop` is what the published pages show: every phenomenon, measured on two CPU
cores; its numbers are the defaults in experiments.py. `gpu` is one GPU before the paper's run is paid for. `paper` is
the replication itself. `gpu-rehearsal` and `paper-rehearsal` are their code paths with smoke's counts: half precision,
compiled where there is a GPU; for paper class folders at 64 pixels, an SD-VAE, Inception, two processes a run. Run them
before you pay for the whole; their numbers mean nothing and are not published.
"""
import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from dit_repro.files import workspace
from dit_repro.latents import LatentStore
from dit_repro.profiles.data import DEVICE, Data
from dit_repro.profiles.experiments import (
    Backbones,
    Construction,
    Divergence,
    Folklore,
    Lab,
    Latents,
    Recipe,
    Sampling,
    Scores,
    Speed,
    Sweeps,
)
from dit_repro.training import TrainConfig
from dit_repro.training.batches import latents_digest

__all__ = ["DEVICE", "PROFILES", "Data", "Profile", "get_profile"]


@dataclass(frozen=True)
class Profile:
    """One scale of the whole book."""
    name: str
    data: Data
    train: TrainConfig                  # chapter 3's run; `training` fills in what the latents decide
    latents: Latents = field(default_factory=Latents)
    construction: Construction = field(default_factory=Construction)
    sampling: Sampling = field(default_factory=Sampling)
    speed: Speed = field(default_factory=Speed)
    divergence: Divergence = field(default_factory=Divergence)
    sweeps: Sweeps = field(default_factory=Sweeps)
    scores: Scores = field(default_factory=Scores)
    recipe: Recipe = field(default_factory=Recipe)
    backbones: Backbones = field(default_factory=Backbones)
    folklore: Folklore = field(default_factory=Folklore)
    lab: Lab = field(default_factory=Lab)

    def training(self, store: LatentStore, **changes) -> TrainConfig:
        """The profile's run on `store`, with fields of TrainConfig changed."""
        channels, size, _ = store.latent_shape
        return replace(self.train, latents=str(store.path), num_classes=store.num_classes, input_size=size,
                       in_channels=channels, **changes)

    def run_path(self, name: str, config: TrainConfig) -> Path:
        """The folder of a run in the workspace: one for each setting, and each latents, that make it another run."""
        identity = config.digest() + latents_digest(LatentStore.open(config.latents))
        return workspace() / "runs" / f"{name}-{self.name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


# At a rate of 1e-3, a third of this one, 65% of guided samples land in their class in the end, not nine of ten.
# The post's 50,000 steps at an EMA decay of 0.9999 are five times 1 / (1 - decay); so are 1,000 steps at 0.995.
LAPTOP_RUN = TrainConfig(
    latents="", model="DiT-nano/2", num_steps=1_000, global_batch_size=128, learning_rate=3e-3, ema_decay=0.995,
    log_every=20, checkpoint_every=100, archive_every=100, keep_last=1)

PROFILES = {
    "smoke": Profile(
        "smoke", Data(limit_per_class=100),
        replace(LAPTOP_RUN, num_steps=40, global_batch_size=16, ema_decay=0.9, log_every=5, checkpoint_every=10,
                archive_every=10),
        Latents(probe_images=200, timing_batch=64, leak_batches=3),
        Construction(num_steps=2, batch_size=16, seeds=2, loss_images=32, processes=0),
        Sampling(steps="4", per_class=2, checkpoints=2, loss_images=32, covariance_images=500),
        scores=Scores(real_images=2_000, counts=(100, 200, 500, 1_000), few=200, many=1_000, repeats=3, samples=120,
                      samples_a_row=60, checkpoints=2, leak_batches=3, leak_batch_size=16,
                      doctor_images=400, command_images=60),
        speed=Speed(ladders=(("DiT-nano/4", 2, 8),), alone=False, compile=False, repeats=1, long=("DiT-nano/4", 1, 8),
                    profiled=("DiT-nano/4", 2, 8), growth=(1, 1, 32, 4), factors=(1, 2),
                    scaling=("DiT-nano/4", 2, 8)),
        divergence=Divergence(map_model="DiT-nano/4", map_rates=(1e-2, 3e-1), map_steps=3, map_batch_size=8,
                              long_steps=4, long_rates=(1e-2,), trial_steps=3, trial_batch_size=8, trial_seeds=1,
                              fault_step=2, break_steps=10, scales=(1.0, 4.0), steps="2", per_class=1, processes=0),
        sweeps=Sweeps(num_steps=20, perturbed_from=10, processes=0, steps="2", dense=2, plain_steps="4", quantile=0.01,
                      real_images=200, classes=2, scales=(1.0, 4.0), seeds=2, scale_seeds=1, per_class=4,
                      few_per_class=1, some_per_class=2, trace_steps=("2", "4"), trace_per_class=2),
        recipe=Recipe(num_steps=2, batch_size=16, seeds=1, log_every=1, checkpoint_every=2, processes=0, steps="2",
                      per_class=1, loss_images=16, detector_images=100, reference_images=100, bound_steps=4,
                      bound_images=8, variance_steps=(2, 3), variance_images=10),
        folklore=Folklore(seeds=1, num_steps=2, batch_size=8, small_steps=2, seed_steps=2, copy_steps=2,
                          copy_per_class=1, unique_images=21, loss_batches=8, loss_images=16, real_images=100,
                          steps="2", per_class=1, processes=0),
        backbones=Backbones(num_steps=2, batch_size=8, log_every=1, checkpoint_every=1, processes=0, seeds=1,
                            variant_seeds=1, timing_steps=2, loss_images=8, reference_images=100, steps="2",
                            per_class=2, chain_steps=("2", "4"), chain_per_class=1, scales=(1.0, 4.0), update_steps=2,
                            gradient_batches=1),
        lab=Lab(batch_size=8, fault_stride=7, clean_draws=1, zero_images=192)),
    "laptop": Profile("laptop", Data(), LAPTOP_RUN),
    "gpu": Profile(
        "gpu", Data(resolution=256),   # of class folders, where they are given
        TrainConfig(latents="", model="DiT-S/2", num_steps=5_000, ema_decay=0.999, precision="bf16", compile=True,
                    log_every=50, checkpoint_every=500, archive_every=500),
        construction=Construction(num_steps=1_000, batch_size=256),
        sampling=Sampling(per_class=500, batch_size=1_000),
        scores=Scores(samples=10_000, samples_a_row=2_000, command_images=50_000),
        speed=Speed(ladders=(("DiT-S/2", 256, 32), ("DiT-B/2", 256, 32), ("DiT-XL/2", 128, 32)),
                    long=("DiT-B/2", 64, 32), profiled=("DiT-B/2", 256, 32), growth=(8, 4, 512, 16)),
        divergence=Divergence(map_model="DiT-L/2", map_rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2), map_steps=2_000,
                              map_batch_size=256, long_steps=10_000, long_rates=(3e-4, 1e-3), trial_steps=500,
                              trial_batch_size=256, trial_seeds=5, fault_step=50, break_factor=30.0, break_steps=1_000,
                              break_log_every=10, steps="25", per_class=25),
        sweeps=Sweeps(num_steps=3_000, perturbed_from=2_000, steps="50", plain_steps="50", real_images=4_000,
                      scale_seeds=50, per_class=500, few_per_class=50, some_per_class=100, trace_per_class=50,
                      batch_size=1_000),
        recipe=Recipe(num_steps=3_000, batch_size=256, log_every=50, checkpoint_every=500, processes=1, per_class=100,
                      variance_steps=(8, 25, 100, 250), variance_images=1_000),
        folklore=Folklore(rate=1e-4, num_steps=1_000, batch_size=128, small_steps=2_000, small_rate=1e-4,
                          seed_steps=500, copy_steps=2_000, unique_images=3_500, loss_images=1_000, real_images=4_000,
                          steps="25", per_class=50),
        backbones=Backbones(unet="MiniUNet-M", num_steps=2_000, batch_size=256, log_every=50, checkpoint_every=500,
                            ema_decay=0.998, variant_seeds=3, timing_steps=30, loss_images=2_000, steps="25",
                            per_class=200, chain_steps=("25", "1000"), chain_per_class=50, update_steps=50)),
    "paper": Profile(
        "paper", Data(path="imagenet", autoencoder_name="stabilityai/sd-vae-ft-ema", resolution=256),
        TrainConfig(latents="", model="DiT-B/2", num_steps=50_000, precision="bf16", compile=True, archive_every=5_000,
                    export_ema_every=5_000),   # chapter 8 goes on to 400,000; the paper: FID-50K 43.47 there
        Latents(leak_batches=4, leak_batch_size=4),   # 1.4 GB an image with its graph
        Construction(num_steps=2_000, batch_size=256),
        Sampling(steps="250", guidance_scale=1.5, per_class=10, batch_size=64, classes=8),
        scores=Scores(real_images=40_000, counts=(1_000, 2_000, 5_000, 10_000, 20_000), repeats=5,
                      reference_split="test", samples=10_000, samples_a_row=2_000, leak_batches=6,
                      leak_batch_size=4, command_images=50_000),
        speed=Speed(ladders=(("DiT-S/2", 256, 32), ("DiT-B/2", 256, 32), ("DiT-XL/2", 128, 32)),
                    long=("DiT-B/2", 64, 32), profiled=("DiT-B/2", 256, 32), growth=(8, 4, 512, 16)),
        divergence=Divergence(map_model="DiT-L/2", map_rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2), map_steps=5_000,
                              map_batch_size=256, long_steps=50_000, long_rates=(3e-4, 1e-3), trial_steps=2_000,
                              trial_batch_size=256, trial_seeds=5, fault_step=200, break_factor=100.0,
                              break_steps=5_000, break_log_every=100, steps="250", per_class=8, gpus=2),
        sweeps=Sweeps(num_steps=135_000, perturbed_from=100_000, steps="250", plain_steps="250", real_images=4_000,
                      classes=8, scale_seeds=8, per_class=64, few_per_class=8, some_per_class=64, trace_per_class=8,
                      batch_size=64),   # the post's tables are of steps 134,000 and 228,000
        recipe=Recipe(num_steps=400_000, batch_size=256, seeds=1, log_every=100, checkpoint_every=5_000, processes=2,
                      steps="250", per_class=100, variance_steps=(8, 25, 100, 250), variance_images=2_000, fid=True),
        folklore=Folklore(rate=1e-4, num_steps=5_000, batch_size=256, small_steps=5_000, small_rate=1e-4,
                          seed_steps=2_000, copy_steps=3_000, copy_per_class=10, unique_images=35_000,
                          loss_images=1_000, real_images=4_000, steps="50", per_class=50),
        backbones=Backbones(unet="MiniUNet-B", num_steps=20_000, batch_size=256, log_every=100, checkpoint_every=5_000,
                            ema_decay=0.9998, variant_seeds=3, processes=1, timing_steps=30, reference_images=10_000,
                            steps="50", per_class=250, chain_steps=("25", "1000"), chain_per_class=50)),
}


def _rehearsal(path: Profile, counts: Profile) -> Profile:
    """`path` with the numbers of `counts`: what decides which code runs is the one's, how long it runs the other's."""
    compiled = DEVICE == "cuda"   # a CPU takes minutes for it
    rehearsal = replace(
        counts, name=f"{path.name}-rehearsal",
        data=replace(path.data, limit_per_class=counts.data.limit_per_class),
        train=replace(counts.train, precision=path.train.precision, compile=path.train.compile and compiled),
        speed=replace(counts.speed, compile=path.speed.compile and compiled),
        divergence=replace(counts.divergence, gpus=path.divergence.gpus, full_model=counts.train.model, full_steps=4,
                           full_batch_size=8, full_checkpoint_every=2),
        sweeps=replace(counts.sweeps, scales=path.sweeps.scales),
        scores=replace(counts.scores, reference_split=path.scores.reference_split),
        recipe=replace(counts.recipe, processes=path.recipe.processes, fid=path.recipe.fid,
                       flagship=counts.train.model, fid_images=(20, 10)))
    if path.data.is_fashion_mnist:
        return rehearsal
    return replace(   # Inception sees five images a second on a CPU
        rehearsal, data=replace(rehearsal.data, resolution=64, limit_per_class=2, stand_ins=True),
        latents=replace(rehearsal.latents, probe_images=32, timing_batch=8, leak_batches=2, leak_batch_size=2),
        scores=replace(rehearsal.scores, real_images=80, counts=(10, 20, 40), few=20, many=40, samples=40,
                       samples_a_row=20, doctor_images=80, command_images=40))


PROFILES |= {f"{name}-rehearsal": _rehearsal(PROFILES[name], PROFILES["smoke"]) for name in ("gpu", "paper")}


def get_profile(name: str, data: str = "", autoencoder: str = "") -> Profile:
    """The profile `name`; `data` and `autoencoder`, where given, replace what it reads. ValueError lists the names."""
    if name not in PROFILES:
        raise ValueError(f"unknown profile {name!r}; the profiles are {', '.join(PROFILES)}")
    profile = PROFILES[name]
    changes = {key: value for key, value in (("path", data), ("autoencoder_name", autoencoder)) if value}
    return replace(profile, data=replace(profile.data, **changes))
