import base64
import io
import json
import re
import sys
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.formatters import DisplayFormatter
from PIL import Image

from dit_repro.book.figures import MAX_BYTES, Filmstrip, encode, is_live, label_lines, sample_grid
from dit_repro.book.notebook import Run, start


@pytest.fixture
def shown(monkeypatch):
    """What a notebook would display, in order."""
    outputs = []
    monkeypatch.setattr("IPython.display.display",
                        lambda data, **options: outputs.append((data, options.get("metadata"))))
    return outputs


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("DIT_REPRO_OUTPUT", str(tmp_path / "03_toy"))
    return Run("03_toy", {"profile": "smoke"})


def test_the_card_shows_the_values_in_force_and_no_time(shown, tmp_path, monkeypatch, book):
    monkeypatch.setenv("DIT_REPRO_OUTPUT", str(tmp_path / "01_good"))
    monkeypatch.chdir(book)
    namespace = {"__annotations__": {"profile": str, "num_steps": int}, "profile": "smoke", "num_steps": 7, "other": 1}
    assert start(namespace).profile_name == "smoke"
    first = shown.pop()[0]
    assert "profile = 'smoke', num_steps = 7<" in first["text/html"] and "torch 2" in first["text/plain"]
    start(namespace)
    assert shown[0][0] == first


def test_start_before_the_parameters_cell_says_so():
    with pytest.raises(ValueError, match="run the parameters cell first"):
        start({"profile": "smoke"})


def test_prose_is_filled_from_recorded_numbers_and_leaves_math_alone(run):
    run.record("loss", 0.123456, interval=(0.1, 0.2))
    run.record("count", np.int64(1234567))
    run.record("word", "boot")
    assert run.fill("{loss:.2f}, {loss}, {loss.low} to {loss.high:.1f}") == "0.12, 0.1235, 0.1 to 0.2"
    assert run.fill("({count}) **{word}** N={count:d}") == "(1,234,567) **boot** N=1234567"
    run.record("nothing", -0.001)
    assert run.fill("{nothing:.1f} {nothing:+.1f} {nothing:+.0%} {nothing:.3f}") == "0.0 +0.0 +0% -0.001"
    untouched = r"$\frac{a}{b}$, $x_{t}$, $e^{count}$, {eq}`loss`, ```{note}"
    assert run.fill(untouched) == untouched


@given(st.text(alphabet="abc {}$\\_^:.`", max_size=30))
def test_text_without_recorded_names_is_kept_or_refused_never_garbled(text):
    run = Run.__new__(Run)
    run._results = {"metrics": {}}
    try:
        assert run.fill(text) == text
    except KeyError as error:
        assert "recorded so far: nothing" in str(error)


def test_an_unknown_name_lists_what_was_recorded(run):
    run.record("loss", 1.0)
    with pytest.raises(KeyError, match="los was not recorded; recorded so far: loss"):
        run.say("The loss is {los:.2f}.")
    with pytest.raises(KeyError, match="without an interval"):
        run.fill("{loss.low}")


@pytest.mark.parametrize("name, value, options, message", [
    ("Loss", 1, {}, "lower-case"), ("loss", float("nan"), {}, "finite"), ("loss", np.float32("inf"), {}, "finite"),
    ("loss", [1], {}, "not list"), ("loss", 1, {"interval": (2, 3)}, "outside its interval"),
])
def test_a_number_that_cannot_be_used_is_not_recorded(run, name, value, options, message):
    with pytest.raises(ValueError, match=message):
        run.record(name, value, **options)
    assert not run._folder.exists()


def test_a_name_is_recorded_once_in_a_batch_run_and_replaced_in_lab(run, tmp_path, monkeypatch):
    run.record("loss", 1)
    with pytest.raises(ValueError, match="already recorded"):
        run.record("loss", 2)
    monkeypatch.delenv("DIT_REPRO_OUTPUT")
    monkeypatch.setenv("DIT_REPRO_WORKSPACE", str(tmp_path))
    live = Run("03_toy", {})
    live.record("loss", 1, seeds=[4, 5])
    live.record("loss", 2, seeds=3)
    kept = json.loads((tmp_path / "notebooks" / "03_toy" / "results.json").read_text())
    assert kept["metrics"] == {"loss": {"value": 2, "seeds": 3}}


