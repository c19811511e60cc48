"""Checkpoints that survive kills, power cuts and flipped bits; NumPy and files, no TensorFlow."""

from rowstep.components.checkpoints.array_files import CheckpointError
from rowstep.components.checkpoints.places import open_checkpoint
from rowstep.components.checkpoints.retention import Best, Entry, Retention
from rowstep.components.checkpoints.saved_state import SavedArray, SavedState
from rowstep.components.checkpoints.store import CheckpointStore

__all__ = [
    "Best",
    "CheckpointError",
    "CheckpointStore",
    "Entry",
    "Retention",
    "SavedArray",
    "SavedState",
    "open_checkpoint",
]
