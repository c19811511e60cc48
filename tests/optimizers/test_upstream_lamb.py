"""The tests of the LAMBs that came before, as cases for both Keras; numbers are theirs.

The names in the docstrings are those of the Model Garden's lamb_test.py (tfm), of TensorFlow
Addons' (TFA) and of Keras'. Keras decays outside of the trust ratio, so of its tests only those
without weight decay hold here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import rowstep.optimizers
import rowstep.optimizers.tf_keras
from rowstep.optimizers import OptimizerArgumentError
from rowstep.optimizers.variables import native_variable


class Side(NamedTuple):
    """Hold one Keras, its optimizer, and its way to make a variable."""

    keras: Any
    lamb: Any
    variable: Callable[..., Any]


SIDES = {
    "keras": Side(
        keras,
        rowstep.optimizers.LAMB,
        lambda value, name="var", dtype="float32": keras.Variable(value, dtype=dtype, name=name),
    ),
    "tf_keras": Side(
        tf_keras,
        rowstep.optimizers.tf_keras.LAMB,
        lambda value, name="var", dtype="float32": tf.Variable(value, dtype=dtype, name=name),
    ),
}


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest) -> Side:
    return SIDES[request.param]


def array(variable: Any) -> np.ndarray:
    return np.array(variable).astype(np.float64)


def pair(side: Side, dtype: str = "float32") -> list[Any]:
    return [side.variable([1.0, 2.0], "var0", dtype), side.variable([3.0, 4.0], "var1", dtype)]


def gradients(dtype: str = "float32") -> list[tf.Tensor]:
    return [tf.constant([0.1, 0.1], dtype), tf.constant([0.01, 0.01], dtype)]


def stepped(side: Side, optimizer: Any, weights: Any, *grads: Any, dtype: str = "float32") -> Any:
    variable = side.variable(weights, "kernel", dtype)
    for gradient in grads:
        optimizer.apply_gradients([(tf.constant(gradient, dtype), variable)])
    return array(variable)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sparse_gradients(side: Side, dtype: str) -> None:
    """tfm and TFA test_sparse."""
    optimizer = side.lamb()
    variables = [
        side.variable([1.0, 1.0, 2.0], "var0", dtype),
        side.variable([3.0, 3.0, 4.0], "var1", dtype),
    ]
    slices = [
        tf.IndexedSlices(tf.constant([g, g], dtype), tf.constant([0, 2]), tf.constant([3]))
        for g in (0.1, 0.01)
    ]
    expected = [(0.99826795, 2.99587689), (0.9965374, 2.99175729), (0.99480835, 2.98764118)]
    for first, second in expected:
        optimizer.apply_gradients(zip(slices, variables, strict=True))
        np.testing.assert_allclose(array(variables[0]), [first, 1, first + 1], atol=2e-6)
        np.testing.assert_allclose(array(variables[1])[:2], [second, 3], atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_decay_of_the_learning_rate_with_weight_decay(side: Side, dtype: str) -> None:
    """tfm and TFA test_basic_with_learning_rate_decay."""
    variables = pair(side, dtype)
    optimizer = side.lamb(0.001, epsilon=1e-7, weight_decay_rate=0.01, decay=0.5)
    expected = [
        ([0.99842667, 1.99841109], [2.99648159, 3.99644743]),
        ([0.99737878, 1.99735283], [2.99413830, 3.99408139]),
        ([0.99659336, 1.99655963], [2.99238200, 3.99230804]),
    ]
    for first, second in expected:
        optimizer.apply_gradients(zip(gradients(dtype), variables, strict=True))
        np.testing.assert_allclose(array(variables[0]), first, atol=2e-6)
        np.testing.assert_allclose(array(variables[1]), second, atol=2e-6)


def test_a_schedule_of_inverse_time(side: Side) -> None:
    """tfm and TFA test_basic_with_learning_rate_inverse_time_decay."""
    schedule = side.keras.optimizers.schedules.InverseTimeDecay(0.001, 1, 0.5)
    variables, optimizer = pair(side), side.lamb(schedule)
    for first in (0.99841886, 0.99736577, 0.99657645):
        optimizer.apply_gradients(zip(gradients(), variables, strict=True))
        np.testing.assert_allclose(array(variables[0])[0], first, atol=2e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rate", [0.001, tf.constant(0.001)], ids=["number", "tensor"])
def test_dense_gradients(side: Side, rate: Any, compiled: bool) -> None:
    """tfm and TFA test_tensor_learning_rate, test_sharing and test_resource."""
    variables, optimizer = pair(side), side.lamb(rate)
    optimizer.build(variables)

    def one() -> None:
        optimizer.apply_gradients(zip(gradients(), variables, strict=True))

    def other() -> None:
        optimizer.apply_gradients(zip(gradients(), variables, strict=True))

    expected = [(0.99841886, 2.99646447), (0.99683922, 2.99293243), (0.99526108, 2.98940389)]
    for update, (first, second) in zip((one, other, one), expected, strict=True):
        (tf.function(update) if compiled else update)()
        np.testing.assert_allclose(array(variables[0]), [first, first + 1], atol=2e-6)
        np.testing.assert_allclose(array(variables[1])[0], second, atol=2e-6)
    assert int(optimizer.iterations) == 3


def test_a_mean_square_loss_is_minimized_with_weight_decay(side: Side) -> None:
    """TFA test_minimize_mean_square_loss_with_weight_decay."""
    goal = tf.constant([0.4, 0.2, -0.5])
    weights = side.variable([0.1, -0.2, -0.1], "w")
    optimizer = side.lamb(0.02, weight_decay_rate=0.01)
    optimizer.build([weights])

    @tf.function
    def step() -> None:
        optimizer.minimize(
            lambda: tf.reduce_mean((goal - native_variable(weights)) ** 2), [weights]
        )

    for _ in range(200):
        step()
    np.testing.assert_allclose(array(weights), goal, rtol=1e-2, atol=1e-2)


def test_variables_are_excluded_by_pattern(side: Side) -> None:
    """tfm and TFA test_exclude_weight_decay and test_exclude_layer_adaptation."""
    optimizer = side.lamb(0.01, weight_decay_rate=0.01, exclude_from_weight_decay=["var1"])
    assert optimizer.decays("var0")
    assert not optimizer.decays("var1") and not optimizer.decays("var1_weight")
    optimizer = side.lamb(0.01, exclude_from_layer_adaptation=["var1"])
    assert optimizer.adapts("var0")
    assert not optimizer.adapts("var1") and not optimizer.adapts("var1_weight")


def test_a_serialized_optimizer_comes_back_with_its_lists(side: Side) -> None:
    """tfm and TFA test_serialization and test_get_config; tfm's loses the lists."""
    optimizer = side.lamb(
        1e-4,
        weight_decay_rate=0.01,
        exclude_from_weight_decay=["var1"],
        exclude_from_layer_adaptation=["var2"],
    )
    config = side.keras.optimizers.serialize(optimizer)
    copy = side.keras.optimizers.deserialize(config)
    assert copy.get_config() == optimizer.get_config()
    assert not copy.decays("var1") and copy.decays("var2")
    assert not copy.adapts("var2") and copy.adapts("var1")


