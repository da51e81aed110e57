import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dit_repro.sampling import draw_labels


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 9))
def test_balanced_labels_take_every_class_equally_often_to_within_one(count, num_classes, seed):
    labels = draw_labels(count, num_classes, "balanced", seed)
    counts = torch.bincount(labels, minlength=num_classes)
    assert len(labels) == count and counts.max() - counts.min() <= 1
    assert torch.equal(labels, draw_labels(count, num_classes, "balanced", seed))


def test_random_labels_scatter_as_a_multinomial_and_balanced_ones_do_not():
    counts = torch.bincount(draw_labels(100_000, 100, "random", seed=3), minlength=100).double()
    chi_square = ((counts - 1000) ** 2 / 1000).sum().item()   # 99 degrees of freedom: mean 99, deviation 14
    assert 50 < chi_square < 160


def test_unknown_policy_and_empty_sets_are_refused():
    with pytest.raises(ValueError, match=r"sorted.*random.*balanced"):
        draw_labels(10, 10, "sorted")
    with pytest.raises(ValueError, match="count=0"):
        draw_labels(0, 10)
