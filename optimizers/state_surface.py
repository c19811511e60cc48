"""The methods of an optimizer that concern its state and its slots, free of Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from rowstep.optimizers import state
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.row_update import SlotSpec
from rowstep.optimizers.state import Array
from rowstep.optimizers.variables import native_variable, unique_keys, variable_path

__all__ = ["CallableList", "StateSurface"]

_SLOT_ALIASES = {"m": "momentum", "v": "velocity", "vhat": "velocity_hat"}


class CallableList(list[Any]):
    """Be a list, and return it when called: `variables` was a method once."""

    def __call__(self) -> list[Any]:
        """Return the list itself."""
        return self


class StateSurface:
    """Give state and slots to an optimizer that a `RowStep` drives."""

    name: str
    built: bool
    add_variable: Callable[..., Any]
    build: Callable[..., None]
    _slots: Sequence[Mapping[str, Any]]
    _accumulators: Sequence[Mapping[str, Any]]
    _keys: tuple[str, ...]
    _added: list[tuple[str, Any]]

    # What adapters provide ---------------------------------------------------------------------

    def _counter(self) -> Any:
        raise NotImplementedError

    def _rate_variables(self) -> dict[str, Any]:
        """Return learning rates that are variables, by state key."""
        raise NotImplementedError

    def _knows(self, variable: Any) -> bool:
        raise NotImplementedError

    def _index_of(self, variable: Any) -> int:
        raise NotImplementedError

    def _new_slot(
        self, variable: Any, path: str, slot: str, spec: SlotSpec, values: Any = None
    ) -> Any:
        raise NotImplementedError

    # State -------------------------------------------------------------------------------------

    def state_variables(self) -> dict[str, Any]:
        """Return the variables behind `named_state` by key, iterations first."""
        result = {"iterations": self._counter()} | self._rate_variables()
        for key, slots, accumulators in zip(
            self._keys, self._slots, self._accumulators, strict=True
        ):
            result |= {f"{key}/{slot}": v for slot, v in {**slots, **accumulators}.items()}
        named = [*result.items(), *self._added]
        return unique_keys([key for key, _ in named], [variable for _, variable in named])

    def get_weights(self) -> list[Array]:
        """Return copies of the state as a list: iterations, then the slots variable by variable.

        Learning rates are not in the list. See `rowstep.optimizers.state.get_weights`.
        """
        return state.get_weights(self)

    def set_weights(self, weights: Sequence[Any], var_list: Iterable[Any] | None = None) -> None:
        """Assign a list as `get_weights` returns it, all of it or none.

        Args:
            weights: The arrays.
            var_list: The variables to build the optimizer on, where it is not built yet.

        Raises:
            StateMismatchError: the optimizer is not built and var_list is not given, or the number
                of arrays, a shape or a dtype does not fit. Nothing has been assigned.
        """
        if not self.built and var_list is not None:
            self.build(list(var_list))
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

    @property
    def weights(self) -> list[Any]:
        """The variables behind `get_weights`."""
        rates = self._rate_variables()
        if not self.built:
            return [self._counter()]
        return [v for key, v in self.state_variables().items() if key not in rates]

    # Slots -------------------------------------------------------------------------------------

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots that variables have."""
        names: dict[str, None] = {}
        for slots in self._slots:
            names |= dict.fromkeys(slots)
        return list(names)

    def __dir__(self) -> list[str]:
        # Savers look at every name in dir(). tf.train.Checkpoint would save the slots a second time
        # as slot variables, and refuse because Keras has them saved as variables of the optimizer;
        # Keras' would have the averages brought up to date, of weights that are being loaded.
        hidden = ("get_slot_names", "_model_variables_moving_average")
        return [name for name in super().__dir__() if name not in hidden]

    def get_slot(self, var: Any, slot_name: str) -> Any:
        """Return the slot of a variable, for example its "momentum" (or "m").

        Raises:
            OptimizerArgumentError: the slot or the variable is unknown.
        """
        self._refuse_unknown([var])
        slots = self._slots[self._index_of(var)]
        slot = _SLOT_ALIASES.get(slot_name, slot_name)
        if slot not in slots:
            raise OptimizerArgumentError(
                f"{self.name}.get_slot: slot_name must be a slot of this variable. "
                f"Got {slot_name!r}. Its slots are {', '.join(slots)}. Choose one of them."
            )
        return slots[slot]

    def add_slot(
        self,
        var: Any,
        slot_name: str,
        initializer: Any = "zeros",
        shape: Sequence[int] | None = None,
    ) -> Any:
        """Add a variable of your own to those that belong to `var`, or return it if it is there.

        It is saved and loaded with the optimizer's state, under `<variable path>/<slot_name>`;
        the step does not touch it.

        Args:
            var: A variable that the optimizer was built on.
            slot_name: Name of the slot.
            initializer: A Keras initializer, its name, or a tensor or array of values.
            shape: Shape of the slot; that of `var` when left out.
        """
        self._refuse_unknown([var])
        slots = self._slots[self._index_of(var)]
        slot_name = _SLOT_ALIASES.get(slot_name, slot_name)
        if slot_name not in slots:
            native = native_variable(var)
            full = tuple(native.shape) if shape is None else tuple(shape)
            key = self._keys[self._index_of(var)]
            values = self._initial_values(initializer, full, native.dtype)
            slot = self._new_slot(var, key, slot_name, SlotSpec(full, native.dtype), values)
            slots[slot_name] = slot  # type: ignore[index]
        return slots[slot_name]

    def add_weight(
        self,
        name: str,
        shape: Sequence[int],
        dtype: Any = None,
        initializer: Any = "zeros",
        **others: Any,
    ) -> Any:
        """Add a variable of your own, under the older name of `add_variable`.

        `trainable`, `synchronization` and `aggregation` are accepted: a state is never trained.
        """
        unknown = others.keys() - {"trainable", "synchronization", "aggregation"}
        if unknown:
            raise OptimizerArgumentError(
                f"{self.name}.add_weight: {sorted(unknown)[0]} is not an argument. "
                f"Got {sorted(unknown)}. Remove it or correct its spelling."
            )
        return self.add_variable(shape, dtype, initializer, name)

    def _initial_values(self, initializer: Any, shape: tuple[int, ...], dtype: tf.DType) -> Any:
        raise NotImplementedError

    def _refuse_unknown(self, variables: Iterable[Any]) -> None:
        unknown = [variable for variable in variables if not self._knows(variable)]
        if unknown:
            names = ", ".join(map(variable_path, unknown))
            raise OptimizerArgumentError(
                f"{self.name}: every variable must be one that the optimizer was built on. "
                f"Got {names}. It knows {', '.join(self._keys) or 'none yet'}. "
                + (
                    "Make a new optimizer for other variables; load_named_state takes old state."
                    if self.built
                    else "Call build(variables) first."
                )
            )
