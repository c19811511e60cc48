"""Read the rows of one delimited text file, and trust no line of it."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from rowstep.components.data_errors import DataError, cut, nearest

__all__ = ["Row", "read_rows"]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,19}", re.ASCII)
_INT64_LIMIT = 2**63

Row = tuple[str, ...]


def read_rows(path: Path, delimiter: str, wanted: Row) -> Iterator[Row]:
    """Yield the wanted fields of each row, validated; rating and time in their plain form.

    Args:
        path: A UTF-8 file that begins with a header line.
        delimiter: The character between two fields.
        wanted: Names of columns: user, item, any others, rating, time.

    Raises:
        DataError: The header lacks a column, or a line is malformed; file and line are named.
    """
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


def _undecodable(path: Path, error: UnicodeDecodeError) -> str:
    got = bytes(error.object[error.start : error.end])
    return (
        f"{path}, line {_first_undecodable_line(path)}: it must be UTF-8 text. Got the bytes "
        f"{got!r}. Convert the file."
    )


def _first_undecodable_line(path: Path) -> int:
    # The text reader decodes ahead of the rows, so it does not know the line.
    number = 1
    with path.open("rb") as file:
        for data in file:
            try:
                data.decode()
            except UnicodeDecodeError:
                break
            number += 1
    return number
