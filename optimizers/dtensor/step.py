"""The step of the DTensor Adam: from pairs of gradient and variable to updated variables."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from rowstep.optimizers import update_rules
from rowstep.optimizers.dtensor.gradients import Prepared, clipped, prepared
from rowstep.optimizers.dtensor.layout import is_on_mesh
from rowstep.optimizers.dtensor.options import GradientsClipOption
from rowstep.optimizers.dtensor.state import MeshState
from rowstep.optimizers.dtensor.update import Averaging, Coefficients, update_variable
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.gradients import compute_dtype
from rowstep.optimizers.variables import variable_path, variables_by_path

__all__ = ["MeshStep"]

Pairs: TypeAlias = Iterable[tuple[Any, Any]]
_log = logging.getLogger(__name__)


class Scalars(NamedTuple):
    """Hold what may come from a callable, asked once a step for all variables."""

    learning_rate: tf.Tensor
    beta_1: float
    beta_2: float


class MeshStep(MeshState):
    """Add the step of Adam to its state and hyperparameters."""

    def aggregate_gradients(self, grads_and_vars: Pairs) -> Pairs:
        """Sum gradients over the replicas of a strategy; on a mesh return the same object.

        On a mesh the backward pass has summed already.
        """
        if self._mesh or tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return grads_and_vars
        return super().aggregate_gradients(grads_and_vars)

    def apply_gradients(
        self,
        grads_and_vars: Pairs,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Take one step, and build first where that was not done.

        Gradients that are None are left out with a warning in the log.

        Args:
            grads_and_vars: Pairs of (gradient, variable).
            name: Name scope of what is created; the optimizer's name when left out.
            skip_gradients_aggregation: The gradients are summed over the replicas already.
            **kwargs: experimental_aggregate_gradients, the opposite, under its older name.

        Returns:
            `iterations`, one higher than before.

        Raises:
            OptimizerArgumentError: all gradients are None, a shape does not fit, a variable is
                unknown or lives elsewhere. Nothing has been updated.
            tf.errors.InvalidArgumentError: a row id is out of range, or a gradient has NaN or
                infinity. Nothing has been updated. In a tf.function on a mesh TensorFlow raises it
                late, when something on the mesh is next read, and as CancelledError where another
                device was faster to stop.
        """
        pairs = list(grads_and_vars)
        if not pairs:
            return self.iterations
        with tf.name_scope(name or self.name):
            with tf.init_scope():
                self.build([variable for _, variable in pairs])
            pairs = self._with_gradient(pairs)
            if not skip_gradients_aggregation and kwargs.get(
                "experimental_aggregate_gradients", True
            ):
                pairs = list(self.aggregate_gradients(pairs))
            return self._apply(pairs)

    def update_step(self, gradient: tf.Tensor | tf.IndexedSlices, variable: Any) -> None:
        """Update one variable by its gradient, without clipping and without counting a step."""
        self._refuse_unknown("update_step", [variable])
        result, checks = prepared(gradient, variable, self.lazy, variable_path(variable))
        with tf.control_dependencies(checks):
            self._update(variable, result, self._scalars())

    def _with_gradient(self, pairs: Pairs) -> list[tuple[Any, Any]]:
        pairs = list(pairs)
        without = [variable for gradient, variable in pairs if gradient is None]
        names = ", ".join(variables_by_path(without))
        if len(without) == len(pairs):
            raise OptimizerArgumentError(
                f"{self.name}.apply_gradients: at least one gradient must be there. Got None for "
                f"{names}. Compute the loss from these variables under the tape."
            )
        if without:
            _log.warning("%s: no gradient for %s, which stay as they are", self.name, names)
        given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        self._refuse_unknown("apply_gradients", [variable for _, variable in given])
        return given

    def _apply(self, pairs: list[tuple[Any, Any]]) -> Any:
        items, checks = [], []
        for gradient, variable in pairs:
            item, more = prepared(gradient, variable, self.lazy, variable_path(variable))
            items.append(item)
            checks += more
        items = clipped(
            items, GradientsClipOption(self.clipnorm, self.clipvalue, self.global_clipnorm)
        )
        updates = list(zip([variable for _, variable in pairs], items, strict=True))
        scalars = self._scalars()
        with tf.control_dependencies(checks):
            if not tf.distribute.has_strategy():
                return self._update_all(updates, scalars)
            replica = tf.distribute.get_replica_context()
            return replica.merge_call(self._update_replicas, args=(updates, scalars))

    def _update_all(self, updates: list[tuple[Any, Prepared]], scalars: Scalars) -> Any:
        for variable, item in updates:
            self._update_compiled(variable, item, scalars)
        return self.iterations.assign_add(1)

    def _update_replicas(
        self,
        strategy: tf.distribute.Strategy,
        updates: list[tuple[Any, Prepared]],
        scalars: Scalars,
    ) -> Any:
        for variable, item in updates:
            strategy.extended.update(
                variable, self._update_compiled, args=(item, scalars), group=False
            )
        return self.iterations.assign_add(1)

    def _update_compiled(self, variable: Any, gradient: Prepared, scalars: Scalars) -> None:
        if self.jit_compile and isinstance(gradient, tf.Tensor) and not is_on_mesh(variable):
            # The key makes the trace of each variable its own.
            self._update_with_xla(variable, gradient, scalars, key=self._var_key(variable))
        else:
            self._update(variable, gradient, scalars)

    @tf.function(jit_compile=True)
    def _update_with_xla(
        self, variable: Any, gradient: tf.Tensor, scalars: Scalars, key: str
    ) -> None:
        self._update(variable, gradient, scalars)

    def _update(self, variable: Any, gradient: Prepared, scalars: Scalars) -> None:
        averaging = None
        if self.use_ema:
            averaging = Averaging(self.ema_momentum, self._overwrites())
        coefficients = self._coefficients(variable, scalars)
        slots = self._slots_of(variable)
        update_variable(variable, slots, gradient, coefficients, averaging)

    def _overwrites(self) -> tf.Tensor | None:
        if self.ema_overwrite_frequency is None:
            return None
        step = self.iterations.read_value() + 1
        return tf.equal(tf.math.floormod(step, self.ema_overwrite_frequency), 0)

    def _scalars(self) -> Scalars:
        return Scalars(
            tf.convert_to_tensor(self.learning_rate),
            self._decay_of("beta_1"),
            self._decay_of("beta_2"),
        )

    def _coefficients(self, variable: Any, scalars: Scalars) -> Coefficients:
        dtype = compute_dtype(variable.dtype)
        rate = tf.cast(scalars.learning_rate, dtype)
        beta_1, beta_2 = scalars.beta_1, scalars.beta_2
        number = self.iterations.read_value() + 1
        step = tf.cast(number, dtype)
        epsilon: Any = self.epsilon
        if self.adaptive_epsilon:
            epsilon *= tf.sqrt(update_rules.bias_correction(beta_2, step))
        decay = rate * self.weight_decay if self._decays(variable) else None
        step_size = update_rules.adam_step_size(rate, beta_1, beta_2, step)
        return Coefficients(step_size, decay, beta_1, beta_2, epsilon, number)
