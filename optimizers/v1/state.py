"""State of a TensorFlow 1 optimizer as named arrays, eagerly or from a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from rowstep.optimizers import state
from rowstep.optimizers.errors import OptimizerArgumentError, StateMismatchError
from rowstep.optimizers.state import Array
from rowstep.optimizers.variables import variables_by_path

__all__ = ["SLOT_ALIASES", "SessionState"]

SLOT_ALIASES = {"momentum": "m", "velocity": "v"}
"""The slots by the names of state keys, and what TensorFlow 1 calls them."""

_POWERS = ("beta1_power", "beta2_power")


class _Target(NamedTuple):
    """Show a variable of any kind, also a ref variable, as `state.assign_arrays` wants it."""

    shape: tf.TensorShape
    dtype: tf.DType
    variable: tf.Variable


class SessionState:
    """Add state access to a subclass of `tf.compat.v1.train.AdamOptimizer` that fills `_trained`.

    The keys of the state are `beta1_power` and `beta2_power`, then `<variable path>/momentum` and
    `<variable path>/velocity` of each variable, in the order in which the optimizer first saw the
    variables. TensorFlow 1 keeps no step counter: after t steps beta1_power is beta1^(t + 1).

    In a graph the state is in a session. Every method takes it as `session`, and takes the default
    session where it is left out; eagerly it is None.
    """

    _name: str
    _get_non_slot_variable: Callable[..., tf.Variable]
    # By graph (None eagerly), because one optimizer may serve several.
    _trained: dict[tf.Graph | None, dict[Any, tf.Variable]]

    def named_state(self, session: tf.compat.v1.Session | None = None) -> dict[str, Array]:
        """Return copies of the state by key.

        Raises:
            StateMismatchError: there is no state yet.
            OptimizerArgumentError: in a graph there is no session.
        """
        variables, session = self._state_variables("named_state", session)
        arrays = state.iter_arrays(variables) if session is None else session.run(variables).items()
        return {key: np.array(array) for key, array in arrays}

    def load_named_state(
        self, named: Mapping[str, Any], session: tf.compat.v1.Session | None = None
    ) -> None:
        """Assign a state as `named_state` returns it, all of it or none.

        Raises:
            StateMismatchError: keys, shapes or dtypes do not fit, or there is no state yet. Nothing
                has been assigned.
            OptimizerArgumentError: in a graph there is no session.
        """
        variables, session = self._state_variables("load_named_state", session)
        where = f"{self._name}.load_named_state"
        state.assign_arrays(where, _targets(variables), named, _assigner(session))

    def get_weights(self, session: tf.compat.v1.Session | None = None) -> list[Array]:
        """Return copies of the state as a list, in the order of `named_state`.

        The two beta powers come first, where optimizers that count steps have their iterations.
        """
        return list(self.named_state(session).values())

    def set_weights(
        self, weights: Sequence[Any], session: tf.compat.v1.Session | None = None
    ) -> None:
        """Assign a list as `get_weights` returns it, all of it or none.

        Works before the first step after `build`. Raises what `load_named_state` raises, also for
        a list of the wrong length.
        """
        variables, session = self._state_variables("set_weights", session)
        where = f"{self._name}.set_weights"
        state.assign_list(where, _targets(variables), weights, _assigner(session))

    def get_slot(self, var: tf.Variable, name: str) -> tf.Variable | None:
        """Return slot "m" (or "momentum") or "v" (or "velocity") of a variable, None if not there.

        `get_slot_names` has the names of TensorFlow 1, "m" and "v".
        """
        return super().get_slot(var, SLOT_ALIASES.get(name, name))  # type: ignore[misc]

    def _state_variables(
        self, method: str, session: tf.compat.v1.Session | None
    ) -> tuple[dict[str, tf.Variable], tf.compat.v1.Session | None]:
        where = f"{self._name}.{method}"
        if session is None and not tf.executing_eagerly():
            session = tf.compat.v1.get_default_session()
            if session is None:
                raise OptimizerArgumentError(
                    f"{where}: in a graph a session must hold the state. Got session=None and "
                    f"no default session. Pass session=..., or call {method} inside "
                    "`with session.as_default()`."
                )
        graph = None if session is None else session.graph
        trained = list(self._trained.get(graph, {}).values())
        if not trained:
            raise StateMismatchError(
                f"{where}: the optimizer must have seen variables to have state. Got none so far. "
                "Call minimize, apply_gradients or build(var_list) first."
            )
        result = {key: self._get_non_slot_variable(key, graph=graph) for key in _POWERS}
        for path, variable in variables_by_path(trained).items():
            for slot in SLOT_ALIASES:
                result[f"{path}/{slot}"] = self.get_slot(variable, slot)
        return result, session


def _targets(variables: Mapping[str, tf.Variable]) -> dict[str, _Target]:
    return {key: _Target(v.shape, v.dtype.base_dtype, v) for key, v in variables.items()}


def _assigner(session: tf.compat.v1.Session | None) -> Callable[[_Target, Array], object]:
    if session is None:
        return lambda target, array: target.variable.assign(array)

    def assign(target: _Target, array: Array) -> None:
        # Feeding the initial value adds no operation: the graph may be finalized.
        initializer = target.variable.initializer
        session.run(initializer, {initializer.inputs[1]: array})

    return assign
