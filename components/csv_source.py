"""Read interactions from delimited text files with a header line.

The columns that the config names become `user_id`, `item_id`, `rating` and `timestamp`; extra
columns keep their names and their text. Ratings are written as floats ("4" becomes "4.0"), since
a reader that guesses types by looking must not guess differently in two splits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rowstep.components.csv_rows import Row, read_rows
from rowstep.components.data_errors import DataError, nearest
from rowstep.components.part_files import Rows, sha256_of
from rowstep.components.partitions import csv_files
from rowstep.components.splits import hash_split, time_split
from rowstep.configs.schema import CsvData, CsvSpans

__all__ = ["CsvSource"]

BATCH_ROWS = 65_536


class CsvSource:
    """Turn CSV files into rows, with a split by hash or by time.

    A time split reads the files twice and holds one 64-bit timestamp a row; a hash split reads
    them once and holds one batch.

    Args:
        config: columns, split, and where the files are.
        batch_rows: rows in memory at a time.
        files: the files of a window of partitions, in order; those of `path` when left out.
    """

    def __init__(
        self,
        config: CsvData | CsvSpans,
        batch_rows: int = BATCH_ROWS,
        files: Sequence[Path] | None = None,
    ) -> None:
        self.kind = config.kind
        self._config = config
        self._batch_rows = batch_rows
        roles = {
            "user_column": config.user_column,
            "item_column": config.item_column,
            "rating_column": config.rating_column,
            "time_column": config.time_column,
        }
        extra = config.extra_columns
        _check_distinct([*roles.items(), *(("extra_columns", name) for name in extra)])
        if config.delimiter in '"\r\n':
            raise DataError(
                "data.delimiter: it must be a character that separates fields. Got "
                f"{config.delimiter!r}, which quotes fields or ends lines. Use ',', ';' or a tab."
            )
        self.columns = ("user_id", "item_id", *extra, "rating", "timestamp")
        self._wanted = (
            config.user_column,
            config.item_column,
            *extra,
            config.rating_column,
            config.time_column,
        )
        clash = {"user_id", "item_id", "rating", "timestamp"}.intersection(extra)
        if clash:
            raise DataError(
                "data.extra_columns: no name may be one that rowstep gives to the ids, the rating "
                f"or the time. Got {', '.join(map(repr, sorted(clash)))}. Rename it in the files."
            )
        self._files = _files(Path(config.path)) if files is None else list(files)
        self._stats = [_stat(path) for path in self._files]

    def identity(self) -> dict[str, object]:
        """Return what decides the rows: settings and bytes, not names or places of files."""
        # Nor the setting of a window: it decides which files, and the files are here.
        settings = self._config.model_dump(mode="json", exclude={"path", "window", "span"})
        return {"config": settings, "files": [sha256_of(path) for path in self._files]}

    def rows(self) -> Iterator[Rows]:
        """Yield the rows of all files in order."""
        split = self._config.split
        held_out = self._latest(split.eval_percent) if split.kind == "time" else None
        first = 0
        for columns in self._batches():
            if held_out is None:
                in_eval = hash_split(columns[0], columns[1], split.eval_percent)
            else:
                in_eval = held_out[first : first + len(columns[0])]
            first += len(columns[0])
            yield Rows(columns, in_eval)
        self._check_unchanged()

    def truth(self) -> None:
        """Return nothing: real data keeps its truth to itself."""
        return

    def _latest(self, eval_percent: int) -> NDArray[np.bool_]:
        timestamps = array("q")
        for columns in self._batches():
            timestamps.extend(map(int, columns[-1]))
        return time_split(np.frombuffer(timestamps, dtype=np.int64), eval_percent)

    def _batches(self) -> Iterator[tuple[Row, ...]]:
        for path in self._files:
            batch: list[Row] = []
            for row in read_rows(path, self._config.delimiter, self._wanted):
                batch.append(row)
                if len(batch) == self._batch_rows:
                    yield tuple(zip(*batch, strict=True))
                    batch = []
            if batch:
                yield tuple(zip(*batch, strict=True))

    def _check_unchanged(self) -> None:
        for path, before in zip(self._files, self._stats, strict=True):
            if _stat(path) != before:
                raise DataError(
                    f"{path}: it must not change while it is read. Got another size or time of "
                    "change. Run again when its writer is done."
                )


def _check_distinct(named: list[tuple[str, str]]) -> None:
    seen: dict[str, str] = {}
    for setting, column in named:
        if column in seen:
            raise DataError(
                f"data.{setting}: a column must have one role. Got {column!r}, which is also "
                f"data.{seen[column]}. Name another column."
            )
        seen[column] = setting


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"data.path: it must be a file or a folder. Got {str(path)!r}, which does not exist. "
            f"{nearest(path.name, sorted(siblings))}. Correct the path."
        )
    files = csv_files(path)
    if not files:
        found = sorted(p.name for p in path.iterdir())
        raise DataError(
            f"data.path: a folder must hold at least one *.csv file. Got {str(path)!r}. "
            f"{nearest('*.csv', found)}. Name the file itself if it ends otherwise."
        )
    return files


def _stat(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
