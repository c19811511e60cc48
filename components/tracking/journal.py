"""The journal of reports: what is meant for MLflow lies on the disk before a server is asked."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rowstep import RowstepError
from rowstep.components.locks import LockHeldError, exclusive_lock

JOURNAL = "journal.jsonl"

_ACK = "ack.json"
_REJECTED = "rejected.jsonl"
_NON_FINITE = "nonfinite/"
_LOCK_WAIT_SECONDS = 5.0


class TrackingError(RowstepError, RuntimeError):
    """Say that a tracking URI or a folder of unsent reports cannot be used."""


@dataclass(frozen=True)
class Target:
    """Name the MLflow run that reports are meant for; the run id is MLflow's own choice."""

    uri: str
    experiment: str
    run_name: str
    run_key: str
    artifact_root: str | None = None


@dataclass(frozen=True)
class Ack:
    """Note that MLflow has the first `offset` bytes of the journal, in the run `run_id`."""

    offset: int
    run_id: str
    experiment_id: str
    uri: str
    experiment: str


class Journal:
    """Append reports and remember how far they were sent.

        <folder>/journal.jsonl     one JSON object a line, in the order of the reports
        <folder>/ack.json          how far MLflow has them, and in which run
        <folder>/rejected.jsonl    reports that MLflow refused for good, with its reason
        <folder>/lock              held by the one process that may write here

    A line that a killed process left half written is cut off on opening. Metrics at or below the
    largest step that their key already has are dropped: a resumed training repeats the steps since
    its checkpoint bit for bit, and MLflow would draw each of them twice.

    Args:
        folder: created when missing, readable by its owner only.
        create: whether a folder without a journal is a new one, or a mistake.

    Raises:
        TrackingError: another process writes here, the folder is a link, or nothing is in it.
        OSError: the disk refuses.

    Cost: opening reads the journal once; a report is one unbuffered write.
    """

    def __init__(self, folder: Path, *, create: bool = True) -> None:
        self.folder = folder
        self.target: Target | None = None
        self.first_start_ms = 0
        self._largest_step: dict[str, int] = {}
        self._num_non_finite: dict[str, float] = {}
        self._guard = threading.Lock()
        self._held = ExitStack()
        self._prepare(create)
        try:
            self._descriptor = _open_private(folder / JOURNAL, os.O_RDWR | os.O_APPEND)
            self._held.callback(os.close, self._descriptor)
            self._is_open = True
            self._size = self._cut_torn_line()
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

    def _cut_torn_line(self) -> int:
        end = os.fstat(self._descriptor).st_size
        while end:
            start = max(end - 65536, 0)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        os.ftruncate(self._descriptor, end)
        return end

    def _scan(self) -> None:
        for row, _ in self.read(0):
            if row.get("kind") == "start":
                self.target = Target(**row["target"])
                self.first_start_ms = self.first_start_ms or row["ts_ms"]
            elif row.get("kind") == "metrics":
                self._note(row["step"], row["metrics"])

    def _note(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._largest_step[key] = max(step, self._largest_step.get(key, step))
            if key.startswith(_NON_FINITE):
                self._num_non_finite[key] = value

    # --- writing ----------------------------------------------------------------------------

    def append(self, kind: str, **fields: Any) -> None:
        """Write one report.

        Raises:
            OSError: the disk refuses; no half line is left behind.
            ValueError, TypeError: a field is no JSON.
        """
        row = {"kind": kind, "ts_ms": int(time.time() * 1000), **fields}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with self._guard:
            if not self._is_open:
                return
            if os.write(self._descriptor, line) != len(line):
                os.ftruncate(self._descriptor, self._size)
                raise OSError(f"{self.folder}: the disk is full")
            self._size += len(line)
        if kind == "start":
            self.target = Target(**row["target"])
            self.first_start_ms = self.first_start_ms or row["ts_ms"]

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step, those that are new.

        A NaN or an infinity cannot be drawn and breaks replays on older servers: in its place
        `nonfinite/<key>` counts how many of them there have been.
        """
        fresh = {}
        for given, number in metrics.items():
            key, value = given, number
            if not math.isfinite(value):
                key = f"{_NON_FINITE}{given}"
                value = self._num_non_finite.get(key, 0.0) + 1.0
            if key not in self._largest_step or step > self._largest_step[key]:
                fresh[key] = value
        if fresh:
            self.append("metrics", step=step, metrics=fresh)
            self._note(step, fresh)

    def flush(self) -> None:
        """Make the journal survive a power cut, before MLflow knows more than it does."""
        with self._guard:
            if self._is_open:
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the folder; the reports stay."""
        with self._guard:
            self._is_open = False
            self._held.close()

    # --- sending ----------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Return the number of bytes that hold whole reports."""
        return self._size

    def read(self, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield (report, offset of the next one) from `offset` on; damaged lines are skipped."""
        end = self._size
        with open(self.folder / JOURNAL, "rb") as file:
            file.seek(offset)
            while offset < end:
                line = file.readline()
                if not line:
                    return
                offset += len(line)
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row, offset

    def ack(self) -> Ack | None:
        """Return how far the current target has the reports; None when it has none of them.

        Reports that another server has do not count: a new one gets the whole history.
        """
        ack = read_ack(self.folder)
        target = self.target
        if ack is None or target is None or ack.offset > self._size:
            return None
        return ack if (ack.uri, ack.experiment) == (target.uri, target.experiment) else None

    def write_ack(self, ack: Ack) -> None:
        """Replace the note of how far MLflow has the reports, in one step."""
        fresh = self.folder / f"{_ACK}.new"
        with open(_open_private(fresh, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(json.dumps(asdict(ack)).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.folder / _ACK)

    def reject(self, row: Mapping[str, Any], reason: str) -> None:
        """Put a report aside that MLflow will never take."""
        flags = os.O_WRONLY | os.O_APPEND
        with open(_open_private(self.folder / _REJECTED, flags), "wb", buffering=0) as file:
            file.write(json.dumps({"reason": reason, "row": row}).encode() + b"\n")


def read_ack(folder: Path) -> Ack | None:
    """Return the note of the last accepted report, or None when there is none to be read."""
    try:
        return Ack(**json.loads((folder / _ACK).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None  # everything is sent again, which MLflow takes for the same


def _open_private(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
