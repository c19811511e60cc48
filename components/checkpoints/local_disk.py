"""Hold checkpoint folders on a local disk: renames commit them, a file lock keeps writers apart.

<root>/LOCK                one writer at a time
<root>/step-000000001234/  committed: it got this name after its last byte was on the disk
<root>/corrupt-.../        moved aside because its bytes are not what was written
<root>/.tmp-.../           unfinished or condemned; removed by the next owner of the lock
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from rowstep.components.checkpoints.array_files import CheckpointError, flush_folder
from rowstep.components.locks import HeldLock, exclusive_lock

_UNFINISHED = ".tmp-"
_CONDEMNED = ".tmp-delete-"
_GIVEN_BYTES = 16 * 2**20


class LocalDisk:
    """Implement `medium.Medium` with folders and files.

    Args:
        root: the folder that holds all others; made by `probe`.
    """

    is_local = True

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.where = str(self.root)
        self._lock: HeldLock | None = None
        self._serial = itertools.count()

    def probe(self) -> None:
        """Make the root if it is missing, and raise OSError unless it can be written."""
        self.root.mkdir(parents=True, exist_ok=True)
        folder = self.temporary("probe")
        folder.mkdir()
        with suppress(FileNotFoundError):  # an owner of the lock may clear it away meanwhile
            (folder / "probe").write_bytes(b"rowstep")
        shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def lock(self, wait_seconds: float) -> Iterator[None]:
        """Be the only writer for the length of a `with` block; see `locks.exclusive_lock`."""
        with exclusive_lock(self.root / "LOCK", wait_seconds) as held:
            self._lock = held
            try:
                yield
            finally:
                self._lock = None

    def committed(self) -> list[str]:
        """Return the names of committed folders."""
        return self._folders("step-")

    def others(self) -> list[str]:
        """Return the names of damaged and of unfinished folders; foreign ones are left out."""
        return self._folders("corrupt-") + self._folders(_UNFINISHED)

    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a folder."""
        return sorted(os.listdir(self.root / folder))

    def open(self, folder: str, file: str) -> BinaryIO:
        """Open a file for reading from its beginning to its end."""
        opened = _SequentialFile(self.root / folder / file)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return cast(BinaryIO, opened)

    def size(self, folder: str, file: str) -> int:
        """Return the length of a file in bytes. Raises FileNotFoundError where there is none."""
        found = os.stat(self.root / folder / file)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
            raise FileNotFoundError(errno.ENOENT, "no regular file", file)
        return found.st_size

    def next_revision(self, taken: Sequence[int]) -> int:
        """Return the revision after those that are taken."""
        return max(taken, default=-1) + 1

    def begin(self, name: str) -> LocalDraft:
        """Start the folder that will be called `name`."""
        return LocalDraft(self, name)

    def set_aside(self, folder: str, name: str) -> None:
        """Rename a committed folder."""
        self.check_owner()
        os.rename(self.root / folder, self.root / name)

    def delete(self, folder: str) -> None:
        """Delete a folder; one rename takes it out of sight, so a reader never meets half of it."""
        self.check_owner()
        path = self.root / folder
        if not folder.startswith(_CONDEMNED):
            # An unfinished folder is renamed too: a writer that lost its lock and does not know
            # yet cannot commit it any more, half deleted.
            condemned = self.temporary("delete")
            os.rename(path, condemned)
            path = condemned
        shutil.rmtree(path, ignore_errors=True)

    def temporary(self, purpose: str) -> Path:
        """Return a name below the root that nothing has yet."""
        unique = f"{os.getpid()}-{time.time_ns()}-{next(self._serial)}"
        return self.root / f"{_UNFINISHED}{purpose}-{unique}"

    def check_owner(self) -> None:
        """Raise CheckpointError unless the lock is held and its file is the one that was locked."""
        if self._lock is None or not self._lock.is_in_place():
            raise self.lost()

    def lost(self) -> CheckpointError:
        """Return the error that says that another writer may have taken over."""
        return CheckpointError(
            f"{self.root / 'LOCK'}: the lock file must stay the one that this run has locked. "
            "Got another one or none, so a second run may write here. Nothing was committed. "
            "Stop one of the two runs, and never delete LOCK while a run is alive."
        )

    def _folders(self, prefix: str) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                return [e.name for e in entries if e.name.startswith(prefix) and e.is_dir()]
        except FileNotFoundError:
            return []


class LocalDraft:
    """Implement `medium.Draft` with a hidden folder that one rename makes a committed one."""

    def __init__(self, disk: LocalDisk, name: str) -> None:
        self.name = name
        self._disk = disk
        self._folder = disk.temporary(f"save-{name}")
        self._folder.mkdir()

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """Open a new file for writing; when the `with` block ends, its bytes are on the disk."""
        with self._while_it_is_ours():
            opened = _WrittenFile(self._folder / file, "x")
        with opened:
            yield cast(BinaryIO, opened)
            os.fsync(opened.fileno())

    def commit(self) -> None:
        """Give the folder its name, and make the name survive a power cut."""
        with self._while_it_is_ours():
            flush_folder(self._folder)
            self._disk.check_owner()
            os.rename(self._folder, self._disk.root / self.name)
        flush_folder(self._disk.root)

    def abandon(self) -> None:
        """Remove what was written, as far as the disk lets us."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _while_it_is_ours(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            # The next owner of the lock has cleared the folder away.
            raise self._disk.lost() from error


class _WrittenFile(io.FileIO):
    """A file that goes to the disk while it is written."""

    _given = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):  # the kernel may take less than it was given
            written += super().write(view[written:]) or 0
        # The kernel starts to write what it was told is not needed again. Otherwise it gathers
        # the whole file in memory, and the final flush waits for all of it.
        end = self.tell()
        if end - self._given >= _GIVEN_BYTES:
            os.posix_fadvise(self.fileno(), self._given, end - self._given, os.POSIX_FADV_DONTNEED)
            self._given = end
        return written


class _SequentialFile(io.FileIO):
    """A file whose `readinto` fills the buffer unless the file ends."""

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        num_read = 0
        while num_read < len(view):  # the kernel may give less than it was asked for
            count = super().readinto(view[num_read:])
            if not count:
                break
            num_read += count
        return num_read
