import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dit_repro.evaluation import condition_information, find_copies
from dit_repro.evaluation.behavior import nearest_distance


def test_a_model_that_always_obeys_gives_all_the_bits_of_its_labels():
    labels = np.arange(8).repeat(25)
    found = condition_information(7 - labels, labels)   # another name for each class loses nothing
    assert found.bits == pytest.approx(3.0)
    assert found.bits > 10 * found.chance and found.p_value < 0.01


def test_a_model_that_ignores_its_label_stays_below_what_shuffling_gives():
    draw = np.random.default_rng(3)
    labels, judged = draw.integers(0, 10, 500), draw.integers(0, 10, 500)
    found = condition_information(judged, labels)
    assert 0.05 < found.bits < found.chance   # a finite sample has bits of its own
    assert condition_information(np.zeros(500), labels).bits == pytest.approx(0, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=2, max_size=60))
def test_information_is_symmetric_and_at_most_the_entropy_of_either(pairs):
    a, b = map(np.array, zip(*pairs))
    bits = condition_information(a, b, draws=1).bits
    assert bits == pytest.approx(condition_information(b, a, draws=1).bits, abs=1e-9)
    for values in (a, b):
        share = np.unique(values, return_counts=True)[1] / len(values)
        assert -1e-9 <= bits <= -(share * np.log2(share)).sum() + 1e-9


def test_copies_are_told_from_new_images_of_the_same_kind():
    draw = torch.Generator().manual_seed(0)
    train, held_out, new = torch.randn(3, 400, 16, generator=draw)
    copied = torch.cat([train[:120] + 0.01 * torch.randn(120, 16, generator=draw), new[:280]])
    assert find_copies(new, train, held_out).share < 0.04
    found = find_copies(copied, train, held_out)
    assert 0.30 <= found.share < 0.34
    assert find_copies(train, train, held_out).ratio == 0
    assert find_copies(new, train).share < 0.04 and 0.30 <= find_copies(copied, train).share < 0.34


def test_copies_need_enough_held_out_images_to_say_what_is_ordinary():
    with pytest.raises(ValueError, match=r"99 images to compare with, quantile=0\.01 needs 100"):
        find_copies(torch.zeros(5, 2), torch.zeros(5, 2), torch.zeros(99, 2))
    with pytest.raises(ValueError, match="expected"):
        condition_information([1, 2], [1, 2, 3])


def test_nearest_distance_agrees_with_scipy_across_blocks():
    from scipy.spatial import cKDTree
    a, b = torch.randn(2, 2_500, 3)
    np.testing.assert_allclose(nearest_distance(a, b), cKDTree(b.numpy()).query(a.numpy())[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(nearest_distance(b, b, itself=True), cKDTree(b.numpy()).query(b.numpy(), 2)[0][:, 1],
                               rtol=1e-5, atol=1e-6)
