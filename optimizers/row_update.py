"""The update of one variable and its slots, by rows or as a whole: read, step, write.

A `Plan` says which slots a variable has and how they move. Slots with one number a row are counters
that let a row make up for the steps in which it was absent:

    last_step       the step at which the row was last updated, 0 for never
    average_step    the step up to which the average of the row is known
    num_visits      how often the row was updated

Everything is read before the first write: a read after a scatter would copy the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from rowstep.optimizers import update_rules
from rowstep.optimizers.gradients import Gradient, compute_dtype
from rowstep.optimizers.rounding import noise, stochastic_round
from rowstep.optimizers.rules import Rule, Tensors, resolved
from rowstep.optimizers.sparse_rows import RowGradient, gather_rows, scatter_rows, to_dense

__all__ = ["Plan", "SlotSpec", "Step", "update_variable"]


class SlotSpec(NamedTuple):
    """Say what a slot variable is made of; it starts as zeros or as a copy of the weights."""

    shape: tuple[int, ...]
    dtype: tf.DType
    copies_weights: bool = False


class Step(NamedTuple):
    """Hold what is the same for all variables of one step."""

    number: tf.Tensor
    """int64, counted from 1."""
    active: tf.Tensor | None = None
    """bool: whether anything may move; None for always. False between gradient accumulations."""


@dataclass(frozen=True)
class Plan:
    """Say how one variable is updated.

    Attributes:
        rule: The formula.
        lazy: Whether a sparse gradient moves only its rows. If not, it is made dense.
        weight_decay: Share of the weights taken at each update, times the learning rate.
        counts_visits: Whether t of the bias correction counts visits of the row, not steps.
        idle_decay: Whether moments and weights decay for the steps in which the row was absent.
        average_momentum: Decay of the average of the weights; None for no average.
        average_starts_at_first_step: Whether the average starts from the weights after the first
            step, as in Keras 3, or from those before it, as in tf_keras.
        state_dtype: Dtype of the moments; None for that of the arithmetic.
        stochastic_rounding: Whether float16 and bfloat16 numbers are rounded at random.
        seed: What the random rounding of this variable starts from.
        rate_group: Which learning rate it takes: 0 the optimizer's, 1 that of the first group ...
        row_constraint: Function of the new rows [R, ...] that returns allowed rows.
    """

    rule: Rule
    lazy: bool = True
    weight_decay: float = 0.0
    counts_visits: bool = False
    idle_decay: bool = False
    average_momentum: float | None = None
    average_starts_at_first_step: bool = True
    state_dtype: tf.DType | None = None
    stochastic_rounding: bool = True
    seed: int = 0
    rate_group: int = 0
    row_constraint: Callable[[tf.Tensor], tf.Tensor] | None = None

    def slot_specs(self, shape: tuple[int, ...], dtype: tf.DType) -> dict[str, SlotSpec]:
        """Return the slots of a variable of this shape and dtype, in the order of state lists."""
        wide = compute_dtype(dtype)
        # With the rank of the variable, so that they broadcast to its rows as they are.
        by_row = shape[:1] + (1,) * len(shape[1:])
        moments = {slot: SlotSpec(shape, self.state_dtype or wide) for slot in self.rule.slots}
        if self.rule.row_velocity:
            for slot in moments.keys() - {"momentum"}:
                moments[slot] = moments[slot]._replace(shape=by_row)
        if self.average_momentum is not None:
            moments["average"] = SlotSpec(shape, wide, copies_weights=True)
            # Also where all rows move together: in some steps there may be no gradient at all.
            moments["average_step"] = SlotSpec(by_row, tf.int64)
        if self.idle_decay:
            moments["last_step"] = SlotSpec(by_row, tf.int64)
        if self.counts_visits:
            moments["num_visits"] = SlotSpec(by_row, tf.int64)
        return moments

    def advance(
        self, w: tf.Tensor, slots: Tensors, g: tf.Tensor, learning_rate: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Return new weights and slots for rows [R, ...] that are in the gradient of this step."""
        old = dict(slots)
        new: dict[str, tf.Tensor] = {}
        t = tf.cast(step, w.dtype)
        for counter in old.keys() & {"average_step", "last_step"}:
            new[counter] = tf.zeros_like(old[counter]) + step
        if "num_visits" in old:
            new["num_visits"] = old["num_visits"] + 1
            t = tf.cast(new["num_visits"], w.dtype)
        if "average_step" in old:
            # The row stood still while it was absent, so its average knows what it missed.
            idle = _num_idle(step, old["average_step"], w.dtype)
            old["average"] = self._averaged(old["average"], w, step, idle)
        num_decays: tf.Tensor | float = 1.0
        if self.idle_decay:
            idle = _num_idle(step, old["last_step"], w.dtype)
            old |= self._idled(old, idle)
            num_decays = 1.0 + idle
        if self.weight_decay > 0.0:
            w = update_rules.decayed_weights(w, learning_rate, self.weight_decay, num_decays)
        w, moments = self.rule.step(w, old, g, learning_rate, t)
        if self.row_constraint is not None:
            w = self.row_constraint(w)
        new |= moments
        if "average" in old:
            new["average"] = self._averaged(old["average"], w, step, 1.0)
        return w, new

    def _idled(self, old: Tensors, idle: tf.Tensor) -> dict[str, tf.Tensor]:
        betas = {"momentum": self.rule.beta_1, "velocity": self.rule.beta_2}
        return {
            name: update_rules.idle_decay(old[name], resolved(beta, old[name].dtype), idle)
            for name, beta in betas.items()
        }

    def _averaged(
        self, average: tf.Tensor, w: tf.Tensor, number: tf.Tensor, num_steps: tf.Tensor | float
    ) -> tf.Tensor:
        averaged = update_rules.moving_average(average, w, self.average_momentum, num_steps)
        if self.average_starts_at_first_step:
            averaged = tf.where(number == 1, w, averaged)
        return averaged


