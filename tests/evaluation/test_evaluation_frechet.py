import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dit_repro.evaluation import FeatureStatistics, frechet_distance
from dit_repro.evaluation.frechet import features_at_known_distance


def features(n, dim, seed=0, scale=1.0, shift=0.0):
    """Correlated, off-center samples: a spectrum that falls as 1/k, like Inception's."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(dim, dim)) / np.arange(1, dim + 1)
    return rng.normal(size=(n, dim)) @ mix * scale + rng.normal(size=dim) + shift


def statistics(x):
    return FeatureStatistics(x.shape[1]).update(x)


def gaussian(mean, covariance, count=1_000):
    made = FeatureStatistics(len(mean))
    made.count, made.mean = count, torch.tensor(mean, dtype=torch.float64)
    made._scatter = torch.tensor(covariance, dtype=torch.float64) * (count - 1)
    return made


def nuclear(x, y):
    """Exact for any N: the trace is the nuclear norm of the product of the centered features."""
    a, b = ((z - z.mean(0)) / math.sqrt(len(z) - 1) for z in (x, y))
    return (np.square(x.mean(0) - y.mean(0)).sum() + np.square(a).sum() + np.square(b).sum()
            - 2 * np.linalg.svd(a @ b.T, compute_uv=False).sum())


def test_mean_and_covariance_are_numpys():
    x = features(300, 7)
    made = statistics(x)
    assert made.count == 300
    np.testing.assert_allclose(made.mean, x.mean(0), rtol=1e-13)
    np.testing.assert_allclose(made.covariance, np.cov(x, rowvar=False), rtol=1e-12)


def test_a_large_offset_does_not_cancel_the_covariance():
    x = features(500, 5)
    np.testing.assert_allclose(statistics(x + 1e6).covariance, np.cov(x, rowvar=False), rtol=1e-8, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 2**16))
def test_any_split_into_batches_and_shards_gives_the_same_statistics(sizes, seed):
    sizes.append(2)
    x = features(sum(sizes), 6, seed, scale=10, shift=50)
    whole, in_batches, merged = statistics(x), FeatureStatistics(6), FeatureStatistics(6)
    for part in np.split(x, np.cumsum(sizes)[:-1]):
        in_batches.update(part)
        merged.merge(statistics(part))
    for other in (in_batches, merged):
        assert other.count == whole.count
        np.testing.assert_allclose(other.mean, whole.mean, rtol=1e-12)
        np.testing.assert_allclose(other.covariance, whole.covariance, rtol=1e-9, atol=1e-9)


def test_saved_statistics_come_back_and_other_tools_can_read_them(tmp_path):
    made = statistics(features(50, 4))
    made.metadata = {"features": "small classifier"}
    made.save(tmp_path / "reference.npz")
    again = FeatureStatistics.load(tmp_path / "reference.npz")
    assert (again.count, again.metadata) == (50, made.metadata)
    assert frechet_distance(made, again) < 1e-12
    with np.load(tmp_path / "reference.npz", allow_pickle=False) as file:
        np.testing.assert_allclose(file["sigma"], made.covariance)


def test_statistics_of_another_tool_load_when_told_the_count(tmp_path):
    x = features(80, 3)
    np.savez(tmp_path / "adm.npz", mu=x.mean(0).astype(np.float32), sigma=np.cov(x, rowvar=False))
    with pytest.raises(ValueError, match="how many images"):
        FeatureStatistics.load(tmp_path / "adm.npz")
    assert frechet_distance(FeatureStatistics.load(tmp_path / "adm.npz", count=80), statistics(x)) < 1e-9


@pytest.mark.parametrize("arrays, message", [
    ({"arr_0": np.zeros(3)}, "no mu, sigma"),
    ({"mu": np.zeros(3), "sigma": np.eye(4)}, "do not fit"),
    ({"mu": np.array([0, np.nan]), "sigma": np.eye(2)}, "NaN"),
])
def test_a_file_that_holds_no_statistics_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        FeatureStatistics.load(tmp_path / "bad.npz", count=10)


def test_distance_of_one_dimensional_gaussians_is_the_closed_form():
    assert frechet_distance(gaussian([1.0], [[4.0]]), gaussian([3.0], [[9.0]])) == pytest.approx(4 + 1, abs=1e-12)


def test_distance_of_commuting_gaussians_is_the_closed_form():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(40, 40)))[0]
    s, t = rng.uniform(0.01, 5, 40), rng.uniform(0.01, 5, 40)
    a, b = rng.normal(size=40), rng.normal(size=40)
    expected = np.square(a - b).sum() + np.square(np.sqrt(s) - np.sqrt(t)).sum()
    found = frechet_distance(gaussian(a, basis * s @ basis.T), gaussian(b, basis * t @ basis.T))
    assert found == pytest.approx(expected, abs=1e-9)


def test_distance_agrees_with_the_matrix_square_root_where_that_works():
    x, y = features(400, 30), features(500, 30, seed=1, scale=1.5)
    s, t = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    expected = np.square(x.mean(0) - y.mean(0)).sum() + np.trace(s + t - 2 * scipy.linalg.sqrtm(s @ t).real)
    assert frechet_distance(statistics(x), statistics(y)) == pytest.approx(expected, abs=1e-9)


def test_distance_agrees_with_torch_fidelity_on_the_same_features():
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    x, y = (torch.from_numpy(features(300, 20, seed)) for seed in (0, 1))
    theirs, = fid_statistics_to_metric(*map(fid_features_to_statistics, (x, y)), verbose=False).values()
    assert frechet_distance(statistics(x), statistics(y)) == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("n, m", [(2, 3), (20, 30), (64, 65), (20, 500)])
def test_distance_is_exact_with_fewer_samples_than_dimensions(n, m):
    x, y = features(n, 64), features(m, 64, seed=1)
    assert frechet_distance(statistics(x), statistics(y)) == pytest.approx(nuclear(x, y), abs=1e-10)


@pytest.mark.parametrize("n", [50, 99, 100, 700])
def test_distance_of_samples_from_turned_gaussians_is_the_closed_form_for_any_count(n):
    x, y, exact = features_at_known_distance(n, 100)
    a, b = statistics(x), statistics(y)
    assert frechet_distance(a, b) == pytest.approx(exact, rel=1e-12)
    root = scipy.linalg.sqrtm((a.covariance @ b.covariance).numpy())
    peer = (a.mean - b.mean).square().sum() + (a.covariance + b.covariance).trace() - 2 * np.trace(root).real
    assert (abs(peer.item() / exact - 1) < 1e-11) == (n > 102)   # the root of a singular product is off by far more


@pytest.mark.parametrize("n", [10, 1_000])
def test_distance_to_itself_is_zero_and_both_ways_are_equal(n):
    a, b = statistics(features(n, 32)), statistics(features(n, 32, seed=1))
    assert frechet_distance(a, a) < 1e-12
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), abs=1e-12)
    assert frechet_distance(a, b) > 0.1


def test_constant_features_are_a_point():
    a, b = statistics(np.full((20, 5), 0.1)), statistics(np.full((30, 5), 2.1))
    assert frechet_distance(a, b) == pytest.approx(5 * 4, abs=1e-12)
    spread = statistics(features(100, 5))
    expected = (spread.mean - a.mean).square().sum() + spread.covariance.trace()
    assert frechet_distance(a, spread) == pytest.approx(expected.item(), abs=1e-10)


def test_new_samples_drop_the_cached_factor():
    a, b = statistics(features(100, 8)), statistics(features(100, 8, seed=1))
    before = frechet_distance(a, b)
    assert a.factor() is a.factor()
    a.merge(b)
    assert frechet_distance(a, b) < before / 2
    assert frechet_distance(a, b) == pytest.approx(
        nuclear(np.concatenate([features(100, 8), features(100, 8, seed=1)]), features(100, 8, seed=1)), abs=1e-10)


def test_degenerate_input_is_refused_by_name():
    good = statistics(features(10, 4))
    with pytest.raises(ValueError, match="4 and 5 dimensions"):
        frechet_distance(good, statistics(features(10, 5)))
    with pytest.raises(ValueError, match=r"at least 2 samples, these statistics hold 1"):
        frechet_distance(good, statistics(features(1, 4)))
    x = features(10, 4)
    x[3, 1], x[7, 0] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"2 of 10 rows \(3, 7\)"):
        good.update(x)
    assert good.count == 10
    with pytest.raises(ValueError, match=r"expected shape \(N, D\), found \(4,\)"):
        good.update(np.zeros(4))
    with pytest.raises(ValueError, match="4 dimensions, the features 6"):
        good.update(np.zeros((2, 6)))


RANK = """
from dit_repro.evaluation import FeatureStatistics

def rank(index, world):
    x = torch.load(f"{folder}/x.pt", weights_only=True)
    FeatureStatistics(x.shape[1]).update(x[index::world]).all_reduce().save(f"{folder}/{world}-{index}.npz")
"""


def test_one_two_and_four_ranks_agree_with_no_rank_padded(in_ranks, tmp_path):
    x = torch.from_numpy(features(3, 6, shift=20))  # 3 samples: with 4 ranks one is empty
    torch.save(x, tmp_path / "x.pt")
    in_ranks(RANK)
    for world in (1, 2, 4):
        for index in range(world):
            made = FeatureStatistics.load(tmp_path / f"{world}-{index}.npz")
            assert made.count == 3
            torch.testing.assert_close(made.mean, x.mean(0), rtol=1e-12, atol=0)
            torch.testing.assert_close(made.covariance, x.T.cov(), rtol=1e-10, atol=1e-10)


def test_small_matrices_use_one_thread_and_the_setting_comes_back(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.linalg, "eigh", lambda *args, real=torch.linalg.eigh: seen.append(
        torch.get_num_threads()) or real(*args))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        statistics(features(50, 4)).factor()
        with pytest.raises(ValueError, match="at least 2 samples"):
            statistics(features(1, 4)).factor()
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(threads)
