from dataclasses import replace

import numpy as np
import pytest

from dit_repro.training import TrainConfig, advice

USUAL = TrainConfig(latents="", num_classes=3, num_steps=400_000)


class Labels:
    """The part of a latent store that advice looks at."""

    def __init__(self, labels, num_classes):
        self.labels, self.num_classes = labels, num_classes
        self.class_names = [f"class {i}" for i in range(num_classes)]

    def __len__(self):
        return len(self.labels)


def store(*counts):
    return Labels(np.arange(len(counts)).repeat(counts), len(counts))


def test_the_papers_run_on_a_large_set_needs_no_advice():
    assert advice(USUAL, store(1_000, 1_000, 1_000)) == []


@pytest.mark.parametrize("config, counts, expected", [
    (replace(USUAL, num_steps=1_000), (1_000,) * 3, "half-life of 6,931 steps, and after 1,000 steps 90% of"),
    (replace(USUAL, num_steps=1_000), (1_000,) * 3, "set ema_decay = 0.995"),
    (USUAL, (3_000, 99, 5), "2 of 3 classes have fewer than 100 images: class 1 (99), class 2 (5)"),
    (replace(USUAL, num_steps=50, ema_warmup=True), (500,) * 3, "1,500 images are seen 9 times each"),
    (replace(USUAL, label_dropout=0.0), (1_000,) * 3, "cannot be guided"),
])
def test_what_will_disappoint_is_said_with_its_numbers(config, counts, expected):
    assert sum(expected in sentence for sentence in advice(config, store(*counts))) == 1
