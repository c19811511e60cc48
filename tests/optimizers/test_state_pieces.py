"""State that comes in pieces, as from a checkpoint, instead of as whole arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LazyAdam, StateMismatchError
from rowstep.optimizers.state import (
    assign_arrays,
    iter_named_variables,
    load_named_state,
    load_named_variables,
    named_state,
)
from rowstep.optimizers.variable_memory import fill_variable


class Pieces:
    """An array that is handed out a few rows at a time, out of one buffer that is used again."""

    def __init__(self, array: np.ndarray, rows: int = 3) -> None:
        self.array, self.rows, self.asked = array, rows, 0
        self.shape, self.dtype = array.shape, array.dtype

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        self.asked += 1
        whole = self.array.reshape(1) if not self.shape else self.array
        buffer = np.empty((self.rows, *whole.shape[1:]), whole.dtype)
        for first in range(0, len(whole), self.rows):
            rows = buffer[: len(whole[first : first + self.rows])]
            rows[...] = whole[first : first + self.rows]
            yield first, rows
            rows[...] = 0  # whoever kept a view instead of the numbers is found out

    def read_into(self, out: np.ndarray) -> None:
        assert (out.shape, out.dtype, out.flags.c_contiguous) == (self.shape, self.dtype, True)
        self.asked += 1
        out[...] = self.array


def trained(num_rows: int = 10) -> tuple[keras.Variable, LazyAdam]:
    table = keras.Variable(np.ones((num_rows, 2), "float32"), name="table")
    optimizer = LazyAdam(0.1)
    optimizer.build([table])
    gradient = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 9]), tf.constant([num_rows, 2]))
    optimizer.apply([gradient], [table])
    return table, optimizer


def new(num_rows: int = 10) -> LazyAdam:
    optimizer = LazyAdam(0.1)
    optimizer.build([keras.Variable(np.zeros((num_rows, 2), "float32"), name="table")])
    return optimizer


@pytest.mark.parametrize("rows", [1, 3, 10, 50])
def test_state_in_pieces_is_the_state_as_a_whole(rows: int) -> None:
    state = named_state(trained()[1])
    optimizer = new()
    load_named_state(optimizer, {key: Pieces(array, rows) for key, array in state.items()})
    for key, array in named_state(optimizer).items():
        assert array.tobytes() == state[key].tobytes(), key


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int64", "bool"])
def test_pieces_of_every_type_arrive(dtype: str) -> None:
    kind: Any = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    array = (np.arange(14).reshape(7, 2) % 3).astype(kind)
    holder = keras.Variable(np.zeros((7, 2)), dtype=dtype, name="x")
    load_named_variables([holder], {holder.path: Pieces(array)})
    assert np.asarray(holder.value).tobytes() == array.tobytes()


def test_values_that_were_read_before_stay_what_they_were() -> None:
    holder = keras.Variable(np.zeros((7, 2), "float32"), name="x")
    held = [holder.value.read_value(), holder.value.read_value_no_copy()]
    shown = dict(iter_named_variables([holder]))[holder.path]
    for number in (1.0, 2.0):
        load_named_variables([holder], {holder.path: Pieces(np.full((7, 2), number, "float32"))})
        np.testing.assert_array_equal(np.asarray(holder.value), number)
        held.append(holder.value.read_value())
    for tensor, number in zip(held, (0, 0, 1, 2), strict=True):
        np.testing.assert_array_equal(np.asarray(tensor), number)
    np.testing.assert_array_equal(shown, 0)


def test_variables_that_share_their_first_value_part_when_one_is_filled() -> None:
    first = tf.Variable(np.zeros((7, 2)))
    second = tf.Variable(np.ones((7, 2)))
    second.assign(first.read_value())  # TensorFlow lets both use the same memory now
    assign_arrays("test", {"x": second}, {"x": Pieces(np.full((7, 2), 3.0))})
    np.testing.assert_array_equal(first.numpy(), 0)
    np.testing.assert_array_equal(second.numpy(), 3)


def test_a_filled_variable_is_read_and_written_without_a_copy_of_it() -> None:
    variable = tf.Variable(np.zeros((7, 2)))
    variable.scatter_update(tf.IndexedSlices(tf.ones((1, 2), tf.float64), tf.constant([3])))
    fill_variable(variable, Pieces(np.arange(14.0).reshape(7, 2)))

    def address() -> int:
        return int(np.asarray(memoryview(variable.read_value())).ctypes.data)

    before = address()
    variable.scatter_update(tf.IndexedSlices(tf.ones((1, 2), tf.float64), tf.constant([2])))
    after = int(np.asarray(memoryview(variable.read_value_no_copy())).ctypes.data)
    assert after == before
    np.testing.assert_array_equal(variable.numpy()[1:4], [[2, 3], [1, 1], [6, 7]])


def test_pieces_that_do_not_fit_are_refused_before_any_is_asked_for() -> None:
    state = named_state(trained()[1])
    optimizer = new(num_rows=11)
    before = named_state(optimizer)
    pieces = {key: Pieces(array) for key, array in state.items()}
    with pytest.raises(StateMismatchError, match=r"momentum of shape \(10, 2\)"):
        load_named_state(optimizer, pieces)
    assert all(piece.asked == 0 for piece in pieces.values())
    for key, array in named_state(optimizer).items():
        assert array.tobytes() == before[key].tobytes()


def test_an_array_without_rows_arrives() -> None:
    holder = keras.Variable(np.zeros((0, 2), "float32"), name="x")
    load_named_variables([holder], {holder.path: Pieces(np.zeros((0, 2), "float32"))})
    assert holder.shape == (0, 2)


def test_under_a_strategy_the_whole_array_is_assigned_to_every_copy() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable = tf.Variable(np.zeros((7, 2)), name="x")
    array = np.arange(14.0).reshape(7, 2)
    assign_arrays("test", {"x": variable}, {"x": Pieces(array)})
    np.testing.assert_array_equal(variable.numpy(), array)
