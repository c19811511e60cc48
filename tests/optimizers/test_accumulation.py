"""Several calls make one update, by their mean gradient, of the rows of all of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import Embedding

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("option_cases")
sys.path.pop(0)


@pytest.mark.parametrize("num_calls", [2, 3])
@pytest.mark.parametrize("maker", cases.MAKERS)
def test_micro_batches_make_the_step_of_the_whole_batch(maker: str, num_calls: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 6, size=(12, 2))
    targets = rng.normal(size=(12, 1)).astype(np.float32)
    models = []
    for accumulate in (None, num_calls):
        keras.utils.set_random_seed(1)
        layer = Embedding(8, 3, keras.initializers.RandomNormal(seed=1), name="items")
        inputs = keras.Input((2,), dtype="int64")
        output = keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs)))
        model = keras.Model(inputs, output)
        optimizer = cases.make(maker, gradient_accumulation_steps=accumulate)
        model.compile(optimizer, "mse")
        batch_size = 6 // (accumulate or 1)
        model.fit(ids, targets, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        models.append(model)
    for one, other in zip(models[0].weights, models[1].weights, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("maker", cases.MAKERS)
def test_nothing_moves_before_the_update_is_due(maker: str) -> None:
    optimizer = cases.make(maker, gradient_accumulation_steps=3)
    variables = cases.variables()
    cases.run(optimizer, variables, cases.calls(2))
    for name, variable in variables.items():
        np.testing.assert_array_equal(np.array(variable), cases.weights()[name].astype(np.float32))
        assert not np.any(optimizer.get_slot(variable, "velocity"))
    state = optimizer.named_state()
    assert np.any(state[f"{cases.TABLE}/accumulated"]) and int(state["iterations"]) == 2
    cases.run(optimizer, variables, cases.calls(3)[2:])
    state = optimizer.named_state()
    assert not np.any(state[f"{cases.TABLE}/accumulated"])
    assert not np.any(state[f"{cases.TABLE}/pending"])
    assert np.any(np.array(variables[cases.TABLE]) != cases.weights()[cases.TABLE])


@pytest.mark.parametrize("wrap", cases.WRAPS)
@pytest.mark.parametrize("maker", cases.MAKERS)
def test_a_variable_may_lack_a_gradient_in_some_of_the_calls(maker: str, wrap: str) -> None:
    options = {"gradient_accumulation_steps": 2}
    gradients = cases.calls(4)
    # The table never has one in the call that makes the update; the kernel has it then at last.
    del gradients[0][cases.KERNEL], gradients[1][cases.TABLE]
    del gradients[2][cases.KERNEL], gradients[3][cases.TABLE]
    optimizer, variables = cases.make(maker, **options), cases.variables()
    cases.run(optimizer, variables, gradients, wrap)
    cases.assert_follows(optimizer, variables, cases.expected(maker, gradients, **options))


@pytest.mark.parametrize("maker", cases.MAKERS)
def test_a_variable_without_any_gradient_stands_still(maker: str) -> None:
    options = {"gradient_accumulation_steps": 2}
    gradients = cases.calls(6)
    for call in gradients[2:4]:
        del call[cases.KERNEL]
    scale = keras.Variable(2.0, name="scale")
    optimizer, variables = cases.make(maker, **options), cases.variables()
    optimizer.build([*variables.values(), scale])
    cases.run(optimizer, variables, gradients)
    cases.assert_follows(optimizer, variables, cases.expected(maker, gradients, **options))
    optimizer.apply([tf.constant(1.0)], [scale])
    optimizer.apply([tf.ones((2, 3))], [variables[cases.KERNEL]])
    after = float(scale)
    assert after < 2.0
    for _ in range(2):
        optimizer.apply([tf.ones((2, 3))], [variables[cases.KERNEL]])
    assert float(scale) == after


def test_groups_take_their_schedule_at_the_same_count_as_the_main_rate() -> None:
    seen: dict[str, list[int]] = {"main": [], "group": []}

    class Recorder(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, step: Any) -> Any:
            seen[self.name].append(int(step))
            return tf.constant(0.1)

        def get_config(self) -> dict[str, Any]:
            return {"name": self.name}

    groups = [{"patterns": ["embeddings$"], "lr": Recorder("group")}]
    optimizer = cases.make(
        "adam_multilr",
        learning_rate=Recorder("main"),
        pattern_lrs=groups,
        gradient_accumulation_steps=2,
    )
    cases.run(optimizer, cases.variables(), cases.calls(4))
    assert seen["group"] == seen["main"] == [0, 1, 2, 3]


def test_clipping_measures_the_mean_and_not_its_parts() -> None:
    long, opposite = np.full((2, 3), 100.0, np.float32), np.full((2, 3), -99.0, np.float32)
    moments = []
    for before_sum in (False, True):
        optimizer = cases.make(
            "lazy_adam",
            gradient_accumulation_steps=2,
            clipnorm=10.0,
            clip_before_sum=before_sum,
        )
        kernel = cases.variables({"kernel": np.ones((2, 3))})
        cases.run(optimizer, kernel, [{"kernel": long}, {"kernel": opposite}])
        moments.append(np.array(optimizer.get_slot(kernel["kernel"], "m")))
    np.testing.assert_allclose(moments[0], 0.05, rtol=1e-5)
    np.testing.assert_allclose(moments[1], 0.0, atol=1e-6)
