"""What a step touches: of a sparse gradient its rows, of a dense one the whole variable."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import tensorflow as tf

from rowstep.optimizers import update_rules
from rowstep.optimizers.gradients import compute_dtype
from rowstep.optimizers.sparse_rows import gather_rows, sum_duplicate_rows
from rowstep.optimizers.statistics.observed import ObservedVariable

__all__ = ["Touched", "flat", "grouped", "joint_norm", "norm", "touched_by"]

_SMALL_ELEMENTS = 1 << 14


class Touched(NamedTuple):
    """Hold the gradient of a variable, with repeated rows summed, and the rows to look at."""

    variable: ObservedVariable
    gradient: tf.Tensor
    """In float32, or float64 for variables of that."""
    row_ids: tf.Tensor | None
    """Distinct rows [R]; None for the whole variable."""

    def read(self, source: tf.Variable) -> tf.Tensor:
        """Return what was touched of the weights or a slot, in float32 or float64."""
        dtype = compute_dtype(source.dtype)
        if self.row_ids is None:
            return tf.cast(tf.convert_to_tensor(source), dtype)
        return gather_rows(source, self.row_ids, dtype)

    def num_rows(self) -> tf.Tensor:
        """Return how many rows were touched, float64."""
        return tf.cast(tf.size(self.row_ids), tf.float64)


def touched_by(gradient: Any, variable: ObservedVariable, scale: Any) -> Touched:
    """Return what a gradient touches.

    Rows that wait in a sum of several calls' gradients are touched as well: they may move now.

    Args:
        gradient: A tensor or tf.IndexedSlices; None where only such a sum may move the variable.
        variable: The variable that it is the gradient of.
        scale: What the loss was multiplied by.
    """
    dtype = compute_dtype(variable.weights.dtype)
    scale = tf.cast(scale, dtype)
    if gradient is None:
        gradient = _nothing(variable, dtype)
    if not isinstance(gradient, tf.IndexedSlices):
        return Touched(variable, tf.cast(gradient, dtype) / scale, None)
    row_ids, summed = sum_duplicate_rows(
        tf.cast(gradient.indices, tf.int64), tf.cast(gradient.values, dtype)
    )
    if variable.pending is not None:
        waiting = tf.where(tf.convert_to_tensor(variable.pending) > 0)
        row_ids = tf.unique(tf.concat([row_ids, tf.reshape(waiting, [-1])], axis=0)).y
    return Touched(variable, summed / scale, row_ids)


def _nothing(variable: ObservedVariable, dtype: tf.DType) -> Any:
    shape = variable.weights.shape
    if not variable.is_table:
        return tf.zeros(shape, dtype)
    return tf.IndexedSlices(tf.zeros([0, *shape[1:]], dtype), tf.zeros([0], tf.int64))


def grouped(touched: list[Touched], apart: Collection[str]) -> list[list[int]]:
    """Return the indexes of all entries, in groups whose elements may be measured together.

    Small dense variables share a group, so that the graph of thousands of them stays small.

    Args:
        touched: What a step touches.
        apart: Names of variables that have a group of their own.
    """
    groups: list[list[int]] = []
    shared: dict[tf.DType, list[int]] = {}
    for index, (variable, gradient, row_ids) in enumerate(touched):
        size = gradient.shape.num_elements()
        if row_ids is not None or variable.name in apart or size is None or size > _SMALL_ELEMENTS:
            groups.append([index])
        elif gradient.dtype in shared:
            shared[gradient.dtype].append(index)
        else:
            groups.append([index])
            shared[gradient.dtype] = groups[-1]
    return groups


def flat(tensors: list[tf.Tensor], group: list[int]) -> tf.Tensor:
    """Return the elements of a group in one tensor."""
    if len(group) == 1:
        return tensors[group[0]]
    return tf.concat([tf.reshape(tensors[index], [-1]) for index in group], axis=0)


def norm(x: tf.Tensor) -> tf.Tensor:
    """Return the Euclidean norm as float64: float32 and float64 variables train side by side."""
    return tf.cast(update_rules.safe_norm(x), tf.float64)


def joint_norm(norms: list[tf.Tensor]) -> tf.Tensor:
    """Return the norm of several tensors together, from their norms."""
    return update_rules.safe_norm(tf.stack(norms))
