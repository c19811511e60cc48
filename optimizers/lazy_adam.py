"""LazyAdam for Keras 3."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from rowstep.optimizers import update_rules
from rowstep.optimizers.base import RowOptimizer
from rowstep.optimizers.sparse_rows import RowGradient, gather_rows, scatter_rows

__all__ = ["LazyAdam"]


@keras.saving.register_keras_serializable(package="rowstep")
class LazyAdam(RowOptimizer):
    """Adam that, for a sparse gradient, updates only the rows that the batch looked up.

        g[r] = sum of the gradients of row r in the batch
        m[r] = beta_1 * m[r] + (1 - beta_1) * g[r]
        v[r] = beta_2 * v[r] + (1 - beta_2) * g[r]^2
        w[r] = w[r] - A * m[r] / (sqrt(v[r]) + epsilon)
        A    = learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t)

    for the rows r that are present. All other rows of weights and state keep their bits: they do
    not decay and do not drift by their momentum, unlike in Adam. A row that is present with a
    gradient of zero is present: it moves by its momentum. t counts steps of the optimizer, not
    visits of a row. A dense gradient makes it plain Adam.

    State and coefficients are float32 (float64 for float64 variables), whatever the variable's
    dtype. A weight in float16 or bfloat16 still cannot take a step smaller than its own spacing.

    Args:
        learning_rate: A number, a keras LearningRateSchedule or a callable without arguments.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Added to sqrt(v), outside the bias correction.
        amsgrad: Must be False.
        clipnorm: Largest norm of one variable's gradient, measured on summed rows.
        clipvalue: Largest absolute value of an element of the summed gradient.
        global_clipnorm: Largest joint norm of all gradients. Set at most one of the three.
        name: Name of the optimizer.
        **refused: Other arguments of Keras optimizers (weight_decay, use_ema, ...), which would
            touch whole tables: accepted only with the value that means "off".

    Raises:
        OptimizerArgumentError: an argument does not fit.

    Cost: O(N * D) a step for N looked-up rows of width D, whatever the number of rows of the
    table, provided that the table is read by gathering rows (`rowstep.optimizers.Embedding`).

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, end of section 2; the
    lazy form as in TensorFlow's contrib.opt.LazyAdamOptimizer.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str = "lazy_adam",
        **refused: Any,
    ) -> None:
        clips = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        refused["amsgrad"] = amsgrad
        super().__init__(learning_rate, beta_1, beta_2, epsilon, clips, name, refused)

    def _update_dense(
        self,
        index: int,
        variable: tf.Variable,
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
        t: tf.Tensor,
        *slots: tf.Variable,
    ) -> None:
        momentum, velocity = slots
        m = update_rules.first_moment(tf.convert_to_tensor(momentum), gradient, self.beta_1)
        v = update_rules.second_moment(tf.convert_to_tensor(velocity), gradient, self.beta_2)
        w = tf.cast(variable, gradient.dtype) - self._change(m, v, learning_rate, t)
        momentum.assign(m)
        velocity.assign(v)
        variable.assign(tf.cast(w, variable.dtype))

    def _update_rows(
        self,
        index: int,
        variable: tf.Variable,
        gradient: RowGradient,
        learning_rate: tf.Tensor,
        t: tf.Tensor,
        *slots: tf.Variable,
    ) -> None:
        momentum, velocity = slots
        row_ids, row_grads = gradient
        dtype = row_grads.dtype
        # Gather everything before the first scatter: nothing is read back after a write.
        m = update_rules.first_moment(gather_rows(momentum, row_ids, dtype), row_grads, self.beta_1)
        v = update_rules.second_moment(
            gather_rows(velocity, row_ids, dtype), row_grads, self.beta_2
        )
        w = gather_rows(variable, row_ids, dtype) - self._change(m, v, learning_rate, t)
        scatter_rows(momentum, row_ids, m)
        scatter_rows(velocity, row_ids, v)
        scatter_rows(variable, row_ids, w)

    def _change(
        self, m: tf.Tensor, v: tf.Tensor, learning_rate: tf.Tensor, t: tf.Tensor
    ) -> tf.Tensor:
        step_size = update_rules.adam_step_size(learning_rate, self.beta_1, self.beta_2, t)
        return update_rules.adam_change(m, v, step_size, self.epsilon)
