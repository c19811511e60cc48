"""The moving average of the weights: lazy by row, and yet that of all rows at every step."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import Embedding, LazyAdam, OptimizerArgumentError, reference_options

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("option_cases")
sys.path.pop(0)


def averaged(optimizer: Any, variables: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the average of every row, through what Keras' callback for it reads."""
    averages = optimizer._model_variables_moving_average
    return {n: np.array(average) for n, average in zip(variables, averages, strict=True)}


@pytest.mark.parametrize("maker", cases.MAKERS)
def test_the_average_is_that_of_all_rows_at_every_step(maker: str) -> None:
    optimizer, variables = cases.make(maker, **cases.EMA), cases.variables()
    gradients = cases.calls()
    for num_calls in range(1, len(gradients) + 1):
        cases.run(optimizer, variables, gradients[num_calls - 1 : num_calls])
        expected = cases.expected(maker, gradients[:num_calls], **cases.EMA)
        for name, average in averaged(optimizer, variables).items():
            cases.close(average, expected[name].average, 1e-6, f"{name}, step {num_calls}")


def test_it_equals_the_average_that_keras_keeps_of_the_same_weights() -> None:
    optimizer, variables = cases.make("lazy_adam", **cases.EMA), cases.variables()
    twins = cases.variables()
    stock = keras.optimizers.SGD(1.0, **cases.EMA)
    stock.build(list(twins.values()))
    for call in cases.calls():
        before = {name: np.array(variable) for name, variable in variables.items()}
        cases.run(optimizer, variables, [call])
        # Plain descent by what was taken from the weights brings the twins to the same place.
        taken = [tf.constant(before[name] - np.array(v)) for name, v in variables.items()]
        stock.apply(taken, list(twins.values()))
    optimizer.finalize_variable_values(list(variables.values()))
    stock.finalize_variable_values(list(twins.values()))
    for name, variable in variables.items():
        np.testing.assert_allclose(np.array(variable), np.array(twins[name]), rtol=1e-5, atol=1e-6)


def test_the_average_starts_from_the_weights_after_the_first_step() -> None:
    optimizer, variables = cases.make("lazy_adam", **cases.EMA), cases.variables()
    optimizer.build(list(variables.values()))
    for variable in variables.values():
        variable.assign(np.array(variable) + 100.0)  # loaded after the optimizer was built
    cases.run(optimizer, variables, cases.calls(1))
    for name, average in averaged(optimizer, variables).items():
        np.testing.assert_array_equal(average, np.array(variables[name]))


def test_the_average_may_start_from_the_weights_before_the_first_step() -> None:
    class OlderStart(LazyAdam):
        average_starts_at_first_step = False

    for accumulate in (None, 2):
        options = {**cases.EMA, "gradient_accumulation_steps": accumulate}
        optimizer, variables = OlderStart(cases.RATE, **options), cases.variables()
        cases.run(optimizer, variables, cases.calls())
        options |= {"average_starts_at_first_step": False}
        options["gradient_accumulation_steps"] = accumulate or 1
        expected = cases.expected("lazy_adam", cases.calls(), **options)
        cases.assert_follows(optimizer, variables, expected)


def test_finalizing_before_the_first_step_keeps_the_weights() -> None:
    optimizer, variables = cases.make("lazy_adam", **cases.EMA), cases.variables()
    optimizer.build(list(variables.values()))
    kernel = variables[cases.KERNEL]
    kernel.assign(np.full((2, 3), 5.0, np.float32))
    optimizer.finalize_variable_values([kernel])
    np.testing.assert_array_equal(np.array(kernel), np.full((2, 3), 5.0))


def test_finalizing_one_variable_leaves_the_others() -> None:
    optimizer, variables = cases.make("lazy_adam", **cases.EMA), cases.variables()
    cases.run(optimizer, variables, cases.calls())
    table, kernel = (np.array(variables[name]) for name in (cases.TABLE, cases.KERNEL))
    optimizer.finalize_variable_values([variables[cases.TABLE]])
    assert np.all(np.array(variables[cases.TABLE])[[1, 3, 5]] != table[[1, 3, 5]])
    np.testing.assert_array_equal(np.array(variables[cases.KERNEL]), kernel)
    # Rows that never moved are their own average, to the bit.
    absent = cases.ABSENT_ROWS
    np.testing.assert_array_equal(np.array(variables[cases.TABLE])[absent], table[absent])


def test_without_the_option_finalizing_does_nothing() -> None:
    optimizer, variables = cases.make("lazy_adam"), cases.variables()
    cases.run(optimizer, variables, cases.calls())
    before = np.array(variables[cases.KERNEL])
    optimizer.finalize_variable_values(list(variables.values()))
    np.testing.assert_array_equal(np.array(variables[cases.KERNEL]), before)
    assert not hasattr(optimizer, "_model_variables_moving_average")


