import numpy as np
import pytest
import torch
from scipy.stats import betabinom, norm

from dit_repro.latents import ImageSource, load_autoencoder
from dit_repro.sampling import CollapseDetector, difference_interval, wilson_interval

KINDS = ["solid", "saturated", "out_of_range", "low_variance"]


def draw(n: int, seed: int):
    """Stand-ins for real images, whose contrast varies from one to the next: uint8 pixels and latents."""
    generator = torch.Generator().manual_seed(seed)
    contrast = 0.5 + torch.rand(n, 1, 1, 1, generator=generator)
    latents = contrast * torch.randn(n, 4, 8, 8, generator=generator)
    pixels = 128 + 70 * contrast * torch.randn(n, 3, 16, 16, generator=generator)
    return pixels.round().clamp(0, 255).to(torch.uint8), latents


@pytest.fixture(scope="module")
def fitted():
    return CollapseDetector.fit(*draw(4000, 0), quantile=0.01)


def found(detector, images, latents) -> list[str]:
    row = detector.detect(images[None], latents[None]).iloc[0]
    assert row.collapsed == row[KINDS].any()
    return [kind for kind in KINDS if row[kind]]


def image_and_latents():
    images, latents = draw(3, 5)
    return images[1].clone(), latents[1].clone()


def test_each_planted_collapse_is_found_as_its_kind_and_as_no_other(fitted):
    image, latents = image_and_latents()
    assert found(fitted, image, latents) == []
    red = torch.tensor([200, 30, 30], dtype=torch.uint8).view(3, 1, 1).expand(3, 16, 16)
    assert found(fitted, red, latents) == ["solid"]
    assert found(fitted, torch.zeros_like(image), latents) == ["solid", "saturated"]
    posterized = torch.where(image > 128, 255, 0).to(torch.uint8)
    assert found(fitted, posterized, latents) == ["saturated"]
    beyond = latents.clone()
    beyond[2, 3, 3] = -1.01 * fitted.limit
    assert found(fitted, image, beyond) == ["out_of_range"]
    assert found(fitted, image, torch.ones_like(latents)) == ["low_variance"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_no_numbers_have_collapsed(fitted, value):
    image, latents = image_and_latents()
    latents[0, 0, 0] = value
    assert "out_of_range" in found(fitted, image, latents)
    assert "low_variance" in found(fitted, image, torch.full_like(latents, value))


def test_statistics_are_those_computed_by_hand(fitted):
    images, latents = draw(3, 5)
    latents[2, 0, :2, 0] = 2 * fitted.limit
    measured = fitted.statistics(images, latents)
    pixels, x = images.double().numpy(), latents.double().numpy()
    expected = {
        "mean_pixel": pixels.mean((1, 2, 3)),
        "pixel_std": [np.mean([channel.std(ddof=1) for channel in image]) for image in pixels],
        "saturated_share": [np.isin(image, (0, 255)).mean() for image in pixels],
        "largest_latent": np.abs(x).max((1, 2, 3)),
        "out_of_range_share": [0, 0, 2 / 256],
        "latent_std": [np.mean([channel.std(ddof=1) for channel in image]) for image in x],
    }
    assert list(measured) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(measured[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("quantile", [0.005, 0.05])
def test_false_positive_rate_of_each_kind_on_other_real_images_is_the_quantile(quantile):
    """Whatever the statistic, the count beyond the k-th of n on m new images is beta-binomial (k, n + 1 - k)."""
    n, m = 4000, 4000
    detector = CollapseDetector.fit(*draw(n, 0), quantile=quantile)
    table = detector.false_positive_rate(*draw(m, 1))
    assert list(table.index) == [*KINDS, "collapsed"] and (table["images"] == m).all()
    k = round(n * quantile)
    low, high = betabinom.ppf([1e-4, 1 - 1e-4], m, k, n + 1 - k)
    for kind in KINDS:
        assert low <= table["count"][kind] <= high, kind
        assert table.low[kind] < table.rate[kind] == table["count"][kind] / m < table.high[kind]
    assert table["count"][KINDS].max() <= table["count"]["collapsed"] <= table["count"][KINDS].sum()


def test_no_more_than_the_quantile_of_the_images_it_was_fitted_on_are_flagged():
    """Also where many real images tie, as those that are black to one tenth and to all."""
    images, latents = draw(200, 0)
    images[:100] = 0
    counts = CollapseDetector.fit(images, latents, quantile=0.01).false_positive_rate(images, latents)["count"]
    assert (counts[KINDS] <= 2).all()


def test_real_images_through_the_embedded_autoencoder_are_not_taken_for_collapsed():
    autoencoder = load_autoencoder("embedded")

    def real(split):
        images = ImageSource.embedded(split, limit_per_class=20).images(np.arange(200))
        latents = autoencoder.encode(images).chunk(2, 1)[0] * autoencoder.scale_factor
        return autoencoder.decode(latents), latents

    detector = CollapseDetector.fit(*real("train"), quantile=0.01)
    table = detector.false_positive_rate(*real("test"))
    assert table["count"]["collapsed"] <= betabinom.ppf(1 - 1e-4, 200, 4 * 2, 201 - 4 * 2)
    black = torch.full((1, 4, 8, 8), 100.0)
    assert detector.detect(autoencoder.decode(black), black).out_of_range.all()


def test_wilson_interval_is_the_published_formula():
    z, n, p = norm.ppf(0.975), 60, 7 / 60
    center, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert wilson_interval(7, 60) == pytest.approx(((center - half) / (1 + z**2 / n), (center + half) / (1 + z**2 / n)))
    assert wilson_interval(0, 60)[0] == 0 < wilson_interval(0, 60)[1]


def test_what_cannot_be_fitted_is_refused_with_the_way_out():
    images, latents = draw(50, 0)
    with pytest.raises(ValueError, match=r"50 real images, quantile=0\.01 needs at least 100"):
        CollapseDetector.fit(images, latents, quantile=0.01)
    with pytest.raises(ValueError, match=r"quantile=0\.7"):
        CollapseDetector.fit(images, latents, quantile=0.7)
    with pytest.raises(ValueError, match="NaN or infinity"):
        CollapseDetector.fit(images, latents / 0, quantile=0.1)
    with pytest.raises(ValueError, match="expected uint8"):
        CollapseDetector.fit(images.float(), latents, quantile=0.1)
    with pytest.raises(ValueError, match=r"\(49, 4, 8, 8\) for 50 images"):
        CollapseDetector.fit(images, latents[1:], quantile=0.1)


def test_interval_of_a_fall_is_the_published_example():
    assert difference_interval(9, 3, 10) == pytest.approx((0.1705, 0.8090), abs=5e-5)  # Newcombe 1998, table II
    low, high = difference_interval(5, 5, 10)
    assert low == pytest.approx(-high)
