"""The update formulas, one a function: tensors in, tensors out.

No Keras and no variables here, so that every adapter computes the same numbers. Letters are those
of the papers: w weights, g gradient, m and v first and second moment, u direction, t the step
counted from 1. All functions keep the dtype of their tensors; callers pass float32 or float64.
`reference.py` holds the same formulas in NumPy float64: it is their specification.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import tensorflow as tf

__all__ = [
    "Scalar",
    "adam_change",
    "adam_step_size",
    "bias_correction",
    "decayed_weights",
    "first_moment",
    "idle_decay",
    "lamb_direction",
    "moving_average",
    "row_second_moment",
    "running_maximum",
    "safe_norm",
    "second_moment",
    "trust_ratio",
]

Scalar: TypeAlias = "float | tf.Tensor"
"""A hyperparameter: a Python number, or a scalar tensor where it changes while training."""


def first_moment(m: tf.Tensor, g: tf.Tensor, beta_1: Scalar) -> tf.Tensor:
    """Return m' = beta_1 * m + (1 - beta_1) * g."""
    # 1 - beta is taken in Python's float64: in float32 it would already be off in the fifth digit.
    return beta_1 * m + (1.0 - beta_1) * g


def second_moment(v: tf.Tensor, g: tf.Tensor, beta_2: Scalar) -> tf.Tensor:
    """Return v' = beta_2 * v + (1 - beta_2) * g^2."""
    return beta_2 * v + (1.0 - beta_2) * tf.square(g)


def row_second_moment(v: tf.Tensor, g: tf.Tensor, beta_2: Scalar) -> tf.Tensor:
    """Return v' = beta_2 * v + (1 - beta_2) * mean over the row of g^2, for v [R, 1, ...]."""
    axes = list(range(1, g.shape.rank))
    return beta_2 * v + (1.0 - beta_2) * tf.reduce_mean(tf.square(g), axis=axes, keepdims=True)


