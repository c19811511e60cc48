"""What the tortured trainings call at every step; configs name these by their dotted path."""

from __future__ import annotations

import random
import time
from typing import Any

import keras
import numpy as np
from children import Reporter

reporter: Reporter | None = None
"""Set in each child before it trains."""
pause_seconds = 0.0
"""Slows the tiny steps down, so that a save in the background lasts a few of them and no more."""


def tell(text: str) -> None:
    if reporter is not None:
        reporter.tell(text)


class Steps(keras.callbacks.Callback):
    """Tell what is done, and draw random numbers, whose generators a resume must set right."""

    def get_state(self) -> None:
        """Keep nothing."""

    def set_state(self, state: None) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        random.random()
        np.random.random()
        tell(f"batch {self.epoch} {batch}")
        time.sleep(pause_seconds)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        tell("epoch_end")

    def on_train_end(self, logs: Any = None) -> None:
        tell("train_end")


def stop_early() -> keras.callbacks.EarlyStopping:
    return keras.callbacks.EarlyStopping(
        "val_rmse", mode="min", patience=2, restore_best_weights=True
    )


def slow_down() -> keras.callbacks.ReduceLROnPlateau:
    """Cut the learning rate every second epoch: no epoch improves by so much."""
    return keras.callbacks.ReduceLROnPlateau(
        "val_rmse", mode="min", factor=0.5, patience=2, min_delta=10.0
    )
