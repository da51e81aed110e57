import numpy as np
import pytest
import torch

from dit_repro.evaluation import inception_score, kernel_distance, precision_recall


def normal(n, dim=16, seed=0, shift=0.0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) + shift


def test_inception_score_has_its_two_extremes():
    sure = 1e4 * torch.eye(10).repeat(50, 1)
    assert inception_score(sure) == pytest.approx(10, abs=1e-9)
    assert inception_score(torch.zeros(500, 10)) == pytest.approx(1, abs=1e-12)


def test_inception_score_in_file_order_is_torch_fidelitys():
    from torch_fidelity.metric_isc import isc_features_to_metric
    logits = 3 * normal(1_000, 12)
    theirs = isc_features_to_metric(logits, splits=4, shuffle=False)["inception_score_mean"]
    assert inception_score(logits, chunk=250) == pytest.approx(theirs, abs=1e-10)


def test_a_file_sorted_by_class_fools_adm_mode_and_not_strict_mode():
    logits = 1e4 * torch.eye(10).repeat_interleave(100, 0)
    assert inception_score(logits, "adm", chunk=100) == pytest.approx(1, abs=1e-9)
    assert inception_score(logits, "strict", chunk=100) > 9


def test_strict_precision_and_recall_are_torch_fidelitys():
    from torch_fidelity.metric_prc import calculate_precision_recall_full
    generated, reference = 0.8 * normal(300), normal(200, seed=1, shift=0.3)
    precision, recall = calculate_precision_recall_full(generated.double(), reference.double(), 3)
    assert precision != recall
    found = precision_recall(generated, reference, "strict", block=70)
    assert found == pytest.approx((precision, recall), abs=1e-6)


def test_a_sample_inside_one_mode_has_precision_without_recall():
    reference = torch.cat([normal(100), normal(100, shift=50)])
    precision, recall = precision_recall(normal(100, seed=2), reference, "strict")
    assert precision > 0.6
    assert recall < 0.45  # the other mode alone is half of the reference


def test_adm_distances_are_rounded_to_float16():
    reference = torch.tensor([[0.0], [1.0]])   # both balls have radius 1
    generated = torch.tensor([[2.0003]] * 2)   # just outside, and 2.0 in float16
    assert precision_recall(generated, reference, "adm", k=1)[0] == 1
    assert precision_recall(generated, reference, "strict", k=1)[0] == 0


def test_distances_that_overflow_float16_are_taken_in_float32():
    generated, reference = 100 * normal(60, 32), 100 * normal(50, 32, seed=1)
    assert precision_recall(generated, reference, "adm") == precision_recall(generated, reference, "strict")


def test_kernel_distance_of_the_whole_set_is_torch_fidelitys():
    from torch_fidelity.metric_kid import kernel_mmd
    x, y = normal(80).double(), normal(80, seed=1, shift=0.2).double()
    theirs = kernel_mmd(x.numpy(), y.numpy(), kid_kernel="poly", kid_kernel_poly_degree=3, kid_kernel_poly_gamma=None,
                        kid_kernel_poly_coef0=1)
    mean, std = kernel_distance(x, y, subsets=2, subset_size=80)
    assert mean == pytest.approx(theirs, rel=1e-10)
    assert std < 1e-12


def test_kernel_distance_does_not_depend_on_the_number_of_images():
    small, large = (kernel_distance(normal(2_000), normal(2_000, seed=1), subsets=60, subset_size=n) for n in (50, 400))
    for mean, std in (small, large):
        assert abs(mean) < 4 * std / np.sqrt(60) + 0.002


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match="16 dimensions, reference features 8"):
        precision_recall(normal(10), normal(10, 8))
    with pytest.raises(ValueError, match="more than 3 images a side, found 3 and 10"):
        precision_recall(normal(3), normal(10))
    with pytest.raises(ValueError, match="expected 'adm' or 'strict'"):
        inception_score(normal(10), "fast")
    with pytest.raises(ValueError, match="expected 2 to 10, the smaller set"):
        kernel_distance(normal(10), normal(20))
    broken = normal(10)
    broken[4, 2] = torch.nan
    for score in (inception_score, lambda x: precision_recall(x, x), lambda x: kernel_distance(x, x, 1, 5)):
        with pytest.raises(ValueError, match=r"NaN or infinity in 1 of 10 rows \(4\)"):
            score(broken)
