"""List what lies below a root: committed checkpoints, damaged ones, and what dead writers left."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from rowstep.components.checkpoints import messages
from rowstep.components.checkpoints.array_files import CheckpointError, DamageError, ReadError
from rowstep.components.checkpoints.medium import Medium
from rowstep.components.checkpoints.retention import Entry, parse_folder
from rowstep.components.checkpoints.saved_state import read_manifest

_CORRUPT = re.compile(r"corrupt-.*-(\d+)")


class Folder(NamedTuple):
    """Name a committed checkpoint; the order of these is the order in which they count."""

    step: int
    revision: int
    name: str


class Catalog:
    """Read names and manifests through a medium, and change nothing.

    Args:
        medium: the disk or the object store.

    Raises:
        CheckpointError: by every method: the place cannot be read.
    """

    def __init__(self, medium: Medium) -> None:
        self.medium = medium

    def committed(self) -> list[Folder]:
        """List committed checkpoints from the oldest step and revision to the newest."""
        keys = {name: parse_folder(name) for name in self._listed(self.medium.committed)}
        return sorted(Folder(*key, name) for name, key in keys.items() if key)

    def has(self, name: str) -> bool:
        """Return whether a checkpoint is committed still."""
        return name in self._listed(self.medium.committed)

    def corrupt(self) -> list[str]:
        """List what was moved aside, in that order."""
        found = [name for name in self._listed(self.medium.others) if _CORRUPT.fullmatch(name)]
        return sorted(found, key=_serial)

    def aside(self, name: str) -> str:
        """Return the name for a damaged checkpoint; numbered, since a clock may go backwards."""
        serial = max(map(_serial, self.corrupt()), default=0) + 1
        return f"corrupt-{name.removeprefix('step-')}-{serial}"

    def leftovers(self) -> list[str]:
        """List what unfinished saves and deletions left; foreign folders are never among them."""
        others = self._listed(self.medium.others)
        return [name for name in others if name.startswith(".tmp-") or parse_folder(name)]

    def entries(self) -> list[Entry]:
        """Describe all committed checkpoints, oldest first; reads manifests only."""
        entries = (self._entry(folder) for folder in self.committed())
        return [entry for entry in entries if entry is not None]

    def newest(self) -> Entry | None:
        """Describe the newest one whose manifest can be read; reads no more manifests than that."""
        entries = (self._entry(folder) for folder in reversed(self.committed()))
        return next((entry for entry in entries if entry and entry.problem is None), None)

    def _listed(self, listing: Callable[[], list[str]]) -> list[str]:
        try:
            return listing()
        except OSError as error:
            raise messages.unreadable(self.medium.where, error) from error

    def _entry(self, folder: Folder) -> Entry | None:
        """Return what a manifest says, or None if the folder has gone meanwhile."""
        where = f"{self.medium.where}/{folder.name}"
        try:
            manifest = read_manifest(self.medium, folder.name)
        except DamageError as error:
            if not self.has(folder.name):
                return None
            is_damaged = not isinstance(error, ReadError)
            return Entry(folder.step, where, problem=str(error), is_damaged=is_damaged)
        except CheckpointError as error:
            return Entry(folder.step, where, problem=str(error))
        return Entry(
            folder.step,
            where,
            num_bytes=manifest.num_bytes,
            metrics=manifest.metrics,
            training_seconds=manifest.training_seconds,
            saved_at=manifest.saved_at,
        )


def _serial(name: str) -> int:
    match = _CORRUPT.fullmatch(name)
    return int(match[1]) if match else 0
