"""Everything of one training step in one file, and the step taken again from it under other settings."""
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dit_repro.latents import Autoencoder, LatentStore
from dit_repro.progress import progress
from dit_repro.stability.faults import FAULTS, plant
from dit_repro.stability.step import CORRECT, Stages, take_step
from dit_repro.training import RunFolder, TrainConfig
from dit_repro.training.batches import (
    FLIP,
    LABEL,
    LATENT,
    NOISE,
    TIMESTEP,
    batch_indices,
    generator,
    open_latents,
)
from dit_repro.training.checkpoints import checkpoint_path, read_checkpoint, write_checkpoint
from dit_repro.training.config import NUM_TIMESTEPS
from dit_repro.training.parallel import DEVICE, Ranks
from dit_repro.training.state import TrainState

FORMAT = "dit-repro capture 1"
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")


def draw(config: TrainConfig, num_images: int, step: int, retry: int = 0) -> dict[str, Tensor]:
    """Every random choice of a global batch, from the streams that `draw_batch` uses; labels are not among them."""
    n = config.global_batch_size
    shape = (n, config.in_channels, config.input_size, config.input_size)

    def stream(kind):
        return generator(config.seed, kind, step, retry)

    noise, input_noise = config.objective.draw_noise(shape, stream(NOISE))
    return {"indices": batch_indices(config.seed, step, n, num_images),
            "flipped": torch.rand(n, generator=stream(FLIP)) < (0.5 if config.flip else 0),
            "latent_noise": torch.randn(shape, generator=stream(LATENT)),
            "t": torch.randint(NUM_TIMESTEPS, (n,), generator=stream(TIMESTEP)),
            "noise": noise, "input_noise": input_noise,
            "dropped": torch.rand(n, generator=stream(LABEL)) < config.label_dropout}


@dataclass(frozen=True)
class Capture:
    """One step: what it started from, what was drawn for it, and every quantity that it made.

    before: a checkpoint's tensors. batch: moments (N, 2C, h, w), images (N, 3, H, W) uint8 where they were given,
    labels and the draws. record: quantities by name (`take_step`). details: what `state.scalars` and the machine say.
    """
    config: TrainConfig
    step: int
    details: dict
    before: dict[str, Tensor]
    batch: dict[str, Tensor]
    record: dict[str, Tensor]

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file with its settings and checksums in the header, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        sections = {"before": self.before, "batch": self.batch, "record": self.record}
        tensors = {f"{section}.{name}": tensor.contiguous().clone()
                   for section, named in sections.items() for name, tensor in named.items()}
        write_checkpoint(path, tensors, {"format": FORMAT, "config": asdict(self.config), "step": self.step,
                                         "details": self.details})
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Capture":
        """The capture in a file; ValueError for another kind of file, DamagedCheckpoint for an altered one."""
        tensors, scalars = read_checkpoint(Path(path))
        if scalars.get("format") != FORMAT:
            raise ValueError(f"{path} is not a capture: make one with `dit-repro stability capture RUN --step N`")
        sections = {section: {name.removeprefix(f"{section}."): tensor for name, tensor in tensors.items()
                              if name.startswith(f"{section}.")} for section in ("before", "batch", "record")}
        return cls(_config_from(scalars["config"]), scalars["step"], scalars["details"], **sections)


def capture_step(run: RunFolder | str | Path, step: int, path: str | Path | None = None, *,
                 images: Tensor | None = None, autoencoder: Autoencoder | None = None, fault: str | None = None,
                 **settings) -> Capture:
    """Take step `step` of a run again and keep everything of it; written to `path` where one is given.

    The nearest earlier checkpoint is the start, and the steps from there are replayed, since draws depend on (seed,
    step) alone. settings: fields of TrainConfig changed for this step only. `images` (N, 3, H, W) uint8 with an
    `autoencoder` stand in for the store's latents. `fault`: a name in FAULTS, planted into the step.
    """
    run = run if isinstance(run, RunFolder) else RunFolder(run)
    state, store = state_before(run, step)
    return capture_state(state, run.config(), store, path, images=images, autoencoder=autoencoder, fault=fault,
                         **settings)


