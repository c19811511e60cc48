"""One run in MLflow: find it or make it, and write reports into it.

MLflow is imported in the functions that need it, so by the publisher's thread, and used only
through `MlflowClient` with an explicit run id: the fluent functions keep the active run per thread
and would open a second one there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rowstep.components.tracking.journal import Ack, Target, TrackingError
from rowstep.components.tracking.text import MAX_TAG_CHARACTERS, is_sqlite

# Older servers refuse a repeated request that has more keys than this.
_MAX_KEYS = 100

Row = Mapping[str, Any]


class MlflowRun:
    """Write reports into the run of a target.

    Args:
        target: where the run is, and its key.
        start_ms: when the training began, for a run that must be made.
        ack: what an earlier process noted, if any.
        check: called before a run is made; raises when nobody wants it any more.
    """

    def __init__(
        self, target: Target, start_ms: int, ack: Ack | None, check: Callable[[], None]
    ) -> None:
        self.target = target
        self.run_id = ack.run_id if ack else None
        self.experiment_id = ack.experiment_id if ack else None
        self._start_ms, self._check = start_ms, check
        self._client: Any = None
        self._known_steps: dict[str, int] = {}

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
        key = self.target.run_key.replace("'", "")
        found = self._client.search_runs(
            [self.experiment_id], f"tags.`rowstep.run_key` = '{key}'", max_results=1
        )
        if not found:
            return False
        self.run_id = found[0].info.run_id
        # What it already has was sent by a process whose notes are lost. Repeating it would give
        # a second point to each step.
        metrics = self._client.get_run(self.run_id).data.to_proto().metrics
        self._known_steps = {metric.key: metric.step for metric in metrics}
        return True

    def _create(self, replaced: str | None) -> None:
        tags = {
            "rowstep.run_key": self.target.run_key.replace("'", ""),
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
        self.run_id = run.info.run_id

    # --- reports ----------------------------------------------------------------------------

    def send(self, rows: Sequence[Row]) -> None:
        """Write reports of one kind: any number of metrics, one of anything else.

        Raises:
            Exception: whatever MLflow raises.
        """
        kind, row = rows[0]["kind"], rows[0]
        if kind == "metrics":
            self._send_metrics(rows)
        elif kind == "start":
            self._start(row)
        elif kind == "tags":
            self._log({}, row["tags"])
        elif kind == "text":
            self._client.log_text(self.run_id, row["text"], row["name"])
        elif kind == "status":
            self._client.set_terminated(self.run_id, row["status"], end_time=row["ts_ms"])
        else:
            raise TrackingError(
                f"tracking: a report must be of a known kind. Got {kind!r}. It was written by "
                "another rowstep. Send it with that one."
            )

    def _send_metrics(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        by_key: dict[str, list[Any]] = {}
        for row in rows:
            for key, value in row["metrics"].items():
                if row["step"] > self._known_steps.get(key, -1):
                    metric = Metric(key, value, row["ts_ms"], row["step"])
                    by_key.setdefault(key, []).append(metric)
        keys = list(by_key)
        for first in range(0, len(keys), _MAX_KEYS):
            request = [m for key in keys[first : first + _MAX_KEYS] for m in by_key[key]]
            self._client.log_batch(self.run_id, metrics=request, synchronous=True)

    def _start(self, row: Row) -> None:
        run = self._client.get_run(self.run_id)
        known, params, tags = run.data.params, row["params"], dict(row["tags"])
        if run.info.start_time != row["ts_ms"]:  # it was made by an earlier start: a resume
            number = int(run.data.tags.get("resume.count", "0")) + 1
            tags["resume.count"] = str(number)
            drift = {k: [known[k], v] for k, v in params.items() if known.get(k, v) != v}
            if drift:
                tags[f"resume.{number}.param_drift"] = _drift_text(drift)
            if run.info.status != "RUNNING":
                self._client.update_run(self.run_id, status="RUNNING")
        # MLflow rejects a batch as a whole when one value of it differs from before.
        self._log({k: v for k, v in params.items() if k not in known}, tags)

    def _log(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        self._client.log_batch(
            self.run_id,
            params=[Param(key, value) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
            synchronous=True,
        )


def open_client(uri: str) -> Any:
    """Import MLflow, keep it quiet, and return a client of the store at `uri`."""
    # Long waits are ours to do; the user's own settings stay.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
    if is_sqlite(uri):
        Path(uri.partition(":///")[2].partition("?")[0]).parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def is_refusal(error: Exception) -> bool:
    """Tell a report that MLflow will never take from a server that is away, busy or locked."""
    from mlflow.exceptions import MlflowException

    if not isinstance(error, MlflowException):
        return False
    code = error.get_http_status_code()
    return 400 <= code < 500 and code not in (401, 403, 408, 429, 499)


def _drift_text(drift: Mapping[str, Any]) -> str:
    text = json.dumps(drift, sort_keys=True)
    fits = len(text) <= MAX_TAG_CHARACTERS
    return text if fits else json.dumps({"num_changed": len(drift)})
