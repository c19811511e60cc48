"""A fork server: children that do real work, tell of it line by line, and are killed.

The parent imports what is slow to import once and starts nothing in it, so that a fork of it is a
fresh process in milliseconds. Every child leads a session of its own.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Reporter:
    """The child's side: tell the parent, and wait where the parent wants to find it."""

    def __init__(self, told: int, hold: int) -> None:
        self._told, self._hold = told, hold
        self.stops_after: str | None = None
        """A line after which the child waits for its death."""

    def tell(self, text: str) -> None:
        """Send one line, all at once and without a buffer that a kill could empty."""
        os.write(self._told, text.encode() + b"\n")
        if text == self.stops_after:
            self.wait()

    def wait(self) -> None:
        """Stay here until the parent lets go."""
        os.read(self._hold, 1)


class Child:
    """The parent's side."""

    def __init__(self, pid: int, told: int, hold: int) -> None:
        self.pid, self._told, self._hold = pid, told, hold
        self.lines: list[str] = []
        self._taken = 0
        self._rest = b""
        self._exit: int | None = None

    def next_line(self, seconds: float) -> str | None:
        """Return the next line, or None when the child ended or told nothing for so long."""
        deadline = time.monotonic() + seconds
        while self._taken == len(self.lines):
            if not self._read(max(deadline - time.monotonic(), 0.0)):
                return None
        self._taken += 1
        return self.lines[self._taken - 1]

    def kill(self, *, group: bool = True, number: int = signal.SIGKILL) -> None:
        """Send a signal to the child, or to everything it started too."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def let_go(self) -> None:
        """Let a helper of the child's that waits at a crash point go on."""
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the child's end and return its exit code (minus the signal), or None."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._exit is None:
            pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                self._exit = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                return None
            else:
                self._read(0.02)
        return self._exit

    def drain(self) -> list[str]:
        """Return every line that the child managed to send."""
        while self._read(0.0):
            pass
        return self.lines

    def bury(self) -> None:
        """End whatever is left of the child and its helpers."""
        self.kill()
        self.let_go()
        self.wait()
        self.drain()
        os.close(self._told)

    def _read(self, seconds: float) -> bool:
        """Take in what has been sent, and say whether anything had."""
        if not select.select([self._told], [], [], seconds)[0]:
            return False
        data = os.read(self._told, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode() for line in lines]
        return bool(data)


def start(work: Callable[[Reporter], None], log: Path) -> Child:
    """Fork a child that does the work; what it prints goes to the end of `log`.

    The exit code is 0, or 1 after an exception, which is in the log.
    """
    told_here, told_there = os.pipe()
    hold_there, hold_here = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told_there)
        os.close(hold_there)
        return Child(pid, told_here, hold_here)
    code = 1
    try:
        os.setsid()
        os.close(told_here)
        os.close(hold_here)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        work(Reporter(told_there, hold_there))
        code = 0
    except BaseException:  # nothing of a child may reach the parent's code
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
