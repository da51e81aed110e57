"""The speed ladder: one training step under declared settings, one change at a time, against the device's own limit.

Rungs are measured three ways. "cumulative": each on top of those before it, as in the replication post. "alone": each
by itself on the baseline. "variant": what replaces a part of the last cumulative rung, without compilation.
"""
import copy
import gc
import logging
import statistics
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dit_repro.diffusion import NoiseSchedule, Objective, training_losses
from dit_repro.models import DiT, DiTConfig, count_macs, count_parameters, create_model
from dit_repro.progress import progress
from dit_repro.speed.device import matmul_ceiling, peak_above, synchronize
from dit_repro.speed.rewrites import BatchedModulation, use_fp8
from dit_repro.training.ema import EMA
from dit_repro.training.parallel import device_name
from dit_repro.training.precision import autocast, matmul_precision

PARITY_STEPS = 20
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}
# One H100, DiT-B/2 at batch 256: ms a step that the replication post reports, for a column beside ours.
POST_MS = {"fp32": 874.0, "TF32": 353.0, "bf16 autocast": 194.6, "fused AdamW": 192.6, "compile": 105.1}


@dataclass(frozen=True)
class Settings:
    """One way to run the same step; the defaults are the bottom of the ladder."""
    precision: str = "fp32"      # or tf32, bf16
    threads: int = 1             # of a CPU
    fused: bool = False          # AdamW as one kernel
    compile: str = ""            # "model", "graphs" (CUDA graphs around the compiled model) or "blocks", each by itself
    resident: bool = False       # batches wait on the device; otherwise they are copied there at each step
    foreach_ema: bool = False    # the average of all weights at once; otherwise a loop over them
    attention: str = "fused"     # PyTorch's own choice; "plain" matrix products; or a name in BACKENDS
    checkpointing: bool = False
    batched_modulation: bool = False   # of all blocks as one product
    fp8: bool = False            # products of the blocks, with torchao


LADDER = {
    "all cores": {"threads": torch.get_num_threads()},   # one a core, unless OMP_NUM_THREADS says otherwise
    "TF32": {"precision": "tf32"},
    "bf16 autocast": {"precision": "bf16"},
    "fused AdamW": {"fused": True},
    "compile": {"compile": "model"},
    "CUDA graphs": {"compile": "graphs"},
    "latents on the device": {"resident": True},
    "foreach EMA": {"foreach_ema": True},
}
# Without compile: it would take a minute a variant, and what differs is the same kernels.
VARIANTS = {
    "no compile": {"compile": ""},
    "compile each block": {"compile": "blocks"},
    "plain attention": {"compile": "", "attention": "plain"},
    "flash attention": {"compile": "", "attention": "flash"},
    "cuDNN attention": {"compile": "", "attention": "cudnn"},
    "efficient attention": {"compile": "", "attention": "efficient"},
    "activation checkpointing": {"compile": "", "checkpointing": True},
    "batched modulation": {"compile": "", "batched_modulation": True},
    "fp8 products": {"fp8": True, "precision": "bf16"},
}


def why_not(changes: dict, device: torch.device, compile: bool) -> str | None:
    """Why a device cannot do a rung, or why it is left out; None where it can."""
    on_gpu = device.type == "cuda"
    if changes.get("compile") and not compile:
        return "compilation is off (by default on a CPU: --compile)"
    if "threads" in changes and (on_gpu or changes["threads"] == 1):
        return "for a CPU of several cores"
    if not on_gpu:
        if changes.get("precision") == "tf32":
            return "a CPU has no TF32"
        if changes.get("compile") == "graphs" or changes.get("attention") in BACKENDS or "fp8" in changes:
            return "for CUDA devices"
        if "resident" in changes:
            return "a CPU's memory is the device's memory"
    elif "fp8" in changes and torch.cuda.get_device_capability(device) < (8, 9):
        return "needs compute capability 8.9"
    elif changes.get("precision") in ("tf32", "bf16") and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0"
    return None


