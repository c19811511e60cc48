"""Send the journal's reports to MLflow from one background thread, in their order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from rowstep.components.tracking.client import is_refusal
from rowstep.components.tracking.journal import Journal
from rowstep.components.tracking.patience import Patience
from rowstep.components.tracking.redact import redact_uri
from rowstep.components.tracking.reports import KINDS_OF_ARTIFACTS
from rowstep.components.tracking.run import MlflowRun
from rowstep.components.tracking.target import Ack, TrackingError
from rowstep.components.tracking.text import explain, is_sqlite

_FLUSH_SECONDS = 5.0  # MLflow takes many reports at once for less than one by one
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0
_ATTEMPTS_AT_THE_END = 3
_MAX_METRICS = 1000
_SQLITE_IMPORT_SECONDS, _SQLITE_SETUP_SECONDS = 60.0, 180.0
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
        self.mlflow_run = MlflowRun(target, journal.first_start_ms, ack, journal.files, self._check)
        self.num_sent = self.num_rejected = 0
        self.last_problem = self.last_refusal = ""
        self._journal, self._on_problem = journal, on_problem
        self._offset = ack.offset if ack else 0
        self._one_by_one_until = 0
        self._patience = Patience()
        self._is_stuck = False
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
        never more than ten times over. With an SQLite store the work is done in this process, not
        by a server that may hang: importing MLflow and making a new store are waited for, up to
        one minute and three.
        """
        asked = begin = time.monotonic()
        self._closing.set()
        while self.is_alive():
            now = time.monotonic()
            is_new = is_sqlite(self.target.uri) and not (self._is_attached or self.last_problem)
            is_imported = self.mlflow_run.has_client
            if is_new and now < asked + (
                _SQLITE_SETUP_SECONDS if is_imported else _SQLITE_IMPORT_SECONDS
            ):
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
            offset, self._is_stuck = self._offset, False
            try:
                self._cut_away()
                self._drain()
                if is_last:
                    return
                num_failures, pause = 0, _FLUSH_SECONDS
            except _AbandonedError:
                return
            except Exception as error:
                self._is_attached = False
                self.last_problem = explain(error)
                if not self._is_stuck:  # what is said of a bad report is that it was put aside
                    self._say_outage()
                num_failures = 0 if self._offset > offset else num_failures
                pause = min(_FIRST_RETRY_SECONDS * 2**num_failures, _LAST_RETRY_SECONDS)
                num_failures += 1
                if is_last and num_failures >= _ATTEMPTS_AT_THE_END and not self._is_stuck:
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

    def _cut_away(self) -> None:
        """Make room in the folder where sent reports fill much of it."""
        ack = self._journal.ack()
        if ack is None:
            return
        try:
            self._journal.compact(ack.offset)
        except OSError as error:
            self._say_disk(error)

    def _next_group(self) -> tuple[list[dict[str, Any]], int]:
        """Return the next reports that one request can hold, and the offset after them."""
        rows: list[dict[str, Any]] = []
        num_metrics, end = 0, self._offset
        for row, after in self._journal.read(self._offset):
            is_metrics = row.get("kind") == "metrics"
            metrics = row.get("metrics") if is_metrics else None
            num_metrics += len(metrics) if isinstance(metrics, dict) else 0
            fits = is_metrics and num_metrics <= _MAX_METRICS
            if rows and (not fits or end < self._one_by_one_until):
                break
            rows.append(row)
            end = after
            if not is_metrics:
                break
        return rows, end

    def _send(self, rows: list[dict[str, Any]], end: int) -> None:
        self._check()
        self._flush()
        try:
            self.mlflow_run.send(rows)
        except Exception as error:
            if not self._is_hopeless(error, rows):
                raise
            self._handle_refusal(error, rows, end)
            return
        self._patience.reset()
        self._commit(end, len(rows))

    def _is_hopeless(self, error: Exception, rows: list[dict[str, Any]]) -> bool:
        is_damaged = isinstance(error, (AttributeError, KeyError, TypeError))
        if is_damaged or isinstance(error, TrackingError) or is_refusal(error):
            return True
        # A request that fails while others pass will be put aside soon: worth a few more attempts
        # where the end is near, so that the next process does not stand before it again.
        self._is_stuck = self.mlflow_run.takes_others()
        return self._patience.is_over(
            (self._offset, self._offset < self._one_by_one_until),
            is_artifact=rows[0].get("kind") in KINDS_OF_ARTIFACTS,
            is_last=self._closing.is_set(),
            takes_others=lambda: self._is_stuck,
        )

    def _handle_refusal(self, error: Exception, rows: list[dict[str, Any]], end: int) -> None:
        run_id = self.mlflow_run.run_id
        self._is_attached = False
        self._attach()
        if self.mlflow_run.run_id != run_id:  # it was deleted; the reports themselves are sound
            return
        if len(rows) > 1:
            self._one_by_one_until = end
            return
        self._patience.reset()
        reason = self.last_refusal = explain(error)
        with self._guard:
            self._check()
            is_kept = self._journal.reject(rows[0], reason)
            self.num_rejected += 1
        self._say(
            "refused",
            f"tracking: MLflow must accept every report. Got {reason}. The report was put aside "
            f"in {self._journal.folder}, the training goes on. Look there for what was refused.",
        )
        if not is_kept:
            self._say(
                "refused and dropped",
                f"tracking: refused reports must fit into a quarter of {self._journal.folder}. Got "
                f"more. They are dropped, the training goes on. The reason of one is: {reason}.",
            )
        self._commit(end, 0)

    def _flush(self) -> None:
        try:
            self._journal.flush()
        except OSError as error:
            self._say_disk(error)

    def _commit(self, offset: int, num_sent: int) -> None:
        target, run = self.target, self.mlflow_run
        ack = Ack(offset, str(run.run_id), str(run.experiment_id), target.uri, target.experiment)
        with self._guard:
            self._check()
            try:
                self._journal.write_ack(ack)
            except OSError as error:
                # Without the note the next process sends all again, which MLflow keeps once.
                self._say_disk(error)
            self._offset = offset
            self.num_sent += num_sent
            self._progress_at = time.monotonic()

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise _AbandonedError

    # --- people -----------------------------------------------------------------------------

    def _say_outage(self) -> None:
        self._say(
            "outage",
            f"tracking: MLflow at {redact_uri(self.target.uri)} must be reachable. Got "
            f"{self.last_problem}. The training goes on, its reports wait in "
            f"{self._journal.folder}. They are sent when MLflow answers.",
        )

    def _say_disk(self, error: OSError) -> None:
        self._say(
            "disk",
            f"tracking: {self._journal.folder} must be writable. Got {explain(error)}. The "
            "training and the sending go on. Look at the disk.",
        )

    def _say(self, topic: str, text: str) -> None:
        if topic in self._said or self._abandoned.is_set():
            return
        self._said.add(topic)
        try:
            self._on_problem(text)
        except Exception:  # safe: whoever listens may fail in any way, and sending must go on
            _logger.exception("%s", text)
