"""What is left of a checkpoint after flipped bits, kills, full disks and second writers."""

from __future__ import annotations

import errno
import inspect
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from rowstep.components.checkpoints import (
    CheckpointError,
    CheckpointStore,
    Retention,
    SavedState,
    open_checkpoint,
)
from rowstep.components.checkpoints.local_disk import LocalDisk


def groups(step: int, size: int) -> dict[str, list[tuple[str, np.ndarray]]]:
    """Return what a save of this step must hold; a mix of two steps cannot pass for either."""
    big = np.full(size, step, dtype=np.float32)
    return {"model": [("big", big), ("odd", big[::2])], "optimizer": [("it", np.array(step))]}


# Children run the same lines, so that both sides agree on what a step holds.
EXPECTED = f"from __future__ import annotations\nimport numpy as np\n{inspect.getsource(groups)}"

WRITER = EXPECTED + textwrap.dedent("""
    import os, sys
    from pathlib import Path
    from rowstep.components.checkpoints import CheckpointStore, Retention
    root, size = Path(sys.argv[1]), int(sys.argv[2])
    store = CheckpointStore(root, retention=Retention(keep_last=2))
    with store.lock(wait_seconds=10):
        state = store.latest()
        step = state.step if state else 0
        print("ready", flush=True)
        while True:
            step += 1
            store.save(step, groups(step, size), {"step": step})
            print("saved", step, flush=True)
""")


def assert_holds(store: CheckpointStore, step: int, size: int) -> None:
    state = store.latest()
    assert state is not None, store.problems
    assert (state.step, state.meta) == (step, {"step": step})
    for group, pairs in groups(step, size).items():
        for (name, saved), (expected_name, expected) in zip(
            state.arrays(group), pairs, strict=True
        ):
            assert name == expected_name
            np.testing.assert_array_equal(saved, expected)


def save(store: CheckpointStore, step: int, size: int = 4) -> Path:
    return Path(store.save(step, groups(step, size), {"step": step}))


def spoil(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def variants_of(data: bytes, position: int) -> list[bytes]:
    flipped = bytearray(data)
    flipped[position] ^= 1 << random.Random(position).randrange(8)
    return [bytes(flipped), data[:position]]


def is_refused(path: Path) -> bool:
    try:
        open_checkpoint(path)
    except CheckpointError as error:
        return "the checkpoint must be whole" in str(error)
    return False


def test_every_flipped_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 1)
        path = save(store, 2)
    num_tried = 0
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for position in range(len(data)):
            for spoiled in variants_of(data, position):
                spoil(file, spoiled)
                assert is_refused(path), f"{file.name} byte {position}"
                num_tried += 1
        spoil(file, data + b"\0")
        assert is_refused(path)
        assert store.latest().step == 1  # type: ignore[union-attr]
        for start in range(0, len(data), 512):
            zeros = bytes(len(data[start : start + 512]))
            spoiled = data[:start] + zeros + data[start + 512 :]
            spoil(file, spoiled)
            assert is_refused(path) == (spoiled != data)
        file.unlink()
        assert store.latest().step == 1  # type: ignore[union-attr]
        spoil(file, data)
    assert num_tried > 2000
    assert_holds(store, 2, 4)


@pytest.mark.parametrize("name", ["array-00000.npy", "MANIFEST.json"])
def test_what_is_no_plain_file_is_damage_and_never_waited_for(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        path = save(store, 1)
    for make in (os.mkfifo, os.mkdir, lambda place: os.symlink("nowhere", place)):
        (path / name).rename(tmp_path / "kept")
        make(path / name)
        assert is_refused(path)
        os.rmdir(path / name) if (path / name).is_dir() else os.unlink(path / name)
        (tmp_path / "kept").rename(path / name)
    assert_holds(store, 1, 4)


def test_a_sector_that_cannot_be_read_is_passed_over_like_other_damage(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=2))
    with store.lock():
        fail_to_read(save(store, 4) / "MANIFEST.json")
        save(store, 5)
        assert store.problems == [], "it may be readable tomorrow: retention leaves it alone"
        assert store.entries()[0].kept_because == ("cannot be judged",)
        fail_to_read(save(store, 6) / "MANIFEST.json")
        assert_holds(store, 5, 4)
        assert "Input/output error" in store.problems[0]
    assert [path.name for path in tmp_path.glob("corrupt-*")] == ["corrupt-000000000006-1"]


