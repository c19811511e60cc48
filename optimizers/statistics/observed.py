"""What there is to look at: the variables that an optimizer trains, their slots, their names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from rowstep.optimizers import state
from rowstep.optimizers.options import TABLES
from rowstep.optimizers.variables import (
    matches,
    native_variable,
    variable_path,
    variables_by_path,
)

__all__ = [
    "ObservedVariable",
    "PerVariable",
    "innermost",
    "is_shown",
    "largest_name",
    "observed_variables",
    "short_name",
    "slot_names",
    "variable_names",
]

PerVariable: TypeAlias = "bool | Collection[str]"
"""Whether variables have metrics of their own, or the names of those that have."""
_SHORT = {"momentum": "m", "velocity": "v"}
_LONGEST_NAME = 120
_REPEATED = re.compile(r"(?P<slot>.+?)(?P<number>#\d+)?")


@dataclass(frozen=True)
class ObservedVariable:
    """Hold a variable that an optimizer trains.

    Attributes:
        name: What it is called in the names of metrics.
        path: Its path; the second one of the same path ends in #2.
        weights: The variable.
        slots: Its slots of floating numbers, by the optimizer's own names.
        pending: Which rows wait in a sum of several calls' gradients, [V]; None if none can.
        is_table: Whether it is a table of rows.
    """

    name: str
    path: str
    weights: tf.Variable
    slots: Mapping[str, tf.Variable]
    pending: tf.Variable | None
    is_table: bool


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer that holds the slots: of a LossScaleOptimizer the inner one."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def observed_variables(optimizer: keras.optimizers.Optimizer) -> list[ObservedVariable]:
    """Return the variables of a built optimizer in the order in which it was built on them.

    Raises:
        StateMismatchError: the optimizer is not built.
    """
    optimizer = innermost(optimizer)
    slots = _slots_by_path(optimizer)
    options = getattr(optimizer, "_options", None)
    patterns = TABLES if options is None else options.tables
    result: list[ObservedVariable] = []
    names: set[str] = set()
    for path, variable in _trained(optimizer).items():
        name = _metric_name(path)
        while name in names:
            name += "_"
        names.add(name)
        native, own = native_variable(variable), slots.get(path, {})
        result.append(
            ObservedVariable(
                name,
                path,
                native,
                {slot: v for slot, v in own.items() if v.dtype.is_floating},
                own.get("pending"),
                matches(patterns, variable_path(variable)) and native.shape.rank > 1,
            )
        )
    return result


def variable_names(optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """Return the paths of an optimizer's variables by what metrics call them, largest first.

    A name is the path with "." for "/" and "_" for characters that MLflow does not take; a long
    one is cut and ends in a checksum.

    Raises:
        StateMismatchError: the optimizer is not built.
    """
    variables = observed_variables(optimizer)
    variables.sort(key=lambda variable: -variable.weights.shape.num_elements())
    return {variable.name: variable.path for variable in variables}


def slot_names(optimizer: keras.optimizers.Optimizer) -> dict[str, list[str]]:
    """Return the names of the slots of each variable, by the variable's path.

    Of all slots: also counters, which have no statistics.

    Raises:
        StateMismatchError: the optimizer is not built.
    """
    optimizer = innermost(optimizer)
    slots = _slots_by_path(optimizer)
    return {path: list(slots.get(path, ())) for path in _trained(optimizer)}


def is_shown(name: str, per_variable: PerVariable) -> bool:
    """Return whether the variable of this name has metrics of its own."""
    return per_variable if isinstance(per_variable, bool) else name in per_variable


def short_name(slot: str) -> str:
    """Return what metrics call a slot: m and v for the moments, others by their own names."""
    return _SHORT.get(slot, re.sub(r"[^\w.\-]", "_", slot, flags=re.ASCII))


def largest_name(slot: str) -> str:
    """Return what metrics call the largest element of a slot."""
    return "max" if slot == "velocity" else "absmax"  # a velocity has no sign


def _trained(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    return variables_by_path(getattr(optimizer, "_trainable_variables", ()))


def _slots_by_path(optimizer: keras.optimizers.Optimizer) -> dict[str, dict[str, tf.Variable]]:
    # rowstep keys a slot of "a/b" as "a/b/momentum", Keras as "a_b_momentum".
    stems: dict[str, str] = {}
    for path in _trained(optimizer):
        stems[f"{path}/"] = path
        stems[f"{path.replace('/', '_').replace(':', '_')}_"] = path
    slots: dict[str, dict[str, tf.Variable]] = {}
    for key, variable in state.state_variables(optimizer).items():
        ends = [match.end() for match in re.finditer("[/_]", key)]
        # The longest one that fits; a key without any is a counter, a rate or the user's own.
        stem = next((key[:end] for end in reversed(ends) if key[:end] in stems), None)
        match = _REPEATED.fullmatch(key[len(stem) :]) if stem is not None else None
        if stem is not None and match is not None:
            path = stems[stem] + (match["number"] or "")
            slots.setdefault(path, {})[match["slot"]] = native_variable(variable)
    return slots


def _metric_name(path: str) -> str:
    name = re.sub(r"[^\w.\-]", "_", path.replace("/", "."), flags=re.ASCII)
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
