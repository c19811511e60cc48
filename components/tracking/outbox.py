"""The tracker that reports to MLflow: a journal, and the thread that sends it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rowstep.components.tracking.closing import CloseReport, finish
from rowstep.components.tracking.history import DROPPED_TAG
from rowstep.components.tracking.journal import JOURNAL, Journal, read_ack
from rowstep.components.tracking.links import DatasetLink, HistogramData, ModelLink, Status
from rowstep.components.tracking.publisher import Publisher
from rowstep.components.tracking.redact import redact, redact_document, redact_text
from rowstep.components.tracking.target import Target, TrackingError
from rowstep.components.tracking.text import (
    MAX_METRIC_NAME_CHARACTERS,
    clean_name,
    clean_names,
    clean_params,
    clean_tags,
    explain,
)
from rowstep.components.tracking.variable_cap import VariableCap

# MLflow's file names of pictures hold the key and some 100 characters more, of 255.
_MAX_IMAGE_KEY_CHARACTERS = 140
_MAX_DATASET_NAME_CHARACTERS, _MAX_DIGEST_CHARACTERS = 250, 36

_logger = logging.getLogger(__name__)


class Outbox:
    """Write reports to the journal and have a thread send them; `Tracker` says what they mean.

    Args:
        target: where the reports go.
        folder: of the journal.
        on_problem: told, once of each kind, what goes wrong.
        max_bytes: what the folder may hold.
    """

    def __init__(
        self, target: Target, folder: Path, on_problem: Callable[[str], None], max_bytes: int
    ) -> None:
        self._target, self._folder, self._max_bytes = target, folder, max_bytes
        self._listener = on_problem
        self._journal: Journal | None = None
        self._publisher: Publisher | None = None
        self._cap = VariableCap(())
        self._num_lost = self._num_dropped = 0
        self._is_closed = False

    @property
    def run_id(self) -> str | None:
        """Return MLflow's id of the run, as soon as there is one."""
        if self._publisher is not None:
            return self._publisher.mlflow_run.run_id
        ack = read_ack(self._folder)
        is_ours = ack and (ack.uri, ack.experiment) == (self._target.uri, self._target.experiment)
        return ack.run_id if ack and is_ours else None

    def start(
        self,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        *,
        from_step: int | None = None,
    ) -> None:
        """Open the journal, write down what is trained, and begin to send."""
        try:
            self._journal = Journal(self._folder, max_bytes=self._max_bytes)
        except (OSError, TrackingError) as error:
            self._say(f"tracking: nothing is logged to MLflow: {redact_text(str(error))}")
            return
        self._cap = VariableCap(self._journal.history.metric_keys)
        self._num_dropped = self._journal.history.num_dropped
        self._report(
            lambda journal: journal.append(
                "start",
                target=vars(self._target),
                params=clean_params(params),
                tags=clean_tags(tags),
                from_step=None if from_step is None else int(from_step),
            )
        )
        if self._journal.target is not None:
            self._publisher = Publisher(self._journal, self._say)
            self._publisher.start()

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers to the journal."""

        def write(journal: Journal) -> bool:
            names = clean_names(metrics, MAX_METRIC_NAME_CHARACTERS)
            numbers = {names[key]: float(value) for key, value in metrics.items()}
            kept, left_out = self._cap.split(numbers)
            if left_out:
                self._say(left_out.words)
                journal.append("tags", tags=left_out.tags)
            return journal.append_metrics(int(step), kept)

        self._report(write)

    def log_histogram(self, key: str, step: int, histogram: HistogramData) -> None:
        """Write the numbers of the histogram to the journal."""

        def write(journal: Journal) -> bool:
            fields = {
                "edges": [float(edge) for edge in histogram.edges],
                "counts": [int(count) for count in histogram.counts],
                "num_zero": int(histogram.num_zero),
                "num_nonfinite": int(histogram.num_nonfinite),
                "unit": str(histogram.unit),
            }
            name = clean_name(key, _MAX_IMAGE_KEY_CHARACTERS)
            return journal.append_histogram(int(step), name, fields)

        self._report(write)

    def log_text(self, name: str, text: str) -> None:
        """Write the text to the journal."""
        self._report(
            lambda journal: journal.append(
                "text", name=clean_name(name).replace("/", "_"), text=redact_document(text)
            )
        )

    def log_file(self, name: str, data: bytes) -> None:
        """Write the bytes beside the journal."""
        self._report(lambda journal: journal.append_file(clean_name(name), bytes(data)))

    def log_inputs(self, datasets: Sequence[DatasetLink]) -> None:
        """Write the names of the data to the journal."""

        def write(journal: Journal) -> bool:
            links = [
                {
                    "name": clean_name(link.name, _MAX_DATASET_NAME_CHARACTERS),
                    "digest": str(link.digest)[:_MAX_DIGEST_CHARACTERS],
                    "source": redact("", link.source),
                    "context": str(link.context),
                }
                for link in datasets
            ]
            return not links or journal.append("inputs", datasets=links)

        self._report(write)

    def log_model_link(self, model: ModelLink) -> None:
        """Write the name of the model to the journal."""
        self._report(
            lambda journal: journal.append(
                "model",
                # MLflow takes none of these in the name of a model.
                name=clean_name(model.name).translate(str.maketrans("/.", "__")),
                uri=redact_text(model.uri),
                tags=clean_tags(model.tags),
                params=clean_params(model.params),
                step=int(model.step),
            )
        )

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Write the tags to the journal."""
        self._report(lambda journal: journal.append("tags", tags=clean_tags(tags)))

    # --- trouble ----------------------------------------------------------------------------

    def _report(self, write: Callable[[Journal], bool]) -> None:
        """Have one report written, and let no trouble out: the training is none of its business."""
        if self._journal is None:
            return
        try:
            if not write(self._journal):
                self._note_dropped(self._journal)
        except Exception as error:  # safe: what a caller passes may fail in any way when read
            self._note_loss(error)

    def _note_dropped(self, journal: Journal) -> None:
        self._num_dropped += 1
        if self._num_dropped & (self._num_dropped - 1) == 0:  # 1, 2, 4, 8 ...: it may be killed
            journal.append("tags", tags={DROPPED_TAG: str(self._num_dropped)})
        if self._num_dropped == 1:
            self._say(
                f"tracking: {self._folder} must have room for what MLflow has not got. Got "
                f"{self._max_bytes / 2**20:g} MiB of reports, which is its limit. The training "
                "goes on, further reports are dropped and counted in the tag "
                f"{DROPPED_TAG}. Bring MLflow back, or raise tracking.max_spool_mib."
            )

    def _note_loss(self, error: Exception) -> None:
        self._num_lost += 1
        if self._num_lost == 1:
            self._say(
                f"tracking: reports must fit into {self._folder}. Got {explain(error)}. The "
                "training goes on, this report is lost, and others may be. Look at the disk and "
                "the value."
            )

    def _say(self, text: str) -> None:
        try:
            self._listener(text)
        except Exception:  # safe: whoever listens may fail in any way
            _logger.exception("%s", text)

    # --- the end ----------------------------------------------------------------------------

    def close(self, status: Status, timeout_seconds: float = 20) -> CloseReport:
        """End the run; without a `start` only send what an earlier process left."""
        if self._is_closed or (self._journal is None and not (self._folder / JOURNAL).exists()):
            return CloseReport(self.run_id)
        self._is_closed = True
        if self._journal is not None and self._num_dropped > self._journal.history.num_dropped:
            self.set_tags({DROPPED_TAG: str(self._num_dropped)})
        self._report(lambda journal: journal.append("status", status=status))
        try:
            journal = self._journal or Journal(self._folder, max_bytes=self._max_bytes)
            return finish(journal, self._publisher, timeout_seconds, self._num_lost)
        except (OSError, TrackingError) as error:
            text = f"tracking: nothing is sent to MLflow: {redact_text(str(error))}"
            self._say(text)
            return CloseReport(self.run_id, num_unsent=self._num_lost, problem=text)
