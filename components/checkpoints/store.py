"""Keep checkpoints that survive `kill -9`, power cuts and flipped bits, and say which are good.

    <root>/LOCK                          one writer at a time
    <root>/step-000000001234/            a committed checkpoint
        MANIFEST.json                    line 1: SHA-256 of the rest; then JSON
        array-00000.npy ...              one file per array, named by number
    <root>/step-000000001234.1/          the same step, saved again; the higher number counts
    <root>/corrupt-000000001234-<ns>/    moved aside because its bytes are not what was written
    <root>/.tmp-<...>/                   unfinished or condemned; removed by the lock's owner

A folder gets its `step-` name by one rename, after every byte and the manifest are on the disk.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rowstep.components.checkpoints.array_files import CheckpointError, DamageError, flush_folder
from rowstep.components.checkpoints.saved_state import SavedState, open_verified, write_state
from rowstep.components.locks import LockHeldError, exclusive_lock

__all__ = ["CheckpointError", "CheckpointStore", "SavedState"]

_STEP_FOLDER = re.compile(r"step-(\d{12,})(?:\.(\d+))?")
_NUM_CORRUPT_KEPT = 2


class _Committed(NamedTuple):
    step: int
    revision: int
    path: Path


class CheckpointStore:
    """Save and find checkpoints in one folder.

    Several processes may read; one may write, and only while it holds `lock()`.

    Args:
        root: the folder, created when missing. An unwritable one is refused here, not at the
            first save.
        keep_last: committed checkpoints to keep; two at least, to survive a damaged one.

    Raises:
        CheckpointError: the folder cannot be written, or `keep_last` is below 1.
    """

    def __init__(self, root: Path, *, keep_last: int = 3) -> None:
        if keep_last < 1:
            raise CheckpointError(
                f"checkpoints: keep_last must be at least 1. Got {keep_last}. Use 2 or more."
            )
        self.root = Path(root)
        self.keep_last = keep_last
        self.problems: list[str] = []
        self._locked = False
        self._trusted: Path | None = None
        self._serial = itertools.count()
        self._probe()

    @contextmanager
    def lock(self, wait_seconds: float = 0.0) -> Iterator[None]:
        """Be the only writer for the length of a `with` block, and clear what a dead one left.

        Args:
            wait_seconds: how long to wait for a writer that was killed and is still going away.

        Raises:
            CheckpointError: another writer holds the lock; the message names its process and host.
        """
        try:
            with exclusive_lock(self.root / "LOCK", wait_seconds):
                self._locked = True
                try:
                    self._remove_leftovers()
                    yield
                finally:
                    self._locked = False
        except LockHeldError as error:
            raise CheckpointError(
                f"{self.root}: only one run may write checkpoints here. Got a second one; the "
                f"first is {error.holder}. Wait for it to end, stop it, or use another folder."
            ) from None

    def save(
        self,
        step: int,
        groups: Mapping[str, Iterable[tuple[str, np.ndarray]]],
        meta: Mapping[str, Any],
    ) -> Path:
        """Commit one checkpoint: afterwards it is on the disk as a whole, or not there at all.

        A step that was saved before is saved beside the old one, which goes only after the commit.
        Checkpoints beyond `keep_last` are deleted, never the newest one known to be good.

        Args:
            step: the training step, 0 or more, and not below the newest saved one.
            groups: group name to (name, array) pairs. Arrays are taken one at a time, so a
                generator keeps the memory at one array.
            meta: anything that JSON gives back unchanged.

        Returns:
            The folder of the committed checkpoint.

        Raises:
            CheckpointError: the lock is not held, an argument does not fit, or the disk refuses;
                earlier checkpoints are then untouched.

        Cost: one pass over the bytes, and about one more every `keep_last` saves to verify.
        """
        self._check_arguments(step, meta)
        unfinished = self._new_folder_name(f"save-{step:012d}")
        try:
            unfinished.mkdir()
            write_state(unfinished, step, groups, meta)
            committed = self._next_folder(step)
            unfinished.rename(committed)
            flush_folder(self.root)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise CheckpointError(
                f"{self.root}: the checkpoint of step {step} must fit on the disk. Got {error}. "
                "Earlier checkpoints are untouched. Make room, then resume."
            ) from error
        try:
            self._prune()
        except OSError as error:  # the new checkpoint is safe: old ones too many harm nobody yet
            self.problems.append(f"{self.root}: old checkpoints could not be deleted ({error})")
        return committed

    def latest(self) -> SavedState | None:
        """Return the newest checkpoint whose every byte verifies, or None when there is none.

        Damaged ones are named in `problems` and, while the lock is held, moved aside as
        `corrupt-*`; without the lock they stay where they are and are passed over.

        Raises:
            CheckpointError: the newest was written by a newer rowstep, or may not be read.

        Cost: one read of the checkpoint's bytes.
        """
        for _, _, folder in reversed(self._committed()):
            try:
                state = open_verified(folder)
            except DamageError as error:
                self._set_aside(folder, error)
                continue
            self._trusted = folder
            return state
        return None

    def steps(self) -> list[int]:
        """Return the steps of committed checkpoints, oldest first, without reading their files."""
        return sorted({committed.step for committed in self._committed()})

    def _probe(self) -> None:
        probe = self._new_folder_name("probe")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe.mkdir()
            (probe / "probe").write_bytes(b"rowstep")
            shutil.rmtree(probe)
        except OSError as error:
            raise CheckpointError(
                f"{self.root}: the checkpoint folder must be writable. Got {error}. "
                "Choose another folder, or give this user the right to write there."
            ) from error

    def _check_arguments(self, step: int, meta: Mapping[str, Any]) -> None:
        where = f"{self.root}: save"
        if not self._locked:
            raise CheckpointError(
                f"{where}: the writer must hold the lock. Got a save without it. "
                "Save inside 'with store.lock():'."
            )
        newest = max(self.steps(), default=0)
        if isinstance(step, bool) or not isinstance(step, int) or step < newest:
            raise CheckpointError(
                f"{where}: the step must be an integer that is not below the newest saved one. "
                f"Got {step!r}. Allowed: {newest} or more. Resume from the latest checkpoint, or "
                "use another folder."
            )
        try:
            same = json.loads(json.dumps(dict(meta), allow_nan=False)) == meta
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where}: meta must be plain JSON. Got {error}. Use None for a missing number, "
                "and int(), float() or list() for NumPy values."
            ) from error
        if not same:
            raise CheckpointError(
                f"{where}: meta must come back from JSON unchanged. Got a tuple or a key that is "
                "no string. Use lists and string keys."
            )

    def _committed(self) -> list[_Committed]:
        """List committed checkpoints from the oldest step and revision to the newest."""
        found = []
        for path in self.root.iterdir():
            if match := _STEP_FOLDER.fullmatch(path.name):
                found.append(_Committed(int(match[1]), int(match[2] or 0), path))
        return sorted(found)

    def _next_folder(self, step: int) -> Path:
        taken = [committed.revision for committed in self._committed() if committed.step == step]
        name = f"step-{step:012d}"
        return self.root / (f"{name}.{max(taken) + 1}" if taken else name)

    def _set_aside(self, folder: Path, reason: DamageError) -> None:
        if not folder.exists():
            return  # a writer's retention took it away under a reader without the lock
        told = f"{folder.name}: passed over, its bytes are not what was saved ({reason})"
        if self._locked:
            number = folder.name.removeprefix("step-")
            aside = folder.rename(self.root / f"corrupt-{number}-{time.time_ns()}")
            told += f"; kept as {aside.name}"
        self.problems.append(told)

    def _prune(self) -> None:
        """Delete what `keep_last` no longer covers, once a checkpoint that stays has verified."""
        kept, condemned = self._divide()
        if condemned and self._trusted not in kept:
            self.latest()
            kept, condemned = self._divide()
            if self._trusted not in kept:
                return
        corrupt = sorted(self.root.glob("corrupt-*"), key=lambda path: path.name.rpartition("-")[2])
        for folder in condemned + corrupt[:-_NUM_CORRUPT_KEPT]:
            # The rename makes it vanish at once: a reader never meets half a checkpoint.
            doomed = folder.rename(self._new_folder_name("delete"))
            shutil.rmtree(doomed, ignore_errors=True)

    def _divide(self) -> tuple[list[Path], list[Path]]:
        committed = self._committed()
        newest_revisions = {entry.step: entry.path for entry in committed}
        kept = list(newest_revisions.values())[-self.keep_last :]
        return kept, [entry.path for entry in committed if entry.path not in kept]

    def _remove_leftovers(self) -> None:
        for folder in self.root.glob(".tmp-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _new_folder_name(self, purpose: str) -> Path:
        unique = f"{os.getpid()}-{time.time_ns()}-{next(self._serial)}"
        return self.root / f".tmp-{purpose}-{unique}"
