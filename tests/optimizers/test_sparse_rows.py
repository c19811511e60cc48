"""Summing repeated rows: properties over any ids, against numpy.add.at."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstep.optimizers import sparse_rows

NUM_ROWS = 6
BATCHES = st.lists(
    st.tuples(st.integers(0, NUM_ROWS - 1), st.integers(-8, 8), st.integers(-8, 8)), max_size=12
)
SETTINGS = settings(max_examples=60, deadline=None)


def batch(entries: list[tuple[int, int, int]]) -> tuple[tf.Tensor, tf.Tensor, np.ndarray]:
    """Return ids, gradients and their dense sum; small integers, so that sums are exact."""
    row_ids = np.array([e[0] for e in entries], np.int64)
    row_grads = np.array([e[1:] for e in entries], np.float32).reshape(-1, 2)
    dense = np.zeros((NUM_ROWS, 2), np.float32)
    np.add.at(dense, row_ids, row_grads)
    return tf.constant(row_ids), tf.constant(row_grads), dense


static_compiled = tf.function(
    sparse_rows.sum_duplicate_rows_static,
    jit_compile=True,
    reduce_retracing=True,
)


@SETTINGS
@given(BATCHES)
def test_rows_come_out_distinct_and_summed(entries: list[tuple[int, int, int]]) -> None:
    row_ids, row_grads, dense = batch(entries)
    distinct, summed = sparse_rows.sum_duplicate_rows(row_ids, row_grads)
    assert sorted(distinct.numpy()) == sorted(set(row_ids.numpy()))
    np.testing.assert_array_equal(summed, dense[distinct.numpy()])


@SETTINGS
@given(BATCHES)
def test_the_static_form_holds_the_same_rows_and_repeats_one(
    entries: list[tuple[int, int, int]],
) -> None:
    row_ids, row_grads, dense = batch(entries)
    (ids, summed), is_distinct = sparse_rows.sum_duplicate_rows_static(row_ids, row_grads)
    assert ids.shape == row_ids.shape
    real = is_distinct.numpy()
    assert sorted(ids.numpy()[real]) == sorted(set(row_ids.numpy()))
    np.testing.assert_array_equal(summed, dense[ids.numpy()])


@SETTINGS
@given(BATCHES.filter(lambda entries: len(entries) == 5))
def test_the_static_form_compiled_equals_the_eager_one(
    entries: list[tuple[int, int, int]],
) -> None:
    row_ids, row_grads, _ = batch(entries)
    eager = sparse_rows.sum_duplicate_rows_static(row_ids, row_grads)
    compiled = static_compiled(row_ids, row_grads)
    for one, other in zip(tf.nest.flatten(eager), tf.nest.flatten(compiled), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_static_form_is_traced_once_whatever_the_number_of_distinct_rows() -> None:
    num_traces = 0

    @tf.function(jit_compile=True)
    def traced(row_ids: tf.Tensor, row_grads: tf.Tensor) -> tf.Tensor:
        nonlocal num_traces
        num_traces += 1
        (ids, summed), _ = sparse_rows.sum_duplicate_rows_static(row_ids, row_grads)
        return tf.reduce_sum(summed) + tf.cast(ids[0], tf.float32)

    for row_ids in ([0, 0, 0, 0], [0, 1, 2, 3], [5, 5, 1, 1]):
        traced(tf.constant(row_ids), tf.ones((4, 2)))
    assert num_traces == 1


@SETTINGS
@given(BATCHES)
def test_writing_the_static_form_twice_writes_the_same(entries: list[tuple[int, int, int]]) -> None:
    row_ids, row_grads, dense = batch(entries)
    (ids, summed), _ = sparse_rows.sum_duplicate_rows_static(row_ids, row_grads)
    variable = tf.Variable(np.full((NUM_ROWS, 2), 100, np.float32))
    sparse_rows.scatter_rows(variable, ids, summed)
    present = np.isin(np.arange(NUM_ROWS), row_ids.numpy())
    np.testing.assert_array_equal(variable.numpy()[present], dense[present])
    np.testing.assert_array_equal(variable.numpy()[~present], 100)


@SETTINGS
@given(BATCHES)
def test_the_dense_form_is_zero_where_rows_are_absent(entries: list[tuple[int, int, int]]) -> None:
    row_ids, row_grads, dense = batch(entries)
    rows = sparse_rows.sum_duplicate_rows(row_ids, row_grads)
    np.testing.assert_array_equal(sparse_rows.to_dense(rows, tf.TensorShape([NUM_ROWS, 2])), dense)


def test_rows_may_have_any_rank() -> None:
    row_grads = tf.reshape(tf.range(12.0), (3, 2, 2))
    ids, summed = sparse_rows.sum_duplicate_rows(tf.constant([4, 1, 4]), row_grads)
    np.testing.assert_array_equal(ids, [4, 1])
    np.testing.assert_array_equal(summed[0], row_grads[0] + row_grads[2])
    ids, summed = sparse_rows.sum_duplicate_rows(tf.constant([2, 2]), tf.constant([1.0, 2.0]))
    np.testing.assert_array_equal(summed, [3.0])


@pytest.mark.parametrize("row_id", [-1, 6])
def test_ids_out_of_range_are_named(row_id: int) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="table: row ids must lie in"):
        sparse_rows.check_row_ids(tf.constant([0, row_id]), NUM_ROWS, "table")
    sparse_rows.check_row_ids(tf.constant([0, 5]), NUM_ROWS, "table")
    sparse_rows.check_row_ids(tf.constant([], tf.int64), NUM_ROWS, "table")
