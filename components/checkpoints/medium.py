"""What a store asks of the place that holds its folders: a local disk or an object store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol


class Draft(Protocol):
    """A checkpoint folder that is being written; readers do not see it before the commit."""

    name: str
    """The name of the folder once it is committed."""

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file for writing; when the `with` block ends, its bytes are durable.

        The manifest is created last. Raises FileExistsError for a name that was created before.
        """

    def commit(self) -> None:
        """Make the folder a committed one, all at once.

        Raises:
            CheckpointError: another writer took over; nothing was committed.
            OSError: the place refuses.
        """

    def abandon(self) -> None:
        """Remove what was written; never raises, since it runs while an error is on its way."""


class Medium(Protocol):
    """Hold folders of files below one root. Names have no slashes."""

    where: str
    """The root, for messages."""
    is_local: bool

    def probe(self) -> None:
        """Make the root if it is missing, and raise OSError unless it can be written."""

    def lock(self, wait_seconds: float) -> AbstractContextManager[None]:
        """Be the only writer for the length of a `with` block.

        Raises:
            LockHeldError: another writer is alive.
        """

    def committed(self) -> list[str]:
        """Return the names of committed folders, those of a writer that was replaced left out."""

    def others(self) -> list[str]:
        """Return the names of all other folders: `corrupt-*`, `.tmp-*`, uncommitted ones."""

    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a folder."""

    def open(self, folder: str, file: str) -> BinaryIO:
        """Open a file for reading; its `readinto` fills the buffer unless the file ends."""

    def size(self, folder: str, file: str) -> int:
        """Return the length of a file in bytes. Raises FileNotFoundError where there is none."""

    def next_revision(self, taken: Sequence[int]) -> int:
        """Return a revision for a step whose folders have the revisions `taken`.

        It is larger than all of them, and than any that a replaced writer may still choose.
        """

    def begin(self, name: str) -> Draft:
        """Start the folder that will be called `name`."""

    def set_aside(self, folder: str, name: str) -> None:
        """Take a committed folder out of sight, under a new name."""

    def delete(self, folder: str) -> None:
        """Delete a folder; it stops being a committed one before its first file goes."""
