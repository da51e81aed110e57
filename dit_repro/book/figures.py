"""Pictures with one look: labelled sample grids, curves with their baselines, and a filmstrip that needs no kernel."""
import base64
import hashlib
import html
import io
from functools import cache
from pathlib import Path

import numpy as np

CARD = "#fcfbf9"       # as in book.mplstyle
INK = "#26262b"


def sample_grid(images, row_labels, column_labels, size: int = 64):
    """Samples with class names on the left and settings on top, as a PIL image for `run.figure`.

    images: (rows, columns, 3, H, W) uint8, array or tensor. size: width and height of one sample on the page, in CSS
    pixels; the picture is drawn at twice that, in whole-pixel steps. Raises ValueError for other shapes or counts.
    """
    from PIL import Image, ImageDraw
    images = _uint8(images)
    if images.ndim != 5 or images.shape[2] != 3:
        raise ValueError(f"sample_grid: images must be (rows, columns, 3, H, W), not {images.shape}")
    rows, columns, _, height, width = images.shape
    if (len(row_labels), len(column_labels)) != (rows, columns):
        raise ValueError(f"sample_grid: {rows} rows and {columns} columns of images, but {len(row_labels)} row labels "
                         f"and {len(column_labels)} column labels")
    font = _font(22)
    tile = max(1, 2 * size // width) * width, max(1, 2 * size // width) * height
    gap, left = 6, 22 + max((int(font.getlength(str(label))) for label in row_labels), default=0)
    wide = max([tile[0], *(int(font.getlength(str(label))) + 10 for label in column_labels)])
    picture = Image.new("RGB", (left + columns * (wide + gap), 40 + rows * (tile[1] + gap)), CARD)
    draw = ImageDraw.Draw(picture)
    for column, label in enumerate(column_labels):
        draw.text((left + column * (wide + gap) + wide / 2, 20), str(label), INK, font, anchor="mm")
    for row, label in enumerate(row_labels):
        top = 40 + row * (tile[1] + gap)
        draw.text((left - 10, top + tile[1] / 2), str(label), INK, font, anchor="rm")
        for column in range(columns):
            sample = Image.fromarray(images[row, column].transpose(1, 2, 0)).resize(tile, Image.Resampling.NEAREST)
            picture.paste(sample, (left + column * (wide + gap) + (wide - tile[0]) // 2, top))
    return picture


def draw_baselines(axes, baselines: dict[str, float]) -> None:
    """Dashed, labelled lines at the losses that knowing nothing, or only the variance, would give."""
    for label, level in baselines.items():
        axes.axhline(level, color="#6b6b73", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(f"{label}: {level:.4g}", (1, level), (-2, 3), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", va="bottom", fontsize=8.5, color="#4a4a52")


def label_lines(axes) -> None:
    """Write each labelled line's name at its right end, in its color, instead of a legend; names are kept apart."""
    axes.figure.draw_without_rendering()     # settles the limits
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    ends = [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines]
    points = axes.transData.transform(ends)[:, 1] * 72 / axes.figure.dpi     # heights in points
    lowest = -np.inf
    for index in np.argsort(points):
        lowest = max(points[index], lowest + 11)
        axes.annotate(lines[index].get_label(), ends[index], (5, lowest - points[index]), textcoords="offset points",
                      va="center", fontsize=9, color=lines[index].get_color(), annotation_clip=False)


class Filmstrip:
    """A row of images shown one at a time with step, play and a slider. It works in a page with no kernel.

    images: a sequence of (3, H, W) uint8 arrays or tensors, or of PIL images of one size. labels: one text an image.
    size: width on the page in CSS pixels. Where scripts do not run, all images are shown side by side.
    """

    def __init__(self, images, labels, caption: str = "", size: int = 256):
        from PIL import Image
        pictures = [image if isinstance(image, Image.Image) else Image.fromarray(_uint8(image).transpose(1, 2, 0))
                    for image in images]
        if not pictures or len(pictures) != len(labels):
            raise ValueError(f"filmstrip: {len(pictures)} images and {len(labels)} labels; give one label an image")
        self._frames = [(str(label), _png(picture)) for label, picture in zip(labels, pictures, strict=True)]
        self._caption, self._size = caption, size

    def _repr_html_(self) -> str:
        identity = "film-" + hashlib.sha256(repr((self._frames, self._caption, self._size)).encode()).hexdigest()[:12]
        frames = "".join(f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(label)}" '
                         f'width="{self._size}"><figcaption>{html.escape(label)}</figcaption></figure>'
                         for label, data in self._frames)
        page = (Path(__file__).parent / "filmstrip.html").read_text(encoding="utf-8")
        for field, text in {"ID": identity, "FRAMES": frames, "CAPTION": html.escape(self._caption),
                            "LAST": str(len(self._frames) - 1)}.items():
            page = page.replace(f"%{field}%", text)
        return page

    def __repr__(self) -> str:
        return f"filmstrip of {len(self._frames)} images: {self._frames[0][0]} ... {self._frames[-1][0]}"


def _uint8(images) -> np.ndarray:
    array = np.asarray(images)
    if array.dtype != np.uint8:
        raise ValueError(f"images must be uint8, not {array.dtype}")
    return array


def _png(picture) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


@cache
def _font(size: int):
    """The font of the plots, which matplotlib ships, so that a picture does not depend on the machine."""
    import matplotlib
    from PIL import ImageFont
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)
