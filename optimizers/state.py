"""Optimizer and model state as named arrays, for any Keras 3 optimizer.

State is keyed by name, so that a state that does not fit is refused by name, before anything is
assigned. The keys are

    iterations                  the step counter
    learning_rate               where the optimizer holds it as a variable, not as a schedule
    learning_rate/<group>       the same for the groups of AdamMultilr
    <variable path>/<slot>      one for each variable and slot of a rowstep optimizer
    <own variable path>         for other optimizers, without the leading "<optimizer name>/"

learning_rate is part of the state because callbacks change it in mid-training: a resumed run must
go on with the changed value. A state saved with a schedule has no such key, so it does not load
into an optimizer with a plain learning rate, nor the other way round.

`get_weights` and `set_weights` are the ordered view of the same state: iterations first, then the
slots in the order of `optimizer.variables`, without learning_rate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from rowstep.optimizers.errors import StateMismatchError
from rowstep.optimizers.variable_memory import (
    Array,
    PiecedArray,
    fill_variable,
    is_pieced,
    read_only_array,
    whole_array,
)
from rowstep.optimizers.variables import unique_keys, variables_by_path

__all__ = [
    "Array",
    "PiecedArray",
    "assign_arrays",
    "assign_list",
    "get_weights",
    "iter_arrays",
    "iter_named_state",
    "iter_named_variables",
    "listing",
    "load_named_state",
    "load_named_variables",
    "named_state",
    "named_variables",
    "refuse_misfits",
    "set_weights",
    "state_variables",
]

_MOST_NAMED = 8
_NUM_THREADS = 2
_RATE = re.compile(r"learning_rate(/\d+)?")


def state_variables(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Return the optimizer's variables by state key, iterations first.

    Raises:
        StateMismatchError: the optimizer is not built, so that it has no state yet.
    """
    _require_built(optimizer)
    if hasattr(optimizer, "state_variables"):
        return dict(optimizer.state_variables())
    names = []
    # Keras numbers unnamed optimizers ("adam_1") by how many were made before in the process;
    # a resumed process makes another number of them, so the name cannot be part of the key.
    for variable in optimizer.variables:
        if variable is optimizer.iterations:
            names.append("iterations")
        elif variable.path == f"{optimizer.name}/learning_rate":
            names.append("learning_rate")
        else:
            names.append(variable.path.removeprefix(f"{optimizer.name}/"))
    return unique_keys(names, optimizer.variables)


def named_state(optimizer: keras.optimizers.Optimizer) -> dict[str, Array]:
    """Return a copy of the optimizer's state by key.

    Raises:
        StateMismatchError: the optimizer is not built.

    Cost: one copy of the whole state. `iter_named_state` copies nothing on a CPU.
    """
    return {key: np.array(array) for key, array in iter_named_state(optimizer)}


def iter_named_state(optimizer: keras.optimizers.Optimizer) -> Iterator[tuple[str, Array]]:
    """Yield the optimizer's state by key as read-only arrays, without copying on a CPU.

    Use each array before the optimizer's next step, or copy it.

    Raises:
        StateMismatchError: the optimizer is not built.
    """
    return iter_arrays(state_variables(optimizer))


def load_named_state(optimizer: keras.optimizers.Optimizer, state: Mapping[str, Any]) -> None:
    """Assign a state by key, all of it or none.

    Args:
        optimizer: A built optimizer.
        state: Exactly the keys, shapes and dtypes that `named_state` returns; arrays, or
            PiecedArrays, which cost the memory of one piece.

    Raises:
        StateMismatchError: the optimizer is not built, or keys, shapes or dtypes do not fit. All
            misfits are named at once, and nothing has been assigned.
    """
    assign_arrays(f"{optimizer.name}.load_named_state", state_variables(optimizer), state)


def get_weights(optimizer: keras.optimizers.Optimizer) -> list[Array]:
    """Return copies of the optimizer's state as a list: iterations first, then the slots.

    The learning rate is not in the list.

    Raises:
        StateMismatchError: the optimizer is not built.
    """
    return [np.array(array) for _, array in iter_arrays(_ordered_state(optimizer))]


def set_weights(optimizer: keras.optimizers.Optimizer, weights: Sequence[Any]) -> None:
    """Assign a list as `get_weights` returns it, all of it or none.

    Works before the first step, once the optimizer is built. A list in another order is noticed
    where shapes or dtypes differ, or where a negative number lands in a second moment.

    Raises:
        StateMismatchError: the optimizer is not built, or the number of arrays, a shape or a dtype
            does not fit. Nothing has been assigned.
    """
    assign_list(f"{optimizer.name}.set_weights", _ordered_state(optimizer), weights)


