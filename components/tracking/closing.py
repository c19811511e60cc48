"""The end of a training's reports: send what is left within a time, and say what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from rowstep.components.tracking.journal import REJECTED, Journal
from rowstep.components.tracking.publisher import Publisher
from rowstep.components.tracking.redact import redact_uri
from rowstep.components.tracking.text import run_link


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
    num_dropped: int = 0
    """Reports, of all attempts, that found no room in the folder; `num_unsent` has them not."""
    num_rejected: int = 0
    """Reports that were put aside for good while this process was sending."""


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
        return CloseReport(
            run.run_id,
            link,
            publisher.num_sent,
            num_unsent + num_lost,
            _problem(journal, publisher, num_unsent, num_lost),
            journal.history.num_dropped,
            publisher.num_rejected,
        )
    finally:
        journal.close()


def _problem(journal: Journal, publisher: Publisher, num_unsent: int, num_lost: int) -> str:
    told = []
    if num_unsent:
        told.append(
            f"tracking: MLflow at {redact_uri(publisher.target.uri)} must have every report. "
            f"Got {num_unsent} that could not be sent "
            f"({publisher.last_problem or 'no answer in time'}). They wait in "
            f"{journal.folder}. The next run of this training sends them, or: "
            "rowstep sync, with --home for another workspace than the default."
        )
    elif num_lost:
        told.append(
            f"tracking: {journal.folder} must take every report. Got {num_lost} that could "
            "not be written and are lost. Look at the disk."
        )
    elif journal.history.num_dropped:
        told.append(
            f"tracking: {journal.folder} must have room for what MLflow has not got. Got "
            f"{journal.history.num_dropped} reports that did not fit and were dropped. Raise "
            "tracking.max_spool_mib, or report less often."
        )
    if publisher.num_rejected:
        told.append(
            "tracking: MLflow must accept every report. Got "
            f"{publisher.num_rejected} that were refused for good and put aside "
            f"({publisher.last_refusal}). Look at {journal.folder / REJECTED}."
        )
    return " ".join(told)
