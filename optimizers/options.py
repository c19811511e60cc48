"""The options that every optimizer of rowstep has, checked before any state exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from rowstep.optimizers import arguments
from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = ["KERAS_OPTIONS", "TABLES", "StepOptions"]

TABLES = (r"(^|/)embeddings$",)
"""What a table's path looks like, if nothing else is said: that of an Embedding's weights."""
KERAS_OPTIONS = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)
"""Options that wrappers, callbacks and Keras itself look for as attributes of an optimizer."""
_STATE_DTYPES = {None: None, "float32": tf.float32, "bfloat16": tf.bfloat16}


@dataclass(frozen=True)
class StepOptions:
    """Hold the options of the step around the formula.

    Args:
        clipnorm: Largest norm of one variable's gradient.
        clipvalue: Largest absolute value of an element of a gradient. Applied before clipnorm.
        global_clipnorm: Largest joint norm of all gradients; not together with clipnorm.
        clip_before_sum: Clip as older optimizers did, before the gradients of a repeated row are
            summed. False measures the gradient that the formula sees.
        weight_decay: Share of the weights that each update takes away, times the learning rate,
            apart from the gradient: w = w - learning_rate * weight_decay * w. Of a sparse gradient
            only the rows present decay.
        use_ema: Whether to keep a moving average of the weights,
            average = ema_momentum * average + (1 - ema_momentum) * w. Rows that are absent are
            averaged when they come back, exactly.
        ema_momentum: Decay of the average, in [0, 1].
        ema_overwrite_frequency: Steps after which the weights become their average; costs
            O(V * D) then. None: only `finalize_variable_values` does it.
        loss_scale_factor: What the loss is multiplied by in `minimize`, `compute_gradients` and
            Keras 3's `scale_loss` and `fit`; the step divides gradients by it.
        gradient_accumulation_steps: Calls whose mean gradient makes one update, from 2 up. Costs
            memory for one more table, O(R * D) a call and a scan of V numbers an update.
        decay: Decay of the learning rate by time: learning_rate / (1 + decay * updates done).
        state_dtype: "float32" or "bfloat16": dtype of momentum and velocity of the tables.
        tables: Regular expressions, searched in the paths of variables: which ones are tables.
        stochastic_rounding: Whether weights and state in float16 and bfloat16 are rounded up or
            down at random, so that small steps are not lost.
        seed: What the random rounding starts from.
        check_finite: Whether a gradient with NaN or infinity is refused before anything moves.

    Compiled by XLA (jit_compile) the step still computes the same, but use_ema, idle_decay and
    gradient_accumulation_steps then cost O(V): XLA copies a variable that a condition may write,
    and pads rows whose number it cannot know.

    Raises:
        OptimizerArgumentError: an option does not fit.
    """

    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None
    clip_before_sum: bool = False
    weight_decay: float | None = None
    use_ema: bool = False
    ema_momentum: float = 0.99
    ema_overwrite_frequency: int | None = None
    loss_scale_factor: float | None = None
    gradient_accumulation_steps: int | None = None
    decay: float = 0.0
    state_dtype: str | None = None
    tables: tuple[str, ...] = TABLES
    stochastic_rounding: bool = True
    seed: int = 0
    check_finite: bool = True

    @classmethod
    def checked(cls, where: str, options: Mapping[str, Any]) -> StepOptions:
        """Return options from keyword arguments, or raise OptimizerArgumentError."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise OptimizerArgumentError(
                    f"{where}: {name} is not an argument. Got {name}={value!r}. "
                    f"Options are {', '.join(known)}. Remove it or correct its spelling."
                )
        return cls(**_checked(where, {**options}))

    def config(self) -> dict[str, Any]:
        """Return the options as plain data."""
        return dataclasses.asdict(self) | {"tables": list(self.tables)}

    @property
    def slot_dtype(self) -> tf.DType | None:
        """The dtype of the moments of tables, or None for that of the arithmetic."""
        return _STATE_DTYPES[self.state_dtype]


def _checked(where: str, given: dict[str, Any]) -> dict[str, Any]:
    for name in ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"):
        if given.get(name) is not None:
            given[name] = arguments.positive(where, name, given[name])
    for name in ("clip_before_sum", "use_ema", "stochastic_rounding", "check_finite"):
        if name in given:
            given[name] = arguments.boolean(where, name, given[name])
    if given.get("clipnorm") is not None and given.get("global_clipnorm") is not None:
        raise OptimizerArgumentError(
            f"{where}: at most one of clipnorm and global_clipnorm may be set. "
            f"Got clipnorm={given['clipnorm']}, global_clipnorm={given['global_clipnorm']}. "
            "Keep one of them."
        )
    if given.get("weight_decay") is not None:
        given["weight_decay"] = arguments.non_negative(where, "weight_decay", given["weight_decay"])
    given["decay"] = arguments.non_negative(where, "decay", given.get("decay") or 0.0)
    if given.get("ema_momentum") is None:
        given.pop("ema_momentum", None)
    else:
        given["ema_momentum"] = arguments.share(where, "ema_momentum", given["ema_momentum"])
    for name, least in (("ema_overwrite_frequency", 1), ("gradient_accumulation_steps", 2)):
        if given.get(name) is not None:
            given[name] = arguments.count(where, name, given[name], least)
    if "seed" in given:
        given["seed"] = arguments.count(where, "seed", given["seed"], 0)
    if given.get("state_dtype") not in list(_STATE_DTYPES):  # a list asks no hash of the value
        raise OptimizerArgumentError(
            f"{where}: state_dtype must be a dtype for state. Got {given['state_dtype']!r}. "
            "Allowed are 'float32' and 'bfloat16'. Choose one of them, or leave it out."
        )
    if "tables" in given:
        given["tables"] = tuple(arguments.patterns(where, "tables", given["tables"]) or ())
    return given
