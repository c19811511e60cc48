"""What a training can report, and the two ways to take it: an outbox for MLflow, or nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rowstep.components.tracking.closing import CloseReport, finish
from rowstep.components.tracking.journal import MAX_SPOOL_BYTES, Journal
from rowstep.components.tracking.links import DatasetLink, HistogramData, ModelLink, Status
from rowstep.components.tracking.outbox import Outbox
from rowstep.components.tracking.redact import check_uri
from rowstep.components.tracking.target import Target

__all__ = [
    "DatasetLink",
    "HistogramData",
    "ModelLink",
    "NullTracker",
    "Status",
    "Tracker",
    "open_tracker",
    "sync",
]


class Tracker(Protocol):
    """Report one training; what is reported before `start` or after `close` is left out.

    No method but `close` waits for anything but the disk, and none raises. Credentials in names
    and values (`password`, `token`, user names in URIs, signed queries) are replaced.
    """

    @property
    def run_id(self) -> str | None:
        """Return MLflow's id of the run, as soon as there is one."""

    def start(
        self,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        *,
        from_step: int | None = None,
    ) -> None:
        """Open the run, or go on with it: changed params become a tag, new ones are added.

        Args:
            params: what the training is; written once, never changed.
            tags: the last value of each stays.
            from_step: optimizer iterations at the start; becomes a tag of a resumed run.
        """

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report numbers of one step.

        A step that a metric already has is left out. NaN and infinities are not sent: the metric
        `nonfinite/<name>` counts them. Of the metrics of single variables (`opt/m_rms/<var>` and
        its like) the first 200 names are kept.
        """

    def log_histogram(self, key: str, step: int, histogram: HistogramData) -> None:
        """Report how the elements of a slot are spread; it becomes a picture with a step slider.

        A step that the key already has is left out. The picture is drawn by the background thread.
        """

    def log_text(self, name: str, text: str) -> None:
        """Store a small text file at the root of the run's artifacts."""

    def log_file(self, name: str, data: bytes) -> None:
        """Store a file among the run's artifacts, such as `optimizer/slots-000001000.parquet`.

        A file of the same name is replaced. The bytes are not searched for credentials.
        """

    def log_inputs(self, datasets: Sequence[DatasetLink]) -> None:
        """Name the data that the training reads; the same name and digest counts once a run."""

    def log_model_link(self, model: ModelLink) -> None:
        """Name the model that the training made; a run has one, whose tags the last call sets."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run; the last value of each stays."""

    def close(self, status: Status, timeout_seconds: float = 20) -> CloseReport:
        """End the run and wait a bounded time for what is still to be sent."""


class NullTracker:
    """Take every report and do nothing with it."""

    run_id: str | None = None

    def start(
        self,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        *,
        from_step: int | None = None,
    ) -> None:
        """Do nothing."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def log_histogram(self, key: str, step: int, histogram: HistogramData) -> None:
        """Do nothing."""

    def log_text(self, name: str, text: str) -> None:
        """Do nothing."""

    def log_file(self, name: str, data: bytes) -> None:
        """Do nothing."""

    def log_inputs(self, datasets: Sequence[DatasetLink]) -> None:
        """Do nothing."""

    def log_model_link(self, model: ModelLink) -> None:
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
    max_spool_bytes: int = MAX_SPOOL_BYTES,
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
        max_spool_bytes: what the folder may hold. Beyond, the oldest sent reports are cut away;
            where all are unsent, new ones are dropped and counted (`rowstep.dropped_reports`).

    Returns:
        A tracker that does nothing when there is nothing to report to, or MLflow is not installed.

    Raises:
        TrackingError: the URI holds credentials.
    """
    check_uri(uri)
    if not enabled or uri is None:
        return NullTracker()
    if not _has_mlflow():
        on_problem(
            "tracking: the package mlflow must be installed to log to MLflow. Got none. The "
            "training goes on without. Install rowstep[mlflow], or set tracking.enabled=false."
        )
        return NullTracker()
    root = str(artifact_root) if artifact_root is not None else None
    target = Target(uri, experiment, run_name, run_key, root)
    return Outbox(target, spool_dir, on_problem, max_spool_bytes)


def _has_mlflow() -> bool:
    try:
        return importlib.util.find_spec("mlflow") is not None
    except (ImportError, ValueError):
        return False


def sync(spool_dir: Path, *, timeout_seconds: float = 60) -> CloseReport:
    """Send what a training could not; its journal says where to, and is all that is needed.

    A training that was killed has left no status, and its run would be RUNNING for ever: nobody
    holds its folder, so it ends as KILLED, at the time of its last report.

    Raises:
        TrackingError: the folder holds no journal, or its training is still running.
    """
    journal = Journal(spool_dir, create=False)
    if journal.target is not None and journal.history.status is None:
        journal.append("status", status="KILLED", ts_ms=journal.history.last_ms)
    return finish(journal, None, timeout_seconds, 0)
