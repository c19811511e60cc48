"""Adam state under the names of TensorFlow 1, and back.

tf.compat.v1.train.AdamOptimizer keeps no step counter, but powers of its betas: see `beta_powers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rowstep.optimizers.converters.beta_powers import checked_betas, power_after, steps_of_powers
from rowstep.optimizers.converters.checks import (
    Array,
    checked_state,
    refuse,
    slots_of,
    stored_arrays,
    targets,
)
from rowstep.optimizers.state import listing

__all__ = ["from_tf1", "to_tf1"]

_SLOTS = ("momentum", "velocity")


def from_tf1(
    arrays: Mapping[str, Any],
    variables: Iterable[Any],
    *,
    names: Mapping[str, str] | None = None,
    scope: str = "",
    slots: tuple[str, str] | None = None,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    beta_powers: tuple[str, str] | None = None,
    global_step: int | None = None,
    learning_rate: float | None = None,
) -> dict[str, Array]:
    """Return the Adam state in the variables of a TensorFlow 1 graph, by their names.

        t from beta2_power = beta_2^(t+1), or from beta1_power = beta_1^(t+1)

    beta1_power is too small for float32 after some 800 steps of beta_1 = 0.9, beta2_power after
    some 87 000 steps of beta_2 = 0.999. When both are, the step is no longer known, and no longer
    matters to plain Adam; `global_step` is then taken.

    Args:
        arrays: Values by name, for example of all variables of a session. Other names than those
            looked for are left alone. `from_tf1_checkpoint` reads them from a file.
        variables: Whose state it is: variables, or (path, shape).
        names: Names in the graph by path, where they are not the same.
        scope: The variable scope, if any, in which the optimizer was called.
        slots: The last parts of the names of the two moments. When left out they are found: the
            optimizer's name, and the same with "_1".
        beta_1: The decay that beta1_power is a power of.
        beta_2: The decay that beta2_power is a power of.
        beta_powers: The names of the two powers. When left out they are found, if there is one
            pair.
        global_step: The number of steps, taken where the powers do not tell it.
        learning_rate: To be put into the state, for an optimizer with a plain learning rate.

    Returns:
        The state by key, float32 (float64 for float64 variables).

    Raises:
        StateMismatchError: something is not there, is there more than once, or does not fit.
        OptimizerArgumentError: variables or betas are not such.

    Cost: one copy of the state, and t multiplications of one number.
    """
    where = "from_tf1"
    order = targets(where, variables)
    bases = [_joined(scope, (names or {}).get(target.path, target.path)) for target in order]
    slots = slots or _found_slots(where, arrays, bases)
    keys = {
        f"{target.path}/{slot}": f"{base}/{name}"
        for target, base in zip(order, bases, strict=True)
        for slot, name in zip(_SLOTS, slots, strict=True)
    }
    missing = [f"no {name}" for name in keys.values() if name not in arrays]
    if missing:
        refuse(where, "each variable must have both moments", missing, _WHERE_TO_LOOK)
    beta_powers = beta_powers or _found_powers(where, arrays, global_step)
    powers = [arrays.get(name, 0.0) for name in beta_powers]
    raw: dict[str, Any] = {
        "iterations": steps_of_powers(where, powers, (beta_1, beta_2), global_step)
    }
    raw |= {key: arrays[name] for key, name in keys.items()}
    return checked_state(where, raw, order, learning_rate)


def to_tf1(
    state: Mapping[str, Any],
    variables: Iterable[Any],
    *,
    names: Mapping[str, str] | None = None,
    scope: str = "",
    slots: tuple[str, str] = ("Adam", "Adam_1"),
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    beta_powers: tuple[str, str] = ("beta1_power", "beta2_power"),
) -> dict[str, Array]:
    """Return a state as values by the names that AdamOptimizer gives its variables.

    The learning rate has no place in it. See `from_tf1` for the arguments.

    Returns:
        New arrays: both moments of each variable, and the float32 powers of the betas.

    Raises:
        StateMismatchError: the state does not fit the variables, or has other slots.
        OptimizerArgumentError: variables or betas are not such.
    """
    where = "to_tf1"
    betas = checked_betas(where, (beta_1, beta_2))
    order = targets(where, variables)
    stored = stored_arrays(where, state, order, slots_of(where, state, order))
    steps = int(stored["iterations"])
    result = {name: power_after(beta, steps) for name, beta in zip(beta_powers, betas, strict=True)}
    for target in order:
        base = _joined(scope, (names or {}).get(target.path, target.path))
        for slot, name in zip(_SLOTS, slots, strict=True):
            result[f"{base}/{name}"] = stored[f"{target.path}/{slot}"]
    return result


def _joined(scope: str, name: str) -> str:
    return f"{scope}/{name}" if scope else name


_WHERE_TO_LOOK = (
    "Pass names for variables that were renamed, scope where the optimizer was called inside one, "
    "and slots for other names of the moments."
)


def _found_slots(where: str, arrays: Mapping[str, Any], bases: Sequence[str]) -> tuple[str, str]:
    pairs = []
    for key in arrays:
        base, _, name = key.rpartition("/")
        if base == bases[0]:
            stem, number = re.fullmatch(r"(.*?)(?:_(\d+))?", name).groups()  # type: ignore[union-attr]
            # A second optimizer of the same name has the moments _2 and _3.
            if int(number or 0) % 2 == 0:
                pairs.append((name, f"{stem}_{int(number or 0) + 1}"))
    pairs = [p for p in pairs if all(f"{base}/{name}" in arrays for base in bases for name in p)]
    if len(pairs) != 1:
        beside = [key for key in arrays if bases[0].rpartition("/")[2] in key]
        refuse(
            where,
            "all variables must have one pair of moments, like Adam and Adam_1",
            [f"{len(pairs)} pairs {pairs} for {bases[0]} among {listing(sorted(beside))}"],
            _WHERE_TO_LOOK,
        )
    return pairs[0]


def _found_powers(
    where: str, arrays: Mapping[str, Any], global_step: int | None
) -> tuple[str, str]:
    firsts = [key for key in arrays if re.fullmatch(r"(.*/)?beta1_power(_\d+)?", key)]
    pairs = []
    for key in firsts:
        scope, _, name = key.rpartition("/")
        pairs.append((key, _joined(scope, name.replace("beta1", "beta2"))))
    pairs = [pair for pair in pairs if pair[1] in arrays]
    if not pairs and global_step is not None:
        return "beta1_power", "beta2_power"
    if len(pairs) != 1:
        refuse(
            where,
            "there must be one pair of beta1_power and beta2_power",
            [listing([str(pair) for pair in pairs]) or "none"],
            "Pass the right pair of names as beta_powers, or global_step where there is none.",
        )
    return pairs[0]
