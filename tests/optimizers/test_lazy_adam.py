"""What LazyAdam promises: only the rows of the batch move, and repeated rows count once, summed."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LazyAdam, reference

ONES = np.ones((4, 2), np.float32)


def slices(row_ids: list[int], row_grads: list[float], num_rows: int = 4) -> tf.IndexedSlices:
    """Return a sparse gradient whose rows are filled with one number each."""
    values = np.repeat(np.array(row_grads, np.float32)[:, None], 2, axis=1)
    return tf.IndexedSlices(tf.constant(values), tf.constant(row_ids, tf.int64), (num_rows, 2))


def column(variable: keras.Variable) -> np.ndarray:
    return np.array(variable)[:, 0]


def train(optimizer: keras.optimizers.Optimizer, steps: list[tf.IndexedSlices]) -> keras.Variable:
    table = keras.Variable(ONES, name="table")
    for gradient in steps:
        optimizer.apply([gradient], [table])
    return table


TOUCH_THEN_SKIP = [slices([1, 3], [1, 1]), slices([0], [1]), slices([1], [1])]


def test_rows_that_were_touched_before_do_not_drift_when_skipped() -> None:
    optimizer = LazyAdam(learning_rate=0.1)
    table = train(optimizer, TOUCH_THEN_SKIP)
    # By hand in float64; Adam, which lets skipped rows drift, ends at .8681, .7512, 1, .7812.
    np.testing.assert_allclose(column(table), [0.9255866, 0.8141543, 1, 0.9000003], rtol=1e-6)
    np.testing.assert_allclose(column(optimizer.get_slot(table, "m")), [0.1, 0.19, 0, 0.1])
    np.testing.assert_allclose(
        column(optimizer.get_slot(table, "v")), [0.001, 0.001999, 0, 0.001], rtol=1e-6
    )


def test_plain_keras_adam_fails_the_skip_case() -> None:
    table = train(keras.optimizers.Adam(0.1), TOUCH_THEN_SKIP)
    np.testing.assert_allclose(column(table), [0.8680647, 0.7511946, 1, 0.7811992], rtol=1e-4)


def test_skipped_rows_and_their_state_keep_every_bit() -> None:
    rng = np.random.default_rng(0)
    table = keras.Variable(rng.normal(size=(6, 3)).astype(np.float32), name="table")
    optimizer = LazyAdam(0.1)
    for row_ids in ([0, 1, 2, 3, 4, 5], [1, 4, 4]):
        before = [np.array(v) for v in [table, *optimizer.variables[2:]]]
        grads = rng.normal(size=(len(row_ids), 3)).astype(np.float32)
        gradient = tf.IndexedSlices(tf.constant(grads), tf.constant(row_ids), (6, 3))
        optimizer.apply([gradient], [table])
    after = [np.array(v) for v in [table, *optimizer.variables[2:]]]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[[0, 2, 3, 5]], new[[0, 2, 3, 5]])
        assert np.all(old[[1, 4]] != new[[1, 4]])


def test_gradients_of_a_repeated_row_are_summed_before_they_are_squared() -> None:
    optimizer = LazyAdam(0.1)
    table = train(optimizer, [slices([1, 1, 3], [1, 3, 0.5])])
    np.testing.assert_allclose(column(optimizer.get_slot(table, "m")), [0, 0.4, 0, 0.05], rtol=1e-6)
    velocity = column(optimizer.get_slot(table, "v"))
    # (1 + 3)^2, where 1^2 + 3^2 would give 0.010.
    np.testing.assert_allclose(velocity, [0, 0.016, 0, 0.00025], rtol=1e-6)


def test_plain_keras_adam_squares_repeated_rows_before_it_sums_them() -> None:
    optimizer = keras.optimizers.Adam(0.1)
    train(optimizer, [slices([1, 1, 3], [1, 3, 0.5])])
    velocity = next(v for v in optimizer.variables if v.path.endswith("velocity"))
    assert column(velocity)[1] == pytest.approx(0.010), "Keras sums duplicates now: say so in docs"


def test_splitting_a_gradient_over_repetitions_changes_nothing() -> None:
    split = train(LazyAdam(), [slices([1, 1], [0.1, 0.1])] * 3)
    whole = train(LazyAdam(), [slices([1], [0.2])] * 3)
    np.testing.assert_allclose(column(split), column(whole), rtol=1e-7)
    assert column(whole)[1] == pytest.approx(0.997, abs=1e-6)


def test_a_row_present_with_a_zero_gradient_moves_by_its_momentum() -> None:
    table = train(LazyAdam(0.1), [slices([1], [1]), slices([1, 2], [0, 0])])
    state = reference.new_state(ONES)
    state = reference.lazy_adam(state, [1], np.ones((1, 2)), 1, learning_rate=0.1)
    still = state[0][1, 0]
    state = reference.lazy_adam(state, [1, 2], np.zeros((2, 2)), 2, learning_rate=0.1)
    np.testing.assert_allclose(np.array(table), state[0], rtol=1e-6)
    assert column(table)[1] < still - 0.01
    assert column(table)[2] == 1.0


def test_an_empty_batch_counts_a_step_and_moves_nothing() -> None:
    optimizer = LazyAdam(0.1)
    empty = tf.IndexedSlices(tf.zeros((0, 2)), tf.zeros((0,), tf.int64), (4, 2))
    table = train(optimizer, [slices([1], [1]), empty])
    np.testing.assert_allclose(column(table), [1, 0.9, 1, 1], rtol=1e-6)
    assert int(optimizer.iterations) == 2


def test_a_dense_gradient_makes_it_adam() -> None:
    rng = np.random.default_rng(1)
    grads = rng.normal(size=(3, 4, 2))
    optimizer, table = LazyAdam(0.1), keras.Variable(ONES, name="table")
    state = reference.new_state(ONES)
    for t, g in enumerate(grads, start=1):
        optimizer.apply([tf.constant(g, tf.float32)], [table])
        state = reference.adam(state, g, t, learning_rate=0.1)
    np.testing.assert_allclose(np.array(table), state[0], rtol=1e-5)


def test_the_bias_correction_follows_the_optimizer_and_not_the_row() -> None:
    # Row 2 is first seen in step 3: with a counter of its own it would move by exactly 0.1.
    table = train(LazyAdam(0.1), [slices([0, 1], [1, 1]), slices([0], [1]), slices([2], [1])])
    assert column(table)[2] == pytest.approx(0.9361, abs=1e-4)


@pytest.mark.parametrize("row_id", [-1, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_row_id_out_of_range_stops_the_step_before_anything_moves(
    row_id: int, compiled: bool
) -> None:
    first = keras.Variable(ONES, name="first")
    second = keras.Variable(ONES, name="second")
    optimizer = LazyAdam(0.1)
    optimizer.build([first, second])

    def step() -> None:
        optimizer.apply([slices([0], [1]), slices([1, row_id], [1, 1])], [first, second])

    with pytest.raises(tf.errors.InvalidArgumentError, match="second: row ids must lie in"):
        (tf.function(step) if compiled else step)()
    for variable in (first, second):
        np.testing.assert_array_equal(np.array(variable), ONES)
    for array in optimizer.get_weights():
        assert not np.any(array)


def test_weights_in_bfloat16_move() -> None:
    # In bfloat16 arithmetic beta_2 = 0.999 is 1, so that the second moment never fills.
    table = keras.Variable(ONES, dtype="bfloat16", name="table")
    optimizer = LazyAdam(0.1)
    for _ in range(3):
        optimizer.apply([slices([1], [1])], [table])
    np.testing.assert_allclose(np.array(table).astype(np.float32)[1], 0.7, atol=0.01)
    assert optimizer.get_slot(table, "velocity").dtype == "float32"


def test_small_gradients_do_not_vanish_in_float16() -> None:
    # 1e-4 squared is zero in float16, and a zero second moment makes the step explode.
    table = keras.Variable(ONES, dtype="float16", name="table")
    optimizer = LazyAdam(0.1)
    for _ in range(2):
        optimizer.apply([tf.cast(slices([1], [1e-4]), tf.float16)], [table])
    np.testing.assert_allclose(np.array(table).astype(np.float32)[1], 0.8, atol=0.01)


def test_int32_and_int64_ids_are_the_same_rows() -> None:
    tables = []
    for dtype in (tf.int32, tf.int64):
        gradient = slices([2, 0], [1, 2])
        gradient = tf.IndexedSlices(gradient.values, tf.cast(gradient.indices, dtype), (4, 2))
        tables.append(column(train(LazyAdam(0.1), [gradient])))
    np.testing.assert_array_equal(*tables)
