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

__all__ = [
    "NOT_FINITE",
    "Gradient",
    "by_global_norm",
    "by_norm",
    "by_value",
    "checked",
    "compute_dtype",
    "summed",
]

NOT_FINITE = "a gradient must be finite"
"""What the error about NaN and infinity says, for those who must tell it from others."""
Gradient: TypeAlias = "tf.Tensor | RowGradient"


def compute_dtype(dtype: tf.DType) -> tf.DType:
    """Return the dtype of state and arithmetic for variables of a dtype: float32 or float64."""
    # beta_2 = 0.999 is 1 in bfloat16, and squares of small gradients are 0 in float16: with
    # coefficients or state in those types the weights stand still or run away.
    return tf.float64 if dtype == tf.float64 else tf.float32


def checked(
    gradient: tf.Tensor | tf.IndexedSlices,
    variable: tf.Variable,
    where: str,
    *,
    scale: float = 1.0,
    finite: bool = True,
) -> tuple[Gradient, list[tf.Operation]]:
    """Return a gradient in the dtype of the arithmetic; repeated rows are not summed yet.

    Args:
        gradient: A tensor of the variable's shape, or tf.IndexedSlices.
        variable: The variable that it is the gradient of.
        where: What errors call the variable.
        scale: What the loss was multiplied by; the gradient is divided by it.
        finite: Whether NaN and infinity are errors.

    Returns:
        The gradient, and the checks (none eagerly) that must run before anything is updated.

    Raises:
        OptimizerArgumentError: the shape of the gradient is not that of the variable.
        tf.errors.InvalidArgumentError: a row id is out of range, or a number is not finite. In a
            graph it is raised when the graph runs; XLA compiles these checks away.
    """
    dtype = compute_dtype(variable.dtype)
    sparse = isinstance(gradient, tf.IndexedSlices)
    values = tf.cast(gradient.values if sparse else gradient, dtype)
    if sparse:
        _check_ids(gradient.indices, values, where)
    needed = tf.TensorShape([None]).concatenate(variable.shape[1:]) if sparse else variable.shape
    if not needed.is_compatible_with(values.shape):
        # A gradient that merely broadcasts would train something else without a word.
        raise OptimizerArgumentError(
            f"{where}: a gradient must have the variable's shape. "
            f"Got {values.shape} instead of {needed}. "
            "Pair each gradient with the variable that it was taken of."
        )
    checks = [_check_finite(values, where)] if finite else []
    values = values if scale == 1.0 else values / scale
    if not sparse:
        return values, [check for check in checks if check is not None]
    row_ids = tf.convert_to_tensor(gradient.indices)
    row_ids = row_ids if row_ids.dtype == tf.int32 else tf.cast(row_ids, tf.int64)
    checks.append(check_row_ids(row_ids, variable.shape[0], where))
    return RowGradient(row_ids, values), [check for check in checks if check is not None]


def _check_ids(row_ids: tf.Tensor, values: tf.Tensor, where: str) -> None:
    rows = tf.TensorShape([row_ids.shape[0]]) if row_ids.shape.rank else tf.TensorShape(None)
    if not (
        row_ids.dtype.is_integer
        and row_ids.shape.rank in (None, 1)
        and rows.is_compatible_with(values.shape[:1])
    ):
        raise OptimizerArgumentError(
            f"{where}: a sparse gradient must have one integer id for each of its rows. "
            f"Got ids of {row_ids.dtype.name} {row_ids.shape} for rows {values.shape}. "
            "Pass tf.IndexedSlices(values [N, ...], indices [N])."
        )


def summed(gradient: Gradient) -> Gradient:
    """Return the gradient with repeated rows summed."""
    return sum_duplicate_rows(*gradient) if isinstance(gradient, RowGradient) else gradient


def _check_finite(values: tf.Tensor, where: str) -> tf.Operation | None:
    message = (
        f"{where}: {NOT_FINITE}. Nothing was updated. Lower the learning rate, clip, "
        "or look for a division by zero in the loss. Got NaN or infinity among:"
    )
    return tf.debugging.Assert(tf.reduce_all(tf.math.is_finite(values)), [message, values])


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
