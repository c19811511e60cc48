"""Arguments that cannot work are refused at construction, with a way out."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep import RowstepError
from rowstep.optimizers import LAMB, AdamMultilr, LazyAdam, OptimizerArgumentError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"momentum": 0.9}, "momentum is not an argument. Got momentum=0.9. Options are clipnorm,"),
    (
        {"clipnorm": 1.0, "global_clipnorm": 2},
        "at most one of clipnorm and global_clipnorm may be set. Got clipnorm=1.0, glo",
    ),
    ({"clipnorm": 0}, "clipnorm must be above 0. Got 0."),
    ({"clipvalue": -1.0}, "clipvalue must be above 0. Got -1.0."),
    ({"global_clipnorm": "1"}, "global_clipnorm must be a finite number. Got '1'."),
    ({"clip_before_sum": 1}, "clip_before_sum must be True or False. Got 1."),
    ({"use_ema": "yes"}, "use_ema must be True or False. Got 'yes'."),
    ({"ema_momentum": 1.5}, r"ema_momentum must lie in \[0, 1\]. Got 1.5."),
    ({"ema_overwrite_frequency": 0}, "ema_overwrite_frequency must be an integer from 1 up. Got 0"),
    ({"ema_overwrite_frequency": 1.5}, "ema_overwrite_frequency must be an integer from 1 up."),
    ({"loss_scale_factor": 0.0}, "loss_scale_factor must be above 0. Got 0.0."),
    ({"loss_scale_factor": np.nan}, "loss_scale_factor must be a finite number. Got nan."),
    (
        {"gradient_accumulation_steps": 1},
        "gradient_accumulation_steps must be an integer from 2 up. Got 1.",
    ),
    ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps must be an integer from"),
    ({"decay": -0.1}, "decay must not be negative. Got -0.1."),
    ({"state_dtype": "float16"}, "state_dtype must be a dtype for state. Got 'float16'. Allowed"),
    ({"state_dtype": ["bfloat16"]}, r"state_dtype must be a dtype for state. Got \['bfloat16'\]."),
    ({"tables": "items"}, r"tables must be a list of regular expressions. Got the string 'items'."),
    ({"tables": ["("]}, "tables must be a list of regular expressions. Got '\\('"),
    ({"tables": 3}, "tables must be a list of regular expressions. Got 3."),
    ({"stochastic_rounding": None}, "stochastic_rounding must be True or False. Got None."),
    ({"seed": -1}, "seed must be an integer from 0 up. Got -1."),
    ({"seed": 0.5}, "seed must be an integer from 0 up. Got 0.5."),
    ({"check_finite": "no"}, "check_finite must be True or False. Got 'no'."),
    ({"beta_1": 1.0}, r"beta_1 must lie in \[0, 1\). Got 1.0."),
    ({"beta_2": -0.1}, r"beta_2 must lie in \[0, 1\). Got -0.1."),
    ({"epsilon": -1e-8}, "epsilon must not be negative. Got -1e-08."),
    ({"learning_rate": -1.0}, "learning_rate must not be negative. Got -1.0."),
    ({"learning_rate": float("nan")}, "learning_rate must be a finite number. Got nan."),
    ({"learning_rate": True}, "learning_rate must be a finite number. Got True."),
]
OWN: list[tuple[Any, dict[str, Any], str]] = [
    (
        LazyAdam,
        {"amsgrad": True},
        r"amsgrad must be False. Got True. .* Use AdamMultilr\(amsgrad=True, lazy=True\).",
    ),
    (LazyAdam, {"weight_decay": -1.0}, "weight_decay must not be negative. Got -1.0."),
    (AdamMultilr, {"weight_decay": "a"}, "weight_decay must be a finite number. Got 'a'."),
    (
        LAMB,
        {"weight_decay": 0.01},
        "weight_decay is not an argument. Got 0.01. .* Use weight_decay_rate.",
    ),
    (LAMB, {"weight_decay_rate": -0.01}, "weight_decay_rate must not be negative. Got -0.01."),
    (
        LazyAdam,
        {"bias_correction": "rows"},
        "bias_correction must say what t counts. Got 'rows'. Allowed are steps, visits.",
    ),
    (LazyAdam, {"idle_decay": 1}, "idle_decay must be True or False. Got 1."),
    (LazyAdam, {"row_velocity": "a"}, "row_velocity must be True or False. Got 'a'."),
    (LAMB, {"row_velocity": None}, "row_velocity must be True or False. Got None."),
    (LAMB, {"row_trust_ratio": 2}, "row_trust_ratio must be True or False. Got 2."),
    (
        LAMB,
        {"trust_ratio_clip": (2, 1)},
        r"trust_ratio_clip must be \(lowest, highest\). Got \(2, 1",
    ),
    (LAMB, {"trust_ratio_clip": (-1, 1)}, "trust_ratio_clip must not be negative. Got -1."),
    (LAMB, {"trust_ratio_clip": (1, 2, 3)}, "trust_ratio_clip must be"),
    (LAMB, {"trust_ratio_clip": 10.0}, "trust_ratio_clip must be"),
    (AdamMultilr, {"amsgrad": "a"}, "amsgrad must be True or False. Got 'a'."),
    (AdamMultilr, {"lazy": 0}, "lazy must be True or False. Got 0."),
]


@pytest.mark.parametrize(
    ("maker", "arguments", "message"),
    [(maker, *case) for case in REFUSED for maker in (LazyAdam, LAMB, AdamMultilr)] + OWN,
    ids=lambda value: (
        next(iter(value)) if isinstance(value, dict) else getattr(value, "__name__", "")
    ),
)
def test_arguments_that_cannot_work_are_refused(
    maker: type[keras.optimizers.Optimizer], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptimizerArgumentError, match=f"^{maker.__name__}: {message}") as caught:
        maker(**arguments)
    assert isinstance(caught.value, RowstepError) and isinstance(caught.value, ValueError)


def test_clipvalue_goes_together_with_either_norm() -> None:
    for norm in ("clipnorm", "global_clipnorm"):
        optimizer = LazyAdam(clipvalue=0.5, **{norm: 1.0})
        assert optimizer.get_config()["clipvalue"] == 0.5
        assert optimizer.get_config()[norm] == 1.0


def test_no_epsilon_is_the_default_of_keras() -> None:
    for maker in (LazyAdam, LAMB, AdamMultilr):
        assert maker(epsilon=None).get_config()["epsilon"] == keras.config.epsilon()


@pytest.mark.parametrize("option", ["state_dtype", "row_velocity"])
def test_options_of_tables_need_a_table(option: str) -> None:
    value = {"state_dtype": "bfloat16", "row_velocity": True}[option]
    kernel = keras.Variable(np.ones((4, 2), np.float32), name="kernel")
    with pytest.raises(
        OptimizerArgumentError, match=f"LazyAdam: {option} concerns tables.* Got kernel, of which"
    ):
        LazyAdam(**{option: value}).build([kernel])
    optimizer = LazyAdam(**{option: value}, tables=["^kern"])
    optimizer.build([kernel])
    velocity = optimizer.get_slot(kernel, "velocity")
    assert (velocity.dtype, velocity.shape) != ("float32", (4, 2))


def test_tables_are_found_by_the_patterns() -> None:
    with keras.name_scope("items"):
        items = keras.Variable(np.ones((4, 2), np.float32), name="embeddings")
    other = keras.Variable(np.ones((4, 2), np.float32), name="lookup_embeddings_norm")
    optimizer = LazyAdam(state_dtype="bfloat16")
    optimizer.build([items, other])
    assert optimizer.get_slot(items, "momentum").dtype == "bfloat16"
    assert optimizer.get_slot(other, "momentum").dtype == "float32"


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
