"""Measure the disk and the memory that checkpoints are compared with."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

PIECE_BYTES = 16 * 2**20
_BLOCK_BYTES = 4096
_MIB = 2**20
_SETTLE_SECONDS = 5.0


def ready_memory(num_bytes: int) -> None:
    """Free memory that the machine has at hand, for a measurement that begins now.

    A virtual machine hands memory back to its host a few seconds after it became free. To do so
    disturbs whatever runs then, and the next touch of such memory costs seconds a GiB, whoever
    comes first. So memory is used, and kept until all else that is free was handed back.
    """
    memory = np.empty(num_bytes, np.uint8)
    memory[::_BLOCK_BYTES] = 1
    time.sleep(_SETTLE_SECONDS)


def pieces(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the bytes of arrays in order, in pieces, without a copy."""
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, data.nbytes, PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]


def write_raw(path: Path, arrays: Iterable[np.ndarray]) -> float:
    """Return the seconds that a plain buffered write with its fsync takes; the file stays."""
    start = time.perf_counter()
    with open(path, "xb", buffering=0) as file:
        for piece in pieces(arrays):
            file.write(piece.data)
        os.fsync(file.fileno())
    return time.perf_counter() - start


def write_direct(path: Path, arrays: Iterable[np.ndarray]) -> float | None:
    """Return the seconds without the page cache, or None where the file system refuses that."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    except OSError:
        return None
    aligned = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)
    try:
        start = time.perf_counter()
        for piece in pieces(arrays):
            aligned[: piece.nbytes] = piece
            os.write(descriptor, aligned[: -(-piece.nbytes // _BLOCK_BYTES) * _BLOCK_BYTES].data)
        os.fsync(descriptor)
        return time.perf_counter() - start
    finally:
        os.close(descriptor)
        path.unlink()


def read_raw(path: Path) -> float:
    """Return the seconds that a plain read from the beginning to the end takes."""
    buffer = np.empty(PIECE_BYTES, np.uint8)
    buffer.fill(0)
    start = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer.data):
            pass
    return time.perf_counter() - start


def files_below(folder: Path) -> list[Path]:
    """Return every file below a folder."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def flush(folder: Path) -> None:
    """Make what was written below a folder survive a power cut, for those who did not."""
    for path in [*files_below(folder), *(p for p in folder.rglob("*") if p.is_dir()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def evict(folder: Path) -> None:
    """Take all files below a folder out of the page cache, and make sure that they are out.

    Raises:
        RuntimeError: the kernel kept some of their pages; a read would not be a cold one.
    """
    kept = total = 0
    for path in files_below(folder):
        size = path.stat().st_size
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            kept += _resident_pages(file.fileno(), size)
            total += -(-size // mmap.PAGESIZE)
    if kept > 0.01 * total:
        raise RuntimeError(f"{folder}: {kept} of {total} pages are still in the page cache.")


def _resident_pages(descriptor: int, size: int) -> int:
    if size == 0:
        return 0
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
        data = np.frombuffer(mapped, np.uint8)
        found = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        address, vector = ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(found.ctypes.data)
        if ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), vector):
            raise OSError(ctypes.get_errno(), "mincore")
        del data
    return int((found & 1).sum())


class PeakMemory:
    """Measure in a `with` block how far memory rises above what it was at the beginning.

    The kernel's high-water mark of this process, which misses nothing. With `forks`, the sum of
    this process and its children is sampled besides, shared pages counted once.
    """

    def __init__(self, *, forks: bool = False) -> None:
        self.extra_mib = 0.0
        self._forks = forks
        self._over = threading.Event()

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self._start = _status("VmRSS")
        if self._forks:
            self._start_shared = _proportional()
            self._thread = threading.Thread(target=self._sample)
            self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._over.set()
        if self._forks:
            self._thread.join()
        self.extra_mib = max(self.extra_mib, _status("VmHWM") - self._start)

    def _sample(self) -> None:
        while not self._over.wait(0.2):
            self.extra_mib = max(self.extra_mib, _proportional() - self._start_shared)


def _status(key: str) -> float:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(key)) / 1024


def _proportional() -> float:
    """Return the MiB of this process and its children, a page of two processes counted half."""
    total = 0
    children = Path("/proc/self/task").glob("*/children")
    for process in ["self", *(pid for path in children for pid in path.read_text().split())]:
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        total += sum(int(x.split()[1]) for x in text.splitlines() if x.startswith("Pss:"))
    return total / 1024
