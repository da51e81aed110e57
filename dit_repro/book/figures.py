"""Pictures with one look: labelled sample grids, curves with their baselines, and a filmstrip that needs no kernel."""
import base64
import hashlib
import html
import io
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np

CARD = "#fcfbf9"       # as in book.mplstyle
INK = "#26262b"
MAX_BYTES = 400_000    # of one picture in a page
MAX_ERROR = 1.7        # of 255 levels, root mean square: fewer colors that look the same


def is_live() -> bool:
    """Whether a person can use a widget here: in a notebook that is open, not in `dit-repro run`."""
    if os.environ.get("DIT_REPRO_OUTPUT") or "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython
    return getattr(get_ipython(), "kernel", None) is not None


def encode(figure) -> tuple[str, bytes, int]:
    """Media type and bytes of a matplotlib figure or PIL image, and its width on the page, half its own, in CSS pixels.

    A plot is a PNG. A picture is a PNG or a JPEG, whichever is smaller; one of more than MAX_BYTES is stored smaller.
    """
    from PIL import Image
    is_plot = hasattr(figure, "savefig")
    if is_plot:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close(figure)    # or the inline backend shows it a second time
        figure = Image.open(buffer)
    picture = figure.convert("RGB")
    width = picture.width // 2
    palettes = (picture.quantize(colors, Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE)
                for colors in (64, 128, 256))
    alike = (palette for palette in palettes if _error(palette, picture) < MAX_ERROR)
    png = _save(next(alike, picture), format="PNG", optimize=True)
    jpeg = _save_jpeg(picture)
    if len(png) <= (MAX_BYTES if is_plot else min(MAX_BYTES, len(jpeg))):
        return "image/png", png, width
    while len(jpeg) > MAX_BYTES:
        picture = picture.reduce(2)
        jpeg = _save_jpeg(picture)
    return "image/jpeg", jpeg, width


def _error(palette, picture) -> float:
    difference = np.asarray(palette.convert("RGB"), np.float32) - np.asarray(picture, np.float32)
    return float(np.sqrt(np.square(difference).mean()))


def _save_jpeg(picture) -> bytes:
    return _save(picture, format="JPEG", quality=80, subsampling="4:2:0", optimize=True)   # samples are enlarged anyway


def _save(picture, **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, **options)
    return buffer.getvalue()


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
    font = plot_font(22)
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
    """A row of images shown one at a time with step, play and a slider.

    It works in a page with no kernel; in a live notebook it is an ipywidget. Where neither runs, all images are shown
    side by side. images: a sequence of (3, H, W) uint8 arrays or tensors, or of PIL images of one size. labels: one
    text an image. size: width on the page in CSS pixels. Small images keep their own size and are enlarged by the page.
    """

    def __init__(self, images, labels, caption: str = "", size: int = 256):
        from PIL import Image
        pictures = [image.convert("RGB") if isinstance(image, Image.Image)
                    else Image.fromarray(_uint8(image).transpose(1, 2, 0)) for image in images]
        if not pictures or len(pictures) != len(labels):
            raise ValueError(f"filmstrip: {len(pictures)} images and {len(labels)} labels; give one label an image")
        for picture in pictures:
            picture.thumbnail((2 * size, 100_000))       # a page shows no more
        texts = [html.escape(str(label)) for label in labels]
        self._frames = [
            f'<figure style="margin: 0"><img src="data:image/webp;base64,{_webp(picture)}" alt="{text}" width="{size}" '
            f'style="image-rendering: pixelated"><figcaption>{text}</figcaption></figure>'
            for text, picture in zip(texts, pictures, strict=True)]
        self._caption = caption

    def widget(self):
        """The strip as ipywidgets: a play button and a slider, its second child, whose `value` is the image shown."""
        import ipywidgets
        last = len(self._frames) - 1
        play = ipywidgets.Play(max=last, interval=600)
        slider = ipywidgets.IntSlider(max=last, description="image")
        frame = ipywidgets.HTML(self._frames[0])
        ipywidgets.jslink((play, "value"), (slider, "value"))
        slider.observe(lambda change: setattr(frame, "value", self._frames[change["new"]]), "value")
        return ipywidgets.VBox([play, slider, frame, ipywidgets.HTML(html.escape(self._caption))])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        view = "application/vnd.jupyter.widget-view+json"      # a front end without widgets takes the HTML beside it
        return {view: self.widget()._repr_mimebundle_()[view]} if is_live() else {}

    def _repr_html_(self) -> str:
        identity = "film-" + hashlib.sha256(repr((self._frames, self._caption)).encode()).hexdigest()[:12]
        frames = "".join(self._frames)
        page = (Path(__file__).parent / "filmstrip.html").read_text(encoding="utf-8")
        for field, text in {"ID": identity, "FRAMES": frames, "CAPTION": html.escape(self._caption),
                            "LAST": str(len(self._frames) - 1)}.items():
            page = page.replace(f"%{field}%", text)
        return page

    def __repr__(self) -> str:
        return f"filmstrip of {len(self._frames)} images. {self._caption}"


def _uint8(images) -> np.ndarray:
    array = np.asarray(images)
    if array.dtype != np.uint8:
        raise ValueError(f"images must be uint8, not {array.dtype}")
    return array


def _webp(picture) -> str:
    """Base64 of the picture, lossless where that is smaller: plots are, photographs are not."""
    kinds = [_save(picture, format="WEBP", method=6, **options) for options in ({"lossless": True}, {"quality": 90})]
    return base64.b64encode(min(kinds, key=len)).decode()


@cache
def plot_font(size: int):
    """The font of the plots, which matplotlib ships, so that a picture does not depend on the machine."""
    import matplotlib
    from PIL import ImageFont
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)
