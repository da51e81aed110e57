"""One cell: a model, labels, seeds and settings, sampled once and kept on disk under all that decides its latents."""
import hashlib
import inspect
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from importlib.metadata import version
from numbers import Real
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.files import atomic_write

from . import guidance, sampler, solvers, thresholding


class Models:
    """The last model that was asked for, loaded if need be, with its digest."""

    def __init__(self):
        self.source = None

    def __call__(self, source) -> tuple[nn.Module, str]:
        if source is not self.source:
            self.source = self.model = None  # let go of one before the next
            model = source if isinstance(source, nn.Module) else source()
            self.source, self.model, self.digest = source, model, _model_digest(model)
        return self.model, self.digest


def sample_cell(folder: Path, models: Models, settings: dict, description: dict) -> tuple[Tensor, dict]:
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


def describe_cell(settings: dict, key: tuple) -> dict:
    """Arguments of `sample` as JSON values, the same for the same samples. Labels and seeds as lists of one length."""
    try:
        arguments = inspect.signature(sampler.sample).bind(**settings)
    except TypeError as error:
        raise ValueError(f"cell {key!r}: {error}, for `sample`") from None
    arguments.apply_defaults()
    kept = {name: value for name, value in arguments.arguments.items() if name not in ("model", "batch_size")}
    seeds, labels = [int(seed) for seed in kept.pop("seeds")], torch.as_tensor(kept.pop("labels")).tolist()
    labels = [labels] * len(seeds) if isinstance(labels, int) else labels
    if len(labels) != len(seeds):
        raise ValueError(f"cell {key!r} has {len(seeds)} seeds for {len(labels)} labels: each image has its own")
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
    raise ValueError(f"{name}={value!r} has no lasting name, so its cell could not be found again; use "
                     "clamp_x0, dynamic_threshold, or functools.partial of a function with numbers")