@pytest.mark.parametrize("wrap", cases.WRAPS)
def test_weights_become_their_average_every_few_steps(wrap: str) -> None:
    # The timing of tf_keras' testMovingAverageOptimizer: momentum 0.5, every third step. Its
    # numbers are those of SGD, whose steps are known beforehand; here the reference says them.
    options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}
    start = {"kernel": np.array([2.0, 2.0])}
    optimizer, variables = cases.make("lazy_adam", **options), cases.variables(start)
    settings = cases.settings("lazy_adam", **options)
    gradients = [{"kernel": np.ones(2, np.float32)}] * 4
    for num_calls in range(1, 5):
        cases.run(optimizer, variables, gradients[:1], wrap)
        expected = reference_options.train(start, gradients[:num_calls], settings)["kernel"]
        np.testing.assert_allclose(np.array(variables["kernel"]), expected.w, rtol=1e-6)
    # Steps of a sixteenth: 2 - 1/16, 2 - 2/16, then the mean (1/4, 1/4, 1/2) of three, then on.
    third = 2 - (1 / 4 + 2 / 4 + 3 / 2) / 16
    np.testing.assert_allclose(expected.w, third - 1 / 16, rtol=1e-6)


def test_overwriting_reaches_rows_that_were_absent() -> None:
    options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    optimizer, variables = cases.make("lazy_adam", **options), cases.variables()
    gradients = cases.calls(2)
    gradients[1][cases.TABLE] = (np.array([2]), np.ones((1, 3), np.float32))
    cases.run(optimizer, variables, gradients)
    table = np.array(variables[cases.TABLE])
    expected = cases.expected("lazy_adam", gradients, **options)[cases.TABLE]
    np.testing.assert_allclose(table, expected.w, rtol=1e-6)
    # Row 1 moved in step 1 only and its average started there, so that nothing is left to average;
    # row 2 moved in step 2 only, and half of that is taken back.
    np.testing.assert_allclose(table[2], cases.weights()[cases.TABLE][2] - 0.5 * moved(), rtol=1e-4)


def moved() -> float:
    """Return the length of a row's first step if it is the optimizer's second."""
    return float(cases.RATE * np.sqrt(1 - 0.999**2) / (1 - 0.9**2) * 0.1 / np.sqrt(0.001))


def test_setting_the_step_counter_back_breaks_nothing() -> None:
    maker, options = cases.CASES["all_lazy"]
    optimizer, variables = cases.make(maker, **options), cases.variables()
    cases.run(optimizer, variables, cases.calls())
    state = optimizer.named_state()
    # As after ten thousand updates: rows that come back now were last seen in the future.
    late = {key: np.full_like(array, 10_000) for key, array in state.items() if "_step" in key}
    start = {"iterations": np.zeros_like(state["iterations"])}
    optimizer.load_named_state(state | late | start)
    cases.run(optimizer, variables, cases.calls())
    for array in [*optimizer.get_weights(), *(np.array(v) for v in variables.values())]:
        assert np.all(np.isfinite(array)) and np.abs(array).max() < 10_001
    for variable in variables.values():
        assert np.abs(np.array(variable)).max() < 10
        assert np.abs(np.array(optimizer.get_slot(variable, "momentum"))).max() < 10


def embedding_model() -> keras.Model:
    ids = keras.Input((2,), dtype="int32")
    layer = Embedding(8, 3, keras.initializers.RandomNormal(seed=1), name="items")
    hidden = keras.layers.Flatten()(layer(ids))
    output = keras.layers.Dense(1, kernel_initializer="ones", name="score")(hidden)
    return keras.Model(ids, output)


IDS = np.array([[0, 1], [1, 1], [3, 0], [5, 1]], np.int32)
TARGETS = np.array([[1.0], [0.0], [-1.0], [0.5]], np.float32)


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_kerass_callback_swaps_weights_and_averages_for_validation(swap_on_epoch: bool) -> None:
    model = embedding_model()
    model.compile(LazyAdam(0.1, use_ema=True, ema_momentum=0.5), "mse")
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(np.array(self.model.trainable_variables[0]))

    model.fit(
        IDS,
        TARGETS,
        batch_size=2,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(IDS, TARGETS),
        callbacks=[swap, Watch()],
    )
    plain = embedding_model()
    plain.compile(LazyAdam(0.1, use_ema=True, ema_momentum=0.5), "mse")
    plain.fit(IDS, TARGETS, batch_size=2, epochs=2, shuffle=False, verbose=0)
    # fit ends with the average in the weights, with the callback and without.
    for one, other in zip(model.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-4, atol=1e-6)
    # Validation after the last epoch saw just that.
    if not swap_on_epoch:
        np.testing.assert_allclose(seen[-1], np.array(model.trainable_variables[0]), rtol=1e-5)


def test_the_callback_is_refused_where_averages_are_wider_than_weights() -> None:
    variable = keras.Variable(np.ones(2), dtype="bfloat16", name="w")
    optimizer = LazyAdam(use_ema=True)
    optimizer.apply([tf.ones(2)], [variable])
    with pytest.raises(OptimizerArgumentError, match=r"of one dtype\. Got w of bfloat16"):
        hasattr(optimizer, "_model_variables_moving_average")
    optimizer.finalize_variable_values([variable])  # this is no swap


@pytest.mark.parametrize("momentum", [0.0, 0.9999, 1.0])
def test_extreme_momentums_follow_the_reference(momentum: float) -> None:
    options = {"use_ema": True, "ema_momentum": momentum}
    optimizer, variables = cases.make("lazy_adam", **options), cases.variables()
    cases.run(optimizer, variables, cases.calls())
    cases.assert_follows(
        optimizer, variables, cases.expected("lazy_adam", cases.calls(), **options), tolerance=1e-6
    )
