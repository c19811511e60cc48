"""The journal of reports: what is meant for MLflow lies on the disk before a server is asked."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rowstep.components.locks import LockHeldError, exclusive_lock
from rowstep.components.tracking.files import FileShelf, open_private, size_of
from rowstep.components.tracking.history import COMPACTED, History
from rowstep.components.tracking.line_log import LineLog
from rowstep.components.tracking.target import Ack, Target, TrackingError

JOURNAL = "journal.jsonl"
REJECTED = "rejected.jsonl"
MAX_SPOOL_BYTES = 256 * 2**20

_ACK = "ack.json"
_LOCK_WAIT_SECONDS = 5.0
_ALWAYS_KEPT = ("start", "tags", "status")


class Journal:
    """Append reports and remember how far they were sent.

        <folder>/journal.jsonl     one JSON object a line, in the order of the reports
        <folder>/files/            bytes of reported files; their lines name them
        <folder>/ack.json          how far MLflow has them, and in which run
        <folder>/rejected.jsonl    reports that MLflow refused for good, with its reason
        <folder>/rejected-files/   their bytes
        <folder>/lock              held by the one process that may write here

    Offsets count the bytes of all reports ever written: when the oldest are cut away (`compact`),
    the first line says how many bytes it stands for, and an offset noted before still means the
    same report.

    Args:
        folder: created when missing, readable by its owner only.
        create: whether a folder without a journal is a new one, or a mistake.
        max_bytes: what the folder may hold. Params, tags and the status are written even beyond.

    Raises:
        TrackingError: another process writes here, the folder is a link, or nothing is in it.
        OSError: the disk refuses.

    Cost: opening reads the journal once; a report is one unbuffered write.
    """

    def __init__(
        self, folder: Path, *, create: bool = True, max_bytes: int = MAX_SPOOL_BYTES
    ) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.history = History()
        self._guard = threading.Lock()
        self._held = ExitStack()
        self._prepare(create)
        try:
            self._log = LineLog(folder / JOURNAL, self._base_of)
            self._held.callback(self._log.close)
            self._num_rejected_bytes = size_of(folder / REJECTED)
            self._scan()
        except BaseException:
            self._held.close()
            raise

    def _prepare(self, create: bool) -> None:
        folder = self.folder
        if folder.is_symlink():
            raise TrackingError(
                f"{folder}: the folder of unsent reports must not be a link. Got a link to "
                f"{os.readlink(folder)}. Remove the link, or name the folder itself."
            )
        if not create and not (folder / JOURNAL).is_file():
            raise TrackingError(
                f"{folder}: the folder must hold the journal of a training. Got no {JOURNAL}. "
                "Name the 'tracking' folder that the training's last message names."
            )
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        try:
            self._held.enter_context(exclusive_lock(folder / "lock", _LOCK_WAIT_SECONDS))
        except LockHeldError as error:
            raise TrackingError(
                f"{folder}: only one process may send these reports. Got a folder in use by "
                f"{error.holder}. Wait for that process to end, then try again."
            ) from None
        self.files = FileShelf(folder)

    def _base_of(self, first_line: bytes) -> int | None:
        row = _row_of(first_line)
        if row is None or row.get("kind") != COMPACTED:
            return None
        if not isinstance(row.get("base"), int):
            raise TrackingError(
                f"{self.folder / JOURNAL}: the first line must say how many bytes it stands for. "
                "Got one that does not. The disk or somebody changed it. Move the folder away: "
                "the training then reports from where it is."
            )
        return int(row["base"])

    def _scan(self) -> None:
        ack, names = read_ack(self.folder), set()
        for row, after in self.read(0):
            name = _noted(self.history, row)
            if name is not None:
                names.add(name)
                if ack is not None and after <= ack.offset:
                    self.files.mark_sent(name)
        self.files.remove_all_but(names)

    @property
    def target(self) -> Target | None:
        """Return where the reports go, as the latest start says."""
        return self.history.target

    @property
    def first_start_ms(self) -> int:
        """Return when the training first began, in milliseconds since 1970."""
        return self.history.first_start_ms

    # --- writing ----------------------------------------------------------------------------

    def append(self, kind: str, **fields: Any) -> bool:
        """Write one report.

        Returns:
            Whether it is kept: False when the folder already holds as much as it may.

        Raises:
            OSError: the disk refuses; no half line is left behind.
            ValueError, TypeError: a field is no JSON.
        """
        row = {"kind": kind, "ts_ms": int(time.time() * 1000), **fields}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with self._guard:
            if not self._log.is_open:
                return True
            if kind not in _ALWAYS_KEPT and self.num_bytes + len(line) > self.max_bytes:
                return False
            self._log.append(line)
            self.history.note(row)
        return True

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Write the metrics of one step, those that are new; see `History.fresh_metrics`."""
        fresh = self.history.fresh_metrics(step, metrics)
        return not fresh or self.append("metrics", step=step, metrics=fresh)

    def append_histogram(self, step: int, key: str, fields: Mapping[str, Any]) -> bool:
        """Write a histogram as data, if its step is new."""
        if not self.history.is_fresh_histogram(step, key):
            return True
        return self.append("histogram", step=step, key=key, **fields)

    def append_file(self, name: str, data: bytes) -> bool:
        """Write a file and the report that names it; neither is left without the other."""
        if not self._log.is_open or self.num_bytes + len(data) > self.max_bytes:
            return not self._log.is_open
        file = self.files.write(data)
        is_kept = False
        try:
            is_kept = self.append("file", name=name, file=file, size=len(data))
        finally:
            if not is_kept:
                self.files.remove(file)
        return is_kept

    @property
    def num_bytes(self) -> int:
        """Return how much of the disk the reports take."""
        return self._log.num_bytes + self.files.num_bytes + self._num_rejected_bytes

    def flush(self) -> None:
        """Make the journal survive a power cut, before MLflow knows more than it does."""
        self._log.flush()

    def close(self) -> None:
        """Let go of the folder; the reports stay."""
        with self._guard:
            self._held.close()

    # --- sending ----------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Return the offset after the last report."""
        return self._log.size

    def read(self, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield (report, offset of the next one) from `offset` on; damaged lines are skipped.

        Where the reports at `offset` were cut away, the line that stands for them comes first.
        """
        for line, after in self._log.read(offset):
            row = _row_of(line)
            if row is not None:
                yield row, after

    def ack(self) -> Ack | None:
        """Return how far the current target has the reports; None when it has none of them.

        Reports that another server has do not count: a new one gets the whole history.
        """
        ack = read_ack(self.folder)
        target = self.target
        if ack is None or target is None or ack.offset > self.size:
            return None
        return ack if (ack.uri, ack.experiment) == (target.uri, target.experiment) else None

    def write_ack(self, ack: Ack) -> None:
        """Replace the note of how far MLflow has the reports, in one step."""
        fresh = self.folder / f"{_ACK}.new"
        with open(open_private(fresh, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(json.dumps(asdict(ack)).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.folder / _ACK)

    def compact(self, offset: int) -> bool:
        """Cut away the reports before `offset` if the folder is half full and they are much of it.

        One line stands for them: params and tags for a run that must be made again, the largest
        step of each key, the status. A process that is killed in between leaves the journal as it
        was or as it will be; offsets mean the same in both. Reports may be written meanwhile.

        Args:
            offset: of a report that MLflow has, as `read` gives it.

        Returns:
            Whether anything was cut away.

        Raises:
            OSError: the disk refuses; the journal is as it was.
        """
        num_sent = offset - self._log.base + self.files.num_sent_bytes
        if self.num_bytes <= self.max_bytes // 2 or num_sent <= self.max_bytes // 8:
            return False
        cut, names = History(), []
        for row, after in self.read(0):
            if after > offset:
                break
            names.append(_noted(cut, row))
        if not self._log.cut_head(json.dumps(cut.as_row(offset)).encode() + b"\n", offset):
            return False
        for name in filter(None, names):
            self.files.remove(name)
        return True

    def reject(self, row: Mapping[str, Any], reason: str) -> bool:
        """Put a report aside that MLflow will never take, with its file.

        Returns:
            Whether there was room for it: what was refused may take a quarter of the folder.
        """
        line = json.dumps({"reason": reason, "row": row}).encode() + b"\n"
        num_bytes = self._num_rejected_bytes + self.files.num_rejected_bytes + len(line)
        if num_bytes > self.max_bytes // 4:
            return False
        flags = os.O_WRONLY | os.O_APPEND
        with open(open_private(self.folder / REJECTED, flags), "wb", buffering=0) as file:
            file.write(line)
        self._num_rejected_bytes += len(line)
        if isinstance(row.get("file"), str):
            self.files.put_aside(row["file"])
        return True


def read_ack(folder: Path) -> Ack | None:
    """Return the note of the last accepted report, or None when there is none to be read."""
    try:
        return Ack(**json.loads((folder / _ACK).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None  # everything is sent again, which MLflow takes for the same


def _noted(history: History, row: Mapping[str, Any]) -> str | None:
    """Take in a report and return the file that it names; a damaged one says nothing."""
    try:
        history.note(row)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # the publisher puts it aside
    name = row.get("file")
    return name if isinstance(name, str) else None


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
