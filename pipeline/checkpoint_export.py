"""Write the arrays of a checkpoint as plain NumPy files, for tools that know nothing of rowstep."""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from rowstep import RowstepError
from rowstep.components.checkpoints import SavedArray, SavedState

INDEX = "index.json"
_KIND = "rowstep checkpoint export"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 100


class ExportError(RowstepError, RuntimeError):
    """Say that an export cannot be written."""


def export_npz(saved: SavedState, groups: Sequence[str], target: Path, *, force: bool) -> list[str]:
    """Write the arrays of some groups into one `.npz` file that `numpy.load` reads.

    Keys are the names of the arrays, with `<group>/` before them if there are several groups.

    Args:
        saved: a verified checkpoint.
        groups: names of the groups.
        target: the file. It appears at once when all is written.
        force: whether to replace a file.

    Returns:
        Names of arrays that are written as integers, since NumPy lacks their type.

    Raises:
        ExportError: the file is there already, or the disk refuses.
        CheckpointError: a group was not saved, or the files change meanwhile.

    Cost: memory for one piece of 16 MiB.
    """
    arrays = _arrays(saved, groups)
    if target.is_dir() or (target.exists() and not force):
        raise _refusal(target, "a folder" if target.is_dir() else "a file that is there already")
    unfinished = _beside(target)
    with _removing(unfinished, target):
        with zipfile.ZipFile(unfinished, "x", zipfile.ZIP_STORED) as archive:
            for name, array in arrays.items():
                entry = zipfile.ZipInfo(f"{name}.npy")
                with archive.open(entry, "w", force_zip64=True) as file:
                    _write(cast(BinaryIO, file), array)
        os.replace(unfinished, target)
    return _as_integers(arrays)


def export_folder(
    saved: SavedState, groups: Sequence[str], target: Path, *, force: bool
) -> list[str]:
    """Write the arrays of some groups into a folder of `.npy` files with an `index.json`.

    See `export_npz`. With `force` an earlier export is replaced, and no other folder.
    """
    arrays = _arrays(saved, groups)
    if target.exists() and not (force and _is_export(target)):
        raise _refusal(target, _what_is_there(target))
    unfinished = _beside(target)
    with _removing(unfinished, target):
        unfinished.mkdir()
        entries = []
        for number, (name, array) in enumerate(arrays.items()):
            file_name = f"{number:04d}-{_UNSAFE.sub('_', name)[-_LONGEST_NAME:]}.npy"
            with open(unfinished / file_name, "xb") as file:
                _write(file, array)
            entries.append(_entry(array, file_name))
        index = {"kind": _KIND, "checkpoint": saved.where, "step": saved.step, "arrays": entries}
        (unfinished / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        os.replace(unfinished, target)
    return _as_integers(arrays)


def stored_type(dtype: np.dtype) -> np.dtype:
    """Return the type that NumPy itself knows for the bits of a type."""
    return dtype if dtype.kind in "biufc" else np.dtype(f"u{dtype.itemsize}")


def _arrays(saved: SavedState, groups: Sequence[str]) -> dict[str, SavedArray]:
    several = len(groups) > 1
    return {
        f"{group}/{name}" if several else name: array
        for group in groups
        for name, array in saved.sources(group).items()
    }


def _write(file: BinaryIO, array: SavedArray) -> None:
    plain = stored_type(array.dtype)
    header = {"descr": plain.str, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(file, header)
    for _, rows in array.pieces():
        file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)


def _entry(array: SavedArray, file_name: str) -> dict[str, Any]:
    return {
        "group": array.record.group,
        "name": array.record.name,
        "file": file_name,
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "stored_as": stored_type(array.dtype).name,
    }


def _as_integers(arrays: dict[str, SavedArray]) -> list[str]:
    return [name for name, array in arrays.items() if stored_type(array.dtype) != array.dtype]


def _is_export(folder: Path) -> bool:
    try:
        return json.loads((folder / INDEX).read_text(encoding="utf-8"))["kind"] == _KIND
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _what_is_there(target: Path) -> str:
    if not target.is_dir():
        return "a file"
    return "an earlier export" if _is_export(target) else "a folder of something else"


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.new")


@contextmanager
def _removing(unfinished: Path, target: Path) -> Iterator[None]:
    """Leave nothing behind when the `with` block fails."""
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"{target}: the export must fit on the disk and its folder must be there. Got {error}. "
            "Nothing was left behind. Make room, or choose another place."
        ) from error
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink() if unfinished.is_file() else shutil.rmtree(unfinished)


def _refusal(target: Path, what: str) -> ExportError:
    remedy = "Choose another name"
    if what in ("an earlier export", "a file that is there already"):
        remedy += ", or replace it with --force"
    return ExportError(f"{target}: an export must not replace what is there. Got {what}. {remedy}.")
