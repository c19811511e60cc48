"""What converters of optimizer state share: the variables, the checks, and the casts.

A converter renames and reorders; this module says whether what it found is the state of an
Adam or a LAMB on the given variables, and refuses it by name otherwise. NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from rowstep.optimizers.errors import OptimizerArgumentError, StateMismatchError
from rowstep.optimizers.state import listing
from rowstep.optimizers.variables import unique_keys, variable_path

__all__ = [
    "ROW_COUNTERS",
    "Array",
    "Target",
    "checked_state",
    "refuse",
    "slots_of",
    "stored_arrays",
    "targets",
]

Array: TypeAlias = "np.ndarray[Any, Any]"

ROW_COUNTERS = ("average_step", "last_step", "num_visits")
"""Slots of lazy optimizers that hold a step, or a number of steps, for each row."""

_HALF = ("float16", "bfloat16")
_SQUARES = ("velocity", "velocity_hat")


class Target(NamedTuple):
    """One variable that has state: its key, shape, and the names of two dtypes."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype of the variable; other systems hold their state in it."""

    @property
    def state_dtype(self) -> str:
        """Return the dtype of rowstep's state: float32, also for a variable of half precision."""
        return "float64" if self.dtype == "float64" else "float32"


def targets(where: str, variables: Iterable[Any]) -> list[Target]:
    """Return the variables a state is for, in order, by their state keys.

    Args:
        where: What an error names first.
        variables: Variables of any Keras, tf.Variables, or tuples (path, shape) or
            (path, shape, dtype); without a dtype it is float32.

    Raises:
        OptimizerArgumentError: there is no variable, or one is not of a floating dtype.
    """
    found = [_target(variable) for variable in variables]
    faults = [f"{path} of {dtype}" for path, _, dtype in found if not _is_float(dtype)]
    if faults or not found:
        raise OptimizerArgumentError(
            f"{where}: variables must be floating-point variables, at least one. "
            f"Got {listing(faults) or 'none'}. Pass variables of a model, or tuples (path, shape) "
            "or (path, shape, dtype), in the order in which the optimizer was given them."
        )
    by_key = unique_keys([target.path for target in found], found)
    return [target._replace(path=key) for key, target in by_key.items()]


def _target(variable: Any) -> Target:
    if isinstance(variable, tuple):
        path, shape, *dtype = variable
        return Target(str(path), tuple(shape), _dtype_name(*dtype) if dtype else "float32")
    return Target(variable_path(variable), tuple(variable.shape), _dtype_name(variable.dtype))


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    return str(getattr(dtype, "name", None) or np.dtype(dtype).name)


def _is_float(dtype: str) -> bool:
    return dtype in (*_HALF, "float32", "float64")


def checked_state(
    where: str, raw: Mapping[str, Any], variables: Sequence[Target], learning_rate: float | None
) -> dict[str, Array]:
    """Return raw arrays, which have their state keys already, as a state, or refuse all of them.

    Args:
        where: What an error names first.
        raw: iterations, perhaps learning_rate, and the same slots for each of the variables.
        variables: Whose slots they are.
        learning_rate: Put in place of the learning rate in raw, if there is one; None keeps it.

    Raises:
        StateMismatchError: something is not of the shape, kind or sign it must be.
    """
    faults: list[str] = []
    state = {"iterations": _iterations(raw["iterations"], faults)}
    if learning_rate is not None or "learning_rate" in raw:
        rate = raw["learning_rate"] if learning_rate is None else float(learning_rate)
        state["learning_rate"] = _learning_rate(rate, faults)
    by_path = {target.path: target for target in variables}
    for key, value in raw.items():
        if key not in ("iterations", "learning_rate"):
            target = by_path[key.rpartition("/")[0]]
            state[key] = _slot(key, value, target.shape, target.state_dtype, faults)
    if faults:
        refuse(where, "the state must fit the variables by shape, dtype and sign", faults)
    return state


