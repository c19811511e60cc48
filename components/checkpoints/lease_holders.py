"""Describe the process that holds a lease, and tell whether such a process still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any


def describe_this_process() -> dict[str, Any]:
    """Return what lets another process of this machine find out whether this one still runs."""
    pid = os.getpid()
    host = socket.gethostname()
    return {"host": host, "pid": pid, "machine": _machine(), "started": _start_of(pid)}


def _machine() -> str | None:
    """Return what tells where a process id means something: one boot, one set of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _start_of(pid: int) -> str | None:
    """Return when a process started, in ticks since the boot; None where this cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "gone, and not yet fetched by its parent" if fields[0] in "ZX" else fields[19]


def is_running(holder: dict[str, Any]) -> bool | None:
    """Return whether the holder runs, or None where this process cannot know."""
    machine, pid = _machine(), holder.get("pid")
    if machine is None or holder.get("machine") != machine or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, and belongs to another user
    start = _start_of(pid)
    return None if start is None else start == holder.get("started")
