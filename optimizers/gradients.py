"""Gradients on their way to the update: checked, summed by row, clipped.

The rows of a RowGradient are distinct and the rows that are absent are zero, so the norm over its
rows is the norm of the dense gradient, at the cost of the touched rows only. Keras measures the
rows before it sums duplicates, and makes the gradient dense to measure a global norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from rowstep.optimizers import update_rules
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.sparse_rows import RowGradient, check_row_ids, sum_duplicate_rows

__all__ = ["Gradient", "by_global_norm", "by_norm", "by_value", "compute_dtype", "prepared"]

Gradient: TypeAlias = "tf.Tensor | RowGradient"


def compute_dtype(dtype: tf.DType) -> tf.DType:
    """Return the dtype of state and arithmetic for variables of a dtype: float32 or float64."""
    # beta_2 = 0.999 is 1 in bfloat16, and squares of small gradients are 0 in float16: with
    # coefficients or state in those types the weights stand still or run away.
    return tf.float64 if dtype == tf.float64 else tf.float32


def prepared(
    gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, where: str
) -> tuple[Gradient, list[tf.Operation]]:
    """Return a gradient in the dtype of the arithmetic, with repeated rows summed.

    Args:
        gradient: A tensor of the variable's shape, or tf.IndexedSlices.
        variable: The variable that it is the gradient of.
        where: What errors call the variable.

    Returns:
        The gradient, and the checks (none eagerly) that must run before anything is updated.

    Raises:
        OptimizerArgumentError: the shape of a dense gradient is not that of the variable.
        tf.errors.InvalidArgumentError: a row id is out of range.
    """
    dtype = compute_dtype(variable.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        row_ids = tf.convert_to_tensor(gradient.indices)
        check = check_row_ids(row_ids, variable.shape[0], where)
        rows = sum_duplicate_rows(row_ids, tf.cast(gradient.values, dtype))
        return rows, [] if check is None else [check]
    gradient = tf.cast(gradient, dtype)
    if not variable.shape.is_compatible_with(gradient.shape):
        # A gradient that merely broadcasts would train something else without a word.
        raise OptimizerArgumentError(
            f"{where}: a gradient must have the variable's shape. "
            f"Got {gradient.shape} instead of {variable.shape}. "
            "Pair each gradient with the variable that it was taken of."
        )
    return gradient, []


def by_norm(gradients: Sequence[Gradient], clipnorm: float) -> list[Gradient]:
    """Scale each gradient to a norm of at most clipnorm: g * min(1, clipnorm / ||g||)."""
    return [_scaled(g, _shrink(update_rules.safe_norm(_values(g)), clipnorm)) for g in gradients]


def by_global_norm(gradients: Sequence[Gradient], global_clipnorm: float) -> list[Gradient]:
    """Scale all gradients by one factor, so that their joint norm is at most global_clipnorm."""
    # float64 variables and float32 ones may train side by side: the joint norm takes the wider.
    norms = [tf.cast(update_rules.safe_norm(_values(g)), tf.float64) for g in gradients]
    factor = _shrink(update_rules.safe_norm(tf.stack(norms)), global_clipnorm)
    return [_scaled(g, tf.cast(factor, _values(g).dtype)) for g in gradients]


def by_value(gradients: Sequence[Gradient], clipvalue: float) -> list[Gradient]:
    """Clip every element of the summed gradients into [-clipvalue, clipvalue]."""
    return [_with_values(g, tf.clip_by_value(_values(g), -clipvalue, clipvalue)) for g in gradients]


def _shrink(norm: tf.Tensor, limit: float) -> tf.Tensor:
    # limit / max(norm, limit) is exactly 1 for a gradient that is short enough.
    limit = tf.constant(limit, norm.dtype)
    return limit / tf.maximum(norm, limit)


def _values(gradient: Gradient) -> tf.Tensor:
    return gradient.row_grads if isinstance(gradient, RowGradient) else gradient


def _with_values(gradient: Gradient, values: tf.Tensor) -> Gradient:
    if isinstance(gradient, RowGradient):
        return RowGradient(gradient.row_ids, values)
    return values


def _scaled(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    return _with_values(gradient, _values(gradient) * factor)
