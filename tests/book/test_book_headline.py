import json

import pytest
from PIL import Image

from dit_repro.book.harvest import harvest
from dit_repro.book.headline import ROWS, compose_headline
from dit_repro.book.lint import picture_problems
from dit_repro.book.provenance import sealed
from dit_repro.files import sha256, write_json

SMALL = ((("tall", "Tall"), ("wide", "Wide")), (("square", "Square"),))


def publish(figures, name, size, color="orange", chapter="03_first.ipynb"):
    """A picture and its note, as `harvest` leaves them."""
    figures.mkdir(exist_ok=True)
    picture = figures / f"{name}.png"
    Image.new("RGB", size, color).save(picture)
    write_json(figures / f"{name}.json", sealed({
        "notebook": f"book/{chapter}", "file": picture.name, "sha256": sha256(picture), "alt": f"A {name} one."}))


@pytest.fixture
def figures(tmp_path):
    folder = tmp_path / "figures"
    for name, size in {"tall": (100, 200), "wide": (400, 100), "square": (100, 100)}.items():
        publish(folder, name, size)
    return folder


def test_the_panel_holds_every_part_at_equal_height_in_a_row_and_says_what_each_shows(figures):
    picture = compose_headline(figures, SMALL)
    note = json.loads((figures / "headline.json").read_text())
    assert note == sealed(note) and note["sha256"] == sha256(picture) and picture.name == note["file"]
    assert note["alt"].split(". ")[1] == "Wide (chapter 3): A wide one"
    panel = Image.open(picture).convert("RGB")

    def is_orange(place):
        return panel.getpixel(place)[2] < 100

    assert panel.getpixel((5, 5)) == (255, 255, 255)
    assert is_orange((60, 100)) and is_orange((1600, 100))              # tall starts and wide ends the first row
    assert is_orange((60, panel.height - 60)) and not is_orange((1600, panel.height - 60))      # not stretched
    assert picture_problems(figures.parent) == []


def test_the_panel_changes_when_a_part_changes_and_else_keeps_its_bytes(figures):
    picture = compose_headline(figures, SMALL)
    before, written = picture.read_bytes(), picture.stat().st_mtime_ns
    assert compose_headline(figures, SMALL).stat().st_mtime_ns == written
    publish(figures, "wide", (400, 100), "navy")
    assert [problem.what for problem in picture_problems(figures.parent)] == ["shows an old wide; harvest again"]
    assert compose_headline(figures, SMALL).read_bytes() != before and picture_problems(figures.parent) == []
    publish(figures, "wide", (400, 100))
    assert compose_headline(figures, SMALL).read_bytes() == before


def test_there_is_no_panel_while_a_part_is_missing(figures, good_book):
    (figures / "square.json").unlink()
    assert compose_headline(figures, SMALL) is None and not (figures / "headline.jpg").exists()
    assert not (good_book / "figures" / "headline.jpg").exists()      # the toy book has none of the parts


def test_a_panel_made_by_hand_or_without_its_parts_is_seen(figures):
    compose_headline(figures, SMALL)
    (figures / "square.json").unlink()
    assert [problem.what for problem in picture_problems(figures.parent)] == ["shows an old square; harvest again"]
    (figures / "headline.jpg").write_bytes(b"another")
    assert "figures/headline.json: it or its picture was changed by hand" in str(picture_problems(figures.parent)[0])


def test_harvest_composes_the_panel(good_book):
    for name in {name for row in ROWS for name, _ in row}:
        publish(good_book / "figures", name, (200, 100))
    harvest(good_book, next((good_book / "_runs").iterdir()))
    assert Image.open(good_book / "figures" / "headline.jpg").width == 1640 and picture_problems(good_book) == []
