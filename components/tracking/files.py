"""The bytes of reported files, beside the journal until they are sent and its space is needed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Container
from pathlib import Path

_FILES, _REJECTED_FILES = "files", "rejected-files"


class FileShelf:
    """Keep files under names of their own; the journal says what each of them is.

    Args:
        folder: the folder of the journal.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._rejected = folder / _FILES, folder / _REJECTED_FILES
        self._sizes = {path.name: path.stat().st_size for path in _files_in(self._folder)}
        self._sent: set[str] = set()
        self.num_rejected_bytes = sum(path.stat().st_size for path in _files_in(self._rejected))

    @property
    def num_bytes(self) -> int:
        """Return how much of the disk the files take."""
        return sum(list(self._sizes.values())) + self.num_rejected_bytes

    @property
    def num_sent_bytes(self) -> int:
        """Return how much of that is only kept in case the run must be made again."""
        return sum(self._sizes.get(name, 0) for name in self._sent)

    def path(self, name: str) -> Path:
        """Return where a file is, or would be; the name is one that `write` gave."""
        return self._folder / Path(name).name

    def write(self, data: bytes) -> str:
        """Write a file and return its name.

        Raises:
            OSError: the disk refuses; nothing is left behind.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        name = uuid.uuid4().hex
        try:
            with open(open_private(self.path(name), os.O_WRONLY | os.O_EXCL), "wb") as file:
                file.write(data)
        except OSError:
            self.path(name).unlink(missing_ok=True)
            raise
        self._sizes[name] = len(data)
        return name

    def mark_sent(self, name: str) -> None:
        """Note that MLflow has the file."""
        self._sent.add(name)

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone is no trouble."""
        self.path(name).unlink(missing_ok=True)
        self._sizes.pop(name, None)
        self._sent.discard(name)

    def remove_all_but(self, names: Container[object]) -> None:
        """Delete what no report names: a process was killed between the file and its report."""
        for name in [name for name in self._sizes if name not in names]:
            self.remove(name)

    def put_aside(self, name: str) -> None:
        """Move a file to those that MLflow refused."""
        if name not in self._sizes:
            return
        self._rejected.mkdir(mode=0o700, exist_ok=True)
        size = self._sizes.pop(name)
        try:
            os.replace(self.path(name), self._rejected / Path(name).name)
        except FileNotFoundError:  # that may be why it was refused
            return
        self.num_rejected_bytes += size


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 when there is none."""
    return path.stat().st_size if path.is_file() else 0


def open_private(path: Path, flags: int) -> int:
    """Open a file that only its owner may read, and never through a link."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def copy_bytes(source: int, start: int, end: int, target: int) -> int:
    """Append the bytes [start, end) of one open file to another; return where it stopped.

    Raises:
        OSError: the disk refuses.
    """
    while start < end:
        chunk = os.pread(source, min(end - start, 2**20), start)
        if not chunk:
            raise OSError("the journal is shorter than it was")
        write_all(target, chunk)
        start += len(chunk)
    return start


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the bytes, however many calls that takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
