"""Hold a file for one process at a time; the kernel lets go of it when the process dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.05


class LockHeldError(Exception):
    """Say that somebody else holds the lock; callers turn it into an error of their own.

    Args:
        holder: who holds it, for people: "process 4242 on host-a".
    """

    def __init__(self, holder: str) -> None:
        super().__init__(f"held by {holder}")
        self.holder = holder


@contextmanager
def exclusive_lock(path: Path, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold an exclusive `flock` on `path` for the length of a `with` block.

    The file stays behind after the release: deleting it would let two processes lock two files
    of the same name. What it says about the holder is for error messages only; the lock is the
    kernel's, so a holder that was killed leaves nothing to clean up.

    Args:
        path: the lock file, created when missing.
        wait_seconds: how long to wait for a holder that is going away (a killed process with much
            memory takes a while to die).

    Raises:
        LockHeldError: another process, or another lock object of this one, holds the file.
        OSError: the file cannot be opened, or its file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(descriptor, wait_seconds)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _describe_this_process(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
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


def _describe_this_process() -> bytes:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        # Between taking the lock and writing its name, the holder is anonymous.
        return "a process that has not written its name yet"