def photograph(side: int) -> Image.Image:
    """Smooth color with a little noise, which a palette does not hold and PNG does not compress."""
    rows, columns = np.mgrid[:side, :side] / side
    picture = 255 * np.stack([rows, columns, 1 - rows], -1) + np.random.default_rng(0).normal(0, 4, (side, side, 3))
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))


def test_plots_are_png_and_photographs_are_jpeg_numbered_with_alt_text(run, shown):
    run.record("loss", 0.5)
    figure, axes = plt.subplots()
    axes.plot([0, 1])
    run.figure(figure, "Level {loss}.", name="curve")
    run.figure(photograph(256), "Samples.", name="grid", alt="colors")
    (plot, plot_metadata), (caption, _), (grid, grid_metadata), (second, _) = shown
    assert plot["text/plain"] == "Level 0.5." and plot_metadata["image/png"]["alt"] == "Level 0.5."
    assert caption["text/markdown"] == '<a id="fig-curve"></a>**Figure 3.1.** Level 0.5.'
    assert "**Figure 3.2.**" in second["text/markdown"]
    assert grid_metadata["image/jpeg"] == {"width": 128, "alt": "colors"} and "image/png" not in grid
    assert (run._folder / "figures" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not plt.fignum_exists(figure.number)      # or the inline backend shows it again


def test_a_picture_too_large_for_a_page_is_stored_smaller_and_shown_at_its_size(run, shown):
    noise = np.random.default_rng(0).integers(0, 255, (900, 900, 3), np.uint8)
    figure, axes = plt.subplots(figsize=(6, 6))
    axes.imshow(noise)
    for name, picture in (("grid", Image.fromarray(noise)), ("plot", figure)):
        run.figure(picture, "Noise.", name=name)
        data = (run._folder / "figures" / f"{name}.jpg").read_bytes()
        assert len(data) <= MAX_BYTES and data.startswith(b"\xff\xd8")
    assert shown[0][1]["image/jpeg"]["width"] == 450


def test_grey_samples_are_stored_with_an_error_nobody_sees_in_half_the_bytes_of_a_jpeg():
    rows, columns = np.mgrid[:32, :32]
    grey = (rows * 4 + columns * 3 + np.random.default_rng(0).integers(0, 20, (32, 32))).astype(np.uint8)
    tinted = np.stack([grey, grey + 1, grey], -1)
    grid = sample_grid(np.broadcast_to(tinted.transpose(2, 0, 1), (4, 4, 3, 32, 32)), "abcd", "abcd")
    mime, data, width = encode(grid)
    kept = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), float)
    jpeg = io.BytesIO()
    grid.save(jpeg, "JPEG", quality=90, subsampling=0)
    assert mime == "image/png" and width == grid.width // 2 and len(data) < len(jpeg.getvalue()) / 2
    assert np.sqrt(np.square(kept - np.asarray(grid, float)).mean()) < 1.7


def test_the_same_plot_gives_the_same_bytes(run):
    def draw(name):
        figure, axes = plt.subplots()
        axes.plot([0, 1], label="line")
        label_lines(axes)
        run.figure(figure, "Again.", name=name)
        return (run._folder / "figures" / f"{name}.png").read_bytes()
    assert draw("one") == draw("two")


def test_a_sample_grid_shows_every_sample_unchanged_in_its_place():
    images = np.zeros((2, 3, 3, 8, 8), np.uint8)
    images += np.arange(40, 100, 10, dtype=np.uint8).reshape(2, 3, 1, 1, 1)
    picture = np.asarray(sample_grid(images, ["shirt", "ankle boot"], ["1", "2", "3"]))
    corners = [np.argwhere((picture == value).all(-1)) for value in range(40, 100, 10)]
    assert [len(corner) for corner in corners] == [128 * 128] * 6
    tops = [tuple(corner[0]) for corner in corners]
    assert tops[0][0] == tops[2][0] < tops[3][0] and tops[0][1] == tops[3][1] < tops[1][1] < tops[2][1]


def test_a_sample_grid_with_missing_labels_is_refused():
    with pytest.raises(ValueError, match="1 row labels and 3 column labels"):
        sample_grid(np.zeros((2, 3, 3, 8, 8), np.uint8), ["a"], ["1", "2", "3"])
    with pytest.raises(ValueError, match="uint8, not float64"):
        sample_grid(np.zeros((2, 3, 3, 8, 8)), ["a", "b"], ["1", "2", "3"])


