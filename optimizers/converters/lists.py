"""Adam and LAMB state in the list orders of three lines of Keras, and back. NumPy only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rowstep.optimizers.converters.checks import (
    Array,
    Target,
    checked_state,
    refuse,
    slots_of,
    stored_arrays,
    targets,
)

__all__ = [
    "from_keras3",
    "from_legacy_keras",
    "from_tf_keras",
    "interleaved_state",
    "to_keras3",
    "to_legacy_keras",
    "to_tf_keras",
]


def from_legacy_keras(
    weights: Sequence[Any],
    variables: Iterable[Any],
    *,
    amsgrad: bool = False,
    learning_rate: float | None = None,
) -> dict[str, Array]:
    """Return the state in a list of a legacy Keras Adam or LAMB.

    Two other lists that such optimizers make are taken too. One restored from a checkpoint before
    its first step lists its slots by variable, and its iterations at the end; its variables come in
    the order of the checkpoint's objects, mostly that of the layers. And Keras before 2.3 adds a
    placeholder of shape (1,) for each variable, which is left out.

    Args:
        weights: What `get_weights` of the optimizer returned, arrays or variables.
        variables: Whose state it is, in the order of the list: variables, or (path, shape).
        amsgrad: Whether the optimizer had amsgrad; its velocity_hat is then in the state.
        learning_rate: To be put into the state, for an optimizer with a plain learning rate.

    Returns:
        The state by key, float32 (float64 for float64 variables). Slots of half precision become
        float32 without loss.

    Raises:
        StateMismatchError: the number of arrays, a shape, a dtype or a sign does not fit.
        OptimizerArgumentError: there are no variables, or some are not floating-point.
    """
    where, weights = "from_legacy_keras", list(weights)
    order = targets(where, variables)
    slots = ("momentum", "velocity", "velocity_hat") if amsgrad else ("momentum", "velocity")
    if not amsgrad and len(weights) == 3 * len(order) + 1 and _placeholders(weights[-len(order) :]):
        weights = weights[: -len(order)]
    keys = ["iterations", *_by_slot(order, slots)]
    if _is_restored(weights):
        keys = [*_by_variable(order, slots), "iterations"]
    return checked_state(where, _paired(where, keys, weights), order, learning_rate)


def to_legacy_keras(state: Mapping[str, Any], variables: Iterable[Any]) -> list[Array]:
    """Return a state as a list for `set_weights` of a legacy Keras Adam or LAMB.

    The learning rate has no place in it; set it on the optimizer.

    Args:
        state: What `named_state` returned. With velocity_hat it is a list for amsgrad.
        variables: The variables of the state, in the order of the list to be made.

    Returns:
        New arrays, iterations first. Slots of half-precision variables are rounded to that dtype.

    Raises:
        StateMismatchError: the state does not fit the variables, or has what the list cannot hold.
        OptimizerArgumentError: there are no variables, or some are not floating-point.
    """
    where = "to_legacy_keras"
    order = targets(where, variables)
    slots = slots_of(where, state, order, ("momentum", "velocity", "velocity_hat"))
    stored = stored_arrays(where, state, order, slots)
    return [stored[key] for key in ["iterations", *_by_slot(order, slots)]]


def from_tf_keras(
    weights: Sequence[Any],
    variables: Iterable[Any],
    *,
    amsgrad: bool = False,
    use_ema: bool = False,
    learning_rate: float | None = None,
) -> dict[str, Array]:
    """Return the state in the `variables` of a tf_keras Adam, as a list.

    Args:
        weights: Its variables, or arrays of them, in their order.
        variables: Whose state it is, in the order of the list: variables, or (path, shape).
        amsgrad: Whether the optimizer had amsgrad; its velocity_hat is then in the state.
        use_ema: Whether the optimizer had use_ema; its average is then in the state.
        learning_rate: To be put into the state, for an optimizer with a plain learning rate.

    Returns:
        The state by key. See `from_legacy_keras`.

    Raises:
        StateMismatchError: the number of arrays, a shape, a dtype or a sign does not fit.
        OptimizerArgumentError: there are no variables, or some are not floating-point.
    """
    where, weights = "from_tf_keras", list(weights)
    order = targets(where, variables)
    keys = ["iterations", *_interleaved(order, amsgrad, use_ema)]
    return checked_state(where, _paired(where, keys, weights), order, learning_rate)


def to_tf_keras(state: Mapping[str, Any], variables: Iterable[Any]) -> list[Array]:
    """Return a state as a list for `set_weights` of a built tf_keras Adam.

    The learning rate has no place in it; set it on the optimizer. With velocity_hat it is a list
    for amsgrad, with average for use_ema. See `to_legacy_keras` for the rest.
    """
    return _to_interleaved("to_tf_keras", state, variables, keep_rate=False)


def from_keras3(
    weights: Sequence[Any],
    variables: Iterable[Any],
    *,
    amsgrad: bool = False,
    use_ema: bool = False,
    learning_rate: float | None = None,
) -> dict[str, Array]:
    """Return the state in the `variables` of a Keras 3 Adam, AdamW or Lamb, as a list.

    An optimizer with a plain learning rate has it in the list, one with a schedule has not; the
    number of arrays tells. gradient_accumulation_steps and LossScaleOptimizer add variables of
    their own: finish the accumulation, pass the inner optimizer's.

    Args:
        weights: Its variables, or arrays of them, in their order.
        variables: Whose state it is, in the order of the list: variables, or (path, shape).
        amsgrad: Whether the optimizer had amsgrad; its velocity_hat is then in the state.
        use_ema: Whether the optimizer had use_ema; its average is then in the state.
        learning_rate: To be put into the state instead of the list's.

    Returns:
        The state by key. See `from_legacy_keras`.

    Raises:
        StateMismatchError: the number of arrays, a shape, a dtype or a sign does not fit.
        OptimizerArgumentError: there are no variables, or some are not floating-point.
    """
    order = targets("from_keras3", variables)
    return interleaved_state("from_keras3", weights, order, amsgrad, use_ema, learning_rate)


def interleaved_state(
    where: str,
    weights: Sequence[Any],
    order: Sequence[Target],
    amsgrad: bool,
    use_ema: bool,
    learning_rate: float | None,
) -> dict[str, Array]:
    """Return the state in a list by variable, with or without a learning rate at its place."""
    weights, slots = list(weights), _interleaved(order, amsgrad, use_ema)
    rate = ["learning_rate"] if len(weights) == len(slots) + 2 else []
    paired = _paired(where, ["iterations", *rate, *slots], weights)
    return checked_state(where, paired, order, learning_rate)


def to_keras3(state: Mapping[str, Any], variables: Iterable[Any]) -> list[Array]:
    """Return a state as a list for the `variables` of a built Keras 3 Adam, AdamW or Lamb.

    The learning rate is in it if it is in the state: take it out of the state for an optimizer with
    a schedule, as Keras' own `set_weights` does not compare lengths. See `to_legacy_keras` for the
    rest.
    """
    return _to_interleaved("to_keras3", state, variables, keep_rate=True)


def _to_interleaved(
    where: str, state: Mapping[str, Any], variables: Iterable[Any], keep_rate: bool
) -> list[Array]:
    order = targets(where, variables)
    known = ("momentum", "velocity", "velocity_hat", "average")
    slots = slots_of(where, state, order, known)
    stored = stored_arrays(where, state, order, slots)
    rate = ["learning_rate"] if keep_rate and "learning_rate" in state else []
    keys = _interleaved(order, "velocity_hat" in slots, "average" in slots)
    return [stored[key] for key in ["iterations", *rate, *keys]]


def _by_slot(order: Sequence[Target], slots: Sequence[str]) -> list[str]:
    return [f"{target.path}/{slot}" for slot in slots for target in order]


def _by_variable(order: Sequence[Target], slots: Sequence[str]) -> list[str]:
    return [f"{target.path}/{slot}" for target in order for slot in slots]


def _interleaved(order: Sequence[Target], amsgrad: bool, use_ema: bool) -> list[str]:
    """Return the slots' keys as tf_keras and Keras 3 order them."""
    first = _by_slot(order, ["average"]) if use_ema else []
    last = _by_slot(order, ["velocity_hat"]) if amsgrad else []
    return first + _by_variable(order, ["momentum", "velocity"]) + last


def _paired(where: str, keys: Sequence[str], weights: Sequence[Any]) -> dict[str, Any]:
    if len(weights) != len(keys):
        refuse(
            where,
            "the list must have one array for each of the state's keys",
            [f"{len(weights)} arrays for {len(keys)} keys: {', '.join(keys[:8])} ..."],
            "Pass the variables that had gradients, and say amsgrad or use_ema if it had them.",
        )
    return dict(zip(keys, weights, strict=True))


def _is_restored(weights: Sequence[Any]) -> bool:
    return bool(weights) and _is_counter(weights[-1]) and not _is_counter(weights[0])


def _is_counter(value: Any) -> bool:
    array = np.asarray(value)
    return array.shape == () and array.dtype.kind in "iu"


def _placeholders(arrays: Sequence[Any]) -> bool:
    return all(np.shape(array) == (1,) and not np.any(np.asarray(array)) for array in arrays)
