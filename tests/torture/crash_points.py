"""Stop a child at the n-th call by which a checkpoint is written, read or cleaned up.

The code under test stays as it is: Python itself reports files that are opened, renamed and removed
(`sys.addaudithook`); only `os.fsync`, which it does not report, is wrapped.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from pathlib import Path
from typing import Any

from children import Reporter

FOLDER = re.compile(r"/(step-[^/]+|\.tmp-[^/]+)")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def place_of(event: str, arguments: tuple[Any, ...], root: str) -> str | None:
    """Say what a call is part of: 'write', 'cleanup' or 'read' of a checkpoint, or None.

    Folders are told by their names: `step-*` is committed, `.tmp-delete*` condemned, any other
    `.tmp-*` unfinished.
    """
    if event not in {
        "open",
        "fsync",
        "os.mkdir",
        "os.rename",
        "os.rmdir",
        "shutil.rmtree",
    }:
        return None
    try:
        paths = [os.fspath(path) for path in arguments[: 2 if event == "os.rename" else 1]]
    except TypeError:  # a file opened by its descriptor
        return None
    if not all(isinstance(path, str) and path.startswith(root) for path in paths):
        return None
    inside = [FOLDER.search(path[len(root) :]) for path in paths]
    names = [match[1] for match in inside if match]
    if not names or names[0].startswith(".tmp-probe"):
        return "write" if event == "fsync" else None  # of the folder that holds them all
    if event in {"os.rmdir", "shutil.rmtree"} or names[-1].startswith(".tmp-delete"):
        return "cleanup"
    if names[0].startswith("step-"):
        return "read" if event == "open" and not (arguments[2] or 0) & WRITING else None
    return "write"


class CrashPoints:
    """Count the calls of one place below `root`, and tell the parent at one of them.

    Args:
        place: 'write', 'cleanup' or 'read'.
        number: which call, the first is 0.
        stop: whether the caller then waits for its death, just before the call is made; else it
            goes on while the parent takes aim.
    """

    def __init__(
        self, reporter: Reporter, root: Path, place: str, number: int, *, stop: bool
    ) -> None:
        self.reporter, self.root, self.place = reporter, str(root), place
        self.number, self.stop = number, stop
        self._counter = mmap.mmap(-1, 8)  # shared with forked writers
        real_fsync = os.fsync

        def fsync(file: Any) -> None:
            number = file if isinstance(file, int) else file.fileno()
            self.note("fsync", (os.readlink(f"/proc/self/fd/{number}"),))
            real_fsync(file)

        os.fsync = fsync
        sys.addaudithook(self.note)

    @property
    def seen(self) -> int:
        """How many of them there were, in this process and in those it forked."""
        return int.from_bytes(self._counter[:8], "little")

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        seen = self.seen
        if seen > self.number or place_of(event, arguments, self.root) != self.place:
            return
        self._counter[:8] = (seen + 1).to_bytes(8, "little")
        if seen == self.number:
            self.reporter.tell(f"at {self.place} {self.number} {event}")
            if self.stop:
                self.reporter.wait()
