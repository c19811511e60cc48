"""The sums that statistics of a whole variable are made of, taken block by block.

A block is some rows of a variable, read where they lie: a table of any size costs the memory of a
few blocks and no copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from rowstep.optimizers.gradients import compute_dtype
from rowstep.optimizers.statistics.bins import LOWEST_DECADE, NUM_FINE_BINS, PER_DECADE

__all__ = ["Summary", "joined", "summarize"]

# Small enough to stay in a processor's cache between the sums, large enough to be worth a call.
_BLOCK_ELEMENTS = 1 << 18
_SMALL_ELEMENTS = 1 << 14


class Summary(NamedTuple):
    """Hold sums over the elements of a variable, float64 scalars, or vectors [n] of n of them."""

    size: tf.Tensor
    largest: tf.Tensor
    """Largest absolute value."""
    total: tf.Tensor
    """Sum of the elements."""
    squares: tf.Tensor
    """Sum of their squares."""
    num_zero: tf.Tensor
    num_nonfinite: tf.Tensor
    num_live_rows: tf.Tensor
    """Rows with an element that is not 0; of tables only."""

    def mean(self) -> tf.Tensor:
        """Return sum(x) / n."""
        return tf.math.divide_no_nan(self.total, self.size)

    def rms(self) -> tf.Tensor:
        """Return sqrt(sum(x^2) / n)."""
        return tf.sqrt(tf.math.divide_no_nan(self.squares, self.size))

    def absmax(self) -> tf.Tensor:
        """Return max(|x|); NaN where an element is not finite, as mean and rms may be."""
        nan = tf.constant(math.nan, tf.float64)
        return tf.where(self.num_nonfinite > 0, nan, self.largest)

    def zero_frac(self) -> tf.Tensor:
        """Return the share of elements that are exactly 0."""
        return tf.math.divide_no_nan(self.num_zero, self.size)


def joined(summary: Summary) -> Summary:
    """Return the summary of all variables' elements together, of one for each variable."""
    sums = Summary(*(tf.reduce_sum(column) for column in summary))
    return sums._replace(largest=tf.reduce_max(summary.largest))


def summarize(
    variables: Sequence[tf.Variable], *, tables: Collection[int] = (), counts: bool = False
) -> tuple[Summary, tf.Tensor | None]:
    """Sum up each of some variables.

    Args:
        variables: Of any floating dtypes and shapes, one or more.
        tables: Indexes of those whose live rows are counted.
        counts: Whether to count the elements of each fine bin too. Zeros and what is not finite
            are in none.

    Returns:
        The summary in vectors [n], one number a variable, and the counts [n, NUM_FINE_BINS] as
        int64, or None.

    Cost: one pass, and the memory of a few blocks. Small variables are taken together, so that the
    graph of thousands of them stays small.
    """
    groups = _groups(variables, tables)
    results = []
    for group in groups:
        members = [variables[index] for index in group]
        is_alone = len(members) == 1
        results.append(_in_blocks(members[0], counts) if is_alone else _together(members, counts))
    sums, largest, *fine = (tf.concat(column, axis=0) for column in zip(*results, strict=True))
    order = np.argsort([index for group in groups for index in group])
    sums, largest = tf.gather(sums, order), tf.gather(largest, order)
    sizes = tf.constant([v.shape.num_elements() for v in variables], tf.float64)
    summary = Summary(sizes, largest, *tf.unstack(sums, axis=1))
    return summary, tf.gather(fine[0], order) if counts else None


def _groups(variables: Sequence[tf.Variable], tables: Collection[int]) -> list[list[int]]:
    """Return the indexes of all variables, small ones of the same dtype together."""
    groups: list[list[int]] = []
    filling: dict[tf.DType, tuple[list[int], int]] = {}
    for index, variable in enumerate(variables):
        size = int(variable.shape.num_elements())
        if index in tables or size > _SMALL_ELEMENTS:
            groups.append([index])
            continue
        group, num_elements = filling.get(variable.dtype, ([], 0))
        if not group or num_elements + size > _BLOCK_ELEMENTS:
            group, num_elements = [], 0
            groups.append(group)
        group.append(index)
        filling[variable.dtype] = group, num_elements + size
    return groups


