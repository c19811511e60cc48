"""What every optimizer of the registry must do, against the NumPy float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import OPTIMIZERS, reference

NUM_ROWS, WIDTH = 7, 3
RATE = 0.0625  # exact in float32, the dtype that Keras holds learning rates in
# Rounding of the weight itself: the arithmetic is float32 for all three.
RELATIVE_ERROR = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2, "float64": 1e-9}


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return a sparse gradient a step: with repetitions, rows seen once, and rows never seen."""
    rng = np.random.default_rng(7)
    row_ids = [[1, 1, 3], [3, 0, 3, 3], [5], [1, 0, 5, 1]]
    return [(np.array(ids), rng.normal(size=(len(ids), WIDTH)) * 0.1) for ids in row_ids]


def expected(name: str, weights: np.ndarray, sparse: bool, **settings: Any) -> reference.State:
    state = reference.new_state(weights)
    for t, (row_ids, row_grads) in enumerate(batches(), start=1):
        g = reference.dense_gradient(row_ids, row_grads, weights.shape)
        if name == "lamb":
            state = reference.lamb(state, g, t, **settings)
        elif sparse:
            state = reference.lazy_adam(state, row_ids, row_grads, t, **settings)
        else:
            state = reference.adam(state, g, t, **settings)
    return state


def gradient(row_ids: np.ndarray, row_grads: np.ndarray, sparse: bool, dtype: str) -> Any:
    shape = tf.constant([NUM_ROWS, WIDTH], tf.int64)
    slices = tf.IndexedSlices(tf.constant(row_grads, dtype), tf.constant(row_ids), shape)
    return slices if sparse else tf.convert_to_tensor(slices)


def trained(
    name: str, weights: np.ndarray, sparse: bool, dtype: str, wrap: Callable[..., Any]
) -> tuple[keras.Variable, Any]:
    optimizer = OPTIMIZERS[name](learning_rate=RATE)
    table = keras.Variable(weights, dtype=dtype, name="table")
    optimizer.build([table])
    step = wrap(lambda g: optimizer.apply([g], [table]))
    for row_ids, row_grads in batches():
        step(gradient(row_ids, row_grads, sparse, dtype))
    return table, optimizer


@pytest.fixture
def weights() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(NUM_ROWS, WIDTH))


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_follow_the_reference(
    name: str, dtype: str, sparse: bool, weights: np.ndarray
) -> None:
    table, optimizer = trained(name, weights, sparse, dtype, wrap=lambda f: f)
    w, m, v = expected(name, weights, sparse, learning_rate=RATE)
    rtol = RELATIVE_ERROR[dtype]
    np.testing.assert_allclose(np.array(table).astype(np.float64), w, rtol=rtol, atol=rtol / 10)
    np.testing.assert_allclose(optimizer.get_slot(table, "m"), m, rtol=rtol, atol=rtol * 0.1)
    np.testing.assert_allclose(optimizer.get_slot(table, "v"), v, rtol=2 * rtol, atol=1e-8)
    state_dtype = "float64" if dtype == "float64" else "float32"
    assert optimizer.get_slot(table, "m").dtype == state_dtype


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_by_xla_it_computes_the_same(name: str, weights: np.ndarray) -> None:
    eager, _ = trained(name, weights, True, "float32", wrap=lambda f: f)
    compiled, _ = trained(
        name, weights, True, "float32", wrap=lambda f: tf.function(f, jit_compile=True)
    )
    np.testing.assert_allclose(compiled, eager, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_batch_contents_need_one_trace(name: str, weights: np.ndarray) -> None:
    optimizer = OPTIMIZERS[name](learning_rate=RATE, global_clipnorm=1.0)
    table = keras.Variable(weights, dtype="float32", name="table")
    optimizer.build([table])
    num_traces = 0

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(row_ids: tf.Tensor) -> None:
        nonlocal num_traces
        num_traces += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, row_ids) ** 2)
        optimizer.apply([tape.gradient(loss, table.value)], [table])

    for row_ids in ([0], [1, 1, 2], [6, 5, 4, 3], []):
        step(tf.constant(row_ids, tf.int64))
    assert num_traces == 1
    assert int(optimizer.iterations) == 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_schedule_is_read_at_the_step_before_counting(
    name: str, weights: np.ndarray
) -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.0])
    optimizer = OPTIMIZERS[name](learning_rate=schedule)
    table = keras.Variable(weights, dtype="float32", name="table")
    after = []
    for _ in range(2):
        optimizer.apply([tf.ones((NUM_ROWS, WIDTH))], [table])
        after.append(np.array(table))
    assert np.all(after[0] != weights.astype(np.float32))
    np.testing.assert_array_equal(after[0], after[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_config_makes_the_same_optimizer(name: str) -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    for settings in (
        {"learning_rate": 0.001, "beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-5, "clipnorm": 2.0},
        {"learning_rate": schedule, "global_clipnorm": 1.0, "name": "mine"},
    ):
        optimizer = OPTIMIZERS[name](**settings)
        config = keras.saving.serialize_keras_object(optimizer)
        copy = keras.saving.deserialize_keras_object(config)
        assert type(copy) is type(optimizer)
        assert copy.get_config() == optimizer.get_config()
        assert optimizer.get_config() | settings == optimizer.get_config() | {
            "learning_rate": settings["learning_rate"]
        }
    assert config["registered_name"].startswith("rowstep>")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_minimize_equals_compute_and_apply(name: str, weights: np.ndarray) -> None:
    results = []
    for way in ("minimize", "two steps", "tape"):
        optimizer = OPTIMIZERS[name](RATE)
        table = keras.Variable(weights, dtype="float32", name="table")

        def loss(table: keras.Variable = table) -> tf.Tensor:
            return tf.reduce_sum(tf.gather(table.value, [1, 1, 2]) ** 2)

        if way == "minimize":
            optimizer.minimize(loss, [table])
        elif way == "two steps":
            pairs = optimizer.compute_gradients(loss, lambda table=table: [table])
            assert isinstance(pairs[0][0], tf.IndexedSlices)
            optimizer.apply_gradients(pairs, name="ignored")
        else:
            with tf.GradientTape() as tape:
                value = loss()
            optimizer.minimize(value, [table], tape=tape)
        results.append(np.array(table))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    assert np.any(results[0] != weights.astype(np.float32))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_older_name_of_the_learning_rate_reads_and_sets_it(name: str) -> None:
    optimizer = OPTIMIZERS[name](learning_rate=1)
    optimizer.lr = 0.25
    assert float(optimizer.learning_rate) == float(optimizer.lr) == 0.25
