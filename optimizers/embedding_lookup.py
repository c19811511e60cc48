"""Rows of a table by ids that are dense, ragged or sparse, and one row made of many.

Nothing here has a shape that depends on the values of the ids. XLA compiles such shapes, yet what
is computed from them afterwards may be wrong without an error, so padding is not cut out: it reads
a row that the batch reads anyway, and then counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = ["Ids", "check_spec", "check_weights", "flat", "gather_rows", "integer_ids"]
__all__ += ["num_examples", "pool", "with_rows"]

Ids: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor"

_EXACT_UP_TO = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}
"""How many ids a float dtype can tell apart."""


def check_spec(where: str, ids: Any, weights: Any, combiner: str | None, num_rows: int) -> None:
    """Check ids, and weights or None, by dtype, kind and shape; they may be symbolic.

    Raises:
        OptimizerArgumentError: they do not fit one another or the combiner.
    """
    _check_ids(where, ids, combiner, num_rows)
    if weights is None:
        return
    if combiner is None:
        raise OptimizerArgumentError(
            f"{where}: weights need a combiner. Got weights with combiner=None. Set combiner to "
            "sum, mean or sqrtn, or multiply the rows that come out."
        )
    dtype = keras.backend.standardize_dtype(weights.dtype)
    is_number = not dtype.startswith(("complex", "str"))
    fits = tf.TensorShape(ids.shape).is_compatible_with(tf.TensorShape(weights.shape))
    if not (is_number and fits and _kind(ids) == _kind(weights)):
        raise OptimizerArgumentError(
            f"{where}: weights must be numbers of the kind and shape of the ids. Got "
            f"{_kind(weights)} {tuple(weights.shape)} of {dtype} for {_kind(ids)} "
            f"{tuple(ids.shape)}. Give one weight for each id."
        )


def _check_ids(where: str, ids: Any, combiner: str | None, num_rows: int) -> None:
    dtype = keras.backend.standardize_dtype(ids.dtype)
    # Keras gives floats to models whose input has no dtype, a Sequential without Input for one.
    is_exact = keras.backend.is_int_dtype(dtype) or num_rows <= _EXACT_UP_TO.get(dtype, 0)
    if not is_exact:
        raise OptimizerArgumentError(
            f"{where}: ids must be integers, or floats that hold every id of the table exactly. "
            f"Got {dtype} for {num_rows} rows. int32 and int64 are allowed. "
            'Declare the input with dtype="int64".'
        )
    rank = tf.TensorShape(ids.shape).rank
    if _kind(ids) == "sparse" and (combiner is None or rank != 2):
        raise OptimizerArgumentError(
            f"{where}: sparse ids must have shape [B, n] and a combiner. Got shape {ids.shape} "
            f"with combiner={combiner!r}. Set a combiner, or give tf.RaggedTensor.from_sparse(ids)."
        )
    if combiner is not None and (rank is None or rank < 2):
        raise OptimizerArgumentError(
            f"{where}: ids must have shape [B, ..., n] with combiner={combiner!r}, n ids a bag. "
            f"Got shape {ids.shape}. Leave combiner out where an example has one id."
        )


def _kind(tensor: Any) -> str:
    if isinstance(tensor, tf.RaggedTensor) or getattr(tensor, "ragged", False):
        return "ragged"
    is_sparse = isinstance(tensor, tf.SparseTensor) or getattr(tensor, "sparse", False)
    return "sparse" if is_sparse else "dense"


def integer_ids(where: str, ids: Any, combiner: str | None, num_rows: int) -> Ids:
    """Return ids as int32 or int64, of a kind and a rank that the combiner can work with.

    Raises:
        OptimizerArgumentError: kind, dtype or rank do not fit.
        tf.errors.InvalidArgumentError: an id is a float with a fraction; XLA leaves that out.
    """
    ids = _tensor(ids)
    _check_ids(where, ids, combiner, num_rows)
    if not ids.dtype.is_floating:
        return ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int64)
    whole = tf.reduce_all(tf.equal(flat(ids), tf.floor(flat(ids))))
    check = tf.debugging.Assert(whole, [f"{where}: ids must be whole numbers. Got:", flat(ids)])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.cast(ids, tf.int64)


def _tensor(value: Any) -> Any:
    is_composite = isinstance(value, tf.RaggedTensor | tf.SparseTensor)
    return value if is_composite else tf.convert_to_tensor(value)


def check_weights(where: str, ids: Ids, weights: Any, combiner: str | None, num_rows: int) -> Any:
    """Return the weights of the ids as a dense tensor, one for each of `flat(ids)`.

    Raises:
        OptimizerArgumentError: there is no combiner, or kind, dtype or static shape do not fit.
        tf.errors.InvalidArgumentError: a shape that is known only at run time does not fit; XLA
            leaves that check out.
    """
    weights = _tensor(weights)
    check_spec(where, ids, weights, combiner, num_rows)
    message = f"{where}: weights must have the shape of the ids. Give one weight for each id."
    with tf.control_dependencies(_same_layout(ids, weights, message)):
        return tf.identity(flat(weights))


def _same_layout(ids: Ids, weights: Ids, message: str) -> list[Any]:
    if isinstance(ids, tf.RaggedTensor):
        if ids.ragged_rank != weights.ragged_rank:
            raise OptimizerArgumentError(
                f"{message[:-1]}. Got ragged ranks {ids.ragged_rank} of the ids and "
                f"{weights.ragged_rank} of the weights."
            )
        pairs = list(zip(ids.nested_row_splits, weights.nested_row_splits, strict=True))
        pairs = [(tf.cast(a, tf.int64), tf.cast(b, tf.int64)) for a, b in pairs]
        pairs.append((tf.shape(ids.flat_values), tf.shape(weights.flat_values)))
    elif isinstance(ids, tf.SparseTensor):
        pairs = [(ids.indices, weights.indices)]
    elif ids.shape.is_fully_defined() and weights.shape.is_fully_defined():
        return []
    else:
        pairs = [(tf.shape(ids), tf.shape(weights))]
    checks = [tf.debugging.assert_equal(a, b, message=message) for a, b in pairs]
    return [check for check in checks if check is not None]  # eagerly there is no operation


def flat(ids: Ids) -> tf.Tensor:
    """Return the dense tensor inside ids of any kind."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.flat_values
    return ids.values if isinstance(ids, tf.SparseTensor) else ids


