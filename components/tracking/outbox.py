"""The tracker that reports to MLflow: a journal, and the thread that sends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rowstep.components.tracking.journal import (
    JOURNAL,
    Journal,
    Target,
    TrackingError,
    read_ack,
)
from rowstep.components.tracking.publisher import Publisher
from rowstep.components.tracking.text import (
    clean_name,
    clean_tags,
    param_text,
    redact_uri,
    run_link,
)

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class CloseReport:
    """Say what became of the reports of a training."""

    run_id: str | None = None
    link: str | None = None
    """Where a person finds the run, without credentials."""
    num_sent: int = 0
    num_unsent: int = 0
    """Reports that wait in the folder, or were lost because it could not be written."""
    problem: str = ""
    """A sentence for people when something was not sent."""


class Outbox:
    """Write reports to the journal and have a thread send them; `Tracker` says what they mean."""

    def __init__(self, target: Target, folder: Path, on_problem: Callable[[str], None]) -> None:
        self._target, self._folder, self._on_problem = target, folder, on_problem
        self._journal: Journal | None = None
        self._publisher: Publisher | None = None
        self._num_lost = 0
        self._is_closed = False

    @property
    def run_id(self) -> str | None:
        """Return MLflow's id of the run, as soon as there is one."""
        if self._publisher is not None:
            return self._publisher.mlflow_run.run_id
        ack = read_ack(self._folder)
        is_ours = ack and (ack.uri, ack.experiment) == (self._target.uri, self._target.experiment)
        return ack.run_id if ack and is_ours else None

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Open the journal, write down what is trained, and begin to send."""
        try:
            self._journal = Journal(self._folder)
        except (OSError, TrackingError) as error:
            self._on_problem(f"tracking: nothing is logged to MLflow: {error}")
            return
        self._append(
            "start",
            target=vars(self._target),
            params={clean_name(k): param_text(v) for k, v in params.items()},
            tags=clean_tags(tags),
        )
        if self._journal.target is not None:
            self._publisher = Publisher(self._journal, self._on_problem)
            self._publisher.start()

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers to the journal."""
        if self._journal is None:
            return
        try:
            numbers = {clean_name(key): float(value) for key, value in metrics.items()}
            self._journal.append_metrics(int(step), numbers)
        except (OSError, TypeError, ValueError) as error:
            self._note_loss(error)

    def log_text(self, name: str, text: str) -> None:
        """Write the text to the journal."""
        self._append("text", name=clean_name(name).replace("/", "_"), text=text)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Write the tags to the journal."""
        self._append("tags", tags=clean_tags(tags))

    def _append(self, kind: str, **fields: Any) -> None:
        if self._journal is None:
            return
        try:
            self._journal.append(kind, **fields)
        except (OSError, TypeError, ValueError) as error:
            self._note_loss(error)

    def _note_loss(self, error: Exception) -> None:
        self._num_lost += 1
        if self._num_lost == 1:
            self._on_problem(
                f"tracking: reports must fit into {self._folder}. Got {error}. The training goes "
                "on, this report is lost, and others may be. Look at the disk and the value."
            )

    def close(self, status: Status, timeout_seconds: float = 20) -> CloseReport:
        """End the run; without a `start` only send what an earlier process left."""
        if self._is_closed or (self._journal is None and not (self._folder / JOURNAL).exists()):
            return CloseReport(self.run_id)
        self._is_closed = True
        self._append("status", status=status)
        try:
            journal = self._journal or Journal(self._folder)
            return finish(journal, self._publisher, timeout_seconds, self._num_lost)
        except (OSError, TrackingError) as error:
            text = f"tracking: nothing is sent to MLflow: {error}"
            self._on_problem(text)
            return CloseReport(self.run_id, num_unsent=self._num_lost, problem=text)


def finish(
    journal: Journal, publisher: Publisher | None, timeout_seconds: float, num_lost: int
) -> CloseReport:
    """Send what is left within the time, let go of the folder, and say what became of it all."""
    try:
        if publisher is None:
            publisher = Publisher(journal, lambda text: None)
            publisher.start()
        publisher.finish(timeout_seconds)
        run, num_unsent = publisher.mlflow_run, publisher.num_unsent
        link = None
        if run.run_id is not None and run.experiment_id is not None:
            link = run_link(publisher.target, run.experiment_id, run.run_id)
        problem = ""
        if num_unsent:
            problem = (
                f"tracking: MLflow at {redact_uri(publisher.target.uri)} must have every report. "
                f"Got {num_unsent} that could not be sent "
                f"({publisher.last_problem or 'no answer in time'}). They wait in "
                f"{journal.folder}. The next run of this training sends them, or: "
                "rowstep sync, with --home for another workspace than the default."
            )
        elif num_lost:
            problem = (
                f"tracking: {journal.folder} must take every report. Got {num_lost} that could "
                "not be written and are lost. Look at the disk."
            )
        return CloseReport(run.run_id, link, publisher.num_sent, num_unsent + num_lost, problem)
    finally:
        journal.close()