def slots_of(
    where: str,
    state: Mapping[str, Any],
    variables: Sequence[Target],
    known: Sequence[str] = ("momentum", "velocity"),
) -> tuple[str, ...]:
    """Return which of the known slots a state has, after checking that it has nothing else.

    Row counters that all stand at the state's iterations say nothing that would be lost.

    Raises:
        StateMismatchError: a variable lacks a slot, or the state has one that the other system
            has no place for.
    """
    optional = {slot for slot in known if slot not in ("momentum", "velocity")}
    held = {key.rpartition("/")[2] for key in state if "/" in key}
    slots = tuple(slot for slot in known if slot not in optional or slot in held)
    needed = {f"{target.path}/{slot}" for target in variables for slot in slots}
    needed.add("iterations")
    faults = [f"no {key}" for key in sorted(needed - set(state))]
    extra = sorted(set(state) - needed - {"learning_rate"})
    faults += [f"unexpected {key}" for key in extra if not _tells_nothing(key, state, variables)]
    if faults:
        must = f"the state must have iterations and {', '.join(slots)} of each variable, no more"
        refuse(where, must, faults)
    return slots


def stored_arrays(
    where: str, state: Mapping[str, Any], variables: Sequence[Target], slots: Sequence[str]
) -> dict[str, Array]:
    """Return copies of a state's arrays as other systems hold them: in the variable's dtype.

    For a variable of half precision that rounds to the nearest, and takes digits away.

    Raises:
        StateMismatchError: an array does not fit, or is beyond what the variable's dtype holds.
    """
    faults: list[str] = []
    stored = {"iterations": _iterations(state["iterations"], faults)}
    if "learning_rate" in state:
        stored["learning_rate"] = _learning_rate(state["learning_rate"], faults)
    for target in variables:
        for slot in slots:
            key = f"{target.path}/{slot}"
            array = _slot(key, state[key], target.shape, target.state_dtype, faults)
            stored[key] = _narrowed(key, array, target.dtype, faults)
    if faults:
        refuse(where, "the state must fit the variables by shape, dtype and sign", faults)
    return stored


def _tells_nothing(key: str, state: Mapping[str, Any], variables: Sequence[Target]) -> bool:
    path, _, slot = key.rpartition("/")
    known = slot in ROW_COUNTERS and path in [target.path for target in variables]
    return known and bool(np.all(np.asarray(state[key]) == state.get("iterations")))


def refuse(where: str, must: str, faults: Sequence[str], instead: str = "") -> NoReturn:
    """Raise the error that names what does not fit."""
    raise StateMismatchError(
        f"{where}: {must}. Got {listing(list(faults), separator='; ')}. Nothing was converted. "
        + (instead or "Pass the variables that the state was made for, in the same order.")
    )


def _iterations(value: Any, faults: list[str]) -> Array:
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind not in "iu" or array < 0:
        faults.append(f"{_described(array)} as iterations, which is a scalar integer from 0 up")
        return np.zeros((), np.int64)
    return array.astype(np.int64)


def _learning_rate(value: Any, faults: list[str]) -> Array:
    array = np.asarray(value)
    if array.shape != () or not _is_float(array.dtype.name) or not math.isfinite(float(array)):
        faults.append(f"{_described(array)} as learning_rate, which is a scalar floating number")
        return np.zeros((), np.float32)
    return array.astype(np.float32)


def _slot(key: str, value: Any, shape: tuple[int, ...], dtype: str, faults: list[str]) -> Array:
    array = np.asarray(value)
    if array.shape != shape:
        faults.append(f"{key} of shape {array.shape} instead of {shape}")
    elif array.dtype.name != dtype and not (array.dtype.name in _HALF and dtype == "float32"):
        faults.append(f"{key} of dtype {array.dtype.name} instead of {dtype}")
    elif key.rpartition("/")[2] in _SQUARES and array.size and array.min() < 0:
        faults.append(f"{key} with negative numbers, which a mean of squares cannot have")
    else:
        return np.array(array, dtype)
    return np.zeros((), np.float32)


def _narrowed(key: str, array: Array, dtype: str, faults: list[str]) -> Array:
    if dtype not in _HALF:
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(dtype)
    if not np.array_equal(np.isfinite(narrow), np.isfinite(array)):
        faults.append(f"{key} with numbers that {dtype} cannot hold")
    return narrow


def _described(array: Array) -> str:
    return f"{array}" if array.shape == () else f"an array of shape {array.shape}"
