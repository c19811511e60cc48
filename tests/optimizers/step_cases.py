"""A table and a dense layer, steps on them, and what NumPy says of such a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers import state

ROWS, WIDTH, BATCH = 50, 3, 12
Arrays = dict[str, np.ndarray]
Maker = Callable[[], keras.optimizers.Optimizer]


def new_variables(dtype: str = "float32") -> list[keras.Variable]:
    """Return a table, a kernel and a bias."""
    rng = np.random.default_rng(1)
    with keras.name_scope("items"):
        table = keras.Variable(rng.normal(size=(ROWS, WIDTH)), dtype=dtype, name="embeddings")
    with keras.name_scope("dense"):
        kernel = keras.Variable(rng.normal(size=(WIDTH, 4)), dtype=dtype, name="kernel")
    return [table, kernel, keras.Variable(rng.normal(size=4), dtype=dtype, name="bias")]


def of_rows(values: Any, ids: Any) -> tf.IndexedSlices:
    """Return the gradient of the table."""
    shape = tf.constant([ROWS, WIDTH])
    return tf.IndexedSlices(tf.convert_to_tensor(values), tf.convert_to_tensor(ids), shape)


def gradients(number: int, *, sparse: bool = True, dtype: str = "float32") -> list[Any]:
    """Return the gradients of step `number`; of a sparse one most rows come more than once."""
    rng = np.random.default_rng(100 + number)
    ids = rng.integers(0, 8, BATCH) + 5 * number
    values = tf.constant(rng.normal(size=(BATCH, WIDTH)), dtype)
    table: Any = of_rows(values, ids)
    if not sparse:
        table = tf.convert_to_tensor(tf.math.unsorted_segment_sum(values, ids, ROWS))
    kernel, bias = rng.normal(size=(WIDTH, 4)), rng.normal(size=4)
    return [table, tf.constant(kernel, dtype), tf.constant(bias, dtype)]


def everything(optimizer: keras.optimizers.Optimizer, variables: list[Any]) -> Arrays:
    """Return copies of weights and slots."""
    named = state.named_state(optimizer)
    return {**{v.path: np.array(keras.ops.convert_to_numpy(v)) for v in variables}, **named}


def summed(gradient: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a gradient in float64 and its distinct rows, or all of it and None."""
    if not isinstance(gradient, tf.IndexedSlices):
        return keras.ops.convert_to_numpy(gradient).astype(np.float64), None
    ids = gradient.indices.numpy()
    values = keras.ops.convert_to_numpy(gradient.values).astype(np.float64)
    rows = np.unique(ids)
    return np.stack([values[ids == row].sum(axis=0) for row in rows]), rows


def joint(arrays: list[np.ndarray]) -> float:
    """Return the Euclidean norm of all elements."""
    return float(np.sqrt(sum(np.sum(array.astype(np.float64) ** 2) for array in arrays)))


def touched(before: Arrays, path: str, rows: np.ndarray | None) -> np.ndarray:
    """Return in float64 what a step touched of a variable."""
    array = before[path].astype(np.float64)
    return array if rows is None else array[rows]


def norms(grads: list[Any], paths: list[str], before: Arrays, after: Arrays) -> dict[str, float]:
    """Return the norms of a step from copies of the weights."""
    parts = [summed(gradient) for gradient in grads]
    old = [touched(before, p, rows) for p, (_, rows) in zip(paths, parts, strict=True)]
    new = [touched(after, p, rows) for p, (_, rows) in zip(paths, parts, strict=True)]
    update = joint([n - o for n, o in zip(new, old, strict=True)])
    return {
        "opt/global/grad_norm": joint([gradient for gradient, _ in parts]),
        "opt/global/param_norm": joint(old),
        "opt/global/update_norm": update,
        "opt/global/update_ratio": update / joint(old),
        "opt/global/nonfinite": 0.0,
    }
