"""Checks of constructor arguments, all before any state exists."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = [
    "LiveRate",
    "beta",
    "boolean",
    "count",
    "hyper",
    "learning_rate",
    "non_negative",
    "patterns",
    "positive",
    "share",
]


class LiveRate:
    """Read a learning rate from a tf.Variable that belongs to someone else, at every step."""

    def __init__(self, source: tf.Variable) -> None:
        self.source = source

    def __call__(self) -> tf.Tensor:
        """Return what the variable holds now."""
        return tf.convert_to_tensor(self.source)


def learning_rate(where: str, value: Any, schedule_type: type) -> Any:
    """Return a learning rate as Keras takes it: a float, a schedule or a callable.

    Integers, NumPy numbers and scalar tensors become floats; a tf.Variable is read at every step.
    """
    if isinstance(value, tf.Variable):
        return LiveRate(value)
    if tf.is_tensor(value) and not hasattr(value, "numpy"):
        raise OptimizerArgumentError(
            f"{where}: learning_rate must have a value outside of a graph. Got {value!r}. "
            "Pass a tf.Variable, a schedule, or a callable without arguments."
        )
    if isinstance(value, schedule_type):
        return value
    if any(kind.__name__ == "LearningRateSchedule" for kind in type(value).__mro__):
        raise OptimizerArgumentError(
            f"{where}: a schedule must be of the same Keras as the optimizer. "
            f"Got {type(value).__module__}.{type(value).__qualname__}. "
            f"Use {schedule_type.__module__.split('.')[0]}.optimizers.schedules."
        )
    return value if callable(value) else non_negative(where, "learning_rate", value)


def hyper(where: str, name: str, value: Any) -> Any:
    """Return beta_1, beta_2 or epsilon: a checked float, or a callable that is asked each step.

    An epsilon of None is Keras' default one, as it was in older optimizers.
    """
    if isinstance(value, tf.Variable):
        return LiveRate(value)
    if name == "epsilon" and value is None:
        return float(keras.config.epsilon())
    if callable(value):
        return value
    return (non_negative if name == "epsilon" else beta)(where, name, value)


def beta(where: str, name: str, value: Any) -> float:
    """Return the decay of a moment as a float in [0, 1)."""
    number = _number(where, name, value)
    if not 0.0 <= number < 1.0:
        raise OptimizerArgumentError(
            f"{where}: {name} must lie in [0, 1). Got {value!r}. "
            "Usual is 0.9 for beta_1 and 0.999 for beta_2. Correct the value."
        )
    return number


def positive(where: str, name: str, value: Any) -> float:
    """Return a finite float above zero."""
    number = _number(where, name, value)
    if not number > 0.0:
        raise OptimizerArgumentError(
            f"{where}: {name} must be above 0. Got {value!r}. "
            "Any finite positive number is allowed. Correct the value."
        )
    return number


def non_negative(where: str, name: str, value: Any) -> float:
    """Return a finite float of zero or more."""
    number = _number(where, name, value)
    if number < 0.0:
        raise OptimizerArgumentError(
            f"{where}: {name} must not be negative. Got {value!r}. "
            "Any finite number from 0 up is allowed. Correct the value."
        )
    return number


def share(where: str, name: str, value: Any) -> float:
    """Return a float in [0, 1]."""
    number = _number(where, name, value)
    if not 0.0 <= number <= 1.0:
        raise OptimizerArgumentError(
            f"{where}: {name} must lie in [0, 1]. Got {value!r}. Correct the value."
        )
    return number


def count(where: str, name: str, value: Any, least: int) -> int:
    """Return an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise OptimizerArgumentError(
            f"{where}: {name} must be an integer from {least} up. Got {value!r}. "
            "Correct the value, or leave it out."
        )
    return int(value)


def boolean(where: str, name: str, value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool | np.bool_):
        raise OptimizerArgumentError(
            f"{where}: {name} must be True or False. Got {value!r}. Correct the value."
        )
    return bool(value)


def patterns(where: str, name: str, value: Iterable[str] | None) -> list[str] | None:
    """Return a list of regular expressions, or None where none was given.

    A plain string is refused: taken as a list it would be one pattern a character.
    """
    if value is None:
        return None
    if isinstance(value, str):
        raise OptimizerArgumentError(
            f"{where}: {name} must be a list of regular expressions. Got the string {value!r}. "
            f"Write [{value!r}]."
        )
    if not isinstance(value, Iterable):
        raise OptimizerArgumentError(
            f"{where}: {name} must be a list of regular expressions. Got {value!r}. "
            "Pass a list of strings."
        )
    result = list(value)
    for pattern in result:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise OptimizerArgumentError(
                f"{where}: {name} must be a list of regular expressions. "
                f"Got {pattern!r} ({error}). Escape its special characters."
            ) from None
    return result


def _number(where: str, name: str, value: Any) -> float:
    try:
        # bool is an int to Python, and True as a rate is always a mistake.
        number = math.nan if isinstance(value, bool | np.bool_ | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise OptimizerArgumentError(
            f"{where}: {name} must be a finite number. Got {value!r}. Correct the value."
        )
    return number
