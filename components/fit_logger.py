"""Log any Keras training to MLflow: a callback for `model.fit`, without TFX."""

from __future__ import annotations

import atexit
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import keras
import tensorflow as tf

from rowstep.components.describe import as_meant, model_params, optimizer_params, optimizer_tags
from rowstep.components.optimizer_log import OptimizerLog
from rowstep.components.tracking import CloseReport, Status, Tracker, check_uri, open_tracker

_logger = logging.getLogger("rowstep")
_MAX_STATISTICS = 512


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
        scan_every_steps: steps between two scans of all weights and slots.
        per_variable: whether single variables have metrics; None for as many as 16.
        histograms: whether each epoch ends with pictures of the slots' histograms.
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
        scan_every_steps: int = 1000,
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

    # --- the training's hooks -------------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Open the run, and make the next trace of the step one that measures."""
        model, optimizer = self.model, self.model.optimizer
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._step = self._epoch_start = int(optimizer.iterations.numpy())
        self._tracker = open_tracker(
            self.uri,
            self.experiment,
            self.run_name or model.name,
            self.run_key,
            self.spool_dir,
            on_problem=self.on_problem,
            max_spool_bytes=self.max_spool_mib * 2**20,
        )
        params, tags = self._given
        training = {f"train.{key}": self.params.get(key) for key in ("epochs", "steps")}
        self._tracker.start(
            as_meant(optimizer_params(optimizer) | model_params(model) | training | params),
            {**optimizer_tags(optimizer), **tags},
            from_step=self._step,
        )
        self._log = OptimizerLog(
            self._tracker, optimizer, model, self.per_variable, self.on_problem
        )
        self._log.start()
        self._window = (self._step, 0.0, time.monotonic())
        self._last_measured = 0.0
        self._reported = self._scanned = self._step
        self._measure_steps()
        atexit.register(self._end, "FAILED")

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Begin a new running mean of the loss."""
        self._epoch_start = self._step
        self._window = (self._step, 0.0, time.monotonic())

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report, when it is time."""
        self._step = self._epoch_start + batch + 1
        if self._step // self.every_steps > self._reported // self.every_steps:
            self._reported = self._step
            self._report(logs or {})
        if self._step // self.scan_every_steps > self._scanned // self.scan_every_steps:
            self._scanned = self._step
            self._log.scan(self._step)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the metrics of the epoch."""
        metrics = {f"epoch/{name}": float(value) for name, value in (logs or {}).items()}
        self._told().log_metrics(self._step, {**metrics, "opt/epoch": float(epoch + 1)})
        if self.histograms:
            self._log.pictures(self._step)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Report the state at the end, and end the run."""
        self._log.end(self._step)
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

    def _report(self, logs: Mapping[str, Any]) -> None:
        optimizer, now = self.model.optimizer, time.monotonic()
        first, summed, began = self._window
        metrics = {
            "opt/iterations": float(self._step),
            "opt/learning_rate": float(optimizer.learning_rate),
            "batch/steps_per_second": (self._step - first) / max(now - began, 1e-9),
        }
        if "loss" in logs:
            # Keras tells the mean since the epoch's begin; the window is the difference of sums.
            total = float(logs["loss"]) * (self._step - self._epoch_start)
            metrics["batch/loss"] = (total - summed) / (self._step - first)
            summed = total
        self._window = (self._step, summed, now)
        self._told().log_metrics(self._step, metrics)
        measured = self._measured.numpy()
        names = self._log.observer.names
        if names and measured[0] > self._last_measured:
            self._last_measured = measured[0]
            self._log.step(int(measured[0]), measured[1 : len(names) + 1])

    def _end(self, status: Status) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        atexit.unregister(self._end)
        self._stop_measuring()
        self.report = tracker.close(status)
        if self.report.problem:
            self.on_problem(self.report.problem)

    # --- measuring ------------------------------------------------------------------------------

    def _measure_steps(self) -> None:
        self._measured = tf.Variable(tf.zeros([_MAX_STATISTICS + 1], tf.float64), trainable=False)
        if self.model.distribute_strategy.num_replicas_in_sync > 1:
            self.on_problem(
                "MlflowLogger: steps are measured on one replica only. Got more. Slots and weights "
                "are scanned all the same."
            )
            return
        self._replace()
        self.model.make_train_function(force=True)

    def _stop_measuring(self) -> None:
        if "apply" in vars(self.model.optimizer):
            self._put_back()
            self.model.train_function = None  # its trace would go on measuring

    def _replace(self) -> None:
        # On this one object only; `fit` comes in by the second, people's own loops by either.
        self.model.optimizer.apply = self._apply
        self.model.optimizer.apply_gradients = self._apply_gradients

    def _put_back(self) -> None:
        del self.model.optimizer.apply, self.model.optimizer.apply_gradients

    @contextmanager
    def _plain(self) -> Iterator[None]:
        self._put_back()
        try:
            yield
        finally:
            self._replace()

    def _apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        pairs = list(grads_and_vars)
        self._apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        return self.model.optimizer.iterations

    def _apply(self, grads: Iterable[Any], trainable_variables: Any = None) -> None:
        """Take the place of `optimizer.apply` while the step is traced."""
        optimizer, grads = self.model.optimizer, list(grads)
        variables = list(trainable_variables or self.model.trainable_variables)
        step = tf.cast(tf.convert_to_tensor(optimizer.iterations.value), tf.int64) + 1

        def observed() -> tf.Tensor:
            with self._plain():
                statistics = tf.cast(self._log.observer.apply(grads, variables), tf.float64)
            rest = tf.zeros([_MAX_STATISTICS - len(self._log.observer.names)], tf.float64)
            self._measured.assign(
                tf.concat([[tf.cast(step, tf.float64)], statistics, rest], axis=0)
            )
            return tf.constant(True)

        def plain() -> tf.Tensor:
            with self._plain():
                optimizer.apply(grads, variables)
            return tf.constant(False)

        tf.cond(tf.equal(step % self.every_steps, 0), observed, plain)


def _home() -> Path:
    return Path(os.environ.get("ROWSTEP_HOME") or "~/.rowstep").expanduser()
