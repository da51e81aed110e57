"""Chapter 4: what a run will cost, and how far a training step is from what its device can do."""
from dit_repro.speed.growth import Size, measure_growth
from dit_repro.speed.ladder import Bench, Settings, Step, run_ladder
from dit_repro.speed.operations import block_operations, measure_operations, shares
from dit_repro.speed.pages import fresh_pages
from dit_repro.speed.plan import GPUS, plan_run
from dit_repro.speed.report import (
    growth_figure,
    ladder_figure,
    ladder_frame,
    ladder_table,
    roofline_figure,
    shares_figure,
)
from dit_repro.speed.scaling import INFINIBAND, NVLINK, all_reduce_seconds, measure_scaling, scaled_step

__all__ = [
    "GPUS",
    "INFINIBAND",
    "NVLINK",
    "Bench",
    "Settings",
    "Size",
    "Step",
    "all_reduce_seconds",
    "block_operations",
    "fresh_pages",
    "growth_figure",
    "ladder_figure",
    "ladder_frame",
    "ladder_table",
    "measure_growth",
    "measure_operations",
    "measure_scaling",
    "plan_run",
    "roofline_figure",
    "run_ladder",
    "scaled_step",
    "shares",
    "shares_figure",
]
