"""LAMB for Keras 3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from rowstep.optimizers import arguments, update_rules
from rowstep.optimizers.base import RowOptimizer
from rowstep.optimizers.sparse_rows import RowGradient, to_dense

__all__ = ["LAMB"]


@keras.saving.register_keras_serializable(package="rowstep")
class LAMB(RowOptimizer):
    """Adam's direction, scaled for each variable to the length of its weights.

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g^2
        u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay_rate * w
        ratio = ||w|| / ||u||, or 1 where either norm is 0
        w = w - learning_rate * ratio * u

    The norms are those of the whole variable, so LAMB is dense also for sparse gradients: their
    duplicated rows are summed, then all rows decay and move. The ratio is not clamped.

    Exclusions are regular expressions, searched (re.search) in the variable's path, for example
    "item_embedding/embeddings"; there is no ":0" at the end, so "bias$" works.

    Args:
        learning_rate: A number, a keras LearningRateSchedule or a callable without arguments.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Added to sqrt(v_hat), after the bias correction.
        weight_decay_rate: Share of w added to u. Inside the ratio: with a zero gradient the
            weights shrink by learning_rate whatever its value.
        exclude_from_weight_decay: Patterns of variables that do not decay.
        exclude_from_layer_adaptation: Patterns of variables whose ratio is 1. None takes the list
            of exclude_from_weight_decay; [] excludes none.
        clipnorm: Largest norm of one variable's gradient, measured on summed rows.
        clipvalue: Largest absolute value of an element of the summed gradient.
        global_clipnorm: Largest joint norm of all gradients. Set at most one of the three.
        name: Name of the optimizer.
        **refused: Other arguments of Keras optimizers (weight_decay, use_ema, ...): accepted only
            with the value that means "off".

    Raises:
        OptimizerArgumentError: an argument does not fit.

    Cost: O(V * D) a step for a table [V, D].

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    2020, algorithm 2.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay_rate: float = 0.0,
        exclude_from_weight_decay: Iterable[str] | None = None,
        exclude_from_layer_adaptation: Iterable[str] | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str = "lamb",
        **refused: Any,
    ) -> None:
        rate = arguments.non_negative("LAMB", "weight_decay_rate", weight_decay_rate)
        no_decay = arguments.patterns(
            "LAMB", "exclude_from_weight_decay", exclude_from_weight_decay
        )
        no_adaptation = arguments.patterns(
            "LAMB", "exclude_from_layer_adaptation", exclude_from_layer_adaptation
        )
        clips = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        super().__init__(learning_rate, beta_1, beta_2, epsilon, clips, name, refused)
        self.weight_decay_rate = rate
        self._no_decay_patterns = no_decay
        self._no_adaptation_patterns = no_adaptation

    def decays(self, path: str) -> bool:
        """Return whether the variable of this path is subject to weight decay."""
        return self.weight_decay_rate > 0.0 and not _matches(self._no_decay_patterns, path)

    def adapts(self, path: str) -> bool:
        """Return whether the variable of this path is scaled by its trust ratio."""
        excluded = self._no_adaptation_patterns
        return not _matches(self._no_decay_patterns if excluded is None else excluded, path)

    def _update_dense(
        self,
        index: int,
        variable: tf.Variable,
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
        t: tf.Tensor,
        *slots: tf.Variable,
    ) -> None:
        path = self._keys[index]
        momentum, velocity = slots
        m = update_rules.first_moment(tf.convert_to_tensor(momentum), gradient, self.beta_1)
        v = update_rules.second_moment(tf.convert_to_tensor(velocity), gradient, self.beta_2)
        w = tf.cast(variable, gradient.dtype)
        u = update_rules.lamb_direction(
            w,
            m,
            v,
            t,
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            epsilon=self.epsilon,
            weight_decay_rate=self.weight_decay_rate if self.decays(path) else 0.0,
        )
        if self.adapts(path):
            learning_rate = learning_rate * update_rules.trust_ratio(w, u)
        momentum.assign(m)
        velocity.assign(v)
        variable.assign(tf.cast(w - learning_rate * u, variable.dtype))

    def _update_rows(
        self,
        index: int,
        variable: tf.Variable,
        gradient: RowGradient,
        learning_rate: tf.Tensor,
        t: tf.Tensor,
        *slots: tf.Variable,
    ) -> None:
        dense = to_dense(gradient, variable.shape)
        self._update_dense(index, variable, dense, learning_rate, t, *slots)

    def get_config(self) -> dict[str, Any]:
        """Return all constructor arguments, both exclusion lists among them."""
        return super().get_config() | {
            "weight_decay_rate": self.weight_decay_rate,
            "exclude_from_weight_decay": _copied(self._no_decay_patterns),
            "exclude_from_layer_adaptation": _copied(self._no_adaptation_patterns),
        }


def _matches(patterns: Sequence[str] | None, path: str) -> bool:
    return any(re.search(pattern, path) for pattern in patterns or ())


def _copied(patterns: Sequence[str] | None) -> list[str] | None:
    # Keras wraps lists that are set as attributes; a config holds plain ones.
    return None if patterns is None else list(patterns)
