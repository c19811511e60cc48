"""What TensorFlow and Keras ship for the same purpose; imported once, started only in children."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from systems import Arrays, Found, Writer, arrays_of


class BackupAndRestore:
    """`keras.callbacks.BackupAndRestore`, driven by the hooks that `fit` calls."""

    name = "Keras BackupAndRestore"
    crash_points = False

    def __init__(self, *, double_checkpoint: bool = False) -> None:
        self.double_checkpoint = double_checkpoint
        self._reader: tuple[Any, Any] | None = (
            None  # slow to build, and read with thousands of times
        )
        if double_checkpoint:
            self.name += ", double_checkpoint"

    def version(self) -> str:
        return f"Keras {keras.__version__}"

    def _callback(self, root: Path, num_rows: int) -> tuple[Any, Any]:
        model = keras.Sequential([keras.Input((1,)), Holder(arrays_of(0, num_rows))])
        model.compile("sgd", "mse")
        callback = keras.callbacks.BackupAndRestore(
            str(root / "backup"),
            delete_checkpoint=False,
            double_checkpoint=self.double_checkpoint,
        )
        callback.set_model(model)
        return model, callback

    def read(self, root: Path, num_rows: int) -> Found:
        if self._reader is None:
            self._reader = self._callback(root, num_rows)
        model, callback = self._reader
        model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
        callback.on_train_begin()
        values = dict(zip(arrays_of(0, 1), model.get_weights(), strict=True))
        step = int(values["iterations"])
        return Found(step, values if step else None, [])

    @contextmanager
    def writing(self, root: Path, num_rows: int) -> Iterator[Writer]:
        model, callback = self._callback(root, num_rows)

        class Saver:
            def save(self, step: int, arrays: Arrays) -> None:
                model.set_weights(list(arrays.values()))
                callback.on_epoch_end(step)

        yield Saver()


class Holder(keras.layers.Layer):
    """Hold the arrays as weights of a layer."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        for name, array in arrays.items():
            self.add_weight(
                name=name.replace("/", "_"),
                shape=array.shape,
                dtype=str(array.dtype),
                initializer="zeros",
                trainable=True,  # all of them, so that get_weights keeps this order
            )

    def build(self, input_shape: Any) -> None:
        self.built = True

    def call(self, inputs: Any) -> Any:
        return inputs

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect what TensorFlow warns of: its way to say that it passes over something."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear(logging.WARNING)
    tf.get_logger().addHandler(ear)
    try:
        yield heard
    finally:
        tf.get_logger().removeHandler(ear)


class CheckpointManager:
    """`tf.train.CheckpointManager`, which keeps three."""

    name = "tf.train.CheckpointManager"
    crash_points = False

    def version(self) -> str:
        return f"TensorFlow {tf.__version__}"

    def _manager(self, root: Path, num_rows: int) -> tuple[dict[str, tf.Variable], Any]:
        variables = {n: tf.Variable(tf.zeros_like(a)) for n, a in arrays_of(0, num_rows).items()}
        checkpoint = tf.train.Checkpoint(**{n.replace("/", "_"): v for n, v in variables.items()})
        return variables, tf.train.CheckpointManager(checkpoint, str(root), max_to_keep=3)

    def read(self, root: Path, num_rows: int) -> Found:
        variables, manager = self._manager(root, num_rows)
        with listening() as warnings:
            restored = manager.restore_or_initialize()
        if restored is None:
            return Found(0, None, warnings)
        values = {name: variable.numpy() for name, variable in variables.items()}
        return Found(int(values["iterations"]), values, warnings)

    @contextmanager
    def writing(self, root: Path, num_rows: int) -> Iterator[Writer]:
        variables, manager = self._manager(root, num_rows)

        class Saver:
            def save(self, step: int, arrays: Arrays) -> None:
                for name, array in arrays.items():
                    variables[name].assign(array)
                manager.save(checkpoint_number=step)

        yield Saver()
