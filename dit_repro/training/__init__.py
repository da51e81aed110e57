"""Chapter 3: one training loop, its state and its files."""
from dit_repro.training.advice import advice
from dit_repro.training.config import TrainConfig
from dit_repro.training.launch import launch, launch_each
from dit_repro.training.loop import RESUME_ME, Diverged, Trainer
from dit_repro.training.probe import loss_by_timestep
from dit_repro.training.run_folder import RunFolder

__all__ = ["RESUME_ME", "Diverged", "RunFolder", "TrainConfig", "Trainer", "advice", "launch", "launch_each",
           "loss_by_timestep"]
