"""What recipes (LazyAdam, LAMB, AdamMultilr) share: beta_1, beta_2, epsilon, and the config."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from rowstep.optimizers import arguments
from rowstep.optimizers.row_update import Plan
from rowstep.optimizers.rules import Hyper
from rowstep.optimizers.step import RowStep
from rowstep.optimizers.surface import Exclusions, OptimizerSurface

if TYPE_CHECKING:
    from typing_extensions import Self

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
    _learning_rate: Any

    if TYPE_CHECKING:  # what the adapter provides

        def __init__(self, learning_rate: Any, options: Mapping[str, Any], name: str) -> None:
            """Be constructed by the adapter."""

        def _config_of(self, value: Any) -> Any:
            """Return a hyperparameter as JSON has it."""

        def _new_rate(self, name: str, rate: Any) -> Any:
            """Return a learning rate as the optimizer keeps it."""

        def _rate_now(self, rate: Any) -> Any:
            """Return what a learning rate is at this step."""

        @staticmethod
        def _object_scope(objects: Mapping[str, Any]) -> AbstractContextManager[Any]:
            """Return Keras' scope for custom objects."""

        @staticmethod
        def _made_of(config: dict[str, Any]) -> Any:
            """Return the object that Keras serialized."""

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
        """Return all constructor arguments; `from_config` makes the same optimizer of them."""
        config = {"name": self.name, "learning_rate": self._config_of(self._learning_rate)}
        config |= {name: self._config_of(value) for name, value in self._hypers().items()}
        config |= self._options.config()
        excluded = self._no_decay
        exclusions = {"paths": list(excluded.paths), "names": list(excluded.names)}
        if any(exclusions.values()):
            config["excluded_from_weight_decay"] = exclusions
        return config

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the optimizer that a config describes.

        Args:
            config: What `get_config` returned, schedules as objects or serialized.
            custom_objects: Classes and functions by the name that the config uses.
        """
        config = dict(config)
        exclusions = config.pop("excluded_from_weight_decay", {})
        with cls._object_scope(dict(custom_objects or {})):
            optimizer = cls(**{key: cls._deserialized(value) for key, value in config.items()})
        names, paths = (tuple(exclusions.get(key, ())) for key in ("names", "paths"))
        optimizer._no_decay = Exclusions(names, paths)
        return optimizer

    @classmethod
    def _deserialized(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "class_name" in value and "config" in value:
            return cls._made_of(dict(value))
        if isinstance(value, Mapping):
            return {key: cls._deserialized(item) for key, item in value.items()}
        return [cls._deserialized(item) for item in value] if isinstance(value, list) else value
