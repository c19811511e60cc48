"""The way from one replica of a tf.distribute strategy to all of them, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from rowstep.optimizers.sparse_rows import RowGradient

__all__ = ["across_replicas", "of_this_replica"]


def across_replicas(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call function(strategy, *args) once for all replicas, from inside of one or from outside."""
    context = tf.distribute.get_replica_context()
    if context is not None and tf.distribute.has_strategy():
        return context.merge_call(function, args=args)
    return function(tf.distribute.get_strategy(), *args)


def of_this_replica(result: Any) -> Any:
    """Return a tensor or RowGradient out of a strategy's update: a tuple of local replicas'."""
    context = tf.distribute.get_replica_context()
    # A constant in a tensor, in a graph. All replicas' values are equal: 0 is right everywhere.
    replica = None if context is None else tf.get_static_value(context.replica_id_in_sync_group)

    def mine(values: tuple[tf.Tensor, ...]) -> tf.Tensor:
        return values[int(replica or 0) % len(values)]

    if isinstance(result, RowGradient):
        return RowGradient(mine(result.row_ids), mine(result.row_grads))
    return mine(result)