class Bench:
    """The weights, optimizers and batches that all settings share, so that memory does not grow with the ladder."""

    def __init__(self, model: str | DiTConfig, batch_size: int, device: torch.device, input_size: int = 32):
        self.device, self.batch_size = device, batch_size
        with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            self.model = (DiT(model, input_size) if isinstance(model, DiTConfig) else
                          create_model(model, input_size=input_size))
        self.initial = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.ema = EMA(self.model, 0.9999)
        self.schedule = NoiseSchedule.linear()
        draw = torch.Generator().manual_seed(0)
        shape = (batch_size, 4, input_size, input_size)
        self.batches = [(torch.randn(shape, generator=draw), torch.randint(1000, shape[:1], generator=draw),
                         torch.randint(1001, shape[:1], generator=draw), torch.randn(shape, generator=draw))
                        for _ in range(4)]
        self.optimizers = {}

    @cached_property
    def resident(self):
        return [tuple(tensor.to(self.device) for tensor in batch) for batch in self.batches]

    def optimizer(self, fused: bool) -> torch.optim.AdamW:
        if fused not in self.optimizers:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizers[fused] = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=fused or None)
        return self.optimizers[fused]

    @torch.no_grad()
    def reset(self) -> None:
        """The weights as they were at first, and optimizers that have seen nothing."""
        torch._foreach_copy_(list(self.model.parameters()), self.initial)
        for optimizer in self.optimizers.values():
            optimizer.state.clear()


class Step:
    """The training step of a Bench under some settings; what it measured is in its attributes."""

    def __init__(self, bench: Bench, settings: Settings):
        self.bench, self.settings = bench, settings
        self.count, self.seconds = 0, []
        # Modules of its own around the shared weights: compiling or switching one step leaves the others alone.
        model = copy.deepcopy(bench.model, {id(p): p for p in bench.model.parameters()})
        model.checkpoint_activations = settings.checkpointing
        if settings.batched_modulation:
            model.__class__ = BatchedModulation
        if settings.fp8:
            use_fp8(model)
        for block in model.blocks:
            block.attn.fused_attn = settings.attention != "plain"
            if settings.compile == "blocks":
                block.compile(dynamic=False)
        if settings.compile in ("model", "graphs"):
            mode = {"graphs": "reduce-overhead"}.get(settings.compile)
            model = torch.compile(model, mode=mode, dynamic=False)
        self.model = model

    def __call__(self) -> torch.Tensor:
        """One step; returns its mean loss, on the device."""
        bench, settings = self.bench, self.settings
        if settings.compile == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        which = self.count % len(bench.batches)
        batch = bench.resident[which] if settings.resident else [x.to(bench.device) for x in bench.batches[which]]
        x0, t, y, noise = batch
        loss = training_losses(self.predict, x0, t, y, bench.schedule, Objective(), noise=noise).total.mean()
        loss.backward()
        optimizer = bench.optimizer(settings.fused)
        optimizer.step()
        optimizer.zero_grad()
        self.average()
        self.count += 1
        return loss.detach()

    def predict(self, x, t, y):
        backend = BACKENDS.get(self.settings.attention)
        with autocast(self.settings.precision, self.bench.device), sdpa_kernel(backend) if backend else nullcontext():
            return self.model(x, t, y)   # (N, 2C, H, W)

    @torch.no_grad()
    def average(self) -> None:
        ema, model = self.bench.ema, self.bench.model
        if self.settings.foreach_ema:
            ema.update(model, 1)
            return
        for name, weight in model.state_dict().items():
            ema.tensors[name].mul_(ema.decay).add_(weight, alpha=1 - ema.decay)

    def warm_up(self, parity: bool) -> None:
        """Run until compiled and settled; measures peak memory, losses of fixed steps, and steps for 0.1 s."""
        bench = self.bench
        bench.reset()
        with self.active():
            losses = [self()]
            transient = 0
            for _ in range(3 if self.settings.compile == "graphs" else 1):   # recorded in the second step
                transient = max(transient, peak_above(lambda: losses.append(self()), bench.device))
            state = bench.optimizer(self.settings.fused).state.values()
            held = [*bench.model.parameters(), *bench.ema.tensors.values(),
                    *(x for slots in state for x in slots.values() if torch.is_tensor(x))]
            self.peak_bytes = transient + sum(tensor.numel() * tensor.element_size() for tensor in held)
            if parity:
                losses += [self() for _ in range(PARITY_STEPS - len(losses))]
            self.losses = torch.stack(losses).double().tolist() if parity else None
            self.inner = max(1, round(0.1 / self.timed(1)))

    def timed(self, steps: int) -> float:
        """Seconds a step, over `steps` of them."""
        synchronize(self.bench.device)
        start = time.perf_counter()
        for _ in range(steps):
            self()
        synchronize(self.bench.device)
        return (time.perf_counter() - start) / steps

    @contextmanager
    def active(self):
        """Inside, the process-wide switches are as the settings say."""
        threads = torch.get_num_threads()
        if self.bench.device.type == "cpu":
            torch.set_num_threads(self.settings.threads)
        try:
            with matmul_precision(self.settings.precision):
                yield
        finally:
            torch.set_num_threads(threads)


