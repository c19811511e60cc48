"""Hold a file for one process at a time; the kernel lets go of it when the process dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.05


class LockHeldError(Exception):
    """Say that somebody else holds the lock; callers turn it into an error of their own.

    Args:
        holder: who holds it, for people: "process 4242 on host-a".
    """

    def __init__(self, holder: str) -> None:
        super().__init__(f"held by {holder}")
        self.holder = holder


class HeldLock:
    """A lock that this process, or the one it was forked from, has taken."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def is_in_place(self) -> bool:
        """Return whether the lock file still is the very file that was locked.

        After somebody deleted or replaced it, another process can lock the new one: then there are
        two owners, and the older one must stop.

        Raises:
            OSError: the file system does not answer.
        """
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


@contextmanager
def exclusive_lock(path: Path, wait_seconds: float = 0.0) -> Iterator[HeldLock]:
    """Hold an exclusive `flock` on `path` for the length of a `with` block.

    The file stays behind after the release: deleting it would let two processes lock two files
    of the same name. What it says about the holder is for error messages only; the lock is the
    kernel's, so a holder that was killed leaves nothing to clean up. A forked copy of the holder
    shares the lock, and keeps it for as long as the copy lives.

    Args:
        path: the lock file, created when missing.
        wait_seconds: how long to wait for a holder that is going away (a killed process with much
            memory takes a while to die).

    Raises:
        LockHeldError: another process, or another lock object of this one, holds the file.
        OSError: the file cannot be opened, or its file system has no locks.
    """
    descriptor = _acquire(path, time.monotonic() + wait_seconds)
    try:
        _describe(descriptor, {"pid": os.getpid(), "host": socket.gethostname()})
        try:
            yield HeldLock(path, descriptor)
        finally:
            _describe(descriptor, None)
    finally:
        os.close(descriptor)


def _acquire(path: Path, deadline: float) -> int:
    """Return the descriptor of the locked file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _wait_for(descriptor, deadline)
            if HeldLock(path, descriptor).is_in_place():
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the file was replaced while we waited for it


def _wait_for(descriptor: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() >= deadline:
            raise LockHeldError(_read_holder(descriptor))
        time.sleep(_POLL_SECONDS)


def _describe(descriptor: int, holder: dict[str, Any] | None) -> None:
    with suppress(OSError):  # it is for messages: a full disk must not keep anyone from the lock
        os.ftruncate(descriptor, 0)
        if holder is not None:
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        # Between taking the lock and writing its name, the holder is anonymous.
        return "a process that has not written its name yet"
