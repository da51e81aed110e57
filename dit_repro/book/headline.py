"""The first picture of the book: figures of many chapters in one panel, composed again whenever one of them changes."""
import json
from pathlib import Path

from dit_repro.book.figures import INK, plot_font
from dit_repro.book.provenance import sealed
from dit_repro.files import atomic_write, sha256, write_json

# Rows of (figure, title). A row is as wide as the panel, so the wider its figures, the lower it is.
ROWS = (
    (("samples-over-time", "Samples by step"), ("remedies", "Collapsed samples under each remedy")),
    (("quality", "Quality of the samples by step"), ("map", "Where a learning rate breaks a run")),
    (("causal", "What one outlier gradient costs"), ("guidance", "Guidance"), ("roofline", "Speed of each operation")),
    (("parts", "Each part of the paper's recipe alone"), ("floor", "What perfect samples would score")),
)
WIDTH, MAX_HEIGHT, GAP, TITLE = 1640, 580, 24, 40     # pixels: of the panel, of a row, between figures, of a title line
QUALITY = 80     # of the JPEG: letters stay clean, and the file stays under 400 KB
CAPTION = "Figures of the chapters in one panel; the number before a title is the chapter's."


def compose_headline(figures: Path, rows=ROWS) -> Path | None:
    """Write headline.jpg and its note into `figures` and return the picture; None where one of its figures is missing.

    With the same figures the picture stays as it is, since another version of PIL may encode it in other bytes.
    """
    files = {name: figures / f"{name}.json" for row in rows for name, _ in row}
    if not all(file.is_file() for file in files.values()):
        return None
    parts = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}
    chapter = {name: int(Path(part["notebook"]).name[:2]) for name, part in parts.items()}
    made = {"file": "headline.jpg", "caption": CAPTION,
            "alt": " ".join(f"{title} (chapter {chapter[name]}): {parts[name]['alt']}" for row in rows
                            for name, title in row),
            "parts": {name: part["sha256"] for name, part in parts.items()}}
    picture, note = figures / made["file"], figures / "headline.json"
    old = json.loads(note.read_text(encoding="utf-8")) if note.is_file() and picture.is_file() else {}
    if any(old.get(key) != value for key, value in made.items()):
        panel = _panel([[(figures / parts[name]["file"], f"{chapter[name]}  {title}") for name, title in row]
                        for row in rows])
        with atomic_write(picture, "wb") as file:
            panel.save(file, "JPEG", quality=QUALITY, optimize=True)
        write_json(note, sealed({**made, "sha256": sha256(picture)}))
    return picture


def _panel(rows: list[list[tuple[Path, str]]]):
    """Pictures in rows of equal width on white, each under its title, as a PIL image."""
    from PIL import Image, ImageDraw
    placed, top = [], GAP
    for row in rows:
        images = [Image.open(file).convert("RGB") for file, _ in row]
        height = (WIDTH - GAP * (len(row) + 1)) / sum(image.width / image.height for image in images)
        height, left = min(round(height), MAX_HEIGHT), GAP
        for image, (_, title) in zip(images, row, strict=True):
            size = round(image.width / image.height * height), height
            placed.append((image.resize(size, Image.Resampling.LANCZOS), left, top, title))
            left += size[0] + GAP
        top += TITLE + height + GAP
    panel = Image.new("RGB", (WIDTH, top), "white")
    draw = ImageDraw.Draw(panel)
    for image, left, top, title in placed:
        draw.text((left, top + TITLE / 2), title, INK, plot_font(26), anchor="lm")
        panel.paste(image, (left, top + TITLE))
    return panel
