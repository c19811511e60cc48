"""A power cut keeps what was flushed, and of the rest what it likes: no acknowledged step is lost.

The disk is modelled on top of real files. A file has for certain the bytes that it had when it was
last flushed, a folder the entries that it had when it was; beyond that, each entry may be the old
or the new one, each file old, new, or a piece of the new one followed by zeros (T22).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from rowstep.components.checkpoints import CheckpointStore, Retention
from rowstep.components.checkpoints import local_disk as disk_module

NUM_STEPS, NUM_CUTS = 6, 400
Folders = dict[int, dict[str, int]]
Files = dict[int, bytes]


@dataclass
class Tree:
    """What a disk holds, by inode."""

    folders: Folders = field(default_factory=dict)
    files: Files = field(default_factory=dict)


@dataclass
class Moment:
    """A moment at which the power may go, and what is on the disk then, and what is not yet."""

    acknowledged: int
    durable: Tree
    volatile: Tree


class Recorder:
    """Note what is flushed below a folder, and every moment between."""

    def __init__(self, root: Path, held: ExitStack) -> None:
        self.root, self.held = root, held
        self.durable = Tree()
        self.moments: list[Moment] = []
        self.acknowledged = 0
        self._kept: set[int] = set()

    def look(self) -> Tree:
        """Read everything; inodes are held open, so that none is used for a second file."""
        tree = Tree()
        for place, folders, files in os.walk(self.root):
            number = os.stat(place).st_ino
            tree.folders[number] = {
                name: os.stat(Path(place) / name).st_ino for name in [*folders, *files]
            }
            for name in files:
                path = Path(place) / name
                tree.files[path.stat().st_ino] = path.read_bytes()
            for path in [Path(place), *(Path(place) / name for name in files)]:
                if path.stat().st_ino not in self._kept:
                    self._kept.add(path.stat().st_ino)
                    self.held.callback(os.close, os.open(path, os.O_RDONLY))
        return tree

    def note(self) -> None:
        durable = Tree(
            {number: dict(names) for number, names in self.durable.folders.items()},
            dict(self.durable.files),
        )
        self.moments.append(Moment(self.acknowledged, durable, self.look()))

    def flushed(self, descriptor: int) -> None:
        number, seen = os.fstat(descriptor).st_ino, self.look()
        if number in seen.folders:
            self.durable.folders[number] = seen.folders[number]
        elif number in seen.files:
            self.durable.files[number] = seen.files[number]


def arrays_of(step: int) -> list[tuple[str, np.ndarray]]:
    return [("w", np.full((40, 3), step, np.float32)), ("b", np.arange(5) + step)]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Save some steps, of which two are kept, and record how they reach the disk."""
    root = tmp_path / "store"
    root.mkdir()
    with ExitStack() as held:
        recorder = Recorder(root, held)
        recorder.durable.folders[root.stat().st_ino] = {}
        fsync, rename = os.fsync, os.rename
        write = disk_module._WrittenFile.write

        def noted_fsync(descriptor: int) -> None:
            fsync(descriptor)
            recorder.flushed(descriptor)
            recorder.note()

        def noted_rename(source: Path, target: Path) -> None:
            rename(source, target)
            recorder.note()

        def noted_write(file: disk_module._WrittenFile, data: bytes) -> int:
            written = write(file, data)
            recorder.note()
            return written

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "rename", noted_rename)
        monkeypatch.setattr(disk_module._WrittenFile, "write", noted_write)
        store = CheckpointStore(root, retention=Retention(keep_last=2))
        with store.lock():
            for step in range(1, NUM_STEPS + 1):
                store.save(step, {"model": arrays_of(step)}, {"step": step})
                recorder.acknowledged = step
                recorder.note()
        monkeypatch.undo()
        yield recorder


def cut(moment: Moment, root: int, target: Path, chance: random.Random) -> None:
    """Write what a disk may hold after the power went."""
    old, new = moment.durable, moment.volatile
    target.mkdir()
    before, after = old.folders.get(root, {}), new.folders.get(root, {})
    for name in sorted(before.keys() | after.keys()):
        number = chance.choice([entries.get(name) for entries in (before, after)])
        if number is None:
            continue
        if number in old.folders or number in new.folders:
            cut(moment, number, target / name, chance)
        else:
            (target / name).write_bytes(content(moment, number, chance))


def content(moment: Moment, number: int, chance: random.Random) -> bytes:
    """Return what a file may hold: what was flushed is there for certain, once it is complete."""
    if number in moment.durable.files and number not in moment.volatile.files:
        return moment.durable.files[number]
    fresh = moment.volatile.files.get(number, b"")
    if moment.durable.files.get(number) == fresh:
        return fresh
    torn = fresh[: chance.randint(0, len(fresh))]
    return chance.choice([b"", fresh, torn, torn.ljust(len(fresh), b"\0")])


def test_no_acknowledged_step_is_lost_by_a_power_cut(recorded: Recorder, tmp_path: Path) -> None:
    chance = random.Random(22)
    root = recorded.root.stat().st_ino
    num_newer = num_older = 0
    for number in range(NUM_CUTS):
        moment = chance.choice(recorded.moments)
        place = tmp_path / f"cut-{number}"
        cut(moment, root, place, chance)
        store = CheckpointStore(place)
        with store.lock():
            saved = store.latest()
        if saved is None:
            assert moment.acknowledged == 0
            continue
        assert saved.step >= moment.acknowledged
        for (name, found), (wanted_name, wanted) in zip(
            saved.arrays("model"), arrays_of(saved.step), strict=True
        ):
            assert name == wanted_name
            np.testing.assert_array_equal(found, wanted)
        num_newer += saved.step > moment.acknowledged
        num_older += saved.step == moment.acknowledged
    assert min(num_newer, num_older) > 10


def test_the_model_would_notice_a_missing_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the flush of files the same cuts lose steps: the test above has teeth."""
    root = tmp_path / "store"
    with ExitStack() as held:
        store = CheckpointStore(root, retention=Retention(keep_last=1))
        recorder = Recorder(root, held)
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        with store.lock():
            store.save(1, {"model": arrays_of(1)}, {})
        recorder.acknowledged = 1
        recorder.durable.folders[root.stat().st_ino] = {}
        recorder.note()
        monkeypatch.undo()
        chance, lost = random.Random(22), 0
        for number in range(40):
            place = tmp_path / f"cut-{number}"
            cut(recorder.moments[0], root.stat().st_ino, place, chance)
            lost += CheckpointStore(place).latest() is None
    assert lost > 10
