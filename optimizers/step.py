"""The step around the formula, free of Keras: every adapter runs this one.

In this order: unscale the gradients, sum them over replicas, check row ids and numbers, sum
duplicated rows, accumulate, clip, update each variable. The order is the point. Summing duplicates
before the replicas' gradients are joined would leave duplicates between replicas, and clipping
before it would measure the parts of a row instead of the row.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from rowstep.optimizers import averages, gradients
from rowstep.optimizers.accumulation import accumulate, accumulator_specs
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.gradients import Gradient
from rowstep.optimizers.options import StepOptions
from rowstep.optimizers.row_update import Plan, SlotSpec, Step, update_variable
from rowstep.optimizers.sparse_rows import RowGradient
from rowstep.optimizers.variables import native_variable, variables_by_path

__all__ = ["RowStep", "across_replicas"]


class RowStep:
    """Run one step: gradients in, clipped and summed by row, to each variable.

    A recipe (LazyAdam, LAMB ...) says how a variable moves: `_plan`. An adapter says what Keras
    gives: `_native_counter`, `_current_rate`, `_index_of`, `_new_slot`.
    """

    name: str
    built: bool
    average_starts_at_first_step: ClassVar[bool] = True
    _options: StepOptions
    _plans: tuple[Plan, ...]
    _slots: Sequence[Mapping[str, Any]]
    _accumulators: Sequence[Mapping[str, Any]]
    _keys: tuple[str, ...]

    # What recipes and adapters provide ---------------------------------------------------------

    def _plan(self, path: str, is_table: bool, decays: bool) -> Plan:
        """Return how the variable of this path is updated."""
        raise NotImplementedError

    def _native_counter(self) -> tf.Variable:
        """Return the variable that counts calls of the step."""
        raise NotImplementedError

    def _current_rate(self) -> Any:
        """Return the learning rate of this step, before `decay`."""
        raise NotImplementedError

    def _group_rates(self) -> list[Any]:
        """Return the learning rates that `Plan.rate_group` counts from 1."""
        return []

    def _index_of(self, variable: Any) -> int:
        raise NotImplementedError

    def _new_slot(self, variable: Any, path: str, slot: str, spec: SlotSpec) -> Any:
        raise NotImplementedError

    def _is_table(self, path: str) -> bool:
        raise NotImplementedError

    def _decays(self, path: str, variable: Any) -> bool:
        raise NotImplementedError

    def _built_on(self) -> Sequence[Any]:
        """Return the variables that the optimizer was built on."""
        raise NotImplementedError

    # Slots -------------------------------------------------------------------------------------

    def _make_slots(self, variables: Sequence[Any]) -> None:
        by_path = variables_by_path(variables)
        self._refuse_unusual(by_path)
        self._require_tables(by_path)
        plans = [self._planned(path, variable) for path, variable in by_path.items()]
        slots, accumulators = [], []
        for plan, (path, variable) in zip(plans, by_path.items(), strict=True):
            native = native_variable(variable)
            shape = tuple(native.shape)
            make = functools.partial(self._new_slot, variable, path)
            with tf.distribute.get_strategy().extended.colocate_vars_with(native):
                specs = plan.slot_specs(shape, native.dtype)
                slots.append({slot: make(slot, spec) for slot, spec in specs.items()})
                specs = {}
                if self._options.gradient_accumulation_steps is not None:
                    specs = accumulator_specs(shape, native.dtype)
                accumulators.append({slot: make(slot, spec) for slot, spec in specs.items()})
        self._plans, self._keys = tuple(plans), tuple(by_path)
        self._slots, self._accumulators = slots, accumulators

    def _planned(self, path: str, variable: Any) -> Plan:
        is_table = self._is_table(path)
        plan = self._plan(path, is_table, self._decays(path, variable))
        options = self._options
        return dataclasses.replace(
            plan,
            average_momentum=options.ema_momentum if options.use_ema else None,
            average_starts_at_first_step=self.average_starts_at_first_step,
            state_dtype=options.slot_dtype if is_table else None,
            stochastic_rounding=options.stochastic_rounding,
            # Of the path, so that a variable's rounding does not depend on its neighbours.
            seed=zlib.crc32(f"{options.seed}:{path}".encode()),
            row_constraint=getattr(variable, "row_constraint", None),
        )

    # The step ----------------------------------------------------------------------------------

    def _run_step(self, pairs: Iterable[tuple[Any, Any]], aggregate: bool) -> None:
        pairs = _present(list(pairs))
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
        means = [_of_this_replica(mean) for mean, _ in results]
        return means, [_of_this_replica(active) for _, active in results]

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

    # The average of the weights ------------------------------------------------------------------

    def _averaged_variables(self) -> list[averages.Averaged]:
        return [
            averages.Averaged(
                native_variable(variable),
                native_variable(slots["average"]),
                native_variable(slots["average_step"]) if "average_step" in slots else None,
                self._options.ema_momentum,
            )
            for variable, slots in zip(self._built_on(), self._slots, strict=True)
        ]

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Set variables to their moving average, where the optimizer keeps one.

        Args:
            var_list: Variables that the optimizer was built on.

        Cost: O(V * D).
        """
        if not self._options.use_ema:
            return
        wanted = {self._index_of(variable) for variable in var_list}
        averaged = [a for i, a in enumerate(self._averaged_variables()) if i in wanted]
        step = Step(self._num_updates())
        across_replicas(
            lambda strategy, step: averages.overwrite(strategy, averaged, step), (step,)
        )

    @property
    def _model_variables_moving_average(self) -> list[Any]:
        # Keras' SwapEMAWeights looks for this name. It swaps whole variables, so the rows that were
        # absent catch up first.
        if not getattr(self, "_slots", None) or not self._options.use_ema:
            raise AttributeError("_model_variables_moving_average: use_ema is not set.")
        averaged_variables = self._averaged_variables()
        for key, averaged in zip(self._keys, averaged_variables, strict=True):
            if averaged.variable.dtype != averaged.average.dtype:
                raise OptimizerArgumentError(
                    f"{self.name}: weights and averages that are swapped must be of one dtype. "
                    f"Got {key} of {averaged.variable.dtype.name} with an average of "
                    f"{averaged.average.dtype.name}. Use finalize_variable_values instead."
                )
        number = self._num_updates()
        for averaged in averaged_variables:
            averages.settle(averaged, number)
        return [slots["average"] for slots in self._slots]

    # Checks --------------------------------------------------------------------------------------

    def _table_options(self) -> list[str]:
        """Return the names of the options in use that concern tables only."""
        return [] if self._options.state_dtype is None else ["state_dtype"]

    def _require_tables(self, by_path: Mapping[str, Any]) -> None:
        if self._table_options() and not any(self._is_table(path) for path in by_path):
            raise OptimizerArgumentError(
                f"{self.name}: {', '.join(self._table_options())} concerns tables, so there must "
                f"be one. Got {', '.join(by_path)}, of which none matches "
                f"tables={list(self._options.tables)}. Set tables to patterns of your tables."
            )

    def _refuse_repeated(self, indices: Sequence[int]) -> None:
        repeated = sorted({self._keys[i] for i in indices if indices.count(i) > 1})
        if repeated:
            raise OptimizerArgumentError(
                f"{self.name}: a variable must not be twice in one step. "
                f"Got {', '.join(repeated)} again. Add its gradients first."
            )

    def _refuse_unusual(self, by_path: Mapping[str, Any]) -> None:
        for path, variable in by_path.items():
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


def across_replicas(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call function(strategy, *args) once for all replicas, from inside of one or from outside."""
    context = tf.distribute.get_replica_context()
    if context is not None and tf.distribute.has_strategy():
        return context.merge_call(function, args=args)
    return function(tf.distribute.get_strategy(), *args)


def _of_this_replica(result: Any) -> Any:
    """Return a tensor or RowGradient out of a strategy's update: a tuple of local replicas'."""
    context = tf.distribute.get_replica_context()
    # A constant in a tensor, in a graph. All replicas' values are equal: 0 is right everywhere.
    replica = None if context is None else tf.get_static_value(context.replica_id_in_sync_group)

    def mine(values: tuple[tf.Tensor, ...]) -> tf.Tensor:
        return values[int(replica or 0) % len(values)]

    if isinstance(result, RowGradient):
        return RowGradient(mine(result.row_ids), mine(result.row_grads))
    return mine(result)


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
