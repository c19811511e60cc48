"""What recipes (LazyAdam, LAMB, AdamMultilr) share: beta_1, beta_2 and epsilon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from rowstep.optimizers import arguments
from rowstep.optimizers.row_update import Plan
from rowstep.optimizers.rules import Hyper
from rowstep.optimizers.step import RowStep
from rowstep.optimizers.surface import OptimizerSurface

__all__ = ["Recipe"]


class Recipe(OptimizerSurface, RowStep):
    """Say how each variable moves; the base class after it in the order of bases runs the step.

    `class LazyAdam(LazyAdamRecipe, RowOptimizer)`: the recipe checks its own arguments and hands
    the others on to the adapter's constructor `(learning_rate, options, name)`.
    """

    beta_1: Hyper
    beta_2: Hyper
    epsilon: Hyper
    schedule_type: ClassVar[type]

    if TYPE_CHECKING:

        def __init__(self, learning_rate: Any, options: Mapping[str, Any], name: str) -> None:
            """Be constructed by the adapter."""

        def _config_of(self, value: Any) -> Any: ...

        def _new_rate(self, name: str, rate: Any) -> Any: ...

        def _rate_now(self, rate: Any) -> Any: ...

    @staticmethod
    def _checked_hypers(where: str, beta_1: Any, beta_2: Any, epsilon: Any) -> dict[str, Hyper]:
        given = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}
        return {name: arguments.hyper(where, name, value) for name, value in given.items()}

    def _set(self, **attributes: Any) -> None:
        """Set attributes, once Keras' constructor has run: it allows none before."""
        for name, value in attributes.items():
            setattr(self, name, value)

    def _hypers(self) -> dict[str, Any]:
        return {"beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon}

    def _plan(self, path: str, is_table: bool, decays: bool) -> Plan:
        """Return how the variable of this path is updated."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return all constructor arguments."""
        base: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return base | {name: self._config_of(value) for name, value in self._hypers().items()}
