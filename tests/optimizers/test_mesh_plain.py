"""Without a mesh the DTensor Adam is a plain Adam of tf_keras, dense or lazy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from rowstep.optimizers import reference
from rowstep.optimizers.dtensor import Adam
from rowstep.optimizers.errors import OptimizerArgumentError

Array = np.ndarray
TABLE = np.linspace(-1.0, 1.0, 12).reshape(6, 2).astype(np.float32)
BATCHES = [([1, 3, 1], 1.0), ([0], 0.1), ([1, 1, 1], -0.5)]


def slices(ids: list[int], value: float) -> tf.IndexedSlices:
    values = tf.constant(np.full([len(ids), 2], value, np.float32))
    return tf.IndexedSlices(values, tf.constant(ids), tf.constant(TABLE.shape))


def trained(graph: bool = False, **arguments: Any) -> tuple[tf.Variable, Adam]:
    table = tf.Variable(TABLE, name="table")
    optimizer = Adam(0.1, **arguments)
    optimizer.build([table])

    def step(ids: tf.Tensor, value: tf.Tensor) -> None:
        values = tf.ones([tf.size(ids), 2]) * value
        gradient = tf.IndexedSlices(values, ids, tf.constant(TABLE.shape))
        optimizer.apply_gradients([(gradient, table)])

    step = tf.function(step, reduce_retracing=True) if graph else step
    for ids, value in BATCHES:
        step(tf.constant(ids), tf.constant(value))
    return table, optimizer


def expected(*, lazy: bool) -> reference.State:
    state = reference.new_state(TABLE)
    for t, (ids, value) in enumerate(BATCHES, start=1):
        row_grads = np.full([len(ids), 2], value)
        if lazy:
            state = reference.lazy_adam(state, ids, row_grads, t, learning_rate=0.1)
        else:
            g = reference.dense_gradient(ids, row_grads, TABLE.shape)
            state = reference.adam(state, g, t, learning_rate=0.1)
    return state


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_sparse_gradients_train_like_the_reference(lazy: bool, graph: bool) -> None:
    table, optimizer = trained(graph, lazy=lazy)
    w, m, v = expected(lazy=lazy)
    np.testing.assert_allclose(table.numpy(), w, atol=1e-6)
    np.testing.assert_allclose(optimizer.get_slot(table, "m").numpy(), m, atol=1e-7)
    np.testing.assert_allclose(optimizer.get_slot(table, "v").numpy(), v, atol=1e-7)
    assert np.abs(w - expected(lazy=not lazy)[0]).max() > 0.01


def test_a_lazy_step_reads_no_whole_table() -> None:
    table = tf.Variable(TABLE, name="table")
    optimizer = Adam(0.1, lazy=True, amsgrad=True, weight_decay=0.1)
    optimizer.build([table])
    step = tf.function(lambda: optimizer.apply_gradients([(slices([1, 3], 1.0), table)]))
    graph = step.get_concrete_function().graph
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    assert reads and all(op.outputs[0].shape.rank == 0 for op in reads)


def test_lazy_training_with_an_average_leaves_unnamed_rows_to_the_bit() -> None:
    table, optimizer = trained(lazy=True, ema_option={"momentum": 0.7, "overwrite_frequency": 2})
    optimizer.finalize_variable_values([table])
    np.testing.assert_array_equal(table.numpy()[[2, 4, 5]], TABLE[[2, 4, 5]])
    assert np.all(table.numpy()[[0, 1, 3]] != TABLE[[0, 1, 3]])


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("use_ema", [False, True])
def test_weights_are_interchangeable_with_those_of_the_adam_of_tf_keras(
    amsgrad: bool, use_ema: bool
) -> None:
    arguments = {"amsgrad": amsgrad, "use_ema": use_ema, "weight_decay": 0.1, "clipnorm": 0.5}
    theirs, ours = tf_keras.optimizers.Adam(0.1, **arguments), Adam(0.1, **arguments)
    tables = [tf.Variable(TABLE, name="table") for _ in range(2)]
    biases = [tf.Variable([1.0, 2.0], name="bias") for _ in range(2)]

    def step(optimizer: Any, index: int, scale: float) -> None:
        gradients = [tf.constant(scale * (TABLE + 0.3)), tf.constant([scale, 0.1])]
        variables = [tables[index], biases[index]]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    step(theirs, 0, 1.0)
    ours.build([tables[1], biases[1]])
    ours.set_weights([variable.numpy() for variable in theirs.variables])
    tables[1].assign(tables[0])
    biases[1].assign(biases[0])
    step(theirs, 0, -0.1)
    step(ours, 1, -0.1)
    assert [v.name for v in ours.variables] == [
        v.name.removeprefix("Adam/") for v in theirs.variables
    ]
    np.testing.assert_allclose(tables[1].numpy(), tables[0].numpy(), atol=2e-6)
    for mine, other in zip(ours.get_weights(), theirs.variables, strict=True):
        np.testing.assert_allclose(mine, other.numpy(), atol=1e-6)


def test_xla_gives_the_same_numbers_and_compiles_once() -> None:
    runs = []
    for jit_compile in (False, True):
        table = tf.Variable(TABLE, name="table")
        optimizer = Adam(0.1, amsgrad=True, use_ema=True, weight_decay=0.1)
        # Without a GPU the constructor switches it off, as tf_keras does.
        optimizer.jit_compile = jit_compile
        step = tf.function(lambda g, o=optimizer, t=table: o.apply_gradients([(g, t)]))
        optimizer.build([table])
        for scale in (1.0, 0.1, -2.0):
            step(tf.constant(scale * (TABLE + 0.3)))
        runs.append(table.numpy())
        assert step.experimental_get_tracing_count() == 1
    np.testing.assert_allclose(runs[1], runs[0], atol=1e-6)


def test_a_constraint_holds_after_the_step() -> None:
    table = tf.Variable(TABLE, name="table", constraint=tf_keras.constraints.NonNeg())
    optimizer = Adam(0.1, lazy=True)
    optimizer.apply_gradients([(slices([1], 1.0), table)])
    assert table.numpy().min() == 0.0
    table.assign(TABLE)
    optimizer.apply_gradients([(tf.ones(TABLE.shape), table)])
    assert table.numpy().min() == 0.0


def test_float64_variables_keep_float64_state() -> None:
    table = tf.Variable(TABLE.astype(np.float64), name="table")
    optimizer = Adam(0.1)
    for scale in (1.0, 1e-3):
        optimizer.apply_gradients([(tf.constant(scale * (TABLE + 0.3), tf.float64), table)])
    state = reference.new_state(TABLE)
    for t, scale in enumerate((1.0, 1e-3), start=1):
        # The learning rate is a float32 variable: 0.1 of it is not 0.1 of Python.
        g = scale * (TABLE + np.float32(0.3)).astype(np.float64)
        state = reference.adam(state, g, t, learning_rate=float(np.float32(0.1)))
    assert optimizer.get_slot(table, "velocity").dtype == tf.float64
    np.testing.assert_allclose(table.numpy(), state[0], rtol=1e-7)


@pytest.mark.parametrize("ids", [[1, -1], [6]])
def test_ids_out_of_range_change_nothing(ids: list[int]) -> None:
    table, bias = tf.Variable(TABLE, name="table"), tf.Variable([1.0], name="bias")
    optimizer = Adam(0.1, lazy=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="table: row ids must lie in"):
        optimizer.apply_gradients([(tf.constant([1.0]), bias), (slices(ids, 1.0), table)])
    np.testing.assert_array_equal(table.numpy(), TABLE)
    assert bias.numpy() == [1.0]
    assert int(optimizer.iterations) == 0


@pytest.mark.filterwarnings("ignore:non-integer arguments to randrange:DeprecationWarning")
def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(tmp_path: Path) -> None:
    def new() -> Any:
        tf_keras.utils.set_random_seed(1)
        layers = [tf_keras.layers.Embedding(6, 2, input_length=2), tf_keras.layers.Flatten()]
        model = tf_keras.Sequential([*layers, tf_keras.layers.Dense(1)])
        model.compile(Adam(0.1, lazy=True, use_ema=True, name="mine"), "mse")
        return model

    x, y = np.array([[1, 2], [2, 3]]), np.array([[1.0], [0.0]])
    model = new()
    model.fit(x, y, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    again = tf_keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == model.optimizer.get_config()
    for one, other in zip(
        again.optimizer.get_weights(), model.optimizer.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    model.fit(x, y, verbose=0)
    again.fit(x, y, verbose=0)
    for one, other in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_callable_learning_rate_is_asked_once_a_step() -> None:
    asked: list[int] = []

    def rate() -> float:
        asked.append(1)
        return 0.1

    optimizer = Adam(rate)
    before = len(asked)
    variables = [tf.Variable([1.0], name=name) for name in "ab"]
    optimizer.apply_gradients([(tf.constant([1.0]), variable) for variable in variables])
    assert len(asked) - before == 1
    optimizer.learning_rate = 0.5
    assert float(optimizer.learning_rate) == 0.5


def test_the_learning_rate_of_a_schedule_cannot_be_set_to_a_number() -> None:
    schedules = tf_keras.optimizers.schedules
    optimizer = Adam(schedules.ExponentialDecay(0.2, 1, 0.5))
    with pytest.raises(OptimizerArgumentError, match="another schedule"):
        optimizer.learning_rate = 0.1
    optimizer.learning_rate = schedules.ExponentialDecay(0.4, 1, 0.5)
    assert float(optimizer.lr) == pytest.approx(0.4)
    assert "learning_rate" not in _named(optimizer)


def _named(optimizer: Adam) -> dict[str, Array]:
    optimizer.build([tf.Variable(TABLE, name="table")])
    return optimizer.named_state()
