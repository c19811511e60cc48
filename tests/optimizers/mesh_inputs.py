"""What the DTensor Adam is trained on, in the mesh process and in the reference."""

from __future__ import annotations

import numpy as np

TABLE = np.linspace(-1.0, 1.0, 32).reshape(8, 4).astype(np.float32)
KERNEL = np.array([[0.5, -1.0], [0.25, 2.0], [-0.75, 0.3], [1.0, 0.1]], np.float32)

# Ids repeat in a batch and come back; row 0 is touched, left out, touched again.
BATCHES = [
    np.array([[1, 2], [2, 2], [7, 0], [1, 1]], np.int64),
    np.array([[3, 2], [2, 2], [5, 3], [3, 5]], np.int64),
    np.array([[1, 1], [1, 1], [1, 1], [0, 1]], np.int64),
]
NEVER = [4, 6]
"""Rows that are in no batch."""

_RANDOM = np.random.RandomState(7)
DENSE = [
    (
        (scale * _RANDOM.normal(size=TABLE.shape)).astype(np.float32),
        (scale * _RANDOM.normal(size=KERNEL.shape)).astype(np.float32),
    )
    for scale in (2.0, 0.1, 0.5)
]
SPARSE = [
    (ids.ravel(), _RANDOM.normal(size=[8, 4]).astype(np.float32) * scale)
    for ids, scale in zip(BATCHES, (2.0, 0.1, 0.5), strict=True)
]
