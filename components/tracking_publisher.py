"""Send the journal's reports to MLflow from one background thread, in their order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rowstep.components.tracking_journal import Ack, Journal, TrackingError
from rowstep.components.tracking_run import MlflowRun, explain, is_refusal, is_sqlite

_FLUSH_SECONDS = 2.0
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0
_ATTEMPTS_AT_THE_END = 3
_ATTEMPTS_FOR_A_TEXT = 3
_MAX_METRICS = 1000
_SQLITE_SETUP_SECONDS = 180.0


class _Abandoned(Exception):
    """End the thread: nobody waits for it, and its folder may belong to another process."""


class Publisher(threading.Thread):
    """Bring everything in the journal to MLflow, however long that takes.

    Nothing but `finish` waits for this thread. When MLflow cannot be reached it tries again after
    0.5 s, then after twice as long each time, up to 30 s. A request whose answer was lost is sent
    again with the same times, steps and values, which MLflow keeps once.

    Args:
        journal: open, with a target.
        on_problem: told once of each kind of trouble; called from this thread.
    """

    def __init__(self, journal: Journal, on_problem: Callable[[str], None]) -> None:
        super().__init__(name="rowstep-tracking", daemon=True)
        target, ack = journal.target, journal.ack()
        if target is None:
            raise TrackingError(
                f"{journal.folder}: the journal must say where its reports go. Got one without a "
                "start. Nothing can be sent from it. Remove the folder."
            )
        self.num_sent = 0
        self.last_problem = ""
        self.run = MlflowRun(
            target, journal.first_start_ms, ack.run_id if ack else None, self._check
        )
