"""The interface of the TensorFlow 1 LazyAdam: every method, every argument, every refusal."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import reference
from rowstep.optimizers.v1.optimizer import LazyAdamOptimizer

v1 = tf.compat.v1
both_kinds = pytest.mark.parametrize("use_resource", [False, True])


def ones(use_resource: bool, name: str = "table") -> tf.Variable:
    return v1.Variable(np.ones((4, 2), np.float32), use_resource=use_resource, name=name)


def rows(row_ids: Any, width: int = 2) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.ones([len(row_ids), width]), tf.constant(row_ids, tf.int64))


def ancestors(operation: tf.Operation) -> set[tf.Operation]:
    """Return the operations that run before an operation, and itself."""
    found, waiting = set(), [operation]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += [tensor.op for tensor in current.inputs] + list(current.control_inputs)
    return found


def test_the_signature_is_that_of_release_1_4() -> None:
    parameters = inspect.signature(LazyAdamOptimizer).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "learning_rate": 0.001,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "use_locking": False,
        "name": "Adam",
    }
    assert list(parameters)[-2:] == ["use_locking", "name"]


@pytest.mark.parametrize("method", ["minimize", "compute_gradients", "apply_gradients"])
def test_the_methods_take_what_tensorflows_optimizer_takes(method: str) -> None:
    ours, theirs = (
        {name: p.default for name, p in inspect.signature(getattr(cls, method)).parameters.items()}
        for cls in (LazyAdamOptimizer, v1.train.Optimizer)
    )
    assert ours == theirs and list(ours) == list(theirs)


def test_names_gates_and_slots_are_those_of_tensorflow() -> None:
    optimizer = LazyAdamOptimizer(name="Mine")
    variable = tf.Variable([1.0])
    assert isinstance(optimizer, v1.train.AdamOptimizer)
    assert optimizer.get_name() == "Mine" and LazyAdamOptimizer().get_name() == "Adam"
    assert (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH) == (0, 1, 2)
    assert optimizer.get_slot(variable, "m") is None and optimizer.variables() == []
    optimizer.build([variable])
    assert optimizer.get_slot_names() == ["m", "v"]
    assert optimizer.get_slot(variable, "unknown") is None


def test_two_operations_of_one_optimizer_share_its_state() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.Variable([1.0, 2.0])
        optimizer = LazyAdamOptimizer()
        operations = [
            optimizer.apply_gradients([(tf.constant([0.1, 0.1]), variable)]) for _ in range(2)
        ]
        session.run(v1.global_variables_initializer())
        for operation, weight in zip(
            [*operations, operations[0]], [0.99900003, 0.99800005, 0.99700007], strict=True
        ):
            session.run(operation)
            np.testing.assert_allclose(session.run(variable)[0], weight, rtol=1e-7)


def test_each_variable_has_two_slots_of_its_own() -> None:
    first, second = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = LazyAdamOptimizer(1.0)
    optimizer.minimize(lambda: first + second, var_list=[first, second])
    variables = optimizer.variables()
    assert len({id(v) for v in variables}) == len(variables) == 6  # two are the beta powers
    assert optimizer.get_slot(first, "m") is not optimizer.get_slot(second, "m")
    assert optimizer.get_slot(first, "momentum") is optimizer.get_slot(first, "m")


@pytest.mark.parametrize("form", ["callable", "tensor", "placeholder"])
@pytest.mark.parametrize("use_resource", [False, True])
def test_every_number_may_be_a_tensor_or_a_callable(form: str, use_resource: bool) -> None:
    numbers = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.99, "epsilon": 0.01}
    row_ids, row_grads = [1, 1], [[0.5], [1.0]]
    expected = reference.new_state(np.ones((2, 1)))
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.Variable(np.ones((2, 1), np.float32), use_resource=use_resource)
        make: Any = {
            "callable": lambda value: lambda: value,
            "tensor": tf.constant,
            "placeholder": lambda value: v1.placeholder(tf.float32, []),
        }[form]
        given = {name: make(value) for name, value in numbers.items()}
        is_fed = form == "placeholder"
        feed = {given[name]: value for name, value in numbers.items()} if is_fed else {}
        slices = tf.IndexedSlices(tf.constant(row_grads), tf.constant(row_ids))
        operation = LazyAdamOptimizer(**given).apply_gradients([(slices, table)])
        session.run(v1.global_variables_initializer(), feed)
        for t in (1, 2):
            session.run(operation, feed)
            expected = reference.lazy_adam(
                expected,
                row_ids,
                row_grads,
                t,
                learning_rate=0.1,
                beta_1=0.8,
                beta_2=0.99,
                epsilon=0.01,
            )
        np.testing.assert_allclose(session.run(table), expected[0], rtol=1e-6)


def test_a_callable_learning_rate_is_asked_at_every_eager_step() -> None:
    rates = iter([0.1, 0.0])
    variable = tf.Variable([1.0])
    optimizer = LazyAdamOptimizer(lambda: next(rates))
    for _ in range(2):
        optimizer.minimize(lambda: tf.reduce_sum(variable), var_list=[variable])
    np.testing.assert_allclose(variable.numpy(), [0.9], rtol=1e-6)


# minimize and compute_gradients --------------------------------------------------------------


@both_kinds
def test_gates_grad_loss_aggregation_and_colocation_reach_the_gradients(use_resource: bool) -> None:
    optimizer = LazyAdamOptimizer()
    for gate in (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH):
        with tf.Graph().as_default() as graph, v1.Session() as session:
            first, second = ones(use_resource, "first"), ones(use_resource, "second")
            loss = tf.reduce_sum(tf.multiply(first, second, name="product"))
            ((one, variable), (other, _)) = optimizer.compute_gradients(
                loss,
                [first, second],
                gate,
                tf.AggregationMethod.EXPERIMENTAL_TREE,
                colocate_gradients_with_ops=True,
                grad_loss=tf.constant(3.0),
            )
            session.run(v1.global_variables_initializer())
            np.testing.assert_array_equal(session.run(one), np.full((4, 2), 3))
            assert variable is first
            # A gate makes either gradient wait for both.
            products = [op for op in graph.get_operations() if op.type in ("Mul", "MulNoNan")]
            gradients = [op for op in products if op.name != "product"]
            assert len(gradients) == 2
            waits = all(ancestors(g.op) >= set(gradients) for g in (one, other))
            assert waits == (gate != optimizer.GATE_NONE)
            assert all(b"loc:@product" in op.colocation_groups() for op in gradients)


@both_kinds
@pytest.mark.parametrize("is_callable", [False, True])
def test_a_gate_that_is_none_of_the_three_is_refused(use_resource: bool, is_callable: bool) -> None:
    with tf.Graph().as_default():
        table = ones(use_resource)
        loss: Any = (lambda: tf.reduce_sum(table)) if is_callable else tf.reduce_sum(table)
        with pytest.raises(ValueError, match=r"GATE_OP or GATE_GRAPH[.] Got 7"):
            LazyAdamOptimizer().minimize(loss, gate_gradients=7)


@both_kinds
def test_the_global_step_counts_after_all_updates(use_resource: bool) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        tables = [ones(use_resource, "first"), ones(use_resource, "second")]
        step = v1.Variable(0, dtype=tf.int64, use_resource=use_resource)
        operation = LazyAdamOptimizer(0.1).apply_gradients(
            [(rows([0]), tables[0]), (tf.ones([4, 2]), tables[1])], global_step=step, name="train"
        )
        assert operation.name == "train" and operation.type.startswith("AssignAdd")
        assert operation in v1.get_collection(v1.GraphKeys.TRAIN_OP)
        kinds = [op.type.removeprefix("Resource") for op in ancestors(operation)]
        # Both moments and the weights of the one, the fused kernel of the other, two beta powers.
        assert kinds.count("ScatterUpdate") == 2 and kinds.count("ScatterSub") == 1
        assert kinds.count("ApplyAdam") == 1
        session.run(v1.global_variables_initializer())
        session.run([operation])
        session.run([operation])
        assert session.run(step) == 2


def test_minimize_takes_all_trainable_variables_when_told_none() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        used, unused = ones(False, "used"), ones(False, "unused")
        operation = LazyAdamOptimizer(0.1).minimize(tf.reduce_sum(used), name="train")
        session.run(v1.global_variables_initializer())
        session.run(operation)
        np.testing.assert_allclose(session.run(used), np.full((4, 2), 0.9), rtol=1e-6)
        np.testing.assert_array_equal(session.run(unused), np.ones((4, 2)))
    table, step = tf.Variable(np.ones((4, 2), np.float32)), tf.Variable(0, dtype=tf.int64)
    LazyAdamOptimizer(0.1).minimize(lambda: tf.reduce_sum(tf.gather(table, [1])), step)
    np.testing.assert_allclose(table.numpy()[:, 0], [1, 0.9, 1, 1], rtol=1e-6)
    assert step.numpy() == 1


@both_kinds
def test_a_callable_loss_works_in_a_graph(use_resource: bool) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        table = ones(use_resource)
        operation = LazyAdamOptimizer(0.1).minimize(
            lambda: tf.reduce_sum(tf.gather(table, [1])), var_list=iter([table])
        )
        session.run(v1.global_variables_initializer())
        session.run(operation)
        np.testing.assert_allclose(session.run(table)[:, 0], [1, 0.9, 1, 1], rtol=1e-6)


def test_minimize_trains_in_a_function_without_reading_a_table() -> None:
    table = tf.Variable(np.ones((4, 2), np.float32))
    optimizer = LazyAdamOptimizer(0.1)

    @tf.function
    def step(row_ids: tf.Tensor) -> None:
        optimizer.minimize(lambda: tf.reduce_sum(tf.gather(table, row_ids)), var_list=[table])

    step(tf.constant([0, 1, 1]))
    step(tf.constant([0, 0, 0]))
    state = reference.new_state(np.ones((4, 2)))
    for t, row_ids in enumerate(([0, 1, 1], [0, 0, 0]), start=1):
        state = reference.lazy_adam(state, row_ids, np.ones((3, 2)), t, learning_rate=0.1)
    np.testing.assert_allclose(table.numpy(), state[0], rtol=1e-5)
    graph = step.get_concrete_function(tf.constant([0, 1, 1])).graph
    shapes = {tuple(t.shape) for op in graph.get_operations() for t in op.outputs if t.shape.rank}
    assert (4, 2) not in shapes


@pytest.mark.parametrize("use_locking", [False, True])
@pytest.mark.parametrize(
    ("use_resource", "dtype", "num_locks"),
    [
        (False, tf.float32, 3 + 1 + 2),  # writes to rows, the fused kernel, two beta powers
        (False, tf.float16, 3 + 3 + 2),  # no fused kernel: weights and slots one by one
        (True, tf.float32, 1),  # only the fused kernel has the choice
        (True, tf.float16, 0),
    ],
)
def test_use_locking_reaches_every_operation_that_takes_it(
    use_locking: bool, use_resource: bool, dtype: Any, num_locks: int
) -> None:
    with tf.Graph().as_default() as graph:
        table = v1.Variable(tf.ones([4, 2], dtype), use_resource=use_resource)
        dense = v1.Variable(tf.ones([2], dtype), use_resource=use_resource)
        optimizer = LazyAdamOptimizer(use_locking=use_locking)
        optimizer.build([table, dense])
        before = set(graph.get_operations())
        slices = tf.IndexedSlices(tf.ones([1, 2], dtype), tf.constant([1]))
        optimizer.apply_gradients([(slices, table), (tf.ones([2], dtype), dense)])
        added = set(graph.get_operations()) - before
        locks = [op.get_attr("use_locking") for op in added if "use_locking" in op.node_def.attr]
        assert locks == [use_locking] * num_locks
