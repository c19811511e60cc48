"""Folders of part files that are either whole or absent.

    <folder>/train/part-00000.csv, ...    every part begins with the header
    <folder>/eval/part-00000.csv, ...
    <folder>/MANIFEST.json                written last: names, sizes and checksums of the parts

A folder is filled under a temporary name, flushed to the disk, and renamed at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rowstep.components.checkpoints.array_files import flush_folder
from rowstep.components.data_errors import DataError
from rowstep.components.locks import LockHeldError, exclusive_lock
from rowstep.components.part_files import sha256_of

__all__ = ["MANIFEST", "install", "read_manifest", "staging"]

MANIFEST = "MANIFEST.json"
_FORMAT = 1
_ABANDONED_SECONDS = 24 * 3600.0
_LOCK_SECONDS = 600.0  # its holder may be reading all files of a large folder
_REMEDY = "Remove the folder to have it made again."


@contextmanager
def staging(root: Path, name: str) -> Iterator[Path]:
    """Give an empty folder beside the final one; it is gone afterwards, unless it was installed.

    A process that is killed leaves its folder behind; the next one removes it after a day.
    """
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob(".staging-*"):
        try:
            abandoned = time.time() - old.stat().st_mtime > _ABANDONED_SECONDS
        except FileNotFoundError:
            continue  # its owner has just installed it
        if abandoned:
            shutil.rmtree(old, ignore_errors=True)
    folder = root / f".staging-{name}-{secrets.token_hex(6)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(staged: Path, final: Path, body: Mapping[str, Any]) -> None:
    """Write the manifest and rename a staged folder to its final name.

    A valid folder that another process has put there meanwhile is kept; a damaged one is replaced.
    Only the holder of the root's lock does either, so a valid folder is never taken away.

    Raises:
        DataError: Another process holds the lock for too long.
    """
    manifest = {"format": _FORMAT, **body}
    manifest["checksum"] = _checksum(manifest)
    with (staged / MANIFEST).open("x", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    flush_folder(staged)
    try:
        with exclusive_lock(final.parent / ".lock", _LOCK_SECONDS):
            _replace(staged, final)
    except LockHeldError as error:
        raise DataError(
            f"{final.parent}: it must be free for a new data folder within {_LOCK_SECONDS:.0f} "
            f"seconds. Got: {error}. Wait for that process, or end it, and run again."
        ) from error


def _replace(staged: Path, final: Path) -> None:
    if final.exists():
        try:
            read_manifest(final, checksums=True)
        except DataError:
            # Renaming first: a folder that is half removed must never bear the final name.
            aside = final.with_name(f".staging-damaged-{secrets.token_hex(6)}")
            final.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            return
    staged.rename(final)
    flush_folder(final.parent)


def read_manifest(folder: Path, checksums: bool = False) -> dict[str, Any]:
    """Read a folder's manifest and hold the part files against it.

    Args:
        folder: A folder that `install` made.
        checksums: Also read every part file to the end and compare its SHA-256; without it,
            only sizes are compared.

    Raises:
        DataError: The manifest or a part file is missing, damaged or of another version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder}: it must hold {MANIFEST}. Got none. {_REMEDY}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: it must be readable JSON. Got: {error}. {_REMEDY}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise DataError(f"{path}: its format must be {_FORMAT}. Got {found!r}. {_REMEDY}")
    if manifest.get("checksum") != _checksum(manifest):
        raise DataError(f"{path}: it must match its own checksum. Got another one. {_REMEDY}")
    for entry in manifest["files"]:
        _check_part(folder / entry["path"], entry, checksums)
    return manifest


def _check_part(path: Path, entry: Mapping[str, Any], checksums: bool) -> None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise DataError(f"{path}: it must have {entry['bytes']} bytes. Got {size}. {_REMEDY}")
        if checksums and sha256_of(path) != entry["sha256"]:
            raise DataError(f"{path}: it must match its SHA-256. Got other bytes. {_REMEDY}")
    except OSError as error:
        raise DataError(f"{path}: it must be readable. Got: {error}. {_REMEDY}") from error


def _checksum(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
