"""What each kind of report becomes in MLflow; every one of them may be sent twice."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rowstep.components.tracking.client import check_place_of_artifacts
from rowstep.components.tracking.files import FileShelf
from rowstep.components.tracking.history import COMPACTED, Row
from rowstep.components.tracking.images import ImageLog
from rowstep.components.tracking.target import TrackingError
from rowstep.components.tracking.text import MAX_TAG_CHARACTERS

# Older servers refuse a repeated request that has more keys than this.
_MAX_KEYS = 100
_LAST_START_TAG = "rowstep.last_start_ms"
_MODEL_OWNER_TAG = "rowstep.source_run_id"

KINDS_OF_ARTIFACTS = ("text", "file", "histogram")
"""Reports that need the place of the artifacts, which may be broken by itself."""


class Sender:
    """Write reports into one run.

    A report whose answer was lost is sent again, and an earlier process may have sent it: MLflow
    keeps one row of the same metric, step, value and time, a text or file replaces the one of its
    name, and what MLflow would keep twice (images, models) is looked up first.

    Args:
        client: an `MlflowClient`.
        run_id: the run, active.
        experiment_id: its experiment.
        known_steps: the largest step of each metric that was sent by a process whose notes are
            lost; metrics up to it are left out.
        files: where the bytes of reported files lie.
    """

    def __init__(
        self,
        client: Any,
        run_id: str,
        experiment_id: str,
        known_steps: Mapping[str, int],
        files: FileShelf,
    ) -> None:
        self._client, self._run_id, self._experiment_id = client, run_id, experiment_id
        self._known_steps, self._files = known_steps, files
        self._images = ImageLog(client, run_id)
        self._senders = {
            "start": self._start,
            COMPACTED: self._restart,
            "tags": lambda row: self._log({}, row["tags"]),
            "text": lambda row: client.log_text(run_id, row["text"], row["name"]),
            "histogram": self._images.send,
            "file": self._send_file,
            "inputs": self._send_inputs,
            "model": self._send_model,
            "status": lambda row: self._end(row["status"], row["ts_ms"]),
        }

    def send(self, rows: Sequence[Row]) -> None:
        """Write reports of one kind: any number of metrics, one of anything else.

        Raises:
            TrackingError: the report can never be sent.
            Exception: whatever MLflow raises.
        """
        kind = rows[0].get("kind")
        if kind == "metrics":
            self._send_metrics(rows)
            return
        if kind in KINDS_OF_ARTIFACTS:
            check_place_of_artifacts(self._client.tracking_uri)
        sender = self._senders.get(str(kind))
        if sender is None:
            raise TrackingError(
                f"tracking: a report must be of a known kind. Got {kind!r}. It was written by "
                "another rowstep. Send it with that one."
            )
        sender(rows[0])

    # --- numbers ----------------------------------------------------------------------------

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
            self._client.log_batch(self._run_id, metrics=request, synchronous=True)

    # --- params, tags, status ---------------------------------------------------------------

    def _start(self, row: Row) -> None:
        run = self._client.get_run(self._run_id)
        known, tags = run.data.tags, dict(row["tags"])
        # A start that the run already had is a replay; the first one is no resume either.
        applied_ms = int(known.get(_LAST_START_TAG, run.info.start_time))
        if row["ts_ms"] > applied_ms:
            number = int(known.get("resume.count", "0")) + 1
            tags["resume.count"] = str(number)
            tags[f"resume.{number}.reason"] = _reason(run.info.status)
            if row.get("from_step") is not None:
                tags[f"resume.{number}.from_step"] = str(row["from_step"])
            drift = _drift(run.data.params, row["params"])
            if drift:
                tags[f"resume.{number}.param_drift"] = drift
        tags[_LAST_START_TAG] = str(max(row["ts_ms"], applied_ms))
        if run.info.status != "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        # MLflow rejects a batch as a whole when one value of it differs from before.
        self._log({k: v for k, v in row["params"].items() if k not in run.data.params}, tags)

    def _restart(self, row: Row) -> None:
        """Give a run that was made again what is left of the reports that were cut away."""
        run = self._client.get_run(self._run_id)
        tags = dict(row["tags"])
        if _LAST_START_TAG not in run.data.tags:
            tags["rowstep.reports_cut_away"] = str(row["num_reports"])
        self._start({**row, "tags": tags})
        if row["status"] is not None:
            self._end(row["status"], row["last_ms"])

    def _end(self, status: str, time_ms: int) -> None:
        self._client.set_terminated(self._run_id, status, end_time=time_ms)

    def _log(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        self._client.log_batch(
            self._run_id,
            params=[Param(key, value) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
            synchronous=True,
        )

    # --- files ------------------------------------------------------------------------------

    def _send_file(self, row: Row) -> None:
        path = self._files.path(row["file"])
        if not path.is_file():
            raise TrackingError(
                f"{path}: must hold the bytes of {row['name']!r}. Got no file. It was deleted by "
                "somebody else. The report is left out."
            )
        size, found = row.get("size"), path.stat().st_size  # older journals do not say the size
        if size is not None and size != found:
            raise TrackingError(
                f"{path}: must hold the {size} bytes of {row['name']!r}. Got {found}. A power cut "
                "took the rest, or somebody changed it. The report is left out."
            )
        folder, _, name = row["name"].rpartition("/")
        with tempfile.TemporaryDirectory() as scratch:
            link = Path(scratch) / name  # MLflow names the artifact after the file
            link.symlink_to(path.absolute())
            self._client.log_artifact(self._run_id, str(link), folder or None)
        self._files.mark_sent(row["file"])

    # --- links ------------------------------------------------------------------------------

    def _send_inputs(self, row: Row) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        self._client.log_inputs(
            self._run_id,
            datasets=[
                DatasetInput(
                    Dataset(
                        name=link["name"],
                        digest=link["digest"],
                        source_type="tfx_artifact",
                        source=json.dumps(link["source"]),
                    ),
                    tags=[InputTag("mlflow.data.context", link["context"])],
                )
                for link in row["datasets"]
            ],
        )

    def _send_model(self, row: Row) -> None:
        from mlflow.entities import LoggedModelOutput

        tags = {
            **row["tags"],
            "rowstep.uri": row["uri"],
            _MODEL_OWNER_TAG: self._run_id,
            "mlflow.model.isExternal": "true",
        }
        found = self._models()
        if found:
            self._client.set_logged_model_tags(found[0].model_id, tags)
        else:
            # Not `mlflow.create_external_model`: that one uses the process's tracking URI.
            self._client.create_logged_model(
                self._experiment_id,
                name=row["name"],
                source_run_id=self._run_id,
                tags=tags,
                params=row["params"],
            )
            found = self._models()
        for twin in found[1:]:  # of a request that MLflow's client repeated
            self._client.delete_logged_model(twin.model_id)
        model = found[0]
        if str(model.status) != "READY":
            self._client.finalize_logged_model(model.model_id, "READY")
        outputs = getattr(self._client.get_run(self._run_id).outputs, "model_outputs", None) or []
        if model.model_id not in [output.model_id for output in outputs]:
            self._client.log_outputs(
                self._run_id, [LoggedModelOutput(model.model_id, step=row["step"])]
            )

    def _models(self) -> list[Any]:
        found = self._client.search_logged_models(
            [self._experiment_id], f"tags.`{_MODEL_OWNER_TAG}` = '{self._run_id}'"
        )
        return sorted(found, key=lambda model: (model.creation_timestamp, model.model_id))


def _reason(status: str) -> str:
    """Say how the attempt before ended, by the status that it left."""
    return "it was killed without a word" if status == "RUNNING" else f"it was {status}"


def _drift(known: Mapping[str, str], given: Mapping[str, str]) -> str:
    drift = {k: [known[k], value] for k, value in given.items() if known.get(k, value) != value}
    text = json.dumps(drift, sort_keys=True) if drift else ""
    return text if len(text) <= MAX_TAG_CHARACTERS else json.dumps({"num_changed": len(drift)})
