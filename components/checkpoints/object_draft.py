"""Write one checkpoint folder to an object store; the protocol stands in object_store.py."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, cast

from rowstep.components.checkpoints.array_files import CheckpointError
from rowstep.components.checkpoints.leases import Lease
from rowstep.components.checkpoints.objects import Entry, Objects

MANIFEST = "MANIFEST.json"


class ObjectDraft:
    """Write one checkpoint folder, as `Draft` describes."""

    def __init__(self, objects: Objects, lease: Lease, name: str, drafts: set[str]) -> None:
        self.name = name
        self._objects, self._lease, self._drafts = objects, lease, drafts
        self._sent: dict[str, tuple[int, str] | None] = {}
        self._manifest: bytes | None = None
        drafts.add(name)

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """Open a new file; it is on the store after the `with` block, a manifest on the commit."""
        if file in self._sent:
            raise FileExistsError(f"{self.name}/{file} was written before")
        self._sent[file] = None
        if file == MANIFEST:
            text = io.BytesIO()
            yield text
            self._manifest = text.getvalue()
            return
        with self._objects.upload(f"{self.name}/{file}") as upload:
            yield cast(BinaryIO, upload)
        self._sent[file] = (upload.num_bytes, upload.crc32c)

    def commit(self) -> None:
        """Put the manifest, once all else has arrived and while no other writer took over.

        Raises:
            CheckpointError: another writer took over; nothing counts as committed.
            OSError: the store refuses, or holds other bytes than were sent.
        """
        if self._manifest is None:
            raise CheckpointError(
                f"{self.name}: the manifest must be written before the commit. Got none. "
                f"Create {MANIFEST} last."
            )
        self._check_what_arrived()
        self._lease.check()
        if not self._objects.create(f"{self.name}/{MANIFEST}", self._manifest):
            raise OSError(f"{self._objects.where}/{self.name}: somebody else put a manifest here")
        self._lease.note(self.name, is_committed=True)
        self._lease.check(self.name)
        self._drafts.discard(self.name)

    def abandon(self) -> None:
        """Remove what was written, the manifest first, unless another writer took over.

        Whoever took over may have found the manifest and inherited the folder, or clears it away.
        """
        self._drafts.discard(self.name)
        if self._lease.is_lost:
            return
        with suppress(OSError):
            self._objects.remove(f"{self.name}/{MANIFEST}")
            for file in self._sent:
                with suppress(OSError):
                    self._objects.remove(f"{self.name}/{file}")

    def _check_what_arrived(self) -> None:
        listed = self._objects.listing(self.name)
        for file, sent in self._sent.items():
            if file == MANIFEST:
                continue
            path = f"{self.name}/{file}"
            there = listed.get(file)
            # A listing may be old. Nothing is written twice, so what matches in it is right.
            if not _matches(there, sent) and not _matches(self._objects.entry(path), sent):
                raise OSError(
                    f"{self._objects.where}/{path}: the store holds other bytes than were sent "
                    f"({there}, sent {sent})"
                )


def _matches(there: Entry | None, sent: tuple[int, str] | None) -> bool:
    if there is None or sent is None:
        return False
    return there.num_bytes == sent[0] and there.crc32c in (None, sent[1])
