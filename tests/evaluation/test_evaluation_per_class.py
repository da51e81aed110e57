import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.stats import kstest

from dit_repro.evaluation import (
    FeatureStatistics,
    class_frechet,
    frechet_distance,
    pixel_std,
    rank_classes,
    replay_labels,
    second_mode,
)
from dit_repro.evaluation.per_class import _dip, _distance, measurable_classes


def test_labels_come_back_from_a_script_that_drew_noise_before_them():
    generator = torch.Generator().manual_seed(3)
    drawn = []
    for _ in range(3):   # what a sampling script does, a batch at a time
        torch.randn(8, 4, 2, 2, generator=generator)
        drawn.append(torch.randint(0, 1_000, (8,), generator=generator))
    assert torch.equal(replay_labels(3, 20, 1_000, 8, (4, 2, 2)), torch.cat(drawn)[:20])
    assert not torch.equal(replay_labels(3, 20, 1_000, 8), torch.cat(drawn)[:20])
    at_once = torch.randint(0, 10, (20,), generator=torch.Generator().manual_seed(5))
    assert torch.equal(replay_labels(5, 20, 10), at_once)


def test_pixel_std_is_numpys_in_units_of_the_full_range():
    images = torch.randint(0, 256, (300, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[7] = 130
    expected = images.numpy().reshape(300, -1).std(1) / 255
    np.testing.assert_allclose(pixel_std(images), expected, atol=1e-12)
    assert pixel_std(images)[7] == 0
    with pytest.raises(ValueError, match=r"expected uint8 .* found torch.float32"):
        pixel_std(images.float())


def test_classes_are_ranked_from_the_most_degenerate():
    table = rank_classes([0.3, 0.1, 0.2, 0.3, 0.0], [0, 1, 1, 0, 2], ("cat", "dog", "eel"))
    assert list(table.index) == ["eel", "dog", "cat"]
    assert table.loc["dog"].to_dict() == pytest.approx({"mean": 0.15, "lowest": 0.1, "count": 2})
    assert list(rank_classes([1.0, 0.0], [4, 7]).index) == [7, 4]
    with pytest.raises(ValueError, match=r"\(3,\) values for \(2,\) labels"):
        rank_classes([1, 2, 3], [0, 1])


SHAPES = {"normal": lambda rng: rng.normal(size=300), "skewed": lambda rng: rng.exponential(size=300),
          "outliers": lambda rng: rng.standard_t(2, size=300)}


@pytest.mark.parametrize("shape", SHAPES)
def test_one_mode_of_any_shape_passes_for_one(shape):
    p_values = [second_mode(SHAPES[shape](np.random.default_rng(seed))).p_value for seed in range(5)]
    assert min(p_values) > 0.1


def test_uniform_values_give_any_p_value_as_likely():
    p_values = [second_mode(np.random.default_rng(seed).random(100)).p_value for seed in range(40)]
    assert kstest(p_values, "uniform").pvalue > 0.01


@pytest.mark.parametrize("seed", range(3))
def test_five_collapsed_images_in_a_hundred_are_a_second_mode(seed):
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.normal(0.30, 0.05, 950), np.zeros(50)])   # images of one color: many equal values
    found = second_mode(values)
    assert found.p_value < 0.05
    assert found.below == pytest.approx(0.05, abs=0.002)
    assert found.split == pytest.approx(0, abs=1e-4)
    above = second_mode(1 - values)
    assert above.p_value < 0.05
    assert above.split == pytest.approx(1, abs=1e-4)
    scaled = second_mode(100 * values + 7)
    assert scaled.dip == pytest.approx(found.dip, abs=1e-6)


