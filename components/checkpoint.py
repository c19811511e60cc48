"""The checkpoint store: what is committed is whole, what is not committed does not exist."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rowstep.components.checkpoint_files import (
    FORMAT,
    ArrayRecord,
    CheckpointError,
    DamageError,
    check_file,
    flush_folder,
    means_damage,
    read_array,
    read_manifest,
    write_array,
    write_manifest,
)
from rowstep.components.locks import LockHeldError, exclusive_lock

__all__ = ["CheckpointError", "CheckpointStore", "SavedState", "read_saved"]

_STEP = re.compile(r"step-(\d{12})(?:-(\d+))?")
_UNFINISHED, _DAMAGED = ".tmp-", "corrupt-"
_DAMAGED_KEPT = 2


@dataclass(frozen=True)
class SavedState:
    """Hold one committed checkpoint whose files were all verified when it was opened."""

    path: Path
    step: int
    meta: dict[str, Any]
    records: tuple[ArrayRecord, ...]

    def names(self, group: str) -> list[str]:
        """Return the names of a group's arrays in the order in which they were saved."""
        return [record.name for record in self.records if record.group == group]

    def arrays(self, group: str) -> Iterator[tuple[str, np.ndarray]]:
        """Yield a group's arrays in saved order, one in memory at a time.

        Raises:
            CheckpointError: a file changed since it was verified.
        """
        for record in self.records:
            if record.group == group:
                try:
                    yield record.name, read_array(self.path, record)
                except DamageError as error:
                    raise _damaged(self.path, str(error)) from error


def read_saved(folder: Path) -> SavedState:
    """Open one committed checkpoint anywhere, after verifying every byte of it.

    Raises:
        CheckpointError: it is damaged, not there, or of a newer format.
    """
    try:
        return _verified(folder)
    except DamageError as error:
        raise _damaged(folder, str(error)) from error


class CheckpointStore:
    """Keep the checkpoints of one training in one folder.

    A checkpoint is a folder `step-<12 digits>` with one `.npy` file an array and a manifest. It is
    written under another name, flushed to the disk, and renamed as the last act, so a kill at any
    moment leaves either all of it or nothing. A step that is saved again gets a generation number
    behind its name, because a folder that is not empty cannot be replaced in one act.
    """

    def __init__(self, root: Path, *, keep_last: int = 3) -> None:
        """Create the folder and prove that it can be written to.

        Args:
            root: the folder, for one training only.
            keep_last: committed steps to keep.

        Raises:
            CheckpointError: the folder cannot be created or written to, or keep_last is below 1.
        """
        if keep_last < 1:
            raise CheckpointError(
                f"CheckpointStore: keep_last must be at least 1. Got {keep_last}. "
                "Keep 2 or more, so that a damaged checkpoint has a predecessor."
            )
        self.root, self.keep_last = root, keep_last
        self.problems: list[str] = []
        """What `latest` found to be damaged, and where it went; for people."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            probe = root / f"{_UNFINISHED}probe-{os.getpid()}"
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"{root}: the checkpoint folder must be writable. Got {error}. "
                "Fix its permissions or choose another workspace."
            ) from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer while the `with` block runs, and clear what a killed one left.

        Raises:
            CheckpointError: another process holds the folder; it is named.
        """
        try:
            with exclusive_lock(self.root / "LOCK", wait_seconds=10):
                for leftover in self.root.glob(f"{_UNFINISHED}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                yield
        except LockHeldError as error:
            raise CheckpointError(
                f"{self.root}: one training at a time may write its checkpoints. Got a folder "
                f"{error}. Wait for that process or stop it."
            ) from error

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first; their files are not looked at."""
        return sorted({step for step, _, _ in self._committed()})

    def save(
        self,
        step: int,
        groups: Mapping[str, Iterable[tuple[str, np.ndarray]]],
        meta: Mapping[str, Any],
    ) -> Path:
        """Commit one checkpoint, then drop the oldest beyond `keep_last`.

        Args:
            step: optimizer iterations, 0 or more.
            groups: arrays by group; consumed one at a time, so a generator needs no memory.
            meta: anything else, as JSON values.

        Returns:
            The committed folder.

        Raises:
            CheckpointError: the values cannot be stored, or the disk refuses; what was committed
                before is untouched.

        Cost: one pass over the arrays; 16 MiB of memory at most.
        """
        draft = self.root / f"{_UNFINISHED}{step:012d}-{os.getpid()}-{time.monotonic_ns()}"
        try:
            draft.mkdir()
            records: list[ArrayRecord] = []
            for group, arrays in groups.items():
                for name, value in arrays:
                    records.append(write_array(draft, len(records), group, name, value))
            body = {"format": FORMAT, "kind": "full", "step": step, "meta": dict(meta)}
            write_manifest(draft, body, records)
            flush_folder(draft)
            target = self._free_name(step)
            draft.rename(target)
            flush_folder(self.root)
        except (OSError, TypeError, ValueError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(
                f"{self.root}: step {step} must be written whole. Got {error}. The checkpoints "
                "before it are untouched. Free space, or correct what was to be saved."
            ) from error
        except CheckpointError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._drop_old()
        return target

    def latest(self) -> SavedState | None:
        """Return the newest checkpoint that verifies; a damaged one is moved aside and reported.

        Raises:
            CheckpointError: the newest one was written by a newer rowstep.
            OSError: the disk refuses in a way that says nothing about the checkpoint.
        """
        for _, _, folder in reversed(self._committed()):
            try:
                return _verified(folder)
            except DamageError as error:
                aside = self._set_aside(folder)
                self.problems.append(
                    f"checkpoint {folder.name} is damaged ({error}) and was moved to {aside.name}; "
                    "an older one is used"
                )
        return None

    def _committed(self) -> list[tuple[int, int, Path]]:
        found = []
        for folder in self.root.iterdir():
            match = _STEP.fullmatch(folder.name)
            if match:
                found.append((int(match[1]), int(match[2] or 0), folder))
        return sorted(found)

    def _free_name(self, step: int) -> Path:
        taken = [generation for at, generation, _ in self._committed() if at == step]
        suffix = f"-{max(taken) + 1}" if taken else ""
        return self.root / f"step-{step:012d}{suffix}"

    def _drop_old(self) -> None:
        committed = self._committed()
        kept = self.steps()[-self.keep_last :]
        newest = {step: folder for step, _, folder in committed}
        for step, _, folder in committed:
            if step not in kept or folder != newest[step]:
                # Renamed first: a kill in the middle must not leave half a committed checkpoint.
                doomed = self.root / f"{_UNFINISHED}old-{folder.name}-{time.monotonic_ns()}"
                folder.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _set_aside(self, folder: Path) -> Path:
        aside = self.root / f"{_DAMAGED}{folder.name}-{time.time_ns()}"
        folder.rename(aside)
        for old in sorted(self.root.glob(f"{_DAMAGED}*"), key=lambda p: p.name[-19:])[
            :-_DAMAGED_KEPT
        ]:
            shutil.rmtree(old, ignore_errors=True)
        return aside


def _verified(folder: Path) -> SavedState:
    try:
        body, records = read_manifest(folder)
        for record in records:
            check_file(folder, record)
    except OSError as error:
        if not means_damage(error):
            raise
        raise DamageError(str(error)) from error
    return SavedState(folder, body["step"], body["meta"], records)


def _damaged(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: every byte must be as it was saved. Got {why}. "
        "Use an older checkpoint, or train again."
    )
