"""Arguments of the DTensor Adam: two ways to say a thing, and every mistake told."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import pytest
import tensorflow as tf

from rowstep.optimizers.dtensor import Adam, EmaOption, GradientsClipOption
from rowstep.optimizers.errors import OptimizerArgumentError


def test_the_positional_arguments_are_those_of_the_original() -> None:
    option = GradientsClipOption(clipvalue=0.5)
    ema = EmaOption(0.9, 3)
    optimizer = Adam(0.1, 0.8, 0.99, 1e-5, True, option, ema, "Named", None)
    config = optimizer.get_config()
    assert config["learning_rate"] == pytest.approx(0.1)
    assert (config["beta_1"], config["beta_2"], config["epsilon"]) == (0.8, 0.99, 1e-5)
    assert config["amsgrad"] and config["name"] == "Named" and config["mesh"] is None
    assert (config["clipvalue"], config["clipnorm"], config["global_clipnorm"]) == (0.5, None, None)
    assert config["use_ema"] and config["ema_momentum"] == 0.9
    assert config["ema_overwrite_frequency"] == 3


def test_defaults_are_those_of_the_original() -> None:
    config = Adam().get_config()
    assert config["learning_rate"] == pytest.approx(0.001)
    expected = {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
        "amsgrad": False,
        "name": "Adam",
        "use_ema": False,
        "ema_momentum": 0.99,
        "ema_overwrite_frequency": None,
        "clipnorm": None,
        "clipvalue": None,
        "global_clipnorm": None,
        "weight_decay": None,
        "adaptive_epsilon": False,
        "lazy": False,
        "mesh": None,
    }
    assert {key: config[key] for key in expected} == expected


def test_options_may_be_mappings_and_may_repeat_what_keywords_say() -> None:
    config = Adam(
        gradients_clip_option={"clipnorm": 1},
        clipnorm=1.0,
        ema_option={"momentum": 0.9},
        ema_momentum=0.9,
    ).get_config()
    assert config["clipnorm"] == 1.0 and config["use_ema"] and config["ema_momentum"] == 0.9


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EmaOption().momentum = 0.5  # type: ignore[misc]


def test_numbers_may_be_tensors_and_betas_callables() -> None:
    optimizer = Adam(tf.constant(0.1), tf.constant(0.5), lambda: 0.75)
    config = optimizer.get_config()
    assert config["learning_rate"] == pytest.approx(0.1)
    assert (config["beta_1"], config["beta_2"]) == (0.5, 0.75)
    assert Adam(lr=0.2).get_config()["learning_rate"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gradients_clip_option": GradientsClipOption(1.0), "clipnorm": 2.0}, "contradict"),
        ({"gradients_clip_option": GradientsClipOption(1.0), "clipvalue": 1.0}, "contradict"),
        ({"gradients_clip_option": {"norm": 1.0}}, "Its fields are clipnorm, clipvalue"),
        ({"gradients_clip_option": 1.0}, "must be a GradientsClipOption"),
        ({"gradients_clip_option": {"clipnorm": 1.0, "clipvalue": 1.0}}, "at most one way"),
        ({"clipnorm": 1.0, "global_clipnorm": 1.0}, "at most one way"),
        ({"clipnorm": 0.0}, "clipnorm must be above 0"),
        ({"ema_option": EmaOption(0.9), "ema_momentum": 0.8}, "contradict"),
        ({"ema_option": EmaOption(), "ema_overwrite_frequency": 2}, "contradict"),
        ({"ema_option": {"momentum": 1.5}}, "momentum must lie in [0, 1]"),
        ({"use_ema": True, "ema_momentum": -0.1}, "must not be negative"),
        ({"use_ema": True, "ema_overwrite_frequency": 0}, "whole number of steps"),
        ({"beta_1": 1.0}, "beta_1 must lie in [0, 1)"),
        ({"epsilon": -1.0}, "epsilon must not be negative"),
        ({"learning_rate": -0.1}, "learning_rate must not be negative"),
        ({"learning_rate": "fast"}, "must be a finite number"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"learning_rate": 0.1, "lr": 0.2}, "must not both be given"),
        ({"decay": 0.1}, "InverseTimeDecay"),
        ({"betas": (0.9, 0.99)}, "betas is not an argument"),
        ({"mesh": {"dim_names": ["a"]}}, "a mesh description must have"),
    ],
)
def test_a_bad_argument_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(OptimizerArgumentError) as caught:
        Adam(**arguments)
    assert words in str(caught.value)


def test_a_schedule_of_another_keras_is_refused() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    with pytest.raises(OptimizerArgumentError, match="same Keras"):
        Adam(schedule)


def test_a_beta_that_a_callable_puts_out_of_range_is_refused_at_the_step() -> None:
    optimizer, variable = Adam(0.1, lambda: 1.5), tf.Variable([1.0], name="w")
    with pytest.raises(OptimizerArgumentError, match="beta_1 must lie in"):
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    assert variable.numpy() == [1.0] and int(optimizer.iterations) == 0


def test_excluding_by_a_plain_string_is_refused_and_by_pattern_works() -> None:
    optimizer = Adam(0.1, weight_decay=0.5)
    with pytest.raises(OptimizerArgumentError, match="list of regular expressions"):
        optimizer.exclude_from_weight_decay(var_names="bias")
    optimizer.exclude_from_weight_decay(var_names=["bias$"])
    again = Adam.from_config(optimizer.get_config())
    kernel, bias = tf.Variable([2.0], name="kernel"), tf.Variable([2.0], name="bias")
    again.apply_gradients([(tf.constant([0.0]), kernel), (tf.constant([0.0]), bias)])
    assert kernel.numpy() == pytest.approx([1.9]) and bias.numpy() == [2.0]
