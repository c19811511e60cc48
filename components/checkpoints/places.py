"""Find the disk or the object store that a path or a URL names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowstep.components.checkpoints import messages
from rowstep.components.checkpoints.array_files import CheckpointError, DamageError
from rowstep.components.checkpoints.local_disk import LocalDisk
from rowstep.components.checkpoints.medium import Medium
from rowstep.components.checkpoints.saved_state import SavedState, open_verified

_LOCAL = "file://"
_SQUEEZED_URL = re.compile(r"[a-z][a-z0-9+.]+:/[^/]")


def medium_at(
    root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Medium:
    """Return the medium of a root, without touching it.

    Args:
        root: a folder, or the URL of an object store.
        storage_options: what fsspec needs for the URL.

    Raises:
        CheckpointError: the URL cannot be used.
    """
    place = _text(root)
    if "://" in place and not place.startswith(_LOCAL):
        # fsspec and the client libraries behind it are for those who use them.
        from rowstep.components.checkpoints.object_store import ObjectStore

        try:
            return ObjectStore(place, storage_options)
        except OSError as error:
            raise messages.unreadable(place, error) from error
    return LocalDisk(Path(place.removeprefix(_LOCAL)))


def open_checkpoint(
    where: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> SavedState:
    """Return one committed checkpoint after reading every byte of it.

    Args:
        where: its folder, such as `<artifact>/step-000000000123`, or the URL of one.
        storage_options: what fsspec needs for the URL.

    Raises:
        CheckpointError: there is none, it is damaged, or it may not be read.

    Cost: one read of all files, two pieces of 2 MiB in memory.
    """
    place = _text(where).rstrip("/")
    root, _, folder = (place if "://" in place else os.path.abspath(place)).rpartition("/")
    medium = medium_at(root or "/", storage_options)
    try:
        return open_verified(medium, folder)
    except DamageError as error:
        raise CheckpointError(
            f"{place}: the checkpoint must be whole. Got {error}. Use another one."
        ) from error


def _text(where: str | os.PathLike[str]) -> str:
    text = os.fspath(where)
    if isinstance(where, Path) and _SQUEEZED_URL.match(text):
        raise CheckpointError(
            f"{text}: a URL must be given as a string. Got a pathlib.Path, which drops one of its "
            "slashes. Pass the text as it is."
        )
    return text