def capture_state(state: TrainState, config: TrainConfig, store: LatentStore, path: str | Path | None = None, *,
                  images: Tensor | None = None, autoencoder: Autoencoder | None = None, fault: str | None = None,
                  **settings) -> Capture:
    """`capture_step` for a state in memory, of which the next step is captured; the state itself is left alone."""
    stages, changed = plant(fault) if fault else (CORRECT, {})
    if "predict" in (FAULTS[fault].changes if fault else ()) and not config.model.startswith("DiT"):
        raise ValueError(f"fault {fault!r} changes a block of a DiT, which {config.model} does not have")
    config = _plain(replace(config, **{**settings, **changed}))
    if images is not None and (autoencoder is None or len(images) != config.global_batch_size):
        raise ValueError(f"{len(images)} images: expected an autoencoder and the {config.global_batch_size} of the "
                         "batch (global_batch_size)")
    step, before, scalars = state.step + 1, state.tensors(), state.scalars()
    batch = draw(config, len(store), step, state.retry)
    batch["labels"] = torch.as_tensor(np.asarray(store.labels))[batch["indices"]]
    scale_factor = store.scale_factor if images is None else autoencoder.scale_factor
    if images is None:
        batch["moments"] = store.moments(batch["indices"], batch["flipped"])
    else:
        batch |= {"images": images, "moments": _encode(autoencoder, images, stages)}
    details = {"scalars": scalars, "scale_factor": scale_factor, "num_images": len(store), "torch": torch.__version__,
               "device": DEVICE, "moments_dtype": store.manifest["dtype"] if images is None else "float32"}
    batch["torch_rng_state"] = torch.get_rng_state()   # no part of DiT draws from it; another model's might
    record = take_step(config, _restored(config, before, scalars), _tensors_of(batch), scale_factor, stages)
    capture = Capture(config, step, details, before, batch, record)
    if path:
        capture.save(path)
    return capture


def state_before(run: RunFolder, step: int) -> tuple[TrainState, LatentStore]:
    """The state that a run had before `step`: its nearest earlier checkpoint and the steps since then, replayed."""
    config = _plain(run.config())
    if not 1 <= step <= config.num_steps:
        raise ValueError(f"step {step}: expected 1 to {config.num_steps}, the steps of {run.path}")
    store = open_latents(config, 1)
    state = TrainState(config, Ranks(0, 1, torch.device(DEVICE)))
    if earlier := [saved for saved in run.checkpoints() if saved < step]:
        state.load(*read_checkpoint(checkpoint_path(run.checkpoint_folder, "step", earlier[-1])))
    skipped = {event["step"] for event in run.events() if event["event"] == "skipped_step"}
    missing = range(state.step + 1, step)
    for number in progress(missing, desc="replay", unit="step") if missing else ():
        if number in skipped:
            state.step += 1
            continue
        batch = draw(config, len(store), number, state.retry)
        batch["labels"] = torch.as_tensor(np.asarray(store.labels))[batch["indices"]]
        batch["moments"] = store.moments(batch["indices"], batch["flipped"])
        take_step(config, state, _tensors_of(batch), store.scale_factor)
    return state, store


def take_again(capture: Capture, precision: str | None = None, overrides: Iterable[str] = (),
               anchored: bool = False) -> dict[str, Tensor]:
    """The captured step once more, without faults: its record in `precision` ("fp64" beside those of TrainConfig).

    overrides: "setting=value", as for training. Anchored, each quantity follows from the captured ones before it.
    """
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
    config = capture.config.override(overrides)
    if precision:
        config = replace(config, precision="fp32" if precision == "fp64" else precision)
    state = _restored(_plain(config), capture.before, capture.details["scalars"], wide=precision == "fp64")
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(capture.batch["torch_rng_state"])
        return take_step(config, state, _tensors_of(capture.batch), capture.details["scale_factor"],
                         anchor=capture.record if anchored else None)


def _restored(config: TrainConfig, tensors: dict, scalars: dict, wide: bool = False) -> TrainState:
    state = TrainState(config, Ranks(0, 1, torch.device(DEVICE)))
    if wide:
        state.model.double()
        state.ema.tensors = {name: tensor.double() for name, tensor in state.ema.tensors.items()}
    state.load(tensors, scalars)
    return state


def _plain(config: TrainConfig) -> TrainConfig:
    """The same numbers from one process, up to rounding, with every activation in reach."""
    return replace(config, compile=False, activation_checkpointing=False, parallel="ddp", tensorboard=False)


def _tensors_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name not in ("images", "torch_rng_state", "indices")}


@torch.no_grad()
def _encode(autoencoder: Autoencoder, images: Tensor, stages: Stages) -> Tensor:
    pixels = stages.pixels(images.to(autoencoder.model.device).float())
    return stages.encode(autoencoder.model, pixels).float().cpu()


def _config_from(values: dict) -> TrainConfig:
    return TrainConfig.from_json(json.dumps(values))
