"""Hold checkpoints on an object store, where nothing can be renamed and a lock dies with nobody.

    <root>/lease-00000007.json                   who may write: see leases.py
    <root>/step-000000001234.7340033/            a checkpoint, written by attempt 7
        array-00000.npy ...                      first the arrays, under their final names
        MANIFEST.json                            last: with it the checkpoint exists
    <root>/step-000000001234.7340034/            the same step, moved aside because it is damaged
        SET_ASIDE.json                           its new name, and the manifest it had

- A folder exists if its manifest does. Arrays are streamed into the final folder; then their sizes
  (and checksums, where the store keeps them) are compared with what was sent; then the manifest is
  created, exclusively. Deleting takes the manifest first. So nobody sees half a checkpoint.
- Only the newest lease may write. `commit` looks before the manifest is put, and again after: a
  save is acknowledged only if every later writer knows of it.
- The revision in a folder's name holds the attempt, `attempt * 2**20 + serial`, and no name is
  used twice: two writers never meet in one folder, nor does a writer meet what it left half done.
- A folder of an attempt below the newest lease's that this lease does not inherit is the late
  commit of a replaced writer. It does not count, for readers without a lock neither. A folder
  without an attempt in its name was copied here by hand, and counts.
- Whether an object is there is asked for by its name. Listings, which a store or a cache may serve
  late, only add names to those that the newest lease knows.
- An answer may get lost. Then the object is read back, and its bytes say who wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from rowstep.components.checkpoints.array_files import CheckpointError
from rowstep.components.checkpoints.leases import LEASE_SECONDS, Lease, Leases, Record
from rowstep.components.checkpoints.object_draft import MANIFEST, ObjectDraft
from rowstep.components.checkpoints.objects import Entry, Objects

_SET_ASIDE = "SET_ASIDE.json"
_REVISIONS_PER_ATTEMPT = 2**20
_FOLDER = re.compile(r"step-\d{12,}(?:\.(\d+))?")


class ObjectStore:
    """Hold checkpoint folders below a URL, as `Medium` describes.

    Args:
        url: `gs://bucket/path`, `s3://bucket/path`, or what else fsspec has a package for.
        storage_options: passed to the fsspec file system: credentials, endpoints.
        lease_seconds: after this time without a sign of life a writer may be replaced.

    Raises:
        CheckpointError: fsspec does not know the protocol, its package is not installed, or it
            refuses the options.
    """

    is_local = False

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.objects = Objects(url, storage_options)
        self.where = self.objects.where
        self.leases = Leases(self.objects, lease_seconds)
        self._lease: Lease | None = None
        self._serial = 0
        self._drafts: set[str] = set()
        self._aside: dict[str, str] = {}

    def probe(self) -> None:
        """Raise OSError unless objects can be written and deleted here. Buckets are not made."""
        self.objects.probe()

    @contextmanager
    def lock(self, wait_seconds: float) -> Iterator[None]:
        """Be the only writer for the length of a `with` block.

        A live writer on another machine is known by its next sign of life: refusing may take a
        quarter of `lease_seconds`, and finding out that it is dead takes all of them, whatever
        `wait_seconds` says.

        Raises:
            LockHeldError: another writer is alive.
            OSError: the store refuses.
        """
        lease = self.leases.acquire(wait_seconds, self._highest_attempt, self.committed)
        try:
            self._lease, self._serial = lease, 0
            yield
        finally:
            self._lease = None
            lease.release()

    def committed(self) -> list[str]:
        """Return the names of committed folders, late commits of replaced writers left out.

        Cost: one listing, the newest lease, and one question for each folder.
        """
        return self._committed(self.objects.listing())

    def others(self) -> list[str]:
        """Return the names of the other folders, but for those that are being written here.

        They are what dead and replaced writers left, under their own names, and what was set
        aside, under its new name. A folder without an attempt in its name may still be on its way
        from somewhere else, so only one that was set aside is among them.
        """
        listed = self.objects.listing()
        gone = {*self._committed(listed), *self._drafts}
        folders = [name for name in sorted(listed) if _FOLDER.fullmatch(name) and name not in gone]
        names = {folder: self._name_aside(folder) for folder in folders}
        return [name for folder, name in names.items() if name != folder or _attempt(folder)]

    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a folder."""
        return sorted(self.objects.listing(self._real(folder)))

    def open(self, folder: str, file: str) -> BinaryIO:
        """Open a file for reading."""
        return self.objects.open(f"{self._real(folder)}/{file}")

    def size(self, folder: str, file: str) -> int:
        """Return the length of a file in bytes."""
        return self.objects.size(f"{self._real(folder)}/{file}")

    def next_revision(self, taken: Sequence[int]) -> int:
        """Return a revision that is larger than all `taken` and was never returned before."""
        lease = self._held()
        self._serial += 1
        first = lease.number * _REVISIONS_PER_ATTEMPT
        revision = max(first + self._serial, max(taken, default=0) + 1)
        if revision >= first + _REVISIONS_PER_ATTEMPT:
            lease.check()
            raise CheckpointError(
                f"{self.where}: a run may save a million times. Got save {self._serial} of "
                f"attempt {lease.number}. Resume: the next attempt counts anew. Save less often."
            )
        return revision

    def begin(self, name: str) -> ObjectDraft:
        """Start the folder that will be called `name`, after one from `next_revision`."""
        lease = self._held()
        lease.check()
        if _attempt(name) != lease.number:
            raise CheckpointError(
                f"{self.where}: a folder must be named after the attempt that writes it. Got "
                f"{name!r} in attempt {lease.number}. Ask next_revision for its number."
            )
        return ObjectDraft(self.objects, lease, name, self._drafts)

    def set_aside(self, folder: str, name: str) -> None:
        """Take a committed folder out of sight, under a new name; its bytes stay where they are."""
        self._held().check()
        with suppress(FileNotFoundError):
            manifest = self.objects.read(f"{folder}/{MANIFEST}").decode(errors="replace")
            marker = json.dumps({"name": name, "manifest": manifest})
            self.objects.put(f"{folder}/{_SET_ASIDE}", marker.encode())
            self.objects.remove(f"{folder}/{MANIFEST}")
            self._aside[name] = folder

    def delete(self, folder: str) -> None:
        """Delete a folder, its manifest first."""
        lease = self._held()
        lease.check()
        real = self._real(folder)
        self.objects.remove(f"{real}/{MANIFEST}")
        lease.note(real, is_committed=False)
        for file in self.objects.listing(real):
            self.objects.remove(f"{real}/{file}")

    def _committed(self, listed: Mapping[str, Entry]) -> list[str]:
        # The lease is read after the listing: a folder that is listed cannot be of a later attempt.
        settled = self.leases.settled(listed)
        names = {name for name in listed if _FOLDER.fullmatch(name)}
        if settled is not None:
            names |= (settled.inherits or frozenset()) | settled.saved
        return [name for name in sorted(names) if _counts(name, settled) and self._exists(name)]

    def _exists(self, folder: str) -> bool:
        return self.objects.entry(f"{folder}/{MANIFEST}") is not None

    def _highest_attempt(self) -> int:
        return max(map(_attempt, self.objects.listing()), default=0)

    def _held(self) -> Lease:
        if self._lease is None:
            raise CheckpointError(
                f"{self.where}: the writer must hold the lock. Got a change without it. "
                "Change checkpoints inside 'with store.lock():'."
            )
        return self._lease

    def _real(self, folder: str) -> str:
        if folder not in self._aside and not _FOLDER.fullmatch(folder):
            self.others()
        return self._aside.get(folder, folder)

    def _name_aside(self, folder: str) -> str:
        try:
            name = str(json.loads(self.objects.read(f"{folder}/{_SET_ASIDE}"))["name"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return folder
        self._aside[name] = folder
        return name


def _attempt(folder: str) -> int:
    """Return the attempt that wrote a folder, 0 where its name does not say."""
    match = _FOLDER.fullmatch(folder)
    return int(match[1] or 0) // _REVISIONS_PER_ATTEMPT if match else 0


def _counts(folder: str, settled: Record | None) -> bool:
    attempt = _attempt(folder)
    if settled is None or attempt == 0 or attempt >= settled.number:
        return True
    return folder in (settled.inherits or ())
