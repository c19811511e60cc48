"""What Keras 3 needs of an optimizer, around the step that all adapters share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers import arguments
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.options import KERAS_OPTIONS, StepOptions
from rowstep.optimizers.row_update import SlotSpec
from rowstep.optimizers.state_surface import CallableList
from rowstep.optimizers.step import RowStep
from rowstep.optimizers.surface import Exclusions, OptimizerSurface
from rowstep.optimizers.variables import native_variable, variables_by_path

__all__ = ["RowOptimizer"]


class RowOptimizer(OptimizerSurface, RowStep, keras.optimizers.Optimizer):
    """Be a Keras 3 optimizer whose step is `RowStep`; recipes say how one variable moves."""

    schedule_type: ClassVar[type] = keras.optimizers.schedules.LearningRateSchedule

    def __init__(self, learning_rate: Any, options: Mapping[str, Any], name: str) -> None:
        where = type(self).__name__
        options = dict(options)
        learning_rate = options.pop("lr", learning_rate)
        checked = StepOptions.checked(where, options)
        rate = arguments.learning_rate(where, learning_rate, self.schedule_type)
        super().__init__(learning_rate=rate, name=name)
        self._options = checked
        self._plans, self._slots, self._accumulators, self._keys = (), [], [], ()
        self._added = []
        self._no_decay = Exclusions()
        # Keras reads these names; its constructor would refuse what works here together.
        for option in KERAS_OPTIONS:
            setattr(self, option, getattr(self._options, option))

    def build(self, variables: Sequence[Any]) -> None:
        """Create the slots, in float32 also for float16 and bfloat16 variables."""
        variables = list(variables)
        if self.built:
            self._refuse_unknown(variables)
            return
        self._warn_of_lost_exclusions(variables)
        self._make_slots(variables)
        # Keras would make averages and accumulators of its own, of the tables' size.
        for index, variable in enumerate(variables):
            self._trainable_variables_indices[self._var_key(variable)] = index
        # Not an assignment: Keras would take the model's variables for the optimizer's.
        self._trainable_variables.extend(variables)
        self.built = True

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Update variables by their gradients, and count one step.

        Args:
            grads: One gradient for each variable: a tensor, tf.IndexedSlices or None.
            trainable_variables: The variables; those that the optimizer was built on when left
                out. The first call builds the optimizer on them.
        """
        self._apply(list(grads), trainable_variables, aggregate=True)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        *,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> keras.Variable:
        """Update variables by (gradient, variable) pairs, and count one step.

        Args:
            grads_and_vars: Pairs; a gradient is a tensor, tf.IndexedSlices or None.
            name: Ignored; older code passes it.
            skip_gradients_aggregation: True when the gradients are already summed over replicas.
            experimental_aggregate_gradients: The older word for the opposite.

        Returns:
            The step counter.
        """
        pairs = list(grads_and_vars)
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        self._apply([g for g, _ in pairs], [v for _, v in pairs], aggregate=aggregate)
        return self.iterations

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any = None) -> None:
        """Update one variable, without clipping. Keras' hook; `apply` does not go through it."""
        rate = self.learning_rate if learning_rate is None else learning_rate
        self._update_one(gradient, variable, rate)

    def _apply(self, grads: list[Any], variables: Iterable[Any] | None, aggregate: bool) -> None:
        if variables is None:
            variables = self._trainable_variables
        variables = list(variables)
        if not variables or len(grads) != len(variables):
            raise OptimizerArgumentError(
                f"{self.name}: there must be variables, and one gradient for each. "
                f"Got {len(grads)} gradients for {len(variables)} variables. "
                "Pass None as the gradient of a variable that has none."
            )
        with tf.name_scope(self.name):
            if not self.built:
                self.build(variables)
            self._refuse_unknown(variables)
            self._run_step(zip(grads, variables, strict=True), aggregate)
        self._iterations.assign_add(1)

    # Variables of the optimizer ------------------------------------------------------------------

    @property
    def variables(self) -> CallableList:
        """The optimizer's variables in the order in which they were made."""
        return CallableList(super().variables)

    def add_variable(
        self,
        shape: Sequence[int],
        dtype: Any = None,
        initializer: Any = "zeros",
        name: str | None = None,
        aggregation: str = "none",
        layout: Any = None,
    ) -> keras.Variable:
        """Add a variable of your own to the optimizer's state; the step does not touch it.

        Args:
            shape: Its shape.
            dtype: Its dtype; Keras' default float when left out.
            initializer: A Keras initializer, or its name.
            name: Its name, and its key in `named_state`.
            aggregation: How replicas' values are joined, as in `keras.Variable`.
            layout: As in `keras.Variable`.
        """
        variable = super().add_variable(
            shape=tuple(shape),
            initializer=initializer,
            dtype=dtype,
            aggregation=aggregation,
            layout=layout,
            name=name,
        )
        self._added.append((variable.name, variable))
        return variable

    def add_variable_from_reference(
        self,
        model_variable: Any = None,
        variable_name: str | None = None,
        initial_value: Any = None,
        *,
        reference_variable: Any = None,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> keras.Variable:
        """Add a variable of your own in shape and dtype of a model variable.

        Args:
            model_variable: The model variable.
            variable_name: Its key in `named_state` is `<variable path>/<variable_name>`.
            initial_value: Its values; `initializer` gives them when left out.
            reference_variable: Newer name of model_variable.
            name: Newer name of variable_name.
            initializer: A Keras initializer, or its name.
        """
        source = reference_variable if model_variable is None else model_variable
        native = native_variable(source)
        path = next(iter(variables_by_path([source])))
        suffix = variable_name or name or "var"
        spec = SlotSpec(tuple(native.shape), native.dtype)
        if initial_value is None:
            initial_value = self._initial_values(initializer, spec.shape, spec.dtype)
        with tf.distribute.get_strategy().extended.colocate_vars_with(native):
            variable = self._new_slot(source, path, suffix, spec, initial_value)
        self._added.append((f"{path}/{suffix}", variable))
        return variable

    def _new_slot(
        self, variable: Any, path: str, slot: str, spec: SlotSpec, values: Any = None
    ) -> keras.Variable:
        def initial(shape: Any, dtype: Any = None) -> tf.Tensor:
            if spec.copies_weights:
                return tf.cast(tf.convert_to_tensor(native_variable(variable)), spec.dtype)
            return (
                tf.zeros(spec.shape, spec.dtype) if values is None else tf.cast(values, spec.dtype)
            )

        # Values come with the creation: a checkpoint that waits for the variable is assigned right
        # after it, and must not be overwritten.
        return super().add_variable(
            shape=spec.shape,
            initializer=initial,
            dtype=spec.dtype.name,
            name=f"{path.replace('/', '_').replace(':', '_')}_{slot}",
        )

    def _initial_values(self, initializer: Any, shape: tuple[int, ...], dtype: tf.DType) -> Any:
        if isinstance(initializer, np.ndarray | tf.Tensor):
            return initializer
        return keras.initializers.get(initializer)(shape, dtype=dtype.name)

    # What the step and the surface ask for -------------------------------------------------------

    def _native_counter(self) -> tf.Variable:
        return self._iterations.value

    def _counter(self) -> keras.Variable:
        return self._iterations

    def _current_rate(self) -> Any:
        return keras.ops.convert_to_tensor(self.learning_rate)

    @property
    def learning_rate(self) -> Any:
        """The learning rate: a variable that can be assigned, or what its schedule says now."""
        rate = self._learning_rate
        if isinstance(rate, arguments.LiveRate):
            return rate.source
        return keras.optimizers.Optimizer.learning_rate.fget(self)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if not callable(value):
            value = arguments.non_negative(self.name, "learning_rate", value)
            if isinstance(self._learning_rate, arguments.LiveRate):
                self._learning_rate.source.assign(value)
                return
            if not hasattr(self._learning_rate, "assign"):
                raise OptimizerArgumentError(
                    f"{self.name}.learning_rate: it can be set where it is a number. Got an "
                    f"optimizer whose rate is a {type(self._learning_rate).__name__}. "
                    "Make the optimizer with a number, or set another schedule."
                )
        keras.optimizers.Optimizer.learning_rate.fset(self, value)

    def load_own_variables(self, store: Any) -> None:
        """Take the variables from a saved model's file; Keras calls this."""
        variables = list(self.variables)
        rate = self._learning_rate
        if isinstance(rate, keras.Variable) and len(store.keys()) == len(variables) - 1:
            # Saved where the rate was someone else's tf.Variable: the config has its value.
            variables = [variable for variable in variables if variable is not rate]
            for index, variable in enumerate(variables):
                variable.assign(store[str(index)])
            return
        super().load_own_variables(store)

    def _new_rate(self, name: str, rate: Any) -> Any:
        """Return a learning rate as the optimizer keeps it: a number becomes a variable."""
        if not isinstance(rate, float):
            return rate
        variable = super().add_variable(shape=(), dtype="float32", name=name)
        variable.assign(rate)
        return variable

    def _rate_now(self, rate: Any) -> Any:
        is_schedule = isinstance(rate, self.schedule_type)
        if callable(rate):
            # As Keras reads the main schedule: while accumulating, it counts calls.
            rate = rate(self._iterations) if is_schedule else rate()
        return keras.ops.convert_to_tensor(rate)

    def _rate_variables(self) -> dict[str, Any]:
        rate = self._learning_rate
        return {"learning_rate": rate} if isinstance(rate, keras.Variable) else {}

    def _knows(self, variable: Any) -> bool:
        return self._var_key(variable) in self._trainable_variables_indices

    def _index_of(self, variable: Any) -> int:
        self._refuse_unknown([variable])
        return self._get_variable_index(variable)

    def _built_on(self) -> Sequence[Any]:
        return self._trainable_variables

    # Configuration -------------------------------------------------------------------------------

    @staticmethod
    def _object_scope(objects: Mapping[str, Any]) -> AbstractContextManager[Any]:
        return keras.saving.custom_object_scope(dict(objects))

    @staticmethod
    def _made_of(config: dict[str, Any]) -> Any:
        return keras.saving.deserialize_keras_object(config)

    def _config_of(self, value: Any) -> Any:
        if isinstance(value, keras.Variable | arguments.LiveRate):
            number = value() if isinstance(value, arguments.LiveRate) else value
            # The variable is float32: 0.001 comes back as 0.0010000000474974513. The shortest
            # decimal of the same float32 is what the user wrote.
            return float(str(np.float32(keras.ops.convert_to_numpy(number))))
        return keras.saving.serialize_keras_object(value)
