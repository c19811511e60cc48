"""Where reports go, and how far they got: what the journal and the publisher agree on."""

from __future__ import annotations

from dataclasses import dataclass

from rowstep import RowstepError


class TrackingError(RowstepError, RuntimeError):
    """Say that a tracking URI or a folder of unsent reports cannot be used."""


@dataclass(frozen=True)
class Target:
    """Name the MLflow run that reports are meant for; the run id is MLflow's own choice."""

    uri: str
    experiment: str
    run_name: str
    run_key: str
    artifact_root: str | None = None


@dataclass(frozen=True)
class Ack:
    """Note that MLflow has the first `offset` bytes of the journal, in the run `run_id`."""

    offset: int
    run_id: str
    experiment_id: str
    uri: str
    experiment: str
