from .collapse import CollapseDetector, wilson_interval
from .exposure import Trace, trace
from .guidance import Guidance
from .labels import draw_labels
from .sampler import State, sample, sample_states
from .sweeps import Sweep, sweep
from .thresholding import clamp_x0, dynamic_threshold

__all__ = ["CollapseDetector", "Guidance", "State", "Sweep", "Trace", "clamp_x0", "draw_labels", "dynamic_threshold",
           "sample", "sample_states", "sweep", "trace", "wilson_interval"]