def test_a_filmstrip_is_the_same_twice_and_stands_alone():
    frames = np.arange(4 * 3 * 8 * 8, dtype=np.uint8).reshape(4, 3, 8, 8)
    strip = Filmstrip(frames, ["a", "b", "<c>", "d"])._repr_html_()
    assert strip == Filmstrip(frames, ["a", "b", "<c>", "d"])._repr_html_()
    assert strip != Filmstrip(frames[::-1], ["a", "b", "<c>", "d"])._repr_html_()
    assert strip.count("<img") == 4 == strip.count("data:image/webp")
    assert "http" not in strip and not re.search(r"%[A-Z]+%", strip)
    assert 'alt="&lt;c&gt;"' in strip and 'max="3"' in strip
    with pytest.raises(ValueError, match="4 images and 1 labels"):
        Filmstrip(frames, ["a"])


def frames_of(strip: str) -> list:
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), float)
            for data in re.findall(r"base64,([\w+/=]+)", strip)]


def test_filmstrip_frames_keep_their_size_and_look_the_same_at_a_third_of_the_bytes():
    picture = photograph(192)
    strip = Filmstrip([picture], ["a"], size=384)._repr_html_()
    (frame,) = frames_of(strip)
    png = io.BytesIO()
    picture.save(png, "PNG", optimize=True)
    assert frame.shape == (192, 192, 3) and np.abs(frame - np.asarray(picture, float)).mean() < 4     # its noise is 4
    assert len(strip) < len(png.getvalue()) / 3 + 4_000
    assert frames_of(Filmstrip([Image.new("RGB", (900, 30))], ["a"], size=100)._repr_html_())[0].shape[1] == 200
    blocks = Image.fromarray(np.kron([[0, 255], [255, 0]], np.ones((64, 64))).astype(np.uint8))
    assert (frames_of(Filmstrip([blocks], ["a"])._repr_html_())[0][..., 0] == np.asarray(blocks)).all()    # lossless


def test_a_filmstrip_is_a_widget_in_a_live_notebook_and_html_alone_in_a_batch_run(monkeypatch):
    strip = Filmstrip(np.zeros((3, 3, 8, 8), np.uint8), ["first", "second", "third"], caption="x < y")
    view = "application/vnd.jupyter.widget-view+json"
    assert not is_live() and view not in DisplayFormatter().format(strip)[0]
    monkeypatch.setattr("dit_repro.book.figures.is_live", lambda: True)
    shown = DisplayFormatter().format(strip)[0]
    assert set(shown) == {view, "text/html", "text/plain"}
    play, slider, frame, caption = strip.widget().children
    assert (play.max, slider.max) == (2, 2) and "first" in frame.value and caption.value == "x &lt; y"
    slider.value = 2
    assert "third" in frame.value and "first" not in frame.value


def test_a_notebook_is_live_only_in_a_kernel_outside_a_batch_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=1))
    monkeypatch.delenv("DIT_REPRO_OUTPUT", raising=False)
    assert is_live()
    monkeypatch.setenv("DIT_REPRO_OUTPUT", "here")
    assert not is_live()
    monkeypatch.delenv("DIT_REPRO_OUTPUT")
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    assert not is_live()


def test_a_value_that_cannot_decide_its_claim_is_refused_when_it_is_recorded(tmp_path, monkeypatch, book, shown):
    monkeypatch.setenv("DIT_REPRO_OUTPUT", str(tmp_path / "01_good"))
    monkeypatch.chdir(book)
    run = Run("01_good", {"profile": "smoke", "flag": True, "num_steps": None})
    with pytest.raises(ValueError, match=r"claim half expects a number, .* but 01_good records half = 'half'"):
        run.record("half", "half")
    run.record("half", 0.5)
    run.claims()
    run.parameters["num_steps"] = 50
    run.claims()
    assert ">reproduced<" in shown[0][0]["text/markdown"]
    assert "a run with num_steps = 50 decides nothing" in shown[1][0]["text/markdown"]
    assert ">reproduced<" not in shown[1][0]["text/markdown"]
