"""Many settings, the same seeds: each cell is sampled once, kept on disk, and comes back as rows of a data frame."""
import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from importlib.metadata import version
from numbers import Real
from pathlib import Path

import pandas as pd
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.files import atomic_write
from dit_repro.progress import progress

from . import guidance, sampler, solvers, thresholding
from .collapse import KINDS, STATISTICS, CollapseDetector, wilson_interval


@dataclass(frozen=True)
class Sweep:
    """All images of a sweep; `images` (N, 3, H, W) uint8 and `latents` (N, C, h, w) in the order of `rows`.

    rows: one row an image. The sweep's names, label, seed, the statistics and kinds of CollapseDetector, collapsed,
    result (the first kind found, else "image"), and of its cell seconds an image and evaluations of the network an
    image, both of when it was sampled.
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
          decode: Callable[[Tensor], Tensor], detector: CollapseDetector, **shared) -> Sweep:
    """Sample every cell that `folder` does not hold yet, decode all, and judge them.

    cells: {values of `names`: settings}. A cell's settings and `shared` together are the arguments of `sample`, with
    two liberties: `labels` may be one label for all seeds, and `model` may be a function of no argument that loads it
    (one model is held at a time, so keep the cells of one function together). decode: as Autoencoder.decode.
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
        described[key] = _describe_cell(shared | dict(settings), key)
    models, frames, images, latents = _Models(), [], [], []
    for key, settings in progress(cells.items(), desc="sweep", unit="cell"):
        settings, description = shared | dict(settings), described[key]
        made, facts = _cell(folder, models, settings, description)
        decoded = torch.cat([decode(part).cpu() for part in made.split(settings.get("batch_size", 64))])
        measured = detector.statistics(decoded, made)
        found = detector.judge(measured)
        result = found[[*KINDS]].idxmax(axis=1).where(found.collapsed, "image")
        named = {"label": description["labels"], "seed": description["seeds"], **dict(zip(names, key))}
        named = {name: named[name] for name in dict.fromkeys([*names, "label", "seed"])}
        frames.append(pd.concat([pd.DataFrame(named), measured, found], axis=1).assign(result=result, **facts))
        images.append(decoded)
        latents.append(made)
    return Sweep(names, pd.concat(frames, ignore_index=True), torch.cat(images), torch.cat(latents))


class _Models:
    """The last model that was asked for, loaded if need be, with its digest."""

    def __init__(self):
        self.source = None

    def __call__(self, source) -> tuple[nn.Module, str]:
        if source is not self.source:
            self.source = self.model = None  # let go of one before the next
            model = source if isinstance(source, nn.Module) else source()
            self.source, self.model, self.digest = source, model, _model_digest(model)
        return self.model, self.digest


def _cell(folder: Path, models: _Models, settings: dict, description: dict) -> tuple[Tensor, dict]:
    """Latents on the CPU, with seconds and evaluations an image: from the folder, or made now."""
    model, digest = models(settings["model"])
    device = next(model.parameters(), torch.empty(0)).device.type
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    address = json.dumps({"model": digest, "code": _code_digest(model), "autocast": autocast, **description})
    path = folder / f"{hashlib.sha256(address.encode()).hexdigest()[:24]}.safetensors"
    if path.is_file():
        try:
            with safetensors.safe_open(path, "pt") as file:
                return file.get_tensor("latents"), json.loads(file.metadata()["facts"])
        except (safetensors.SafetensorError, KeyError, TypeError):
            pass  # damaged since it was written: make it again
    evaluations = 0

    def count(module, inputs):
        nonlocal evaluations
        evaluations += len(inputs[0])

    hook = model.register_forward_pre_hook(count)
    try:
        started = time.perf_counter()
        drawn = {"model": model, "labels": description["labels"], "seeds": description["seeds"]}
        latents = sampler.sample(**{**settings, **drawn}).cpu()  # waits for a GPU
        seconds = time.perf_counter() - started
    finally:
        hook.remove()
    facts = {"seconds": seconds / len(latents), "evaluations": evaluations / len(latents)}
    content = safetensors.torch.save({"latents": latents.contiguous()},
                                     {"facts": json.dumps(facts), "settings": address})
    with atomic_write(path, "wb") as file:
        file.write(content)
    return latents, facts


def _model_digest(model: nn.Module) -> str:
    digest = hashlib.sha256(type(model).__qualname__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _code_digest(model: nn.Module) -> str:
    """Of the files that make latents out of weights and settings, so that a corrected sampler samples again."""
    modules = (guidance, sampler, solvers, thresholding, sys.modules[NoiseSchedule.__module__],
               sys.modules[type(model).__module__])
    files = [module.__file__ for module in modules if getattr(module, "__file__", None)]  # a notebook's has none
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def _describe_cell(settings: dict, key: tuple) -> dict:
    """Arguments of `sample` as JSON values, the same for the same samples. Labels and seeds as lists of one length."""
    try:
        arguments = inspect.signature(sampler.sample).bind(**settings)
    except TypeError as error:
        raise ValueError(f"sweep: cell {key!r}: {error}, for `sample`") from None
    arguments.apply_defaults()
    kept = {name: value for name, value in arguments.arguments.items() if name not in ("model", "batch_size")}
    seeds, labels = [int(seed) for seed in kept.pop("seeds")], torch.as_tensor(kept.pop("labels")).tolist()
    labels = [labels] * len(seeds) if isinstance(labels, int) else labels
    if len(labels) != len(seeds):
        raise ValueError(f"sweep: cell {key!r} has {len(seeds)} seeds for {len(labels)} labels: each image has its own")
    return {"labels": labels, "seeds": seeds, "steps": str(kept.pop("steps")),
            **{name: _describe(value, name) for name, value in kept.items()}}


def _describe(value, name: str):
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_describe(item, name) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _describe(item, name) for key, item in sorted(value.items())}
    if isinstance(value, NoiseSchedule):
        tables = value.betas.numpy().tobytes() + value.timesteps.numpy().tobytes()
        return [repr(value), hashlib.sha256(tables).hexdigest()]
    if isinstance(value, partial):
        return [_describe(item, name) for item in (value.func, value.args, value.keywords)]
    if is_dataclass(value) and not isinstance(value, type):
        return _describe(asdict(value), name)
    if hasattr(value, "from_config"):  # a diffusers scheduler, class or instance
        kind = value if isinstance(value, type) else type(value)
        config = {} if kind is value else {k: v for k, v in value.config.items() if not k.startswith("_")}
        return [kind.__name__, version("diffusers"), _describe(config, name)]
    if inspect.isbuiltin(value):
        return value.__name__
    if inspect.isfunction(value) and "<" not in value.__qualname__:  # else a lambda, or made inside a function
        return [value.__qualname__, inspect.getsource(value)]
    raise ValueError(f"sweep: {name}={value!r} has no lasting name, so its cell could not be found again; use "
                     "clamp_x0, dynamic_threshold, or functools.partial of a function with numbers")
