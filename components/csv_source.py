"""Read interactions from delimited text files, and trust no line of them.

The columns that the config names become `user_id`, `item_id`, `rating` and `timestamp`; extra
columns keep their names and their text. Ratings are written as floats ("4" becomes "4.0"), since
a reader that guesses types by looking must not guess differently in two splits.
"""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rowstep.components.data_errors import DataError, cut, nearest
from rowstep.components.part_files import Rows, sha256_of
from rowstep.components.splits import hash_split, time_split
from rowstep.configs.schema import CsvData

__all__ = ["CsvSource"]

BATCH_ROWS = 65_536
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,19}", re.ASCII)
_INT64_LIMIT = 2**63

Row = tuple[str, ...]


class CsvSource:
    """Turn CSV files into rows, with a split by hash or by time.

    A time split reads the files twice and holds one 64-bit timestamp a row; a hash split reads
    them once and holds one batch.
    """

    kind = "csv"

    def __init__(self, config: CsvData, batch_rows: int = BATCH_ROWS) -> None:
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
        self._files = _files(Path(config.path))
        self._stats = [_stat(path) for path in self._files]

    def identity(self) -> dict[str, object]:
        """Return what decides the rows: settings and bytes, not names or places of files."""
        settings = self._config.model_dump(mode="json", exclude={"path"})
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
        return None

    def _latest(self, eval_percent: int) -> NDArray[np.bool_]:
        timestamps = array("q")
        for columns in self._batches():
            timestamps.extend(map(int, columns[-1]))
        return time_split(np.frombuffer(timestamps, dtype=np.int64), eval_percent)

    def _batches(self) -> Iterator[tuple[Row, ...]]:
        for path in self._files:
            batch: list[Row] = []
            for row in _read(path, self._config.delimiter, self._wanted):
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


def _read(path: Path, delimiter: str, wanted: Row) -> Iterator[Row]:
    """Yield the wanted fields of each row, validated, the rating rewritten."""
    num_rows = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(reader, None)
            if header is None:
                raise DataError(f"{path}: it must begin with a header line. Got an empty file.")
            places = _places(path, header, wanted)
            check = _checker(path, wanted)
            for fields in reader:
                if not fields:
                    continue  # a blank line, as at the end of many files
                if len(fields) != len(header):
                    raise DataError(
                        f"{path}, line {reader.line_num}: a row must have {len(header)} fields, as "
                        f"the header has. Got {len(fields)}: {cut(delimiter.join(fields))}. "
                        "Quote fields that hold the delimiter, or correct the line."
                    )
                num_rows += 1
                yield check(reader.line_num, [fields[place] for place in places])
        except csv.Error as error:
            raise DataError(
                f"{path}, line {reader.line_num}: it must be well-formed CSV. Got: {error}. "
                "Correct the quotes of the line."
            ) from error
        except UnicodeDecodeError as error:
            raise DataError(_undecodable(path, error)) from error
    if num_rows == 0:
        raise DataError(f"{path}: it must hold at least one row. Got the header only. Remove it.")


def _checker(path: Path, wanted: Row) -> Callable[[int, list[str]], Row]:
    """Return a function that validates the wanted fields of one row, ids first, time last."""
    user, item, rating, time = wanted[0], wanted[1], wanted[-2], wanted[-1]

    def fail(line: int, column: str, rule: str, value: str) -> DataError:
        return DataError(
            f"{path}, line {line}: {column!r} must be {rule}. Got {cut(value)}. Correct the line."
        )

    def check(line: int, row: list[str]) -> Row:
        if not row[0].strip():
            raise fail(line, user, "an id, not empty", row[0])
        if not row[1].strip():
            raise fail(line, item, "an id, not empty", row[1])
        # The patterns refuse what Python reads and others do not: "1_0", "nan", other digits.
        if not _NUMBER.fullmatch(row[-2]) or not math.isfinite(float(row[-2])):
            raise fail(line, rating, "a finite number", row[-2])
        if not _INTEGER.fullmatch(row[-1]) or not -_INT64_LIMIT <= int(row[-1]) < _INT64_LIMIT:
            raise fail(line, time, "an integer, such as Unix seconds", row[-1])
        row[-2:] = [repr(float(row[-2])), str(int(row[-1]))]
        for column, value in zip(wanted, row, strict=True):
            if "\n" in value or "\r" in value:
                # Readers downstream take the files apart line by line.
                raise fail(line, column, "on one line, without a line break inside", value)
        return tuple(row)

    return check


def _places(path: Path, header: list[str], wanted: Row) -> list[int]:
    missing = [name for name in wanted if name not in header]
    if missing:
        hints = "; ".join(f"{name!r} is missing ({nearest(name, header)})" for name in missing)
        raise DataError(
            f"{path}, line 1: the header must name all columns of the config. Got: {hints}. "
            "Set user_column, item_column, rating_column, time_column, extra_columns or delimiter."
        )
    doubled = [name for name in wanted if header.count(name) > 1]
    if doubled:
        raise DataError(
            f"{path}, line 1: the header must name a column once. Got more than one "
            f"{doubled[0]!r}. Rename one of them."
        )
    return [header.index(name) for name in wanted]


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
    files = sorted(p for p in path.glob("*.csv") if p.is_file() and not p.name.startswith("."))
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


def _undecodable(path: Path, error: UnicodeDecodeError) -> str:
    number = 0
    with path.open("rb") as file:  # the text reader decodes ahead, so it does not know the line
        for number, data in enumerate(file, start=1):
            try:
                data.decode()
            except UnicodeDecodeError:
                break
    got = bytes(error.object[error.start : error.end])
    return f"{path}, line {number}: it must be UTF-8 text. Got the bytes {got!r}. Convert the file."
