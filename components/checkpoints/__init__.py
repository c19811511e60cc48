"""Checkpoints that survive kills, power cuts and flipped bits; NumPy and files, no TensorFlow."""

from rowstep.components.checkpoints.array_files import CheckpointError
from rowstep.components.checkpoints.saved_state import SavedState
from rowstep.components.checkpoints.store import CheckpointStore

__all__ = ["CheckpointError", "CheckpointStore", "SavedState"]
