"""The step around the formula, free of Keras: every adapter runs this one.

In this order: unscale the gradients, sum them over replicas, check row ids and numbers, sum
duplicated rows, accumulate, clip, update each variable. The order is the point. Summing duplicates
before the replicas' gradients are joined would leave duplicates between replicas, and clipping
before it would measure the parts of a row instead of the row.
"""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from rowstep.optimizers import averages, gradients
from rowstep.optimizers.accumulation import accumulate
from rowstep.optimizers.averages import AveragedWeights
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.gradients import Gradient
from rowstep.optimizers.replicas import across_replicas, of_this_replica
from rowstep.optimizers.row_update import Step, update_variable
from rowstep.optimizers.slots import SlotMaker
from rowstep.optimizers.variables import native_variable, variables_by_path

__all__ = ["RowStep"]


class RowStep(SlotMaker, AveragedWeights):
    """Run one step: gradients in, clipped and summed by row, to each variable.

    A recipe (LazyAdam, LAMB ...) says how a variable moves: `_plan`. An adapter says what Keras
    gives: `_native_counter`, `_current_rate`, `_index_of`, `_new_slot`.
    """

    built: bool

    # What recipes and adapters provide ---------------------------------------------------------

    def _native_counter(self) -> tf.Variable:
        """Return the variable that counts calls of the step."""
        raise NotImplementedError

    def _current_rate(self) -> Any:
        """Return the learning rate of this step, before `decay`."""
        raise NotImplementedError

    def _group_rates(self) -> list[Any]:
        """Return the learning rates that `Plan.rate_group` counts from 1."""
        return []

    # The step ----------------------------------------------------------------------------------

    def _run_step(self, pairs: Iterable[tuple[Any, Any]], aggregate: bool) -> None:
        pairs = _present(self.name, list(pairs))
        pairs = self.aggregate_gradients(pairs) if aggregate else pairs
        self._update_all([g for g, _ in pairs], [v for _, v in pairs])
        accumulates = self._options.gradient_accumulation_steps is not None
        for variable in self._built_on() if accumulates else [v for _, v in pairs]:
            # A constraint of rows was applied to the rows that moved.
            if variable.constraint is not None and not hasattr(variable, "row_constraint"):
                variable.assign(variable.constraint(variable))

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

    def _update_all(self, raw_gradients: list[Any], variables: list[Any]) -> None:
        indices = [self._index_of(variable) for variable in variables]
        self._refuse_repeated(indices)
        natives = [native_variable(variable) for variable in variables]
        checked = [
            self._checked(index, native, gradient)
            for index, native, gradient in zip(indices, natives, raw_gradients, strict=True)
        ]
        # Every id is checked before anything moves, also the ids of variables updated later.
        with tf.control_dependencies([check for _, checks in checked for check in checks]):
            grads = [tf.nest.map_structure(tf.identity, gradient) for gradient, _ in checked]
            step, rates = self._step_now(), self._rates()
            if self._options.clip_before_sum:
                grads = [gradients.summed(gradient) for gradient in self._clipped(grads)]
            else:
                grads = [gradients.summed(gradient) for gradient in grads]
            active = [step.active] * len(grads)
            if self._options.gradient_accumulation_steps is not None:
                # All variables: one without a gradient in this call may have had it before.
                grads, active = self._accumulated(dict(zip(indices, grads, strict=True)), step)
                natives = [native_variable(variable) for variable in self._built_on()]
                indices = list(range(len(natives)))
            if not self._options.clip_before_sum:
                grads = self._clipped(grads)
            self._write(indices, natives, grads, rates, step, active)

    def _checked(
        self, index: int, native: tf.Variable, gradient: Any
    ) -> tuple[Gradient, list[tf.Operation]]:
        options = self._options
        return gradients.checked(
            gradient,
            native,
            f"{self.name}, {self._keys[index]}",
            scale=options.loss_scale_factor or 1.0,
            finite=options.check_finite,
        )

    def _write(
        self,
        indices: list[int],
        natives: list[tf.Variable],
        grads: list[Gradient],
        rates: list[tf.Tensor],
        step: Step,
        active: list[tf.Tensor | None],
    ) -> None:
        def update(
            strategy: tf.distribute.Strategy, grads: Any, rates: Any, step: Any, active: Any
        ) -> None:
            if self._options.use_ema:
                averages.start(strategy, self._averaged_variables(), step)
            for index, native, gradient, moves in zip(indices, natives, grads, active, strict=True):
                function = functools.partial(self._update, index, tuple(self._slots[index]))
                rate = rates[self._plans[index].rate_group]
                args = (gradient, rate, step._replace(active=moves))
                args += tuple(native_variable(slot) for slot in self._slots[index].values())
                strategy.extended.update(native, function, args=args, group=False)
            if self._options.use_ema and self._options.ema_overwrite_frequency is not None:
                every = self._options.ema_overwrite_frequency
                averages.overwrite(strategy, self._averaged_variables(), step, every)

        across_replicas(update, (grads, rates, step, active))

    def _update(
        self,
        index: int,
        slot_names: tuple[str, ...],
        variable: tf.Variable,
        gradient: Gradient,
        learning_rate: tf.Tensor,
        step: Step,
        *slots: tf.Variable,
    ) -> None:
        named = dict(zip(slot_names, slots, strict=True))
        update_variable(self._plans[index], variable, named, gradient, learning_rate, step)

    def _update_one(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable without clipping, accumulation or counting."""
        index, native = self._index_of(variable), native_variable(variable)
        raw, checks = self._checked(index, native, gradient)
        with tf.control_dependencies(checks):
            gradient = tf.nest.map_structure(tf.identity, gradients.summed(raw))
            slots = [native_variable(slot) for slot in self._slots[index].values()]
            names = tuple(self._slots[index])
            number = Step(self._num_updates() + 1)
            rate = tf.convert_to_tensor(learning_rate)
            self._update(index, names, native, gradient, rate, number, *slots)

    def _accumulated(
        self, grads: dict[int, Gradient], step: Step
    ) -> tuple[list[Gradient], list[tf.Tensor | None]]:
        """Return the gradient of every variable, and whether it is one to move by."""
        num_calls = self._options.gradient_accumulation_steps or 1

        def update(strategy: tf.distribute.Strategy, grads: Any, step: Any) -> list[Any]:
            results = []
            for index, slots in enumerate(self._accumulators):
                first, *rest = (native_variable(slot) for slot in slots.values())
                function = functools.partial(accumulate, num_calls)
                args = (grads.get(index), step, *rest)
                results.append(strategy.extended.update(first, function, args=args, group=False))
            return results

        results = across_replicas(update, (grads, step))
        means = [of_this_replica(mean) for mean, _ in results]
        return means, [of_this_replica(active) for _, active in results]

    def _clipped(self, unclipped: list[Gradient]) -> list[Gradient]:
        options = self._options
        if options.clipvalue is not None:
            unclipped = gradients.by_value(unclipped, options.clipvalue)
        if options.clipnorm is not None:
            return gradients.by_norm(unclipped, options.clipnorm)
        if options.global_clipnorm is not None:
            return gradients.by_global_norm(unclipped, options.global_clipnorm)
        return unclipped

    def _step_now(self) -> Step:
        calls = tf.convert_to_tensor(self._native_counter()) + 1
        per_update = self._options.gradient_accumulation_steps
        if per_update is None:
            return Step(calls)
        return Step(calls // per_update, tf.equal(calls % per_update, 0))

    def _rates(self) -> list[tf.Tensor]:
        """Return the learning rate of this step, then that of each group."""
        given = (self._current_rate(), *self._group_rates())
        rates = [tf.convert_to_tensor(rate) for rate in given]
        if self._options.decay > 0.0:
            num_updates = tf.cast(self._num_updates(), rates[0].dtype)
            rates = [rate / (1.0 + self._options.decay * num_updates) for rate in rates]
        return rates

    def _num_updates(self) -> tf.Tensor:
        calls = tf.convert_to_tensor(self._native_counter())
        return calls // (self._options.gradient_accumulation_steps or 1)

    def _refuse_repeated(self, indices: Sequence[int]) -> None:
        counts = collections.Counter(indices)
        repeated = sorted({self._keys[i] for i, count in counts.items() if count > 1})
        if repeated:
            raise OptimizerArgumentError(
                f"{self.name}: a variable must not be twice in one step. "
                f"Got {', '.join(repeated)} again. Add its gradients first."
            )


def _present(where: str, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    missing = [variable for gradient, variable in pairs if gradient is None]
    if missing:
        names = ", ".join(variables_by_path(missing))
        if len(missing) == len(pairs):
            raise OptimizerArgumentError(
                f"{where}: at least one variable must have a gradient. Got None for {names}. "
                "Compute the loss from the variables, inside the tape."
            )
        warnings.warn(f"No gradient reached {names}: left unchanged.", stacklevel=4)
    return [(gradient, variable) for gradient, variable in pairs if gradient is not None]
