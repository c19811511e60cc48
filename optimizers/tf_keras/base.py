"""What tf_keras needs of an optimizer, around the step that all adapters share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
import tf_keras

from rowstep.optimizers import arguments
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.options import KERAS_OPTIONS, StepOptions
from rowstep.optimizers.replicas import across_replicas
from rowstep.optimizers.row_update import Plan, SlotSpec
from rowstep.optimizers.rules import LambRule
from rowstep.optimizers.state_surface import CallableList
from rowstep.optimizers.step import RowStep
from rowstep.optimizers.surface import Exclusions, OptimizerSurface
from rowstep.optimizers.variables import variable_path

__all__ = ["TfKerasRowOptimizer"]


class TfKerasRowOptimizer(OptimizerSurface, RowStep, tf_keras.optimizers.Optimizer):
    """Be a tf_keras optimizer whose step is `RowStep`; recipes say how one variable moves.

    `jit_compile` is accepted and without effect: tf_keras would compile the update of a table anew
    for each number of distinct rows. `model.compile(jit_compile=True)` compiles the whole step.
    """

    schedule_type: ClassVar[type] = tf_keras.optimizers.schedules.LearningRateSchedule
    average_starts_at_first_step: ClassVar[bool] = False
    _iterations: tf.Variable
    _learning_rate: Any
    _own_variables: list[Any]
    _variables: list[Any]

    def __init__(self, learning_rate: Any, options: Mapping[str, Any], name: str) -> None:
        where = type(self).__name__
        options = {key: value for key, value in options.items() if key not in _WITHOUT_EFFECT}
        learning_rate = options.pop("lr", learning_rate)
        checked = StepOptions.checked(where, options)
        rate = arguments.learning_rate(where, learning_rate, self.schedule_type)
        super().__init__(name=name, jit_compile=False)
        self._options = checked
        self._plans, self._slots, self._accumulators, self._keys = (), [], [], ()
        self._added, self._own_variables = [], []
        self._no_decay = Exclusions()
        self._learning_rate = self._new_rate("learning_rate", rate)
        self.built = False
        # Wrappers and callbacks read these names.
        for option in KERAS_OPTIONS:
            setattr(self, option, getattr(checked, option))

    def __setattr__(self, name: str, value: Any) -> None:
        # A checkpoint has the slots by the list that tf_keras keeps of them. Other lists of them
        # would be saved too, and be missed where a state is restored before the first step.
        super().__setattr__(name, self._no_dependency(value) if name in _UNTRACKED else value)

    def build(self, var_list: Sequence[Any]) -> None:
        """Create the slots, in float32 also for float16 and bfloat16 variables."""
        variables = list(var_list)
        if self.built:
            self._refuse_unknown(variables)
            return
        self._warn_of_lost_exclusions(variables)
        self._make_slots(variables)
        self._build_index_dict(variables)
        self._own_variables = variables
        self.built = self._built = True

    @tf.autograph.experimental.do_not_convert  # as tf_keras does for its own
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        *,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> tf.Variable:
        """Update variables by (gradient, variable) pairs, and count one step.

        Args:
            grads_and_vars: Pairs; a gradient is a tensor, tf.IndexedSlices or None. Without any
                pair nothing happens.
            name: Name scope of what is created; the optimizer's name when left out.
            skip_gradients_aggregation: True when the gradients are already summed over replicas.
            experimental_aggregate_gradients: The older word for the opposite.

        Returns:
            The step counter.

        Raises:
            OptimizerArgumentError: no variable has a gradient, a variable is not one that the
                optimizer was built on, or a tf.compat.v1 graph is being built.
        """
        pairs = list(grads_and_vars)
        if not pairs:
            return self._iterations
        if not (tf.executing_eagerly() or tf.inside_function()):
            raise OptimizerArgumentError(
                f"{self.name}.apply_gradients: it must be called eagerly or in a tf.function. "
                "Got a call in a tf.compat.v1 graph, where nothing would run it. "
                "Use a tf.function, or the optimizer for tf.compat.v1."
            )
        variables = [variable for _, variable in pairs]
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        with tf.name_scope(name or self.name):
            with tf.init_scope():
                self.build(variables)
            self._run_step(pairs, aggregate)
        across_replicas(self._count_step, ())
        return self._iterations

    def _count_step(self, strategy: tf.distribute.Strategy) -> None:
        self._iterations.assign_add(1)

    def update_step(self, gradient: Any, variable: Any) -> None:
        """Update one variable, without clipping. `apply_gradients` does not go through it."""
        self._update_one(gradient, variable, self._current_rate())

    # Learning rate and counter -------------------------------------------------------------------

    @property
    def iterations(self) -> tf.Variable:
        """The number of steps; before the optimizer is built it may be set to another counter."""
        return self._iterations

    @iterations.setter
    def iterations(self, counter: tf.Variable) -> None:
        if self.built:
            raise OptimizerArgumentError(
                f"{self.name}.iterations: it must be set before the optimizer is built. "
                "Got an optimizer that is. Use iterations.assign(...) to change the number."
            )
        if not isinstance(counter, tf.Variable) or counter.dtype != tf.int64:
            raise OptimizerArgumentError(
                f"{self.name}.iterations: it must be an int64 tf.Variable. Got {counter!r}. "
                "Use iterations.assign(...) to change the number only."
            )
        self._variables = [counter, *self._variables[1:]]
        self._iterations = counter

    @property
    def learning_rate(self) -> Any:
        """The learning rate: a variable that can be assigned, or what its schedule says now."""
        rate = self._learning_rate
        if isinstance(rate, arguments.LiveRate):
            return rate.source
        return self._rate_now(rate) if callable(rate) else rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if isinstance(value, self.schedule_type):
            self._learning_rate = value
        elif callable(self._learning_rate) and not hasattr(self.learning_rate, "assign"):
            raise OptimizerArgumentError(
                f"{self.name}.learning_rate: it can be set where it is a number. Got an optimizer "
                f"whose rate is a {type(self._learning_rate).__name__}. "
                "Make the optimizer with a number, or set another schedule."
            )
        else:
            self.learning_rate.assign(arguments.non_negative(self.name, "learning_rate", value))

    def _current_rate(self) -> tf.Tensor:
        return self._rate_now(self._learning_rate)

    def _new_rate(self, name: str, rate: Any) -> Any:
        """Return a learning rate as the optimizer keeps it: a number becomes a variable."""
        if not isinstance(rate, float):
            return rate
        with tf.init_scope():
            variable = tf.Variable(rate, dtype=tf.float32, name=name, trainable=False)
        setattr(self, f"_{name}", variable)  # so that checkpoints have it
        return variable

    def _rate_now(self, rate: Any) -> tf.Tensor:
        is_schedule = isinstance(rate, self.schedule_type)
        if callable(rate):
            rate = rate(self._iterations) if is_schedule else rate()
        return tf.convert_to_tensor(rate)

    def _rate_variables(self) -> dict[str, Any]:
        rate = self._learning_rate
        return {"learning_rate": rate} if isinstance(rate, tf.Variable) else {}

    def _native_counter(self) -> tf.Variable:
        return self._iterations

    def _counter(self) -> tf.Variable:
        return self._iterations

    # Variables of the optimizer ------------------------------------------------------------------

    @property
    def variables(self) -> CallableList:
        """The optimizer's variables in the order of `get_weights`, on which model files rely."""
        rates = self._rate_variables()
        return CallableList(v for key, v in self.state_variables().items() if key not in rates)

    def add_variable(
        self, shape: Sequence[int], dtype: Any = None, initializer: Any = "zeros", name: Any = None
    ) -> tf.Variable:
        """Add a variable of your own to the optimizer's state; the step does not touch it.

        Args:
            shape: Its shape.
            dtype: Its dtype; that of `tf_keras.backend.floatx()` when left out.
            initializer: An initializer of tf_keras, or its name.
            name: Its name, and its key in `named_state`.
        """
        variable = super().add_variable(shape, dtype, initializer, name)
        self._added.append((name or variable_path(variable), variable))
        return variable

    def add_variable_from_reference(
        self,
        model_variable: Any,
        variable_name: str,
        shape: Sequence[int] | None = None,
        initial_value: Any = None,
    ) -> tf.Variable:
        """Add a variable of your own that goes with a model variable.

        Args:
            model_variable: The model variable, whose dtype it takes.
            variable_name: Its key in `named_state` is `<variable path>/<variable_name>`.
            shape: Its shape; that of the model variable when left out.
            initial_value: Its values; zeros when left out.
        """
        made = super().add_variable_from_reference(
            model_variable, variable_name, shape, initial_value
        )
        self._added.append((f"{variable_path(model_variable)}/{variable_name}", made))
        return made

    def _new_slot(
        self, variable: Any, path: str, slot: str, spec: SlotSpec, values: Any = None
    ) -> tf.Variable:
        # The method of tf_keras would take the dtype of the variable. It also joins the slots of
        # the parts of a sharded variable, so that they are saved as one.
        reference = SimpleNamespace(dtype=spec.dtype, _shared_name=path.replace("#", "_"))
        if hasattr(variable, "_sharded_container"):
            reference._sharded_container = variable._sharded_container
        start = tf.zeros(spec.shape, spec.dtype) if values is None else tf.cast(values, spec.dtype)
        if spec.copies_weights:
            start = tf.cast(tf.convert_to_tensor(variable), spec.dtype)
        plain: Any = super(tf_keras.optimizers.Optimizer, self)
        return plain.add_variable_from_reference(reference, slot, initial_value=start)

    def save_own_variables(self, store: Any) -> None:
        """Put the variables into a saved model's file; tf_keras calls this."""
        for index, variable in enumerate(self.variables):
            values = variable.numpy()
            # HDF5 has no bfloat16; float32 holds its numbers exactly.
            is_bfloat16 = variable.dtype == tf.bfloat16
            store[str(index)] = values.astype(np.float32) if is_bfloat16 else values

    def load_own_variables(self, store: Any) -> None:
        """Take the variables from a saved model's file; tf_keras calls this."""
        if len(store.keys()) != len(self.variables):
            super().load_own_variables(store)  # it says what is wrong
            return
        for index, variable in enumerate(self.variables):
            variable.assign(np.asarray(store[str(index)]).astype(variable.dtype.as_numpy_dtype))

    def _initial_values(self, initializer: Any, shape: tuple[int, ...], dtype: tf.DType) -> Any:
        if isinstance(initializer, np.ndarray | tf.Tensor):
            return initializer
        return tf_keras.initializers.get(initializer)(shape, dtype=dtype)

    # What the step and the surface ask for -------------------------------------------------------

    def _knows(self, variable: Any) -> bool:
        return self.built and self._var_key(variable) in self._index_dict

    def _index_of(self, variable: Any) -> int:
        self._refuse_unknown([variable])
        return self._index_dict[self._var_key(variable)]

    def _built_on(self) -> Sequence[Any]:
        return self._own_variables

    def _pattern_path(self, variable: Any) -> str:
        # That of the whole, for a part of a sharded variable.
        return re.sub(r"/part_\d+$", "", variable_path(variable))

    def _planned(self, key: str, variable: Any) -> Plan:
        plan = super()._planned(key, variable)
        if hasattr(variable, "_sharded_container"):
            rule = plan.rule
            by_norm = isinstance(rule, LambRule) and rule.adapt and not rule.by_row
            if by_norm or self._options.clipnorm is not None:
                raise OptimizerArgumentError(
                    f"{self.name}: nothing may depend on the norm of a variable that is sharded, "
                    f"since each part is updated where it lies. Got {key} with "
                    f"{'a trust ratio' if by_norm else 'clipnorm'}. Use "
                    + ("row_trust_ratio or an exclusion." if by_norm else "global_clipnorm.")
                )
        return plan

    # Configuration -------------------------------------------------------------------------------

    @staticmethod
    def _object_scope(objects: Mapping[str, Any]) -> AbstractContextManager[Any]:
        return tf_keras.saving.custom_object_scope(dict(objects))

    @staticmethod
    def _made_of(config: dict[str, Any]) -> Any:
        # A HDF5 file says no module; this function knows the schedules of tf_keras by name.
        return tf_keras.optimizers.schedules.deserialize(config)

    def _config_of(self, value: Any) -> Any:
        if isinstance(value, arguments.LiveRate):
            value = value.source
        if isinstance(value, tf.Variable):
            # float32 holds 0.001 as 0.0010000000474974513; the shortest decimal of the same
            # float32 is what the user wrote.
            return float(str(np.float32(value.numpy())))
        return value if isinstance(value, float) else tf_keras.saving.serialize_keras_object(value)


_WITHOUT_EFFECT = frozenset({"is_legacy_optimizer", "jit_compile"})
_UNTRACKED = frozenset({"_accumulators", "_added", "_own_variables", "_slots"})
