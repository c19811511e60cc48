"""What LazyAdam and LAMB share: the step around the formula, and the methods around the step.

One step, in this order: sum the gradients over replicas, check row ids, sum duplicated rows, clip,
update each variable. The order is the point. Summing duplicates before the replicas' gradients
are joined would leave duplicates between replicas, and clipping before it would measure the parts
of a row instead of the row.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers import arguments, gradients
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.gradients import Gradient, compute_dtype
from rowstep.optimizers.sparse_rows import RowGradient
from rowstep.optimizers.surface import OptimizerSurface
from rowstep.optimizers.variables import native_variable, variables_by_path

__all__ = ["RowOptimizer"]


class RowOptimizer(OptimizerSurface):
    """Run the step around the formula: gradients in, clipped and summed by row, to each variable.

    Subclasses say how one variable moves: `_update_dense` and `_update_rows`.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("momentum", "velocity")

    def __init__(
        self,
        learning_rate: Any,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        clips: Mapping[str, float | None],
        name: str,
        refused: Mapping[str, Any],
    ) -> None:
        where = type(self).__name__
        arguments.refuse(where, refused)
        betas = [arguments.beta(where, n, v) for n, v in (("beta_1", beta_1), ("beta_2", beta_2))]
        epsilon = arguments.non_negative(where, "epsilon", epsilon)
        super().__init__(
            learning_rate=arguments.learning_rate(where, learning_rate),
            name=name,
            **arguments.clips(where, **clips),
        )
        self.beta_1, self.beta_2 = betas
        self.epsilon = epsilon
        self._slots: dict[str, list[keras.Variable]] = {}
        self._keys: tuple[str, ...] = ()

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the slots, in float32 also for float16 and bfloat16 variables."""
        variables = list(variables)
        if self.built:
            self._refuse_unknown(variables)
            return
        self._refuse_unusual(variables)
        slots: dict[str, list[keras.Variable]] = {slot: [] for slot in self.slot_names}
        for variable in variables:
            native = native_variable(variable)
            with tf.distribute.get_strategy().extended.colocate_vars_with(native):
                for slot in self.slot_names:
                    slots[slot].append(self._new_slot(variable, slot))
        self._slots = slots
        self._keys = tuple(variables_by_path(variables))
        super().build(variables)

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

    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Return the pairs with gradients summed over the replicas of a tf.distribute strategy.

        Sparse gradients are joined, so that a row may be in them once for each replica.
        """
        pairs = list(grads_and_vars)
        context = tf.distribute.get_replica_context()
        present = [gradient for gradient, _ in pairs if gradient is not None]
        if not present or context is None or context.strategy.num_replicas_in_sync == 1:
            return pairs
        summed = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, present))
        return [(None if gradient is None else next(summed), v) for gradient, v in pairs]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable, without clipping. Keras' hook; `apply` does not go through it."""
        index = self._get_variable_index(variable)
        native = native_variable(variable)
        gradient, checks = gradients.prepared(gradient, native, self._where(index))
        with tf.control_dependencies(checks):
            gradient = tf.nest.map_structure(tf.identity, gradient)
            slots = self._native_slots(index)
            self._update(index, native, gradient, learning_rate, self._step(), *slots)

    def _apply(self, grads: list[Any], variables: Iterable[Any] | None, aggregate: bool) -> None:
        variables = self._resolved(grads, variables)
        with tf.name_scope(self.name):
            pairs = _present(list(zip(grads, variables, strict=True)))
            pairs = self.aggregate_gradients(pairs) if aggregate else pairs
            self._update_all([g for g, _ in pairs], [v for _, v in pairs])
            for _, variable in pairs:
                if variable.constraint is not None:
                    variable.assign(variable.constraint(variable))
        self.iterations.assign_add(1)

    def _update_all(self, raw_gradients: list[Any], variables: list[Any]) -> None:
        indices = [self._get_variable_index(variable) for variable in variables]
        natives = [native_variable(variable) for variable in variables]
        prepared = [
            gradients.prepared(gradient, native, self._where(index))
            for index, native, gradient in zip(indices, natives, raw_gradients, strict=True)
        ]
        learning_rate = keras.ops.convert_to_tensor(self.learning_rate)

        def update(
            strategy: tf.distribute.Strategy, clipped: Any, learning_rate: Any, step: Any
        ) -> None:
            for index, native, gradient in zip(indices, natives, clipped, strict=True):
                function = functools.partial(self._update, index)
                args = (gradient, learning_rate, step, *self._native_slots(index))
                strategy.extended.update(native, function, args=args, group=False)

        # Every id is checked before anything moves, also the ids of variables updated later.
        with tf.control_dependencies([check for _, checks in prepared for check in checks]):
            clipped = self._clipped([gradient for gradient, _ in prepared])
            clipped = [tf.nest.map_structure(tf.identity, gradient) for gradient in clipped]
            args = (clipped, learning_rate, self._step())
            context = tf.distribute.get_replica_context()
            if context is not None and tf.distribute.has_strategy():
                context.merge_call(update, args=args)
            else:
                update(tf.distribute.get_strategy(), *args)

    def _clipped(self, unclipped: list[Gradient]) -> list[Gradient]:
        if self.clipnorm is not None:
            return gradients.by_norm(unclipped, self.clipnorm)
        if self.global_clipnorm is not None:
            return gradients.by_global_norm(unclipped, self.global_clipnorm)
        if self.clipvalue is not None:
            return gradients.by_value(unclipped, self.clipvalue)
        return unclipped

    def _update(
        self,
        index: int,
        variable: tf.Variable,
        gradient: Gradient,
        learning_rate: Any,
        step: tf.Tensor,
        *slots: tf.Variable,
    ) -> None:
        dtype = compute_dtype(variable.dtype)
        rate, t = tf.cast(learning_rate, dtype), tf.cast(step, dtype)
        update: Callable[..., None] = self._update_dense
        if isinstance(gradient, RowGradient):
            update = self._update_rows
        update(index, variable, gradient, rate, t, *slots)

    def _update_dense(
        self,
        index: int,
        variable: tf.Variable,
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
        t: tf.Tensor,
        *slots: tf.Variable,
    ) -> None:
        raise NotImplementedError

    def _update_rows(
        self,
        index: int,
        variable: tf.Variable,
        gradient: RowGradient,
        learning_rate: tf.Tensor,
        t: tf.Tensor,
        *slots: tf.Variable,
    ) -> None:
        raise NotImplementedError

    def _resolved(self, grads: list[Any], variables: Iterable[Any] | None) -> list[Any]:
        if variables is None:
            variables = self._trainable_variables
        variables = list(variables)
        if not variables or len(grads) != len(variables):
            raise OptimizerArgumentError(
                f"{self.name}: there must be variables, and one gradient for each. "
                f"Got {len(grads)} gradients for {len(variables)} variables. "
                "Pass None as the gradient of a variable that has none."
            )
        if not self.built:
            with tf.name_scope(self.name):
                self.build(variables)
        self._refuse_unknown(variables)
        return variables

    def _new_slot(self, variable: Any, slot: str) -> keras.Variable:
        path = next(iter(variables_by_path([variable])))
        return self.add_variable(
            shape=tuple(variable.shape),
            initializer="zeros",
            dtype=compute_dtype(native_variable(variable).dtype).name,
            name=f"{path.replace('/', '_').replace(':', '_')}_{slot}",
        )

    def _refuse_unusual(self, variables: Sequence[Any]) -> None:
        for path, variable in variables_by_path(variables).items():
            if not native_variable(variable).dtype.is_floating:
                raise OptimizerArgumentError(
                    f"{self.name}: variables must be of a floating dtype. "
                    f"Got {path} of {variable.dtype}. Leave it out of the trainable variables."
                )
            if getattr(variable, "overwrite_with_gradient", False):
                raise OptimizerArgumentError(
                    f"{self.name}: variables must not be overwritten by their gradient, as float8 "
                    f"scales are. Got {path}. Train it with a Keras optimizer."
                )

    def _where(self, index: int) -> str:
        return f"{self.name}, {self._keys[index]}"

    def _step(self) -> tf.Tensor:
        return self.iterations.value + 1

    def _native_slots(self, index: int) -> list[tf.Variable]:
        return [self._slots[slot][index].value for slot in self.slot_names]

    def get_config(self) -> dict[str, Any]:
        """Return all constructor arguments; `from_config` makes the same optimizer of them."""
        config = super().get_config()
        if isinstance(config["learning_rate"], float):
            # The variable is float32: 0.001 comes back as 0.0010000000474974513. The shortest
            # decimal of the same float32 is what the user wrote.
            config["learning_rate"] = float(str(np.float32(config["learning_rate"])))
        return config | {"beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon}


def _present(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    missing = [variable for gradient, variable in pairs if gradient is None]
    if missing:
        names = ", ".join(variables_by_path(missing))
        if len(missing) == len(pairs):
            raise OptimizerArgumentError(
                f"apply: at least one variable must have a gradient. Got None for {names}. "
                "Compute the loss from the variables, inside the tape."
            )
        warnings.warn(f"No gradient reached {names}: left unchanged.", stacklevel=4)
    return [(gradient, variable) for gradient, variable in pairs if gradient is not None]
