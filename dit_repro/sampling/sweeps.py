"""Many settings, the same seeds: each cell is sampled once, kept on disk, and comes back as rows of a data frame."""
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from dit_repro.progress import progress

from .cells import Models, describe_cell, sample_cell
from .collapse import KINDS, STATISTICS, CollapseDetector, wilson_interval


@dataclass(frozen=True)
class Sweep:
    """All images of a sweep; `images` (N, 3, H, W) uint8 and `latents` (N, C, h, w) in the order of `rows`.

    rows: one row an image. The sweep's names, label, seed, class where `class_names` were given, the statistics and
    kinds of CollapseDetector, collapsed, result (the first kind found, else "image"), and of its cell seconds an image
    and evaluations of the network an image, both of when it was sampled.
    """
    names: tuple[str, ...]
    rows: pd.DataFrame
    images: Tensor
    latents: Tensor

    def where(self, **values) -> "Sweep":
        """The images whose rows have these values, as in where(step=1000, seed=3); ValueError where there are none."""
        kept = (self.rows[[*values]] == pd.Series(values)).all(axis=1).to_numpy()
        if not kept.any():
            raise ValueError(f"sweep: no row with {values}")
        chosen = torch.tensor(kept)
        return Sweep(self.names, self.rows[kept].reset_index(drop=True), self.images[chosen], self.latents[chosen])

    def rates(self, *by: str, kind: str = "collapsed") -> pd.DataFrame:
        """One row a cell, or a group of equal `by`: images, count, rate of the kind, its Wilson interval low..high, and
        the means of mean_pixel, seconds and evaluations."""
        groups = self.rows.groupby(list(by or self.names), sort=False, dropna=False)
        table = groups[kind].agg(images="size", count="sum")
        table["rate"] = table["count"] / table["images"]
        table[["low", "high"]] = [wilson_interval(*pair) for pair in zip(table["count"], table["images"])]
        return table.join(groups[["mean_pixel", "seconds", "evaluations"]].mean())

    def grid(self, row: str, column: str) -> tuple[Tensor, list, list]:
        """For `sample_grid`: the first image of each pair, (rows, columns, 3, H, W), and both lists of values.

        Raises ValueError where a pair has no image.
        """
        first = self.rows.drop_duplicates([row, column]).reset_index().set_index([row, column])["index"]
        down, across = list(self.rows[row].unique()), list(self.rows[column].unique())
        if missing := [(r, c) for r in down for c in across if (r, c) not in first.index]:
            raise ValueError(f"grid of {row} by {column}: no image for {missing[0]}; choose names that were crossed")
        chosen = [[int(first[r, c]) for c in across] for r in down]
        return self.images[torch.tensor(chosen)], down, across


def sweep(names: Sequence[str], cells: Mapping[tuple, Mapping], folder: str | Path, *,
          decode: Callable[[Tensor], Tensor], detector: CollapseDetector, class_names: Sequence[str] | None = None,
          **shared) -> Sweep:
    """Sample every cell that `folder` does not hold yet, decode all, and judge them.

    cells: {values of `names`: settings}. A cell's settings and `shared` together are the arguments of `sample`, with
    two liberties: `labels` may be one label for all seeds, and `model` may be a function of no argument that loads it
    (one model is held at a time, so keep the cells of one function together). decode: as Autoencoder.decode.
    class_names: of the labels, for the column `class`. Few cells of many images are faster than many of few.
    A cell is found again by its weights, its settings and the sampler's code, whatever it is called and whatever its
    batch_size. Raises ValueError for what `sample` does not take, and for a setting without a lasting name.
    """
    names, folder = tuple(names), Path(folder)
    if not cells:
        raise ValueError("sweep: no cells")
    if taken := {*names} & {*STATISTICS, *KINDS, "collapsed", "result", "seconds", "evaluations"}:
        raise ValueError(f"sweep: the name {taken.pop()!r} is that of a result; choose another")
    described = {}
    for key, settings in cells.items():
        if not isinstance(key, tuple) or len(key) != len(names):
            raise ValueError(f"sweep: cell {key!r}, expected a tuple of {', '.join(names)}")
        if twice := {*settings} & {*shared}:
            raise ValueError(f"sweep: {twice.pop()} of cell {key!r} is also given for all cells")
        described[key] = describe_cell(shared | dict(settings), key)
    models, frames, images, latents = Models(), [], [], []
    for key, settings in progress(cells.items(), desc="sweep", unit="cell"):
        settings, description = shared | dict(settings), described[key]
        made, facts = sample_cell(folder, models, settings, description)
        decoded = torch.cat([decode(part).cpu() for part in made.split(settings.get("batch_size", 64))])
        measured = detector.statistics(decoded, made)
        found = detector.judge(measured)
        result = found[[*KINDS]].idxmax(axis=1).where(found.collapsed, "image")
        named, image = dict(zip(names, key)), {"label": description["labels"], "seed": description["seeds"]}
        if class_names:
            image["class"] = [class_names[label] for label in image["label"]]
        named = pd.DataFrame(named | image | named)  # a name of the sweep's wins
        frames.append(pd.concat([named, measured, found], axis=1).assign(result=result, **facts))
        images.append(decoded)
        latents.append(made)
    return Sweep(names, pd.concat(frames, ignore_index=True), torch.cat(images), torch.cat(latents))