def _in_blocks(variable: tf.Variable, counts: bool) -> tuple[tf.Tensor, ...]:
    """Return sums [1, 5], largest [1] and, if asked for, counts [1, NUM_FINE_BINS]."""
    values = _read(variable)
    num_rows = int(variable.shape[0]) if variable.shape.rank else 1
    size = int(variable.shape.num_elements())
    rows = tf.reshape(values, [num_rows, -1 if size else 0])
    rows_a_block = max(1, _BLOCK_ELEMENTS // max(1, size // max(1, num_rows)))

    def add(first: tf.Tensor, *so_far: tf.Tensor) -> tuple[tf.Tensor, ...]:
        block = rows[first : first + rows_a_block]
        sums, largest = _block_sums(block)
        added = [so_far[0] + sums, tf.maximum(so_far[1], largest)]
        if counts:
            added.append(so_far[2] + _counts(_fine_bins(block), 1)[0])
        return first + rows_a_block, *added

    start = [tf.constant(0), tf.zeros([5], tf.float64), tf.zeros([], tf.float64)]
    if counts:
        start.append(tf.zeros([NUM_FINE_BINS], tf.int64))
    if num_rows <= rows_a_block:
        _, *results = add(*start)
    else:
        _, *results = tf.while_loop(
            lambda first, *_: first < num_rows, add, start, parallel_iterations=1
        )
    return tuple(tf.expand_dims(result, 0) for result in results)


def _together(variables: Sequence[tf.Variable], counts: bool) -> tuple[tf.Tensor, ...]:
    """Return sums [n, 5], largest [n] and, if asked for, counts [n, NUM_FINE_BINS]."""
    num = len(variables)
    values = tf.concat([tf.reshape(_read(variable), [-1]) for variable in variables], axis=0)
    owners = np.repeat(np.arange(num), [variable.shape.num_elements() for variable in variables])
    wide = tf.cast(values, tf.float64)
    is_zero, is_finite = tf.equal(values, 0), tf.math.is_finite(values)
    columns = [wide, tf.square(wide)]
    columns += [tf.cast(c, tf.float64) for c in (is_zero, tf.logical_not(is_finite))]
    sums = tf.math.unsorted_segment_sum(tf.stack(columns, axis=1), owners, num)
    no_rows = tf.zeros([num, 1], tf.float64)  # rows are counted of tables only
    largest = tf.math.unsorted_segment_max(tf.abs(wide), owners, num)
    results = [tf.concat([sums, no_rows], axis=1), tf.maximum(largest, 0.0)]
    if counts:
        bins = _fine_bins(values) + (NUM_FINE_BINS + 1) * tf.constant(owners, tf.int32)
        results.append(_counts(bins, num))
    return tuple(results)


def _block_sums(block: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    # float64: the square of a second moment of 1e-30 is 0 in float32, and so are sums of millions.
    wide = tf.cast(block, tf.float64)
    alive = tf.not_equal(block, 0)
    num_zero = tf.size(block, out_type=tf.int64) - tf.math.count_nonzero(alive)
    counted = [
        num_zero,
        tf.math.count_nonzero(tf.logical_not(tf.math.is_finite(block))),
        tf.math.count_nonzero(tf.reduce_any(alive, axis=1)),
    ]
    sums = [tf.reduce_sum(wide), tf.reduce_sum(tf.square(wide))]
    sums += [tf.cast(number, tf.float64) for number in counted]
    # reduce_max of no elements is -inf.
    largest = tf.maximum(tf.cast(tf.reduce_max(tf.abs(block)), tf.float64), 0.0)
    return tf.stack(sums), largest


def _fine_bins(values: tf.Tensor) -> tf.Tensor:
    """Return the bin of each value as int32; NUM_FINE_BINS for what is in none."""
    sizes = tf.abs(tf.cast(values, compute_dtype(values.dtype)))
    tenfold = tf.math.log(sizes) * (PER_DECADE / math.log(10.0))
    bins = tf.floor(tenfold) - PER_DECADE * LOWEST_DECADE
    bins = tf.cast(tf.clip_by_value(bins, 0, NUM_FINE_BINS - 1), tf.int32)
    # A bin of its own for the others: choosing elements first would cost another pass.
    is_countable = tf.logical_and(sizes > 0, tf.math.is_finite(sizes))
    return tf.where(is_countable, bins, NUM_FINE_BINS)


def _counts(bins: tf.Tensor, num: int) -> tf.Tensor:
    """Return how often each bin is there, int64 [num, NUM_FINE_BINS]."""
    counts = tf.raw_ops.DenseBincount(
        input=tf.reshape(bins, [-1]),
        size=num * (NUM_FINE_BINS + 1),
        weights=tf.zeros([0], tf.int64),
        binary_output=False,
    )
    return tf.reshape(counts, [num, NUM_FINE_BINS + 1])[:, :NUM_FINE_BINS]


def _read(variable: tf.Variable) -> tf.Tensor:
    # An ordinary read copies a variable that rows have been scattered into.
    if hasattr(variable, "read_value_no_copy"):
        return variable.read_value_no_copy()
    return tf.convert_to_tensor(variable)
