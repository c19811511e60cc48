"""The step counter of TensorFlow 1: beta_1^(t+1) and beta_2^(t+1) instead of t.

Each is a variable that starts at its beta and is multiplied by it after every step, in float32,
where 0.999 is another number and t roundings add up. Doing the multiplications again finds the
exact t, and shows when a power is not one of its beta; a logarithm does neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rowstep.optimizers import arguments
from rowstep.optimizers.converters.checks import Array, refuse
from rowstep.optimizers.errors import OptimizerArgumentError, StateMismatchError

__all__ = ["checked_betas", "power_after", "steps_of_powers"]

_BLOCK = 1 << 16


def steps_of_powers(
    where: str, powers: Sequence[Any], betas: Sequence[float], global_step: int | None
) -> int:
    """Return t from beta_1^(t+1) and beta_2^(t+1), from the latter if it can still be told.

    Raises:
        StateMismatchError: a power is not one of its beta, the two do not agree, or both are too
            small to tell and there is no global_step.
        OptimizerArgumentError: a beta is not one.
    """
    told, betas = {}, checked_betas(where, betas)
    for name, power, beta in zip(("beta_1", "beta_2"), powers, betas, strict=True):
        array = np.asarray(power)
        if array.shape != () or array.dtype.kind != "f":
            refuse(where, "powers of betas must be floating scalars", [f"{array} for {name}"])
        if array >= np.finfo(array.dtype).tiny:
            told[name] = _steps(array, beta)
    wrong = [name for name, steps in told.items() if steps is None]
    if wrong or len(set(told.values())) > 1:
        got = [
            f"{np.asarray(power)!s} of beta {beta}"
            for power, beta in zip(powers, betas, strict=True)
        ]
        must = "powers of betas must be beta^(t+1) for one whole t"
        refuse(where, must, got, "Pass the beta_1 and beta_2 of the optimizer that made them.")
    steps = next(iter(told.values()), None)
    if steps is None and global_step is None:
        raise StateMismatchError(
            f"{where}: the number of steps must be known. Got powers of betas too small to tell it "
            f"({', '.join(str(np.asarray(power)) for power in powers)}), and no global_step. "
            "Pass global_step, the steps that the optimizer took."
        )
    return steps if steps is not None else int(global_step or 0)


def checked_betas(where: str, betas: Sequence[float]) -> list[float]:
    """Return beta_1 and beta_2 as floats whose float32 powers fall.

    Raises:
        OptimizerArgumentError: a beta is not in [0, 1), or is 1 as a float32.
    """
    checked = [arguments.beta(where, f"beta_{n}", beta) for n, beta in enumerate(betas, start=1)]
    for n, beta in enumerate(checked, start=1):
        if np.float32(beta) == 1.0:
            raise OptimizerArgumentError(
                f"{where}: beta_{n} must be below 1 as a float32, or its powers never fall. "
                f"Got {beta}. The largest is 0.99999994. Correct the value."
            )
    return checked


def _powers(beta: float, dtype: Any) -> Iterator[Array]:
    """Yield beta, beta^2, ... in blocks, rounded as an accumulator of the dtype rounds them."""
    last, factor = np.ones((), dtype), np.asarray(beta, dtype)
    while last >= np.finfo(dtype).tiny:
        block = np.full(_BLOCK, factor)
        block[0] = last * factor
        # What falls below the smallest normal number ends the search.
        with np.errstate(under="ignore"):
            block = np.multiply.accumulate(block)
        yield block
        last = block[-1]


def _steps(power: Array, beta: float) -> int | None:
    """Return t of beta^(t+1), or None where it is none. A hundredth of a step is allowed."""
    done = 0
    for block in _powers(beta, power.dtype):
        if block[-1] <= power:
            nearest = int(np.argmin(np.abs(block - power)))
            is_one = abs(float(block[nearest] / power) - 1.0) <= (1.0 - beta) / 100
            return done + nearest if is_one else None
        done += len(block)
    return None


def power_after(beta: float, steps: int) -> Array:
    """Return what the float32 accumulator of a beta holds after some steps; 0 where too small."""
    for block in _powers(beta, np.float32):
        if steps < len(block):
            power = block[steps]
            return np.asarray(power if power >= np.finfo(np.float32).tiny else 0.0, np.float32)
        steps -= len(block)
    return np.zeros((), np.float32)
