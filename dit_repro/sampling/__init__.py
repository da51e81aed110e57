from .guidance import Guidance
from .sampler import State, sample, sample_states
from .thresholding import clamp_x0, dynamic_threshold

__all__ = ["Guidance", "State", "clamp_x0", "dynamic_threshold", "sample", "sample_states"]
