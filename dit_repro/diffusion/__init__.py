"""Chapters 2 and 8: noise schedules and training objectives."""
from .objectives import (
    Losses,
    Objective,
    loss_of_gaussian,
    loss_of_unit_gaussian,
    training_losses,
    variational_bound,
)
from .schedule import NoiseSchedule

__all__ = [
    "Losses",
    "NoiseSchedule",
    "Objective",
    "loss_of_gaussian",
    "loss_of_unit_gaussian",
    "training_losses",
    "variational_bound",
]
