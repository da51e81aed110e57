"""From somebody's pictures to samples and a score, by the commands of the page "Your own pictures"."""
import json

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from dit_repro.cli import main


def command(*arguments):
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def pictures(tmp_path):
    """Two classes of pictures of different sizes, shapes and modes, one name with a space and an umlaut."""
    draw = np.random.default_rng(0)
    for name, sizes in (("red bricks", [(40, 40), (90, 64), (64, 200)]), ("blätter", [(33, 47), (500, 300), (32, 32)])):
        for number, (width, height) in enumerate(sizes * 2):
            image = Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
            path = tmp_path / "my pictures" / name / f"{number}.{'png' if number % 2 else 'jpg'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.convert("L" if number == 3 else "RGB").save(path)
    return tmp_path / "my pictures"


def test_four_commands_lead_from_a_folder_of_pictures_to_a_score(pictures, tmp_path):
    store, run, out = (tmp_path / name for name in ("latents", "run", "samples"))
    assert "12 images of 2 classes" in command("encode", store, "--images", pictures, "--resolution", 32,
                                               "--autoencoder", "embedded")
    (tmp_path / "run.json").write_text(json.dumps({
        "latents": str(store), "model": "DiT-nano/2", "num_classes": 2, "input_size": 8, "num_steps": 2,
        "global_batch_size": 4, "log_every": 1, "checkpoint_every": 2, "archive_every": 0}))
    command("train", run, "--config", tmp_path / "run.json")
    draw = ("sample", run, out, "--per-class", 3, "--steps", 2)
    assert "6 pictures drawn, 0 were there" in command(*draw)
    first = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*.png")}
    assert set(first) == {f"{name}/{seed:06d}.png" for name in ("red bricks", "blätter") for seed in range(3)}
    lost = out / "red bricks/000001.png"
    lost.unlink()
    assert "1 pictures drawn, 5 were there" in command(*draw)
    assert lost.read_bytes() == first["red bricks/000001.png"]   # its seed alone decides what it shows
    scored = command("fid", "score", out, "--reference", pictures, "--crop", 32, "--features", "classifier")
    assert "6" in scored.splitlines()[0] and "(small classifier)" in scored, scored
    checked = command("stability", "check", run, "--samples", 20, "--features", "classifier")
    assert "bits about its label" in checked and "too few to say" in checked
    refused = CliRunner().invoke(main, ["sample", str(run), str(out), "--class", "Blatter"])
    assert refused.exit_code == 1 and "the classes are blätter, red bricks" in refused.output
