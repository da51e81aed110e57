import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from dit_repro.evaluation.image_sets import open_images, write_npz


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (11, 6, 5, 3), dtype=np.uint8)  # NHWC


def nchw(pixels):
    return torch.from_numpy(pixels).movedim(-1, 1)


def save_folder(folder, pixels):
    folder.mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{i:03d}.png")


def every_container(tmp_path, pixels):
    np.savez(tmp_path / "plain.npz", arr_0=pixels, arr_1=np.arange(11))
    np.savez_compressed(tmp_path / "compressed.npz", arr_0=pixels)
    save_folder(tmp_path / "folder", pixels)
    images = nchw(pixels)
    return {"tensor": images, "plain": tmp_path / "plain.npz", "compressed": str(tmp_path / "compressed.npz"),
            "folder": tmp_path / "folder", "function": lambda positions: images[torch.tensor(positions)],
            "iterator": iter(images.split(4))}


def test_the_same_images_come_out_of_every_container(tmp_path, pixels):
    for kind, source in every_container(tmp_path, pixels).items():
        images = open_images(source, 11 if kind in ("function", "iterator") else None)
        assert images.count == 11
        assert torch.equal(images.read(0, 1), nchw(pixels[:1])), kind   # a first look takes nothing away
        found = torch.cat([images.read(0, 3), images.read(3, 9), images.read(9, 11)])
        assert torch.equal(found, nchw(pixels)), kind
        if kind != "iterator":
            assert torch.equal(images.read(2, 5), nchw(pixels[2:5])), f"{kind} read backward"


def test_numpy_and_the_adm_evaluator_read_what_is_written(tmp_path, pixels):
    write_npz(tmp_path / "out.npz", iter(nchw(pixels).split(4)), count=11, labels=torch.arange(11), batch_size=3)
    with np.load(tmp_path / "out.npz") as file:
        np.testing.assert_array_equal(file["arr_0"], pixels)
        np.testing.assert_array_equal(file["arr_1"], np.arange(11))
    assert zipfile.ZipFile(tmp_path / "out.npz").testzip() is None
    assert torch.equal(open_images(tmp_path / "out.npz").read(4, 8), nchw(pixels[4:8]))


def test_images_are_written_a_batch_at_a_time(tmp_path):
    asked = []

    def draw(positions):
        asked.append((positions.start, positions.stop))
        return torch.zeros(len(positions), 3, 4, 4, dtype=torch.uint8)

    write_npz(tmp_path / "out.npz", draw, count=10, batch_size=4)
    assert asked == [(0, 4), (4, 8), (8, 10)]


def test_a_sampler_that_fails_leaves_no_file(tmp_path, pixels):
    with pytest.raises(ValueError, match="ended after 11 images, count is 12"):
        write_npz(tmp_path / "out.npz", iter([nchw(pixels)]), count=12)
    with pytest.raises(ValueError, match="3 labels for 11 images"):
        write_npz(tmp_path / "out.npz", nchw(pixels), labels=[0, 1, 2])
    with pytest.raises(ValueError, match=r"mixed sizes .* \(4, 4, 3\) at image 2, \(6, 5, 3\) before"):
        write_npz(tmp_path / "out.npz", lambda positions: nchw(pixels[:len(positions)]) if positions.start == 0
                  else torch.zeros(len(positions), 3, 4, 4, dtype=torch.uint8), count=4, batch_size=2)
    assert list(tmp_path.iterdir()) == []


def test_the_identity_of_images_follows_their_content(tmp_path, pixels):
    np.savez(tmp_path / "a.npz", arr_0=pixels)
    np.savez(tmp_path / "b.npz", arr_0=255 - pixels)
    first, second = (open_images(tmp_path / f"{name}.npz").identity() for name in "ab")
    assert first != second
    assert open_images(nchw(pixels)).identity() != open_images(nchw(255 - pixels)).identity()
    save_folder(tmp_path / "folder", pixels)
    before = open_images(tmp_path / "folder").identity()
    (tmp_path / "folder" / "000.png").unlink()
    assert open_images(tmp_path / "folder").identity() != before


def test_an_image_source_is_read_through_its_own_cropping():
    from dit_repro.latents import ImageSource
    source = ImageSource.embedded("test", limit_per_class=2)
    images = open_images(source)
    assert images.count == 20
    assert torch.equal(images.read(3, 7), source.images(range(3, 7)))
    assert source.identity["sha256"] in images.identity()