def test_the_name_that_addons_had_for_the_decay_is_answered(side: Side) -> None:
    """TFA test_weight_decay_rate_deprecation; here weight_decay_rate is the name."""
    with pytest.raises(OptimizerArgumentError, match=r"Use weight_decay_rate\."):
        side.lamb(weight_decay=0.01)


# --- Keras --------------------------------------------------------------------------------------


def test_a_single_step_takes_the_length_of_the_weights(side: Side) -> None:
    """Keras test_single_step."""
    after = stepped(side, side.lamb(0.5), [1.0, 2.0, 3.0, 4.0], [1.0, 6.0, 7.0, 2.0])
    np.testing.assert_allclose(after, [-0.3693, 0.6306, 1.6306, 2.6306], rtol=1e-3)


def test_the_golden_run_of_keras(side: Side) -> None:
    """Keras test_correctness_with_golden."""
    first, later = np.full(10, 0.01), np.arange(0.1, 1.1, 0.1)
    for num_steps, golden in enumerate([0.999, 0.9982, 0.9974, 0.9965, 0.9955], start=1):
        grads = [first, *[later] * (num_steps - 1)]
        after = stepped(side, side.lamb(epsilon=1e-7), np.ones(10), *grads)
        np.testing.assert_allclose(after, golden, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize(
    ("clip", "expected"), [({"clipnorm": 1.0}, 0.07071), ({"clipvalue": 1.0}, 0.1)], ids=str
)
def test_gradients_are_clipped_before_the_moments(
    side: Side, clip: dict[str, float], expected: float
) -> None:
    """Keras test_clip_norm and test_clip_value."""
    optimizer, variable = side.lamb(**clip), side.variable([1.0, 1.0])
    optimizer.apply_gradients([(tf.constant([100.0, 100.0]), variable)])
    np.testing.assert_allclose(optimizer.get_slot(variable, "m"), [expected] * 2, rtol=1e-4)


# --- what those tests lack ----------------------------------------------------------------------


def test_zero_weights_take_a_step_of_the_learning_rate(side: Side) -> None:
    after = stepped(side, side.lamb(0.1), np.zeros(2), [3.0, -0.5])
    np.testing.assert_allclose(after, [-0.1, 0.1], rtol=1e-4)


def test_a_zero_gradient_moves_nothing_without_decay_and_shrinks_with_it(side: Side) -> None:
    weights, zeros = [[1.0, 2.0], [3.0, 4.0]], np.zeros((2, 2))
    np.testing.assert_array_equal(stepped(side, side.lamb(0.1), weights, zeros), weights)
    after = stepped(side, side.lamb(0.1, weight_decay_rate=0.01), weights, zeros)
    np.testing.assert_allclose(after, [[0.9, 1.8], [2.7, 3.6]], rtol=1e-6)


def test_decay_alone_can_be_excluded(side: Side) -> None:
    settings = {"weight_decay_rate": 0.5, "exclude_from_weight_decay": ["kernel$"]}
    weights, gradient = [1.0, 2.0], [0.1, -0.3]
    plain = stepped(side, side.lamb(0.1), weights, gradient)
    excluded = stepped(
        side, side.lamb(0.1, **settings, exclude_from_layer_adaptation=[]), weights, gradient
    )
    np.testing.assert_array_equal(excluded, plain)
    # With None the list holds for both: a step of the learning rate, not of the weights' length.
    both = stepped(side, side.lamb(0.1, **settings), weights, gradient)
    np.testing.assert_allclose(both, [0.9, 2.1], rtol=1e-4)


def test_norms_of_a_large_float16_variable_stay_finite(side: Side) -> None:
    weights = np.full((300, 300), 3.0)
    after = stepped(side, side.lamb(0.1), weights, np.ones((300, 300)), dtype="float16")
    np.testing.assert_allclose(after, 2.7, rtol=2e-3)


def test_sparse_gradients_with_repetitions_equal_dense_ones(side: Side) -> None:
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, 4.0], [0.5, 0.5]]),
        tf.constant([2, 2, 0]),
        tf.constant([3, 2], tf.int64),
    )
    results = []
    for gradient in (slices, tf.convert_to_tensor(slices)):
        variable = side.variable(np.arange(1.0, 7.0).reshape(3, 2))
        optimizer = side.lamb(0.1, weight_decay_rate=0.1)
        for _ in range(2):
            optimizer.apply_gradients([(gradient, variable)])
        results.append(array(variable))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
