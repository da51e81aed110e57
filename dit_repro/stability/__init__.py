"""Chapters 5 and 11: a step captured, taken again, and searched for the first quantity that is wrong."""
from dit_repro.stability.behavior import check_behavior
from dit_repro.stability.capture import Capture, capture_state, capture_step, state_before
from dit_repro.stability.faults import FAULTS, plant
from dit_repro.stability.localize import localize_first_broken
from dit_repro.stability.post_mortem import Break, baselines, find_break, inspect_weights, label_norms
from dit_repro.stability.replay import replay

__all__ = ["FAULTS", "Break", "Capture", "baselines", "capture_state", "capture_step", "check_behavior",
           "find_break", "inspect_weights",
           "label_norms", "localize_first_broken", "plant", "replay", "state_before"]
