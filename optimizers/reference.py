"""The optimizers in NumPy float64, line for line as in the papers: the specification.

Slow and plain on purpose. Every adapter is tested against these functions. A sparse gradient is a
pair (row_ids, row_grads) in which ids may repeat. Letters as in `update_rules.py`.

Adam and LAMB differ in where epsilon enters: Adam here is the form with epsilon outside the bias
correction (the end of section 2 of the Adam paper), LAMB the form of its algorithm 1.

Sources: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015; You et al., "Large Batch
Optimization for Deep Learning: Training BERT in 76 minutes", 2020 (algorithm 2).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

__all__ = ["Array", "State", "adam", "dense_gradient", "lamb", "lazy_adam", "new_state"]

Array: TypeAlias = "np.ndarray[Any, Any]"
State: TypeAlias = tuple[Array, Array, Array]
"""Weights w, first moment m and second moment v of one variable, all float64."""


def new_state(w: Array) -> State:
    """Return the state before the first step: the weights and two moments of zeros."""
    w = np.array(w, np.float64)
    return w, np.zeros_like(w), np.zeros_like(w)


def dense_gradient(row_ids: Array, row_grads: Array, shape: tuple[int, ...]) -> Array:
    """Return the dense gradient in which repeated rows are summed."""
    g = np.zeros(shape, np.float64)
    for row_id, row_grad in zip(row_ids, row_grads, strict=True):
        g[row_id] += np.asarray(row_grad, np.float64)
    return g


def adam(
    state: State,
    g: Array,
    t: int,
    *,
    learning_rate: float = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
) -> State:
    """Return the state after step t of Adam.

    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g^2
    w = w - learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t) * m / (sqrt(v) + epsilon)
    """
    w, m, v = state
    g = np.asarray(g, np.float64)
    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g**2
    step_size = learning_rate * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    w = w - step_size * m / (np.sqrt(v) + epsilon)
    return w, m, v


def lazy_adam(
    state: State,
    row_ids: Array,
    row_grads: Array,
    t: int,
    **hyperparameters: float,
) -> State:
    """Return the state after step t of LazyAdam: Adam on the rows present, nothing elsewhere.

    t is the step of the optimizer, not the number of times that a row was seen. A row that is
    present with a zero gradient is updated like any other.
    """
    w, m, v = (array.copy() for array in state)
    g = dense_gradient(row_ids, row_grads, w.shape)
    for row_id in set(np.asarray(row_ids).tolist()):
        row = (w[row_id], m[row_id], v[row_id])
        w[row_id], m[row_id], v[row_id] = adam(row, g[row_id], t, **hyperparameters)
    return w, m, v


def lamb(
    state: State,
    g: Array,
    t: int,
    *,
    learning_rate: float = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay_rate: float = 0.0,
    adapt: bool = True,
) -> State:
    """Return the state after step t of LAMB.

    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g^2
    u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay_rate * w
    ratio = ||w|| / ||u||, or 1 where either norm is 0, or 1 where adapt is false
    w = w - learning_rate * ratio * u
    """
    w, m, v = state
    g = np.asarray(g, np.float64)
    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g**2
    m_hat = m / (1 - beta_1**t)
    v_hat = v / (1 - beta_2**t)
    u = m_hat / (np.sqrt(v_hat) + epsilon) + weight_decay_rate * w
    w_norm = np.sqrt(np.sum(w**2))
    u_norm = np.sqrt(np.sum(u**2))
    ratio = w_norm / u_norm if adapt and w_norm > 0 and u_norm > 0 else 1.0
    return w - learning_rate * ratio * u, m, v
