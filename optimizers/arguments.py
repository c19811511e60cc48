"""Checks of constructor arguments, all before any state exists."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = ["beta", "clips", "learning_rate", "non_negative", "patterns", "positive", "refuse"]

# What Keras offers and these optimizers do not: the value that means "off", and what to do instead.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "amsgrad": (
        (None, False),
        "A running maximum of the second moment has no lazy form. Leave it out",
    ),
    "weight_decay": (
        (None,),
        "Keras would decay the whole table at every step. Use Embedding(row_l2=...) to decay the "
        "rows of the batch, or LAMB(weight_decay_rate=...)",
    ),
    "use_ema": (
        (None, False),
        "Keras would average the whole table at every step. Average the saved weights instead",
    ),
    "ema_momentum": ((None, 0.99), "It needs use_ema. Leave it out"),
    "ema_overwrite_frequency": ((None,), "It needs use_ema. Leave it out"),
    "gradient_accumulation_steps": (
        (None,),
        "Keras would keep a dense sum of the table's size. Use a larger batch",
    ),
    "loss_scale_factor": (
        (None,),
        "State is float32 here, also for float16 variables. Leave it out, or scale loss and "
        "gradients in the training step",
    ),
}


def refuse(where: str, arguments: Mapping[str, Any]) -> None:
    """Raise OptimizerArgumentError for arguments that are unknown or would touch whole tables.

    Values that mean "off" pass, so that configs written by Keras load.
    """
    for name, value in arguments.items():
        if name not in _REFUSED:
            raise OptimizerArgumentError(
                f"{where}: {name} is not an argument. Got {name}={value!r}. "
                "Remove it or correct its spelling."
            )
        off, advice = _REFUSED[name]
        if value not in off:
            raise OptimizerArgumentError(
                f"{where}: {name} is not supported. Got {value!r}. "
                f"Allowed is {off[-1]!r}. {advice}."
            )


def learning_rate(where: str, value: Any) -> Any:
    """Return a learning rate that Keras accepts: a float, a schedule or a callable.

    Integers, NumPy numbers and scalar tensors become floats.
    """
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule) or callable(value):
        return value
    return non_negative(where, "learning_rate", value)


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


def clips(where: str, **values: Any) -> dict[str, float | None]:
    """Return the clipping arguments as floats; at most one of them may be set."""
    given = {name: positive(where, name, v) for name, v in values.items() if v is not None}
    if len(given) > 1:
        raise OptimizerArgumentError(
            f"{where}: at most one way to clip may be set. Got {', '.join(given)}. "
            "Keep one of them."
        )
    return {name: given.get(name) for name in values}


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