def run_ladder(model_name: str, batch_size: int, device: str | torch.device, *, input_size: int = 32, repeats: int = 5,
               compile: bool | None = None, alone: bool = True, variants: dict | None = None, parity: bool = True,
               baseline: Settings | None = None, rungs: dict | None = None, time_limit: float | None = None) -> dict:
    """Measure every rung; returns what `bench ladder` writes as JSON.

    Random latents (N, 4, input_size, input_size) and labels. Each rung warms up over 20 fixed steps from the same
    weights, whose losses are compared with float32's; then `repeats` rounds visit all rungs in turn, so that drift of
    the machine does not make a rung. `compile`: by default on a GPU only. `baseline`, `rungs` and `variants` replace
    float32, LADDER and VARIANTS. `time_limit`: seconds after which no further rung is begun. A rung that fails or that
    the device cannot do carries the reason.
    """
    start, device = time.monotonic(), torch.device(device)
    compile = device.type == "cuda" if compile is None else compile
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)   # compiling for a CPU, it warns of no GPU
    torch._dynamo.reset()   # graphs of an earlier ladder count against the limit of recompilations
    gc.collect()            # and its weights wait in reference cycles
    bench = Bench(model_name, batch_size, device, input_size)
    baseline = baseline or Settings()
    rows, settings = [("cumulative", baseline.precision, baseline, None)], baseline
    rungs, variants = LADDER if rungs is None else rungs, VARIANTS if variants is None else variants
    for name, changes in rungs.items():
        reason = why_not(changes, device, compile)
        settings = settings if reason else replace(settings, **changes)
        rows.append(("cumulative", name, settings, reason))
    replacing = {name: changes for name, changes in variants.items() if len(changes) > 1}   # more than no compile
    for kind, base, group in (("alone", baseline, {**rungs, **replacing} if alone else {}),
                              ("variant", settings, variants)):
        rows += [(kind, name, replace(base, **changes), why_not(changes, device, compile))
                 for name, changes in group.items()]

    steps = {}     # Settings: Step, or the reason why there is none
    for _, _, settings, reason in progress(rows, desc=f"warm up {model_name}", unit="rung"):
        if reason or settings in steps:
            continue
        if time_limit is not None and steps and time.monotonic() - start > time_limit:
            steps[settings] = f"left out: the {time_limit:.0f} s for this ladder were over"
            continue
        try:
            steps[settings] = step = Step(bench, settings)
            step.warm_up(parity)
        except (RuntimeError, ImportError) as error:   # out of memory, no kernel, no compiler: that is the result
            steps[settings] = (str(error).strip() or type(error).__name__).splitlines()[0]
            bench.optimizer(settings.fused).zero_grad()
            torch.cuda.empty_cache()   # does nothing without a GPU
    live = [step for step in steps.values() if isinstance(step, Step)]
    for _ in progress(range(repeats), desc=f"measure {model_name}", unit="round"):
        for step in live:
            with step.active():
                step.seconds.append(step.timed(step.inner))

    flops = 6 * count_macs(bench.model) * batch_size   # two a multiply-accumulate; the backward pass costs two forwards
    ceilings = {p: matmul_ceiling(device, p) for p in sorted({step.settings.precision for step in live})}
    first = steps[baseline]
    reference = first if isinstance(first, Step) else None
    return {
        "device": device_name(device), "torch": torch.__version__, "model": model_name, "batch_size": batch_size,
        "tokens": bench.model.pos_embed.shape[1], "parameters": count_parameters(bench.model),
        "flops_per_step": flops, "ceilings": ceilings, "repeats": repeats,
        "rungs": [{"kind": kind, "name": name, "settings": asdict(settings),
                   **_reading(reason or steps[settings], reference, flops, ceilings)}
                  for kind, name, settings, reason in rows],
    }


def _reading(step: Step | str, reference: Step | None, flops: float, ceilings: dict) -> dict:
    """The numbers of one rung, or why there are none."""
    if isinstance(step, str):
        return {"why_not": step}
    seconds = statistics.median(step.seconds)
    reading = {"seconds": seconds, "fastest": min(step.seconds), "slowest": max(step.seconds),
               "images_per_second": step.bench.batch_size / seconds, "peak_bytes": step.peak_bytes,
               "utilization": flops / seconds / ceilings[step.settings.precision]}
    if reference:
        reading["speedup"] = statistics.median(reference.seconds) / seconds
        if step.losses:   # largest over the fixed steps
            reading["loss_difference"] = max(abs(a / b - 1) for a, b in zip(step.losses, reference.losses))
    return reading
