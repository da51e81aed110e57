from dataclasses import replace

import pytest
import torch

from dit_repro.evaluation import Finding, Protocol, Scores, check_anchors, diagnose, load_classifier
from dit_repro.evaluation.doctor import ANCHORS
from dit_repro.latents import ImageSource


@pytest.fixture(scope="module")
def real():
    source = ImageSource.embedded("test", limit_per_class=80)
    return source.images(range(len(source))), source.labels


@pytest.fixture(scope="module")
def findings(real):
    images, labels = real
    noisy = (images.int() + torch.randint(-20, 21, images.shape, generator=torch.Generator().manual_seed(0)))
    noisy = noisy.clamp(0, 255).byte()
    return diagnose(load_classifier(), images, labels, healthy=lambda positions: images[positions.start:positions.stop],
                    suspects={"noise": noisy[:400], "none": images[400:]})


def one(findings, fault, score="Frechet distance"):
    found, = (finding for finding in findings if (finding.fault, finding.score) == (fault, score))
    return found


def test_a_set_against_itself_is_zero_and_two_halves_are_not(findings):
    assert one(findings, "same images on both sides").after < 1e-9
    assert one(findings, "two halves of the real images").after > 0.05


def test_the_distance_is_blind_to_labels_and_the_distance_of_a_class_is_not(findings):
    assert one(findings, "labels permuted").direction == "same"
    by_class = one(findings, "labels permuted", "mean Frechet distance of a class")
    assert by_class.after > 5 * by_class.before


@pytest.mark.parametrize("fault, score, direction", [
    ("spatial head flattened channels first", "spatial Frechet distance", "up"),
    ("sorted by class, mode adm", "Inception Score", "down"),
    ("sorted by class, mode strict", "Inception Score", "same"),
    ("halved and doubled in size", "Frechet distance", "up"),
    ("JPEG of quality 75", "Frechet distance", "up"),
    ("noise", "Frechet distance", "up"),
])
def test_a_planted_fault_moves_its_score_the_way_it_must(findings, fault, score, direction):
    assert one(findings, fault, score).direction == direction


def test_every_planted_fault_is_measured_and_none_goes_the_wrong_way(findings):
    assert len(findings) == 13
    assert {finding.verdict for finding in findings} <= {"as expected", "within noise"}
    truncated, batch_norm = one(findings, "truncated instead of rounded"), one(findings, "batch norm in train mode")
    assert 0 < abs(truncated.after - truncated.before) < 0.1
    assert batch_norm.after != batch_norm.before


def test_planting_leaves_the_extractor_as_it_was(real):
    classifier = load_classifier()
    before = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    diagnose(classifier, real[0][:200])
    assert all(torch.equal(tensor, before[name]) for name, tensor in classifier.state_dict().items())
    assert not any(module.training for module in classifier.modules())


def test_without_labels_a_file_is_sorted_by_what_the_extractor_sees(real):
    findings = diagnose(load_classifier(), real[0])
    assert one(findings, "sorted by class, mode adm", "Inception Score").direction == "down"
    assert not any("permuted" in finding.fault for finding in findings)


def test_a_verdict_tells_noise_from_a_wrong_harness():
    finding = Finding("fault", "score", 1.0, 1.1, 0.1, "up")
    assert finding.verdict == "within noise"
    assert replace(finding, after=1.3).verdict == "as expected"
    assert replace(finding, after=0.7).verdict == "within noise"
    assert replace(finding, after=0.5).verdict == "wrong"
    assert replace(finding, after=1.5, expected="same").verdict == "wrong"
    assert replace(finding, after=0.5, expected="any").verdict == "as expected"


def test_a_rehearsal_runs_on_images_too_few_to_mean_anything_and_leaves_out_what_they_cannot_give(real):
    images, labels = real[0][:40], torch.arange(40) // 2
    found = diagnose(load_classifier(), images, labels, rehearse=True)
    assert "labels permuted" in {finding.fault for finding in found}
    assert not any("of a class" in finding.score for finding in found)
    found = diagnose(load_classifier(), images, labels // 5, rehearse=True)
    assert any("of a class" in finding.score for finding in found)
    alone = torch.where(torch.arange(40) < 20, 7, torch.arange(40))   # one class of 20, and 20 of one image
    found = diagnose(load_classifier(), images, alone, rehearse=True)
    assert not any("of a class" in finding.score for finding in found)   # from one class a difference has no error


def test_sets_that_do_not_compare_are_refused(real):
    images = real[0][:200]
    with pytest.raises(ValueError, match="191 images: with less than 192, twice the dimension"):
        diagnose(load_classifier(), images[:191])
    for labels in (torch.arange(199), torch.rand(200), torch.zeros(200, 1).long()):
        with pytest.raises(ValueError, match=r"labels of shape .*: expected \(200,\) integers"):
            diagnose(load_classifier(), images, labels)
    with pytest.raises(ValueError, match="pass healthy"):
        diagnose(load_classifier(), images, suspects={"raw weights": images})
    with pytest.raises(ValueError, match="raw weights: 40 images, healthy has 50; draw as many"):
        diagnose(load_classifier(), images, healthy=images[:50], suspects={"raw weights": images[:40]})


def published(**changes):
    protocol = Protocol(50_000, 1_281_167, "99", "Inception", "67", "TensorFlow 1 bilinear", "float32", "torch 2")
    values = {name: value for name, (value, _) in ANCHORS["ADM-G+U 256"].items()}
    scores = Scores(protocol, interval=(3.9, 4.0), kernel_distance=None, kernel_distance_std=None, **values)
    return replace(scores, **changes)


def test_scores_as_published_pass_and_a_shifted_one_fails():
    assert [row.passed for row in check_anchors(published())] == [True] * 5
    rows = check_anchors(published(spatial_frechet=299.0))   # channels first, as a port once had it
    assert [row.score for row in rows if not row.passed] == ["spatial_frechet"]
    swapped = published(precision=0.5309, recall=0.8265)
    assert [row.score for row in check_anchors(swapped) if not row.passed] == ["precision", "recall"]
    assert check_anchors(published(frechet=3.9446))[0].passed


def test_scores_that_published_ones_do_not_speak_about_are_refused():
    with pytest.raises(ValueError, match=r"no anchor 'FFHQ': expected one of ADM-G\+U 256, ADM-G 128"):
        check_anchors(published(), "FFHQ")
    with pytest.raises(ValueError, match="mode strict and Inception"):
        check_anchors(published(protocol=replace(published().protocol, mode="strict")))
    with pytest.raises(ValueError, match="precision was not measured"):
        check_anchors(published(precision=None))
