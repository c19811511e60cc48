"""The update formulas, one a function: tensors in, tensors out.

No Keras and no variables here, so that every adapter computes the same numbers. Letters are those
of the papers: w weights, g gradient, m and v first and second moment, u direction, t the step
counted from 1. All functions keep the dtype of their tensors; callers pass float32 or float64.
`reference.py` holds the same formulas in NumPy float64: it is their specification.
"""

from __future__ import annotations

import math

import tensorflow as tf

__all__ = [
    "adam_change",
    "adam_step_size",
    "bias_correction",
    "first_moment",
    "lamb_direction",
    "safe_norm",
    "second_moment",
    "trust_ratio",
]


def first_moment(m: tf.Tensor, g: tf.Tensor, beta_1: float) -> tf.Tensor:
    """Return m' = beta_1 * m + (1 - beta_1) * g."""
    # 1 - beta is taken in Python's float64: in float32 it would already be off in the fifth digit.
    return beta_1 * m + (1.0 - beta_1) * g


def second_moment(v: tf.Tensor, g: tf.Tensor, beta_2: float) -> tf.Tensor:
    """Return v' = beta_2 * v + (1 - beta_2) * g^2."""
    return beta_2 * v + (1.0 - beta_2) * tf.square(g)


def bias_correction(beta: float, t: tf.Tensor) -> tf.Tensor:
    """Return 1 - beta^t, to full precision also where beta^t is near 1.

    Args:
        beta: Decay of the moment, in [0, 1).
        t: Scalar float tensor, the step counted from 1.

    Returns:
        A scalar of t's dtype.
    """
    if beta == 0.0:
        return tf.ones_like(t)
    # 1 - pow(0.999, 1) in float32 loses four of seven digits to cancellation; expm1 loses none.
    return -tf.math.expm1(t * math.log(beta))


def adam_step_size(
    learning_rate: tf.Tensor, beta_1: float, beta_2: float, t: tf.Tensor
) -> tf.Tensor:
    """Return A = learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t)."""
    return learning_rate * tf.sqrt(bias_correction(beta_2, t)) / bias_correction(beta_1, t)


def adam_change(m: tf.Tensor, v: tf.Tensor, step_size: tf.Tensor, epsilon: float) -> tf.Tensor:
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
    beta_1: float,
    beta_2: float,
    epsilon: float,
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


def trust_ratio(w: tf.Tensor, u: tf.Tensor) -> tf.Tensor:
    """Return ||w|| / ||u||, or 1 where either norm is zero.

    The ratio is not clamped: the clamp of the paper's first version was dropped by its authors.
    """
    w_norm = safe_norm(w)
    u_norm = safe_norm(u)
    usable = tf.logical_and(w_norm > 0, u_norm > 0)
    one = tf.ones_like(w_norm)
    return tf.where(usable, w_norm / tf.where(usable, u_norm, one), one)


def safe_norm(x: tf.Tensor) -> tf.Tensor:
    """Return the Euclidean norm sqrt(sum(x^2)) without overflow or underflow of the squares.

    Computed as a * sqrt(sum((x / a)^2)) with a = max|x|; 0 for a tensor of zeros or no elements.
    """
    # reduce_max of no elements is -inf; the zero beside it makes an empty tensor's norm 0.
    largest = tf.maximum(tf.reduce_max(tf.abs(x)), tf.zeros([], x.dtype))
    scale = tf.where(largest > 0, largest, tf.ones_like(largest))
    return largest * tf.sqrt(tf.reduce_sum(tf.square(x / scale)))
