from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dit_repro.diffusion import NoiseSchedule
from dit_repro.evaluation import Features
from dit_repro.stability import behavior, check_behavior


class Store(SimpleNamespace):
    def __len__(self):
        return len(self.labels)


@pytest.fixture
def say(monkeypatch):
    """Runs the check on a run whose samples have given features; real images of class c lie around 10 c."""
    draw = torch.Generator().manual_seed(0)

    def check(features, classes=4, samples=80):
        labels = np.arange(classes).repeat(100)
        real = torch.from_numpy(labels)[:, None] * 10.0 + torch.randn(len(labels), 6, generator=draw)
        store = Store(labels=labels, latent_shape=(6,), manifest={"autoencoder": {"id": "any"}},
                      latents=lambda rows, *_: real[rows])
        monkeypatch.setattr(behavior.LatentStore, "open", lambda path: store)
        monkeypatch.setattr(behavior, "load_autoencoder", lambda *_: SimpleNamespace(decode=lambda latents: latents))
        monkeypatch.setattr(behavior, "sample", lambda model, labels, *_, **__: features(labels, real, draw))
        config = SimpleNamespace(latents="", num_classes=classes, noise_schedule=NoiseSchedule.linear,
                                 label_dropout=0.1)
        run = SimpleNamespace(config=lambda: config, load_model=lambda: torch.nn.Identity())
        return " ".join(check_behavior(run, lambda x: Features(x, x, x), samples))

    return check


def obedient(labels, real, draw):
    return labels[:, None] * 10.0 + torch.randn(len(labels), 6, generator=draw)


def test_a_healthy_run_is_said_to_be_one(say):
    said = say(obedient)
    assert "2.00 bits" in said and "they are used" in said and "REPEATED" not in said


def test_of_more_classes_than_samples_some_are_asked_for_several_times(say):
    assert "they are used" in say(obedient, classes=200, samples=100)


def test_one_class_leaves_nothing_to_say_about_labels(say):
    assert "nothing to compare" in say(obedient, classes=1)


def test_ignored_labels_are_said(say):
    said = say(lambda labels, real, draw: torch.randint(4, (len(labels), 1), generator=draw) * 10.0
               + torch.randn(len(labels), 6, generator=draw))
    assert "THE LABELS ARE IGNORED" in said


def test_repeated_training_images_are_said(say):
    said = say(lambda labels, real, draw: real[labels * 100 + torch.arange(len(labels)) // 4])
    assert "100% of the samples" in said and "TRAINING IMAGES ARE REPEATED" in said
