"""Write checkpoints while training goes on, from a forked copy of the process.

A fork is the cheapest snapshot there is: the kernel shares the memory and copies a page only when
training writes to it. A snapshot held inside TensorFlow would make the next step copy each table as
a whole. The copy runs nothing but NumPy and file calls, and ends without tidying up. When training
has had more pages copied than it may, it waits for the save to end.

On an object store the writer is a thread, since network clients do not survive a fork; there the
step after a snapshot does copy the tables.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from rowstep.components.checkpoints.array_files import CheckpointError
from rowstep.components.checkpoints.forked_memory import ForkedMemory
from rowstep.components.checkpoints.store import CheckpointStore

Groups = Mapping[str, Iterable[tuple[str, np.ndarray]]]
_HUNG_SECONDS = 120.0
_LOOK_SECONDS = 5.0
_POLL_SECONDS = 0.02
_LEAST_COPIED_BYTES = 128 * 2**20
_COPIED_SHARE = 1 / 20


class _Writer(Protocol):
    """A save that is under way."""

    step: int

    def ended(self) -> bool:
        """Return whether it has ended, well or badly."""

    def problem(self) -> str | None:
        """Return what went wrong, once it has ended."""

    def copied_bytes(self) -> int:
        """Return how much memory training has had copied at most, since the save began."""


class Saver:
    """Save checkpoints in the background, one at a time, and report failures in the training.

    Args:
        store: the store; its lock must be held for as long as this saver is used.
        background: whether to write while training goes on. Otherwise every save waits.
        copied_bytes: memory that training may have copied meanwhile, until `spare_memory` waits;
            128 MiB when left out, or a twentieth of what is saved if that is more.
        max_failed: saves that may fail in a row before the failure is raised.
        on_problem: is told, in words for people, of each failure that is not raised.
        on_commit: is told the step of each checkpoint once it is committed.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        background: bool = True,
        copied_bytes: int | None = None,
        max_failed: int = 0,
        on_problem: Callable[[str], None] = lambda text: None,
        on_commit: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.store = store
        self.background = background
        self.copied_bytes = copied_bytes
        self.max_failed = max_failed
        self.on_problem = on_problem
        self.on_commit = on_commit
        self._writer: _Writer | None = None
        self._num_failed = 0
        self._allowed = _LEAST_COPIED_BYTES

    @property
    def busy(self) -> bool:
        """Return whether a save is under way.

        Raises:
            CheckpointError: the one that has just ended failed, once too often.
        """
        if self._writer is not None and self._writer.ended():
            self._finish(self._writer)
        return self._writer is not None

    def save(
        self,
        step: int,
        groups: Groups,
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Start to save; the arrays may change as soon as this returns.

        Args:
            step: as `CheckpointStore.save` takes it.
            groups: likewise.
            meta: likewise.
            metrics: likewise.
            wait: whether to return only after the commit. Then a failure is always raised.

        Raises:
            CheckpointError: this save (with `wait`) or an earlier one failed.

        Cost: without `wait` the time of a fork, which grows with the memory of the process, and
            the time until an earlier save has ended.
        """
        self.wait()
        if wait or not self.background:
            try:
                self.store.save(step, groups, meta, metrics=metrics)
            except CheckpointError as error:
                if wait:
                    raise
                self._failed(str(error))
            else:
                self._committed(step)
            return
        start = _Fork if self.store.is_local else _Thread
        taken = {group: list(pairs) for group, pairs in groups.items()}
        sizes = [np.asarray(value).nbytes for pairs in taken.values() for _, value in pairs]
        share = max(_LEAST_COPIED_BYTES, int(sum(sizes) * _COPIED_SHARE))
        self._allowed = share if self.copied_bytes is None else self.copied_bytes
        self._writer = start(self.store, step, taken, meta, metrics)

    def spare_memory(self) -> None:
        """Wait for a save that is under way if training has had too much memory copied by now.

        Raises:
            CheckpointError: that save failed, once too often.
        """
        if self._writer is not None and self._writer.copied_bytes() > self._allowed:
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way.

        Raises:
            CheckpointError: the last one failed, once too often.
        """
        while self.busy:
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Let a save that is under way end; say what went wrong with it, and raise nothing."""
        try:
            self.wait()
        except CheckpointError as error:
            self.on_problem(str(error))

    def _finish(self, writer: _Writer) -> None:
        self._writer = None
        problem = writer.problem()
        if problem is None:
            self._committed(writer.step)
        else:
            self._failed(problem)

    def _committed(self, step: int) -> None:
        self._num_failed = 0
        self.on_commit(step)

    def _failed(self, problem: str) -> None:
        self._num_failed += 1
        if self._num_failed > self.max_failed:
            raise CheckpointError(problem)
        self.on_problem(
            f"{problem} Training goes on without it: failure {self._num_failed} in a row, "
            f"{self.max_failed} are allowed (checkpoint.max_failed_saves)."
        )


class _Fork:
    """A save in a forked copy of the process."""

    def __init__(
        self,
        store: CheckpointStore,
        step: int,
        taken: Mapping[str, list[tuple[str, np.ndarray]]],
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        # Everything was taken before the fork: TensorFlow's locks may be held by a thread that the
        # copy does not have, so the copy must not ask TensorFlow for anything.
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            # Newer Pythons warn of forks beside threads; see above for why this one is safe.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            _write_and_exit(store, step, taken, meta, metrics, write_end)
        os.close(write_end)
        self._store, self.step = store, step
        self._process, self._read_end = process, read_end
        self._faults = _page_faults()
        self._activity: object = None
        self._active_at = self._looked_at = time.monotonic()
        self._status: int | None = None

    def ended(self) -> bool:
        if self._status is None:
            process, status = os.waitpid(self._process, os.WNOHANG)
            if process:
                self._status = status
            elif self._is_hung():
                os.kill(self._process, signal.SIGKILL)
                _, self._status = os.waitpid(self._process, 0)
        return self._status is not None

    def problem(self) -> str | None:
        with open(self._read_end, "rb") as pipe:
            text = pipe.read()
        if not text:
            return (
                f"{self._store.where}: the writer of step {self.step} must run to its end. Got "
                f"wait status {self._status}. Earlier checkpoints are untouched. Look for a killer "
                "of processes that are short of memory, or set checkpoint.background to false."
            )
        report = json.loads(text)
        self._store.problems.extend(report["problems"])
        self._store.trusted = report["trusted"]
        return report["error"]

    def copied_bytes(self) -> int:
        # Among them are pages that the copy had given back; then the kernel need not copy them.
        return (_page_faults() - self._faults) * mmap.PAGESIZE

    def _is_hung(self) -> bool:
        """Return whether the copy has neither computed nor written for a long time."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        try:
            stat = Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()
            activity = (stat[11], stat[12], Path(f"/proc/{self._process}/io").read_text())
        except OSError:
            return False
        if activity != self._activity:
            self._activity, self._active_at = activity, now
        return now - self._active_at > _HUNG_SECONDS


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _write_and_exit(
    store: CheckpointStore,
    step: int,
    groups: Mapping[str, list[tuple[str, np.ndarray]]],
    meta: Mapping[str, Any],
    metrics: Mapping[str, float] | None,
    pipe: int,
) -> NoReturn:
    """Save in the forked copy and leave at once, without any finalizer."""
    code = 1
    try:
        gc.disable()  # a collection could free tensors, which asks TensorFlow
        # Who stops the training means the training; a commit under way is worth its seconds.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        store.problems.clear()
        error = None
        arrays = [array for pairs in groups.values() for _, array in pairs]
        memory = ForkedMemory(array for array in arrays if isinstance(array, np.ndarray))
        try:
            store.save(step, groups, meta, metrics=metrics, on_written=memory.give_back)
        except CheckpointError as failure:
            error = str(failure)
        report = {"error": error, "problems": store.problems[:20], "trusted": store.trusted}
        os.write(pipe, json.dumps(report).encode())
        code = 0
    finally:
        os._exit(code)


class _Thread:
    """A save in a thread, of arrays that TensorFlow keeps as they are."""

    def __init__(
        self,
        store: CheckpointStore,
        step: int,
        taken: Mapping[str, list[tuple[str, np.ndarray]]],
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        self.step = step
        self._problem: str | None = None

        def write() -> None:
            try:
                store.save(step, taken, meta, metrics=metrics)
            except CheckpointError as error:
                self._problem = str(error)
            except BaseException as error:
                self._problem = f"{store.where}: step {step} must be saved. Got {error!r}."
                raise

        self._thread = threading.Thread(target=write, name="rowstep-checkpoint")
        self._thread.start()

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def problem(self) -> str | None:
        self._thread.join()
        return self._problem

    def copied_bytes(self) -> int:
        return 0  # TensorFlow has copied whole tables at the first step; waiting saves nothing
