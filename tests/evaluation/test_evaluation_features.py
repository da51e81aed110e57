import hashlib
import json
import os
import pickle

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from stand_ins import make_inception
from torch import nn

from dit_repro.cli import main
from dit_repro.evaluation import FeatureExtractor, Features, InceptionFeatures, load_classifier
from dit_repro.evaluation.classifier import EMBEDDED, accuracy, augment, save_classifier, train_classifier
from dit_repro.latents import ImageSource
from dit_repro.latents.images import write_idx


@pytest.fixture(scope="module")
def held_out():
    source = ImageSource.embedded("test")
    return source.images(range(len(source))), source.labels  # (4000, 3, 32, 32) uint8, (4000,)


def test_the_embedded_classifier_judges_91_of_100_held_out_images_right(held_out):
    images, labels = held_out
    assert len(images) == 4_000
    assert accuracy(load_classifier(), images, labels) >= 0.91


def test_a_flipped_or_blurred_image_is_judged_nearly_as_well(held_out):
    images, labels = held_out[0][::4], held_out[1][::4]
    blurred = nn.functional.avg_pool2d(images.float(), 3, 1, 1).round().byte()
    assert accuracy(load_classifier(), images.flip(-1), labels) >= 0.9
    assert accuracy(load_classifier(), blurred, labels) >= 0.85


def test_the_embedded_weights_are_under_a_megabyte_and_know_their_classes():
    assert (EMBEDDED / "classifier.safetensors").stat().st_size < 1_000_000
    assert load_classifier().class_names[8] == "bag"


def test_features_of_an_image_do_not_depend_on_its_batch(held_out):
    images, classifier = held_out[0][:300], load_classifier()
    together, alone = classifier(images), classifier(images[299:])
    assert [tuple(head.shape) for head in together] == [(300, 96), (300, 256), (300, 10)]
    for head, single in zip(together, alone):
        torch.testing.assert_close(head[299:], single, rtol=1e-4, atol=1e-4)
    classifier.train()  # a call puts it back: batch norm must not see the batch
    torch.testing.assert_close(classifier(images[299:]).pool, alone.pool)


def test_the_spatial_head_is_flattened_with_channels_last(held_out):
    classifier, image = load_classifier(), held_out[0][:1]
    moved = classifier(image.roll(4, dims=3)).spatial.reshape(8, 8, 4)  # 4 pixels are one step of the 8x8 grid
    still = classifier(image).spatial.reshape(8, 8, 4)
    torch.testing.assert_close(moved[2:-2, 3:-2], still[2:-2, 2:-3], rtol=1e-4, atol=1e-4)


def test_training_learns_from_its_seed_alone_and_saved_weights_come_back(tmp_path, held_out):
    images, labels = held_out[0][:512], held_out[1][:512]
    names = load_classifier().class_names
    first, second = (train_classifier(images, labels, names, epochs=1) for _ in range(2))
    for a, b in zip(first.state_dict().values(), second.state_dict().values()):
        assert torch.equal(a, b)
    trained = train_classifier(images, labels, names, epochs=15)
    assert accuracy(trained, held_out[0][512:], held_out[1][512:]) > 0.5
    save_classifier(trained, tmp_path, held_out_accuracy=0.5)
    again = load_classifier(tmp_path)
    assert torch.equal(again(held_out[0][:8]).logits, trained(held_out[0][:8]).logits)
    load_classifier.cache_clear()
    (tmp_path / "classifier.safetensors").write_bytes((EMBEDDED / "classifier.safetensors").read_bytes())
    with pytest.raises(ValueError, match="SHA-256"):
        load_classifier(tmp_path)


def test_augmentation_moves_blurs_and_keeps_the_range(held_out):
    images = held_out[0][:64]
    first, second = (augment(images, torch.Generator().manual_seed(seed)) for seed in (0, 0))
    assert torch.equal(first, second)
    assert first.min() >= 0 and first.max() <= 255
    assert (first.mean((1, 2, 3)) - images.float().mean((1, 2, 3))).abs().max() < 6
    assert (first - images).abs().mean() > 5


class Probe(FeatureExtractor):
    """Three heads of seeded random weights: what a user's own extractor looks like."""
    id, sha256, resize, batch_size = "probe", "00", "none", 2

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), []

    def heads(self, images):
        x = self.layer(images.float().movedim(1, -1))  # (N, H, W, 4)
        self.seen.append((len(images), torch.is_grad_enabled(), torch.backends.cudnn.allow_tf32,
                          torch.get_float32_matmul_precision()))
        return Features(x.mean((1, 2)), x.flatten(1), x.mean((1, 2)))


