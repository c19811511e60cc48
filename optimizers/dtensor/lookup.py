"""Looking rows up in a table on a DTensor mesh, in the ways that TensorFlow can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from rowstep.optimizers.dtensor.layout import is_on_mesh
from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = ["lookup"]


def lookup(table: Any, ids: tf.Tensor, small_table: bool = False) -> tf.Tensor:
    """Return the rows of a table for integer ids, by what its layout allows.

        output[..., :] = table[ids[...], :]

    A table that is replicated or sharded by columns is gathered from. TensorFlow cannot gather
    from a table that is sharded by rows: with small_table its shards are multiplied by one-hot
    ids instead. The gradient is tf.IndexedSlices either way, so `Adam(lazy=True)` knows which rows
    the batch named. Ids outside [0, V) give zeros in the product, and raise in a gather on a CPU;
    the optimizer refuses them in both.

    Args:
        table: tf.Variable or DVariable [V, D].
        ids: Integer tensor [...], on the table's mesh.
        small_table: Allow the product with one-hot ids for a table sharded by rows.

    Returns:
        A tensor [..., D] of the table's dtype.

    Raises:
        OptimizerArgumentError: the ids are not integers, the table has not two dimensions, or its
            rows are sharded and small_table was not given.

    Cost: O(N * D) for N ids; with one-hot ids O(N * V * D) divided by the shards, and a tensor
    [N, V] on every device.
    """
    if not ids.dtype.is_integer:
        raise OptimizerArgumentError(
            f"lookup: ids must be integers. Got {ids.dtype.name}. int32 and int64 are allowed. "
            "Cast the ids."
        )
    if table.shape.rank != 2:
        raise OptimizerArgumentError(
            f"lookup: a table must have the shape [rows, width]. Got {table.shape}. "
            "Reshape it where it is made."
        )
    if not is_on_mesh(table) or table.layout.sharding_specs[0] == dtensor.UNSHARDED:
        return tf.gather(table, ids)
    row_spec, column_spec = table.layout.sharding_specs
    if not small_table:
        raise OptimizerArgumentError(
            f"lookup: TensorFlow cannot gather from a table that is sharded by rows. "
            f"Got {table.name} with layout [{row_spec}, {column_spec}]. Shard it by columns, "
            f"[{dtensor.UNSHARDED}, {row_spec}], which holds as little on each device; or pass "
            "small_table=True to multiply by one-hot ids, for a table of a few thousand rows."
        )
    return _one_hot_product(table.read_value(), ids, table.layout)


def _one_hot_product(table: tf.Tensor, ids: tf.Tensor, layout: dtensor.Layout) -> tf.Tensor:
    row_spec, _ = layout.sharding_specs

    @tf.custom_gradient
    def product(table: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.IndexedSlices]]:
        flat_ids = tf.reshape(ids, [-1])
        one_hot = tf.one_hot(flat_ids, table.shape[0], dtype=table.dtype)
        # Whole first: inside a tf.function TensorFlow 2.16 makes one-hot ids twice too wide where
        # they are to be sharded. Then sharded along the rows that the product sums over.
        one_hot = dtensor.relayout(one_hot, dtensor.Layout.replicated(layout.mesh, rank=2))
        one_hot = dtensor.relayout(
            one_hot, dtensor.Layout([dtensor.UNSHARDED, row_spec], layout.mesh)
        )
        rows = tf.reshape(tf.matmul(one_hot, table), [*ids.shape, table.shape[1]])

        def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
            # That of the product would be dense, and whole on every device.
            row_grads = tf.reshape(upstream, [-1, table.shape[1]])
            return tf.IndexedSlices(row_grads, flat_ids, tf.constant(table.shape.as_list()))

        return rows, gradient

    return product(table)