def assign_list(
    where: str,
    variables: Mapping[str, Any],
    weights: Sequence[Any],
    assign: Callable[[Any, Array], object] | None = None,
) -> None:
    """Assign a list to variables in their order, all of it or none. See `assign_arrays`."""
    weights = list(weights)
    if len(weights) != len(variables):
        raise StateMismatchError(
            f"{where}: the list must have one array for each of {listing(list(variables))}. "
            f"Got {len(weights)} arrays where {len(variables)} are needed. "
            "Pass what get_weights of the same optimizer on the same model returned."
        )
    assign_arrays(where, variables, dict(zip(variables, weights, strict=True)), assign)


def named_variables(variables: Iterable[keras.Variable]) -> dict[str, Array]:
    """Return copies of variables, for example `model.variables`, by path."""
    return {key: np.array(array) for key, array in iter_named_variables(variables)}


def iter_named_variables(variables: Iterable[keras.Variable]) -> Iterator[tuple[str, Array]]:
    """Yield variables by path as read-only arrays, without copying on a CPU.

    Use each array before the next training step, or copy it.
    """
    return iter_arrays(variables_by_path(variables))


def load_named_variables(variables: Iterable[keras.Variable], state: Mapping[str, Any]) -> None:
    """Assign arrays to variables by path, all of them or none.

    Raises:
        StateMismatchError: keys, shapes or dtypes do not fit. Nothing has been assigned.
    """
    assign_arrays("load_named_variables", variables_by_path(variables), state)


def _ordered_state(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    rates = _RATE.fullmatch
    return {key: v for key, v in state_variables(optimizer).items() if not rates(key)}


def iter_arrays(variables: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Yield variables of any Keras by key as read-only arrays, without copying on a CPU."""
    for key, variable in variables.items():
        yield key, read_only_array(variable)


def assign_arrays(
    where: str,
    variables: Mapping[str, Any],
    state: Mapping[str, Any],
    assign: Callable[[Any, Array], object] | None = None,
) -> None:
    """Assign arrays to variables by key, all of them or none.

    Args:
        where: What an error names first.
        variables: Variables of any Keras, or tf.Variables, by key.
        state: Exactly the keys, shapes and dtypes of the variables; arrays or PiecedArrays.
        assign: How to assign an array to a variable; `variable.assign(array)` when left out.

    Raises:
        StateMismatchError: keys, shapes or dtypes do not fit. Nothing has been assigned.
    """
    arrays = {key: v if is_pieced(v) else np.asarray(v) for key, v in state.items()}
    refuse_misfits(where, variables, arrays)
    if assign is None:
        pieced = [(v, arrays[key]) for key, v in variables.items() if is_pieced(arrays[key])]
        # Each variable has a lock of its own: several are filled faster than one.
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(lambda pair: fill_variable(*pair), pieced))
    for key, variable in variables.items():
        if assign is not None:
            assign(variable, whole_array(arrays[key]))
        elif not is_pieced(arrays[key]):
            variable.assign(arrays[key])


def refuse_misfits(where: str, variables: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Compare arrays with the variables that they are meant for, and assign nothing.

    Raises:
        StateMismatchError: keys, shapes or dtypes do not fit; all misfits are named at once.
    """
    faults = _key_faults(variables, arrays)
    for key, variable in variables.items():
        if key in arrays:
            faults += _array_faults(key, variable, arrays[key])
    if faults:
        raise StateMismatchError(
            f"{where}: the state must fit the variables by name, shape and dtype. "
            f"Got {listing(faults, separator='; ')}. Nothing was assigned. "
            "Load the state into the model and optimizer that it was saved from."
        )


def _key_faults(variables: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[str]:
    missing = [key for key in variables if key not in arrays]
    unexpected = [key for key in arrays if key not in variables]
    faults = [f"no {listing(missing)}"] if missing else []
    return faults + ([f"unexpected {listing(unexpected)}"] if unexpected else [])


def _array_faults(key: str, variable: Any, array: Any) -> list[str]:
    shape, dtype = tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)
    if tuple(array.shape) != shape:
        return [f"{key} of shape {tuple(array.shape)} instead of {shape}"]
    if str(array.dtype) != dtype:
        return [f"{key} of dtype {array.dtype} instead of {dtype}"]
    if is_pieced(array):
        return []  # looking at the numbers would be another pass; a checkpoint has its checksums
    if key.endswith("/velocity") and array.size and array.min() < 0:
        return [f"{key} with negative numbers, which a mean of squares cannot have"]
    return []


def _require_built(optimizer: keras.optimizers.Optimizer) -> None:
    if not optimizer.built:
        raise StateMismatchError(
            f"{optimizer.name}: the optimizer must be built to have state. Got one that is not. "
            "Call optimizer.build(model.trainable_variables) first."
        )


def listing(items: Sequence[str], separator: str = ", ") -> str:
    """Return items joined for an error message, the first few of many."""
    shown = separator.join(items[:_MOST_NAMED])
    left = len(items) - _MOST_NAMED
    return f"{shown}{separator}and {left} more" if left > 0 else shown
