"""Encoding into a store, resuming, ranks, refusals, and reading it back."""
import json
import multiprocessing
import os
import pickle
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers import AutoencoderKL
from PIL import Image

from dit_repro.cli import main
from dit_repro.latents import ImageSource, LatentStore, encode_to_store, load_autoencoder


@pytest.fixture(scope="module")
def autoencoder_folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("autoencoder")
    AutoencoderKL(latent_channels=4, block_out_channels=(8, 8, 8), layers_per_block=1, norm_num_groups=4,
                  down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
                  mid_block_add_attention=False, sample_size=32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def autoencoder(autoencoder_folder):
    return load_autoencoder(autoencoder_folder)


@pytest.fixture(scope="module")
def source():
    return ImageSource.embedded("test", limit_per_class=5)  # 50 images: shards of 20, 20 and 10


@pytest.fixture(scope="module")
def store(source, autoencoder, tmp_path_factory):
    return encode_to_store(source, autoencoder, tmp_path_factory.mktemp("store"), batch_size=8, shard_size=20)


def contents(folder):
    """Bytes of every file of a store."""
    return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Class folders with good images and one of each kind of damage; returns (root, damaged names)."""
    root = tmp_path_factory.mktemp("tree of ümages")
    rng = np.random.default_rng(0)
    for name, count in (("b cat", 7), ("a dög", 5)):
        (root / name).mkdir()
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)).save(root / name / f"{i} ü.png")
    whole = (root / "b cat" / "0 ü.png").read_bytes()
    (root / "a dög" / "9 cut.png").write_bytes(whole[:len(whole) // 2])
    (root / "a dög" / "9 empty.jpg").touch()
    (root / "b cat" / "1 text.png").write_text("no image")
    return root, ["a dög/9 cut.png", "a dög/9 empty.jpg", "b cat/1 text.png"]


# --- what is stored

def test_moments_are_those_of_the_image_and_of_the_image_flipped_in_pixels(store, source, autoencoder):
    images = source.images(range(50))
    for flipped, pixels in ((False, images), (True, images.flip(-1))):
        expected = autoencoder.encode(pixels)
        stored = store.moments(range(50), [flipped] * 50)
        assert stored.dtype == torch.float32
        assert (stored - expected).abs().max() <= expected.abs().max() * 2 ** -11 + 1e-4  # float16 rounds at 2**-11
    mirrored = autoencoder.encode(images).flip(-1)  # mirroring the latent is not encoding the mirror image
    assert (mirrored - autoencoder.encode(images.flip(-1))).abs().max() > 0.01


def test_random_order_reading_gives_each_row_of_its_own_image(store, source, autoencoder):
    assert store.labels.tolist() == source.labels.tolist() and store.class_names == source.class_names
    every = torch.stack([store.moments(range(50), False), store.moments(range(50), True)], 1)
    indices = torch.randint(50, (200,), generator=torch.Generator().manual_seed(0))
    flipped = torch.rand(200, generator=torch.Generator().manual_seed(1)) < 0.5
    assert torch.equal(store.moments(indices, flipped), every[indices, flipped.long()])
    assert len(store) == 50 and store.num_classes == 10 and store.latent_shape == (4, 8, 8)
    assert store.moments([], []).shape == (0, 8, 8, 8)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says how a file is mapped")
def test_a_row_is_read_without_its_neighbors(store):
    """Without the flag a random row brings along the disk's read-ahead, 8 to 500 times its own size."""
    flags, mapping = {}, None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if store.path.name in line:
            mapping = Path(line.split()[-1]).name
        elif line.startswith("VmFlags") and mapping:
            flags[mapping], mapping = line.split()[1:], None
    assert len(flags) == 3 and all("rr" in shard for shard in flags.values())   # rr: random read advice


def test_latents_have_the_mean_and_deviation_of_their_moments(store):
    draws = 4000
    noise = torch.randn(draws, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    latents = store.latents([7] * draws, [True] * draws, noise).double() / store.scale_factor
    mean, logvar = store.moments([7], [True])[0].double().chunk(2)
    std = (logvar / 2).exp()
    assert ((latents.mean(0) - mean) / std).abs().max() < 5 / draws ** 0.5  # standard errors
    assert (latents.std(0) / std - 1).abs().max() < 5 / (2 * draws) ** 0.5
    assert torch.equal(store.latents([7], [True], torch.zeros(1, 4, 8, 8))[0], mean.float() * store.scale_factor)


def test_manifest_says_what_the_store_was_made_from(store, source, autoencoder):
    manifest = json.loads((store.path / "manifest.json").read_text())
    assert manifest["complete"] is True and manifest["format_version"] == 1
    assert manifest["autoencoder"] == {"id": autoencoder.id, "sha256": autoencoder.sha256}
    assert manifest["scale_factor"] == autoencoder.scale_factor == store.scale_factor
    assert (manifest["resolution"], manifest["dtype"], manifest["count"]) == (32, "float16", 50)
    assert manifest["source"] == source.identity and manifest["class_names"][9] == "ankle boot"
    assert [shard["rows"] for shard in manifest["shards"]] == [20, 20, 10] and manifest["skipped"] == []
    assert np.load(store.path / "shard-00002.npy").shape == (10, 2, 8, 8, 8)


def test_float32_store_holds_the_moments_exactly(source, autoencoder, tmp_path):
    store = encode_to_store(source, autoencoder, tmp_path, batch_size=50, dtype="float32")
    assert torch.equal(store.moments(range(50), False), autoencoder.encode(source.images(range(50))))


def test_moments_that_overflow_the_dtype_are_refused(source, autoencoder, tmp_path, monkeypatch):
    monkeypatch.setattr(type(autoencoder), "encode", lambda self, images: torch.full((len(images), 8, 8, 8), 1e6))
    with pytest.raises(RuntimeError, match="not finite in float16"), np.errstate(over="ignore"):
        encode_to_store(source, autoencoder, tmp_path)
    assert not list(tmp_path.glob("*.npy"))


def test_store_survives_pickling_without_its_pages(store):
    data = pickle.dumps(store)
    assert len(data) < 5000  # the moments alone are 100 KB
    assert torch.equal(pickle.loads(data).moments([3, 49], [0, 1]), store.moments([3, 49], [0, 1]))


# --- resuming and ranks

def test_encoding_killed_in_the_middle_resumes_to_the_same_bytes_without_encoding_again(
        store, source, autoencoder, tmp_path, monkeypatch):
    encode, seen, dies = type(autoencoder).encode, [], True

    def counted(self, images):
        seen.append(len(images))
        if dies and len(seen) == 9:  # in the second shard
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, images)

    monkeypatch.setattr(type(autoencoder), "encode", counted)
    child = multiprocessing.get_context("fork").Process(
        target=encode_to_store, args=(source, autoencoder, tmp_path), kwargs={"batch_size": 8, "shard_size": 20})
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"not complete: 1 of 3 shards are encoded\. Run the same encode again"):
        LatentStore.open(tmp_path)
    dies = False
    encode_to_store(source, autoencoder, tmp_path, batch_size=8, shard_size=20)
    assert sum(seen) == 2 * 30  # plain and flipped of the 30 images that were not finished
    assert contents(tmp_path) == contents(store.path)


