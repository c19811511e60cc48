"""The options of the step in NumPy float64, each as it is defined: their specification.

Slow and plain on purpose: rows are visited one by one, a row that was absent for k steps decays in
a loop of k, and the moving average takes in every row at every step. What the optimizers do in one
go, or leave for later, must come out as this does.

Settings go by the names that the constructors have. A gradient is an array of the variable's shape,
or a pair (row_ids, row_grads) in which ids may repeat. Letters as in `reference.py`.

Sources, besides those of `reference.py`: Reddi et al., "On the Convergence of Adam and Beyond",
2018 (amsgrad); Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019 (weight_decay);
Polyak & Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992, with weights that
fade (use_ema); Pascanu et al., "On the difficulty of training recurrent neural networks", 2013
(clipnorm, global_clipnorm).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from rowstep.optimizers.reference import Array, dense_gradient

__all__ = ["Call", "Gradient", "Settings", "VariableState", "train"]

Gradient: TypeAlias = "Array | tuple[Array, Array]"
Call: TypeAlias = Mapping[str, Gradient]
"""The gradients of one call by the name of the variable; a variable may have none."""


@dataclass(frozen=True)
class Settings:
    """Hold the arguments of an optimizer. `formula` is "adam" or "lamb"."""

    formula: str = "adam"
    lazy: bool = True
    learning_rate: float = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    decay: float = 0.0
    weight_decay: float = 0.0
    amsgrad: bool = False
    bias_correction: str = "steps"
    idle_decay: bool = False
    row_velocity: bool = False
    weight_decay_rate: float = 0.0
    row_trust_ratio: bool = False
    trust_ratio_clip: tuple[float, float] | None = None
    use_ema: bool = False
    ema_momentum: float = 0.99
    ema_overwrite_frequency: int | None = None
    average_starts_at_first_step: bool = True
    loss_scale_factor: float = 1.0
    gradient_accumulation_steps: int = 1
    clipvalue: float | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clip_before_sum: bool = False


@dataclass
class VariableState:
    """Hold weights, moments and average of one variable, and what is known of each row."""

    w: Array
    m: Array = field(init=False)
    v: Array = field(init=False)
    v_hat: Array = field(init=False)
    average: Array = field(init=False)
    last_step: Array = field(init=False)
    num_visits: Array = field(init=False)
    row_velocity: bool = False

    def __post_init__(self) -> None:
        self.w = np.array(self.w, np.float64)
        self.m = np.zeros_like(self.w)
        by_row = self.w.shape[:1] + (1,) * (self.w.ndim - 1)
        self.v = np.zeros(by_row if self.row_velocity else self.w.shape)
        self.v_hat = np.zeros_like(self.v)
        self.average = self.w.copy()
        self.last_step = np.zeros(len(self.w), int)
        self.num_visits = np.zeros(len(self.w), int)


def train(
    weights: Mapping[str, Array],
    calls: Sequence[Call],
    settings: Settings,
    tables: Collection[str] = (),
) -> dict[str, VariableState]:
    """Return the state of every variable after these calls of the optimizer.

    Args:
        weights: Initial weights by the name of the variable, of rank 1 or more.
        calls: The gradients of each call.
        settings: The arguments of the optimizer.
        tables: Names of the variables that row_velocity and row_trust_ratio are for.
    """
    states = {
        name: VariableState(w, row_velocity=settings.row_velocity and name in tables)
        for name, w in weights.items()
    }
    num_calls = settings.gradient_accumulation_steps
    for t in range(1, len(calls) // num_calls + 1):
        _update(states, calls[num_calls * (t - 1) : num_calls * t], t, settings, tables)
    return states


def _update(
    states: dict[str, VariableState],
    calls: Sequence[Call],
    t: int,
    settings: Settings,
    tables: Collection[str],
) -> None:
    """Make update t of the gradients of all calls since the last one."""
    learning_rate = settings.learning_rate / (1 + settings.decay * (t - 1))
    calls = [_unscaled(call, settings.loss_scale_factor) for call in calls]
    if settings.clip_before_sum:
        calls = [_clipped(call, settings) for call in calls]
    given = {name: [call[name] for call in calls if name in call] for name in states}
    gradients: Call = {
        name: _sum(parts, states[name].w) / len(calls) for name, parts in given.items() if parts
    }
    if not settings.clip_before_sum:
        gradients = _clipped(gradients, settings)
    for name, g in gradients.items():
        by_row = settings.row_trust_ratio and name in tables
        lazy = by_row if settings.formula == "lamb" else settings.lazy
        rows = _present(given[name], len(states[name].w), lazy)
        if settings.formula == "lamb":
            _lamb(states[name], rows, np.asarray(g), learning_rate, t, settings, by_row)
        else:
            for r in rows:
                _adam_row(states[name], r, g[r], learning_rate, t, settings)
    for state in states.values():
        _average(state, t, settings)


def _adam_row(
    state: VariableState, r: int, g: Array, learning_rate: float, t: int, settings: Settings
) -> None:
    """Move row r.

    For every step in which the row was absent, if idle_decay:

        m = beta_1 * m
        v = beta_2 * v
        w = w - learning_rate * weight_decay * w

    and then

        w = w - learning_rate * weight_decay * w
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g^2, or the mean of g^2 over the row
        v_hat = max(v_hat, v)
        w = w - learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t) * m / (sqrt(v) + epsilon)

    with v_hat for v if amsgrad, and the number of the row's visits for t if visits are counted.
    """
    kept = 1 - learning_rate * settings.weight_decay
    num_idle = t - 1 - state.last_step[r] if settings.idle_decay else 0
    for _ in range(num_idle):
        state.m[r] = settings.beta_1 * state.m[r]
        state.v[r] = settings.beta_2 * state.v[r]
        state.w[r] = kept * state.w[r]
    state.last_step[r] = t
    state.num_visits[r] += 1
    if settings.bias_correction == "visits":
        t = state.num_visits[r]
    state.w[r] = kept * state.w[r]
    _moments(state, r, g, settings)
    state.v_hat[r] = np.maximum(state.v_hat[r], state.v[r])
    v = state.v_hat[r] if settings.amsgrad else state.v[r]
    step_size = learning_rate * np.sqrt(1 - settings.beta_2**t) / (1 - settings.beta_1**t)
    state.w[r] = state.w[r] - step_size * state.m[r] / (np.sqrt(v) + settings.epsilon)


def _lamb(
    state: VariableState,
    rows: Sequence[int],
    g: Array,
    learning_rate: float,
    t: int,
    settings: Settings,
    by_row: bool,
) -> None:
    """Move rows by LAMB: `reference.lamb` with a clamp, for the variable or for each row.

    u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay_rate * w
    ratio = ||w|| / ||u|| between the two bounds, or 1 where either norm is 0
    w = w - learning_rate * ratio * u
    """
    u = np.zeros_like(state.w)
    for r in rows:
        _moments(state, r, g[r], settings)
        m_hat = state.m[r] / (1 - settings.beta_1**t)
        v_hat = state.v[r] / (1 - settings.beta_2**t)
        decay = settings.weight_decay_rate * state.w[r]
        u[r] = m_hat / (np.sqrt(v_hat) + settings.epsilon) + decay
    for group in [[r] for r in rows] if by_row else [list(rows)]:
        w_norm, u_norm = (np.sqrt(np.sum(x[group] ** 2)) for x in (state.w, u))
        ratio = 1.0
        if w_norm > 0 and u_norm > 0:
            ratio = w_norm / u_norm
            if settings.trust_ratio_clip is not None:
                ratio = min(max(ratio, settings.trust_ratio_clip[0]), settings.trust_ratio_clip[1])
        state.w[group] = state.w[group] - learning_rate * ratio * u[group]


def _moments(state: VariableState, r: int, g: Array, settings: Settings) -> None:
    square = np.mean(g**2) if state.row_velocity else g**2
    state.m[r] = settings.beta_1 * state.m[r] + (1 - settings.beta_1) * g
    state.v[r] = settings.beta_2 * state.v[r] + (1 - settings.beta_2) * square


def _average(state: VariableState, t: int, settings: Settings) -> None:
    """Average all rows: average = ema_momentum * average + (1 - ema_momentum) * w."""
    if not settings.use_ema:
        return
    momentum = settings.ema_momentum
    if t == 1 and settings.average_starts_at_first_step:
        momentum = 0.0
    state.average = momentum * state.average + (1 - momentum) * state.w
    every = settings.ema_overwrite_frequency
    if every is not None and t % every == 0:
        state.w = state.average.copy()


def _sum(gradients: Sequence[Gradient], w: Array) -> Array:
    parts = [dense_gradient(*g, w.shape) if isinstance(g, tuple) else g for g in gradients]
    return np.sum(np.array(parts, np.float64), axis=0)


def _present(gradients: Sequence[Gradient], num_rows: int, lazy: bool) -> list[int]:
    """Return the rows that are in at least one of the gradients, all rows for a dense one."""
    if not lazy or not all(isinstance(g, tuple) for g in gradients):
        return list(range(num_rows))
    return sorted({int(r) for row_ids, _ in gradients for r in row_ids})


def _unscaled(call: Call, factor: float) -> Call:
    return {name: _with_values(g, _values(g) / factor) for name, g in call.items()}


def _clipped(call: Call, settings: Settings) -> Call:
    """Clip each number, then the norm of each gradient or that of all of them."""
    values = {name: _values(g) for name, g in call.items()}
    if settings.clipvalue is not None:
        values = {n: np.clip(x, -settings.clipvalue, settings.clipvalue) for n, x in values.items()}
    if settings.clipnorm is not None:
        norms = {n: np.sqrt(np.sum(x**2)) for n, x in values.items()}
        values = {n: x * _shrinkage(norms[n], settings.clipnorm) for n, x in values.items()}
    if settings.global_clipnorm is not None:
        norm = np.sqrt(sum(np.sum(x**2) for x in values.values()))
        values = {n: x * _shrinkage(norm, settings.global_clipnorm) for n, x in values.items()}
    return {name: _with_values(g, values[name]) for name, g in call.items()}


def _shrinkage(norm: float, limit: float) -> float:
    return limit / norm if norm > limit else 1.0


def _values(g: Gradient) -> Array:
    return np.asarray(g[1] if isinstance(g, tuple) else g, np.float64)


def _with_values(g: Gradient, values: Array) -> Gradient:
    return (g[0], values) if isinstance(g, tuple) else values