def fail_to_read(file: Path) -> None:
    """Put a file there whose first byte gives EIO, as a bad sector does."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


def test_the_last_good_one_stays_when_damaged_ones_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(disk: LocalDisk, folder: str, name: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    monkeypatch.setattr(LocalDisk, "set_aside", refuse)
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=1))
    look = store.latest

    def lose_then_look() -> SavedState | None:
        # Stands for a disk that loses what it has just acknowledged.
        spoil(tmp_path / "step-000000000002" / "array-00000.npy", b"")
        return look()

    monkeypatch.setattr(store, "latest", lose_then_look)
    with store.lock():
        save(store, 1)
        save(store, 2)
    assert CheckpointStore(tmp_path).steps() == [1, 2]
    assert "it could not be moved aside ([Errno 5]" in store.problems[0]


def test_files_swapped_between_two_steps_are_noticed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        old, middle, new = (save(store, step) for step in (1, 2, 3))
    for name in ("array-00000.npy", "MANIFEST.json"):
        kept = (new / name).read_bytes()
        spoil(new / name, (middle / name).read_bytes())
        assert store.latest().step == 2  # type: ignore[union-attr]
        spoil(new / name, kept)
    assert store.latest().step == 3  # type: ignore[union-attr]
    assert old.exists()


def test_a_damaged_checkpoint_is_moved_aside_and_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 1)
        path = save(store, 2)
        spoil(path / "array-00001.npy", b"\x93NUMPY")
        assert_holds(store, 1, 4)
        assert store.steps() == [1]
        (aside,) = tmp_path.glob("corrupt-000000000002-*")
        assert (aside / "array-00001.npy").exists()
        (problem,) = store.problems
        assert "step-000000000002" in problem
        assert "array-00001.npy: 6 bytes" in problem
        save(store, 2)
        assert_holds(store, 2, 4)


def test_when_everything_is_damaged_there_is_no_latest_and_every_one_is_named(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        for step in (1, 2, 3):
            spoil(save(store, step) / "MANIFEST.json", b"")
        assert store.latest() is None
    assert len(store.problems) == 3


def test_a_file_changed_after_the_check_is_not_handed_out(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        path = save(store, 1)
    state = store.latest()
    assert state is not None
    data = bytearray((path / "array-00000.npy").read_bytes())
    data[-1] ^= 1
    spoil(path / "array-00000.npy", bytes(data))
    with pytest.raises(CheckpointError, match="files must not change"):
        list(state.arrays("model"))


def test_a_second_writer_in_the_same_process_is_refused(tmp_path: Path) -> None:
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    with first.lock():
        with pytest.raises(CheckpointError, match=f"the first is process {os.getpid()} on "):
            second.lock().__enter__()
        with pytest.raises(CheckpointError, match="must hold the lock"):
            save(second, 1)
    with second.lock():
        save(second, 1)


def start(root: Path, size: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), str(size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_second_process_is_refused_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    child = start(tmp_path, 10)
    try:
        assert next_line(child) == "ready\n"
        with pytest.raises(CheckpointError, match=f"the first is process {child.pid} on "):
            store.lock().__enter__()
    finally:
        child.kill()
        child.communicate()
    with store.lock():
        pass


def test_a_full_disk_is_reported_and_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    # A limit on the file size stands for a full disk: the write fails in the middle of an array.
    child = EXPECTED + textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from rowstep.components.checkpoints import CheckpointError, CheckpointStore
        store = CheckpointStore(Path(sys.argv[1]))
        with store.lock():
            store.save(1, groups(1, 1000), {"step": 1})
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            try:
                store.save(2, groups(2, 100_000), {"step": 2})
            except CheckpointError as error:
                print(error)
            print(sorted(path.name for path in Path(store.where).iterdir()))
    """)
    command = [sys.executable, "-c", child, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "the checkpoint of step 2 must fit on the disk. Got" in told
    assert told.endswith("['LOCK', 'step-000000000001']\n")
    assert_holds(CheckpointStore(tmp_path), 1, 1000)


def test_the_store_imports_no_heavy_library() -> None:
    code = (
        "import sys, rowstep.components.checkpoints\n"
        "print([n for n in ('tensorflow', 'keras', 'tfx', 'mlflow') if n in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
