"""State of the DTensor Adam as arrays: the whole logical tensor, whatever the layout is.

Arrays know no layout, so what one layout saved another loads, and so does an optimizer off the
mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

from rowstep.optimizers import state
from rowstep.optimizers.dtensor.hyper import MeshHyperparameters
from rowstep.optimizers.dtensor.layout import assign_array, read_array
from rowstep.optimizers.errors import OptimizerArgumentError, StateMismatchError
from rowstep.optimizers.state import Array
from rowstep.optimizers.variables import variables_by_path

__all__ = ["MeshState"]


class MeshState(MeshHyperparameters):
    """Add named and listed state, and slots, to an optimizer of tf_keras on a mesh or off it.

    The subclass sets `_keys`, the path of each variable, and the lists of slots when it builds.
    """

    _keys: tuple[str, ...] = ()
    # Where tf_keras' own Adam keeps them: checkpoints of either restore into the other.
    _slot_attributes: ClassVar[Mapping[str, str]] = {
        "momentum": "_momentums",
        "velocity": "_velocities",
        "velocity_hat": "_velocity_hats",
        "average": "_model_variables_moving_average",
    }
    _slot_aliases: ClassVar[Mapping[str, str]] = {
        "m": "momentum",
        "v": "velocity",
        "vhat": "velocity_hat",
    }

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots that each variable has."""
        kept = {"velocity_hat": self.amsgrad, "average": self.use_ema}
        return [name for name in self._slot_attributes if kept.get(name, True)]

    def __dir__(self) -> list[str]:
        # tf.train.Checkpoint looks for this name with dir(), and would save all slots twice.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def get_slot(self, var: Any, name: str) -> Any:
        """Return the slot of a variable: "momentum", "velocity", "velocity_hat" or "average".

        "m", "v" and "vhat" are names of the first three as well.

        Raises:
            OptimizerArgumentError: the slot or the variable is unknown.
        """
        slot = self._slot_aliases.get(name, name)
        if slot not in self.get_slot_names():
            raise OptimizerArgumentError(
                f"{self.name}.get_slot: name must be a slot of this optimizer. Got {name!r}. "
                f"Its slots are {', '.join(self.get_slot_names())}. Choose one of them."
            )
        self._refuse_unknown("get_slot", [var])
        return self._slots_of(var)[slot]

    def state_variables(self) -> dict[str, Any]:
        """Return the variables behind `named_state` by key, iterations first.

        Raises:
            StateMismatchError: the optimizer is not built.
        """
        self._require_built()
        result = {"iterations": self.iterations}
        if self._holds_learning_rate():
            result["learning_rate"] = self._learning_rate
        for index, key in enumerate(self._keys):
            for slot in self.get_slot_names():
                result[f"{key}/{slot}"] = getattr(self, self._slot_attributes[slot])[index]
        return result

    def named_state(self) -> dict[str, Array]:
        """Return a copy of the state by key: iterations, learning_rate, `<variable path>/<slot>`.

        learning_rate is there unless a schedule or a callable gives it.

        Raises:
            StateMismatchError: the optimizer is not built.

        Cost: each array once on every device of the mesh, one after the other.
        """
        return {key: read_array(item) for key, item in self.state_variables().items()}

    def load_named_state(self, named: Mapping[str, Any]) -> None:
        """Assign a state as `named_state` returns it, of any layout, all of it or none.

        Raises:
            StateMismatchError: the optimizer is not built, or keys, shapes or dtypes do not fit.
                All misfits are named at once, and nothing has been assigned.
        """
        where = f"{self.name}.load_named_state"
        state.assign_arrays(where, self.state_variables(), named, assign_array)

    def get_weights(self) -> list[Array]:
        """Return copies of the state in the order of `variables`: iterations first, then the slots.

        The learning rate is not in the list.

        Raises:
            StateMismatchError: the optimizer is not built.
        """
        return [read_array(item) for item in self._listed_state().values()]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assign a list as `get_weights` returns it, all of it or none.

        Works before the first step once the optimizer is built, on a mesh as off it.

        Raises:
            StateMismatchError: the optimizer is not built, or the number of arrays, a shape or a
                dtype does not fit. Nothing has been assigned.
        """
        where = f"{self.name}.set_weights"
        state.assign_list(where, self._listed_state(), list(weights), assign_array)

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Put the state into the store of a file that tf_keras saves a model to."""
        for index, array in enumerate(self.get_weights()):
            store[str(index)] = array

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Assign the state from the store of a file that tf_keras saved a model to.

        Raises:
            StateMismatchError: the stored state does not fit. Nothing has been assigned.
        """
        self.set_weights([store[str(index)][()] for index in range(len(store.keys()))])

    def _listed_state(self) -> dict[str, Any]:
        names = {id(variable): key for key, variable in self.state_variables().items()}
        return {names[id(variable)]: variable for variable in self.variables}

    def _slots_of(self, variable: Any) -> dict[str, Any]:
        index = self._index_dict[self._var_key(variable)]
        attributes = {slot: self._slot_attributes[slot] for slot in self.get_slot_names()}
        return {slot: getattr(self, name)[index] for slot, name in attributes.items()}

    def _require_built(self) -> None:
        if not getattr(self, "_built", False):
            raise StateMismatchError(
                f"{self.name}: the optimizer must be built to have state. Got one that is not. "
                "Call optimizer.build(variables) with all variables that it trains first."
            )

    def _refuse_unknown(self, method: str, variables: Iterable[Any]) -> None:
        known = getattr(self, "_index_dict", {})
        unknown = [item for item in variables if self._var_key(item) not in known]
        if unknown:
            raise OptimizerArgumentError(
                f"{self.name}.{method}: every variable must be one that the optimizer was built "
                f"on. Got {state.listing(list(variables_by_path(unknown)))}. It knows "
                f"{state.listing(self._keys) or 'none yet'}. Call build with all variables before "
                "the first step, or make a new optimizer."
            )
