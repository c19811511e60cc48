"""The layer reads rows, not tables; its gradient is sparse; its regularizer counts look-ups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import Embedding, LazyAdam, OptimizerArgumentError


def test_rows_come_out_in_the_shape_of_the_ids() -> None:
    layer = Embedding(5, 3)
    rows = layer(np.array([[4, 0], [4, 4]]))
    table = np.array(layer.embeddings)
    np.testing.assert_array_equal(rows, table[[[4, 0], [4, 4]]])
    np.testing.assert_array_equal(layer(np.array([2])), table[[2]])


def test_the_gradient_is_sparse_and_names_every_look_up() -> None:
    layer = Embedding(5, 3)
    layer.build()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([[1, 3], [1, 0]])))
    gradient = tape.gradient(loss, layer.embeddings.value)
    assert isinstance(gradient, tf.IndexedSlices)
    np.testing.assert_array_equal(gradient.indices, [1, 3, 1, 0])


def train_step_graph(layer: keras.layers.Layer, optimizer: Any) -> tuple[tf.Graph, keras.Model]:
    ids = keras.Input((2,), dtype="int64")
    rows = keras.layers.Flatten()(layer(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(rows))
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids) ** 2) + tf.add_n([*model.losses, 0.0])
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    return step.get_concrete_function(tf.TensorSpec([None, 2], tf.int64)).graph, model


def large_tensors(graph: tf.Graph, num_rows: int) -> list[str]:
    """Return the types of the operations that put out a tensor with that many rows."""
    operations = [op for op in graph.get_operations() if op.type != "Const"]
    return [op.type for op in operations for out in op.outputs if num_rows in (out.shape or ())]


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_a_training_step_reads_rows_of_the_table_and_nothing_more(precision: str) -> None:
    layer = Embedding(4_321, 3, row_l2=0.1, dtype=precision)
    graph, model = train_step_graph(layer, LazyAdam(global_clipnorm=1.0))
    assert large_tensors(graph, 4_321) == []
    handle = graph.capture(model.trainable_variables[0].value.handle)
    uses = {op.type for op in handle.consumers()}
    assert uses - {"VariableShape"} == {"ResourceGather", "ResourceScatterUpdate"}


def test_keras_own_layer_and_optimizer_do_hold_such_tensors() -> None:
    graph, _ = train_step_graph(keras.layers.Embedding(4_321, 3), keras.optimizers.Adam())
    assert "ReadVariableOp" in large_tensors(graph, 4_321)


def test_row_l2_is_the_mean_over_examples_of_the_rows_squared() -> None:
    layer = Embedding(5, 3, row_l2=0.5)
    layer.build()
    table = np.array(layer.embeddings)
    layer(tf.constant([[1, 3], [1, 0]]))
    expected = 0.5 * np.sum(table[[1, 3, 1, 0]] ** 2) / 2
    assert float(layer.losses[0]) == pytest.approx(expected, rel=1e-5)
    one_id_an_example = Embedding(5, 3, row_l2=0.5, embeddings_initializer="ones")
    one_id_an_example(tf.constant([1, 2, 2, 4]))
    assert float(one_id_an_example.losses[0]) == pytest.approx(0.5 * 3)


def test_row_l2_decays_only_rows_of_the_batch() -> None:
    layer = Embedding(5, 3, row_l2=0.5, embeddings_initializer="ones")
    layer.build()
    with tf.GradientTape() as tape:
        layer(tf.constant([1, 1, 3]))
        loss = layer.losses[0]
    gradient = tape.gradient(loss, layer.embeddings.value)
    dense = np.array(tf.convert_to_tensor(gradient))
    np.testing.assert_allclose(dense[:, 0], [0, 2 / 3, 0, 1 / 3, 0], rtol=1e-6)


def test_without_row_l2_there_is_no_loss() -> None:
    layer = Embedding(5, 3)
    layer(tf.constant([1]))
    assert layer.losses == []


def test_an_empty_batch_has_no_rows_and_no_loss() -> None:
    layer = Embedding(5, 3, row_l2=0.5)
    assert layer(tf.zeros((0, 2), tf.int64)).shape == (0, 2, 3)
    assert float(layer.losses[0]) == 0.0


@pytest.mark.parametrize("row_id", [-1, 5])
def test_an_id_without_a_row_is_an_error(row_id: int) -> None:
    layer = Embedding(5, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"not in \[0, 5\)"):
        layer(tf.constant([0, row_id]))


def test_mixed_precision_casts_rows_and_not_the_table() -> None:
    layer = Embedding(5, 3, dtype="mixed_float16")
    rows = layer(tf.constant([1, 2]))
    assert rows.dtype == tf.float16
    assert layer.embeddings.dtype == "float32"


def test_a_table_may_have_one_row() -> None:
    layer = Embedding(1, 1)
    assert layer(tf.constant([[0, 0]])).shape == (1, 2, 1)


def test_a_config_makes_the_same_layer() -> None:
    layer = Embedding(
        5, 3, keras.initializers.RandomNormal(stddev=0.1, seed=3), row_l2=0.25, name="items"
    )
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert copy.get_config() == layer.get_config()
    ids = tf.constant([[0, 4]])
    np.testing.assert_array_equal(layer(ids), copy(ids))


def test_a_model_with_the_layer_is_exported_and_served(tmp_path: Path) -> None:
    ids = keras.Input((2,), dtype="int64")
    model = keras.Model(ids, keras.layers.Flatten()(Embedding(5, 3, row_l2=0.1)(ids)))
    expected = model(tf.constant([[1, 4]]))
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_array_equal(served.serve(tf.constant([[1, 4]], tf.int64)), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_dim": 0}, "Embedding: input_dim must be an integer from 1 up. Got 0."),
        ({"output_dim": 2.0}, "Embedding: output_dim must be an integer from 1 up. Got 2.0."),
        ({"row_l2": -1.0}, "Embedding: row_l2 must not be negative. Got -1.0."),
    ],
)
def test_sizes_that_make_no_table_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimizerArgumentError, match=message):
        Embedding(**{"input_dim": 5, "output_dim": 3} | arguments)


def test_ids_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(OptimizerArgumentError, match=r"items: ids must be integers.*Got bool"):
        Embedding(5, 3, name="items")(tf.constant([True]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="items: ids must be whole numbers"):
        Embedding(5, 3, name="items")(tf.constant([1.0, 1.5]))


def test_floats_are_ids_as_long_as_they_can_tell_all_rows_apart() -> None:
    with pytest.raises(OptimizerArgumentError, match=r"Got float16 for 2049 rows"):
        Embedding(2049, 3)(tf.constant([1.0], tf.float16))
    with pytest.raises(OptimizerArgumentError, match=r"Got float32 for 16777217 rows"):
        Embedding(2**24 + 1, 3)(keras.Input((2,)))
    layer = Embedding(2048, 3)
    np.testing.assert_array_equal(
        layer(tf.constant([2047.0], tf.float16)), layer(tf.constant([2047]))
    )


def test_a_sequential_model_without_an_input_trains() -> None:
    model = keras.Sequential([Embedding(7, 2), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(LazyAdam(0.1), "mse")
    ids = np.array([[1, 2], [3, 6]])
    before = model.predict(ids, verbose=0)
    model.fit(ids, np.ones(2), verbose=0)
    assert np.all(model.predict(ids, verbose=0) != before)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32", "uint64"])
def test_ids_may_be_integers_that_a_gather_does_not_take(dtype: str) -> None:
    layer = Embedding(5, 3)
    rows = layer(tf.constant([4, 0], dtype))
    np.testing.assert_array_equal(rows, np.array(layer.embeddings)[[4, 0]])


def test_a_layer_may_be_shared() -> None:
    layer = Embedding(5, 2, "ones")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1, 2]))) + tf.reduce_sum(layer(tf.constant([2])))
    gradient = tape.gradient(loss, layer.embeddings.value)
    assert isinstance(gradient, tf.IndexedSlices)
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient)[:, 0], [0, 1, 2, 0, 0])
    assert len(layer.weights) == 1


def test_a_constraint_concerns_the_rows_that_moved_and_no_others() -> None:
    weights = np.array([[-1.0, 2.0], [-3.0, 4.0], [-5.0, 6.0]], np.float32)
    layer = Embedding(3, 2, keras.initializers.Constant(0.0), embeddings_constraint="non_neg")
    layer.build()
    layer.embeddings.assign(weights)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([0, 2, 0])))
    LazyAdam(0.1).apply([tape.gradient(loss, layer.embeddings.value)], [layer.embeddings])
    after = np.array(layer.embeddings)
    np.testing.assert_allclose(after[[0, 2]], [[0.0, 1.9], [0.0, 5.9]], rtol=1e-5)
    np.testing.assert_array_equal(after[1], weights[1])
