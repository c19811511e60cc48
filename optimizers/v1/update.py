"""The update of TensorFlow 1's LazyAdam: what `tf.compat.v1.train.Optimizer` calls for a step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rowstep.optimizers import update_rules
from rowstep.optimizers.gradients import compute_dtype
from rowstep.optimizers.rounding import noise, stochastic_round
from rowstep.optimizers.sparse_rows import gather_rows, sum_duplicate_rows
from rowstep.optimizers.variables import variable_path

__all__ = ["LazyUpdate"]


class LazyUpdate(tf.compat.v1.train.AdamOptimizer):
    """Update rows where TensorFlow's Adam updates tables, and half precision in float32.

    The methods are the ones that TensorFlow leaves to its subclasses; each returns the operation
    of its update, or None eagerly. Row ids may repeat; everything has been checked before.
    """

    slots_in_variable_dtype: bool = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # By graph (None eagerly), because one optimizer may serve several.
        self._trained: dict[tf.Graph | None, dict[Any, tf.Variable]] = {}

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        trained = self._trained.setdefault(graph, {})
        for variable in var_list:
            trained.setdefault(variable.ref(), variable)
            dtype = variable.dtype.base_dtype
            if compute_dtype(dtype) != dtype and not self.slots_in_variable_dtype:
                zeros = tf.compat.v1.zeros_initializer()
                for slot in ("m", "v"):  # in this order they get the names <variable>/Adam, Adam_1
                    self._get_or_make_slot_with_initializer(
                        variable, zeros, variable.shape, compute_dtype(dtype), slot, self._name
                    )
        super()._create_slots(var_list)  # makes the slots that are missing

    def _apply_dense(self, grad: tf.Tensor, var: tf.Variable) -> tf.Operation | None:
        if var.dtype.base_dtype == compute_dtype(var.dtype.base_dtype):
            return super()._apply_dense(grad, var)
        return self._update_half(grad, var)

    def _resource_apply_dense(self, grad: tf.Tensor, var: tf.Variable) -> tf.Operation | None:
        if var.dtype.base_dtype == compute_dtype(var.dtype.base_dtype):
            return super()._resource_apply_dense(grad, var)
        return self._update_half(grad, var)

    def _apply_sparse_duplicate_indices(
        self, grad: tf.IndexedSlices, var: tf.Variable
    ) -> tf.Operation | None:
        return self._update_rows(grad.indices, grad.values, var)

    def _resource_apply_sparse_duplicate_indices(
        self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor
    ) -> tf.Operation | None:
        return self._update_rows(indices, grad, handle)

    def _update_half(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Operation | None:
        """Apply a dense gradient to a half-precision variable; the fused kernel has one dtype."""
        momentum, velocity = self.get_slot(variable, "m"), self.get_slot(variable, "v")
        m, v, change = self._changed(
            *(tf.cast(value, tf.float32) for value in (momentum, velocity, gradient))
        )
        weights = tf.cast(variable, tf.float32) - change
        new = ((momentum, m), (velocity, v), (variable, weights))
        return tf.group(
            *(
                target.assign(
                    self._narrowed(value, target, variable, None, m),
                    use_locking=self._use_locking,
                    read_value=False,
                )
                for target, value in new
            )
        )

    def _update_rows(
        self, row_ids: tf.Tensor, row_grads: tf.Tensor, variable: tf.Variable
    ) -> tf.Operation | None:
        dtype = compute_dtype(variable.dtype.base_dtype)
        row_ids, row_grads = sum_duplicate_rows(row_ids, tf.cast(row_grads, dtype))
        momentum, velocity = self.get_slot(variable, "m"), self.get_slot(variable, "v")
        m, v, change = self._changed(
            gather_rows(momentum, row_ids, dtype), gather_rows(velocity, row_ids, dtype), row_grads
        )
        scatter_update, scatter_sub = tf.compat.v1.scatter_update, tf.compat.v1.scatter_sub
        writes = [(scatter_update, momentum, m), (scatter_update, velocity, v)]
        if variable.dtype.base_dtype == dtype:
            # Loses no change of another worker that updates the same rows, with use_locking.
            writes.append((scatter_sub, variable, change))
        else:
            # Rounded once, after the subtraction.
            weights = gather_rows(variable, row_ids, dtype) - change
            writes.append((scatter_update, variable, weights))
        # What these return reads the whole variable when it is used: only its operation is.
        return tf.group(
            *(
                write(
                    target,
                    row_ids,
                    self._narrowed(value, target, variable, row_ids, m),
                    use_locking=self._use_locking,
                ).op
                for write, target, value in writes
            )
        )

    def _changed(
        self, m: tf.Tensor, v: tf.Tensor, gradient: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return both new moments, and what to take from the weights."""
        powers = self._get_beta_accumulators()
        tensors = (self._lr_t, self._beta1_t, self._beta2_t, self._epsilon_t, *powers)
        # The powers hold float32 betas. Betas of more digits elsewhere would not cancel with them.
        learning_rate, beta1, beta2, epsilon, beta1_power, beta2_power = (
            tf.cast(tensor, m.dtype) for tensor in tensors
        )
        m = update_rules.first_moment(m, gradient, beta1)
        v = update_rules.second_moment(v, gradient, beta2)
        step_size = learning_rate * tf.sqrt(1.0 - beta2_power) / (1.0 - beta1_power)
        return m, v, update_rules.adam_change(m, v, step_size, epsilon)

    def _narrowed(
        self,
        value: tf.Tensor,
        target: tf.Variable,
        weights: tf.Variable,
        row_ids: tf.Tensor | None,
        m: tf.Tensor,
    ) -> tf.Tensor:
        """Return a value in the dtype of its variable; weights are rounded up or down at random.

        Rounded to nearest, weights would stand still under steps smaller than half their spacing.
        """
        dtype = target.dtype.base_dtype
        if target is not weights or dtype not in (tf.float16, tf.bfloat16):
            return tf.cast(value, dtype)
        # TF1 keeps no step counter. The powers change with every step until they are 0, after about
        # a hundred thousand; the moments go on to.
        changing = [tf.cast(power, tf.float32) for power in self._get_beta_accumulators()]
        changing.append(tf.reduce_sum(m))
        bits = [tf.cast(tf.bitcast(number, tf.int32), tf.int64) for number in changing]
        if row_ids is None:
            rank = weights.shape.rank
            row_ids = tf.range(weights.shape[0], dtype=tf.int64) if rank else tf.zeros([], tf.int64)
        seed = zlib.crc32(variable_path(weights).encode())
        number = bits[0] * 2**32 + bits[1] + bits[2] * 31
        uniform = noise(tf.cast(row_ids, tf.int64), weights.shape[1:], seed, number)
        return stochastic_round(value, uniform, dtype)
