"""Hyperparameters of the DTensor Adam: checked, changed while training, saved, read back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf
import tf_keras

from rowstep.optimizers import arguments
from rowstep.optimizers.dtensor.layout import describe_mesh
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.variables import variable_path

__all__ = ["MeshHyperparameters", "checked_rate", "renamed_rate"]

_Schedule = tf_keras.optimizers.schedules.LearningRateSchedule
_DEFAULT_RATE = 0.001


class MeshHyperparameters(tf_keras.optimizers.Optimizer):
    """Add the learning rate, weight decay exclusion and the config to the DTensor Adam."""

    _learning_rate: Any
    _rate_source: Callable[[], Any] | None = None
    _excluded: tuple[str, ...] = ()

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the next step: a variable, or what schedule or callable give."""
        if self._rate_source is not None:
            return tf.cast(self._rate_source(), tf.float32)
        if isinstance(self._learning_rate, _Schedule):
            # tf_keras keeps the rate of the last step in a variable. One of no use to the update
            # need not be assigned, which some strategies refuse inside a step.
            return tf.cast(self._learning_rate(self.iterations.read_value()), tf.float32)
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        rate = checked_rate(self.name, value)
        if isinstance(rate, float):
            self._rate_source = None
            if isinstance(self._learning_rate, _Schedule):
                raise OptimizerArgumentError(
                    f"{self.name}: the learning rate of an optimizer with a schedule cannot be "
                    f"set to a number. Got {value!r}. Set it to another schedule, or make the "
                    "optimizer with a number."
                )
            self._learning_rate.assign(rate)
        elif isinstance(rate, _Schedule):
            self._rate_source, self._learning_rate = None, rate
        else:
            self._rate_source = rate

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[Any] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Leave variables out of weight decay, each call in place of the one before.

        What is excluded is kept by name, so that it is in the config.

        Args:
            var_list: Variables.
            var_names: Regular expressions, searched for in names without ":0".

        Raises:
            OptimizerArgumentError: the optimizer is built already, or var_names is not a list of
                regular expressions.
        """
        where = f"{self.name}.exclude_from_weight_decay"
        if getattr(self, "_built", False):
            raise OptimizerArgumentError(
                f"{where}: it must be called before the optimizer is built. Got a built one. "
                "Call it right after the constructor."
            )
        exact = [f"^{re.escape(variable_path(variable))}$" for variable in var_list or ()]
        patterns = arguments.patterns(where, "var_names", var_names) or []
        self._excluded = (*exact, *patterns)

    def get_config(self) -> dict[str, Any]:
        """Return all arguments in a form that JSON can hold, the mesh as its description.

        The options for clipping and averaging are in it as the keywords that they stand for. A
        callable stands in it with the value that it has now.
        """
        rate = self._learning_rate
        serialized = (
            tf_keras.optimizers.schedules.serialize(rate)
            if isinstance(rate, _Schedule) and self._rate_source is None
            else float(self.learning_rate.numpy())
        )
        config = super().get_config() | {
            "learning_rate": serialized,
            "beta_1": self._decay_of("beta_1"),
            "beta_2": self._decay_of("beta_2"),
            "epsilon": self.epsilon,
            "amsgrad": self.amsgrad,
            "adaptive_epsilon": self.adaptive_epsilon,
            "lazy": self.lazy,
            "mesh": describe_mesh(self._mesh) if self._mesh else None,
        }
        if self._excluded:
            config["exclude_from_weight_decay"] = list(self._excluded)
        return config

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the optimizer of a config, without state.

        Args:
            config: What `get_config` returned.
            custom_objects: Classes of schedules by name; and under "mesh" a mesh to use in place
                of the one in the config, or None for none.

        Raises:
            OptimizerArgumentError: an argument does not fit, or the devices of the mesh in the
                config are not there.
        """
        config, custom_objects = dict(config), dict(custom_objects or {})
        if "mesh" in custom_objects:
            config["mesh"] = custom_objects.pop("mesh")
        if isinstance(config.get("learning_rate"), Mapping):
            config["learning_rate"] = tf_keras.optimizers.schedules.deserialize(
                dict(config["learning_rate"]), custom_objects=custom_objects
            )
        excluded = config.pop("exclude_from_weight_decay", None)
        optimizer = cls(**config)
        if excluded:
            optimizer.exclude_from_weight_decay(var_names=excluded)
        return optimizer

    def _start_rate(self, rate: Any) -> None:
        if isinstance(rate, float | _Schedule):
            self._learning_rate = self._build_learning_rate(rate)
        else:
            self._learning_rate = self._build_learning_rate(float(rate()))
            self._rate_source = rate

    def _holds_learning_rate(self) -> bool:
        return self._rate_source is None and not isinstance(self._learning_rate, _Schedule)

    def _decay_of(self, name: str) -> float:
        value = getattr(self, name)
        return arguments.beta(self.name, name, value() if callable(value) else value)

    def _decays(self, variable: Any) -> bool:
        name = variable_path(variable)
        return bool(self.weight_decay) and not any(re.search(p, name) for p in self._excluded)


def checked_rate(where: str, value: Any) -> Any:
    """Return a learning rate as a float, a schedule or a callable.

    Raises:
        OptimizerArgumentError: it is none of these, negative, or a schedule of another Keras.
    """
    if isinstance(value, _Schedule):
        return value
    if any(kind.__name__ == "LearningRateSchedule" for kind in type(value).__mro__):
        raise OptimizerArgumentError(
            f"{where}: a schedule must be of the same Keras as the optimizer. "
            f"Got one of {type(value).__module__}. Use tf_keras.optimizers.schedules."
        )
    if callable(value):
        return value
    return arguments.non_negative(where, "learning_rate", value)


def renamed_rate(where: str, learning_rate: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the learning rate, also where it was given under its older name `lr`.

    Raises:
        OptimizerArgumentError: both names were used, or there are other keywords.
    """
    # tf_keras writes the flag into every config.
    rest = {name: value for name, value in kwargs.items() if name != "is_legacy_optimizer"}
    if "lr" in rest:
        if learning_rate != _DEFAULT_RATE:
            raise OptimizerArgumentError(
                f"{where}: learning_rate and its older name lr must not both be given. "
                f"Got {learning_rate!r} and {rest['lr']!r}. Keep learning_rate."
            )
        learning_rate = rest.pop("lr")
    for name, value in rest.items():
        advice = (
            "Use learning_rate=tf_keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)."
            if name == "decay"
            else "Remove it or correct its spelling."
        )
        raise OptimizerArgumentError(
            f"{where}: {name} is not an argument. Got {name}={value!r}. {advice}"
        )
    return learning_rate
