"""The moving average of whole variables: where it starts, and where it becomes the weights.

The step averages the rows that it moves. A row that stood still has an average that is behind; it
is known exactly from the number of steps (`update_rules.moving_average`), and computed when the row
moves again or when the whole variable is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from rowstep.optimizers import update_rules
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.options import StepOptions
from rowstep.optimizers.replicas import across_replicas
from rowstep.optimizers.row_update import Step
from rowstep.optimizers.variables import native_variable

__all__ = ["Averaged", "AveragedWeights", "overwrite", "settle", "start"]


class Averaged(NamedTuple):
    """Hold a variable, its average, and the step up to which each row of that is known."""

    variable: tf.Variable
    average: tf.Variable
    average_step: tf.Variable | None
    momentum: float


def start(strategy: tf.distribute.Strategy, averaged: Sequence[Averaged], step: Step) -> None:
    """Copy the weights into their averages before the first step.

    They may have been loaded since the optimizer was built. Costs O(V * D), once.
    """

    def copy(average: tf.Variable, variable: tf.Variable, step: Step) -> None:
        due = tf.equal(step.number, 1)
        if step.active is not None:
            # Calls that accumulate after the first update still have its number.
            due = tf.logical_and(due, step.active)

        def assign() -> tf.Tensor:
            average.assign(tf.cast(tf.convert_to_tensor(variable), average.dtype))
            return tf.constant(True)

        tf.cond(due, assign, lambda: tf.constant(False))

    for item in averaged:
        strategy.extended.update(item.average, copy, args=(item.variable, step), group=False)


def overwrite(
    strategy: tf.distribute.Strategy,
    averaged: Sequence[Averaged],
    step: Step,
    every: int | None = None,
) -> None:
    """Set variables to their averages: now, or where the step's number is a multiple of `every`."""

    def write(
        momentum: float,
        variable: tf.Variable,
        step: Step,
        average: tf.Variable,
        average_step: tf.Variable | None = None,
    ) -> None:
        item = Averaged(variable, average, average_step, momentum)
        # Here, where the step is one tensor: between replicas it is one for each of them.
        due = tf.constant(True) if every is None else tf.equal(step.number % every, 0)
        if step.active is not None:
            due = tf.logical_and(due, step.active)

        def assign() -> tf.Tensor:
            settle(item, step.number)
            variable.assign(tf.cast(tf.convert_to_tensor(item.average), variable.dtype))
            return tf.constant(True)

        tf.cond(due, assign, lambda: tf.constant(False))

    for item in averaged:
        function = functools.partial(write, item.momentum)
        slots = (item.average, item.average_step)
        args = (step, *(slot for slot in slots if slot is not None))
        strategy.extended.update(item.variable, function, args=args, group=False)


def settle(averaged: Averaged, number: tf.Tensor) -> None:
    """Bring the average of every row up to the step of this number; before the first, to w."""
    variable, average, average_step, momentum = averaged
    if average_step is None:
        return
    num_idle = tf.maximum(number - tf.convert_to_tensor(average_step), 0)
    num_idle = tf.cast(num_idle, average.dtype)
    weights = tf.cast(tf.convert_to_tensor(variable), average.dtype)
    behind = tf.convert_to_tensor(average)
    settled = update_rules.moving_average(behind, weights, momentum, num_idle)
    # The weights may have been loaded since the optimizer was built.
    average.assign(tf.where(number == 0, weights, settled))
    average_step.assign(tf.zeros_like(average_step) + number)


class AveragedWeights:
    """Give an optimizer the methods that bring averages and weights together."""

    name: str
    _options: StepOptions
    _slots: Sequence[Mapping[str, Any]]
    _keys: tuple[str, ...]

    def _built_on(self) -> Sequence[Any]:
        """Return the variables that the optimizer was built on."""
        raise NotImplementedError

    def _index_of(self, variable: Any) -> int:
        raise NotImplementedError

    def _num_updates(self) -> tf.Tensor:
        raise NotImplementedError

    def _averaged_variables(self) -> list[Averaged]:
        return [
            Averaged(
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
        across_replicas(lambda strategy, step: overwrite(strategy, averaged, step), (step,))

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
            settle(averaged, number)
        return [slots["average"] for slots in self._slots]
