"""Image sources: the embedded data, IDX files, class folders, ADM's crop, and damaged files."""
import gzip
import hashlib
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dit_repro.latents import ImageSource, make_embedded_images
from dit_repro.latents.images import EMBEDDED, center_crop, read_idx, write_idx


def write_idx_folder(folder, per_class=(3, 2), seed=0):
    """A made-up IDX quadruple whose images hold their own serial number, with shuffled labels."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    for stem, count in zip(("train", "t10k"), per_class):
        labels = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), count))
        images = np.repeat(np.arange(len(labels)), 28 * 28).astype(np.uint8).reshape(-1, 28, 28)
        images[:, 0, 0] = np.arange(len(labels)) // 256
        write_idx(folder / f"{stem}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{stem}-labels-idx1-ubyte.gz", labels)
    return folder


def write_tree(root, sizes=((40, 30), (30, 41))):
    """Two classes with two images each; returns the root."""
    rng = np.random.default_rng(0)
    for name in ("n02 zebra", "n01 ärger"):
        (root / name).mkdir(parents=True)
        for i, (height, width) in enumerate(sizes):
            Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(root / name / f"bild {i} ü.png")
    return root


# --- embedded data and IDX files

@pytest.mark.parametrize("file, digest", [
    ("train-images-idx3-ubyte.gz", "b357b5c2e331e9d91da615271963a30aefba2fc18ca0c0c53e21e901ffbbf80b"),
    ("train-labels-idx1-ubyte.gz", "d69dec862a5a8a44df184110b69de662e2de061cb213ff899b52d5f581b4dbfc"),
    ("t10k-images-idx3-ubyte.gz", "0b9be08d8d603d994ec8b073f636797c496a23452fee9a1b7d191e78125d9928"),
    ("t10k-labels-idx1-ubyte.gz", "40f73765e40e6924dfc459e4a6bc6ea5ee1ea6000ff1296212190eb38677c4af"),
    ("autoencoder/diffusion_pytorch_model.safetensors",
     "d93776ed42931f6ca7db846f37fc8a859c6a5605d02757cc0b91342f61d31192")])
def test_embedded_files_are_the_committed_ones(file, digest):
    assert hashlib.sha256((EMBEDDED / file).read_bytes()).hexdigest() == digest


def test_embedded_splits_hold_equally_many_of_each_class_and_stay_under_ten_megabytes():
    for split, count in (("train", 1600), ("test", 400)):
        source = ImageSource.embedded(split)
        assert np.bincount(source.labels).tolist() == [count] * 10
        assert source.labels.dtype == np.int64
    assert sum(file.stat().st_size for file in EMBEDDED.glob("*.gz")) < 10e6


def test_embedded_splits_share_no_image():
    train, test = (read_idx(EMBEDDED / f"{stem}-images-idx3-ubyte.gz") for stem in ("train", "t10k"))
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in test}


def test_command_keeps_the_first_images_of_each_class_in_their_order(tmp_path):
    folder = write_idx_folder(tmp_path / "idx", per_class=(1603, 402))  # 3 and 2 a class too many
    make_embedded_images(folder, tmp_path / "out")
    for stem, count in (("train", 1600), ("t10k", 400)):
        labels = read_idx(folder / f"{stem}-labels-idx1-ubyte.gz")
        seen, keep = dict.fromkeys(range(10), 0), []
        for i, label in enumerate(labels.tolist()):  # one pass, counting: another way to say "the first of each class"
            seen[label] += 1
            if seen[label] <= count:
                keep.append(i)
        for kind in ("images-idx3", "labels-idx1"):
            name = f"{stem}-{kind}-ubyte.gz"
            assert np.array_equal(read_idx(tmp_path / "out" / name), read_idx(folder / name)[keep])


def test_the_same_array_gives_the_same_file_under_another_name_at_another_time(tmp_path, monkeypatch):
    array = np.arange(200, dtype=np.uint8).reshape(2, 10, 10)
    write_idx(tmp_path / "a.gz", array)
    monkeypatch.setattr("time.time", lambda: 1e9)
    write_idx(tmp_path / "b.gz", array)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_fashion_mnist_is_padded_with_zeros_and_repeated_over_channels(tmp_path):
    folder = write_idx_folder(tmp_path)
    source = ImageSource.idx(folder, "train")
    raw = read_idx(folder / "train-images-idx3-ubyte.gz")
    images = source.images([4, 1])
    assert images.shape == (2, 3, 32, 32) and images.dtype == torch.uint8 and source.resolution == 32
    assert np.array_equal(images[:, 0, 2:30, 2:30], raw[[4, 1]])
    assert images.sum() == 3 * int(raw[[4, 1]].sum())  # nothing outside the middle, three equal channels
    assert torch.equal(images[:, 0], images[:, 2])


def test_unzipped_idx_files_give_the_same_source(tmp_path):
    folder = write_idx_folder(tmp_path)
    zipped = ImageSource.idx(folder, "test")
    for file in list(folder.glob("*.gz")):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    assert ImageSource.idx(folder, "test").identity == zipped.identity


def test_identity_tells_splits_limits_and_pixels_apart(tmp_path):
    folder = write_idx_folder(tmp_path)
    identities = [ImageSource.idx(folder, "train").identity, ImageSource.idx(folder, "test").identity,
                  ImageSource.embedded("test", 2).identity, ImageSource.embedded("test", 3).identity]
    assert len({identity["sha256"] for identity in identities}) == 4
    assert [identity["count"] for identity in identities] == [30, 20, 20, 30]


def test_limit_per_class_takes_the_first_of_each_class():
    whole, limited = ImageSource.embedded("test"), ImageSource.embedded("test", limit_per_class=2)
    firsts = sorted(i for label in range(10) for i in np.flatnonzero(whole.labels == label)[:2])
    assert limited.labels.tolist() == whole.labels[firsts].tolist()
    assert torch.equal(limited.images(range(20)), whole.images(firsts))


def test_bad_idx_input_is_named(tmp_path):
    folder = write_idx_folder(tmp_path)
    with pytest.raises(ValueError, match=r"split is 'val', expected one of train, test"):
        ImageSource.idx(folder, "val")
    with pytest.raises(ValueError, match="limit_per_class is 0"):
        ImageSource.embedded(limit_per_class=0)
    with pytest.raises(FileNotFoundError, match="no IDX file"):
        ImageSource.idx(tmp_path / "nowhere")
    images = folder / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    floats, no_shape = b"\0\0\x0d\x01\0\0\0\x01abcd", b"\0\0\x08\x03\0"
    for bad in (b"", whole[:-20], b"hello", gzip.compress(floats), gzip.compress(no_shape)):
        images.write_bytes(bad)
        with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz"):
            ImageSource.idx(folder, "train")
    images.write_bytes(whole)
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.zeros(29, np.uint8))
    with pytest.raises(ValueError, match=r"\(30, 28, 28\) and labels of shape \(29,\)"):
        ImageSource.idx(folder, "train")
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.full(30, 10, np.uint8))
    with pytest.raises(ValueError, match="label 10, expected 0 to 9"):
        ImageSource.idx(folder, "train")


# --- class folders and the crop

def test_labels_follow_sorted_folder_names_through_unicode_and_spaces(tmp_path):
    source = ImageSource.folder(write_tree(tmp_path / "tree of ümages"), 16)
    assert source.class_names == ("n01 ärger", "n02 zebra")
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert [source.file(i) for i in (0, 3)] == ["n01 ärger/bild 0 ü.png", "n02 zebra/bild 1 ü.png"]
    assert source.images([3, 0]).shape == (2, 3, 16, 16)


def test_hidden_files_and_other_files_are_no_images(tmp_path):
    root = write_tree(tmp_path)
    before = ImageSource.folder(root, 16)
    (root / ".git").mkdir()
    (root / "readme.txt").write_text("x")
    (root / "n02 zebra" / "._bild.png").write_bytes(b"resource fork")
    (root / "n02 zebra" / "notes.txt").write_text("x")
    assert ImageSource.folder(root, 16).identity == before.identity


def test_identity_of_a_tree_follows_names_and_sizes_and_not_where_it_lies(tmp_path):
    first = ImageSource.folder(write_tree(tmp_path / "a"), 16)
    second = ImageSource.folder(write_tree(tmp_path / "b"), 16)
    assert first.identity == second.identity
    file = tmp_path / "b" / "n02 zebra" / "bild 0 ü.png"
    file.write_bytes(file.read_bytes() + b"\0")
    assert ImageSource.folder(tmp_path / "b", 16).identity != first.identity


def box_halve(x):
    """Mean of pairs of columns, then of pairs of rows, each rounded half up, of an image with even sides."""
    x = x.astype(int)
    x = (x[:, ::2] + x[:, 1::2] + 1) // 2
    return (x[::2] + x[1::2] + 1) // 2


def test_crop_halves_with_a_box_filter_and_cuts_the_floor_center():
    x = np.random.default_rng(0).integers(0, 256, (64, 92, 3), np.uint8)
    ours = np.asarray(center_crop(Image.fromarray(x), 16))
    halved = box_halve(box_halve(x))  # (16, 23): the short side is the resolution, bicubic has nothing to do
    assert np.array_equal(ours, halved[:, 3:19])  # a margin of 7: 3 on the left, 4 on the right


def cubic_weights(size, target):
    """Pillow's antialiased bicubic (a = -0.5) as a dense (target, size) matrix."""
    scale = size / target
    stretch = max(scale, 1.0)
    weights = np.zeros((target, size))
    for i in range(target):
        center = (i + 0.5) * scale
        first, last = math.floor(center - 2 * stretch + 0.5), math.floor(center + 2 * stretch + 0.5)
        for j in range(max(0, first), min(size, last)):
            d = abs((j + 0.5 - center) / stretch)
            if d < 1:
                weights[i, j] = 1.5 * d ** 3 - 2.5 * d ** 2 + 1
            elif d < 2:
                weights[i, j] = -0.5 * d ** 3 + 2.5 * d ** 2 - 4 * d + 2
    return weights / weights.sum(1, keepdims=True)


