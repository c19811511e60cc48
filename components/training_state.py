"""What a training must remember to go on as if nothing had happened."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import rowstep
from rowstep.components.callback_state import CallbackStates
from rowstep.components.checkpoints import CheckpointError, SavedState
from rowstep.components.job import DivergedError
from rowstep.components.offset_schedule import OffsetSchedule
from rowstep.components.random_state import load_random_state, random_state
from rowstep.components.training_metrics import TrainingMetrics
from rowstep.components.vocabularies import Vocabulary, vocabulary_arrays
from rowstep.optimizers.state import (
    assign_arrays,
    iter_named_state,
    iter_named_variables,
    refuse_misfits,
    state_variables,
)
from rowstep.optimizers.variables import variables_by_path


@dataclass
class TrainingState:
    """Hold the model, its optimizer, the position in the data and all that is summed up meanwhile.

    `batch` counts the batches of `epoch` that are done; it equals the number of batches of an
    epoch between its last step and its evaluation, so a resume there evaluates and goes on.
    """

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    metrics: TrainingMetrics = field(default_factory=lambda: TrainingMetrics(()))
    callbacks: CallbackStates = field(default_factory=lambda: CallbackStates(()))
    schedules: Sequence[OffsetSchedule] = ()
    """The learning rate's schedule, if it has one; it begins with this training."""
    step: int = 0
    """Steps of this training, counted on the host so that no step waits for the device."""
    first_iteration: int = 0
    """The optimizer's iterations before step 1: more than 0 after a warm start with its state."""
    epoch: int = 0
    batch: int = 0
    window_steps: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each finished epoch."""
    finished: bool = False
    attempt: int = 1
    """How often this training was started, this time included."""

    def __post_init__(self) -> None:
        # float64, and on the device: a window is summed without a transfer per step.
        self.loss_sum = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="loss_sum")
        self._to_load: SavedState | None = None

    def snapshot(self) -> tuple[dict[str, Iterable[tuple[str, np.ndarray]]], dict[str, Any]]:
        """Return all arrays to save, by group, and everything else as JSON.

        The optimizer's arrays are in the order of get_weights. Nothing is copied on a CPU: use the
        arrays before the next step.

        Raises:
            DivergedError: the loss is no finite number; what is saved must be worth going on with.
            CheckpointError: the optimizer counted other steps than the loop ran, or a callback
                holds what cannot be saved.
        """
        meta = self._meta()
        meta["random"], random_arrays = random_state()
        groups: dict[str, Iterable[tuple[str, np.ndarray]]] = {
            "model": iter_named_variables(self.model.variables),
            "optimizer": iter_named_state(self.optimizer),
            "metrics": self._metric_arrays(),
            "callbacks": self.callbacks.arrays(),
            "random": random_arrays.items(),
        }
        if self.finished:  # for warm starts from here; until then Transform's files are at hand
            groups["vocabularies"] = vocabulary_arrays(self.vocabularies)
        return groups, meta

    def _metric_arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "loss_sum", np.asarray(self.loss_sum.numpy())
        yield from self.metrics.named_arrays()

    def _meta(self) -> dict[str, Any]:
        self.check_finite()
        iterations = int(self.optimizer.iterations.numpy()) - self.first_iteration
        if iterations != self.step:
            raise CheckpointError(
                f"train: the optimizer must count every step once. Got {iterations} iterations "
                f"after step {self.step}. They must be equal. Report this with your callbacks"
            )
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "first_iteration": self.first_iteration,
            "window_steps": self.window_steps,
            "history": self.history,
            "stopping": bool(self.model.stop_training),
            "finished": self.finished,
            "attempt": self.attempt,
            "callbacks": self.callbacks.meta(),
            "vocabularies": {n: v.fingerprint for n, v in self.vocabularies.items()},
            "versions": versions(),
        }

    def load(self, saved: SavedState) -> None:
        """Take the position of a checkpoint, and make sure that the rest of it fits.

        `settle` loads the rest: a training that goes on begins its callbacks before that.

        Raises:
            StateMismatchError: names what does not fit; nothing was assigned.
            CheckpointError: the checkpoint lacks a part, or callbacks differ.
        """
        meta = saved.meta
        refuse_misfits("resume: model", self._model_variables(), saved.sources("model"))
        refuse_misfits("resume: optimizer", self._optimizer_state(), saved.sources("optimizer"))
        self.callbacks.check(meta["callbacks"])
        self._load_metrics(saved)
        self.step, self.epoch, self.batch = saved.step, meta["epoch"], meta["batch"]
        self.first_iteration = meta.get("first_iteration", 0)
        self.window_steps = meta["window_steps"]
        self.history, self.finished = list(meta["history"]), meta["finished"]
        self.attempt = meta.get("attempt", 1) + 1
        self.model.stop_training = meta.get("stopping", False)
        self._to_load = saved

    def settle(self) -> Sequence[str]:
        """Load weights, optimizer, callbacks and random generators, once, if `load` was called.

        It comes after the hooks that began before the checkpoint was taken: they reset callbacks,
        and some of them change the learning rate a second time.

        Returns:
            What people should know about it.
        """
        saved, self._to_load = self._to_load, None
        if saved is None:
            return ()
        assign_arrays("resume: model", self._model_variables(), saved.sources("model"))
        assign_arrays("resume: optimizer", self._optimizer_state(), saved.sources("optimizer"))
        # Format 1 knew neither arrays of callbacks nor random generators.
        arrays = dict(saved.arrays("callbacks")) if "callbacks" in saved.groups else {}
        notices = self.callbacks.load(saved.meta["callbacks"], arrays)
        if "random" in saved.groups:
            load_random_state(saved.meta["random"], dict(saved.arrays("random")))
        return notices

    def _model_variables(self) -> Mapping[str, Any]:
        return variables_by_path(self.model.variables)

    def _optimizer_state(self) -> Mapping[str, Any]:
        return state_variables(self.optimizer)

    def _load_metrics(self, saved: SavedState) -> None:
        if "loss" in saved.groups:  # format 1 knew no other sum
            self.loss_sum.assign(dict(saved.arrays("loss"))["sum"])
            return
        arrays = dict(saved.arrays("metrics"))
        loss_sum = arrays.pop("loss_sum")
        self.metrics.load(arrays)
        self.loss_sum.assign(loss_sum)

    def measured(self, statistics: tf.Tensor) -> tf.Tensor:
        """Return all that a report needs as one float64 vector, and begin a new window.

        That is the sum of the losses of this window, the learning rate of the next step, and the
        statistics of this one: part of the compiled step, so that a report is one transfer.
        """
        rate = tf.convert_to_tensor(self.optimizer.learning_rate)
        values = [self.loss_sum.read_value(), tf.cast(rate, tf.float64)]
        values = tf.concat([tf.stack(values), tf.cast(statistics, tf.float64)], axis=0)
        self.loss_sum.assign(0.0)
        return values

    def check_finite(self, loss_sum: float | None = None) -> None:
        """Refuse to go on with, or to save, a training whose loss is no number any more.

        Args:
            loss_sum: that of the window, where it was fetched already.

        Raises:
            DivergedError: names the step; checkpoints from before are untouched.
        """
        loss_sum = float(self.loss_sum.numpy()) if loss_sum is None else loss_sum
        if not np.isfinite(loss_sum):
            raise DivergedError(
                f"train: the loss must stay a finite number. Got {loss_sum} in the "
                f"{self.window_steps} steps up to step {self.step}. The last checkpoint is from "
                "before. Lower optimizer.learning_rate, or clip gradients with optimizer.clipnorm."
            )


def versions() -> dict[str, str]:
    """Return the versions that decide whether a resume is exact to the bit."""
    return {
        "rowstep": rowstep.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def changed_versions(saved: Mapping[str, Any]) -> Sequence[str]:
    """Name the versions that differ from those of a checkpoint."""
    then, now = saved.get("versions", {}), versions()
    return [f"{n} {then[n]} -> {now[n]}" for n in now if n in then and then[n] != now[n]]
