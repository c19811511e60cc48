"""Write, verify and open one checkpoint folder: a hashed manifest over the files of its arrays."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rowstep.components.checkpoints.array_files import (
    FILE_NAME,
    ArrayRecord,
    CheckpointError,
    DamageError,
    check_file,
    dtype_of,
    flush_folder,
    flush_to_disk,
    read_array,
    read_pieces,
    write_array,
)

FORMAT = 1
MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class SavedState:
    """Give access to one verified checkpoint; arrays are read when asked for, one at a time.

    Args:
        path: the folder of the checkpoint.
        step: the training step it was saved at.
        meta: what the saver put beside the arrays.
        groups: names of the saved groups, empty ones among them.
        records: one record per array, in saved order.
    """

    path: Path
    step: int
    meta: dict[str, Any]
    groups: tuple[str, ...]
    records: tuple[ArrayRecord, ...]

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
        return self._read(self._of(group))

    def sources(self, group: str) -> dict[str, SavedArray]:
        """Return a group's arrays by name, in saved order, without reading them.

        Raises:
            CheckpointError: the group was not saved.
        """
        return {record.name: SavedArray(self, record) for record in self._of(group)}

    def _read(self, records: list[ArrayRecord]) -> Iterator[tuple[str, np.ndarray]]:
        for record in records:
            try:
                array = read_array(self.path, record)
            except (DamageError, OSError) as error:
                raise CheckpointError(
                    f"{self.path}: files must not change after they were verified. Got {error}. "
                    "Ask the store for its latest checkpoint again."
                ) from error
            yield record.name, array

    def _of(self, group: str) -> list[ArrayRecord]:
        if group not in self.groups:
            raise CheckpointError(
                f"{self.path}: the group must have been saved. Got {group!r}. "
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
        """Return the whole array; its bytes are checked again. Cost: memory for the array."""
        return read_array(self.state.path, self.record)

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, rows) in order; use the rows before asking for the next ones.

        An array without axes is yielded as one row of shape [1].

        Raises:
            CheckpointError: the bytes changed since they were verified.

        Cost: memory for one piece of 16 MiB, or of one row where a row is longer.
        """
        return read_pieces(self.state.path, self.record)


def write_state(
    folder: Path,
    step: int,
    groups: Mapping[str, Iterable[tuple[str, np.ndarray]]],
    meta: Mapping[str, Any],
) -> None:
    """Write all arrays into an empty folder, and the manifest last.

    Raises:
        CheckpointError: two arrays of a group share a name, or one cannot be stored.
        OSError: the disk refuses.
    """
    records: list[ArrayRecord] = []
    seen: set[tuple[str, str]] = set()
    for group, pairs in groups.items():
        for name, value in pairs:
            if (group, name) in seen:
                raise CheckpointError(
                    f"save: names must be distinct within a group. Got {name!r} twice in "
                    f"{group!r}. Rename one of them."
                )
            seen.add((group, name))
            records.append(write_array(folder, len(records), group, name, value))
    document = {
        "format": FORMAT,
        "kind": "full",
        "step": step,
        "groups": list(groups),
        "meta": dict(meta),
        "arrays": [asdict(record) for record in records],
    }
    text = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
    with open(folder / MANIFEST, "xb") as file:
        file.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        flush_to_disk(file)
    flush_folder(folder)


def open_verified(folder: Path) -> SavedState:
    """Return the checkpoint in a folder after reading every byte of it.

    Raises:
        DamageError: the bytes are not what was saved, or some are missing.
        CheckpointError: a newer rowstep wrote it, or this user may not read it.

    Cost: one read of all files, 16 MiB of memory.
    """
    try:
        state = _read_manifest(folder)
        for record in state.records:
            check_file(folder, record)
    except OSError as error:
        # A lost file or a bad sector is damage. Missing permissions are for a human to lift.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
            raise DamageError(str(error)) from error
        raise CheckpointError(
            f"{folder}: the checkpoint must be readable. Got {error}. "
            "Give this user the right to read it."
        ) from error
    return state


def _read_manifest(folder: Path) -> SavedState:
    digest, _, text = (folder / MANIFEST).read_bytes().partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise DamageError(f"{MANIFEST}: its hash does not match its text")
    try:
        body = json.loads(text)
        if body["format"] == FORMAT and body["kind"] == "full":
            records = tuple(_record_from(fields) for fields in body["arrays"])
            return SavedState(folder, body["step"], body["meta"], tuple(body["groups"]), records)
        got = f"format {body['format']!r}, kind {body['kind']!r}"
    except (ValueError, KeyError, TypeError) as error:
        raise DamageError(f"{MANIFEST}: it is no manifest of a checkpoint ({error!r})") from error
    raise CheckpointError(
        f"{folder}: the checkpoint must have format {FORMAT}, kind 'full'. Got {got}. "
        "A newer rowstep wrote it: update rowstep, or use another checkpoint folder."
    )


def _record_from(fields: dict[str, Any]) -> ArrayRecord:
    record = ArrayRecord(**{**fields, "shape": tuple(fields["shape"])})
    if not FILE_NAME.fullmatch(record.file):
        raise ValueError(f"a file outside of the checkpoint: {record.file!r}")
    return record