def with_rows(ids: Ids, rows: tf.Tensor) -> Any:
    """Return the rows [..., D] of `flat(ids)` in the shape of the ids."""
    return ids.with_flat_values(rows) if isinstance(ids, tf.RaggedTensor) else rows


def num_examples(ids: Ids) -> tf.Tensor:
    """Return the size of the first axis; a scalar id is a batch of one."""
    if isinstance(ids, tf.RaggedTensor):
        return tf.cast(ids.nrows(), tf.int32)
    if isinstance(ids, tf.SparseTensor):
        return tf.cast(ids.dense_shape[0], tf.int32)
    return tf.shape(ids)[0] if ids.shape.rank != 0 else tf.constant(1)


def gather_rows(
    table: Any, ids: tf.Tensor, padding_id: int | None, num_rows: int
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Return the rows [..., D] of dense ids, zero for padding, and a mask [...] of what is not.

    A padded position reads the row of the largest real id of the batch, and its gradient is zero:
    so the gradient names real ids alone. In a batch that is all padding there is none; then it is
    the row of padding_id, which no real id reads, or row 0 where the table has no such row.

    Cost: O(number of ids * D), padding included.
    """
    if padding_id is None:
        # On a variable this is ResourceGather; on a tensor it would be a whole read first.
        return tf.gather(table, ids), None
    is_real = tf.not_equal(tf.cast(ids, tf.int64), tf.constant(padding_id, tf.int64))
    largest = tf.reduce_max(tf.where(is_real, ids, -tf.ones_like(ids)))
    spare = tf.constant(padding_id if 0 <= padding_id < num_rows else 0, ids.dtype)
    rows = tf.gather(table, tf.where(is_real, ids, tf.where(largest >= 0, largest, spare)))
    # A product with 0 would keep NaN and infinity.
    return tf.where(is_real[..., tf.newaxis], rows, tf.zeros_like(rows)), is_real


def pool(
    ids: Ids,
    rows: tf.Tensor,
    weights: tf.Tensor | None,
    is_real: tf.Tensor | None,
    combiner: str,
) -> Any:
    """Return one row for each bag of ids, a bag being what lies along the last axis of the ids.

        sum    sum_i w_i * row_i
        mean   sum_i w_i * row_i / sum_i w_i
        sqrtn  sum_i w_i * row_i / sqrt(sum_i w_i^2)

    The sum runs over the real ids of the bag; w_i = 1 where weights is None. An empty bag gives
    zeros, and so does a bag whose divisor is 0. Half precision is summed in float32.

    Args:
        ids: The ids, for the borders of the bags.
        rows: [..., D], one for each of `flat(ids)`.
        weights: [...], one for each of `flat(ids)`, or None.
        is_real: bool [...], False for padding, or None.
        combiner: "sum", "mean" or "sqrtn".

    Returns:
        Rows [..., D] in float32 or float64; ragged where axes before the last one are.
    """
    dtype = tf.float64 if rows.dtype == tf.float64 else tf.float32
    rows = tf.cast(rows, dtype)
    counted = tf.ones(tf.shape(flat(ids)), dtype) if weights is None else tf.cast(weights, dtype)
    if is_real is not None:
        counted = tf.where(is_real, counted, tf.zeros_like(counted))
    if weights is not None:
        rows *= counted[..., tf.newaxis]
    if isinstance(ids, tf.SparseTensor):
        return _pooled(rows, counted, combiner, _segments(ids.indices[:, 0], ids.dense_shape[0]))
    if not isinstance(ids, tf.RaggedTensor) or ids.flat_values.shape.rank > 1:
        axis = flat(ids).shape.rank - 1
        pooled = _pooled(rows, counted, combiner, lambda x: tf.reduce_sum(x, axis))
        return with_rows(ids, pooled)
    *outer, splits = ids.nested_row_splits
    # value_rowids repeats each bag by its length; a search has one entry an id by construction.
    positions = tf.range(tf.size(ids.flat_values, splits.dtype))
    bag_ids = tf.searchsorted(splits, positions, side="right") - 1
    pooled = _pooled(rows, counted, combiner, _segments(bag_ids, tf.size(splits) - 1))
    return tf.RaggedTensor.from_nested_row_splits(pooled, outer, validate=False)


def _segments(bag_ids: tf.Tensor, num_bags: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda x: tf.math.unsorted_segment_sum(x, bag_ids, num_bags)


def _pooled(
    rows: tf.Tensor,
    counted: tf.Tensor,
    combiner: str,
    add: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    summed = add(rows)
    if combiner == "sum":
        return summed
    total = add(counted if combiner == "mean" else tf.square(counted))
    has_total = tf.not_equal(total, 0)
    # Safe before the root and the division: a where after them would keep NaN in the gradient.
    safe = tf.where(has_total, total, tf.ones_like(total))
    divisor = (safe if combiner == "mean" else tf.sqrt(safe))[..., tf.newaxis]
    return tf.where(has_total[..., tf.newaxis], summed / divisor, tf.zeros_like(summed))