def test_memory_does_not_grow_with_the_number_of_shards(autoencoder, tmp_path):
    peaks = {}
    for count in (20, 40, 200):   # the first for what is allocated once
        source = ImageSource.embedded("test", limit_per_class=20).take(range(count))
        tracemalloc.start()   # it sees numpy's arrays, which shards are
        encode_to_store(source, autoencoder, tmp_path / str(count), batch_size=20, shard_size=20)
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    shard = (tmp_path / "40" / "shard-00000.npy").stat().st_size
    assert peaks[200] - peaks[40] < 2 * shard   # ten shards against two


def test_complete_and_matching_store_is_returned_without_encoding(store, source, autoencoder, monkeypatch):
    monkeypatch.setattr(type(autoencoder), "encode", lambda self, images: pytest.fail("encoded again"))
    again = encode_to_store(source, autoencoder, store.path, batch_size=3, shard_size=7)
    assert again.manifest == store.manifest


def test_shard_that_lost_its_record_or_its_file_is_encoded_again(store, source, autoencoder, tmp_path):
    for name, data in contents(store.path).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "shard-00000.json").unlink()
    (tmp_path / "shard-00001.npy").unlink()
    encode_to_store(source, autoencoder, tmp_path, batch_size=8, shard_size=20)
    assert contents(tmp_path) == contents(store.path)