def test_an_extractor_runs_in_batches_without_gradient_dropout_or_tf32():
    torch.set_float32_matmul_precision("high")
    try:
        before = torch.backends.cudnn.allow_tf32
        probe = Probe()
        images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
        features = probe(images)
        assert probe.seen == [(2, False, False, "highest")] * 2 + [(1, False, False, "highest")]
        assert torch.equal(features.pool, probe(images).pool)
        assert not features.pool.requires_grad
        assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (before, "high")
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("images, found", [
    (torch.zeros(2, 3, 4, 4), r"torch.float32 \(2, 3, 4, 4\)"),
    (torch.zeros(2, 4, 4, 3, dtype=torch.uint8), r"torch.uint8 \(2, 4, 4, 3\)"),
    (np.zeros((2, 3, 4, 4), np.uint8), "ndarray"),
])
def test_images_that_are_not_uint8_nchw_are_refused(images, found):
    with pytest.raises(ValueError, match=f"probe features: expected uint8 images of shape .* found {found}"):
        Probe()(images)


def test_no_image_and_the_wrong_size_are_refused():
    with pytest.raises(ValueError, match="no image given"):
        Probe()(torch.zeros(0, 3, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"32x32 pixels in 3 channels, found \(3, 64, 64\)"):
        load_classifier()(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))


def test_missing_inception_weights_say_where_to_get_them(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .* at .*x\.pth\. Download https://.*6726825d\.pth \(96 MB\)"):
        InceptionFeatures(tmp_path / "x.pth")


def test_another_file_than_the_inception_weights_is_refused_unread(tmp_path):
    (tmp_path / "x.pth").write_bytes(b"not weights")
    with pytest.raises(ValueError, match=r"SHA-256 is .*, expected 6726825d"):
        InceptionFeatures(tmp_path / "x.pth")


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_weights_are_read_without_running_what_a_pickle_holds(tmp_path):
    torch.save({"fc.bias": Harmful(str(tmp_path / "made"))}, tmp_path / "x.pth")
    digest = hashlib.sha256((tmp_path / "x.pth").read_bytes()).hexdigest()
    with pytest.raises(pickle.UnpicklingError):
        InceptionFeatures(tmp_path / "x.pth", sha256=digest)
    assert not (tmp_path / "made").exists()


def test_inception_has_the_three_heads_of_the_adm_evaluator(tmp_path):
    weights = make_inception(tmp_path)
    state = torch.load(weights, weights_only=True)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    extractor = InceptionFeatures(weights, sha256=digest)

    blocks = []
    extractor.network.Mixed_6d.register_forward_hook(lambda module, inputs, output: blocks.append(output.clone()))
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    features = extractor(images)
    assert [tuple(head.shape) for head in features] == [(2, 2048), (2, 2023), (2, 1008)]
    block, = blocks                                      # (2, 768, 17, 17); branch1x1 is its first 192 channels
    assert features.spatial.abs().max() > 0
    for y, x, c in ((0, 0, 0), (5, 9, 3), (16, 16, 6)):  # NHWC: the channel runs fastest
        assert torch.equal(features.spatial[:, (y * 17 + x) * 7 + c], block[:, c, y, x])
    torch.testing.assert_close(features.logits, features.pool @ state["fc.weight"].T)
    assert not torch.allclose(features.pool[0], features.pool[1])
    assert extractor.sha256 == digest


def test_the_command_trains_on_idx_files_and_writes_a_classifier_that_loads(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (64, 28, 28), dtype=np.uint8)
    for split in ("train", "t10k"):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte.gz", np.arange(64, dtype=np.uint8) % 10)
    ran = CliRunner().invoke(main, ["embed", "classifier", "--idx", str(tmp_path), "--out", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    facts = json.loads((tmp_path / "out" / "classifier.json").read_text())
    assert f"held-out accuracy {facts['held_out_accuracy']:.2%}" in ran.output
    assert load_classifier(tmp_path / "out").sha256 == facts["sha256"]
    ran = CliRunner().invoke(main, ["embed", "classifier", "--idx", str(tmp_path / "none")])
    assert ran.exit_code == 1
    assert str(tmp_path / "none") in ran.output
