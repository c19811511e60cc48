"""A file of lines that grows at its end, and whose oldest lines can be cut away."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rowstep.components.tracking.files import copy_bytes, open_private, write_all


class LineLog:
    """Append lines and read them again, by one process, from any of its threads.

    A line that a killed process left half written is cut off on opening. Offsets count the bytes
    of all lines ever written: where the oldest were cut away (`cut_head`), the first line of the
    file stands for them, and an offset noted before still means the same line.

    Args:
        path: created when missing, readable by its owner only; the caller sees to it that no other
            process has it open.
        base_of: tells how many bytes a first line stands for; None when it is a line like others.

    Raises:
        OSError: the disk refuses, or the path is a link.
    """

    def __init__(self, path: Path, base_of: Callable[[bytes], int | None]) -> None:
        self._path = path
        self._fresh = f"{path.name}.new-"
        self._guard = threading.Lock()
        for left in path.parent.glob(f"{self._fresh}*"):  # by a process killed during a cut
            left.unlink()
        self._descriptor = open_private(path, os.O_RDWR | os.O_APPEND)
        try:
            self.num_bytes = self._cut_torn_line()
            with open(path, "rb") as file:
                header = file.readline()
            base = base_of(header)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._header_bytes, self._base = (0, 0) if base is None else (len(header), base)
        self.is_open = True

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

    @property
    def base(self) -> int:
        """Return the offset of the oldest line that is still there."""
        return self._base

    @property
    def size(self) -> int:
        """Return the offset after the last line."""
        return self.num_bytes - self._header_bytes + self._base

    def append(self, line: bytes) -> None:
        """Write one line, which ends with a newline; a closed log takes nothing.

        Raises:
            OSError: the disk refuses; no half line is left behind.

        Cost: one unbuffered write.
        """
        with self._guard:
            if not self.is_open:
                return
            if os.write(self._descriptor, line) != len(line):
                os.ftruncate(self._descriptor, self.num_bytes)
                raise OSError(f"{self._path.parent}: the disk is full")
            self.num_bytes += len(line)

    def read(self, offset: int) -> Iterator[tuple[bytes, int]]:
        """Yield (line, offset of the next one) from `offset` on, up to what is the end now.

        Where the lines at `offset` were cut away, the line that stands for them comes first.
        """
        with ExitStack() as opened:
            with self._guard:  # the file and what is known of it, both before or after a cut
                file = opened.enter_context(open(self._path, "rb"))
                end, base = self.num_bytes, self._base
                shift = base - self._header_bytes
            place = file.seek(offset - shift if offset >= base else 0)
            while place < end:
                line = file.readline()
                if not line:
                    return
                place += len(line)
                yield line, place + shift

    def cut_head(self, header: bytes, offset: int) -> bool:
        """Put one line in the place of all that end at or before `offset`.

        A process that is killed in between leaves the file as it was or as it will be. Lines may
        be appended meanwhile.

        Args:
            header: the line, for which `base_of` tells `offset`.
            offset: of a line that is there.

        Returns:
            Whether it was done: False when the log is closed.

        Raises:
            OSError: the disk refuses; the file is as it was.
        """
        path = self._path.parent / f"{self._fresh}{uuid.uuid4().hex}"
        fresh = open_private(path, os.O_RDWR | os.O_APPEND | os.O_EXCL)
        try:
            write_all(fresh, header)
            place = offset - self._base + self._header_bytes
            # The bulk first, so that whoever appends waits for the last few lines only.
            place = copy_bytes(self._descriptor, place, self.num_bytes, fresh)
            os.fsync(fresh)
            with self._guard:
                if not self.is_open:
                    return False
                copy_bytes(self._descriptor, place, self.num_bytes, fresh)
                os.replace(path, self._path)
                self.num_bytes += len(header) - self._header_bytes - (offset - self._base)
                self._header_bytes, self._base = len(header), offset
                self._descriptor, fresh = fresh, self._descriptor
            return True
        finally:
            os.close(fresh)
            path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Make the lines survive a power cut."""
        with self._guard:
            if self.is_open:
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Take nothing any more."""
        with self._guard:
            if self.is_open:
                self.is_open = False
                os.close(self._descriptor)
