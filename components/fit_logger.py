"""Log any Keras training to MLflow: a callback for `model.fit`, without TFX."""

from __future__ import annotations

import atexit
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import keras
import numpy as np

from rowstep.components.describe import as_meant, fit_params, optimizer_tags
from rowstep.components.loss_window import LossWindow
from rowstep.components.optimizer_log import OptimizerLog
from rowstep.components.step_meter import StepMeter
from rowstep.components.tracking import CloseReport, Status, Tracker, check_uri, open_tracker

_logger = logging.getLogger("rowstep")
_MAX_ELEMENTS = 32


class MlflowLogger(keras.callbacks.Callback):
    """Log loss, optimizer config, step and slot statistics of `model.fit` to MLflow.

        model.fit(data, callbacks=[MlflowLogger("http://127.0.0.1:5000", "ratings")])

    Works for every Keras 3 optimizer on TensorFlow; what is logged is what RecTrainer logs, see
    `tracking/SCHEMA.md`. A server that is away costs neither the training nor a report: what it
    does not get in time waits in `spool_dir`, and `rowstep sync` sends it.

    The training step is traced anew with a second branch that measures, taken every `every_steps`.
    Weights are the same to the bit, except under XLA, which rounds otherwise wherever it joins
    other operations. With more than one replica steps are not measured, only the state is.

    Used in a `with` statement, a run whose `fit` raises ends as FAILED, on Ctrl-C as KILLED. Else
    it ends as FAILED when the interpreter exits.

    Args:
        uri: tracking URI without credentials; `$MLFLOW_TRACKING_URI`, or `sqlite:///mlflow.db`,
            when left out.
        experiment: name of the experiment, made when missing.
        run_name: name of a new run; the model's when left out.
        every_steps: steps between two reports of loss, norms and touched rows.
        scan_every_steps: steps between two scans of all weights and slots; when left out 1000, as
            long as scans and histograms take no more than a hundredth of the time.
        per_variable: whether single variables have metrics; None for as many as 16.
        histograms: whether epochs end with pictures of the slots' histograms.
        run_key: what makes two trainings the same one: with the key of an earlier run this goes on
            with it. A new run when left out.
        params: further params of the run.
        tags: further tags.
        spool_dir: where reports wait; below `$ROWSTEP_HOME` or `~/.rowstep` when left out, where
            `rowstep sync` looks.
        max_spool_mib: mebibytes that may wait there.
        on_problem: is told, in words, what goes wrong; logged as a warning when left out.

    Raises:
        TrackingError: the URI holds credentials.

    Cost: a report costs the training thread one transfer of some hundred numbers and one write to
        a file; a scan reads all weights and slots.
    """

    def __init__(
        self,
        uri: str | None = None,
        experiment: str = "rowstep",
        run_name: str | None = None,
        *,
        every_steps: int = 100,
        scan_every_steps: int | None = None,
        per_variable: bool | None = None,
        histograms: bool = True,
        run_key: str | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        spool_dir: Path | None = None,
        max_spool_mib: int = 256,
        on_problem: Callable[[str], None] = _logger.warning,
    ) -> None:
        super().__init__()
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        check_uri(self.uri)
        self.experiment, self.run_name = experiment, run_name
        self.every_steps, self.scan_every_steps = every_steps, scan_every_steps
        self.per_variable, self.histograms = per_variable, histograms
        self.run_key = run_key or uuid.uuid4().hex
        self.max_spool_mib, self.on_problem = max_spool_mib, on_problem
        self.spool_dir = spool_dir or _home() / "fit" / "state" / self.run_key / "tracking"
        self.report: CloseReport | None = None
        """What became of the reports, once the training has ended."""
        self._given = dict(params or {}), dict(tags or {})
        self._tracker: Tracker | None = None
        self._meter: StepMeter | None = None

    # --- the training's hooks -------------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Open the run, and make the next trace of the step one that measures."""
        self._end("FAILED")  # of an earlier fit that was interrupted: it holds the folder
        model, optimizer = self.model, self.model.optimizer
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        step = self._now()
        self._tracker = open_tracker(
            self.uri,
            self.experiment,
            self.run_name or model.name,
            self.run_key,
            self.spool_dir,
            on_problem=self.on_problem,
            max_spool_bytes=self.max_spool_mib * 2**20,
        )
        atexit.register(self._end, "FAILED")
        params, tags = self._given
        self._tracker.start(
            as_meant(fit_params(model, self.params) | params),
            {**optimizer_tags(optimizer), **tags},
            from_step=step,
        )
        self._log = OptimizerLog(
            self._tracker,
            optimizer,
            model,
            self.per_variable,
            self.scan_every_steps,
            self.histograms,
            self.on_problem,
        )
        self._log.start()
        self._next_report = _next_multiple(step, self.every_steps)
        self._next_scan = _next_multiple(step, self._log.steps_between_scans)
        self._window = LossWindow()
        self._num_batches = self._epoch_start = 0
        self._seen = (step, 0)
        if model.distribute_strategy.num_replicas_in_sync == 1:
            self._meter = StepMeter(model, self._log.observer, self.every_steps)
            self._meter.attach()
        else:
            self.on_problem(
                "MlflowLogger: steps are measured on one replica only. Got more. Slots and weights "
                "are scanned all the same."
            )

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Begin a new running mean of the loss."""
        self._epoch_start = self._num_batches
        self._window.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report, when it is time."""
        self._num_batches = self._epoch_start + batch + 1
        step, num_batches = self._seen
        if step + self._num_batches - num_batches < min(self._next_report, self._next_scan):
            return  # no batch makes more than one update, and to ask the device costs
        step = self._now()
        self._seen = (step, self._num_batches)
        if step >= self._next_report:
            self._next_report = _next_multiple(step, self.every_steps)
            self._note_loss(logs)
            self._report(step)
        if step >= self._next_scan:
            self._next_scan = _next_multiple(step, self._log.steps_between_scans)
            if self._log.affords_scan():
                self._log.scan(step)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Leave an evaluation out of the training's speed."""
        if self._tracker is not None:
            self._window.pause()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the metrics of the epoch."""
        self._note_loss(logs)
        self._window.pause()
        step, metrics = self._now(), {"opt/epoch": float(epoch + 1)}
        for name, value in (logs or {}).items():
            metrics |= _by_element(f"epoch/{name}", np.ravel(value))
        self._told().log_metrics(step, metrics)
        self._log.epoch(step)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Report the state at the end, and end the run."""
        self._log.end(self._now())
        self._end("FINISHED")

    def __enter__(self) -> MlflowLogger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end("KILLED" if kind is KeyboardInterrupt else "FAILED")

    # --- reports --------------------------------------------------------------------------------

    def _told(self) -> Tracker:
        if self._tracker is None:
            raise RuntimeError("MlflowLogger: hooks must come between train begin and train end.")
        return self._tracker

    def _now(self) -> int:
        return int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))

    def _note_loss(self, logs: Mapping[str, Any] | None) -> None:
        loss = (logs or {}).get("loss")
        self._window.note(
            None if loss is None else float(loss), self._num_batches - self._epoch_start
        )

    def _report(self, step: int) -> None:
        metrics = {"opt/iterations": float(step), **self._window.take()}
        measured = None if self._meter is None else self._meter.read()
        if measured is None:
            metrics["opt/learning_rate"] = float(self.model.optimizer.learning_rate)
        else:
            at, rate, statistics = measured
            self._told().log_metrics(at, {"opt/learning_rate": rate, **self._log.named(statistics)})
        self._told().log_metrics(step, metrics)

    def _end(self, status: Status) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        atexit.unregister(self._end)
        if self._meter is not None:
            self._meter.detach()
            self._meter = None
        self.report = tracker.close(status)
        if self.report.problem:
            self.on_problem(self.report.problem)


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every


def _by_element(name: str, values: np.ndarray) -> dict[str, float]:
    """Return a number by its name, those of a vector by name and index; none of a long one."""
    if values.size == 1:
        return {name: float(values[0])}
    if values.size > _MAX_ELEMENTS:
        return {}
    return {f"{name}.{index}": float(value) for index, value in enumerate(values)}


def _home() -> Path:
    return Path(os.environ.get("ROWSTEP_HOME") or "~/.rowstep").expanduser()
