"""What AdamMultilr is meant to do, as cases for both Keras: capreolus has no test of it.

There, sparse gradients miss the bias correction, pattern_lrs=None fails at the first step, and
patterns that end in "$" match nothing.
"""

from __future__ import annotations

import json
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


def keras_variable(value: Any, name: str) -> keras.Variable:
    scope, _, last = name.rpartition("/")
    with keras.name_scope(scope or "top"):
        return keras.Variable(value, name=last)


class Side(NamedTuple):
    """Hold one Keras, its optimizer, and its way to make a variable."""

    keras: Any
    adam_multilr: Any
    variable: Callable[..., Any]


SIDES = {
    "keras": Side(keras, rowstep.optimizers.AdamMultilr, keras_variable),
    "tf_keras": Side(
        tf_keras,
        rowstep.optimizers.tf_keras.AdamMultilr,
        lambda value, name: tf.Variable(value, name=name),
    ),
}
BERT = {"patterns": ["bert/"], "lr": 0.01}


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest) -> Side:
    return SIDES[request.param]


def moved(
    side: Side,
    optimizer: Any,
    num_steps: int,
    names: tuple[str, ...] = ("bert/kernel", "rank/kernel"),
    sparse: bool = False,
) -> np.ndarray:
    """Return how far each variable was moved by each step with gradients of 1, [step, variable]."""
    variables = [side.variable(np.zeros((2, 1), np.float32), name) for name in names]
    gradient: Any = tf.ones((2, 1))
    if sparse:
        gradient = tf.IndexedSlices(gradient, tf.constant([1, 0]), tf.constant([2, 1], tf.int64))
    positions = [[0.0] * len(names)]
    for _ in range(num_steps):
        optimizer.apply_gradients([(gradient, variable) for variable in variables])
        positions.append([float(np.array(variable)[0, 0]) for variable in variables])
    return -np.diff(np.array(positions), axis=0)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_constant_gradients_move_each_group_by_its_rate(
    side: Side, sparse: bool, lazy: bool
) -> None:
    optimizer = side.adam_multilr(0.1, pattern_lrs=[BERT], lazy=lazy)
    steps = moved(side, optimizer, 3, sparse=sparse)
    np.testing.assert_allclose(steps, [[0.01, 0.1]] * 3, rtol=1e-4)


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_decay_concerns_the_rates_of_groups_too(side: Side, sparse: bool) -> None:
    optimizer = side.adam_multilr(0.1, pattern_lrs=[BERT], decay=1.0)
    steps = moved(side, optimizer, 3, sparse=sparse)
    expected = [[0.01, 0.1], [0.005, 0.05], [0.01 / 3, 0.1 / 3]]
    np.testing.assert_allclose(steps, expected, rtol=1e-4)


def test_a_group_may_have_a_schedule(side: Side) -> None:
    schedule = side.keras.optimizers.schedules.PolynomialDecay(0.05, 10, 0.0)
    groups = [{"patterns": ["bert/"], "lr": schedule}]
    steps = moved(side, side.adam_multilr(0.1, pattern_lrs=groups), 2)
    np.testing.assert_allclose(steps, [[0.05, 0.1], [0.045, 0.1]], rtol=1e-4)


def test_the_first_entry_with_a_match_wins(side: Side) -> None:
    groups = [
        {"patterns": ["nothing", "kernel"], "lr": 0.02},
        {"patterns": ["bert/"], "lr": 0.03},
    ]
    optimizer = side.adam_multilr(0.1, pattern_lrs=groups)
    steps = moved(side, optimizer, 1, ("bert/kernel", "bert/bias", "rank/bias"))
    np.testing.assert_allclose(steps, [[0.02, 0.03, 0.1]], rtol=1e-4)


