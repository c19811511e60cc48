"""Report a training to MLflow without ever waiting for it.

Every report is first written to a journal of its own, in the folder of the training's state. One
background thread sends the journal to MLflow, in order. A server that is slow, away or gone costs
the training nothing, and what it has not got is sent when the training is resumed, or by `sync`.
"""

from __future__ import annotations

from rowstep.components.tracking.closing import CloseReport
from rowstep.components.tracking.redact import check_uri, redact_uri
from rowstep.components.tracking.target import TrackingError
from rowstep.components.tracking.tracker import (
    DatasetLink,
    HistogramData,
    ModelLink,
    NullTracker,
    Status,
    Tracker,
    open_tracker,
    sync,
)

__all__ = [
    "CloseReport",
    "DatasetLink",
    "HistogramData",
    "ModelLink",
    "NullTracker",
    "Status",
    "Tracker",
    "TrackingError",
    "check_uri",
    "open_tracker",
    "redact_uri",
    "sync",
]
