"""Chapter 4: what a run will cost, and how far a training step is from what its device can do."""
from dit_repro.speed.ladder import run_ladder
from dit_repro.speed.plan import plan_run
from dit_repro.speed.report import ladder_figure, ladder_table

__all__ = ["ladder_figure", "ladder_table", "plan_run", "run_ladder"]
