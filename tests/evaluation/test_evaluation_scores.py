import json
import os
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

from dit_repro.evaluation import (
    FeatureExtractor,
    Features,
    FeatureStatistics,
    evaluate,
    extract,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_recall,
    write_npz,
)


class Tiny(FeatureExtractor):
    """Seeded random features: pool (N, 5), spatial (N, 2*2*3), logits (N, 4)."""
    id, sha256, resize, batch_size, spatial_channels = "tiny", "00", "none", 16, 3

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv, self.head = nn.Conv2d(3, 5, 4, 2), nn.Linear(5, 4)
        self.seen = 0

    def heads(self, images):
        self.seen += len(images)
        x = self.conv(images.float() / 32).relu()  # (N, 5, 2, 2)
        pool = x.amax((2, 3))
        return Features(pool, x[:, :3].movedim(1, -1).flatten(1), self.head(pool))


def pictures(n, seed=0, brightest=256):
    return torch.randint(0, brightest, (n, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def statistics(x):
    return FeatureStatistics(x.shape[1]).update(x)


@pytest.fixture(scope="module")
def pair():
    return pictures(90, 0, 200), pictures(70, 1)


@pytest.mark.parametrize("mode", ["adm", "strict"])
def test_every_score_is_that_of_all_features_at_once(pair, mode):
    x, y = (Tiny()(images) for images in pair)
    scores = evaluate(*pair, Tiny(), mode, shard_size=40, seeds="0 to 89")
    assert scores.frechet == pytest.approx(frechet_distance(statistics(x.pool), statistics(y.pool)), abs=1e-10)
    assert scores.spatial_frechet == pytest.approx(
        frechet_distance(statistics(x.spatial), statistics(y.spatial)), abs=1e-10)
    assert scores.inception_score == inception_score(x.logits, mode)
    assert (scores.precision, scores.recall) == precision_recall(x.pool, y.pool, mode)
    kernel = kernel_distance(x.pool, y.pool, subset_size=70)
    assert (scores.kernel_distance, scores.kernel_distance_std) == pytest.approx(kernel, abs=1e-12)
    assert scores.interval[0] < scores.frechet < scores.interval[1]
    assert (scores.protocol.num_generated, scores.protocol.num_reference) == (90, 70)
    assert (scores.protocol.mode, scores.protocol.seeds) == (mode, "0 to 89")


def test_a_report_names_every_score_and_what_it_was_measured_under(pair):
    scores = evaluate(*pair, Tiny())
    report = scores.report()
    for part in ("Frechet distance (tiny) =", "spatial Frechet distance (tiny)", "90 images against 70", "precision",
                 "Inception Score", "mode adm", scores.protocol.fingerprint):
        assert part in report
    assert json.loads(json.dumps(scores.to_json()))["fingerprint"] == scores.protocol.fingerprint
    with pytest.raises(ValueError, match="do not compare: mode 'adm' against 'strict'"):
        scores.protocol.compare(evaluate(*pair, Tiny(), "strict").protocol)


def test_any_container_gives_the_same_scores_and_fingerprint(pair, tmp_path):
    images, reference = pair
    write_npz(tmp_path / "images.npz", images)
    write_npz(tmp_path / "reference.npz", reference)
    expected = asdict(evaluate(images, reference, Tiny()))
    for source, count in ((tmp_path / "images.npz", None), (iter(images.split(13)), 90),
                          (lambda positions: images[positions.start:positions.stop], 90)):
        assert asdict(evaluate(source, tmp_path / "reference.npz", Tiny(), count=count)) == expected


def adm_reference(path, images, **drop):
    features = Tiny()(images)
    arrays = {"arr_0": images[:30].movedim(1, -1).numpy()}
    for suffix, head in (("", features.pool), ("_s", features.spatial)):
        x = head.double().numpy()
        arrays |= {f"mu{suffix}": x.mean(0), f"sigma{suffix}": np.cov(x, rowvar=False)}
    np.savez(path, **{name: array for name, array in arrays.items() if name not in drop})


def test_an_adm_reference_gives_distances_to_all_and_precision_to_the_images_in_it(pair, tmp_path):
    images, reference = pair
    adm_reference(tmp_path / "reference.npz", reference)
    scores = evaluate(images, tmp_path / "reference.npz", Tiny(), reference_count=70)
    whole = evaluate(images, reference, Tiny())
    assert scores.frechet == pytest.approx(whole.frechet, abs=1e-9)
    assert scores.spatial_frechet == pytest.approx(whole.spatial_frechet, abs=1e-9)
    x, y = Tiny()(images).pool, Tiny()(reference[:30]).pool
    assert (scores.precision, scores.recall) == precision_recall(x, y)
    assert scores.protocol.num_reference == 70


def test_what_a_reference_lacks_is_left_out_and_not_made_up(pair, tmp_path):
    adm_reference(tmp_path / "pool.npz", pair[1], arr_0=0, mu_s=0, sigma_s=0)
    scores = evaluate(pair[0], tmp_path / "pool.npz", Tiny(), reference_count=70)
    assert scores.frechet > 0
    assert (scores.spatial_frechet, scores.precision, scores.recall, scores.kernel_distance) == (None,) * 4
    assert "precision" not in scores.report()


def test_a_reference_of_other_features_is_refused_before_the_images_are_read(pair, tmp_path):
    np.savez(tmp_path / "inception.npz", mu=np.zeros(7), sigma=np.eye(7))
    extractor = Tiny()
    with pytest.raises(ValueError, match="statistics of 7 dimensions, tiny features have 5"):
        evaluate(pair[0], tmp_path / "inception.npz", extractor, reference_count=70)
    assert extractor.seen == 1
    adm_reference(tmp_path / "reference.npz", pair[1])
    with pytest.raises(ValueError, match="how many images"):
        evaluate(pair[0], tmp_path / "reference.npz", extractor)


def test_features_without_classes_have_no_inception_score(pair):
    class Classless(Tiny):
        def heads(self, images):
            return super().heads(images)._replace(logits=torch.zeros(len(images), 0))

    scores = evaluate(*pair, Classless())
    assert scores.inception_score is None
    assert scores.precision is not None


def test_a_killed_pass_goes_on_behind_its_last_whole_shard(pair, tmp_path):
    images, drawn = pair[0], []

    def draw(positions, stop=90):
        if positions.stop > stop:
            raise KeyboardInterrupt
        drawn.extend(positions)
        return images[positions.start:positions.stop]

    settings = {"count": 90, "cache": tmp_path, "identity": "checkpoint 1", "shard_size": 20}
    with pytest.raises(KeyboardInterrupt):
        extract(lambda positions: draw(positions, stop=50), Tiny(), **settings)
    assert drawn == [*range(40)]
    features = extract(draw, Tiny(), **settings)
    assert drawn == list(range(90))
    whole = extract(images, Tiny())
    assert torch.equal(features.pool, whole.pool)
    assert features.sha256 == whole.sha256
    assert extract(draw, Tiny(), **settings).count == 90
    assert drawn == list(range(90))
    extract(draw, Tiny(), **{**settings, "identity": "checkpoint 2"})
    assert len(drawn) == 180


def test_a_second_mode_costs_no_second_pass(pair, tmp_path):
    extractor = Tiny()
    first = evaluate(*pair, extractor, "adm", cache=tmp_path)
    seen = extractor.seen
    second = evaluate(*pair, extractor, "strict", cache=tmp_path)
    assert extractor.seen == seen + 1   # the trial image
    assert first.frechet == second.frechet


def test_rows_kept_of_a_reference_are_spread_evenly_and_its_statistics_are_of_all():
    images = pictures(50)
    features = extract(images, Tiny(), keep=5, shard_size=15)
    assert torch.equal(features.pool, extract(images, Tiny()).pool[[0, 12, 24, 37, 49]])
    assert features.count == 50
    torch.testing.assert_close(features.statistics.mean, Tiny()(images).pool.double().mean(0))


RANK = """
import json
from test_evaluation_scores import Tiny, pictures
from dit_repro.evaluation import evaluate

def rank(index, world):
    images, drawn = pictures(90, 0, 200), []

    def draw(positions):
        drawn.extend(positions)
        return images[positions.start:positions.stop]

    scores = evaluate(draw, pictures(70, 1), Tiny(), count=90, cache=f"{folder}/cache{world}", shard_size=30,
                      checkpoint_sha256="ab")
    with open(f"{folder}/{world}-{index}.json", "w") as file:
        json.dump({"scores": scores.to_json(), "drawn": drawn[1:]}, file)
"""


def test_one_two_and_four_ranks_agree_and_draw_each_image_once(in_ranks, tmp_path):
    in_ranks(RANK)
    expected = json.loads((tmp_path / "1-0.json").read_text())["scores"]
    for world in (1, 2, 4):
        found = [json.loads((tmp_path / f"{world}-{index}.json").read_text()) for index in range(world)]
        assert sorted(position for rank in found for position in rank["drawn"]) == list(range(90))
        for rank in found:
            scores = rank["scores"]
            assert scores["protocol"] == expected["protocol"]
            for name, value in scores.items():
                if isinstance(value, float):
                    assert value == pytest.approx(expected[name], abs=1e-10), name


MEMORY = """
import resource, sys
import torch
sys.path.insert(0, sys.argv[1])
from test_evaluation_scores import Tiny
from dit_repro.evaluation import Features, extract
torch.set_num_threads(1)

class Wide(Tiny):
    def heads(self, images):
        x = images[:, :, ::4, ::4].float().flatten(1)  # (N, 192)
        return Features(x[:, :8], x, x[:, :4])

def draw(positions):
    generator = torch.Generator().manual_seed(positions.start)
    rows = torch.randint(0, 256, (len(positions), 3, 1, 32), dtype=torch.uint8, generator=generator)
    return rows.expand(-1, -1, 32, -1).contiguous()

Wide.batch_size, peaks = 250, []
for count in (2_000, 2_000, 50_000):
    extract(draw, Wide(), count, shard_size=500)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(peaks[2] - peaks[1])
"""


def test_resident_memory_is_flat_from_2_000_to_50_000_images():
    ran = subprocess.run([sys.executable, "-c", MEMORY, os.path.dirname(__file__)], check=True, capture_output=True,
                         text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert float(ran.stdout) < 12   # MB; the images are 154, their spatial features 38


def test_degenerate_images_are_refused_by_name(pair):
    images, reference = pair
    with pytest.raises(ValueError, match=r"image tensor: 1 image\(s\)\. A score needs more than 3"):
        evaluate(images[:1], reference, Tiny())
    with pytest.raises(ValueError, match=r"reference image tensor: 1 image\(s\)"):
        evaluate(images, reference[:1], Tiny())
    with pytest.raises(ValueError, match="image tensor: all 50 images have the same features"):
        evaluate(torch.full((50, 3, 6, 6), 9, dtype=torch.uint8), reference, Tiny())
    with pytest.raises(ValueError, match="images 0 to 0: expected a uint8 tensor"):
        evaluate(images.float(), reference, Tiny())
    with pytest.raises(ValueError, match="mode 'fast': expected 'adm' or 'strict'"):
        evaluate(images, reference, Tiny(), "fast")
    with pytest.raises(TypeError, match="cfg"):
        evaluate(images, reference, Tiny(), cfg=1.5)


def test_a_feature_that_is_not_a_number_names_its_images(pair):
    class Broken(Tiny):
        def heads(self, images):
            features = super().heads(images)
            return features._replace(pool=features.pool.masked_fill((images == 0).all((1, 2, 3))[:, None], torch.nan))

    images = pair[0].clone()
    images[45] = 0
    with pytest.raises(ValueError, match=r"image tensor, images from 40, pool features: NaN .* 1 of 20 rows \(5\)"):
        evaluate(images, pair[1], Broken(), shard_size=20)


def test_a_cache_is_refused_where_it_could_mix_up_samplers(pair, tmp_path):
    images, reference = pair
    with pytest.raises(ValueError, match="what this sampler draws: pass checkpoint_sha256"):
        evaluate(lambda positions: images[positions.start:positions.stop], reference, Tiny(), count=90, cache=tmp_path)
    with pytest.raises(ValueError, match="pass a function of positions"):
        evaluate(iter(images.split(30)), reference, Tiny(), count=90, cache=tmp_path, checkpoint_sha256="ab")


def test_images_sorted_by_class_are_noticed():
    class Sure(Tiny):
        def heads(self, images):
            features = super().heads(images)
            return features._replace(logits=100 * nn.functional.one_hot(images[:, 0, 0, 0].long() % 4, 4).float())

    images = pictures(6_000)
    by_class = images[(images[:, 0, 0, 0] % 4).argsort(stable=True)]
    with pytest.warns(UserWarning, match="sorted by class"):
        assert evaluate(by_class, images[:100], Sure()).inception_score < 3
    assert evaluate(by_class, images[:100], Sure(), "strict").inception_score > 3.9
