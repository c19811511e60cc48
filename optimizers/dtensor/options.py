"""What the DTensor Adam can be told in two ways: clipping and averaging, by option or by keyword.

The first releases of the original took two option arguments and used neither; later ones take
keywords only. Here both say the same thing, and saying two different things is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from rowstep.optimizers import arguments
from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = ["EmaOption", "GradientsClipOption", "resolved_clips", "resolved_ema"]

Option = TypeVar("Option", "GradientsClipOption", "EmaOption")
_DEFAULT_MOMENTUM = 0.99


@dataclasses.dataclass(frozen=True)
class GradientsClipOption:
    """Say how gradients are clipped: in at most one of three ways.

    Args:
        clipnorm: Largest norm of the gradient of one variable, over all its shards.
        clipvalue: Largest absolute value of an element.
        global_clipnorm: Largest joint norm of the gradients of all variables.

    Raises:
        OptimizerArgumentError: two are set, or one is not a finite number above 0.
    """

    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        for name, value in given.items():
            number = arguments.positive("GradientsClipOption", name, value)
            object.__setattr__(self, name, number)
        if len(given) > 1:
            raise OptimizerArgumentError(
                "GradientsClipOption: at most one way to clip may be set. "
                f"Got {', '.join(given)}. Keep one of them."
            )


@dataclasses.dataclass(frozen=True)
class EmaOption:
    """Say that weights are averaged over the steps, and how.

        average = momentum * average + (1 - momentum) * weights

    Args:
        momentum: How much of the average stays at each step, in [0, 1].
        overwrite_frequency: Steps between two times that the weights are set to their average;
            None for never before `finalize_variable_values`.

    Raises:
        OptimizerArgumentError: a value is out of its range.
    """

    momentum: float = _DEFAULT_MOMENTUM
    overwrite_frequency: int | None = None

    def __post_init__(self) -> None:
        momentum = arguments.non_negative("EmaOption", "momentum", self.momentum)
        if momentum > 1.0:
            raise OptimizerArgumentError(
                f"EmaOption: momentum must lie in [0, 1]. Got {self.momentum!r}. "
                "Usual is 0.99. Correct the value."
            )
        object.__setattr__(self, "momentum", momentum)
        steps = self.overwrite_frequency
        if steps is not None and (
            not isinstance(steps, int) or isinstance(steps, bool) or steps < 1
        ):
            raise OptimizerArgumentError(
                "EmaOption: overwrite_frequency must be a whole number of steps from 1 up, or "
                f"None. Got {steps!r}. Correct the value."
            )


def resolved_clips(
    where: str,
    option: GradientsClipOption | Mapping[str, Any] | None,
    keywords: Mapping[str, Any],
) -> GradientsClipOption:
    """Return how to clip, said by an option, a mapping of its fields, or the keywords."""
    if option is None:
        return GradientsClipOption(**keywords)
    result = _as_option(where, "gradients_clip_option", GradientsClipOption, option)
    for name, value in keywords.items():
        if value is not None and value != getattr(result, name):
            raise _conflict(where, "gradients_clip_option", result, name, value)
    return result


def resolved_ema(
    where: str,
    option: EmaOption | Mapping[str, Any] | None,
    use_ema: bool,
    ema_momentum: float,
    ema_overwrite_frequency: int | None,
) -> EmaOption | None:
    """Return how to average, said by an option or the keywords; None for not at all.

    An option switches averaging on. A keyword left at its default gives way to the option.
    """
    if option is None:
        given = EmaOption(ema_momentum, ema_overwrite_frequency)
        return given if use_ema else None
    result = _as_option(where, "ema_option", EmaOption, option)
    if ema_momentum not in (_DEFAULT_MOMENTUM, result.momentum):
        raise _conflict(where, "ema_option", result, "ema_momentum", ema_momentum)
    if ema_overwrite_frequency not in (None, result.overwrite_frequency):
        name = "ema_overwrite_frequency"
        raise _conflict(where, "ema_option", result, name, ema_overwrite_frequency)
    return result


def _as_option(where: str, name: str, kind: type[Option], value: Any) -> Option:
    if isinstance(value, kind):
        return value
    fields = [field.name for field in dataclasses.fields(kind)]
    if isinstance(value, Mapping) and set(value) <= set(fields):
        return kind(**value)
    raise OptimizerArgumentError(
        f"{where}: {name} must be a {kind.__name__} or a mapping of its fields. Got {value!r}. "
        f"Its fields are {', '.join(fields)}. Correct the argument or leave it out."
    )


def _conflict(
    where: str, option_name: str, option: object, keyword: str, value: object
) -> OptimizerArgumentError:
    return OptimizerArgumentError(
        f"{where}: {option_name} and {keyword} must not contradict each other. "
        f"Got {option!r} and {keyword}={value!r}. Say it in one of the two places."
    )
