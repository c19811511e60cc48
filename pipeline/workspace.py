"""Where runs write: one home for all pipelines, one folder a pipeline, one folder a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rowstep import RowstepError
from rowstep.components.locks import LockHeldError, exclusive_lock
from rowstep.configs import RunConfig

_LOCK_WAIT_SECONDS = 20.0


class WorkspaceInUseError(RowstepError, RuntimeError):
    """Say that another run of the same pipeline is going on."""


@dataclass(frozen=True)
class Workspace:
    """Name every file and folder of one pipeline, and keep two runs of it apart.

    <home>/mlflow.db, mlflow-artifacts/     one MLflow store, so that pipelines compare
    <home>/<name>/data/                      materialised splits
    <home>/<name>/metadata.db                ML Metadata
    <home>/<name>/artifacts/                 TFX's pipeline root
    <home>/<name>/state/                     checkpoints and tracking journals
    <home>/<name>/serving/                   pushed models
    <home>/<name>/runs/<run>/                config, events and log of one run
    """

    home: Path
    name: str
    tracking: str | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Workspace:
        """Find the workspace of a config: its `workspace`, `$ROWSTEP_HOME` or `~/.rowstep`."""
        home = Path(config.workspace).expanduser() if config.workspace else default_home()
        return cls(home.resolve(), config.name, config.tracking.uri)

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Be the only run of this pipeline while the `with` block runs.

        The wait is for the worker of a command that was killed: it may be writing its last
        checkpoint.

        Raises:
            WorkspaceInUseError: another run of the pipeline is going on; it is named.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with exclusive_lock(self.folder / "LOCK", wait_seconds=_LOCK_WAIT_SECONDS):
                yield
        except LockHeldError as error:
            raise WorkspaceInUseError(
                f"{self.name}: one run at a time may use {self.folder}. Got a folder held by "
                f"{error.holder}. Wait for it, stop it, or set another 'name' or 'workspace'."
            ) from None

    def refuse_if_busy(self) -> None:
        """Ask for the lock that a worker will take, before any record of a run is touched.

        Raises:
            WorkspaceInUseError: another run of the pipeline is going on; it is named.
        """
        with self.occupied():
            pass

    @property
    def folder(self) -> Path:
        """Return the folder of this pipeline."""
        return self.home / self.name

    @property
    def data(self) -> Path:
        """Return the folder of materialised splits."""
        return self.folder / "data"

    @property
    def metadata(self) -> Path:
        """Return the ML Metadata file."""
        return self.folder / "metadata.db"

    @property
    def artifacts(self) -> Path:
        """Return TFX's pipeline root."""
        return self.folder / "artifacts"

    @property
    def state(self) -> Path:
        """Return the folder of unfinished and finished checkpoints."""
        return self.folder / "state"

    @property
    def serving(self) -> Path:
        """Return the folder that models are pushed to."""
        return self.folder / "serving"

    @property
    def runs(self) -> Path:
        """Return the folder of run records."""
        return self.folder / "runs"

    @property
    def tracking_uri(self) -> str:
        """Return the MLflow tracking URI: the configured one or an SQLite file of our own."""
        return self.tracking or f"sqlite:///{self.home / 'mlflow.db'}"

    @property
    def tracking_artifacts(self) -> Path:
        """Return where an SQLite tracking store keeps its artifacts."""
        return self.home / "mlflow-artifacts"


def default_home() -> Path:
    """Return the home that configs without a `workspace` share."""
    return Path(os.environ.get("ROWSTEP_HOME") or "~/.rowstep").expanduser()
