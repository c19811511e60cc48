"""Code that was written for keras.layers.Embedding works with the import switched."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import Embedding, OptimizerArgumentError


class Within(keras.constraints.Constraint):
    """Keep each element in [-0.1, 0.1]."""

    def __call__(self, w: Any) -> Any:
        return keras.ops.clip(w, -0.1, 0.1)


class FromTheFirst(keras.constraints.Constraint):
    """Measure from the first row."""

    def __call__(self, w: Any) -> Any:
        return w - w[:1]


TABLE = np.arange(15, dtype=np.float32).reshape(5, 3) / 10 - 0.4
IDS = np.array([[1, 0, 0], [4, 2, 0]])


def test_the_arguments_have_the_names_and_the_order_of_keras() -> None:
    stock = [
        p.name
        for p in inspect.signature(keras.layers.Embedding).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    ours = inspect.signature(Embedding).parameters
    assert stock == list(ours)[: len(stock)]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("row_l2", "combiner"))


@pytest.mark.parametrize("weights", [TABLE, [TABLE]])
def test_weights_are_the_table_to_start_from(weights: Any) -> None:
    np.testing.assert_array_equal(Embedding(5, 3, weights=weights).embeddings, TABLE)


@pytest.mark.parametrize("weights", [TABLE[:4], [TABLE, TABLE], [[["a"] * 3] * 5], TABLE[0]])
def test_weights_of_another_shape_are_refused(weights: Any) -> None:
    with pytest.raises(OptimizerArgumentError, match=r"weights must be a table .* shape \(5, 3\)"):
        Embedding(5, 3, weights=weights)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed_float16"])
def test_rows_and_gradient_are_those_of_keras(precision: str) -> None:
    ours = Embedding(5, 3, weights=TABLE, dtype=precision)
    stock = keras.layers.Embedding(5, 3, weights=TABLE, dtype=precision)
    results = []
    for layer in (ours, stock):
        with tf.GradientTape() as tape:
            rows = layer(IDS)
            loss = tf.reduce_sum(tf.square(rows))
        gradient = tape.gradient(loss, layer.trainable_variables[0].value)
        results.append((rows, gradient.dtype, tf.cast(tf.convert_to_tensor(gradient), tf.float32)))
    assert results[0][0].dtype == results[1][0].dtype
    assert results[0][1] == results[1][1]
    np.testing.assert_array_equal(*(tf.cast(rows, tf.float32) for rows, _, _ in results))
    np.testing.assert_array_equal(*(gradient for _, _, gradient in results))


def test_a_config_of_the_stock_layer_makes_the_same_layer() -> None:
    stock = keras.layers.Embedding(5, 3, mask_zero=True, embeddings_regularizer="l2", name="items")
    layer = Embedding.from_config(stock.get_config())
    assert (layer.name, layer.mask_zero) == ("items", True)
    assert layer.embeddings_regularizer.get_config() == stock.embeddings_regularizer.get_config()


def test_a_weights_file_of_the_stock_layer_loads(tmp_path: Path) -> None:
    models = [
        keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Flatten()])
        for layer in (keras.layers.Embedding(5, 3, weights=TABLE), Embedding(5, 3))
    ]
    models[0].save_weights(tmp_path / "stock.weights.h5")
    models[1].load_weights(tmp_path / "stock.weights.h5")
    np.testing.assert_array_equal(models[1](IDS), models[0](IDS))


def test_mask_zero_reaches_the_next_layer() -> None:
    layer = Embedding(5, 3, mask_zero=True, weights=TABLE)
    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.GlobalAveragePooling1D()(layer(ids)))
    expected = [TABLE[1], (TABLE[4] + TABLE[2]) / 2]
    np.testing.assert_allclose(model(IDS), expected, rtol=1e-6)
    mask = layer.compute_mask(IDS)
    np.testing.assert_array_equal(mask, IDS != 0)
    assert Embedding(5, 3).compute_mask(IDS) is None


def test_mask_zero_masks_and_still_looks_row_0_up() -> None:
    layer = Embedding(5, 3, mask_zero=True, weights=TABLE)
    with tf.GradientTape() as tape:
        rows = layer(IDS)
        loss = tf.reduce_sum(rows)
    np.testing.assert_array_equal(rows, TABLE[IDS])
    gradient = tape.gradient(loss, layer.embeddings.value)
    np.testing.assert_array_equal(gradient.indices, IDS.ravel())


def test_a_masked_step_is_that_of_keras() -> None:
    results = []
    for layer_class in (Embedding, keras.layers.Embedding):
        keras.utils.set_random_seed(5)
        layers = [layer_class(5, 3, mask_zero=True, weights=TABLE), keras.layers.LSTM(2)]
        model = keras.Sequential([keras.Input((3,), dtype="int64"), *layers])
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(IDS, np.ones((2, 2)), verbose=0)
        results.append([np.array(v) for v in model.trainable_variables])
    for ours, stock in zip(*results, strict=True):
        np.testing.assert_allclose(ours, stock, rtol=1e-6)
    assert not np.array_equal(results[0][0], TABLE)
    np.testing.assert_array_equal(results[0][0][0], TABLE[0])  # masked, thus without a gradient


def test_embeddings_regularizer_is_over_the_whole_table_and_says_so() -> None:
    layer = Embedding(5, 3, embeddings_regularizer=keras.regularizers.L2(0.5), weights=TABLE)
    with tf.GradientTape() as tape:
        layer(tf.constant([1]))
        loss = tf.add_n(layer.losses)
    assert float(loss) == pytest.approx(0.5 * np.sum(TABLE**2), rel=1e-5)
    gradient = tf.convert_to_tensor(tape.gradient(loss, layer.embeddings.value))
    np.testing.assert_allclose(gradient, TABLE, rtol=1e-6)
    assert layer.dense_arguments == ("embeddings_regularizer",)
    assert Embedding(5, 3, row_l2=0.5, embeddings_constraint="non_neg").dense_arguments == ()


@pytest.mark.parametrize(
    "constraint",
    [
        keras.constraints.MaxNorm(0.5, axis=-1),
        keras.constraints.UnitNorm(axis=1),
        keras.constraints.MinMaxNorm(0.2, 0.4, axis=-1),
        "non_neg",
        Within(),
    ],
)
def test_a_row_constraint_on_touched_rows_is_the_constraint_on_the_table(constraint: Any) -> None:
    layer = Embedding(5, 3, embeddings_constraint=constraint, weights=TABLE)
    table = layer.embeddings
    whole = np.array(table.constraint(table))
    assert not np.array_equal(whole, TABLE)
    row_ids = [1, 4]
    rows = table.row_constraint(tf.gather(table.value, row_ids))
    table.value.scatter_update(tf.IndexedSlices(rows, row_ids))
    np.testing.assert_allclose(np.array(table)[row_ids], whole[row_ids], rtol=1e-6)
    np.testing.assert_array_equal(np.array(table)[[0, 2, 3]], TABLE[[0, 2, 3]])
    layer.constrain_table()
    np.testing.assert_allclose(np.array(table)[[0, 2, 3]], whole[[0, 2, 3]], rtol=1e-6)


def test_without_a_constraint_the_table_has_none() -> None:
    layer = Embedding(5, 3, weights=TABLE)
    assert layer.embeddings.row_constraint is None
    layer.constrain_table()
    np.testing.assert_array_equal(layer.embeddings, TABLE)


def test_keras_own_optimizers_keep_the_constraint() -> None:
    layer = Embedding(5, 3, embeddings_constraint="non_neg", weights=TABLE)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.apply([tf.ones((5, 3))], [layer.embeddings])
    np.testing.assert_allclose(layer.embeddings, np.maximum(TABLE - 0.1, 0), rtol=1e-6)


@pytest.mark.parametrize(
    "constraint",
    ["unit_norm", "max_norm", keras.constraints.MinMaxNorm(0.0, 50.0), FromTheFirst()],
)
def test_a_constraint_across_rows_is_refused(constraint: Any) -> None:
    with pytest.raises(OptimizerArgumentError, match=r"each row by itself.*axis=-1"):
        Embedding(5, 3, embeddings_constraint=constraint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_rank": 4}, r"lora_rank is not supported\. Got 4"),
        ({"lora_alpha": 4}, r"lora_alpha is not supported\. Got 4"),
        ({"quantization_config": "int8"}, "quantization_config is not supported"),
        ({"dtype": "int8_from_float32"}, "dtype must not be quantized. Got int8_from_float32"),
        ({"sparse": True}, "sparse is not supported"),
        ({"embeddings_regularizer": 0.1}, r".* Keras regularizer\. Got 0.1.*row_l2=0.1"),
        ({"embeddings_constraint": np.sign}, r".* must be a keras\.constraints\.Constraint"),
        ({"combiner": "max"}, "combiner must be None or one of sum, mean, sqrtn. Got 'max'"),
        ({"padding_id": 1.0}, r"padding_id must be an integer or None\. Got 1.0"),
        ({"padding_id": True}, r"padding_id must be an integer or None\. Got True"),
        ({"padding_id": -1, "mask_zero": True}, r"padding_id must be 0 or None with mask_zero"),
    ],
)
def test_what_the_layer_cannot_do_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimizerArgumentError, match=f"Embedding: {message}"):
        Embedding(5, 3, **arguments)


def test_input_length_is_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="input_length is ignored") as warned:
        Embedding(5, 3, input_length=2)
    assert warned[0].filename == __file__
    Embedding(5, 3, input_length=None, sparse=False)  # as older configs have it


def test_quantizing_a_model_leaves_the_layer_as_it_is() -> None:
    layers = [Embedding(5, 3, weights=TABLE), keras.layers.Flatten(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,), dtype="int64"), *layers])
    with pytest.warns(UserWarning, match="quantize"):
        model.quantize("int8")
    assert layers[0].embeddings.dtype == "float32"
    np.testing.assert_array_equal(layers[0](IDS), TABLE[IDS])
