"""Give memory back from a forked copy of a process, so that the other one need not copy it.

While two processes share a page, the first write to it copies it. Once the copy that saves has
written a page out, it can do without it, and training has it alone again.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterable

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_WORTH_IT_BYTES = 16 * mmap.PAGESIZE


class ForkedMemory:
    """Know which memory belongs to arrays that are saved once and not needed again.

    Args:
        arrays: all that will be saved. Those that overlap another are kept.
    """

    def __init__(self, arrays: Iterable[np.ndarray]) -> None:
        found = sorted(map(_bounds, arrays))
        self._owned: list[tuple[int, int]] = []
        end = 0
        for index, (start, stop) in enumerate(found):
            follower = found[index + 1][0] if index + 1 < len(found) else stop
            if end <= start and stop <= follower:
                self._owned.append((start, stop))
            end = max(end, stop)

    def give_back(self, piece: np.ndarray) -> int:
        """Drop the whole pages under a part of an array; its numbers are lost to this process.

        Memory of anything but the arrays is left alone.

        Returns:
            The number of bytes that were dropped.
        """
        start, stop = _bounds(piece)
        index = bisect.bisect(self._owned, (start, 2**64)) - 1
        if stop - start < _WORTH_IT_BYTES or index < 0 or stop > self._owned[index][1]:
            return 0
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = stop // mmap.PAGESIZE * mmap.PAGESIZE - first
        # It may be refused, for locked or huge pages; then they are copied when written to.
        failed = _LIBC.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED
        )
        return 0 if failed else num_bytes


def _bounds(array: np.ndarray) -> tuple[int, int]:
    # NumPy 2 has moved it.
    byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds
    start, stop = byte_bounds(array)
    return int(start), int(stop)
