from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dit_repro.evaluation import (
    FeatureStatistics,
    Protocol,
    bootstrap_interval,
    distance_by_count,
    expected_floor,
    extrapolate,
    frechet_distance,
    influence,
    noise_floor,
    standard_error,
)

INCEPTION = SimpleNamespace(id="Inception", sha256="6726825d", resize="TensorFlow 1 bilinear to 299",
                            packages=("torch", "torch-fidelity"))
SMALL = SimpleNamespace(id="small classifier", sha256="ab12", resize="none", packages=("torch",))
FIELDS = {"num_generated": 10_000, "num_reference": 50_000, "reference_sha256": "99ff"}


@pytest.mark.parametrize("count, head, name", [
    (10_000, "pool", "FID-10K"), (50_000, "pool", "FID-50K"), (1_234, "pool", "FID-1234"),
    (2_000, "spatial", "sFID-2K"),
])
def test_inception_scores_carry_the_number_of_images(count, head, name):
    assert Protocol.of(INCEPTION, **{**FIELDS, "num_generated": count}).frechet_name(head) == name


def test_no_other_features_are_called_fid():
    protocol = Protocol.of(SMALL, **FIELDS)
    assert protocol.frechet_name() == "Frechet distance (small classifier)"
    assert protocol.frechet_name("spatial") == "spatial Frechet distance (small classifier)"
    assert "FID" not in protocol.report(1.5)
    with pytest.raises(ValueError, match="'pool' or 'spatial'"):
        protocol.frechet_name("logits")


def test_a_report_says_the_interval_and_both_counts():
    protocol = Protocol.of(SMALL, **FIELDS)
    assert protocol.report(1.5, (1.25, 1.75)) == (
        "Frechet distance (small classifier) = 1.50 (95% interval 1.25 to 1.75), 10,000 images against 50,000, "
        f"protocol {protocol.fingerprint}")


@pytest.mark.parametrize("name", [field.name for field in fields(Protocol)])
def test_a_change_in_any_field_changes_the_fingerprint_and_is_named(name):
    protocol = Protocol.of(SMALL, **FIELDS)
    other = replace(protocol, **{name: 7 if isinstance(getattr(protocol, name), int) else "other"})
    assert other.fingerprint != protocol.fingerprint
    with pytest.raises(ValueError, match=f"do not compare: {name} .* against (7|'other')"):
        protocol.compare(other)
    protocol.compare(other, vary=[name])


def test_equal_protocols_compare_and_an_unknown_field_is_refused():
    protocol = Protocol.of(SMALL, **FIELDS)
    protocol.compare(replace(protocol))
    with pytest.raises(ValueError, match=r"no such field: cfg\. Fields: num_generated"):
        protocol.compare(protocol, vary=["cfg"])


def gaussian(n, dim, seed):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def statistics(x):
    return FeatureStatistics(x.shape[1]).update(x)


def test_bootstrap_interval_covers_the_mean_over_fresh_samples():
    reference = statistics(gaussian(20_000, 3, 0))
    samples = [gaussian(200, 3, seed) + 0.5 for seed in range(1, 41)]
    truth = np.mean([frechet_distance(statistics(x), reference) for x in samples])
    intervals = [bootstrap_interval(x, reference, replicates=50) for x in samples]
    covered = np.mean([low <= truth <= high for low, high in intervals])
    assert 0.85 <= covered < 1
    assert bootstrap_interval(samples[0], reference, replicates=50) == intervals[0]


def test_standard_error_is_the_spread_over_fresh_samples():
    reference = statistics(gaussian(20_000, 8, 0))
    samples = [1.3 * gaussian(300, 8, seed) + 0.2 for seed in range(1, 121)]
    spread = np.std([frechet_distance(statistics(x), reference) for x in samples])
    assert np.mean([standard_error(x, reference) for x in samples[:20]]) == pytest.approx(spread, rel=0.2)
    low, high = bootstrap_interval(samples[0], reference, replicates=100)
    assert standard_error(samples[0], reference) == pytest.approx((high - low) / 3.92, rel=0.3)


@pytest.mark.parametrize("n", [40, 400])
def test_influence_is_what_leaving_an_image_out_changes(n):
    x, reference = 1.3 * gaussian(n, 6, 1) + 0.3, statistics(gaussian(500, 6, 0))
    whole = frechet_distance(statistics(x), reference)
    left_out = [(n - 1) * (whole - frechet_distance(statistics(torch.cat([x[:i], x[i + 1:]])), reference))
                for i in range(20)]
    found = influence(x, reference)[:20]
    assert np.corrcoef(found, left_out)[0, 1] > 0.99
    assert found.std().item() == pytest.approx(np.std(left_out, ddof=1), rel=10 / n)


def test_standard_error_stands_fewer_samples_than_dimensions_and_a_point():
    reference = statistics(gaussian(500, 30, 0))
    assert 0 < standard_error(gaussian(20, 30, 1), reference) < frechet_distance(
        statistics(gaussian(20, 30, 1)), reference)
    assert standard_error(torch.ones(20, 30), reference) == 0


def test_distance_falls_with_the_count_and_extrapolates_to_the_truth():
    x = gaussian(8_000, 10, 1) * 1.2
    reference = statistics(gaussian(100_000, 10, 0))
    counts = [250, 500, 1_000, 2_000, 4_000]
    distances = distance_by_count(x, reference, counts, repeats=8)
    assert distances.shape == (5, 8)
    means = distances.mean(1)
    assert (np.diff(means) < 0).all()
    truth = 10 * 0.2**2
    for value in extrapolate(counts, means).values():
        assert abs(value - truth) < 0.03 < means[0] - truth


def test_extrapolation_recovers_exact_polynomials_in_one_over_n():
    counts = np.array([1_000, 2_000, 5_000, 10_000])
    fits = extrapolate(counts, 3 + 400 / counts)
    assert fits == pytest.approx({"linear": 3, "quadratic": 3}, abs=1e-10)
    assert extrapolate(counts, 3 + 400 / counts - 5e4 / counts**2)["quadratic"] == pytest.approx(3, abs=1e-10)


def test_counts_that_cannot_be_drawn_or_fitted_are_refused():
    x = gaussian(100, 3, 0)
    with pytest.raises(ValueError, match=r"from 2 to 100, with 100 features given, found \[50, 200\]"):
        distance_by_count(x, statistics(x), [50, 200])
    with pytest.raises(ValueError, match="at least 3 different counts"):
        extrapolate([10, 20], [1.0, 2.0])


def test_the_floor_of_normal_features_is_the_one_their_spectrum_predicts():
    generator = torch.Generator().manual_seed(0)
    white = torch.randn(8_000, 10, generator=generator, dtype=torch.float64)
    uneven = white * torch.logspace(0, -2, 10, dtype=torch.float64)
    for x, known in ((white, (2 * 10 + 10 * 11 / 2) / 1_000), (uneven, None)):
        expected = expected_floor(FeatureStatistics(10).update(x), 1_000)
        assert known is None or expected == pytest.approx(known, rel=0.02)
        assert noise_floor(x, (1_000,), repeats=60).mean() == pytest.approx(expected, rel=0.1)


def test_the_two_subsets_of_a_floor_are_disjoint():
    x = torch.arange(10.0)[:, None].double()          # halves of one dimension: means and variances tell them apart
    distances = noise_floor(x, (5,), repeats=50)[0]
    assert distances.min() > 0
    with pytest.raises(ValueError, match="from 2 to 5, with 10 features given for 2 disjoint sets"):
        noise_floor(x, (6,))
