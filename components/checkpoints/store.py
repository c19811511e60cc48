"""Keep checkpoints that survive `kill -9`, power cuts and flipped bits, and say which are good.

What counts, what is damaged and what is kept is decided here, alike for local disks
(`local_disk.py`) and object stores (`object_store.py`). A committed folder is called
`step-000000001234`; the same step, saved again, `step-000000001234.1`, and the higher number
counts. `corrupt-000000001234-1` was moved aside because its bytes are not what was saved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from rowstep.components.checkpoints import messages
from rowstep.components.checkpoints.array_files import CheckpointError, DamageError, ReadError
from rowstep.components.checkpoints.catalog import Catalog
from rowstep.components.checkpoints.manifest import Manifest, checked_meta, checked_metrics
from rowstep.components.checkpoints.places import medium_at
from rowstep.components.checkpoints.retention import Entry, Retention, folder_name, with_reasons
from rowstep.components.checkpoints.saved_state import (
    Groups,
    SavedState,
    open_verified,
    write_state,
)
from rowstep.components.locks import LockHeldError

_KEEP_THREE = Retention()
_NUM_CORRUPT_KEPT = 2


class CheckpointStore:
    """Save and find checkpoints in one folder, or below one URL.

    Several processes may read; one may write, and only while it holds `lock()`. A forked copy of
    the owner may save in its place, one save at a time.

    Args:
        root: a folder, or the URL of an object store. Nothing is touched before it is used.
        retention: which committed checkpoints to keep.
        storage_options: what fsspec needs for the URL, such as credentials.

    Raises:
        CheckpointError: the URL cannot be used.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        retention: Retention = _KEEP_THREE,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.medium = medium_at(root, storage_options)
        self.where = self.medium.where
        self.is_local = self.medium.is_local
        self.retention = retention
        self.problems: list[str] = []
        self.trusted: str | None = None
        """Folder of the newest checkpoint known to be good. A forked copy that saved may hand it
        back, so that it is not read again."""
        self._catalog = Catalog(self.medium)
        self._locked = False
        self._opened_at = 0.0
        self._seconds_before = 0.0

    @contextmanager
    def lock(self, wait_seconds: float = 0.0) -> Iterator[None]:
        """Be the only writer for the length of a `with` block, and clear what a dead one left.

        The root is made when it is missing; one that cannot be written is refused here, not at
        the first save.

        Args:
            wait_seconds: how long to wait for a writer that was killed and is still going away.

        Raises:
            CheckpointError: another writer holds the lock (the message names its process and
                host), or the root cannot be written.
        """
        with ExitStack() as stack:
            try:
                self.medium.probe()
                stack.enter_context(self.medium.lock(wait_seconds))
            except LockHeldError as error:
                raise messages.second_writer(self.where, error.holder) from None
            except OSError as error:
                raise messages.unwritable(self.where, error) from error
            self._locked = True
            stack.callback(setattr, self, "_locked", False)
            self._remove_leftovers()
            newest = self._catalog.newest()
            self._seconds_before = newest.training_seconds if newest else 0.0
            self._opened_at = time.monotonic()
            yield

    def save(
        self,
        step: int,
        groups: Groups,
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        on_written: Callable[[np.ndarray], object] | None = None,
    ) -> str:
        """Commit one checkpoint: afterwards it is there as a whole, or not at all.

        A step that was saved before is saved beside the old one, which goes only after the commit.
        Then checkpoints that no rule keeps are deleted, never the newest one known to be good.

        Args:
            step: the training step, 0 or more, and not below the newest saved one.
            groups: group name to (name, array) pairs. Arrays are taken one at a time, so a
                generator keeps the memory at one array.
            meta: anything that JSON gives back unchanged.
            metrics: what was measured at this step, for `Best`; lower is better.
            on_written: is given each piece of an array after it was written; nothing reads the
                piece again.

        Returns:
            Where the checkpoint lies.

        Raises:
            CheckpointError: the lock is not held or was lost, an argument does not fit, or the
                disk refuses; earlier checkpoints are then untouched.

        Cost: one pass over the bytes, and about one more every `keep_last` saves to verify.
        """
        if not self._locked:
            raise messages.not_locked(self.where)
        manifest = Manifest(
            step=step,
            meta=checked_meta(meta, f"{self.where}: save"),
            metrics=checked_metrics(metrics or {}, f"{self.where}: save"),
            training_seconds=self._seconds_before + time.monotonic() - self._opened_at,
        )
        name = self._next_name(step)
        self._remove_leftovers()
        draft = None
        try:
            draft = self.medium.begin(name)
            write_state(draft, groups, manifest, on_written)
            draft.commit()
        except BaseException as error:
            if draft is not None:
                draft.abandon()
            if not isinstance(error, OSError):
                raise
            raise messages.not_saved(self.where, step, error) from error
        self._prune()
        return f"{self.where}/{name}"

    def latest(self, *, or_refuse: bool = False) -> SavedState | None:
        """Return the newest checkpoint whose every byte verifies, or None when there is none.

        Damaged ones are named in `problems` and, while the lock is held, moved aside as
        `corrupt-*`; without the lock they stay where they are and are passed over.

        Args:
            or_refuse: whether to raise instead of returning None where there were checkpoints,
                now or in an earlier attempt, and none of them is good.

        Raises:
            CheckpointError: the newest was written by a newer rowstep, or may not be read; or
                nothing good is left, with `or_refuse`.

        Cost: one read of the checkpoint's bytes.
        """
        told: list[str] = []
        vanished = True
        while vanished:  # a writer's retention may take away under a reader all that it had seen
            vanished = False
            for folder in reversed(self._catalog.committed()):
                try:
                    state = self._verified(folder.name)
                except DamageError as error:
                    if self._catalog.has(folder.name):
                        told.append(self._set_aside(folder.name, str(error)))
                    else:
                        vanished = True
                    continue
                self.trusted = folder.name
                return state
        if or_refuse:
            earlier = [name for name in self._catalog.corrupt() if name not in str(told)]
            told += [f"{name}: moved aside earlier" for name in earlier]
            if told:
                raise messages.nothing_good(self.where, told)
        return None

    def steps(self) -> list[int]:
        """Return the steps of committed checkpoints, oldest first, without reading their files."""
        return sorted({folder.step for folder in self._catalog.committed()})

    def entries(self) -> list[Entry]:
        """Describe all committed checkpoints, oldest first; reads manifests only."""
        return with_reasons(self._catalog.entries(), self.retention)

    def _verified(self, name: str) -> SavedState:
        try:
            return open_verified(self.medium, name)
        except ReadError:
            return open_verified(self.medium, name)

    def _next_name(self, step: int) -> str:
        committed = self._catalog.committed()
        newest = committed[-1].step if committed else 0
        if isinstance(step, bool) or not isinstance(step, int) or step < newest:
            raise messages.wrong_step(self.where, step, newest)
        taken = [folder.revision for folder in committed if folder.step == step]
        return folder_name(step, self.medium.next_revision(taken))

    def _prune(self) -> None:
        """Delete what no rule keeps, once one of the newest has verified; raise nothing."""
        try:
            entries = self.entries()
            for entry in entries:
                if entry.is_damaged:
                    self._set_aside(entry.name, str(entry.problem))
            if not all(entry.kept_because for entry in entries) and not self._trusts(entries):
                self.latest()
                entries = self.entries()
            condemned = [entry.name for entry in entries if not entry.kept_because]
            if not self._trusts(entries):
                condemned = []
            for name in condemned + self._catalog.corrupt()[:-_NUM_CORRUPT_KEPT]:
                self.medium.delete(name)
        except (OSError, CheckpointError) as error:
            # The new checkpoint is safe, and old ones too many harm nobody yet.
            self._note(f"{self.where}: old checkpoints could not be deleted ({error})")

    def _trusts(self, entries: Sequence[Entry]) -> bool:
        """Return whether one of those that are kept for being the last is known to be good."""
        last = with_reasons(entries, Retention(keep_last=self.retention.keep_last))
        return self.trusted in [e.name for e in last if e.kept_because and e.problem is None]

    def _set_aside(self, name: str, reason: str) -> str:
        """Report a damaged checkpoint, and move it away if that is ours to do."""
        told = f"{name}: passed over, its bytes are not what was saved ({reason})"
        if self._locked:
            aside = self._catalog.aside(name)
            try:
                self.medium.set_aside(name, aside)
                told += f"; kept as {aside}"
            except OSError as error:
                told += f"; it could not be moved aside ({error})"
        self._note(told)
        return told

    def _remove_leftovers(self) -> None:
        for name in self._catalog.leftovers():
            try:
                self.medium.delete(name)
            except OSError as error:
                self._note(f"{self.where}/{name}: a leftover could not be deleted ({error})")

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
