"""Chapter 6: samplers, guidance, remedies, and the detection of samples that collapse."""
from .collapse import CollapseDetector, difference_interval, wilson_interval
from .explorer import explorer
from .exposure import Trace, trace
from .guidance import Guidance
from .labels import draw_labels
from .sample_set import SampleSet
from .sampler import State, sample, sample_states
from .schedules import at_levels_of, dense_start, error_gain
from .sweeps import Sweep, sweep
from .thresholding import clamp_x0, dynamic_threshold

__all__ = ["CollapseDetector", "Guidance", "SampleSet", "State", "Sweep", "Trace", "at_levels_of", "clamp_x0",
           "dense_start", "difference_interval", "draw_labels", "dynamic_threshold", "error_gain", "explorer", "sample",
           "sample_states", "sweep", "trace", "wilson_interval"]
