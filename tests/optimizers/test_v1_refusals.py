"""What the TensorFlow 1 LazyAdam refuses, and that nothing has changed by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import OptimizerArgumentError
from rowstep.optimizers.v1.optimizer import LazyAdamOptimizer

v1 = tf.compat.v1
both_kinds = pytest.mark.parametrize("use_resource", [False, True])


def ones(use_resource: bool, name: str = "table") -> tf.Variable:
    return v1.Variable(np.ones((4, 2), np.float32), use_resource=use_resource, name=name)


def rows(row_ids: Any, width: int = 2) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.ones([len(row_ids), width]), tf.constant(row_ids, tf.int64))


def test_no_variables_and_no_gradients_are_refused() -> None:
    optimizer, variable = LazyAdamOptimizer(), tf.Variable([1.0])
    with pytest.raises(ValueError, match="No variables provided"):
        optimizer.apply_gradients([])
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply_gradients([(None, variable)])
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.minimize(lambda: tf.constant(1.0), var_list=[variable])
    with tf.Graph().as_default(), pytest.raises(ValueError, match="No variables to optimize"):
        optimizer.minimize(tf.constant(1.0), var_list=[])


def test_a_loss_that_is_a_tensor_is_refused_eagerly() -> None:
    variable = tf.Variable([1.0])
    with pytest.raises(RuntimeError, match="should be a function"):
        LazyAdamOptimizer().minimize(tf.reduce_sum(variable), var_list=[variable])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o, v: o.apply_gradients([v]), "must be pairs"),
        (lambda o, v: o.apply_gradients([(object(), v)]), "a gradient must be a tensor"),
        (lambda o, v: o.apply_gradients([([1.0], [1.0])]), "only a tf.Variable can be trained"),
        (lambda o, v: o.minimize(lambda: v, var_list=["v"]), "only a tf.Variable can be trained"),
        (lambda o, v: o.build([3]), "only a tf.Variable can be trained"),
        (lambda o, v: LazyAdamOptimizer(lambda step: 0.1), "must need no arguments"),
    ],
)
def test_what_is_of_a_wrong_type_is_refused_with_a_type_error(
    call: Callable[[Any, Any], Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message) as raised:
        call(LazyAdamOptimizer(), tf.Variable([1.0]))
    assert isinstance(raised.value, OptimizerArgumentError)


@pytest.mark.parametrize(
    "arguments",
    [
        {"learning_rate": -0.1},
        {"learning_rate": "fast"},
        {"learning_rate": tf.constant([0.1, 0.2])},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"epsilon": float("nan")},
    ],
)
def test_numbers_out_of_range_are_refused_on_construction(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(OptimizerArgumentError, match=f"^Adam: {name} must"):
        LazyAdamOptimizer(**arguments)


@both_kinds
@pytest.mark.parametrize("row_id", [-1, 4])
def test_a_row_id_out_of_range_stops_a_graph_before_anything_changes(
    use_resource: bool, row_id: int
) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        first, second = ones(use_resource, "first"), ones(use_resource, "second")
        dense, step = ones(use_resource, "dense"), v1.train.get_or_create_global_step()
        optimizer = LazyAdamOptimizer(0.1)
        operation = optimizer.apply_gradients(
            [(tf.ones([4, 2]), dense), (rows([0]), first), (rows([1, row_id]), second)], step
        )
        session.run(v1.global_variables_initializer())
        held = [first, second, dense, step, *optimizer.variables()]
        before = session.run(held)
        with pytest.raises(tf.errors.InvalidArgumentError, match="second: row ids must lie in"):
            session.run(operation)
        for old, new in zip(before, session.run(held), strict=True):
            np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("row_id", [-1, 4])
def test_a_row_id_out_of_range_stops_a_call_before_anything_changes(
    in_function: bool, row_id: int
) -> None:
    first, second = (tf.Variable(np.ones((4, 2), np.float32), name=n) for n in ("first", "second"))
    optimizer = LazyAdamOptimizer(0.1)
    optimizer.build([first, second])
    before = optimizer.named_state()

    def step() -> None:
        optimizer.apply_gradients([(rows([0]), first), (rows([1, row_id]), second)])

    with pytest.raises(tf.errors.InvalidArgumentError, match="second: row ids must lie in"):
        (tf.function(step) if in_function else step)()
    np.testing.assert_array_equal(first.numpy(), np.ones((4, 2)))
    for key, array in optimizer.named_state().items():
        np.testing.assert_array_equal(array, before[key])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: tf.ones([2]),  # would broadcast
        lambda: rows([1], width=1),  # would broadcast
        lambda: tf.IndexedSlices(tf.ones([3, 2]), tf.constant([0, 1])),
        lambda: tf.IndexedSlices(tf.ones([1, 1, 2]), tf.constant([[0]])),
    ],
)
def test_a_gradient_of_another_shape_is_refused_before_anything_changes(
    bad: Callable[[], Any],
) -> None:
    first, second = (tf.Variable(np.ones((4, 2), np.float32), name=n) for n in ("first", "second"))
    optimizer = LazyAdamOptimizer(0.1)
    with pytest.raises(OptimizerArgumentError, match=r"apply_gradients: second: .* must have"):
        optimizer.apply_gradients([(rows([0]), first), (bad(), second)])
    np.testing.assert_array_equal(first.numpy(), np.ones((4, 2)))
    assert optimizer.variables() == []


@both_kinds
@pytest.mark.parametrize("values", [np.ones((1, 1)), np.ones(2), np.ones((2, 2))])
def test_shapes_that_only_a_run_knows_are_checked_before_anything_changes(
    use_resource: bool, values: Any
) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        first, second = ones(use_resource, "first"), ones(use_resource, "second")
        given = v1.placeholder(tf.float32, None)
        slices = tf.IndexedSlices(given, tf.constant([1]))
        operation = LazyAdamOptimizer(0.1).apply_gradients([(rows([0]), first), (slices, second)])
        session.run(v1.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match="second: a gradient must have"):
            session.run(operation, {given: values})
        np.testing.assert_array_equal(session.run(first), np.ones((4, 2)))
        session.run(operation, {given: np.ones((1, 2))})
        np.testing.assert_allclose(session.run(second)[:, 0], [1, 0.9, 1, 1], rtol=1e-6)


@both_kinds
def test_variables_without_a_static_shape_train(use_resource: bool) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        start = v1.placeholder_with_default(np.ones((4, 2), np.float32), None)
        table = v1.Variable(start, validate_shape=False, use_resource=use_resource)
        ids = v1.placeholder(tf.int64, [None])
        slices = tf.IndexedSlices(tf.ones([1, 2]), ids)
        optimizer = LazyAdamOptimizer(0.1)
        operation = optimizer.apply_gradients([(slices, table)])
        # One after the other: TensorFlow takes the shape of these slots from the variable.
        session.run(table.initializer)
        session.run([slot.initializer for slot in optimizer.variables()])
        with pytest.raises(tf.errors.InvalidArgumentError, match="row ids must lie in"):
            session.run(operation, {ids: [4]})
        session.run(operation, {ids: [1]})
        np.testing.assert_allclose(session.run(table)[:, 0], [1, 0.9, 1, 1], rtol=1e-6)


def test_rows_of_a_variable_with_a_constraint_are_refused() -> None:
    first = tf.Variable(np.ones((4, 2), np.float32))
    second = tf.Variable(np.ones((4, 2), np.float32), constraint=tf.nn.relu)
    with pytest.raises(OptimizerArgumentError, match="must have a dense gradient"):
        LazyAdamOptimizer().apply_gradients([(rows([0]), first), (rows([0]), second)])
    np.testing.assert_array_equal(first.numpy(), np.ones((4, 2)))


def test_a_nan_gradient_spoils_its_row_only() -> None:
    table = tf.Variable(np.ones((4, 2), np.float32))
    slices = tf.IndexedSlices(tf.constant([[np.nan, np.nan]]), tf.constant([1]))
    LazyAdamOptimizer(0.1).apply_gradients([(slices, table)])
    np.testing.assert_array_equal(np.isnan(table.numpy()[:, 0]), [False, True, False, False])