@pytest.mark.parametrize("pattern", ["kernel$", "kernel:0$", "^bert/kern", "k.rnel"])
def test_patterns_are_searched_in_the_path_with_and_without_an_index(
    side: Side, pattern: str
) -> None:
    optimizer = side.adam_multilr(0.1, pattern_lrs=[{"patterns": [pattern], "lr": 0.01}])
    steps = moved(side, optimizer, 1, ("bert/kernel", "bert/kernels_norm_x"))
    assert steps[0][0] == pytest.approx(0.01, rel=1e-4)
    if pattern.endswith("$"):
        assert steps[0][1] == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("groups", [None, []], ids=["None", "empty"])
def test_without_groups_it_is_adam(side: Side, groups: Any) -> None:
    steps = moved(side, side.adam_multilr(0.1, pattern_lrs=groups), 3)
    np.testing.assert_allclose(steps, [[0.1, 0.1]] * 3, rtol=1e-4)
    assert side.adam_multilr(0.1, pattern_lrs=groups).get_config()["pattern_lrs"] == []


def test_lists_and_schedules_survive_json(side: Side) -> None:
    schedule = side.keras.optimizers.schedules.PolynomialDecay(0.05, 10, 0.0)
    groups = [BERT, {"patterns": ["a$", "b"], "lr": schedule}]
    optimizer = side.adam_multilr(schedule, pattern_lrs=groups, decay=0.5, clipnorm=1.0)
    config = json.loads(json.dumps(side.keras.optimizers.serialize(optimizer)))
    copy = side.keras.optimizers.deserialize(config)
    assert copy.get_config() == optimizer.get_config()
    names = ("bert/x", "rank/a", "rank/c")
    np.testing.assert_array_equal(moved(side, copy, 2, names), moved(side, optimizer, 2, names))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"patterns": "bert/", "lr": 0.01}], r"Got the string 'bert/'. Write \['bert/'\]"),
        ([{"pattern": ["bert/"], "lr": 0.01}], "must have the keys 'patterns' and 'lr'"),
        ([{"patterns": ["bert/"]}], "must have the keys 'patterns' and 'lr'"),
        ([{"patterns": [], "lr": 0.01}], "patterns must not be empty"),
        ([{"patterns": ["("], "lr": 0.01}], "must be a list of regular expressions"),
        ([BERT, {"patterns": ["a"], "lr": -1.0}], r"pattern_lrs\[1\]: learning_rate must not"),
    ],
    ids=["string", "other key", "no rate", "no pattern", "no expression", "negative"],
)
def test_entries_that_cannot_be_meant_are_refused(side: Side, groups: Any, message: str) -> None:
    with pytest.raises(OptimizerArgumentError, match=message):
        side.adam_multilr(0.1, pattern_lrs=groups)


def test_a_callback_sets_the_rate_of_a_group(side: Side) -> None:
    def freeze(epoch: int, logs: Any) -> None:
        if epoch == 1:
            model.optimizer.set_group_learning_rate(0, 0.0)

    layers, rng = side.keras.layers, np.random.default_rng(0)
    inputs = side.keras.Input((3,))
    kernel = side.keras.initializers.Ones()
    bert = layers.Dense(2, kernel_initializer=kernel, name="bert")(inputs)
    model = side.keras.Model(inputs, layers.Dense(1, kernel_initializer=kernel, name="rank")(bert))
    model.compile(side.adam_multilr(0.1, pattern_lrs=[BERT]), "mse")
    after: list[list[np.ndarray]] = []
    callback = side.keras.callbacks.LambdaCallback(
        on_epoch_begin=freeze, on_epoch_end=lambda epoch, logs: after.append(model.get_weights())
    )
    features, labels = rng.normal(size=(8, 3)), np.zeros((8, 1))
    model.fit(features, labels, epochs=2, verbose=0, callbacks=[callback])
    np.testing.assert_array_equal(after[0][0], after[1][0])
    assert np.all(after[0][2] != after[1][2])
    np.testing.assert_allclose(np.abs(after[0][0] - 1.0), 0.01, rtol=1e-3)
