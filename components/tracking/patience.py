"""Tell a report that a working server cannot take from a server that is in trouble."""

from __future__ import annotations

import time
from collections.abc import Callable

_MIN_ATTEMPTS = 5
_MIN_SECONDS = 30.0
_MIN_ATTEMPTS_OF_ARTIFACTS = 3


class Patience:
    """Count how often the report at one place has failed.

    A report is hopeless when it failed five times over half a minute and MLflow takes another write
    each time that it is asked; at the end of a training the half minute is not waited for. A file
    is given up after three times: the place of the artifacts may be broken by itself, and must not
    hold up the metrics.
    """

    def __init__(self) -> None:
        self._place: tuple[int, bool] | None = None
        self._num_failures = 0
        self._since = 0.0

    def is_over(
        self,
        place: tuple[int, bool],
        *,
        is_artifact: bool,
        is_last: bool,
        takes_others: Callable[[], bool],
    ) -> bool:
        """Note a failure and tell whether the report should be put aside.

        Args:
            place: where the reports of the request begin, and whether they are sent one by one.
                Not how many they are: a training that goes on adds to them between two attempts.
            is_artifact: whether it needs the place of the artifacts.
            is_last: whether somebody waits for the end.
            takes_others: asks MLflow whether it accepts another write.
        """
        if place != self._place:
            self._place, self._num_failures, self._since = place, 0, time.monotonic()
        if not takes_others():
            # The server is in trouble, so the failure says nothing about the report.
            self._num_failures, self._since = 0, time.monotonic()
            return False
        self._num_failures += 1
        if is_artifact:
            return self._num_failures >= _MIN_ATTEMPTS_OF_ARTIFACTS
        is_long = is_last or time.monotonic() - self._since >= _MIN_SECONDS
        return self._num_failures >= _MIN_ATTEMPTS and is_long

    def reset(self) -> None:
        """Forget what failed."""
        self._place = None
