"""A callback, to be named in configs, that lets a test act in the middle of a training."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import keras

actions: dict[int, Callable[[], None]] = {}
"""What the callback does, by batch of this process; of the module, as configs name classes."""


class AtBatch(keras.callbacks.Callback):
    """Do something after a given number of batches of this process."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        actions.get(self.seen, lambda: None)()

    def get_state(self) -> None:
        """Keep nothing: the count is of this process."""

    def set_state(self, state: None) -> None:
        pass


def interrupt() -> None:
    """Ask this process to stop, as a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)
