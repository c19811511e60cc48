"""Write rows into CSV part files, and files onto the disk for good."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowstep.components.checkpoints.array_files import flush_folder

__all__ = ["ROWS_PER_PART", "SPLITS", "Rows", "sha256_of", "write_parts"]

ROWS_PER_PART = 1_000_000
SPLITS = ("train", "eval")
_READ_BYTES = 1 << 20


class Rows(NamedTuple):
    """Hold some rows as text, column by column, and which of them are held out."""

    columns: tuple[Sequence[str], ...]
    in_eval: NDArray[np.bool_]


class _Part:
    """Write one file, counting its rows and bytes and hashing it on the way."""

    def __init__(self, folder: Path, path: str, header: Sequence[str]) -> None:
        self._file = (folder / path).open("xb")
        self._sha256 = hashlib.sha256()
        self._path = path
        self._num_bytes = 0
        self.num_rows = -1  # the header is not a row
        self.write([header])

    def write(self, rows: Sequence[Sequence[str]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        data = text.getvalue().encode()
        self._file.write(data)
        self._sha256.update(data)
        self._num_bytes += len(data)
        self.num_rows += len(rows)

    def close(self) -> dict[str, Any]:
        """Flush the file to the disk and return its entry in the manifest."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {
            "path": self._path,
            "rows": self.num_rows,
            "bytes": self._num_bytes,
            "sha256": self._sha256.hexdigest(),
        }


class _Split:
    """Write the rows of one split, beginning a new part file whenever one is full."""

    def __init__(self, folder: Path, split: str, header: Sequence[str], rows_per_part: int) -> None:
        self._folder, self._split = folder, split
        self._header, self._rows_per_part = header, rows_per_part
        self._part: _Part | None = None
        self.entries: list[dict[str, Any]] = []
        (folder / split).mkdir()

    def write(self, rows: Iterator[tuple[str, ...]]) -> None:
        while ready := list(islice(rows, self._room())):
            if self._part is None:
                path = f"{self._split}/part-{len(self.entries):05d}.csv"
                self._part = _Part(self._folder, path, self._header)
            self._part.write(ready)
            if self._room() == 0:
                self.close()

    def close(self) -> None:
        if self._part is not None:
            part, self._part = self._part, None
            self.entries.append(part.close())
            flush_folder(self._folder / self._split)

    def _room(self) -> int:
        return self._rows_per_part - (0 if self._part is None else self._part.num_rows)


def write_parts(
    folder: Path,
    header: Sequence[str],
    batches: Iterable[Rows],
    rows_per_part: int = ROWS_PER_PART,
) -> list[dict[str, Any]]:
    """Write batches of rows into part files under `train/` and `eval/` of an empty folder.

    Returns:
        The manifest's entries of the files, in order of split and part. A split without rows
        has no files.

    Cost:
        One batch and its text in memory, whatever the number of rows.
    """
    train, held_out = (_Split(folder, split, header, rows_per_part) for split in SPLITS)
    try:
        for batch in batches:
            for split, mask in ((train, ~batch.in_eval), (held_out, batch.in_eval)):
                split.write(compress(zip(*batch.columns, strict=True), mask.tolist()))
    finally:
        train.close()
        held_out.close()
    return [*train.entries, *held_out.entries]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex, reading it piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
