"""The TFX side of rowstep: the trainer component, its data, models, checkpoints and tracking.

Names are loaded on first use, so that the checkpoint store and the data sources stay usable
without TensorFlow, and TFX is imported only by those who build pipelines.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ == "components":
    raise ImportError(
        "components: import it as 'rowstep.components'. Got 'import components' from inside the "
        "checkout, which would load every class twice. Install rowstep (make setup) and use the "
        "full name."
    )

if TYPE_CHECKING:
    from rowstep.components.artifacts import Checkpoint
    from rowstep.components.checkpoints import CheckpointError, CheckpointStore
    from rowstep.components.component import RecTrainer
    from rowstep.components.data_errors import DataError
    from rowstep.components.fit_logger import MlflowLogger
    from rowstep.components.job import (
        DivergedError,
        TrainingInterruptedError,
        TrainJob,
        TrainResult,
    )
    from rowstep.components.tracking import TrackingError

_HOMES = {
    "Checkpoint": "artifacts",
    "CheckpointError": "checkpoints",
    "CheckpointStore": "checkpoints",
    "DataError": "data_errors",
    "DivergedError": "job",
    "MlflowLogger": "fit_logger",
    "RecTrainer": "component",
    "TrackingError": "tracking",
    "TrainJob": "job",
    "TrainResult": "job",
    "TrainingInterruptedError": "job",
}
__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "DataError",
    "DivergedError",
    "MlflowLogger",
    "RecTrainer",
    "TrackingError",
    "TrainJob",
    "TrainResult",
    "TrainingInterruptedError",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"rowstep.components.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'rowstep.components' has no attribute {name!r}")
