"""Saving and resuming a run, from the newest checkpoint of any host."""

from engine.checkpoint.format import Progress, TrainingState
from engine.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager", "Progress", "TrainingState"]
