"""The errors of the optimizers room."""

from __future__ import annotations

from rowstep import RowstepError

__all__ = ["OptimizerArgumentError", "StateMismatchError"]


class OptimizerArgumentError(RowstepError, ValueError):
    """Say that an argument of an optimizer, a layer or one of their methods does not fit."""


class StateMismatchError(RowstepError, ValueError):
    """Say that optimizer or model state does not fit the variables it is meant for.

    Whoever raises it has assigned nothing: the variables hold what they held before.
    """