def running_maximum(v_hat: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    """Return v_hat' = max(v_hat, v), what AMSGrad divides by instead of v."""
    return tf.maximum(v_hat, v)


def idle_decay(moment: tf.Tensor, beta: Scalar, num_idle: tf.Tensor) -> tf.Tensor:
    """Return beta^num_idle * moment: the moment after steps in which the gradient was zero.

    Args:
        moment: First or second moment [R, ...].
        beta: Its decay, in [0, 1).
        num_idle: Steps that a row was not in, a float tensor that broadcasts to moment.
    """
    return moment * _power(beta, num_idle)


def decayed_weights(
    w: tf.Tensor, learning_rate: tf.Tensor, weight_decay: float, num_steps: tf.Tensor | float = 1.0
) -> tf.Tensor:
    """Return (1 - learning_rate * weight_decay)^num_steps * w, decay apart from the gradient."""
    taken = learning_rate * weight_decay
    if isinstance(num_steps, float) and num_steps == 1.0:
        return w - taken * w
    # 1 - 1e-5 in float32 is off by a third of a percent of the 1e-5, each time it is multiplied.
    share = tf.math.expm1(num_steps * tf.math.log1p(-tf.minimum(taken, 0.5)))
    return tf.where(taken < 0.5, w + share * w, w * tf.pow(1.0 - taken, num_steps))


def moving_average(
    average: tf.Tensor, w: tf.Tensor, momentum: Scalar, num_steps: tf.Tensor | float = 1.0
) -> tf.Tensor:
    """Return the average after num_steps steps in which the weights were w.

        average' = momentum^num_steps * average + (1 - momentum^num_steps) * w

    For weights that stood still this is exact in one go, so a row need not be visited to be
    averaged. An average that is equal to the weights stays so to the bit.
    """
    num_steps = tf.cast(num_steps, w.dtype)
    if isinstance(momentum, float) and momentum > 0.0:
        return average + bias_correction(momentum, num_steps) * (w - average)
    return average + (1.0 - _power(momentum, num_steps)) * (w - average)


def _power(beta: Scalar, exponent: tf.Tensor) -> tf.Tensor:
    """Return beta^exponent; 1 where the exponent is 0, also of a beta of 0."""
    if isinstance(beta, tf.Tensor) or beta == 0.0:
        return tf.pow(tf.cast(beta, exponent.dtype), exponent)
    # The logarithm is taken in Python's float64: 0.999 in float32, to the power of ten thousand
    # idle steps, would be off in the fourth digit.
    return tf.exp(exponent * math.log(beta))


def bias_correction(beta: Scalar, t: tf.Tensor) -> tf.Tensor:
    """Return 1 - beta^t, to full precision also where beta^t is near 1.

    Args:
        beta: Decay of the moment, in [0, 1).
        t: Float tensor, the step counted from 1: a scalar, or one for each row.

    Returns:
        A tensor of t's shape and dtype.
    """
    if isinstance(beta, tf.Tensor):
        return -tf.math.expm1(t * tf.math.log(beta))
    if beta == 0.0:
        return tf.ones_like(t)
    # 1 - pow(0.999, 1) in float32 loses four of seven digits to cancellation; expm1 loses none.
    return -tf.math.expm1(t * math.log(beta))


def adam_step_size(
    learning_rate: tf.Tensor, beta_1: Scalar, beta_2: Scalar, t: tf.Tensor
) -> tf.Tensor:
    """Return A = learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t)."""
    return learning_rate * tf.sqrt(bias_correction(beta_2, t)) / bias_correction(beta_1, t)


def adam_change(m: tf.Tensor, v: tf.Tensor, step_size: tf.Tensor, epsilon: Scalar) -> tf.Tensor:
    """Return A * m / (sqrt(v) + epsilon), what Adam takes from the weights.

    This is the form with epsilon outside the bias correction (the paper's "epsilon hat").
    """
    return step_size * m / (tf.sqrt(v) + epsilon)


def lamb_direction(
    w: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    t: tf.Tensor,
    *,
    beta_1: Scalar,
    beta_2: Scalar,
    epsilon: Scalar,
    weight_decay_rate: float,
) -> tf.Tensor:
    """Return u = m_hat / (sqrt(v_hat) + epsilon) + weight_decay_rate * w.

    m_hat = m / (1 - beta_1^t) and v_hat = v / (1 - beta_2^t): epsilon is added after the bias
    correction, as in algorithm 1 of the Adam paper. Not so in `adam_change`.
    """
    m_hat = m / bias_correction(beta_1, t)
    v_hat = v / bias_correction(beta_2, t)
    u = m_hat / (tf.sqrt(v_hat) + epsilon)
    if weight_decay_rate == 0.0:
        return u
    return u + weight_decay_rate * w


def trust_ratio(
    w: tf.Tensor,
    u: tf.Tensor,
    *,
    by_row: bool = False,
    clip: tuple[float, float] | None = None,
) -> tf.Tensor:
    """Return ||w|| / ||u||, or 1 where either norm is zero.

    The ratio is not clamped unless asked for: the clamp of the paper's first version was dropped
    by its authors.

    Args:
        w: Weights.
        u: Direction, of the same shape.
        by_row: Whether each row has a ratio of its own: the result is [R, 1, ...], not a scalar.
        clip: Lowest and highest ratio.
    """
    w_norm, u_norm = safe_norm(w, by_row=by_row), safe_norm(u, by_row=by_row)
    usable = tf.logical_and(w_norm > 0, u_norm > 0)
    one = tf.ones_like(w_norm)
    ratio = w_norm / tf.where(usable, u_norm, one)
    if clip is not None:
        ratio = tf.clip_by_value(ratio, *clip)
    return tf.where(usable, ratio, one)


def safe_norm(x: tf.Tensor, *, by_row: bool = False) -> tf.Tensor:
    """Return the Euclidean norm sqrt(sum(x^2)) without overflow or underflow of the squares.

    Computed as a * sqrt(sum((x / a)^2)) with a = max|x|; 0 for a tensor of zeros or no elements.
    A scalar, or [R, 1, ...] with by_row.
    """
    axes = list(range(1, x.shape.rank)) if by_row else None
    # reduce_max of no elements is -inf; the zero beside it makes an empty tensor's norm 0.
    largest = tf.maximum(
        tf.reduce_max(tf.abs(x), axis=axes, keepdims=by_row), tf.zeros([], x.dtype)
    )
    scale = tf.where(largest > 0, largest, tf.ones_like(largest))
    squares = tf.reduce_sum(tf.square(x / scale), axis=axes, keepdims=by_row)
    return largest * tf.sqrt(squares)
