"""One step of Adam on one variable, on a mesh or off it: read once, compute, assign once.

Inside a tf.function on a mesh TensorFlow 2.16 gets some layouts wrong, by any amount, where a slot
is changed in place by a value computed from it and then read again, as tf_keras' own Adam does. So
every slot is read exactly once, the arithmetic is functional, and every variable is assigned
exactly once, in its own layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.experimental import dtensor

from rowstep.optimizers import sparse_rows, update_rules
from rowstep.optimizers.dtensor.gradients import MaskedGradient, Prepared
from rowstep.optimizers.dtensor.layout import is_on_mesh, place, read_array
from rowstep.optimizers.gradients import compute_dtype
from rowstep.optimizers.rounding import noise, stochastic_round
from rowstep.optimizers.sparse_rows import RowGradient
from rowstep.optimizers.variables import variable_path

__all__ = ["Averaging", "Coefficients", "update_variable"]

Tensors = dict[str, tf.Tensor]


class Coefficients(NamedTuple):
    """Hold what a step multiplies with, the same for every element.

    decay is learning_rate * weight_decay, or None for a variable that does not decay.
    """

    step_size: tf.Tensor
    decay: tf.Tensor | None
    beta_1: float
    beta_2: float
    epsilon: tf.Tensor | float
    number: tf.Tensor
    """The step counted from 1, int64."""


class Averaging(NamedTuple):
    """Hold how weights are averaged; overwrites is 1 in a step that overwrites them, else 0."""

    momentum: float
    overwrites: tf.Tensor | None


def update_variable(
    variable: tf.Variable,
    slots: Mapping[str, tf.Variable],
    gradient: Prepared,
    coefficients: Coefficients,
    averaging: Averaging | None,
) -> None:
    """Take one step.

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g^2
        v_hat = max(v_hat, v)                                where there is a slot for it, else v
        w = w - step_size * m / (sqrt(v_hat) + epsilon) - decay * w
        average = average + (1 - momentum) * (w - average)   where weights are averaged

    Args:
        variable: The weights.
        slots: "momentum", "velocity" and, as there are, "velocity_hat" and "average".
        gradient: What `gradients.prepared` returned. For rows and masks everything but the
            average stands still elsewhere, to the bit.
        coefficients: Of this step.
        averaging: None for no average.

    Cost: O(V * D), divided by the shards on a mesh; for rows O(R * D), unless averaging or a
    constraint looks at the whole variable.
    """
    moments = {name: slot for name, slot in slots.items() if name != "average"}
    if isinstance(gradient, RowGradient):
        _update_rows(variable, moments, gradient, coefficients)
        if averaging is None and variable.constraint is None:
            return
        weights = tf.cast(variable.read_value(), compute_dtype(variable.dtype))
    else:
        weights = _update_all(variable, moments, gradient, coefficients)
    if variable.constraint is not None:
        weights = variable.constraint(weights)
    # The average is of the weights as they are stored, rounded where they are half precision.
    weights = tf.cast(_narrowed(variable, weights, coefficients.number), weights.dtype)
    if averaging is not None:
        weights = _average(slots["average"], weights, averaging)
    _assign(variable, weights)


def _new_values(w: tf.Tensor, moments: Tensors, g: tf.Tensor, c: Coefficients) -> Tensors:
    m = update_rules.first_moment(moments["momentum"], g, c.beta_1)
    v = update_rules.second_moment(moments["velocity"], g, c.beta_2)
    new = {"momentum": m, "velocity": v}
    if "velocity_hat" in moments:
        v = update_rules.running_maximum(moments["velocity_hat"], v)
        new["velocity_hat"] = v
    change = update_rules.adam_change(m, v, c.step_size, c.epsilon)
    if c.decay is not None:
        change += c.decay * w
    return {**new, "weights": w - change}


def _update_all(
    variable: tf.Variable,
    slots: Mapping[str, tf.Variable],
    gradient: tf.Tensor | MaskedGradient,
    coefficients: Coefficients,
) -> tf.Tensor:
    w = tf.cast(variable.read_value(), compute_dtype(variable.dtype))
    old = {name: slot.read_value() for name, slot in slots.items()}
    g = gradient.values if isinstance(gradient, MaskedGradient) else gradient
    new = _new_values(w, old, g, coefficients)
    if isinstance(gradient, MaskedGradient):
        old["weights"] = w
        new = {name: tf.where(gradient.is_touched, new[name], old[name]) for name in new}
    for name, slot in slots.items():
        _assign(slot, new[name])
    return new["weights"]


def _update_rows(
    variable: tf.Variable,
    slots: Mapping[str, tf.Variable],
    gradient: RowGradient,
    coefficients: Coefficients,
) -> None:
    variables = {**slots, "weights": variable}
    dtype = compute_dtype(variable.dtype)
    ids = gradient.row_ids
    old = {name: sparse_rows.gather_rows(item, ids, dtype) for name, item in variables.items()}
    w = old.pop("weights")
    new = _new_values(w, old, gradient.row_grads, coefficients)
    new["weights"] = _narrowed(variable, new["weights"], coefficients.number, ids)
    for name, item in variables.items():
        sparse_rows.scatter_rows(item, ids, new[name])


def _narrowed(
    variable: tf.Variable, weights: tf.Tensor, number: tf.Tensor, row_ids: tf.Tensor | None = None
) -> tf.Tensor:
    """Return weights in the dtype of their variable, half precision rounded at random."""
    if variable.dtype not in (tf.float16, tf.bfloat16):
        return tf.cast(weights, variable.dtype)
    is_eager_on_mesh = tf.executing_eagerly() and is_on_mesh(variable)
    if is_eager_on_mesh:
        number = tf.constant(read_array(number))
    if row_ids is None:
        num_rows = variable.shape[0] if variable.shape.rank else 0
        row_ids = tf.range(num_rows, dtype=tf.int64) if num_rows else tf.zeros([], tf.int64)
    seed = zlib.crc32(variable_path(variable).encode())
    uniform = noise(tf.cast(row_ids, tf.int64), variable.shape[1:], seed, number)
    if is_eager_on_mesh:
        uniform = place(uniform, variable.layout)
    return stochastic_round(weights, uniform, variable.dtype)


def _average(slot: tf.Variable, weights: tf.Tensor, averaging: Averaging) -> tf.Tensor:
    average = slot.read_value()
    # In this form the average of weights that never moved is the weights, to the bit.
    average += (1.0 - averaging.momentum) * (weights - average)
    _assign(slot, average)
    if averaging.overwrites is None:
        return weights
    overwrites = tf.cast(averaging.overwrites, weights.dtype)
    # Exact for 0 and 1. A select with a scalar condition would end the process on a mesh.
    return overwrites * average + (1.0 - overwrites) * weights


def _assign(variable: Any, value: tf.Tensor) -> None:
    value = tf.cast(value, variable.dtype)
    if is_on_mesh(variable):
        value = dtensor.relayout(value, variable.layout)
    variable.assign(value)
