from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dit_repro.evaluation import Features
from dit_repro.stability import behavior, check_behavior


class Store(SimpleNamespace):
    def __len__(self):
        return len(self.labels)


@pytest.fixture
def say(monkeypatch):
    """Runs the check on a run whose samples have given features; real images of class c lie around 10 c."""
    draw = torch.Generator().manual_seed(0)
    labels = np.arange(4).repeat(100)
    real = torch.from_numpy(labels)[:, None] * 10.0 + torch.randn(400, 6, generator=draw)
    store = Store(labels=labels, latent_shape=(6,), manifest={"autoencoder": {"id": "any"}},
                  latents=lambda rows, *_: real[rows])
    monkeypatch.setattr(behavior.LatentStore, "open", lambda path: store)
    monkeypatch.setattr(behavior, "load_autoencoder", lambda name: SimpleNamespace(decode=lambda latents: latents))
    run = SimpleNamespace(config=lambda: SimpleNamespace(latents="", num_classes=4, schedule="linear"),
                          load_model=lambda: None)

    def check(features):
        monkeypatch.setattr(behavior, "sample", lambda model, labels, *_, **__: features(labels, real, draw))
        return " ".join(check_behavior(run, lambda x: Features(x, x, x), 80))

    return check


def test_a_healthy_run_is_said_to_be_one(say):
    said = say(lambda labels, real, draw: labels[:, None] * 10.0 + torch.randn(80, 6, generator=draw))
    assert "2.00 bits" in said and "they are used" in said and "REPEATED" not in said


def test_ignored_labels_are_said(say):
    said = say(lambda labels, real, draw: torch.randint(4, (80, 1), generator=draw) * 10.0
               + torch.randn(80, 6, generator=draw))
    assert "THE LABELS ARE IGNORED" in said


def test_repeated_training_images_are_said(say):
    said = say(lambda labels, real, draw: real[labels * 100 + torch.arange(80) // 4])
    assert "100% of the samples" in said and "TRAINING IMAGES ARE REPEATED" in said
