"""Operations, growth and scaling against what can be counted by hand."""
import mmap
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dit_repro import allocator
from dit_repro.models import DIT_CONFIGS, DiT, DiTConfig, count_macs
from dit_repro.speed.device import page_faults
from dit_repro.speed.growth import Growth, Size
from dit_repro.speed.ladder import Bench, Settings, Step
from dit_repro.speed.operations import block_operations, measure_operations, shares
from dit_repro.speed.report import growth_figure, ladder_frame, roofline_figure, shares_figure
from dit_repro.speed.scaling import Link, Scaling, all_reduce_seconds, measure_scaling, scaled_step

CPU = torch.device("cpu")
SMALL = DiTConfig(depth=2, width=64, heads=2, patch_size=2)


def test_operations_count_flops_and_bytes_and_leave_views_out():
    a, b, x = torch.randn(8, 16), torch.randn(16, 4), torch.randn(2, 3, 5, 8)

    def step():
        (a @ b).t()
        F.scaled_dot_product_attention(x, x, x)
        return torch.addcmul(a, a, a)

    found = {operation.name: operation for operation in measure_operations(step, CPU, repeats=2)}
    assert not any("transpose" in name or name == "t" for name in found)
    assert (found["mm"].flops, found["mm"].bytes, found["mm"].group) == (2 * 8 * 16 * 4, 4 * (128 + 64 + 32),
                                                                        "matrix products")
    attention = next(operation for operation in found.values() if operation.group == "attention")
    assert attention.flops == 4 * 2 * 3 * 5 * 5 * 8
    assert (found["addcmul"].flops, found["addcmul"].intensity) == (2 * 128, 2 / 16)
    assert sum(shares([*found.values()]).values()) == pytest.approx(1)


def test_operations_of_a_step_hold_its_multiply_accumulates_three_times():
    bench = Bench(SMALL, 4, CPU, 8)
    found = measure_operations(Step(bench, Settings(fused=True, foreach_ema=True)), CPU, repeats=1)
    products = sum(operation.flops for operation in found if operation.group == "matrix products")
    # Attention's own products are not among them, and the first layer needs no gradient of its input.
    assert products == pytest.approx(6 * 4 * count_macs(bench.model), rel=0.05)
    assert {operation.group for operation in found} >= {"attention", "GELU", "layer norm", "optimizer and average"}


def test_parts_of_a_block_add_up_to_its_products():
    model = DiT(SMALL, 8)
    parts = block_operations(model.blocks[0], torch.randn(3, 16, 64), torch.randn(3, 64), repeats=1)
    assert set(parts) == {"query, key, value", "attention", "attention output", "MLP in", "GELU", "MLP out",
                          "modulation", "layer norm", "shift, scale, gate", "SiLU"}
    products = sum(o.flops for o in parts.values() if o.group == "matrix products")
    assert products == 2 * 3 * (16 * 12 * 64**2 + 6 * 64**2)
    assert roofline_figure(parts, 1e11, 1e10).axes[0].get_xlabel().startswith("arithmetic intensity")


def test_growing_changes_one_axis_and_tokens_by_squares():
    size = Size(batch=2, depth=1, width=32, tokens=16)
    assert size.grown("tokens", 4) == Size(2, 1, 32, 256) and size.grown("width", 2) == Size(2, 1, 64, 16)
    model = size.grown("tokens", 2).step(CPU, Settings()).bench.model
    assert model.pos_embed.shape[1] == 64 and model.config.width == 32


def test_exponent_is_the_slope_in_logarithms():
    values = [16, 64, 256, 1024]
    growth = Growth("tokens", values, [3e-3 * value**1.5 for value in values], [7 * value for value in values],
                    [0.0] * 4)
    assert growth.exponent("seconds") == pytest.approx(1.5) and growth.exponent("peak_bytes") == pytest.approx(1)
    assert len(growth_figure([growth, growth]).axes) == 4


def test_peak_memory_grows_with_the_batch_but_weights_do_not():
    peaks = []
    for batch in (32, 64, 128):
        step = Size(batch, 2, 32, 16).step(CPU, Settings(fused=True, foreach_ema=True))
        step.warm_up(parity=False)
        peaks.append(step.peak_bytes)
    first, second = np.diff(peaks)
    assert second == pytest.approx(2 * first, rel=0.05) and peaks[0] < first * 2


