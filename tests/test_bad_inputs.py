"""What a user can get wrong on the command line: one clear line, a non-zero exit code, nothing lost."""
import hashlib
import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from dit_repro.cli import main

RUN = {"model": "DiT-nano/2", "num_classes": 2, "input_size": 8, "num_steps": 2, "global_batch_size": 4, "log_every": 1,
       "checkpoint_every": 2, "archive_every": 0}


def picture(path, size=(32, 32), seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).save(path)
    return path


def command(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the wrong commands are given: good things, and damaged copies of them."""
    root = tmp_path_factory.mktemp("bad inputs")
    for number in range(8):
        picture(root / f"pictures/{'ab'[number % 2]}/{number}.png", seed=number)
    assert command("encode", root / "store", "--images", root / "pictures", "--resolution", 32, "--autoencoder",
                   "embedded").exit_code == 0
    (root / "run.json").write_text(json.dumps({**RUN, "latents": str(root / "store")}))
    assert command("train", root / "run", "--config", root / "run.json").exit_code == 0

    shutil.copytree(root / "pictures", root / "zero")
    (root / "zero/a/0.png").write_bytes(b"")
    shutil.copytree(root / "pictures", root / "torn")
    (root / "torn/b/1.png").write_bytes((root / "pictures/b/1.png").read_bytes()[:200])
    picture(root / "flat/only.png")
    (root / "empty").mkdir()
    (root / "empty class/a").mkdir(parents=True)
    (root / "note.txt").write_text("no picture")
    shutil.copytree(root / "pictures", root / "with text")
    (root / "with text/a/note.txt").write_text("no picture")
    shutil.copytree(root / "pictures", root / "mixed")
    picture(root / "mixed/b/7.png", (40, 32))
    picture(root / "one/a/0.png")
    np.savez(root / "floats.npz", arr_0=np.zeros((8, 32, 32, 3), np.float32))
    np.savez(root / "no images.npz", other=np.zeros(3))
    (root / "broken.npz").write_bytes(b"PK not a zip")

    Image.new("1", (20_000, 20_000)).save(picture(root / "huge/a/0.png"))
    for name in ("truncated", "old", "relabelled", "nan"):
        shutil.copytree(root / "store", root / name)
    shard = next((root / "truncated").glob("*moments*"), None) or sorted((root / "truncated").iterdir())[-1]
    shard.write_bytes(shard.read_bytes()[:-64])
    manifest = json.loads((root / "old/manifest.json").read_text())
    (root / "old/manifest.json").write_text(json.dumps({**manifest, "format_version": 0, "version": 0, "format": 0}))
    np.save(root / "relabelled/labels.npy", np.full(8, 7))
    moments = np.load(root / "nan/shard-00000.npy")
    moments[3] = np.nan
    np.save(root / "nan/shard-00000.npy", moments)
    for name in ("relabelled", "nan"):
        (root / f"{name}.json").write_text(json.dumps({**RUN, "latents": str(root / name)}))
    shutil.copytree(root / "run", root / "damaged")
    for checkpoint in (root / "damaged/checkpoints").glob("*.safetensors"):
        checkpoint.write_bytes(checkpoint.read_bytes()[:-9])
    (root / "not json").write_text("{model: DiT-nano/2}")
    (root / "unknown.json").write_text(json.dumps({**RUN, "latents": str(root / "store"), "learning_rat": 1}))
    (root / "nowhere.json").write_text(json.dumps({**RUN, "latents": str(root / "nosuch")}))
    return root


WRONG = [  # arguments with {} for the folder above; what the message must say
    ("encode {}/out --images {}/nosuch", "nosuch"),
    ("encode {}/out --images {}/note.txt", "note.txt"),
    ("encode {}/out --images {}/zero --resolution 32 --autoencoder embedded", "0.png"),
    ("encode {}/out --images {}/torn --resolution 32 --autoencoder embedded", "1.png"),
    ("encode {}/out --images {}/huge --resolution 32 --autoencoder embedded", "0.png"),
    ("encode {}/note.txt --images {}/pictures --resolution 32 --autoencoder embedded", "note.txt"),
    ("encode {}/out --images {}/flat --autoencoder embedded", "class folder"),
    ("encode {}/out --images {}/empty --autoencoder embedded", "class folder"),
    ("encode {}/out --images {}/empty_class --autoencoder embedded", "no image"),
    ("encode {}/out --images {}/pictures --autoencoder {}/nosuch", "nosuch"),
    ("encode {}/out --images {}/pictures --resolution 30 --autoencoder embedded", "30"),
    ("encode {}/store --images {}/pictures --resolution 64 --autoencoder embedded", "64"),
    ("encode {}/out --images {}/pictures --resolution 32 --autoencoder embedded --device nosuch", "nosuch"),
    ("latents verify {}/nosuch", "nosuch"),
    ("latents verify {}/truncated", "truncated"),
    ("latents verify {}/relabelled", "labels"),
    ("latents info {}/old", "version"),
    ("train {}/new", "no run in"),
    ("train {}/new --config {}/not_json", "not JSON"),
    ("train {}/new --config {}/unknown.json", "learning_rat"),
    ("train {}/new --config {}/nowhere.json", "nosuch"),
    ("train {}/new --config {}/relabelled.json", "labels from 7 to 7"),
    ("train {}/new --config {}/nan.json -o global_batch_size=64", "moments of image 3 are not finite"),
    ("train {}/new --config {}/run.json -o model=DiT-Z/2", "DiT-Z/2"),
    ("train {}/new --config {}/run.json -o num_classes=3", "num_classes"),
    ("train {}/new --config {}/run.json -o input_size=16", "input_size"),
    ("train {}/new --config {}/run.json -o num_steps=0", "num_steps"),
    ("train {}/new --config {}/run.json -o num_steps=many", "num_steps"),
    ("train {}/new --config {}/run.json -o learning_rate=-1", "learning_rate"),
    ("train {}/new --config {}/run.json -o precision=fp8", "precision"),
    ("train {}/new --config {}/run.json -o objective=3", "objective"),
    ("train {}/new --config {}/run.json -o seed", "seed"),
    ("train {}/run -o seed=5", "seed"),
    ("train {}/damaged -o num_steps=4", "damaged"),
    ("runs --folder {}/nosuch", "nosuch"),
    ("runs verify {}/damaged", "damaged"),
    ("runs export-ema {}/nosuch", "nosuch"),
    ("sample {}/nosuch {}/out", "nosuch"),
    ("sample {}/run {}/out --class nosuch", "nosuch"),
    ("sample {}/run {}/out --step 7", "7"),
    ("sample {}/run {}/out --steps 0", "steps"),
    ("sample {}/run {}/out --steps 5000", "5000"),
    ("sample {}/run {}/out --steps few", "few"),
    ("sample {}/run {}/out --guidance nan", "nan"),
    ("sample {}/run {}/out --guidance -1", "at least 0"),
    ("sample {}/run {}/out --autoencoder {}/nosuch", "nosuch"),
    ("sample {}/damaged {}/out", "damaged"),
    ("fid score {}/nosuch --reference {}/pictures --features classifier", "nosuch"),
    ("fid score {}/empty --reference {}/pictures --features classifier", "empty"),
    ("fid score {}/with_text --reference {}/pictures --features classifier", "note.txt"),
    ("fid score {}/mixed --reference {}/pictures --features classifier", "mixed"),
    ("fid score {}/one --reference {}/pictures --features classifier", "1 image"),
    ("fid score {}/floats.npz --reference {}/pictures --features classifier", "float"),
    ("fid score {}/no_images.npz --reference {}/pictures --features classifier", "arr_0"),
    ("fid score {}/broken.npz --reference {}/pictures --features classifier", "broken.npz"),
    ("fid score {}/pictures --reference {}/pictures --feature-weights {}/nosuch", "nosuch"),
    ("fid score {}/pictures --reference {}/pictures --features dinov2", "--feature-weights"),
    ("convert {}/nosuch {}/out --to released", "nosuch"),
    ("convert {}/note.txt {}/out --to released", "note.txt"),
    ("plan -o model=DiT-Z/2", "DiT-Z/2"),
    ("plan --gpu abacus", "abacus"),
    ("plan --profile huge", "huge"),
    ("run 99", "99"),
    ("run 01 --profile huge", "huge"),
    ("run 01 -p nosuch=1", "nosuch"),
    ("run 03 -p num_steps=many", "num_steps"),
    ("run 01 -p data={}/nosuch", "nosuch"),
    ("run 01 --data {}/nosuch", "nosuch"),
    ("run 01 --autoencoder {}/nosuch", "nosuch"),
    ("harvest {}/nosuch", "nosuch"),
    ("stability check {}/nosuch", "nosuch"),
    ("stability capture {}/run --step 9", "9"),
    ("bench ladder --model DiT-Z/2", "DiT-Z/2"),
    ("new-chapter 1 Taken", "chapter 1"),
]


def digest(root):
    """Every file below a folder, by its contents; previews of a failing command may come, what was there must stay."""
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*")
            if path.is_file() and path.suffix not in (".lock", ".damaged")}


@pytest.mark.parametrize("arguments, said", WRONG, ids=[f"{i:02d}" for i in range(len(WRONG))])
def test_a_wrong_command_says_what_is_wrong_and_loses_nothing(made, arguments, said):
    before = digest(made / "run/checkpoints") | digest(made / "store") | digest(made / "pictures")
    names = {"empty_class": "empty class", "not_json": "not json", "with_text": "with text", "no_images": "no images"}
    words = [word.replace("{}", str(made)) for word in arguments.split()]
    for short, name in names.items():
        words = [word.replace(f"/{short}", f"/{name}") for word in words]
    done = command(*words)
    assert done.exit_code != 0, done.output
    assert said in done.output and "Traceback" not in done.output, done.output or done.exception
    assert isinstance(done.exception, SystemExit), done.exception
    messages = [line for line in done.output.splitlines() if line.startswith(("dit-repro:", "Error:"))]
    assert len(messages) == 1, done.output
    after = digest(made / "run/checkpoints") | digest(made / "store") | digest(made / "pictures")
    assert after == before


@pytest.mark.parametrize("mode", ["L", "LA", "P", "CMYK", "RGBA", "1", "I;16"])
def test_every_kind_of_picture_is_read(tmp_path, mode):
    values = np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8)
    image = (Image.fromarray(values[..., 0].astype(np.uint16) * 257) if mode == "I;16" else
             Image.fromarray(values).convert(mode))
    for name in "ab":
        (tmp_path / f"schöne Bilder/{name}").mkdir(parents=True)
        image.save(tmp_path / f"schöne Bilder/{name}/a picture.{'tiff' if mode in ('CMYK', 'I;16') else 'png'}")
    done = command("encode", tmp_path / "out", "--images", tmp_path / "schöne Bilder", "--resolution", 32,
                   "--autoencoder", "embedded")
    assert done.exit_code == 0 and "2 images of 2 classes, 0 left out" in done.output, done.output


def test_of_an_animation_the_first_picture_is_taken(tmp_path):
    frames = [Image.new("RGB", (32, 32), color) for color in ("black", "white")]
    for name in "ab":
        (tmp_path / f"in/{name}").mkdir(parents=True)
        frames[0].save(tmp_path / f"in/{name}/film.gif", save_all=True, append_images=frames[1:])
    from dit_repro.latents import ImageSource
    assert ImageSource.folder(tmp_path / "in", 32).images([0]).max() == 0


def test_a_second_process_cannot_train_in_a_folder_that_is_in_use(made):
    from dit_repro.training import RunFolder
    folder = RunFolder(made / "run")
    with folder.writing(folder.config()):
        done = command("train", made / "run", "-o", "num_steps=6")
    assert done.exit_code == 1 and "in use by process" in done.output


def test_one_image_is_enough_to_try_and_a_warning_says_what_to_expect(tmp_path):
    picture(tmp_path / "in/only/one.png")
    assert command("encode", tmp_path / "store", "--images", tmp_path / "in", "--resolution", 32, "--autoencoder",
                   "embedded").exit_code == 0
    (tmp_path / "run.json").write_text(json.dumps({**RUN, "latents": str(tmp_path / "store"), "num_classes": 1}))
    done = command("train", tmp_path / "run", "--config", tmp_path / "run.json")
    assert done.exit_code == 0 and "learned by heart" in done.output, done.output


def test_pictures_of_other_settings_are_not_mixed(made, tmp_path):
    draw = ("sample", made / "run", tmp_path / "out", "--per-class", 1, "--steps", 2)
    assert command(*draw).exit_code == 0
    mixed = command(*draw, "--guidance", 4)
    assert mixed.exit_code == 1 and "guidance 1.5 is now 4.0" in mixed.output
