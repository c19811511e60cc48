"""Gradients on their way into the DTensor Adam: checked, moved to the layout, summed, clipped.

TensorFlow cannot scatter into a variable on a mesh, so a sparse gradient becomes a dense one there:
rows summed by segment, and for lazy training a mask of the rows that the batch named. Off the mesh
a lazy gradient stays as rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf
from tensorflow.experimental import dtensor

from rowstep.optimizers import gradients, sparse_rows
from rowstep.optimizers.dtensor.layout import broadcast_rows, is_on_mesh, place, read_array
from rowstep.optimizers.dtensor.options import GradientsClipOption
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.gradients import compute_dtype
from rowstep.optimizers.sparse_rows import RowGradient

__all__ = ["MaskedGradient", "Prepared", "clipped", "prepared"]


class MaskedGradient(NamedTuple):
    """Hold a dense gradient [V, D] and which of its elements are in rows that the batch named."""

    values: tf.Tensor
    is_touched: tf.Tensor


Prepared: TypeAlias = "tf.Tensor | RowGradient | MaskedGradient"


def prepared(
    gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, lazy: bool, where: str
) -> tuple[Prepared, list[tf.Operation]]:
    """Return a gradient as the update takes it, in the dtype of the arithmetic.

    Args:
        gradient: A tensor of the variable's shape, or tf.IndexedSlices with repeated ids or not.
        variable: The variable that it is the gradient of.
        lazy: Whether rows that the gradient does not name are to stay as they are.
        where: What errors call the variable.

    Returns:
        A tensor in the variable's layout; where lazy and sparse, a MaskedGradient on a mesh and a
        RowGradient off it. And the checks that must run before anything is updated.

    Raises:
        OptimizerArgumentError: the shape of the gradient does not fit the variable's.
        tf.errors.InvalidArgumentError: a row id is out of range, or a number is not finite. Inside
            a tf.function it is raised when that runs.

    Cost: on a mesh O(V * D) divided by the shards of the table, sparse or not.
    """
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    _check_shape(gradient, variable, where)
    values = gradient.values if is_sparse else gradient
    if not is_on_mesh(variable):
        values = tf.cast(values, compute_dtype(variable.dtype))
        checks = _finite_checks(tf.reduce_all(tf.math.is_finite(values)), where)
        if not is_sparse:
            return values, checks
        checks += _row_id_checks(tf.convert_to_tensor(gradient.indices), variable.shape[0], where)
        with tf.control_dependencies(checks):
            rows = sparse_rows.sum_duplicate_rows(gradient.indices, values)
            return (rows if lazy else sparse_rows.to_dense(rows, variable.shape)), checks
    layout = variable.layout
    # Segment sums are right on a mesh when no device lacks an id: rows of the batch unsharded.
    row_spec = [dtensor.UNSHARDED] if is_sparse else layout.sharding_specs[:1]
    # A gradient comes in the layout that its backward pass found best.
    values = place(values, dtensor.Layout([*row_spec, *layout.sharding_specs[1:]], layout.mesh))
    values = tf.cast(values, compute_dtype(variable.dtype))
    checks = _finite_checks(_off_mesh_if_eager(tf.reduce_all(tf.math.is_finite(values))), where)
    if not is_sparse:
        return values, checks
    row_ids = place(gradient.indices, dtensor.Layout.replicated(layout.mesh, rank=1))
    checks += _row_id_checks(_off_mesh_if_eager(row_ids), variable.shape[0], where)
    with tf.control_dependencies(checks):
        return _summed_on_mesh(row_ids, values, variable, lazy), checks


def clipped(items: Sequence[Prepared], option: GradientsClipOption) -> list[Prepared]:
    """Return gradients clipped as the option says, norms taken over whole logical tensors."""
    plain = [item.values if isinstance(item, MaskedGradient) else item for item in items]
    if option.clipnorm is not None:
        plain = gradients.by_norm(plain, option.clipnorm)
    elif option.global_clipnorm is not None:
        plain = gradients.by_global_norm(plain, option.global_clipnorm)
    elif option.clipvalue is not None:
        plain = gradients.by_value(plain, option.clipvalue)
    return [
        MaskedGradient(short, item.is_touched) if isinstance(item, MaskedGradient) else short
        for short, item in zip(plain, items, strict=True)
    ]


def _check_shape(gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, where: str) -> None:
    shape, needed = gradient.shape, variable.shape
    if isinstance(gradient, tf.IndexedSlices):
        shape = gradient.values.shape
        needed = tf.TensorShape([None]).concatenate(needed[1:])
    if not needed.is_compatible_with(shape):
        raise OptimizerArgumentError(
            f"{where}: a gradient must have the variable's shape. Got {shape} instead of {needed}. "
            "Pair each gradient with the variable that it was taken of."
        )


def _summed_on_mesh(
    row_ids: tf.Tensor, row_grads: tf.Tensor, variable: tf.Variable, lazy: bool
) -> Prepared:
    layout, shape = variable.layout, variable.shape
    summed = tf.math.unsorted_segment_sum(row_grads, row_ids, shape[0])
    summed = dtensor.relayout(summed, layout)
    if not lazy:
        return summed
    counts = tf.math.unsorted_segment_sum(tf.ones_like(row_ids), row_ids, shape[0])
    return MaskedGradient(summed, broadcast_rows(counts > 0, shape, layout))


def _finite_checks(is_finite: tf.Tensor, where: str) -> list[tf.Operation]:
    message = (
        f"{where}: a gradient must be finite. Got NaN or infinity. Nothing was updated. Lower the "
        "learning rate, clip, or look for a division by zero in the loss."
    )
    check = tf.debugging.Assert(is_finite, [message])
    return [] if check is None else [check]


def _row_id_checks(row_ids: tf.Tensor, num_rows: int, where: str) -> list[tf.Operation]:
    check = sparse_rows.check_row_ids(row_ids, num_rows, where)
    return [] if check is None else [check]


def _off_mesh_if_eager(value: tf.Tensor) -> tf.Tensor:
    # An assertion that fails on a mesh is told late, by whatever is read next. Off it, at once.
    return tf.constant(read_array(value)) if tf.executing_eagerly() else value
