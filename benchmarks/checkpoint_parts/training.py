"""A training whose state is saved: two tables, a dense kernel, and LazyAdam with real steps."""

from __future__ import annotations

import time

import google_crc32c
import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers import LazyAdam
from rowstep.optimizers.state import iter_named_state, state_variables

WIDTH = 64
BATCH_SIZE = 4096
NUM_BATCHES = 64
_DENSE_SHAPE = (512, 256)


class Training:
    """Hold the tables, the optimizer and its step.

    Args:
        num_bytes: size of the optimizer's state: `momentum` and `velocity` of all variables.
        seed: for numbers and batches.
    """

    def __init__(self, num_bytes: int, seed: int) -> None:
        rows = num_bytes // (2 * 4 * WIDTH)
        self.rng = np.random.default_rng(seed)
        shapes = [(rows * 4 // 5, WIDTH), (rows // 5, WIDTH), _DENSE_SHAPE]
        names = ["items", "users", "kernel"]
        self.variables = [
            keras.Variable(lambda shape, dtype: tf.zeros(shape, dtype), shape=shape, name=name)
            for shape, name in zip(shapes, names, strict=True)
        ]
        self.optimizer = LazyAdam()
        self.optimizer.build(self.variables)
        self._step = self._compiled()
        self._batches = [[self._ids(shape[0]) for shape in shapes[:2]] for _ in range(NUM_BATCHES)]
        self._fill()
        # What steps have scattered into is read and copied differently from what they have not.
        self.run(3)

    def run(self, num_steps: int) -> list[float]:
        """Return the seconds of each step."""
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            ids = self._batches[int(self.rng.integers(NUM_BATCHES))]
            self._step(*ids)
            seconds.append(time.perf_counter() - start)
        return seconds

    def arrays(self) -> list[np.ndarray]:
        """Return the optimizer's state, without a copy."""
        return [array for _, array in iter_named_state(self.optimizer)]

    def natives(self) -> list[tf.Variable]:
        """Return the variables behind the state."""
        return [variable.value for variable in state_variables(self.optimizer).values()]

    def digest(self) -> int:
        """Return a checksum of the whole state."""
        return checksum(self.arrays())

    def _compiled(self) -> tf.types.experimental.ConcreteFunction:
        ids = tf.TensorSpec([BATCH_SIZE], tf.int64)

        @tf.function(input_signature=[ids, ids])
        def step(items: tf.Tensor, users: tf.Tensor) -> None:
            gradients = [
                tf.IndexedSlices(tf.gather(table.value, row_ids) * 0.1 + 0.01, row_ids, table.shape)
                for table, row_ids in zip(self.variables, (items, users), strict=False)
            ]
            kernel = self.variables[-1]
            self.optimizer.apply([*gradients, kernel * 0.1], self.variables)

        return step.get_concrete_function()

    def _ids(self, num_rows: int) -> tf.Tensor:
        """Draw ids log-uniformly: few rows are in every batch, most in hardly any."""
        drawn = num_rows ** self.rng.random(BATCH_SIZE)
        return tf.constant(np.minimum(drawn.astype(np.int64), num_rows - 1))

    def _fill(self) -> None:
        """Give the slots numbers that do not compress, and that no other row has."""
        block = self.rng.random((65_536, WIDTH), dtype=np.float32)
        for variable in self.natives():
            if variable.shape.rank != 2 or variable.shape[1] != WIDTH:
                continue
            for first in range(0, variable.shape[0], len(block)):
                row_ids = np.arange(first, min(first + len(block), variable.shape[0]))
                rows = block[: len(row_ids)].copy()
                rows[:, 0] = row_ids % 9973 + self.rng.random()
                variable.scatter_update(tf.IndexedSlices(tf.constant(rows), tf.constant(row_ids)))


def checksum(arrays: list[np.ndarray]) -> int:
    """Return the CRC-32C of the bytes of arrays, one after the other."""
    crc = 0
    for array in arrays:
        crc = google_crc32c.extend(crc, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return crc
