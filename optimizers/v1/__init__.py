"""The TF1-style LazyAdamOptimizer, for graphs with sessions, eager code and `tf.function`."""

from rowstep.optimizers.v1.optimizer import LazyAdamOptimizer

__all__ = ["LazyAdamOptimizer"]
