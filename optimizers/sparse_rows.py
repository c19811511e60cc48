"""From tf.IndexedSlices to distinct rows and back into variables.

The gradient of a gather names a row once for every time the batch looked it up. An optimizer with
a square in it must see the sum of these, once: (g_1 + g_2)^2, not g_1^2 + g_2^2.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

__all__ = [
    "RowGradient",
    "check_row_ids",
    "gather_rows",
    "scatter_rows",
    "sum_duplicate_rows",
    "sum_duplicate_rows_static",
    "to_dense",
]


class RowGradient(NamedTuple):
    """Hold the gradient of a table by distinct rows.

    row_ids [R] are distinct; row_grads [R, ...] are the summed gradients, one a row.
    """

    row_ids: tf.Tensor
    row_grads: tf.Tensor


def sum_duplicate_rows(row_ids: tf.Tensor, row_grads: tf.Tensor) -> RowGradient:
    """Sum the gradients of repeated rows.

        row_grads'[r] = sum over i with row_ids[i] == r of row_grads[i]

    A row that is present stays present even if its gradients sum to zero.

    Args:
        row_ids: Integer tensor [N], with repetitions.
        row_grads: Tensor [N, ...], one gradient for each entry of row_ids.

    Returns:
        A RowGradient with R <= N distinct ids in order of first appearance.

    Cost: O(N * D). R is known only at run time, so under XLA the shape is dynamic.
    """
    if row_ids.shape[0] == 1:
        # Nothing can repeat; and XLA cannot tell which dimension of [<=1, 1] is the dynamic one.
        return RowGradient(row_ids, row_grads)
    distinct_ids, segment_ids = tf.unique(row_ids, out_idx=tf.int32)
    summed = tf.math.unsorted_segment_sum(row_grads, segment_ids, tf.size(distinct_ids))
    return RowGradient(distinct_ids, summed)


def sum_duplicate_rows_static(
    row_ids: tf.Tensor, row_grads: tf.Tensor
) -> tuple[RowGradient, tf.Tensor]:
    """Sum the gradients of repeated rows without a shape that depends on the data.

    The result has N entries like the input, whatever the number of distinct rows: the R distinct
    rows come first, in ascending order, and the N - R entries left over repeat row 0 of the
    result with the same gradient. Writing a repeated row twice writes the same value twice, so
    `scatter_rows` is right with them; a sum or a norm over entries must use the mask.

    Args:
        row_ids: Integer tensor [N], with repetitions.
        row_grads: Tensor [N, ...], one gradient for each entry of row_ids.

    Returns:
        The RowGradient, and a bool mask [N] that is true for the first R entries.

    Cost: O(N log N + N * D), and one XLA compilation for each N, not for each R.
    """
    num_entries = tf.size(row_ids)
    order = tf.argsort(row_ids, stable=True)
    sorted_ids = tf.gather(row_ids, order)
    is_new = tf.not_equal(sorted_ids[1:], sorted_ids[:-1])
    # The first entry starts run 0; the slice keeps this right when there is no entry at all.
    starts = tf.concat([tf.zeros_like(sorted_ids[:1], tf.int32), tf.cast(is_new, tf.int32)], axis=0)
    run_ids = tf.cumsum(starts)
    position = tf.range(num_entries)
    is_distinct = position < tf.reduce_max(tf.concat([run_ids + 1, [0]], axis=0))
    summed = tf.math.unsorted_segment_sum(tf.gather(row_grads, order), run_ids, num_entries)
    first_ids = tf.math.unsorted_segment_max(sorted_ids, run_ids, num_entries)
    source = tf.where(is_distinct, position, tf.zeros_like(position))
    return RowGradient(tf.gather(first_ids, source), tf.gather(summed, source)), is_distinct


def check_row_ids(row_ids: tf.Tensor, num_rows: int | tf.Tensor, where: str) -> tf.Operation | None:
    """Raise tf.errors.InvalidArgumentError unless 0 <= row_ids < num_rows.

    Eagerly it raises at once. In a graph it returns the operation to depend on. XLA compiles
    assertions away: there the caller's ids are trusted.

    Args:
        row_ids: Integer tensor [R].
        num_rows: Rows of the table.
        where: What to name in the message, usually the variable's path.

    Cost: O(R).
    """
    # int64 also in the message: TensorFlow keeps int32 on the host, for the whole batch.
    row_ids, num_rows = tf.cast(row_ids, tf.int64), tf.cast(num_rows, tf.int64)
    in_range = tf.reduce_all(tf.logical_and(row_ids >= 0, row_ids < num_rows))
    message = (
        f"{where}: row ids must lie in [0, number of rows). Check the vocabulary size that the "
        "table was made for. Got, with the number of rows first:"
    )
    return tf.debugging.Assert(in_range, [message, num_rows, row_ids])


def gather_rows(variable: tf.Variable, row_ids: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the rows [R, ...] of a variable, cast to dtype, without reading the other rows."""
    # tf.gather on the variable itself is ResourceGather; on its value it would first be a read of
    # the whole table, which copies all of it once the variable has been scattered into.
    return tf.cast(tf.gather(variable, row_ids), dtype)


def scatter_rows(variable: tf.Variable, row_ids: tf.Tensor, rows: tf.Tensor) -> None:
    """Overwrite the rows of a variable in place; rows that are not named keep their bits."""
    # The return value of scatter_update is a read of the whole variable: it must not be used.
    variable.scatter_update(tf.IndexedSlices(tf.cast(rows, variable.dtype), row_ids))


def to_dense(gradient: RowGradient, shape: tf.TensorShape) -> tf.Tensor:
    """Return the gradient as a dense tensor of the table's shape, zero for absent rows."""
    return tf.math.unsorted_segment_sum(gradient.row_grads, gradient.row_ids, shape[0])
