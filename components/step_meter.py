"""Make the training step of a compiled Keras model measure itself, now and then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers.statistics import StepObserver

_MAX_STATISTICS = 512


class StepMeter:
    """Put a second branch into a model's step, taken every `every_steps`, that also measures.

    The optimizer's `apply` is replaced on this one object while the model traces its step, and
    put back by `detach`, after which the model traces a plain step again.

    Args:
        model: compiled, on one replica, its optimizer built.
        observer: of that optimizer.
        every_steps: updates between two measured ones, by the optimizer's `iterations`.

    Cost: the plain branch is the plain step; what is measured stays on the device until `read`.
    """

    def __init__(self, model: keras.Model, observer: StepObserver, every_steps: int) -> None:
        self.model, self.observer, self.every_steps = model, observer, every_steps
        self.optimizer = model.optimizer
        self._measured = tf.Variable(tf.zeros([2 + _MAX_STATISTICS], tf.float64), trainable=False)
        self._last_step = 0.0

    def attach(self) -> None:
        """Make the next trace of the step one that measures."""
        self._replace()
        self.model.make_train_function(force=True)

    def detach(self) -> None:
        """Make the next trace of the step a plain one."""
        if "apply" in vars(self.optimizer):
            self._put_back()
            self.model.train_function = None  # its trace would go on measuring

    def read(self) -> tuple[int, float, np.ndarray] | None:
        """Return the last measured step, the rate after it and its statistics, but only once."""
        measured, num_names = self._measured.numpy(), len(self.observer.names)
        step, rate = measured[:2]
        if not num_names or step <= self._last_step:
            return None
        self._last_step = step
        return int(step), float(rate), measured[2 : 2 + num_names]

    def _replace(self) -> None:
        # On this one object only; `fit` comes in by the second, people's own loops by either.
        self.optimizer.apply = self._apply
        self.optimizer.apply_gradients = self._apply_gradients

    def _put_back(self) -> None:
        del self.optimizer.apply, self.optimizer.apply_gradients

    @contextmanager
    def _plain(self) -> Iterator[None]:
        self._put_back()
        try:
            yield
        finally:
            self._replace()

    def _apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        pairs = list(grads_and_vars)
        self._apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        return self.optimizer.iterations

    def _apply(self, grads: Iterable[Any], trainable_variables: Any = None) -> None:
        optimizer, grads = self.optimizer, list(grads)
        variables = list(trainable_variables or self.model.trainable_variables)
        # Where calls accumulate, all those of one update have its number, and the last one stays.
        step = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64) + 1

        def observed() -> tf.Tensor:
            with self._plain():
                statistics = tf.cast(self.observer.apply(grads, variables), tf.float64)
            rest = tf.zeros([_MAX_STATISTICS - len(self.observer.names)], tf.float64)
            rate = tf.convert_to_tensor(optimizer.learning_rate)
            head = tf.stack([tf.cast(step, tf.float64), tf.cast(rate, tf.float64)])
            self._measured.assign(tf.concat([head, statistics, rest], axis=0))
            return tf.constant(True)

        def plain() -> tf.Tensor:
            with self._plain():
                optimizer.apply(grads, variables)
            return tf.constant(False)

        tf.cond(tf.equal(step % self.every_steps, 0), observed, plain)
