"""The sum of several calls' gradients, kept sparse for the variables whose gradients are."""

from __future__ import annotations

import tensorflow as tf

from rowstep.optimizers.gradients import Gradient, compute_dtype
from rowstep.optimizers.row_update import SlotSpec, Step
from rowstep.optimizers.sparse_rows import RowGradient, gather_rows, scatter_rows

__all__ = ["accumulate", "accumulator_specs"]


def accumulator_specs(shape: tuple[int, ...], dtype: tf.DType) -> dict[str, SlotSpec]:
    """Return the slots that hold the sum and mark the rows that are in it."""
    return {
        "accumulated": SlotSpec(shape, compute_dtype(dtype)),
        "pending": SlotSpec(shape[:1], tf.int64),
    }


def accumulate(
    num_calls: int,
    accumulated: tf.Variable,
    gradient: Gradient | None,
    step: Step,
    pending: tf.Variable,
) -> tuple[Gradient, tf.Tensor]:
    """Add a gradient to the sum; return the mean of all calls once it is due, zeros before.

    Of sparse gradients the result is a RowGradient: of the rows of all calls once it is due, and
    without any row before. A call without a gradient counts as one of zeros, without any row.

    Args:
        num_calls: How many calls make one update.
        accumulated: The sum, of the variable's shape.
        gradient: The gradient of this call, with repeated rows summed.
        step: The step; `active` is true when the mean is due.
        pending: Which rows are in the sum, [V], or whether there is one, of a scalar variable.

    Returns:
        The mean, and whether it is due and there was a gradient in any of the calls.

    Cost: O(R * D) a call, and a scan of V numbers when the mean is due.
    """
    if gradient is None and accumulated.shape.rank > 0:
        no_rows = tf.zeros([0, *accumulated.shape[1:]], accumulated.dtype)
        gradient = RowGradient(tf.zeros([0], tf.int64), no_rows)
    if isinstance(gradient, RowGradient):
        return _accumulate_rows(num_calls, accumulated, gradient, step, pending)
    total, marks = tf.convert_to_tensor(accumulated), tf.convert_to_tensor(pending)
    if gradient is not None:
        # All rows are in the sum now, also for a sparse gradient that comes after.
        total, marks = total + gradient, tf.ones_like(marks)
    zeros = tf.zeros_like(total)
    accumulated.assign(tf.where(step.active, zeros, total))
    pending.assign(tf.where(step.active, tf.zeros_like(marks), marks))
    active = tf.logical_and(step.active, tf.reduce_any(marks > 0))
    return tf.where(step.active, total / num_calls, zeros), active


def _accumulate_rows(
    num_calls: int,
    accumulated: tf.Variable,
    gradient: RowGradient,
    step: Step,
    pending: tf.Variable,
) -> tuple[Gradient, tf.Tensor]:
    row_ids = tf.cast(gradient.row_ids, tf.int64)
    accumulated.scatter_add(tf.IndexedSlices(gradient.row_grads, row_ids))
    scatter_rows(pending, row_ids, tf.ones_like(row_ids))
    due = tf.cond(
        step.active,
        lambda: tf.reshape(tf.where(tf.convert_to_tensor(pending) > 0), [-1]),
        lambda: tf.zeros([0], tf.int64),
    )
    rows = gather_rows(accumulated, due, accumulated.dtype)
    scatter_rows(accumulated, due, tf.zeros_like(rows))
    scatter_rows(pending, due, tf.zeros_like(due))
    return RowGradient(due, rows / num_calls), tf.logical_and(step.active, tf.size(due) > 0)
