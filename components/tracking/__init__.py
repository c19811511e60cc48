"""Report a training to MLflow without ever waiting for it.

Every report is first written to a journal of its own, in the folder of the training's state. One
background thread sends the journal to MLflow, in order. A server that is slow, away or gone costs
the training nothing, and what it has not got is sent when the training is resumed, or by `sync`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rowstep.components.tracking.journal import Journal, Target, TrackingError
from rowstep.components.tracking.outbox import CloseReport, Outbox, Status, finish
from rowstep.components.tracking.text import check_uri, redact_uri

__all__ = [
    "CloseReport",
    "Tracker",
    "TrackingError",
    "check_uri",
    "open_tracker",
    "redact_uri",
    "sync",
]


class Tracker(Protocol):
    """Report one training; what is reported before `start` or after `close` is left out."""

    @property
    def run_id(self) -> str | None:
        """Return MLflow's id of the run, as soon as there is one."""

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Open the run, or go on with it: changed params become a tag, new ones are added."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report numbers of one step; never waits and never raises.

        A step that a metric already has is left out. NaN and infinities are not sent: the metric
        `nonfinite/<name>` counts them.
        """

    def log_text(self, name: str, text: str) -> None:
        """Store a small text file at the root of the run's artifacts."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run; the last value of each stays."""

    def close(self, status: Status, timeout_seconds: float = 20) -> CloseReport:
        """End the run and wait a bounded time for what is still to be sent."""


class NullTracker:
    """Take every report and do nothing with it."""

    run_id: str | None = None

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Do nothing."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def log_text(self, name: str, text: str) -> None:
        """Do nothing."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Do nothing."""

    def close(self, status: Status, timeout_seconds: float = 20) -> CloseReport:
        """Return an empty report."""
        return CloseReport()


def open_tracker(
    uri: str | None,
    experiment: str,
    run_name: str,
    run_key: str,
    spool_dir: Path,
    *,
    enabled: bool = True,
    on_problem: Callable[[str], None],
    artifact_root: Path | None = None,
) -> Tracker:
    """Prepare to report a training; nothing is written and no server is asked before `start`.

    Args:
        uri: tracking URI without credentials; None reports nothing.
        experiment: name of the MLflow experiment, made when missing.
        run_name: name of a new run.
        run_key: what makes two trainings the same one; kept as the tag `rowstep.run_key`.
        spool_dir: folder for the journal; a training that goes on must name the same one.
        enabled: False reports nothing.
        on_problem: told, once of each kind, what goes wrong; also from another thread.
        artifact_root: where an experiment made in an SQLite store keeps its artifacts.

    Returns:
        A tracker that does nothing when there is nothing to report to, or MLflow is not installed.

    Raises:
        TrackingError: the URI holds credentials.
    """
    check_uri(uri)
    if not enabled or uri is None:
        return NullTracker()
    if importlib.util.find_spec("mlflow") is None:
        on_problem(
            "tracking: the package mlflow must be installed to log to MLflow. Got none. The "
            "training goes on without. Install rowstep[mlflow], or set tracking.enabled=false."
        )
        return NullTracker()
    root = str(artifact_root) if artifact_root is not None else None
    return Outbox(Target(uri, experiment, run_name, run_key, root), spool_dir, on_problem)


def sync(spool_dir: Path, *, timeout_seconds: float = 60) -> CloseReport:
    """Send what a training could not; its journal says where to, and is all that is needed.

    Raises:
        TrackingError: the folder holds no journal, or its training is still running.
    """
    return finish(Journal(spool_dir, create=False), None, timeout_seconds, 0)