def _num_idle(step: tf.Tensor, known: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    # Never below 0: the user may set the step counter back, and beta^-1000 is infinite.
    return tf.cast(tf.maximum(step - 1 - known, 0), dtype)


def update_variable(
    plan: Plan,
    variable: tf.Variable,
    slots: Mapping[str, tf.Variable],
    gradient: Gradient,
    learning_rate: tf.Tensor,
    step: Step,
) -> None:
    """Update a variable and its slots by one gradient.

    Args:
        plan: How.
        variable: The weights, of any floating dtype.
        slots: The variables that `plan.slot_specs` asks for; others among them are left alone.
        gradient: In the dtype of the arithmetic, with repeated rows summed.
        learning_rate: Scalar.
        step: The step.

    Cost: O(R * D) for a RowGradient of R rows of a lazy plan, else O(V * D).
    """
    if isinstance(gradient, RowGradient) and not plan.lazy:
        gradient = to_dense(gradient, variable.shape)
    part: _Rows | _Whole
    if isinstance(gradient, RowGradient):
        part, g = _Rows(gradient.row_ids), gradient.row_grads
    else:
        part, g = _Whole(step.active), gradient
    dtype = compute_dtype(variable.dtype)
    slots = {name: slots[name] for name in plan.slot_specs(tuple(variable.shape), variable.dtype)}
    w = part.read(variable, dtype)
    old = {
        name: part.read(slot, dtype if slot.dtype.is_floating else slot.dtype)
        for name, slot in slots.items()
    }
    w, new = plan.advance(w, old, g, tf.cast(learning_rate, dtype), step.number)
    for salt, (name, slot) in enumerate(slots.items(), start=1):
        part.write(slot, _narrowed(plan, part, new[name], slot, salt, step.number))
    part.write(variable, _narrowed(plan, part, w, variable, 0, step.number))


class _Rows(NamedTuple):
    """Read and write the rows of a gradient."""

    row_ids: tf.Tensor

    def read(self, source: tf.Variable, dtype: tf.DType) -> tf.Tensor:
        return gather_rows(source, self.row_ids, dtype)

    def write(self, target: tf.Variable, rows: tf.Tensor) -> None:
        scatter_rows(target, self.row_ids, rows)

    def ids(self, target: tf.Variable) -> tf.Tensor:
        return tf.cast(self.row_ids, tf.int64)


class _Whole(NamedTuple):
    """Read and write whole variables; where `active` is false they keep what they hold."""

    active: tf.Tensor | None

    def read(self, source: tf.Variable, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tf.convert_to_tensor(source), dtype)

    def write(self, target: tf.Variable, values: tf.Tensor) -> None:
        if self.active is not None:
            values = tf.where(self.active, values, tf.convert_to_tensor(target))
        target.assign(values)

    def ids(self, target: tf.Variable) -> tf.Tensor:
        if target.shape.rank == 0:
            return tf.zeros([], tf.int64)
        return tf.range(target.shape[0], dtype=tf.int64)


def _narrowed(
    plan: Plan,
    part: _Rows | _Whole,
    values: tf.Tensor,
    target: tf.Variable,
    salt: int,
    number: tf.Tensor,
) -> tf.Tensor:
    """Return values in the dtype of the variable that they go to."""
    if values.dtype == target.dtype:
        return values
    if not (plan.stochastic_rounding and target.dtype in (tf.float16, tf.bfloat16)):
        return tf.cast(values, target.dtype)
    uniform = noise(part.ids(target), target.shape[1:], 8 * plan.seed + salt, number)
    return stochastic_round(tf.cast(values, tf.float32), uniform, target.dtype)
