"""A callback for tests that must stop a training in its middle."""

from __future__ import annotations

import time
from typing import Any

import keras


class Slow(keras.callbacks.Callback):
    """Take a little longer for every batch, so that a kill surely hits the training."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Wait 20 ms."""
        time.sleep(0.02)
