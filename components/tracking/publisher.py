"""Send the journal's reports to MLflow from one background thread, in their order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from rowstep.components.tracking.journal import Ack, Journal, TrackingError
from rowstep.components.tracking.run import MlflowRun, is_refusal
from rowstep.components.tracking.text import explain, is_sqlite, redact_uri

_FLUSH_SECONDS = 2.0
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0
_ATTEMPTS_AT_THE_END = 3
_ATTEMPTS_FOR_A_TEXT = 3
_MAX_METRICS = 1000
_SQLITE_SETUP_SECONDS = 180.0
_MOST_TIMES_OVER = 10

_logger = logging.getLogger(__name__)


class _AbandonedError(Exception):
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
        self.target = target
        self.mlflow_run = MlflowRun(target, journal.first_start_ms, ack, self._check)
        self.num_sent = 0
        self.last_problem = ""
        self._journal, self._on_problem = journal, on_problem
        self._offset = ack.offset if ack else 0
        self._one_by_one_until = 0
        self._num_text_failures = 0
        self._is_attached = False
        self._said: set[str] = set()
        self._progress_at = time.monotonic()
        self._closing, self._abandoned = threading.Event(), threading.Event()
        self._guard = threading.Lock()

    @property
    def num_unsent(self) -> int:
        """Count the reports that MLflow does not have."""
        return sum(1 for _ in self._journal.read(self._offset))

    def finish(self, timeout_seconds: float) -> None:
        """Wait until everything is sent, nothing moves any more, or the time is over.

        The time counts from the last accepted request, so that a long queue may drain, but is
        never more than ten times over. A new SQLite store is made in this process, not by a
        server that may hang, so that is waited for.
        """
        asked = begin = time.monotonic()
        self._closing.set()
        while self.is_alive():
            now = time.monotonic()
            is_new = is_sqlite(self.target.uri) and not (self._is_attached or self.last_problem)
            if is_new and now < asked + _SQLITE_SETUP_SECONDS:
                begin = now
            limit = min(
                max(begin, self._progress_at) + timeout_seconds,
                begin + _MOST_TIMES_OVER * timeout_seconds,
            )
            if now >= limit:
                break
            self.join(0.05)
        with self._guard:
            self._abandoned.set()

    def run(self) -> None:
        """Send until there is nothing left and nothing more can come."""
        num_failures = 0
        while True:
            is_last = self._closing.is_set()  # read first: all that was written before is sent
            try:
                self._drain()
                if is_last:
                    return
                num_failures, pause = 0, _FLUSH_SECONDS
            except _AbandonedError:
                return
            except Exception as error:
                self._is_attached = False
                self._note_outage(error)
                pause = min(_FIRST_RETRY_SECONDS * 2**num_failures, _LAST_RETRY_SECONDS)
                num_failures += 1
                if is_last and num_failures >= _ATTEMPTS_AT_THE_END:
                    return
            (self._abandoned if is_last else self._closing).wait(pause)

    # --- reports ----------------------------------------------------------------------------

    def _drain(self) -> None:
        while self._offset < self._journal.size:
            self._attach()
            rows, end = self._next_group()
            if not rows:
                return
            self._send(rows, end)

    def _attach(self) -> None:
        if self._is_attached:
            return
        self._check()
        if self.mlflow_run.attach():
            # Another run than before: it gets the whole history.
            self._commit(0, 0)
        self._is_attached = True
        self._progress_at = time.monotonic()

    def _next_group(self) -> tuple[list[dict[str, Any]], int]:
        """Return the next reports that one request can hold, and the offset after them."""
        rows: list[dict[str, Any]] = []
        num_metrics, end = 0, self._offset
        for row, after in self._journal.read(self._offset):
            num_metrics += len(row.get("metrics", ()))
            fits = row["kind"] == "metrics" and num_metrics <= _MAX_METRICS
            if rows and (not fits or end < self._one_by_one_until):
                break
            rows.append(row)
            end = after
            if row["kind"] != "metrics":
                break
        return rows, end

    def _send(self, rows: list[dict[str, Any]], end: int) -> None:
        self._check()
        self._journal.flush()
        try:
            self.mlflow_run.send(rows)
        except Exception as error:
            if not self._is_hopeless(error, rows[0]):
                raise
            self._handle_refusal(error, rows, end)
            return
        self._num_text_failures = 0
        self._commit(end, len(rows))

    def _is_hopeless(self, error: Exception, row: dict[str, Any]) -> bool:
        if isinstance(error, TrackingError) or is_refusal(error):
            return True
        # The place for artifacts may be broken while the rest of MLflow works; a text that cannot
        # be stored must not hold up the metrics behind it.
        if row["kind"] == "text":
            self._num_text_failures += 1
        return self._num_text_failures >= _ATTEMPTS_FOR_A_TEXT

    def _handle_refusal(self, error: Exception, rows: list[dict[str, Any]], end: int) -> None:
        run_id = self.mlflow_run.run_id
        self._is_attached = False
        self._attach()
        if self.mlflow_run.run_id != run_id:  # it was deleted; the reports themselves are sound
            return
        if len(rows) > 1:
            self._one_by_one_until = end
            return
        self._num_text_failures = 0
        reason = explain(error)
        with self._guard:
            self._check()
            self._journal.reject(rows[0], reason)
        self._say(
            "refused",
            f"tracking: MLflow must accept every report. Got {reason}. The report was put aside "
            f"in {self._journal.folder}, the training goes on. Look there for what was refused.",
        )
        self._commit(end, 0)

    def _commit(self, offset: int, num_sent: int) -> None:
        target, run = self.target, self.mlflow_run
        ack = Ack(offset, str(run.run_id), str(run.experiment_id), target.uri, target.experiment)
        with self._guard:
            self._check()
            self._journal.write_ack(ack)
            self._offset = offset
            self.num_sent += num_sent
            self._progress_at = time.monotonic()

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise _AbandonedError

    # --- people -----------------------------------------------------------------------------

    def _note_outage(self, error: Exception) -> None:
        self.last_problem = explain(error)
        self._say(
            "outage",
            f"tracking: MLflow at {redact_uri(self.target.uri)} must be reachable. Got "
            f"{self.last_problem}. The training goes on, its reports wait in "
            f"{self._journal.folder}. They are sent when MLflow answers.",
        )

    def _say(self, topic: str, text: str) -> None:
        if topic in self._said or self._abandoned.is_set():
            return
        self._said.add(topic)
        try:
            self._on_problem(text)
        except Exception:  # safe: whoever listens may fail in any way, and sending must go on
            _logger.exception("%s", text)
