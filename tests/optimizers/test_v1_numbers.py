"""The numbers of the TensorFlow 1 LazyAdam: in graphs of both kinds of variables, and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import reference
from rowstep.optimizers.v1.optimizer import LazyAdamOptimizer

v1 = tf.compat.v1
KINDS = ("ref", "resource", "eager", "function")
BFLOAT16 = tf.bfloat16.as_numpy_dtype


class Rows(NamedTuple):
    """A sparse gradient."""

    row_ids: Sequence[int]
    row_grads: Any


class Snapshot(NamedTuple):
    """Variables, their slots and the beta powers after a step."""

    weights: list[np.ndarray]
    momenta: list[np.ndarray]
    velocities: list[np.ndarray]
    powers: list[float]


def gradient(given: Any, dtype: Any) -> Any:
    if not isinstance(given, Rows):
        return tf.constant(given, dtype)
    return tf.IndexedSlices(
        tf.constant(np.array(given.row_grads), dtype), tf.constant(given.row_ids, tf.int64)
    )


def in_function(call: Callable[[], Any]) -> None:
    @tf.function(autograph=False)
    def run() -> None:
        call()

    run()


def train(
    kind: str, optimizer: Any, starts: Sequence[Any], steps: Sequence[Any], dtype: Any = np.float32
) -> list[Snapshot]:
    """Apply gradients step by step, one for each variable, and return what each step left."""

    def apply(step: Sequence[Any]) -> Any:
        gradients = [gradient(given, dtype) for given in step]
        return optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def state() -> list[Any]:
        slots = [[optimizer.get_slot(v, name) for v in variables] for name in ("m", "v")]
        return [variables, *slots, [v for v in optimizer.variables() if "_power" in v.name]]

    if kind in ("ref", "resource"):
        with tf.Graph().as_default(), v1.Session() as session:
            variables = [
                v1.Variable(np.array(s, dtype), use_resource=kind != "ref") for s in starts
            ]
            operations = [apply(step) for step in steps]
            session.run(v1.global_variables_initializer())
            return [(session.run(op), Snapshot(*session.run(state())))[1] for op in operations]
    variables = [tf.Variable(np.array(s, dtype)) for s in starts]
    snapshots = []
    for step in steps:
        if kind == "function":
            in_function(partial(apply, step))
        else:
            apply(step)
        snapshots.append(Snapshot(*tf.nest.map_structure(lambda v: v.numpy(), state())))
    return snapshots


def column(array: np.ndarray) -> np.ndarray:
    return array[:, 0]


# The cases of tf.contrib --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sparse_gradients_move_rows_as_in_contrib(kind: str, dtype: str) -> None:
    # Half precision is rounded up or down at random, a spacing of 2e-3 at weights of 2 to 4.
    tolerance = 2e-3 if dtype == "float16" else 1e-6
    steps = [[Rows([0, 1], [0.1, 0.1]), Rows([0, 1], [0.01, 0.01])]] * 3
    snapshots = train(kind, LazyAdamOptimizer(), [[1, 2], [3, 4]], steps, dtype)
    expected = [reference.new_state(np.array(start)) for start in ([1.0, 2.0], [3.0, 4.0])]
    for t, snapshot in enumerate(snapshots, start=1):
        for index, rows in enumerate(steps[0]):
            expected[index] = reference.lazy_adam(expected[index], *rows, t, epsilon=1e-8)
            np.testing.assert_allclose(
                snapshot.weights[index], expected[index][0], rtol=tolerance, atol=0
            )
        # What the next step will correct its bias by.
        np.testing.assert_allclose(snapshot.powers, [0.9 ** (t + 1), 0.999 ** (t + 1)], rtol=1e-6)
        assert snapshot.weights[0].dtype == dtype


@pytest.mark.parametrize("ids_dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize("use_resource", [False, True])
def test_gathered_rows_train_with_ids_of_either_type(ids_dtype: Any, use_resource: bool) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.Variable([[1.0], [2.0]], use_resource=use_resource)
        loss = tf.reduce_sum(tf.gather(table, tf.constant([0, 1], ids_dtype)))
        operation = LazyAdamOptimizer(3.0).minimize(loss)
        session.run(v1.global_variables_initializer())
        session.run(operation)
        np.testing.assert_allclose(session.run(table), [[-2], [-1]], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_rows_count_once_with_their_sum(kind: str) -> None:
    optimizers = LazyAdamOptimizer(), LazyAdamOptimizer()
    repeated, aggregated = (
        train(kind, optimizer, [[[1.0], [2.0]]], [[rows]] * 3)
        for optimizer, rows in zip(
            optimizers, [Rows([1, 1], [[0.1], [0.1]]), Rows([1], [[0.2]])], strict=True
        )
    )
    for one, other, weight in zip(
        repeated, aggregated, [1.99900002, 1.99800003, 1.99700004], strict=True
    ):
        np.testing.assert_array_equal(one.weights[0], other.weights[0])
        np.testing.assert_allclose(column(one.weights[0]), [1, weight], rtol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_dense_gradients_get_the_very_numbers_of_tensorflows_adam(kind: str) -> None:
    steps = [[[0.1, 0.1], [0.01, 0.01]], [[0.5, -2.0], [0.0, 3.0]], [[0.1, 0.1], [0.01, 0.01]]]
    ours, theirs = (
        train(kind, optimizer, [[1, 2], [3, 4]], steps)
        for optimizer in (LazyAdamOptimizer(), v1.train.AdamOptimizer())
    )
    np.testing.assert_allclose(ours[0].weights[0], [0.99900003, 1.99900003], rtol=1e-7)
    np.testing.assert_allclose(ours[0].weights[1], [2.99900032, 3.99900032], rtol=1e-7)
    for one, other in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


# What contrib's tests could not tell from Adam ------------------------------------------------

TOUCH_THEN_SKIP = [
    [Rows([1, 3], np.ones((2, 2)))],
    [Rows([0], np.ones((1, 2)))],
    [Rows([1], np.ones((1, 2)))],
]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_were_touched_before_do_not_drift_when_skipped(kind: str) -> None:
    *_, last = train(kind, LazyAdamOptimizer(0.1), [np.ones((4, 2))], TOUCH_THEN_SKIP)
    # By hand in float64; Adam, which lets skipped rows drift, ends at .8681, .7512, 1, .7812.
    np.testing.assert_allclose(
        column(last.weights[0]), [0.9255866, 0.8141543, 1, 0.9000003], rtol=1e-6
    )
    np.testing.assert_allclose(column(last.momenta[0]), [0.1, 0.19, 0, 0.1], rtol=1e-6)
    # In float32, 1 - beta2 is off by 1.3e-5; so is the power it is divided by.
    np.testing.assert_allclose(column(last.velocities[0]), [0.001, 0.001999, 0, 0.001], rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_tensorflows_adam_fails_the_skip_case(kind: str) -> None:
    *_, last = train(kind, v1.train.AdamOptimizer(0.1), [np.ones((4, 2))], TOUCH_THEN_SKIP)
    np.testing.assert_allclose(
        column(last.weights[0]), [0.8680647, 0.7511946, 1, 0.7811992], rtol=1e-5
    )


@pytest.mark.parametrize("use_resource", [False, True])
def test_ref_and_resource_variables_are_lazy_alike(use_resource: bool) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        ids = v1.placeholder(tf.int64, [None])
        table = v1.Variable(np.ones((4, 2), np.float32), use_resource=use_resource)
        operation = LazyAdamOptimizer(0.1).minimize(tf.reduce_sum(tf.gather(table, ids)))
        session.run(v1.global_variables_initializer())
        for row_ids, expected in (
            ([0, 1, 1], [0.9, 0.9, 1, 1]),
            ([0], [0.8, 0.9, 1, 1]),
            ([2], [0.8, 0.9, 0.9361, 1]),
        ):
            session.run(operation, {ids: row_ids})
            np.testing.assert_allclose(column(session.run(table)), expected, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_duplicates_are_summed_before_they_are_squared(kind: str) -> None:
    rows = Rows([1, 1, 3], np.repeat([[1.0], [3.0], [0.5]], 2, axis=1))
    (last,) = train(kind, LazyAdamOptimizer(0.1), [np.ones((4, 2))], [[rows]])
    np.testing.assert_allclose(column(last.momenta[0]), [0, 0.4, 0, 0.05], rtol=1e-6)
    # Without the sum the second row would have 0.010.
    np.testing.assert_allclose(column(last.velocities[0]), [0, 0.016, 0, 0.00025], rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_present_with_a_zero_gradient_moves_on_by_its_momentum(kind: str) -> None:
    steps = [[Rows([0, 1], [[1.0], [1.0]])], [Rows([1], [[0.0]])], [Rows([], np.ones((0, 1)))]]
    first, second, third = train(kind, LazyAdamOptimizer(0.1), [np.ones((2, 1))], steps)
    assert first.weights[0][0] == second.weights[0][0]
    assert first.weights[0][1] - second.weights[0][1] > 0.05
    np.testing.assert_allclose(column(second.momenta[0]), [0.1, 0.09], rtol=1e-6)
    # A step without rows counts as a step, and moves nothing.
    np.testing.assert_array_equal(second.weights[0], third.weights[0])
    np.testing.assert_allclose(third.powers, [0.9**4, 0.999**4], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ten_random_steps_follow_the_reference(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(6, 3))
    rows = [Rows(rng.integers(0, 5, 7).tolist(), rng.normal(size=(7, 3))) for _ in range(10)]
    *_, last = train(kind, LazyAdamOptimizer(0.05), [start], [[r] for r in rows], dtype)
    w, m, v = reference.new_state(start)
    for t, (row_ids, row_grads) in enumerate(rows, start=1):
        w, m, v = reference.lazy_adam(
            (w, m, v), row_ids, row_grads, t, learning_rate=0.05, epsilon=1e-8
        )
    np.testing.assert_allclose(last.weights[0], w, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(last.momenta[0], m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last.velocities[0], v, rtol=2e-5)
    np.testing.assert_array_equal(last.weights[0][5], start[5].astype(dtype))


# Half precision -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize("is_dense", [False, True])
def test_half_precision_variables_move_as_far_as_the_reference(
    kind: str, dtype: Any, is_dense: bool
) -> None:
    small = np.full((2, 2), 1e-4)  # its square is 0 in float16, and 1 - 0.999 is 0 in bfloat16
    step = [small if is_dense else Rows([0, 1], small)]
    *_, last = train(kind, LazyAdamOptimizer(0.1), [np.ones((2, 2))], [step] * 4, dtype)
    state = reference.new_state(np.ones((2, 2)))
    for t in range(1, 5):
        state = reference.adam(state, small, t, learning_rate=0.1, epsilon=1e-8)
    np.testing.assert_allclose(last.weights[0].astype(np.float64), state[0], atol=0.01)
    np.testing.assert_allclose(last.velocities[0], state[2], rtol=0.01)
    assert last.weights[0].dtype == dtype and last.velocities[0].dtype == np.float32
