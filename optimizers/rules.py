"""The update of one variable as a pure function of tensors.

A rule takes weights, moments and a gradient, and returns new ones. It does not know whether the
tensors are a whole variable or the rows that a batch touched: that is what makes an optimizer lazy,
and `row_update.py` decides it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import tensorflow as tf

from rowstep.optimizers import update_rules
from rowstep.optimizers.update_rules import Scalar

__all__ = ["AdamRule", "Hyper", "LambRule", "Rule", "Tensors", "resolved"]

Hyper: TypeAlias = "float | Callable[[], float | tf.Tensor]"
"""A hyperparameter: a number, or a callable that is asked at every step."""
Tensors: TypeAlias = Mapping[str, tf.Tensor]


def resolved(value: Hyper, dtype: tf.DType) -> Scalar:
    """Return a hyperparameter for this step; a number stays a Python number, in float64."""
    return tf.cast(value(), dtype) if callable(value) else value


class Rule(Protocol):
    """Say how weights and moments move by a gradient."""

    @property
    def beta_1(self) -> Hyper:
        """Decay of the first moment."""

    @property
    def beta_2(self) -> Hyper:
        """Decay of the second moment."""

    @property
    def row_velocity(self) -> bool:
        """Whether there is one second moment a row."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the moments, in the order of state lists."""

    def step(
        self, w: tf.Tensor, slots: Tensors, g: tf.Tensor, learning_rate: tf.Tensor, t: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Return new weights and new moments.

        Args:
            w: Weights [R, ...].
            slots: Moments by name, [R, ...] or, for a velocity by row, [R, 1, ...].
            g: Gradient of the shape of w.
            learning_rate: Scalar.
            t: The step counted from 1, a scalar or [R, 1, ...].
        """


@dataclass(frozen=True)
class AdamRule:
    """Adam with epsilon outside the bias correction, AMSGrad by an option."""

    beta_1: Hyper
    beta_2: Hyper
    epsilon: Hyper
    amsgrad: bool = False
    row_velocity: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the moments."""
        moments = ("momentum", "velocity")
        return (*moments, "velocity_hat") if self.amsgrad else moments

    def step(
        self, w: tf.Tensor, slots: Tensors, g: tf.Tensor, learning_rate: tf.Tensor, t: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Return new weights and new moments. See `Rule.step`."""
        beta_1, beta_2 = (resolved(beta, w.dtype) for beta in (self.beta_1, self.beta_2))
        new = _moments(slots, g, beta_1, beta_2, self.row_velocity)
        denominator = new["velocity"]
        if self.amsgrad:
            denominator = update_rules.running_maximum(slots["velocity_hat"], denominator)
            new["velocity_hat"] = denominator
        step_size = update_rules.adam_step_size(learning_rate, beta_1, beta_2, t)
        epsilon = resolved(self.epsilon, w.dtype)
        return w - update_rules.adam_change(new["momentum"], denominator, step_size, epsilon), new


@dataclass(frozen=True)
class LambRule:
    """Adam's direction in the length of the weights, for the whole variable or for each row."""

    beta_1: Hyper
    beta_2: Hyper
    epsilon: Hyper
    weight_decay_rate: float = 0.0
    adapt: bool = True
    by_row: bool = False
    trust_ratio_clip: tuple[float, float] | None = None
    row_velocity: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the moments."""
        return ("momentum", "velocity")

    def step(
        self, w: tf.Tensor, slots: Tensors, g: tf.Tensor, learning_rate: tf.Tensor, t: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Return new weights and new moments. See `Rule.step`."""
        beta_1, beta_2 = (resolved(beta, w.dtype) for beta in (self.beta_1, self.beta_2))
        new = _moments(slots, g, beta_1, beta_2, self.row_velocity)
        u = update_rules.lamb_direction(
            w,
            new["momentum"],
            new["velocity"],
            t,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=resolved(self.epsilon, w.dtype),
            weight_decay_rate=self.weight_decay_rate,
        )
        if self.adapt:
            learning_rate = learning_rate * self.ratio(w, u)
        return w - learning_rate * u, new

    def ratio(self, w: tf.Tensor, u: tf.Tensor) -> tf.Tensor:
        """Return the trust ratio of weights and direction, a scalar or [R, 1, ...]."""
        return update_rules.trust_ratio(w, u, by_row=self.by_row, clip=self.trust_ratio_clip)


def _moments(
    slots: Tensors, g: tf.Tensor, beta_1: Scalar, beta_2: Scalar, row_velocity: bool
) -> dict[str, tf.Tensor]:
    second = update_rules.row_second_moment if row_velocity else update_rules.second_moment
    return {
        "momentum": update_rules.first_moment(slots["momentum"], g, beta_1),
        "velocity": second(slots["velocity"], g, beta_2),
    }
