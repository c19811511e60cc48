"""Write, verify and open one checkpoint folder: a hashed manifest over the files of its arrays.

The format is described in `manifest.py`, and in FORMAT.md for people who read it without rowstep.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rowstep import __version__
from rowstep.components.checkpoints import messages
from rowstep.components.checkpoints.array_files import (
    ArrayRecord,
    CheckpointError,
    DamageError,
    ReadError,
    as_storable,
    check_file,
    dtype_of,
    read_array,
    read_into,
    read_pieces,
    type_name,
    write_array,
)
from rowstep.components.checkpoints.manifest import MANIFEST, Manifest
from rowstep.components.checkpoints.medium import Draft, Medium
from rowstep.components.checkpoints.retention import parse_folder

_NUM_READERS = 2
_WORTH_A_THREAD_BYTES = 2**23
Groups = Mapping[str, Iterable[tuple[str, np.ndarray]]]


@dataclass(frozen=True)
class SavedState:
    """Give access to one verified checkpoint; arrays are read when asked for, one at a time.

    Args:
        medium: the disk or the object store.
        folder: the name of the checkpoint's folder there.
        manifest: what it holds.
    """

    medium: Medium
    folder: str
    manifest: Manifest

    @property
    def where(self) -> str:
        """Return the path or URL of the checkpoint."""
        return f"{self.medium.where}/{self.folder}"

    @property
    def path(self) -> Path | None:
        """Return the folder, or None on an object store."""
        return Path(self.where) if self.medium.is_local else None

    @property
    def step(self) -> int:
        """Return the training step it was saved at."""
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        """Return what the saver put beside the arrays."""
        return self.manifest.meta

    @property
    def metrics(self) -> dict[str, float]:
        """Return what was measured at this step."""
        return self.manifest.metrics

    @property
    def training_seconds(self) -> float:
        """Return the time spent training up to this step, in all attempts together."""
        return self.manifest.training_seconds

    @property
    def groups(self) -> tuple[str, ...]:
        """Return the names of the saved groups, empty ones among them."""
        return self.manifest.groups

    @property
    def records(self) -> tuple[ArrayRecord, ...]:
        """Return one record for each array, in saved order."""
        return self.manifest.records

    @property
    def num_bytes(self) -> int:
        """Return the length of all files, without the manifest."""
        return self.manifest.num_bytes

    def names(self, group: str) -> list[str]:
        """Return the names of a group's arrays in saved order.

        Raises:
            CheckpointError: the group was not saved.
        """
        return [record.name for record in self._of(group)]

    def arrays(self, group: str) -> Iterator[tuple[str, np.ndarray]]:
        """Stream a group's arrays in saved order, each checked again while it is read.

        Raises:
            CheckpointError: the group was not saved, or the files changed since they were verified.

        Cost: memory for one array at a time.
        """
        sources = self.sources(group)
        return ((name, source.read()) for name, source in sources.items())

    def sources(self, group: str) -> dict[str, SavedArray]:
        """Return a group's arrays by name, in saved order, without reading them.

        Raises:
            CheckpointError: the group was not saved.
        """
        return {record.name: SavedArray(self, record) for record in self._of(group)}

    def _of(self, group: str) -> list[ArrayRecord]:
        if group not in self.groups:
            raise CheckpointError(
                f"{self.where}: the group must have been saved. Got {group!r}. "
                f"Saved: {', '.join(self.groups) or 'none'}. Ask for one of them."
            )
        return [record for record in self.records if record.group == group]


@dataclass(frozen=True)
class SavedArray:
    """Give access to one saved array, as a whole or in pieces."""

    state: SavedState
    record: ArrayRecord

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array."""
        return self.record.shape

    @property
    def dtype(self) -> np.dtype:
        """Return the type of the array, bfloat16 and float8 included."""
        return dtype_of(self.record.dtype)

    def read(self) -> np.ndarray:
        """Return the whole array; its bytes are checked again.

        Raises:
            CheckpointError: the bytes changed since they were verified.

        Cost: memory for the array.
        """
        with self._unchanged():
            return read_array(self.state.medium, self.state.folder, self.record)

    def read_into(self, out: np.ndarray) -> None:
        """Fill a C-contiguous array of this shape and type; the bytes are checked again.

        Raises:
            CheckpointError: the bytes changed since they were verified; known after the last one.

        Cost: no memory.
        """
        with self._unchanged():
            read_into(self.state.medium, self.state.folder, self.record, out)

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, rows) in order; use the rows before asking for the next ones.

        An array without axes is yielded as one row of shape [1].

        Raises:
            CheckpointError: the bytes changed since they were verified; known after the last piece.

        Cost: memory for one piece of 4 MiB, or of one row where a row is longer.
        """
        pieces = read_pieces(self.state.medium, self.state.folder, self.record)
        while True:
            with self._unchanged():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        try:
            yield
        except (DamageError, OSError) as error:
            raise CheckpointError(
                f"{self.state.where}: files must not change after they were verified. "
                f"Got {error}. Ask the store for its latest checkpoint again."
            ) from error


def write_state(
    draft: Draft,
    groups: Groups,
    manifest: Manifest,
    on_written: Callable[[np.ndarray], object] | None = None,
) -> None:
    """Write all arrays into an empty folder, and the manifest last.

    Args:
        draft: the folder.
        groups: group name to (name, array) pairs, taken one at a time.
        manifest: what else to say; its groups, records, date and writer are filled in here.
        on_written: as `write_array` takes it.

    Raises:
        CheckpointError: two arrays of a group share a name, or one cannot be stored.
        OSError: the disk refuses.
    """
    records: list[ArrayRecord] = []
    for group, pairs in groups.items():
        names: set[str] = set()
        for name, value in pairs:
            if name in names:
                raise CheckpointError(
                    f"save: names must be distinct within a group. Got {name!r} twice in "
                    f"{group!r}. Rename one of them."
                )
            array = as_storable(value, f"save: array {group}/{name}")
            # Numbered by us, since the names of variables may hold anything.
            file_name = f"array-{len(records):05d}.npy"
            with draft.create(file_name) as file:
                written = write_array(file, array, on_written)
            dtype = type_name(value.dtype)
            records.append(
                ArrayRecord(group, len(names), name, array.shape, dtype, file_name, *written)
            )
            names.add(name)
    complete = replace(
        manifest,
        groups=tuple(groups),
        records=tuple(records),
        saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        writer={"pid": os.getpid(), "host": socket.gethostname(), "rowstep": __version__},
    )
    with draft.create(MANIFEST) as file:
        file.write(complete.to_bytes())


def read_manifest(medium: Medium, folder: str) -> Manifest:
    """Return the manifest of a checkpoint without looking at its arrays.

    Raises:
        DamageError: it is missing, or is not what was saved.
        CheckpointError: a newer rowstep wrote it, or this user may not read it.
    """
    with _judged(f"{medium.where}/{folder}"):
        medium.size(folder, MANIFEST)
        with medium.open(folder, MANIFEST) as file:
            data = file.read()
    manifest = Manifest.from_bytes(data, f"{medium.where}/{folder}")
    named = parse_folder(folder)
    if named is not None and named[0] != manifest.step:
        raise DamageError(f"{MANIFEST}: it is of step {manifest.step}")
    return manifest


def open_verified(medium: Medium, folder: str) -> SavedState:
    """Return the checkpoint in a folder after reading every byte of it.

    Raises:
        DamageError: the bytes are not what was saved, or some are missing.
        CheckpointError: a newer rowstep wrote it, or this user may not read it.

    Cost: one read of all files, two pieces of 2 MiB in memory.
    """
    manifest = read_manifest(medium, folder)
    check = partial(check_file, medium, folder)
    with _judged(f"{medium.where}/{folder}"):
        if manifest.num_bytes < _WORTH_A_THREAD_BYTES:
            for record in manifest.records:
                check(record)
        else:  # two files at a time: the disk reads one while the other is summed up
            with ThreadPoolExecutor(_NUM_READERS) as readers:
                list(readers.map(check, manifest.records))
    return SavedState(medium, folder, manifest)


@contextmanager
def _judged(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # A lost file or a bad sector is damage. Missing permissions are for a human to lift.
        if error.errno == errno.EIO:
            raise ReadError(str(error)) from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise DamageError(str(error)) from error
        raise messages.unreadable(where, error) from error
