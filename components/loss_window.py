"""The mean loss and the speed between two reports, from what Keras tells its callbacks."""

from __future__ import annotations

import time


class LossWindow:
    """Sum up batches since the last report.

    Keras tells a running mean, which begins anew with each epoch. The loss of a window is the
    difference of two of its sums, over as many epochs as the window reaches.
    """

    def __init__(self) -> None:
        self._loss_sum = self._seconds = 0.0
        self._num_batches = self._epoch_batches = 0
        self._epoch_sum: float | None = 0.0
        self._since: float | None = None

    def begin_epoch(self) -> None:
        """Begin a new running mean, and let the clock run."""
        self._epoch_sum, self._epoch_batches = 0.0, 0
        self._since = time.monotonic()

    def note(self, mean_loss: float | None, num_batches: int) -> None:
        """Take in the running mean after the first `num_batches` batches of the epoch."""
        self._num_batches += num_batches - self._epoch_batches
        self._epoch_batches = num_batches
        if mean_loss is None or self._epoch_sum is None:
            self._epoch_sum = None
            return
        total = mean_loss * num_batches
        self._loss_sum += total - self._epoch_sum
        self._epoch_sum = total

    def pause(self) -> None:
        """Stop the clock, as for an evaluation."""
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None

    def take(self) -> dict[str, float]:
        """Return the metrics of the window, and begin the next one."""
        is_running = self._since is not None
        self.pause()
        metrics = {"batch/steps_per_second": self._num_batches / max(self._seconds, 1e-9)}
        if self._epoch_sum is not None and self._num_batches:
            metrics["batch/loss"] = self._loss_sum / self._num_batches
        self._loss_sum, self._num_batches, self._seconds = 0.0, 0, 0.0
        self._since = time.monotonic() if is_running else None
        return metrics