def smallest_distance_to_one_mode(x):
    """The dip by linear programs: for each place of the mode, the nearest function convex before it, concave behind."""
    n, best = len(x), 1.0
    for k in range(n):              # the function's values up to the mode, those from it on, and the distance
        left, right = np.eye(k + 1, n + 2), np.eye(n + 2)[k + 1:n + 1]
        distance = np.eye(n + 2)[n + 1]
        before = np.arange(n) / n   # the empirical distribution function steps from `before` to `after` at each x
        after = before + 1 / n
        rows = [*left - distance, *-left - distance, *right - distance, *-right - distance, left[-1] - right[0]]
        bounds = [*before[:k + 1], *-after[:k], -before[k], after[k], *before[k + 1:], *-after[k:], 0]
        for values, places, sign in ((left, x[:k + 1], 1), (right, x[k:], -1)):
            slopes = np.diff(values, axis=0) / np.diff(places)[:, None]
            bends = sign * -np.diff(slopes, axis=0) if len(slopes) > 1 else slopes[:0]
            rows += [*bends, *-slopes]
            bounds += [0] * (len(bends) + len(slopes))
        found = linprog(distance, np.array(rows), np.array(bounds), bounds=[(None, None)] * (n + 2))
        best = min(best, found.fun)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_dip_is_the_smallest_distance_to_any_distribution_of_one_mode(seed):
    rng = np.random.default_rng(seed)
    x = np.sort(np.r_[rng.normal(size=5), rng.normal(4 * (seed % 2), 0.3, size=2 + seed)])
    assert _dip(x)[0] == pytest.approx(smallest_distance_to_one_mode(x), abs=1e-6)


def test_evenly_spaced_values_have_the_smallest_dip_and_two_far_groups_the_largest():
    even = np.arange(50.0)
    assert second_mode(even).dip == pytest.approx(1 / 100, abs=1e-6)
    assert second_mode(even).p_value == 1
    found = second_mode(np.r_[even, even + 1e6])
    assert found.dip == pytest.approx(1 / 4, abs=1e-3)
    assert found.p_value < 0.01


def test_values_without_a_distribution_are_refused():
    for values in (np.zeros(50), np.arange(5), [np.nan] * 20, np.zeros((5, 5))):
        with pytest.raises(ValueError, match="at least 10 finite values"):
            second_mode(values)


def classes(n, seed, shifted=None):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(4).repeat_interleave(n)
    features = torch.randn(4 * n, 6, generator=generator) + 10 * labels[:, None]
    features[labels == shifted] += 0.8
    order = torch.randperm(4 * n, generator=generator)
    return features[order], labels[order]


def test_a_class_that_is_off_comes_first_and_the_others_lie_at_their_floor():
    table = class_frechet(*classes(150, 0, shifted=2), *classes(200, 1), ("a", "b", "c", "d"))
    assert table.index[0] == "c"
    assert table.loc["c", "excess"] == pytest.approx(6 * 0.8**2, rel=0.3)
    assert table.excess.drop("c").abs().max() < 0.3 < table.distance.min() + 0.3
    assert (table.images == 100).all()   # as many as half of the reference: both sides of excess have the same N


def test_the_distance_of_a_class_shrinks_with_its_images_and_the_excess_does_not():
    few, many = (class_frechet(*classes(n, 0), *classes(2 * n, 1)) for n in (20, 400))
    assert few.distance.mean() > 5 * many.distance.mean()
    assert abs(few.excess.mean()) < 0.5 * few.distance.mean()


def test_a_class_without_enough_images_is_left_out():
    features, labels = classes(10, 0)
    others = labels.clone()
    others[(labels == 3).nonzero()[3:]] = 0
    assert sorted(class_frechet(features, labels, features, others).index) == [0, 1, 2]
    with pytest.raises(ValueError, match="no class has 2 of the 4 generated and 4 of the 40 reference images"):
        class_frechet(features[:4], torch.arange(4), features, labels)
    assert measurable_classes(torch.tensor([5, 5, 6, -1, -1, 8, 8]), torch.tensor([5, 5, 5, 5, 6, 6, 6, 6, -1])) == [5]


def test_labels_that_do_not_fit_are_refused():
    features, labels = classes(10, 0)
    for some, others in ((labels[1:], labels), (labels, labels.double()), (labels[:, None], labels),
                         (labels > 1, labels)):
        with pytest.raises(ValueError, match=r"expected \(40,\) integers, one for each image"):
            class_frechet(features, some, features, others)
    with pytest.raises(ValueError, match="labels from 0 to 3 and 3 class names"):
        class_frechet(features, labels, features, labels, ("a", "b", "c"))


def test_few_images_of_many_features_have_the_distance_of_their_statistics():
    x, y = (torch.randn(n, 30, generator=torch.Generator().manual_seed(n)) + 5 for n in (8, 60))
    assert _distance(x, y) == pytest.approx(frechet_distance(*(FeatureStatistics(30).update(z) for z in (x, y))))
    assert _distance(x, x) < 1e-12
