import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import dit_repro.evaluation
from dit_repro.cli import main
from dit_repro.evaluation import doctor, evaluate, load_classifier, write_npz
from dit_repro.latents import ImageSource


def run(*arguments):
    return CliRunner().invoke(main, ["fid", *map(str, arguments)])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    images = ImageSource.embedded("test", limit_per_class=20).images(range(200))
    (folder / "samples").mkdir()
    for i, image in enumerate(images[:60:2]):
        Image.fromarray(image.movedim(0, -1).numpy()).save(folder / "samples" / f"{i:03d}.png")
    write_npz(folder / "reference.npz", images[1:60:2])
    write_npz(folder / "real.npz", images)
    return folder


def test_a_folder_is_scored_against_an_npz_and_the_protocol_is_written(files, tmp_path):
    ran = run("score", files / "samples", "--reference", files / "reference.npz", "--features", "classifier",
              "--out", tmp_path / "scores.json", "--cache", tmp_path / "cache")
    assert ran.exit_code == 0, ran.output
    assert "Frechet distance (small classifier) = " in ran.output
    assert "30 images against 30" in ran.output
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["fingerprint"] in ran.output
    assert scores["protocol"]["features_sha256"] == load_classifier().sha256
    assert run("npz", files / "samples", tmp_path / "samples.npz").exit_code == 0
    run("score", tmp_path / "samples.npz", "--reference", files / "reference.npz", "--features", "classifier",
        "--out", tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == scores


def test_what_cannot_be_scored_is_one_line(files, tmp_path):
    samples, reference = files / "samples", files / "reference.npz"
    for arguments, said in (
            (("score", tmp_path / "none", "--reference", reference, "--features", "classifier"), "no images at"),
            (("score", samples, "--reference", reference, "--feature-weights", tmp_path / "x"), "Download"),
            (("score", samples, "--reference", reference, "--features", "dinov2"), "--feature-weights"),
            (("doctor", "--adm-samples", tmp_path / "x.npz"), "go together")):
        ran = run(*arguments)
        assert ran.exit_code == 1
        assert said in ran.output
        assert "Traceback" not in ran.output


def test_the_doctor_shows_what_each_fault_does(files, monkeypatch):
    ran = run("doctor", "--images", files / "real.npz")
    assert ran.exit_code == 0, ran.output
    for fault in ("two halves", "channels first", "sorted by class, mode adm", "JPEG", "truncated"):
        assert fault in ran.output
    monkeypatch.setattr(doctor, "frechet_distance", lambda a, b: 1.0)
    ran = run("doctor", "--images", files / "real.npz")
    assert ran.exit_code == 1
    assert "wrong        same images on both sides" in ran.output
    assert "do not trust a score" in ran.output


def test_the_doctor_passes_or_fails_public_files(files, tmp_path, monkeypatch):
    """Stand-ins for Inception and for the two public files: the path to a verdict, not the published numbers."""
    class Inception(dit_repro.evaluation.SmallClassifier):
        id = "Inception"

        def __init__(self, weights):
            super().__init__(load_classifier().class_names)
            self.load_state_dict(load_classifier().state_dict())
            self.sha256 = "67"

    monkeypatch.setattr(dit_repro.evaluation, "InceptionFeatures", Inception)
    with np.load(files / "reference.npz") as file:
        arrays = {"arr_0": file["arr_0"]}
    features = load_classifier()(torch.from_numpy(arrays["arr_0"]).movedim(-1, 1))
    for suffix, head in (("", features.pool), ("_s", features.spatial)):
        x = head.double().numpy()
        arrays |= {f"mu{suffix}": x.mean(0), f"sigma{suffix}": np.cov(x, rowvar=False)}
    np.savez(tmp_path / "adm.npz", **arrays)

    scores = evaluate(files / "samples", tmp_path / "adm.npz", Inception(None), reference_count=1_281_167)
    assert scores.protocol.frechet_name() == "FID-30"
    values = {name: (getattr(scores, name), 0.001) for name in doctor.ANCHORS["ADM-G 128"]}
    monkeypatch.setitem(doctor.ANCHORS, "ADM-G 128", values)
    arguments = ("doctor", "--adm-samples", files / "samples", "--adm-reference", tmp_path / "adm.npz")
    ran = run(*arguments, "--anchor", "ADM-G 128")
    assert ran.exit_code == 0, ran.output
    assert ran.output.count("pass") == 5
    ran = run(*arguments)
    assert ran.exit_code == 1
    assert "FAIL  frechet" in ran.output