@settings(max_examples=25, deadline=None)
@given(height=st.integers(5, 63), width=st.integers(5, 63), seed=st.integers(0, 99))
def test_crop_agrees_with_a_matrix_formulation(height, width, seed):
    x = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    resolution = 32
    ours = np.asarray(center_crop(Image.fromarray(x), resolution)).astype(int)
    short = min(height, width)  # below 64: no halving
    tall, wide = round(height * resolution / short), round(width * resolution / short)
    across = np.einsum("ij,kjc->kic", cubic_weights(width, wide), x.astype(np.float64)).round().clip(0, 255)
    full = np.einsum("ij,jkc->ikc", cubic_weights(height, tall), across).clip(0, 255)
    top, left = (tall - resolution) // 2, (wide - resolution) // 2
    expected = full[top:top + resolution, left:left + resolution]
    assert ours.shape == (resolution, resolution, 3)
    assert np.abs(ours - expected).max() <= 1.6  # a last bit of the pass across, at most 1.1 times, and of the result


def save_bytes(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def decoded(tmp_path, data, name="x.png"):
    (tmp_path / "class").mkdir(parents=True)
    (tmp_path / "class" / name).write_bytes(data)
    return ImageSource.folder(tmp_path, 8).images([0])[0].numpy()


def test_sixteen_bit_grey_keeps_its_high_byte(tmp_path):
    values = (np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040)
    image = decoded(tmp_path, save_bytes(Image.fromarray(values), "PNG"))
    assert np.array_equal(image, np.stack([values >> 8] * 3))


def test_cmyk_is_converted_to_rgb(tmp_path):
    image = Image.new("CMYK", (8, 8), (255, 0, 0, 0))  # full cyan
    red, green, blue = decoded(tmp_path, save_bytes(image, "JPEG", quality=100), "x.jpg").mean((1, 2))
    assert red < 5 and green > 250 and blue > 250


def test_palette_and_grey_become_three_channels(tmp_path):
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30])
    assert decoded(tmp_path / "palette", save_bytes(palette, "PNG"))[:, 0, 0].tolist() == [10, 200, 30]
    grey = decoded(tmp_path / "grey", save_bytes(Image.new("L", (8, 8), 77), "PNG"))
    assert grey.shape == (3, 8, 8) and (grey == 77).all()