@pytest.mark.parametrize("arrays, message", [
    ({"arr_0": np.zeros((2, 4, 4, 3), np.float32)}, r"arr_0 is float32 \(2, 4, 4, 3\), expected uint8"),
    ({"arr_0": np.zeros((2, 3, 4, 4), np.uint8)}, r"arr_0 is uint8 \(2, 3, 4, 4\), expected uint8 \(N, H, W, 3\)"),
    ({"arr_0": np.zeros((2, 48), np.uint8)}, r"arr_0 is uint8 \(2, 48\)"),
    ({"images": np.zeros((2, 4, 4, 3), np.uint8)}, "no arr_0; it holds images"),
])
def test_an_npz_of_other_arrays_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        open_images(tmp_path / "x.npz")


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"half a download")
    with pytest.raises(ValueError, match=r"not an \.npz"):
        open_images(tmp_path / "x.npz")
    (tmp_path / "x.txt").write_text("images")
    with pytest.raises(ValueError, match=r"x\.txt: expected an \.npz of images or a folder"):
        open_images(tmp_path / "x.txt")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_images(tmp_path / "nowhere")


def test_folders_that_cannot_be_scored_say_which_file_is_to_blame(tmp_path, pixels):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="the folder is empty"):
        open_images(tmp_path / "empty")
    save_folder(tmp_path / "folder", pixels)
    Image.fromarray(pixels[0][:4]).save(tmp_path / "folder" / "005.png")
    with pytest.raises(ValueError, match=r"mixed sizes .* 005.png has 5x4 pixels, 000.png 5x6"):
        open_images(tmp_path / "folder").read(0, 11)
    (tmp_path / "folder" / "005.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"005\.png: not a readable image"):
        open_images(tmp_path / "folder").read(0, 11)
    Image.fromarray(np.full((6, 5), 40_000, np.uint16)).save(tmp_path / "folder" / "005.png")
    with pytest.raises(ValueError, match=r"005\.png: .* more than 8 bits"):
        open_images(tmp_path / "folder").read(0, 11)
    (tmp_path / "folder" / "labels.csv").write_text("0")
    with pytest.raises(ValueError, match=r"labels\.csv is not an image"):
        open_images(tmp_path / "folder")


def test_hidden_files_are_passed_over_and_subfolders_are_read(tmp_path, pixels):
    save_folder(tmp_path / "folder", pixels)
    (tmp_path / "folder" / ".DS_Store").write_bytes(b"")
    (tmp_path / "folder" / "900").mkdir()
    Image.fromarray(pixels[0]).convert("L").save(tmp_path / "folder" / "900" / "gray.png")
    images = open_images(tmp_path / "folder")
    assert images.count == 12
    assert images.read(11, 12).shape == (1, 3, 6, 5)


def test_samplers_are_held_to_what_they_promise():
    with pytest.raises(ValueError, match="count is missing"):
        open_images(lambda positions: None)
    with pytest.raises(ValueError, match="images from a int"):
        open_images(3, 2)
    wrong = open_images(lambda positions: torch.zeros(len(positions), 3, 4, 4), 5)
    with pytest.raises(ValueError, match=r"images 0 to 1: expected a uint8 tensor of .* found torch.float32 \(2, 3, 4"):
        wrong.read(0, 2)
    short = open_images(lambda positions: torch.zeros(1, 3, 4, 4, dtype=torch.uint8), 5)
    with pytest.raises(ValueError, match=r"found torch.uint8 \(1, 3, 4, 4\)"):
        short.read(0, 2)
    once = open_images(iter(torch.zeros(6, 3, 4, 4, dtype=torch.uint8).split(2)), 6)
    once.read(2, 4)
    with pytest.raises(ValueError, match="cannot go back to image 0"):
        once.read(0, 1)
    with pytest.raises(ValueError, match="count 7: image tensor holds 6 images"):
        open_images(torch.zeros(6, 3, 4, 4, dtype=torch.uint8), 7)


def test_a_big_member_is_memory_mapped_and_not_read(tmp_path, monkeypatch):
    write_npz(tmp_path / "big.npz", torch.full((400, 3, 64, 64), 7, dtype=torch.uint8))
    images, opened = open_images(tmp_path / "big.npz"), []
    monkeypatch.setattr(np, "memmap", lambda *args, real=np.memmap: opened.append(args) or real(*args))
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *args: pytest.fail("read through the archive"))
    assert images.read(390, 400).float().mean() == 7
    assert len(opened) == 1
