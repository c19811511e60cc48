"""What a training must remember to go on as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import rowstep
from rowstep.components.checkpoints import CheckpointError, SavedState
from rowstep.components.fingerprint import code_fingerprint
from rowstep.components.job import DivergedError
from rowstep.configs import RunConfig
from rowstep.optimizers import state as optimizer_state


@dataclass
class TrainingState:
    """Hold the model, its optimizer, the position in the data and the open loss window.

    `batch` counts the batches of `epoch` that are done; it equals the number of batches of an
    epoch between its last step and its evaluation, so a resume there evaluates and goes on.
    """

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    step: int = 0
    """The optimizer's iterations, counted on the host so that no step waits for the device."""
    epoch: int = 0
    batch: int = 0
    window_steps: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    """Evaluation metrics of each finished epoch."""
    finished: bool = False
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    """Callbacks by name that offer `get_state()` and `set_state(state)`, JSON in between."""

    def __post_init__(self) -> None:
        # float64, and on the device: a window is summed without a transfer per step.
        self.loss_sum = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="loss_sum")

    def groups(self) -> dict[str, Iterator[tuple[str, np.ndarray]]]:
        """Return every array to save, by group; the optimizer's in the order of get_weights."""
        return {
            "model": optimizer_state.iter_named_variables(self.model.variables),
            "optimizer": optimizer_state.iter_named_state(self.optimizer),
            "loss": iter([("sum", np.asarray(self.loss_sum.numpy()))]),
        }

    def meta(self) -> dict[str, Any]:
        """Return everything else to save, as JSON.

        Raises:
            DivergedError: the loss is no finite number; what is saved must be worth going on with.
            CheckpointError: the optimizer counted other steps than the loop ran.
        """
        self.check_finite()
        iterations = int(self.optimizer.iterations.numpy())
        if iterations != self.step:
            raise CheckpointError(
                f"train: the optimizer must count every step once. Got iterations {iterations} "
                f"after step {self.step}. They must be equal. Report this with your callbacks"
            )
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "window_steps": self.window_steps,
            "history": self.history,
            "finished": self.finished,
            "callbacks": {name: c.get_state() for name, c in self.callbacks.items()},
            "versions": {
                "rowstep": rowstep.__version__,
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
            },
        }

    def load(self, saved: SavedState) -> None:
        """Continue exactly where `saved` was taken.

        Raises:
            StateMismatchError: names what does not fit; nothing was assigned.
            CheckpointError: the checkpoint lacks the position, or a callback's state.
        """
        self._load_model(saved)
        optimizer_state.load_named_state(self.optimizer, dict(saved.arrays("optimizer")))
        self.step = saved.step
        self.loss_sum.assign(dict(saved.arrays("loss"))["sum"])
        meta = saved.meta
        missing = set(meta["callbacks"]) ^ set(self.callbacks)
        if missing:
            raise CheckpointError(
                "train.callbacks: a resume needs the same stateful callbacks. Got a difference in "
                f"{', '.join(sorted(missing))}. Restore them in the config or start a new run"
            )
        for name, callback in self.callbacks.items():
            callback.set_state(meta["callbacks"][name])
        self.epoch, self.batch = meta["epoch"], meta["batch"]
        self.window_steps = meta["window_steps"]
        self.history, self.finished = list(meta["history"]), meta["finished"]

    def warm_start(self, saved: SavedState) -> None:
        """Take the weights of another training, and nothing else.

        The optimizer starts afresh: its old step count would put a schedule at its end, and without
        the count its moments would be corrected for a bias that they do not have.

        Raises:
            StateMismatchError: names what does not fit; nothing was assigned.
        """
        self._load_model(saved)

    def _load_model(self, saved: SavedState) -> None:
        optimizer_state.load_named_variables(self.model.variables, dict(saved.arrays("model")))

    def check_finite(self) -> None:
        """Refuse to go on with, or to save, a training whose loss is no number any more.

        Raises:
            DivergedError: names the step; checkpoints from before are untouched.
        """
        if not np.isfinite(self.loss_sum.numpy()):
            raise DivergedError(
                f"train: the loss must stay a finite number. Got {self.loss_sum.numpy()} in the "
                f"{self.window_steps} steps up to step {self.step}. The last checkpoint is from "
                "before. Lower optimizer.learning_rate, or clip gradients with optimizer.clipnorm."
            )


def stateful(callbacks: list[keras.callbacks.Callback]) -> dict[str, Any]:
    """Name the callbacks whose state travels with the checkpoint, by class and position."""
    return {
        f"{position}.{type(callback).__name__}": callback
        for position, callback in enumerate(callbacks)
        if hasattr(callback, "get_state") and hasattr(callback, "set_state")
    }


def identity(config: RunConfig, train_fingerprint: str, eval_fingerprint: str) -> dict[str, Any]:
    """Collect what must be equal for two trainings to be the same training.

    Where results are written, how often is logged and how the model is judged does not belong here.
    """
    dumped = json.loads(config.model_dump_json())
    return {
        "features": dumped["features"],
        "label": dumped["label"],
        "model": dumped["model"],
        "optimizer": dumped["optimizer"],
        "train": dumped["train"],
        "train_data": train_fingerprint,
        "eval_data": eval_fingerprint,
        # Other code may train to other bits: what it left is kept, but is not gone on with.
        "code": code_fingerprint(),
    }


def run_key(parts: Mapping[str, Any]) -> str:
    """Return a short stable name for an identity."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name what two identities disagree on, as dotted paths with both values."""
    found: list[str] = []

    def walk(path: str, left: Any, right: Any) -> None:
        if isinstance(left, dict) and isinstance(right, dict):
            for key in sorted({*left, *right}):
                walk(f"{path}.{key}" if path else key, left.get(key), right.get(key))
        elif left != right:
            found.append(f"{path}: {_short(left)} -> {_short(right)}")

    walk("", dict(old), dict(new))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
