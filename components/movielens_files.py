"""The files of MovieLens 100K, each recognised by its size and MD5 before a row is believed.

Public copies have been seen with a header added, with rows added and with values changed, all of
which train without complaint. Two layouts are read: GroupLens' own (`u.data`, `u1.base`, ...),
and the one that the PyPI package recbole carries (`ml-100k.inter`, `.user`, `.item`). Folds that
are not there are made from the full data by the publisher's rule, and must then match the same
checksums as the published files.

The data may be used for research, and may not be redistributed: no row of it belongs here.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from rowstep.components.data_errors import DataError, cut, nearest

__all__ = ["KNOWN_FILES", "KnownFile", "read_fold", "read_known"]


class KnownFile(NamedTuple):
    """Describe a published file."""

    num_bytes: int
    md5: str
    num_rows: int


KNOWN_FILES = {
    "u.data": KnownFile(1_979_173, "6e47046882bad158b0efbb84cd5cb987", 100_000),
    "u.user": KnownFile(22_628, "1b53539edc13caad0282c8500608a319", 943),
    "u.item": KnownFile(236_344, "c9e7f390115d79079537301d5204f3f7", 1682),
    "u1.base": KnownFile(1_586_544, "4325f44281c9f8c119a3694662d63fc2", 80_000),
    "u1.test": KnownFile(392_629, "62d5d837e7c8e36550cc956b09c2ecc8", 20_000),
    "u2.base": KnownFile(1_583_948, "79541afecccbd5365bb2c09b123a01c7", 80_000),
    "u2.test": KnownFile(395_225, "1951a71b7e1f4ed254508007fa2f6b70", 20_000),
    "u3.base": KnownFile(1_582_546, "55c67a63f516fa9e593d68c3be779970", 80_000),
    "u3.test": KnownFile(396_627, "cb3e4d0a9152041772285232ca002d4f", 20_000),
    "u4.base": KnownFile(1_581_878, "66f64a75eeeffd20ff09533bcd31adcf", 80_000),
    "u4.test": KnownFile(397_295, "328acfca94e85d01b1d7e92c7d73df3b", 20_000),
    "u5.base": KnownFile(1_581_776, "0becb3392339231c08ba316944c79095", 80_000),
    "u5.test": KnownFile(397_397, "bec898f7091dba3b7bdf793d1998d2d6", 20_000),
    "ua.base": KnownFile(1_792_501, "346eb46a756be3b382bdef4f7dcf3a01", 90_570),
    "ua.test": KnownFile(186_672, "52e5d0355092dc1596899855b220508f", 9430),
    "ub.base": KnownFile(1_792_476, "e4ce94f6e01e45f65b91a70bb9e8da2f", 90_570),
    "ub.test": KnownFile(186_697, "5292d1e388d156aa0c19c384cdf35aca", 9430),
    "ml-100k.inter": KnownFile(1_979_230, "a8a8c3f165aedc53f63b5dc0a0463b14", 100_000),
    "ml-100k.user": KnownFile(22_697, "ac50ecbab626dbefa83288a3593f92ab", 943),
    "ml-100k.item": KnownFile(66_632, "fb748e97e64d9a35421d06d7083d0959", 1682),
}

_RATING = re.compile(rb"[1-9]\d{0,2}\t[1-9]\d{0,3}\t[1-5]\t\d{9}")
_ROW_PATTERNS = {
    ".user": re.compile(rb"\d+(\t[^\t]+){4}"),
    ".item": re.compile(rb"\d+(\t[^\t]+){3}"),
    "u.user": re.compile(rb"\d+(\|[^|]+){4}"),
    "u.item": re.compile(rb"\d+(\|[^|]*){4}(\|[01]){19}"),
}
_HOW_TO_GET = (
    "Get ml-100k.zip from grouplens.org, or 'pip download --no-deps recbole==1.2.1' and unzip "
    "recbole/dataset_example/ml-100k from it, and set data.path to that folder"
)


def read_known(folder: Path, name: str) -> bytes:
    """Return the bytes of a published file.

    Raises:
        DataError: The file is missing, or is not the published one; the message tells what is
            different about it as far as can be told.
    """
    path = folder / name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _missing(folder, name) from None
    except OSError as error:
        raise DataError(f"{path}: it must be readable. Got: {error}. Check its rights.") from error
    known = KNOWN_FILES[name]
    if len(data) != known.num_bytes or _md5(data) != known.md5:
        raise DataError(
            f"{path}: it must be the published file of {known.num_bytes} bytes and MD5 "
            f"{known.md5}. Got {len(data)} bytes and MD5 {_md5(data)}: {_diagnosis(name, data)}. "
            f"Public copies are often altered. {_HOW_TO_GET}."
        )
    return data


def read_fold(folder: Path, fold: str, part: str) -> bytes:
    """Return the rows of `<fold>.<part>`, where part is `base` or `test`.

    Only that file is opened. When it is not there, it is made from `u.data` or `ml-100k.inter`.

    Raises:
        DataError: Neither is there, or a file is not the published one.
    """
    name = f"{fold}.{part}"
    if (folder / name).exists():
        return read_known(folder, name)
    full = next((n for n in ("u.data", "ml-100k.inter") if (folder / n).exists()), None)
    if full is None:
        raise _missing(folder, name)
    lines = read_known(folder, full).splitlines(keepends=True)
    if full == "ml-100k.inter":
        del lines[0]  # its header; the rest is u.data to the byte
    rows = b"".join(_fold_lines(lines, fold, part))
    if _md5(rows) != KNOWN_FILES[name].md5:
        raise DataError(
            f"{folder / full}: the {name} made from it must have the MD5 of the published file, "
            f"{KNOWN_FILES[name].md5}. Got {_md5(rows)}. This is a fault in rowstep: report it."
        )
    return rows


def _fold_lines(lines: list[bytes], fold: str, part: str) -> list[bytes]:
    """Divide the full data by the rule with which the publisher made the folds.

    u1 ... u5 test on the first, ..., fifth 20,000 rows; ua on the first ten rows of each user,
    ub on the next ten. Rows are then sorted by user and item.
    """
    in_test = []
    seen: dict[bytes, int] = {}
    for place, line in enumerate(lines):
        if fold in ("ua", "ub"):
            user = line.split(b"\t", 1)[0]
            seen[user] = seen.get(user, 0) + 1
            in_test.append((seen[user] - 1) // 10 == ("ua", "ub").index(fold))
        else:
            in_test.append(place // 20_000 == int(fold[1]) - 1)
    chosen = (
        line for line, tested in zip(lines, in_test, strict=True) if tested == (part == "test")
    )
    return sorted(chosen, key=lambda line: tuple(map(int, line.split(b"\t", 2)[:2])))


def _missing(folder: Path, name: str) -> DataError:
    if not folder.is_dir():
        return DataError(
            f"data.path: it must be a folder with the MovieLens 100K files. Got {str(folder)!r}, "
            f"which is no folder. {_HOW_TO_GET}."
        )
    found = sorted(path.name for path in folder.iterdir())
    is_fold = name.endswith((".base", ".test"))
    other = " (or u.data or ml-100k.inter, to make it from)" if is_fold else ""
    return DataError(
        f"{folder / name}: the MovieLens 100K folder must hold {name}{other}. Got no such file. "
        f"{nearest(name, found)}. {_HOW_TO_GET}."
    )


def _diagnosis(name: str, data: bytes) -> str:
    """Word the likeliest way in which a file was altered."""
    if not data:
        return "the file is empty"
    if b"\r\n" in data:
        return "its line endings were converted to CRLF"
    known = KNOWN_FILES[name]
    suffix = name if name.startswith("u.") else Path(name).suffix
    pattern = _ROW_PATTERNS.get(suffix, _RATING)
    lines = data.removesuffix(b"\n").split(b"\n")
    first = 1 if name.startswith("ml-100k") else 0
    for number, line in enumerate(lines[first:], start=first + 1):
        if not pattern.fullmatch(line):
            return f"line {number} is not a row of it: {cut(line.decode('latin-1'))}"
    if len(lines) - first != known.num_rows:
        return f"it has {len(lines) - first} rows instead of {known.num_rows}"
    return "values were changed or rows put in another order"


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
