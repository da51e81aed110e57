"""Weights with the released names: the published file, training checkpoints, and what wrappers do to their keys."""
import argparse
import math
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dit_repro.files import atomic_write
from dit_repro.models.dit import DIT_CONFIGS, DiT, DiTConfig


def load_released_checkpoint(path: str | Path, weights: str = "ema", name: str | None = None) -> DiT:
    """The DiT in a checkpoint file, in eval mode and float32; its configuration is read off the shapes.

    path: the published `DiT-XL-2-256x256.pt` (a plain state dict), a training checkpoint with `ema` and `model`
    (`weights` says which), one saved from a compiled or DDP-wrapped model, or any of these as safetensors.
    The number of heads leaves no trace in the shapes: a width that DIT_CONFIGS lacks needs `name`.
    Raises ValueError naming the first keys that differ, or what the file is instead.
    """
    path = Path(path)
    if name is not None and name not in DIT_CONFIGS:
        raise ValueError(f"unknown model {name!r}, expected one of {', '.join(DIT_CONFIGS)}")
    state = _select(read_weights(path), weights, path)
    try:
        return build_from_state(path, state, *_infer(path, state, name))
    except KeyError as error:
        keys = ", ".join(list(state)[:3]) or "none"
        raise ValueError(f"{path} is no DiT checkpoint: it has no {error}; its first tensors: {keys}") from None


def save_released_checkpoint(model: DiT, path: str | Path) -> None:
    """Write a plain state dict with the released names: safetensors where `path` ends so, else torch.save."""
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    with atomic_write(path, "wb") as file:
        if Path(path).suffix == ".safetensors":
            file.write(save(state))
        else:
            torch.save(state, file)


def read_weights(path: Path) -> dict:
    """The content of a weights file, without running any code in it; ValueError where it is something else."""
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):   # the official train.py saves its arguments
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} is not a weights file that loads without running code ({reason}). Expected a .pt "
                         "state dict or training checkpoint, or .safetensors") from None
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a state dict or a training checkpoint")
    return content


def _select(content: dict, weights: str, path: Path) -> dict[str, Tensor]:
    """The state dict among a file's content, without the prefixes that torch.compile and DDP put before names."""
    if weights not in ("ema", "model"):
        raise ValueError(f"weights {weights!r}: expected 'ema' or 'model'")
    kept = {kind: content[kind] if isinstance(content.get(kind), dict) else
            {key.removeprefix(f"{kind}."): value for key, value in content.items() if str(key).startswith(f"{kind}.")}
            for kind in ("ema", "model")}   # nested in a .pt, flat in safetensors
    kept = {kind: state for kind, state in kept.items() if state}
    if kept and weights not in kept:
        raise ValueError(f"{path} has no {weights!r} weights, only {', '.join(map(repr, kept))}: pass weights=")
    wrappers = ("_orig_mod", "module")
    return {".".join(part for part in str(key).split(".") if part not in wrappers): value
            for key, value in (kept[weights] if kept else content).items() if isinstance(value, Tensor)}


def _infer(path: Path, state: dict[str, Tensor], name: str | None) -> tuple[DiTConfig, int, int, int, bool]:
    """(config, input_size, in_channels, num_classes, learn_sigma) of a state dict with the released names."""
    width, in_channels, patch, _ = state["x_embedder.proj.weight"].shape
    input_size = math.isqrt(state["pos_embed"].shape[1]) * patch
    classes = len(state["y_embedder.embedding_table.weight"]) - 1
    learn_sigma = has_learned_sigma(path, len(state["final_layer.linear.weight"]) // patch**2, in_channels)
    depth = 1 + max((int(key.split(".")[1]) for key in state if key.startswith("blocks.")), default=-1)
    heads = {config.width: config.heads for config in DIT_CONFIGS.values()}
    if name is None and width not in heads:
        raise ValueError(f"{path} has width {width}, none of {sorted(heads)}, so its number of heads is unknown: "
                         "add the model to DIT_CONFIGS and pass name=")
    config = DIT_CONFIGS[name] if name else DiTConfig(depth, width, heads[width], patch)
    return config, input_size, in_channels, classes, learn_sigma


def has_learned_sigma(path: Path, out_channels: int, in_channels: int) -> bool:
    if out_channels not in (in_channels, 2 * in_channels):
        raise ValueError(f"{path} has {out_channels} output channels for {in_channels} input channels: a DiT has as "
                         "many, or twice as many")
    return out_channels == 2 * in_channels


def build_from_state(path: Path, state: dict[str, Tensor], config: DiTConfig, *arguments) -> DiT:
    """The model around `state`, which becomes its parameters; ValueError listing the keys that do not fit."""
    with torch.device("meta"):
        model = DiT(config, *arguments)
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in state.items()}
    differing = [f"{key} is {found.get(key, 'missing')}, expected {expected.get(key, 'no such key')}"
                 for key in dict.fromkeys([*expected, *found]) if found.get(key) != expected.get(key)]
    if differing:
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(f"{path} does not fit a DiT of depth {config.depth}, width {config.width}, "
                         f"patch {config.patch_size}: {'; '.join(differing[:3])}{more}")
    model.load_state_dict({key: value.float() for key, value in state.items()}, assign=True)
    return model.eval()