def test_two_ranks_send_four_bytes_for_each_trained_parameter():
    scaling = measure_scaling("DiT-nano/4", 1, 8, repeats=1)
    model = DiT(DIT_CONFIGS["DiT-nano/4"], 8)
    assert scaling.bytes == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert min(scaling.alone, scaling.compute, scaling.together, scaling.all_reduce) > 0


def test_hidden_share_and_efficiency_are_their_definitions():
    scaling = Scaling(2, 8, alone=1.0, compute=1.2, together=1.6, all_reduce=0.5, bytes=0)
    assert scaling.efficiency == 1 / 1.6 and scaling.contention == pytest.approx(0.2 / 1.6)
    assert scaling.exposed == pytest.approx(0.4) and scaling.hidden == pytest.approx(0.2)


def test_a_ring_of_two_moves_the_bytes_once_and_overlap_cannot_exceed_the_backward_pass():
    link = Link("", 1e9)
    assert all_reduce_seconds(1e9, 2, link) == 1 and all_reduce_seconds(1e9, 64, link) == pytest.approx(2 * 63 / 64)
    assert scaled_step(3.0, 1e9, 2, link) == (3.0, 4.0)
    assert scaled_step(0.3, 1e9, 2, link) == (pytest.approx(0.3 + 0.8), pytest.approx(1.3))


def test_shares_figure_and_frame_name_what_was_measured():
    figure = shares_figure({"all fused": {"GELU": 0.4, "copies": 0.6}})
    assert [text.get_text() for text in figure.axes[0].texts] == ["40%", "60%"]
    rung = {"kind": "cumulative", "name": "TF32", "why_not": "a CPU has no TF32"}
    assert "a CPU has no TF32" in ladder_frame({"model": "DiT-B/2", "rungs": [rung]}).to_html()


FAULTS = """
import ctypes, resource, runpy, sys
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, libc.memset.argtypes = ctypes.c_void_p, [ctypes.c_void_p], [
    ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def step():
    blocks = [libc.malloc(2**24) for _ in range(8)]
    for block in blocks: libc.memset(block, 1, 2**24)
    for block in blocks: libc.free(block)
if len(sys.argv) > 1: runpy.run_path(sys.argv[1])["keep_freed_memory"]()
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def touch(size=2**23):
    block = mmap.mmap(-1, size)
    for start in range(0, size, mmap.PAGESIZE):
        block[start] = 1


def test_kept_memory_comes_back_without_new_pages():
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the C library is not glibc: keep_freed_memory does nothing")
    if not page_faults(touch):
        pytest.skip("this kernel does not count the fresh pages of a process")
    # Settings of the caller's for malloc, or another malloc, would be measured instead of glibc's default.
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("MALLOC_") and name not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    default, keep = (int(subprocess.check_output([sys.executable, "-c", FAULTS, *how], env=environment))
                     for how in ([], [allocator.__file__]))
    assert keep < default / 4, f"{default} fresh pages in a step, {keep} with freed memory kept"


LEAK = """
import psutil, torch
from dit_repro.allocator import keep_freed_memory, memory_in_use
keep_freed_memory()
freed = [torch.ones(2**22) for _ in range(16)]   # 16 MB each
del freed
resident, in_use = psutil.Process().memory_info().rss, memory_in_use()
leak = torch.ones(2**24)
print(resident - in_use, memory_in_use() - in_use)
"""


def test_memory_in_use_counts_a_leak_that_would_fit_into_kept_memory():
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the C library is not glibc: nothing is kept")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    kept, leaked = map(int, subprocess.check_output([sys.executable, "-c", LEAK], env=environment).split())
    assert kept > 2**27, "freed memory was not kept, so that nothing could hide a leak"
    assert leaked == pytest.approx(2**26, rel=0.1)


def test_a_c_library_that_refuses_a_large_block_is_asked_for_the_largest_it_takes(monkeypatch):
    accepted = {}

    def mallopt(parameter, value):   # glibc before 2.35
        if parameter == allocator.M_MMAP_THRESHOLD and value > 2**25:
            return 0
        accepted[parameter] = value
        return 1

    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    allocator.keep_freed_memory()
    assert accepted == {allocator.M_TRIM_THRESHOLD: 2**30, allocator.M_MMAP_THRESHOLD: 2**25}