def test_alpha_is_dropped_and_the_first_frame_taken(tmp_path):
    hidden = Image.new("RGBA", (8, 8), (9, 8, 7, 0))
    assert decoded(tmp_path / "a", save_bytes(hidden, "PNG"))[:, 0, 0].tolist() == [9, 8, 7]
    frames = [Image.new("RGB", (8, 8), color) for color in ((255, 0, 0), (0, 0, 255))]
    data = save_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decoded(tmp_path / "b", data, "x.gif")[:, 0, 0].tolist() == [255, 0, 0]


def test_exif_orientation_is_ignored(tmp_path):
    x = np.zeros((8, 8, 3), np.uint8)
    x[:4] = 255  # white on top, as stored
    exif = Image.Exif()
    exif[0x0112] = 3  # a viewer would turn it upside down
    image = decoded(tmp_path, save_bytes(Image.fromarray(x), "JPEG", quality=100, exif=exif.tobytes()), "x.jpg")
    assert image[:, 0].min() > 250 and image[:, 7].max() < 5


def write_damaged(root):
    """Adds a truncated JPEG, a text named .png and a truncated PNG to class 'n02 zebra'."""
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 40, 3), np.uint8))
    jpeg, png = save_bytes(noise, "JPEG"), save_bytes(noise, "PNG")
    (root / "n02 zebra" / "cut.jpg").write_bytes(jpeg[:len(jpeg) // 2])
    (root / "n02 zebra" / "cut.png").write_bytes(png[:len(png) // 2])
    (root / "n02 zebra" / "text.png").write_text("this is no image")
    return ["cut.jpg", "cut.png", "text.png"]


def test_each_damaged_image_is_reported_with_its_path(tmp_path):
    root = write_tree(tmp_path)
    names = write_damaged(root)
    source = ImageSource.folder(root, 16)
    images, damaged = source.read(range(len(source)))
    assert [source.file(index) for index, _ in damaged] == [f"n02 zebra/{name}" for name in names]
    assert len(images) == 4 and all(reason for _, reason in damaged)
    for index, _ in damaged:
        with pytest.raises(ValueError, match=source.file(index)):
            source.images([0, index])


def test_zero_byte_image_is_fatal_at_once_or_damaged_as_asked(tmp_path):
    root = write_tree(tmp_path)
    (root / "n01 ärger" / "empty.jpeg").touch()
    with pytest.raises(ValueError, match=r"zero-byte.*n01 ärger/empty\.jpeg"):
        ImageSource.folder(root, 16)
    source = ImageSource.folder(root, 16, on_damaged="skip")
    _, damaged = source.read(range(len(source)))
    assert [(source.file(index), reason) for index, reason in damaged] == [("n01 ärger/empty.jpeg", "zero bytes")]


def test_vanished_file_is_an_error_and_not_a_damaged_image(tmp_path):
    root = write_tree(tmp_path)
    source = ImageSource.folder(root, 16, on_damaged="skip")
    (root / source.file(2)).unlink()
    with pytest.raises(FileNotFoundError, match="n02 zebra"):
        source.read(range(4))


def test_wrong_folders_are_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        ImageSource.folder(tmp_path / "nowhere", 16)
    root = write_tree(tmp_path / "imagenet" / "train")
    with pytest.raises(ValueError, match=r"did you mean .*train"):
        ImageSource.folder(tmp_path / "imagenet", 16)
    with pytest.raises(ValueError, match=r"no class folder in .*2 images lie in it directly"):
        ImageSource.folder(root / "n02 zebra", 16)
    (root / "empty class").mkdir()
    with pytest.raises(ValueError, match="empty class holds no image"):
        ImageSource.folder(root, 16)
    with pytest.raises(ValueError, match="on_damaged is 'ignore', expected 'raise' or 'skip'"):
        ImageSource.folder(root, 16, on_damaged="ignore")
    with pytest.raises(ValueError, match="resolution is 0"):
        ImageSource.folder(root, 0)


def test_taking_images_keeps_order_and_repeats_and_is_another_source(tmp_path):
    source = ImageSource.embedded("test", 2)
    part = source.take([5, 0, 5])
    assert torch.equal(part.images([0, 1, 2]), source.images([5, 0, 5]))
    assert part.labels.tolist() == source.labels[[5, 0, 5]].tolist()
    identities = [s.identity["sha256"] for s in (source, part, source.take([0, 5, 5]), source.take([5, 0]))]
    assert len(set(identities)) == 4
    assert source.take([5, 0, 5]).identity == part.identity