def test_shards_of_another_source_are_not_taken_over(source, autoencoder, tmp_path):
    encode_to_store(ImageSource.embedded("train", 5), autoencoder, tmp_path, shard_size=20)
    (tmp_path / "manifest.json").unlink()
    store = encode_to_store(source, autoencoder, tmp_path, shard_size=20)
    fresh = autoencoder.encode(source.images(range(20)))
    assert (store.moments(range(20), False) - fresh).abs().max() < 0.01


def encode_as_rank(rank, source, autoencoder, path, log):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", DIT_REPRO_PROGRESS=str(log))
    torch.set_num_threads(1)
    assert len(encode_to_store(source, autoencoder, path, batch_size=8, shard_size=20)) == 50


def test_two_ranks_share_the_shards_and_end_with_the_bytes_of_one(store, source, autoencoder, tmp_path):
    logs = [tmp_path / "log0", tmp_path / "log1"]
    ranks = [multiprocessing.get_context("fork").Process(
        target=encode_as_rank, args=(rank, source, autoencoder, tmp_path / "store", logs[rank])) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert contents(tmp_path / "store") == contents(store.path)
    for rank, share in ((0, "30/30"), (1, "20/20")):  # shards 0 and 2, shard 1: nobody encodes another's, none twice
        assert f"rank {rank} of 2" in logs[rank].read_text() and share in logs[rank].read_text()


# --- damaged images

@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images_are_left_out_listed_and_not_counted(tree, autoencoder, tmp_path, workers):
    root, damaged = tree
    source = ImageSource.folder(root, 32, on_damaged="skip")
    store = encode_to_store(source, autoencoder, tmp_path, batch_size=3, shard_size=6, workers=workers)
    assert [image["file"] for image in store.manifest["skipped"]] == damaged
    assert all(image["reason"] for image in store.manifest["skipped"])
    assert len(store) == store.manifest["count"] == 12 and store.manifest["source"]["count"] == 15
    assert store.class_names == ("a dög", "b cat") and store.labels.tolist() == [0] * 5 + [1] * 7
    assert [shard["rows"] for shard in store.manifest["shards"]] == [5, 4, 3]
    good = [i for i in range(15) if source.file(i) not in damaged]
    expected = autoencoder.encode(source.images(good))
    assert (store.moments(range(12), False) - expected).abs().max() < 0.01  # each row is still of its own image


def test_damaged_image_stops_encoding_with_its_path_and_skipping_goes_on_from_there(tree, autoencoder, tmp_path):
    root, damaged = tree
    clean = [file for file in sorted(root.rglob("*")) if file.is_file() and file.stat().st_size]
    other = tmp_path / "tree"
    for file in clean:  # without the zero-byte file, which is refused before anything is encoded
        (other / file.parent.name).mkdir(parents=True, exist_ok=True)
        (other / file.parent.name / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=rf"damaged image .*tree/{damaged[0]} \(.*--on-damaged skip"):
        encode_to_store(ImageSource.folder(other, 32), autoencoder, tmp_path / "store", shard_size=5, workers=1)
    first = (tmp_path / "store" / "shard-00000.npy").stat().st_mtime_ns
    source = ImageSource.folder(other, 32, on_damaged="skip")
    store = encode_to_store(source, autoencoder, tmp_path / "store", shard_size=5, workers=1)
    assert len(store) == 12 and (tmp_path / "store" / "shard-00000.npy").stat().st_mtime_ns == first


def test_shard_or_source_of_damaged_images_alone(autoencoder, tmp_path):
    (tmp_path / "tree" / "a").mkdir(parents=True)
    for i in range(3):
        (tmp_path / "tree" / "a" / f"{i}.png").write_text("no image")
    with pytest.raises(ValueError, match="not one of 3 images could be read"):
        encode_to_store(ImageSource.folder(tmp_path / "tree", 32, "skip"), autoencoder, tmp_path / "s", workers=0)
    Image.new("RGB", (32, 32)).save(tmp_path / "tree" / "a" / "9.png")
    source = ImageSource.folder(tmp_path / "tree", 32, "skip")
    store = encode_to_store(source, autoencoder, tmp_path / "t", shard_size=1, workers=0)
    assert len(store) == 1 and store.moments([0], [False]).shape == (1, 8, 8, 8)


# --- refusals

def test_another_autoencoder_or_resolution_is_refused_with_both_values(store, source, autoencoder, tmp_path):
    other = load_autoencoder(autoencoder.id)
    other.id, other.sha256 = "sd-vae-ft-mse", "9" * 64
    for attempt in (lambda: LatentStore.open(store.path, other),
                    lambda: encode_to_store(source, other, store.path)):
        with pytest.raises(ValueError) as error:
            attempt()
        for part in (str(store.path), autoencoder.id, autoencoder.sha256[:8], "sd-vae-ft-mse", "99999999"):
            assert part in str(error.value)
    with pytest.raises(ValueError, match="made with resolution 32, asked for 256"):
        LatentStore.open(store.path, resolution=256)
    other.sha256, other.scale_factor = autoencoder.sha256, 0.5
    with pytest.raises(ValueError, match=r"made with scale_factor 0\.18215, asked for 0\.5"):
        LatentStore.open(store.path, other)
    assert len(LatentStore.open(store.path, autoencoder, resolution=32)) == 50


def test_the_same_weights_under_another_name_are_accepted(store, source, autoencoder):
    other = load_autoencoder(autoencoder.id)
    other.id = "a copy"
    assert len(encode_to_store(source, other, store.path)) == len(LatentStore.open(store.path, other)) == 50


def test_complete_store_of_other_images_or_dtype_is_refused_and_untouched(store, autoencoder, source):
    before = contents(store.path)
    with pytest.raises(ValueError, match=r"made with source embedded Fashion-MNIST, test.* asked for .*train"):
        encode_to_store(ImageSource.embedded("train", 5), autoencoder, store.path)
    with pytest.raises(ValueError, match="made with dtype 'float16', asked for 'float32'"):
        encode_to_store(source, autoencoder, store.path, dtype="float32")
    assert contents(store.path) == before


def test_unfinished_store_keeps_its_shard_size_and_one_without_a_shard_keeps_nothing(
        source, autoencoder, tmp_path, monkeypatch):
    encode, images_before_failing = type(autoencoder).encode, 0

    def failing(self, images):
        nonlocal images_before_failing
        images_before_failing -= len(images)
        return encode(self, images) if images_before_failing >= 0 else 1 / 0

    monkeypatch.setattr(type(autoencoder), "encode", failing)
    for shard_size, images in ((10, 0), (20, 50)):   # the second try is by another plan
        images_before_failing = images
        with pytest.raises(ZeroDivisionError):
            encode_to_store(source, autoencoder, tmp_path, shard_size=shard_size)
    assert [path.name for path in tmp_path.glob("shard-*.json")] == ["shard-00000.json"]
    with pytest.raises(ValueError, match="made with shard_size 20, asked for 10"):
        encode_to_store(source, autoencoder, tmp_path, shard_size=10)
    (tmp_path / "manifest.json").unlink()
    images_before_failing = 20
    with pytest.raises(ZeroDivisionError):
        encode_to_store(source, autoencoder, tmp_path, shard_size=20)   # goes on, and says again what it makes
    assert json.loads((tmp_path / "manifest.json").read_text())["shard_size"] == 20
    (tmp_path / "shard-00000.json").write_text("{")   # damaged, so that the shard is encoded once more
    images_before_failing = 1_000
    assert len(encode_to_store(source, autoencoder, tmp_path, shard_size=20)) == 50
    assert images_before_failing == 1_000 - 2 * 50


def test_unknown_format_version_and_broken_manifest_are_refused(store, tmp_path):
    with pytest.raises(FileNotFoundError, match="no latent store at"):
        LatentStore.open(tmp_path)
    for version in (0, 2, None):
        (tmp_path / "manifest.json").write_text(json.dumps({**store.manifest, "format_version": version}))
        with pytest.raises(ValueError, match=rf"format and version are .*{version}\), this code reads .*1\)"):
            LatentStore.open(tmp_path)
    for text in ("[]", "{}", "{"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json"):
            LatentStore.open(tmp_path)


def test_altered_missing_and_truncated_files_are_named(store, tmp_path):
    for name, data in contents(store.path).items():
        (tmp_path / name).write_bytes(data)
    shard = tmp_path / "shard-00001.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    copy = LatentStore.open(tmp_path)
    with pytest.raises(ValueError, match=r"shard-00001\.npy changed"):
        copy.verify()
    shard.write_bytes(data[:-2])
    with pytest.raises(ValueError, match=r"shard-00001\.npy is missing or cut short"):
        LatentStore.open(tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.npy is missing or cut short"):
        LatentStore.open(tmp_path)
    shard.write_bytes(contents(store.path)["shard-00001.npy"])
    (tmp_path / "labels.npy").unlink()
    with pytest.raises(ValueError, match=r"labels\.npy is missing or cut short"):
        LatentStore.open(tmp_path)
    store.verify()


def test_bad_arguments_are_refused_before_any_work(source, autoencoder, store, tmp_path):
    for arguments, message in (({"dtype": "bfloat16"}, "dtype is 'bfloat16'"), ({"batch_size": 0}, "batch_size is 0"),
                               ({"shard_size": -1}, "shard_size -1")):
        with pytest.raises(ValueError, match=message):
            encode_to_store(source, autoencoder, tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()
    with pytest.raises(IndexError, match="indices from 0 to 50, the store holds 50"):
        store.moments([0, 50], [False, False])
    with pytest.raises(IndexError, match="indices from -1"):
        store.moments([-1], [False])
    with pytest.raises(ValueError, match=r"noise of shape \(4, 8, 8\), expected \(2, 4, 8, 8\)"):
        store.latents([0, 1], [False, False], torch.zeros(4, 8, 8))


# --- commands

def test_commands_encode_verify_and_describe_a_store(tree, autoencoder_folder, tmp_path):
    root, _ = tree
    out = str(tmp_path / "store")
    arguments = ["encode", out, "--images", str(root), "--resolution", "32", "--autoencoder", str(autoencoder_folder),
                 "--workers", "0"]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 1 and "9 empty.jpg" in refused.output and "Traceback" not in refused.output
    done = CliRunner().invoke(main, [*arguments, "--on-damaged", "skip"])
    assert done.exit_code == 0 and "12 images of 2 classes, 3 left out" in done.output
    verified = CliRunner().invoke(main, ["latents", "verify", out])
    assert verified.exit_code == 0 and "12 images in 1 shards, every checksum matches" in verified.output
    info = CliRunner().invoke(main, ["latents", "info", out])
    assert info.exit_code == 0 and "scale_factor    0.18215" in info.output
    (tmp_path / "store" / "labels.npy").write_bytes((tmp_path / "store" / "labels.npy").read_bytes()[:-1] + b"\1")
    assert CliRunner().invoke(main, ["latents", "verify", out]).exit_code == 1


def test_encode_says_where_an_option_does_not_apply(autoencoder_folder, tree, tmp_path):
    def encode(*more):
        return CliRunner().invoke(main, ["encode", str(tmp_path / "store"), "--autoencoder", str(autoencoder_folder),
                                         "--workers", "0", *more])

    refused = encode("--resolution", "256")
    assert refused.exit_code == 1 and "--resolution 256: Fashion-MNIST is encoded at 32 pixels" in refused.output
    assert not (tmp_path / "store").exists()
    folders = ("--images", str(tree[0]), "--resolution", "32", "--on-damaged", "skip")
    assert "--shard-size" not in encode(*folders, "--shard-size", "9").output
    again = encode(*folders, "--shard-size", "5")
    assert again.exit_code == 0 and "--shard-size 5: " in again.output and "with 9 images a shard" in again.output
    assert "resolution 32, asked for 64" in encode(*folders[:2], "--resolution", "64", *folders[4:]).output
