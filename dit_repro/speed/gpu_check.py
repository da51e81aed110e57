"""The check of one GPU: the ladder for S/2 and B/2, and whether XL/2 fits. At most six minutes on an H200.

`python -m dit_repro.speed.gpu_check OUT.json` needs torch, timm, torchvision and safetensors, nothing else.
"""
import sys
import time
from pathlib import Path

import torch

from dit_repro.files import write_json
from dit_repro.speed.ladder import Settings, run_ladder
from dit_repro.speed.report import Reading, ladder_table

TIME_LIMIT = 320   # seconds after which no rung is begun; the last one may take half a minute to compile
FAST = Settings("bf16", fused=True, resident=True, foreach_ema=True)
CHECKPOINTING = {"activation checkpointing": {"checkpointing": True}}
XL = {"baseline": FAST, "alone": False, "variants": {}, "parity": False, "rungs": CHECKPOINTING}
# In the order of what must not be missed when time runs out.
LADDERS = (
    ("DiT-XL/2", 64, XL),
    ("DiT-XL/2", 128, XL),
    ("DiT-XL/2", 256, {**XL, "rungs": {**CHECKPOINTING, "compile each block": {"compile": "blocks"}}}),
    ("DiT-B/2", 256, {"alone": False}),
    ("DiT-S/2", 256, {"alone": False, "variants": {}}),
)


def gpu_check(out: str | Path, device: str = "cuda") -> list[Reading]:
    """Measure every ladder of LADDERS; write all numbers and the targets' readings to `out` after each of them."""
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("no CUDA device here: use a machine with a GPU, or `dit-repro bench ladder` on a CPU")
    start, results, readings = time.monotonic(), [], []
    for model, batch_size, options in LADDERS:
        left = max(0.0, TIME_LIMIT - (time.monotonic() - start))
        if results and left == 0:
            break
        results.append(run_ladder(model, batch_size, device, time_limit=left, **options))
        readings = [reading for result in results for reading in judge(result)]
        write_json(out, {"seconds": time.monotonic() - start, "ladders": results,
                         "targets": [{**vars(reading), "passed": reading.passed} for reading in readings]})
        print(*ladder_table(results[-1]), sep="\n", flush=True)
    return readings


def judge(result: dict) -> list[Reading]:
    """The targets that one ladder can answer: total speedup, B/2's time, XL/2's memory."""
    measured = [rung for rung in result["rungs"] if "seconds" in rung]
    what = f"{result['model']} at batch {result['batch_size']}"
    if result["model"] == "DiT-XL/2":
        memory = {rung["settings"]["checkpointing"]: rung["peak_bytes"] / 1e9 for rung in reversed(measured)}
        limits = {False: 141, True: 80} if result["batch_size"] == 256 else {}
        return [Reading(f"{what}, {'with' if on else 'without'} checkpointing, peak memory", peak, "GB",
                        at_most=limits.get(on)) for on, peak in memory.items()]
    best = min((rung for rung in measured if rung["kind"] == "cumulative"), key=lambda rung: rung["seconds"],
               default=None)
    if best is None or "speedup" not in best:
        return []
    return [Reading(f"{what}, fp32 without TF32 against {best['name']}", best["speedup"], "x", at_least=10),
            Reading(f"{what}, {best['name']}", 1e3 * best["seconds"], "ms a step",
                    at_most=65 if result["model"] == "DiT-B/2" else None)]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dit_repro.speed.gpu_check OUT.json")
    print(*gpu_check(sys.argv[1]), sep="\n")
