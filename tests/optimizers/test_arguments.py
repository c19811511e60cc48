"""Arguments that cannot work are refused at construction, with a way out."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep import RowstepError
from rowstep.optimizers import LAMB, LazyAdam, OptimizerArgumentError


@pytest.mark.parametrize("maker", [LazyAdam, LAMB])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"amsgrad": True}, "amsgrad is not supported. Got True. Allowed is False."),
        ({"weight_decay": 0.01}, "weight_decay is not supported. Got 0.01. Allowed is None."),
        ({"use_ema": True}, "use_ema is not supported. Got True."),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is not supported."),
        ({"loss_scale_factor": 8.0}, "loss_scale_factor is not supported."),
        ({"momentum": 0.9}, "momentum is not an argument. Got momentum=0.9."),
        ({"clipnorm": 1.0, "clipvalue": 1.0}, "at most one way to clip may be set. Got clipnorm,"),
        ({"clipnorm": 0}, "clipnorm must be above 0. Got 0."),
        ({"global_clipnorm": "1"}, "global_clipnorm must be a finite number. Got '1'."),
        ({"beta_1": 1.0}, r"beta_1 must lie in \[0, 1\). Got 1.0."),
        ({"beta_2": -0.1}, r"beta_2 must lie in \[0, 1\). Got -0.1."),
        ({"epsilon": -1e-8}, "epsilon must not be negative. Got -1e-08."),
        ({"epsilon": None}, "epsilon must be a finite number. Got None."),
        ({"learning_rate": -1.0}, "learning_rate must not be negative. Got -1.0."),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number. Got nan."),
        ({"learning_rate": True}, "learning_rate must be a finite number. Got True."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_work_are_refused(
    maker: type[keras.optimizers.Optimizer], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptimizerArgumentError, match=f"^{maker.__name__}: {message}") as caught:
        maker(**arguments)
    assert isinstance(caught.value, RowstepError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", [1, np.float32(0.5), np.float64(0.5), 0, lambda: 0.5])
def test_learning_rates_may_be_any_number_or_a_callable(value: Any) -> None:
    optimizer = LazyAdam(learning_rate=value)
    expected = value() if callable(value) else value
    assert float(optimizer.learning_rate) == float(expected)


def test_a_scalar_tensor_is_a_learning_rate() -> None:
    assert float(LazyAdam(tf.constant(0.25)).learning_rate) == 0.25


def test_the_config_holds_the_learning_rate_as_it_was_written() -> None:
    assert LazyAdam(0.001).get_config()["learning_rate"] == 0.001


def test_variables_that_are_not_floating_are_refused() -> None:
    counter = keras.Variable([1], dtype="int32", name="counter")
    with pytest.raises(OptimizerArgumentError, match=r"a floating dtype\. Got counter of int32"):
        LazyAdam().build([counter])


def test_a_loss_that_is_a_tensor_needs_its_tape() -> None:
    variable = keras.Variable([1.0], name="w")
    with pytest.raises(OptimizerArgumentError, match="needs the tape that recorded it"):
        LazyAdam().minimize(tf.constant(1.0), [variable])
