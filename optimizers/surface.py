"""The methods around the step that training code of several generations calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from rowstep.optimizers import state
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.state import Array
from rowstep.optimizers.variables import native_variable, variables_by_path

__all__ = ["OptimizerSurface"]

_SLOT_ALIASES = {"m": "momentum", "v": "velocity"}


class OptimizerSurface(keras.optimizers.Optimizer):
    """Add state access, slots and minimize to an optimizer that fills `_slots` and `_keys`."""

    slot_names: ClassVar[tuple[str, ...]]
    _slots: dict[str, list[keras.Variable]]
    _keys: tuple[str, ...]

    # State -----------------------------------------------------------------------------------

    def state_variables(self) -> dict[str, keras.Variable]:
        """Return the variables behind `named_state` by key, iterations first."""
        slot_variables = {
            f"{key}/{slot}": self._slots[slot][index]
            for index, key in enumerate(self._keys)
            for slot in self.slot_names
        }
        slots = {id(variable) for variable in slot_variables.values()}
        result = {"iterations": self.iterations}
        for variable in self.variables:
            # What is left over is the learning rate, unless a schedule gives it.
            if variable is not self.iterations and id(variable) not in slots:
                result["learning_rate"] = variable
        return result | slot_variables

    def get_weights(self) -> list[Array]:
        """Return copies of the state as a list: iterations, then the slots variable by variable.

        The learning rate is not in the list. See `rowstep.optimizers.state.get_weights`.
        """
        return state.get_weights(self)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assign a list as `get_weights` returns it, all of it or none.

        Works before the first step once the optimizer is built.

        Raises:
            StateMismatchError: the optimizer is not built, or the number of arrays, a shape or a
                dtype does not fit. Nothing has been assigned.
        """
        state.set_weights(self, weights)

    def named_state(self) -> dict[str, Array]:
        """Return a copy of the state by key: iterations, learning_rate, `<variable path>/<slot>`.

        learning_rate is there unless a schedule or a callable gives it.
        """
        return state.named_state(self)

    def iter_named_state(self) -> Iterator[tuple[str, Array]]:
        """Yield the state by key as read-only arrays, without copying on a CPU.

        Use each array before the next step, or copy it.
        """
        return state.iter_named_state(self)

    def load_named_state(self, named: Mapping[str, Any]) -> None:
        """Assign a state as `named_state` returns it, all of it or none.

        Raises:
            StateMismatchError: keys, shapes or dtypes do not fit. All misfits are named at once,
                and nothing has been assigned.
        """
        state.load_named_state(self, named)

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots that each variable has."""
        return list(self.slot_names)

    def __dir__(self) -> list[str]:
        # tf.train.Checkpoint looks for this name with dir(). It would save the slots a second time
        # as slot variables, and refuse because Keras has them saved as variables of the optimizer.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def get_slot(self, var: Any, name: str) -> keras.Variable:
        """Return the slot of a variable, for example its "momentum" (or "m").

        Raises:
            OptimizerArgumentError: the slot or the variable is unknown.
        """
        slot = _SLOT_ALIASES.get(name, name)
        if slot not in self.slot_names:
            raise OptimizerArgumentError(
                f"{self.name}.get_slot: name must be a slot of this optimizer. Got {name!r}. "
                f"Its slots are {', '.join(self.slot_names)}. Choose one of them."
            )
        self._refuse_unknown([var])
        return self._slots[slot][self._get_variable_index(var)]

    def _refuse_unknown(self, variables: Iterable[Any]) -> None:
        known = self._trainable_variables_indices
        unknown = [v for v in variables if self._var_key(v) not in known]
        if unknown:
            names = ", ".join(variables_by_path(unknown))
            raise OptimizerArgumentError(
                f"{self.name}: every variable must be one that the optimizer was built on. "
                f"Got {names}. It knows {', '.join(self._keys) or 'none yet'}. "
                "Make a new optimizer for other variables."
            )

    # Training --------------------------------------------------------------------------------

    @property
    def lr(self) -> Any:
        """The learning rate, under its older name."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    def minimize(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Iterable[Any] | Callable[[], Iterable[Any]],
        tape: tf.GradientTape | None = None,
    ) -> keras.Variable:
        """Compute gradients of a loss, apply them, and return the step counter.

        Args:
            loss: A callable without arguments, or a scalar computed under `tape`.
            var_list: The variables, or a callable that returns them.
            tape: The tape that recorded `loss`; needed unless `loss` is a callable.
        """
        return self.apply_gradients(self.compute_gradients(loss, var_list, tape))

    def compute_gradients(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Iterable[Any] | Callable[[], Iterable[Any]],
        tape: tf.GradientTape | None = None,
    ) -> list[tuple[Any, Any]]:
        """Return (gradient, variable) pairs; gradients of gathered tables are tf.IndexedSlices.

        Raises:
            OptimizerArgumentError: `loss` is a tensor and there is no `tape`.
        """
        if callable(loss):
            with tape or tf.GradientTape() as tape:
                loss = loss()
        elif tape is None:
            raise OptimizerArgumentError(
                f"{self.name}.compute_gradients: a loss that is not callable needs the tape that "
                f"recorded it. Got {type(loss).__name__} and tape=None. "
                "Pass tape=..., or a function that computes the loss."
            )
        variables = list(var_list() if callable(var_list) else var_list)
        gradients = tape.gradient(loss, [native_variable(variable) for variable in variables])
        return list(zip(gradients, variables, strict=True))
