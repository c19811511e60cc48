"""What LAMB promises: a step as long as the weights, decay inside it, and exclusions that last."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LAMB, OptimizerArgumentError, reference

WEIGHTS = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def stepped(
    optimizer: LAMB, weights: Any, *gradients: Any, name: str = "kernel", dtype: str = "float32"
) -> np.ndarray:
    variable = keras.Variable(weights, dtype=dtype, name=name)
    for gradient in gradients:
        optimizer.apply([gradient], [variable])
    return np.array(variable)


def test_the_step_is_as_long_as_the_learning_rate_says_of_the_weights() -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 1e3):
        gradient = tf.constant(rng.normal(size=(2, 2)) * scale, tf.float32)
        after = stepped(LAMB(0.1), WEIGHTS, gradient)
        length = np.linalg.norm(after - WEIGHTS)
        np.testing.assert_allclose(length, 0.1 * np.linalg.norm(WEIGHTS), rtol=1e-3)


def test_a_trust_ratio_other_than_one_follows_the_reference() -> None:
    rng = np.random.default_rng(1)
    state = reference.new_state(WEIGHTS)
    optimizer = LAMB(0.1, weight_decay_rate=0.01)
    variable = keras.Variable(WEIGHTS, name="kernel")
    for t in range(1, 6):
        g = rng.normal(size=(2, 2))
        state = reference.lamb(state, g, t, learning_rate=0.1, weight_decay_rate=0.01)
        optimizer.apply([tf.constant(g, tf.float32)], [variable])
        np.testing.assert_allclose(np.array(variable), state[0], rtol=1e-5)


def test_published_numbers_of_three_sparse_steps() -> None:
    # The case and its numbers are those of the LAMB that TensorFlow's model garden tests.
    variable = keras.Variable([1.0, 1.0, 2.0], name="var0")
    gradient = tf.IndexedSlices(tf.constant([0.1, 0.1]), tf.constant([0, 2]), (3,))
    optimizer = LAMB()
    for first, last in [(0.99826795, 1.99826795), (0.9965374, 1.9965374), (0.99480835, 1.99480835)]:
        optimizer.apply([gradient], [variable])
        np.testing.assert_allclose(np.array(variable), [first, 1, last], atol=2e-6)


def test_published_numbers_of_three_dense_steps() -> None:
    variable = keras.Variable([1.0, 2.0], name="var0")
    optimizer = LAMB()
    for first in (0.99841886, 0.99683922, 0.99526108):
        optimizer.apply([tf.constant([0.1, 0.1])], [variable])
        assert np.array(variable)[0] == pytest.approx(first, abs=2e-6)


def test_repeated_rows_are_summed_and_then_all_is_dense() -> None:
    row_ids, row_grads = [1, 1, 0], np.array([[1.0, 3], [3, -1], [0.5, 0.5]])
    sparse = tf.IndexedSlices(tf.constant(row_grads, tf.float32), tf.constant(row_ids), (3, 2))
    weights = np.concatenate([WEIGHTS, [[5.0, 6.0]]])
    settings = {"learning_rate": 0.1, "weight_decay_rate": 0.02}
    state = reference.new_state(weights)
    g = reference.dense_gradient(row_ids, row_grads, (3, 2))
    state = reference.lamb(state, g, 1, **settings)
    state = reference.lamb(state, np.zeros((3, 2)), 2, **settings)
    empty = tf.IndexedSlices(tf.zeros((0, 2)), tf.zeros((0,), tf.int32), (3, 2))
    after = stepped(LAMB(**settings), weights, sparse, empty)
    np.testing.assert_allclose(after, state[0], rtol=1e-5)
    assert np.all(after[2] != weights[2]), "absent rows decay: LAMB is dense"


def test_weights_of_zero_take_a_step_of_the_learning_rate() -> None:
    after = stepped(LAMB(0.1), np.zeros(2, np.float32), tf.constant([3.0, -0.5]))
    np.testing.assert_allclose(after, [-0.1, 0.1], rtol=1e-4)


def test_a_zero_gradient_without_decay_moves_nothing() -> None:
    after = stepped(LAMB(0.1), WEIGHTS, tf.zeros((2, 2)))
    np.testing.assert_array_equal(after, WEIGHTS)


@pytest.mark.parametrize("weight_decay_rate", [0.01, 0.5])
def test_a_zero_gradient_shrinks_by_the_learning_rate_whatever_the_decay(
    weight_decay_rate: float,
) -> None:
    after = stepped(LAMB(0.1, weight_decay_rate=weight_decay_rate), WEIGHTS, tf.zeros((2, 2)))
    np.testing.assert_allclose(after, [[0.9, 1.8], [2.7, 3.6]], rtol=1e-6)


def test_norms_of_large_float16_variables_stay_finite() -> None:
    # The sum of squares, 810000, is above the largest float16.
    weights = np.full((300, 300), 3.0, np.float16)
    after = stepped(LAMB(0.1), weights, tf.ones((300, 300), tf.float16), dtype="float16")
    np.testing.assert_allclose(after.astype(np.float32), 2.7, rtol=2e-3)


def test_exclusions_are_regular_expressions_on_the_path() -> None:
    optimizer = LAMB(
        weight_decay_rate=0.1,
        exclude_from_weight_decay=["bias$", "^norm"],
        exclude_from_layer_adaptation=["gamma"],
    )
    assert not optimizer.decays("dense/bias")
    assert not optimizer.decays("norm/scale")
    assert optimizer.decays("dense/bias_kernel")
    assert optimizer.decays("layer/norm/scale")
    assert not optimizer.adapts("norm/gamma")
    assert optimizer.adapts("dense/bias")


def test_layer_adaptation_falls_back_to_the_decay_list_unless_it_is_empty() -> None:
    fallback = LAMB(exclude_from_weight_decay=["bias"])
    explicit = LAMB(exclude_from_weight_decay=["bias"], exclude_from_layer_adaptation=[])
    assert not fallback.adapts("dense/bias")
    assert explicit.adapts("dense/bias")


@pytest.mark.parametrize(
    ("decay_list", "adaptation_list", "settings"),
    [
        (["bias$"], None, {"weight_decay_rate": 0.0, "adapt": False}),
        (["bias$"], [], {"weight_decay_rate": 0.0, "adapt": True}),
        (None, ["bias$"], {"weight_decay_rate": 0.3, "adapt": False}),
        (["^bias"], [":0"], {"weight_decay_rate": 0.3, "adapt": True}),
    ],
)
def test_excluded_variables_are_updated_without_what_they_are_excluded_from(
    decay_list: list[str] | None, adaptation_list: list[str] | None, settings: dict[str, Any]
) -> None:
    optimizer = LAMB(
        0.1,
        weight_decay_rate=0.3,
        exclude_from_weight_decay=decay_list,
        exclude_from_layer_adaptation=adaptation_list,
    )
    with keras.name_scope("dense"):
        after = stepped(optimizer, WEIGHTS, tf.ones((2, 2)), name="bias")
    state = reference.new_state(WEIGHTS)
    state = reference.lamb(state, np.ones((2, 2)), 1, learning_rate=0.1, **settings)
    np.testing.assert_allclose(after, state[0], rtol=1e-5)


def test_both_exclusion_lists_survive_a_round_trip_through_the_config() -> None:
    for decay_list, adaptation_list in ((["a$"], ["b", "c"]), (["a"], []), (None, None)):
        optimizer = LAMB(
            weight_decay_rate=0.1,
            exclude_from_weight_decay=decay_list,
            exclude_from_layer_adaptation=adaptation_list,
        )
        config = optimizer.get_config()
        assert config["exclude_from_weight_decay"] == decay_list
        assert config["exclude_from_layer_adaptation"] == adaptation_list
        copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
        assert copy.get_config() == config


def test_a_string_is_not_taken_for_a_list_of_patterns() -> None:
    with pytest.raises(OptimizerArgumentError, match=r"Got the string 'bias'. Write \['bias'\]"):
        LAMB(exclude_from_weight_decay="bias")
    with pytest.raises(OptimizerArgumentError, match="must be a list of regular expressions"):
        LAMB(exclude_from_layer_adaptation=["("])
