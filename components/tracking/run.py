"""One run in MLflow: find it, or make it once, and write reports into it.

MLflow is imported in the functions that need it, so by the publisher's thread, and used only
through `MlflowClient` with an explicit run id: the fluent functions keep the active run per thread
and would open a second one there.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rowstep.components.tracking.client import open_client
from rowstep.components.tracking.files import FileShelf
from rowstep.components.tracking.history import Row
from rowstep.components.tracking.reports import Sender
from rowstep.components.tracking.target import Ack, Target, TrackingError
from rowstep.components.tracking.text import is_sqlite

_CREATION_TAG = "rowstep.creation"


class MlflowRun:
    """Write reports into the run of a target.

    Args:
        target: where the run is, and its key.
        start_ms: when the training began, for a run that must be made.
        ack: what an earlier process noted, if any.
        files: where the bytes of reported files lie.
        check: called before a run is made; raises when nobody wants it any more.
    """

    def __init__(
        self,
        target: Target,
        start_ms: int,
        ack: Ack | None,
        files: FileShelf,
        check: Callable[[], None],
    ) -> None:
        self.target = target
        self.run_id = ack.run_id if ack else None
        self.experiment_id = ack.experiment_id if ack else None
        self._start_ms, self._files, self._check = start_ms, files, check
        self._client: Any = None
        self._known_steps: dict[str, int] = {}
        self._sender: Sender | None = None

    @property
    def has_client(self) -> bool:
        """Tell whether MLflow is imported, which takes seconds."""
        return self._client is not None

    def attach(self) -> bool:
        """Make sure that the run is there and open for reports.

        Order: the known run id, a run of the experiment with the same key, a new run. A deleted
        run is not touched: a new one with the tag `resume.replaced_run_id` takes its place.

        Returns:
            Whether the run is another one than before, which then lacks the earlier reports.

        Raises:
            Exception: whatever MLflow raises when it cannot be reached.
        """
        if self._client is None:
            self._client = open_client(self.target.uri)
        self._sender = None
        gone = None
        if self.run_id is not None:
            run = self._run_or_none(self.run_id)
            if run is not None and run.info.lifecycle_stage == "active":
                self.experiment_id = run.info.experiment_id
                return False
            gone = self.run_id
        self.experiment_id = self._find_experiment()
        self._known_steps = {}
        if not self._find_by_key():
            self._create(gone)
        return True

    def _run_or_none(self, run_id: str) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name, location = self.target.experiment, self.target.artifact_root
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                is_ours = location is not None and is_sqlite(self.target.uri)
                uri = Path(str(location)).absolute().as_uri() if is_ours else None
                return str(self._client.create_experiment(name, artifact_location=uri))
            except MlflowException:  # another process may have been faster
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            raise TrackingError(
                f"tracking.experiment: must not be deleted. Got {name!r}, which is. Restore it "
                f"with 'mlflow experiments restore -x {experiment.experiment_id}', or set another."
            )
        return str(experiment.experiment_id)

    def _find_by_key(self) -> bool:
        found = self._search()
        if not found:
            return False
        run = self._settle_twins(found)
        self.run_id = run.info.run_id
        # What it already has was sent by a process whose notes are lost. Repeating it would give
        # a second point to each step.
        metrics = self._client.get_run(self.run_id).data.to_proto().metrics
        self._known_steps = {metric.key: metric.step for metric in metrics}
        return True

    def _search(self) -> list[Any]:
        key = self.target.run_key.replace("'", "")
        return list(
            self._client.search_runs(
                [self.experiment_id], f"tags.`rowstep.run_key` = '{key}'", max_results=100
            )
        )

    def _create(self, replaced: str | None) -> None:
        tags = {
            "rowstep.run_key": self.target.run_key.replace("'", ""),
            _CREATION_TAG: uuid.uuid4().hex,
            "mlflow.source.name": "rowstep",
            "mlflow.source.type": "LOCAL",
        }
        if replaced is not None:
            tags["resume.replaced_run_id"] = replaced
        self._check()
        run = self._client.create_run(
            self.experiment_id,
            start_time=self._start_ms,
            tags=tags,
            run_name=self.target.run_name,
        )
        self.run_id = self._settle_twins(self._search() or [run]).info.run_id

    def _settle_twins(self, found: Sequence[Any]) -> Any:
        """Return the run to use, and delete empty ones that came of the same creation.

        MLflow's client repeats a request whose answer was lost, and each repetition makes a run.
        """
        found = sorted(found, key=lambda run: (not run.data.metrics, run.info.run_id))
        creations = Counter(run.data.tags.get(_CREATION_TAG) for run in found)
        kept = found[0]
        for run in found[1:]:
            creation = run.data.tags.get(_CREATION_TAG)
            is_twin = creation is not None and creations[creation] > 1
            if is_twin and not (run.data.metrics or run.data.params):
                creations[creation] -= 1
                self._client.delete_run(run.info.run_id)
        return kept

    # --- reports ----------------------------------------------------------------------------

    def send(self, rows: Sequence[Row]) -> None:
        """Write reports of one kind: any number of metrics, one of anything else.

        Raises:
            Exception: whatever MLflow raises.
        """
        if self._sender is None:
            self._sender = Sender(
                self._client,
                str(self.run_id),
                str(self.experiment_id),
                self._known_steps,
                self._files,
            )
        self._sender.send(rows)

    def takes_others(self) -> bool:
        """Try a write that changes nothing, to tell a bad report from a server in trouble."""
        try:
            key = self.target.run_key.replace("'", "")
            self._client.set_tag(self.run_id, "rowstep.run_key", key, synchronous=True)
        except Exception:  # safe: whatever it raises, the answer is no
            return False
        return True
