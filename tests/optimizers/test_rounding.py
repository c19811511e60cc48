"""Random rounding: right in the mean, the same everywhere, and never the same noise twice."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LazyAdam
from rowstep.optimizers.rounding import noise, stochastic_round

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("option_cases")
sys.path.pop(0)

HALF = [tf.bfloat16, tf.float16]
NUM_EVEN = 2**12
EVEN = ((np.arange(NUM_EVEN) + 0.5) / NUM_EVEN).astype(np.float32)
"""As uniform as numbers can be."""
WIDE = 512
"""Elements of a variable: the mean of as many is sharper by a factor of 22."""


def rounded(x: float, dtype: tf.DType, uniform: np.ndarray = EVEN) -> np.ndarray:
    full = tf.fill(uniform.shape, tf.constant(x, tf.float32))
    result = stochastic_round(full, tf.constant(uniform), dtype)
    assert result.dtype == dtype
    return np.array(tf.cast(result, tf.float64))


@pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("x", [1.0001, -1.0001, 1.001, 2.003, 3.3, -0.7, 1e-3, -1e-6, 40_000.3])
def test_the_mean_is_the_number_and_both_neighbours_occur(x: float, dtype: tf.DType) -> None:
    results = rounded(x, dtype)
    low, high = np.unique(results)
    assert low < np.float32(x) < high
    # The weights of the two are right to one in 4096.
    assert abs(results.mean() - np.float32(x)) <= (high - low) / NUM_EVEN
    nearest = float(tf.cast(tf.cast(tf.constant(x, tf.float32), dtype), tf.float32))
    assert nearest in (low, high)


@pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: dtype.name)
def test_numbers_that_the_dtype_has_stay(dtype: tf.DType) -> None:
    # Powers of two most of all: below them the numbers lie twice as close as above.
    extremes = np.array([0.0, 0.5, 1.0 - 2.0**-24], np.float32)
    for x in (0.0, 1.0, -1.0, 2.0**-14, -(2.0**10), 1.5, -0.75, 0.25 + 2.0**-9, np.inf, -np.inf):
        np.testing.assert_array_equal(rounded(x, dtype, extremes), x, err_msg=str(x))
    assert np.all(np.isnan(rounded(np.nan, dtype, extremes)))


def test_the_noise_is_uniform_and_uncorrelated() -> None:
    numbers = np.array(noise(tf.range(400, dtype=tf.int64), tf.TensorShape([250]), 3, step(1)))
    assert numbers.shape == (400, 250) and numbers.dtype == np.float32
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    # Chi-squared of 99 degrees of freedom: 99 +- 14, so this is five standard deviations.
    assert np.sum((counts - 1000) ** 2 / 1000) < 170
    for shift in ((0, 1), (1, 0), (1, -1), (0, 2)):
        assert abs(correlation(numbers, np.roll(numbers, shift, (0, 1)))) < 5 / np.sqrt(100_000)


def step(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


def test_the_noise_differs_by_step_by_seed_and_by_row() -> None:
    rows, shape = tf.range(100, dtype=tf.int64), tf.TensorShape([100])
    base = np.array(noise(rows, shape, 3, step(1)))
    others = [
        noise(rows, shape, 3, step(2)),
        noise(rows, shape, 4, step(1)),
        noise(rows, shape, 3 + 8, step(1)),
        noise(rows + 100, shape, 3, step(1)),
        noise(rows + 1, shape, 3, step(1)),
    ]
    for other in others:
        assert abs(correlation(base, np.array(other))) < 5 / np.sqrt(10_000)


def test_the_noise_of_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    shape = tf.TensorShape([2, 3])
    rows = tf.constant([5, 0, 9], tf.int64)
    together = np.array(noise(rows, shape, 7, step(3)))
    assert together.shape == (3, 2, 3)
    alone = np.array(noise(rows[2:], shape, 7, step(3)))
    np.testing.assert_array_equal(together[2], alone[0])
    compiled = tf.function(noise, jit_compile=True)(rows, shape, 7, step(3))
    np.testing.assert_array_equal(np.array(compiled), together)


def wide_gradients(num_steps: int = 40) -> list[tf.IndexedSlices]:
    rng = np.random.default_rng(5)
    row_ids = [[0, 1, 1, 2], [2, 1, 0, 2], [1, 3, 1, 2]]
    result = []
    for i in range(num_steps):
        grads = np.repeat(rng.normal(size=(4, 1)) + 1.0, WIDE, axis=1).astype(np.float32)
        ids = tf.constant(row_ids[i % 3], tf.int64)
        result.append(tf.IndexedSlices(tf.constant(grads), ids, (5, WIDE)))
    return result


def wide_table(dtype: str, gradients: list[Any], **options: Any) -> tuple[np.ndarray, LazyAdam]:
    table = keras.Variable(np.ones((5, WIDE)), dtype=dtype, name="embeddings")
    optimizer = LazyAdam(1e-4, **options)
    for g in gradients:
        optimizer.apply([g], [table])
    return np.array(table).astype(np.float64), optimizer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_steps_add_up_to_those_of_float32(dtype: str) -> None:
    gradients = wide_gradients()
    exact, _ = wide_table("float32", gradients)
    mean = wide_table(dtype, gradients)[0].mean(axis=1)
    frozen, _ = wide_table(dtype, gradients, stochastic_rounding=False)
    moved = 1.0 - exact[:4, 0]
    assert np.all(moved[[0, 1, 2]] > 1e-3)
    # A step rounds by at most a spacing, of variance spacing^2 / 4 at most: five deviations.
    spacing = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    bound = 5 * np.sqrt(len(gradients) / 4) * spacing / np.sqrt(WIDE)
    np.testing.assert_allclose(mean, exact[:, 0], rtol=0, atol=bound)
    assert bound < moved[1] / 2 or dtype == "bfloat16"
    np.testing.assert_array_equal(frozen, 1.0)  # each of the steps is lost to the nearest


def test_many_small_steps_move_bfloat16_by_what_they_are_worth() -> None:
    table = keras.Variable(np.ones((4, 4096)), dtype="bfloat16", name="embeddings")
    optimizer = LazyAdam(1e-4)
    gradient = tf.IndexedSlices(tf.ones((4, 4096)), tf.range(4), (4, 4096))
    train = tf.function(lambda: optimizer.apply([gradient], [table]))
    optimizer.build([table])
    for _ in range(200):
        train()
    values = np.array(table).astype(np.float64)
    # 0.02, where rounding to nearest stays at 1 and rounding with a bias ends elsewhere.
    bound = 5 * np.sqrt(200 / 4) * 2.0**-8 / np.sqrt(values.size)
    assert abs((1.0 - values.mean()) - 200 * 1e-4) < bound < 0.002


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_that_does_not_move_keeps_its_bits(dtype: str) -> None:
    table = keras.Variable(np.ones((3, 64)), dtype=dtype, name="embeddings")
    optimizer = LazyAdam(0.1)
    gradient = tf.IndexedSlices(tf.zeros((2, 64)), tf.constant([0, 1]), (3, 64))
    for _ in range(20):
        optimizer.apply([gradient], [table])
    np.testing.assert_array_equal(np.array(table).astype(np.float32), 1.0)


def test_all_ways_to_run_it_round_alike() -> None:
    tables = []
    for wrap in cases.WRAPS:
        optimizer = cases.make("lazy_adam", state_dtype="bfloat16")
        variables = cases.variables(dtype="bfloat16")
        cases.run(optimizer, variables, cases.calls(2), wrap)
        tables.append(np.array(variables[cases.TABLE]).astype(np.float32))
    np.testing.assert_array_equal(tables[0], tables[1])
    # XLA sums in another order, which may turn a rounding that was near the edge.
    assert np.mean(tables[0] != tables[2]) < 0.1
    np.testing.assert_allclose(tables[0], tables[2], rtol=2.0**-7)


def test_the_order_of_a_batch_and_its_other_rows_do_not_matter() -> None:
    tables = []
    for row_ids in ([1, 3, 0], [0, 1, 3], [1], [3, 1]):
        values = np.repeat(np.array([[0.3], [0.7], [1.1], [0.2]], np.float32), WIDE, axis=1)
        grads = tf.constant(values[row_ids])
        gradient = tf.IndexedSlices(grads, tf.constant(row_ids, tf.int64), (5, WIDE))
        tables.append(wide_table("bfloat16", [gradient] * 3)[0][1])
    for table in tables[1:]:
        np.testing.assert_array_equal(table, tables[0])
    assert len(np.unique(tables[0])) > 1


def test_no_two_variables_slots_or_seeds_share_their_noise() -> None:
    gradient = tf.ones((8, WIDE))
    results: dict[tuple[Any, ...], Any] = {}
    for seed in (0, 1):
        with keras.name_scope("a"):
            first = keras.Variable(np.ones((8, WIDE)), dtype="bfloat16", name="embeddings")
        with keras.name_scope("b"):
            second = keras.Variable(np.ones((8, WIDE)), dtype="bfloat16", name="embeddings")
        # The gradient is all that the moments hold after a step: 0.1 and 0.001, rounded at random.
        optimizer = LazyAdam(1e-4, seed=seed, state_dtype="bfloat16")
        optimizer.apply([gradient, gradient], [first, second])
        results |= {("a", seed): first, ("b", seed): second}
        for name, variable in (("a", first), ("b", second)):
            for slot in ("momentum", "velocity"):
                results[name, slot, seed] = optimizer.get_slot(variable, slot)
    arrays = [np.array(r).astype(np.float64) for r in results.values()]
    ups = [array > array.min() for array in arrays]
    assert all(0.005 < up.mean() < 0.995 for up in ups)
    for i, one in enumerate(ups):
        for other in ups[:i]:
            assert abs(correlation(one, other)) < 5 / np.sqrt(one.size)


def test_two_steps_round_with_different_noise() -> None:
    optimizer = LazyAdam(1e-4, beta_1=0.0, beta_2=0.0)  # each step is the same length
    table = keras.Variable(np.ones((8, WIDE)), dtype="bfloat16", name="embeddings")
    went_down = []
    for _ in range(3):
        table.assign(np.ones((8, WIDE)))
        optimizer.apply([tf.ones((8, WIDE))], [table])
        went_down.append(np.array(table).astype(np.float32) < 1.0)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert abs(correlation(went_down[one], went_down[other])) < 5 / np.sqrt(8 * WIDE)


def test_state_in_bfloat16_takes_half_the_memory_and_follows_that_in_float32() -> None:
    gradients = wide_gradients(60)
    exact, wide = wide_table("float32", gradients)
    mean, narrow = wide_table("float32", gradients, state_dtype="bfloat16")
    sizes = [
        sum(np.array(v).nbytes for k, v in o.named_state().items() if "/" in k)
        for o in (wide, narrow)
    ]
    assert sizes[0] == 2 * sizes[1]
    np.testing.assert_allclose(mean.mean(axis=1), exact[:, 0], atol=0.02 * (1 - exact[1, 0]))
    for slot, tolerance in (("momentum", 0.02), ("velocity", 0.02)):
        full = np.array(wide.get_slot(wide._trainable_variables[0], slot))
        half = np.array(narrow.get_slot(narrow._trainable_variables[0], slot)).astype(np.float64)
        np.testing.assert_allclose(half.mean(axis=1), full[:, 0], rtol=tolerance)


def test_rounded_to_nearest_a_second_moment_in_bfloat16_stands_still() -> None:
    # 0.999 * v is nearer to v than to any other number of bfloat16.
    gradient = tf.ones((1, WIDE))
    velocities = []
    for options in ({}, {"stochastic_rounding": False}):
        optimizer = LazyAdam(1e-3, state_dtype="bfloat16", **options)
        table = keras.Variable(np.ones((1, WIDE)), name="embeddings")
        optimizer.apply([gradient], [table])
        for _ in range(100):
            optimizer.apply([0.0 * gradient], [table])
        velocities.append(np.array(optimizer.get_slot(table, "velocity")).astype(np.float64))
    assert velocities[0].mean() == pytest.approx(0.001 * 0.999**100, rel=0.01)
    np.testing.assert_allclose(velocities[1], 0.001, rtol=2.0**-8)
