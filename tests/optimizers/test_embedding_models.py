"""The layer in graphs, under XLA, in functional models, and through saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import Embedding
from rowstep.optimizers.sparse_rows import sum_duplicate_rows_static

NUM_ROWS = 1_234
RAGGED = tf.ragged.constant([[3, 1], [], [3, 3, 9]], dtype=tf.int64)
FORMS = {
    "one id": (None, tf.constant([3, 1, 3], tf.int64)),
    "padded": (None, RAGGED.to_tensor(-1)),
    "ragged": (None, RAGGED),
    "padded bags": ("sqrtn", RAGGED.to_tensor(-1)),
    "ragged bags": ("mean", RAGGED),
    "sparse bags": ("mean", RAGGED.to_sparse()),
}


def looked_up(form: str, precision: str) -> tuple[Embedding, Any, Any]:
    """Return a layer, ids for it, and a function of ids that returns rows and gradient."""
    combiner, ids = FORMS[form]
    layer = Embedding(NUM_ROWS, 3, combiner=combiner, padding_id=-1, row_l2=0.1, dtype=precision)
    layer.build()

    def step(ids: Any) -> tuple[tf.Tensor, tf.IndexedSlices]:
        with tf.GradientTape() as tape:
            rows = layer(ids)
            rows = rows.flat_values if isinstance(rows, tf.RaggedTensor) else rows
            loss = tf.cast(tf.reduce_sum(rows**2), tf.float32) + layer.losses[-1]
        gradient = tape.gradient(loss, layer.embeddings.value)
        assert isinstance(gradient, tf.IndexedSlices)
        return rows, gradient

    return layer, ids, step


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_graph_gathers_from_the_table_and_never_reads_it(form: str, precision: str) -> None:
    layer, ids, step = looked_up(form, precision)
    eager_rows, eager_gradient = step(ids)
    function = tf.function(step)
    graph = function.get_concrete_function(ids).graph
    handle = graph.capture(layer.embeddings.value.handle)
    assert {op.type for op in handle.consumers()} - {"VariableShape"} == {"ResourceGather"}
    operations = [op for op in graph.get_operations() if op.type != "Const"]
    shapes = [out.shape.as_list() for op in operations for out in op.outputs if out.shape.rank]
    assert shapes and all(NUM_ROWS not in shape for shape in shapes)
    rows, gradient = function(ids)
    assert eager_rows.dtype == rows.dtype == layer.compute_dtype
    assert gradient.dtype == layer.variable_dtype
    np.testing.assert_array_equal(rows, eager_rows)
    np.testing.assert_array_equal(gradient.indices, eager_gradient.indices)


@pytest.mark.parametrize("form", FORMS)
def test_xla_gives_the_same_rows_and_a_gradient_that_can_be_summed(form: str) -> None:
    # An optimizer under XLA sums the gradient further: shapes that depend on ids would spoil it.
    _, ids, step = looked_up(form, "float32")

    def summed(ids: Any) -> tuple[tf.Tensor, tf.Tensor]:
        rows, gradient = step(ids)
        distinct, is_distinct = sum_duplicate_rows_static(gradient.indices, gradient.values)
        grads = tf.where(is_distinct[:, tf.newaxis], distinct.row_grads, 0.0)
        return rows, tf.math.unsorted_segment_sum(grads, distinct.row_ids, 20)

    rows, gradient = summed(ids)
    xla_rows, xla_gradient = tf.function(summed, jit_compile=True)(ids)
    np.testing.assert_allclose(xla_rows, rows, rtol=1e-6)
    np.testing.assert_allclose(xla_gradient, gradient, rtol=1e-5)
    assert set(np.flatnonzero(np.any(gradient, axis=1))) <= {1, 3, 9}


def pooled_model(**arguments: Any) -> keras.Model:
    ids = keras.Input((None,), dtype="int64", name="ids")
    weights = keras.Input((None,), name="weights")
    layer = Embedding(9, 3, embeddings_initializer="normal", name="items", **arguments)
    return keras.Model({"ids": ids, "weights": weights}, layer(ids, weights=weights))


INPUTS = {
    "ids": tf.constant([[3, 1, -1], [5, -1, -1]], tf.int64),
    "weights": tf.constant([[0.5, 2.0, 1.0], [1.0, 1.0, 1.0]]),
}


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_a_functional_model_has_weighted_bags_and_may_be_saved(
    tmp_path: Path, precision: str
) -> None:
    model = pooled_model(combiner="mean", padding_id=-1, row_l2=0.1, dtype=precision)
    assert model.output_shape == (None, 3)
    expected = model(INPUTS)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(INPUTS), expected)
    assert loaded.get_layer("items").get_config() == model.get_layer("items").get_config()
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_array_equal(served.serve(INPUTS), expected)


def test_every_argument_survives_saving(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "embeddings_initializer": keras.initializers.RandomNormal(stddev=0.1, seed=3),
        "embeddings_regularizer": keras.regularizers.L2(0.01),
        "embeddings_constraint": keras.constraints.MaxNorm(1.0, axis=-1),
        "activity_regularizer": keras.regularizers.L1(0.02),
        "mask_zero": True,
        "row_l2": 0.25,
        "padding_id": 0,
        "trainable": False,
        "dtype": "mixed_bfloat16",
        "name": "items",
    }
    layer = Embedding(5, 3, weights=np.ones((5, 3)), **arguments)
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").layers[0]
    assert loaded.get_config() == layer.get_config()
    config = keras.saving.deserialize_keras_object(layer.get_config())
    assert config.keys() >= {"input_dim", "output_dim", "combiner", *arguments}
    assert (config["row_l2"], config["padding_id"], config["mask_zero"]) == (0.25, 0, True)
    assert loaded.embeddings.row_constraint.get_config() == {"max_value": 1.0, "axis": -1}
    assert loaded.embeddings.regularizer is not None
    np.testing.assert_array_equal(loaded.embeddings, np.ones((5, 3)))


@pytest.mark.parametrize("combiner", [None, "sum"])
def test_a_functional_model_takes_ragged_ids(tmp_path: Path, combiner: str | None) -> None:
    ids = keras.Input((None,), dtype="int64", ragged=True)
    layer = Embedding(10, 3, combiner=combiner, name="items")
    output = layer(ids)
    assert output.ragged is (combiner is None)
    assert output.shape == ((None, None, 3) if combiner is None else (None, 3))
    model = keras.Model(ids, output)
    model.save(tmp_path / "model.keras")
    table = np.array(layer.embeddings)
    for loaded in (model, keras.models.load_model(tmp_path / "model.keras")):
        rows = loaded(RAGGED)
        if combiner is None:
            assert isinstance(rows, tf.RaggedTensor)
            np.testing.assert_array_equal(rows.flat_values, table[RAGGED.flat_values])
        else:
            expected = [table[3] + table[1], np.zeros(3), 2 * table[3] + table[9]]
            np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_what_learned_from_ragged_ids_serves_padded_ones(tmp_path: Path) -> None:
    ids = keras.Input((None,), dtype="int64", ragged=True)
    model = keras.Model(ids, Embedding(10, 3, combiner="mean", padding_id=-1)(ids))
    expected = model(RAGGED)
    model.export(tmp_path / "served", verbose=False)  # Keras gives it a dense signature
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(RAGGED.to_tensor(-1)), expected, rtol=1e-6)


def test_ragged_ids_of_more_axes_are_pooled_along_the_last() -> None:
    ids = tf.ragged.constant([[[1, 2], []], [[3]]])
    layer = Embedding(5, 3, combiner="sum")
    rows = layer(ids)
    table = np.array(layer.embeddings)
    assert rows.shape.as_list() == [2, None, 3]
    np.testing.assert_array_equal(rows.row_lengths(), [2, 1])
    np.testing.assert_allclose(rows.flat_values, [table[1] + table[2], np.zeros(3), table[3]])
    uniform = tf.RaggedTensor.from_row_lengths(tf.constant([[1, 2], [0, 3], [4, 4]]), [2, 1])
    pooled = layer(uniform)
    np.testing.assert_array_equal(pooled.row_lengths(), [2, 1])
    np.testing.assert_allclose(pooled.flat_values[2], 2 * table[4], rtol=1e-6)


def test_ragged_mask_follows_the_ids() -> None:
    layer = Embedding(10, 3, mask_zero=True)
    mask = layer.compute_mask(tf.ragged.constant([[0, 2], [3]]))
    assert mask.to_list() == [[False, True], [True]]


def test_a_functional_model_takes_sparse_ids() -> None:
    ids = keras.Input((None,), dtype="int64", sparse=True)
    model = keras.Model(ids, Embedding(10, 3, combiner="mean")(ids))
    table = np.array(model.layers[-1].embeddings)
    expected = [(table[3] + table[1]) / 2, np.zeros(3), (2 * table[3] + table[9]) / 3]
    # In a sparse tensor 0 is an id like any other where it is stored.
    np.testing.assert_allclose(model(RAGGED.to_sparse()), expected, rtol=1e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_trains_the_rows_of_the_bags_and_no_others(jit_compile: bool) -> None:
    layer = Embedding(10, 3, combiner="mean", padding_id=0)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
    before = np.array(layer.embeddings)
    model.fit(np.array([[4, 0, 0], [0, 0, 0], [4, 7, 0]]), np.ones((3, 1)), verbose=0)
    moved = np.any(np.array(layer.embeddings) != before, axis=1)
    np.testing.assert_array_equal(np.flatnonzero(moved), [4, 7])
