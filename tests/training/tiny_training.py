"""A model and a latent store small enough to train for hundreds of steps in a second."""
import os
from pathlib import Path

import numpy as np
import torch

from dit_repro.files import sha256, write_json
from dit_repro.latents.store import FORMAT, FORMAT_VERSION
from dit_repro.models import DIT_CONFIGS, DiTConfig
from dit_repro.training import TrainConfig

DIT_CONFIGS["DiT-test/4"] = DiTConfig(depth=2, width=32, heads=2, patch_size=4)   # 4 tokens


def write_store(path, num_images=40, num_classes=3):
    """A latent store of smooth random latents that depend on their class."""
    path.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    labels = np.arange(num_images) % num_classes
    moments = np.concatenate([draw.normal(size=(num_images, 2, 4, 8, 8)) + labels[:, None, None, None, None],
                              np.full((num_images, 2, 4, 8, 8), -3.0)], axis=2).astype("float16")
    np.save(path / "labels.npy", labels)
    np.save(path / "shard-00000.npy", moments)
    shard = {"file": "shard-00000.npy", "rows": num_images, "sha256": sha256(path / "shard-00000.npy")}
    write_json(path / "manifest.json", {
        "format": FORMAT, "format_version": FORMAT_VERSION, "complete": True, "count": num_images, "shards": [shard],
        "labels_sha256": sha256(path / "labels.npy"), "class_names": [str(i) for i in range(num_classes)],
        "latent_shape": [4, 8, 8], "scale_factor": 0.9, "dtype": "float16"})
    return path


def tiny_config(latents, **changes):
    settings = {"model": "DiT-test/4", "num_classes": 3, "input_size": 8, "num_steps": 12, "global_batch_size": 8,
                "learning_rate": 1e-2, "ema_decay": 0.9, "log_every": 2, "checkpoint_every": 4, "archive_every": 8,
                "keep_last": 2}
    return TrainConfig(str(latents), **{**settings, **changes})


def final_bytes(folder):
    """What must be the same, bit for bit, however a run was interrupted: its last state and its metrics."""
    folder = Path(folder)
    return sorted(folder.glob("checkpoints/step-*"))[-1].read_bytes(), (folder / "metrics.jsonl").read_bytes()


def threads_and_process(item):
    return item, torch.get_num_threads(), os.getpid()


def fail_on_odd(item):
    if item % 2:
        raise ValueError(f"odd: {item}")
    return item
