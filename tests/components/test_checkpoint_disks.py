"""Full, read-only and forbidden disks, jumping clocks, forks, and how much memory a store takes."""

from __future__ import annotations

import datetime
import itertools
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rowstep.components.checkpoints import (
    CheckpointError,
    CheckpointStore,
    Retention,
    SavedState,
    array_files,
    saved_state,
    store,
)
from rowstep.components.checkpoints.medium import Medium
from rowstep.components.checkpoints.saved_state import open_verified
from rowstep.components.locks import LockHeldError, exclusive_lock

Mount = Callable[[str], None]


def save(store: CheckpointStore, step: int, size: int = 4) -> Path:
    return Path(store.save(step, {"m": [("w", np.full(size, step))]}, {"step": step}))


def assert_holds(store: CheckpointStore, step: int, size: int = 4) -> None:
    state = store.latest()
    assert state is not None, store.problems
    assert state.step == step
    ((_, array),) = state.arrays("m")
    np.testing.assert_array_equal(array, np.full(size, step))


def run(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a small file system on `tmp_path`, where this user may."""

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(tmp_path)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("only root may mount a file system")

    yield mount
    while os.path.ismount(tmp_path):
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- disks -----------------------------------------------------------------------------------


def fill(store: CheckpointStore, size: int) -> int:
    """Save until the disk is full; return the last step that was saved."""
    for step in range(1, 100):
        try:
            save(store, step, size)
        except CheckpointError as error:
            told = str(error)
            break
    else:
        raise AssertionError("the disk never got full")
    assert f"the checkpoint of step {step} must fit on the disk. Got " in told
    assert "Earlier checkpoints are untouched. Make room, then resume." in told
    return step - 1


def test_a_disk_full_at_any_point_keeps_what_was_saved(tmp_path: Path, mount: Mount) -> None:
    mount("size=160k")
    for level in range(20):
        root, ballast = tmp_path / "root", tmp_path / "ballast"
        ballast.write_bytes(bytes(level * 3000 + 1))
        store = CheckpointStore(root, retention=Retention(keep_last=50))
        with store.lock():
            last = fill(store, 3000)
            assert store.steps() == [*range(1, last + 1)]
            assert_holds(store, last, 3000)
            assert not list(root.glob(".tmp-*"))
            ballast.unlink()
            shutil.rmtree(root / f"step-{1:012d}")
            save(store, last + 1, 3000)
            assert_holds(store, last + 1, 3000)
        shutil.rmtree(root)


def test_a_disk_without_room_for_one_more_file_keeps_what_was_saved(
    tmp_path: Path, mount: Mount
) -> None:
    mount("nr_inodes=23")
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=50))
    with store.lock():
        last = fill(store, 4)
        assert last > 3
        assert_holds(store, last)
        assert not list(tmp_path.glob(".tmp-*"))


def test_retention_makes_room_on_a_disk_for_four(tmp_path: Path, mount: Mount) -> None:
    mount("size=160k")
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=3))
    with store.lock():
        for step in range(30):
            save(store, step, 3000)
    assert store.steps() == [27, 28, 29]
    assert store.problems == []


def test_a_full_disk_is_refused_before_the_first_save(tmp_path: Path, mount: Mount) -> None:
    mount("size=16k")
    (tmp_path / "ballast").write_bytes(bytes(16 * 1024))
    with pytest.raises(CheckpointError, match=r"must be writable\. Got .*Make room"):
        CheckpointStore(tmp_path).lock().__enter__()


def test_a_read_only_disk_is_read_but_not_locked(tmp_path: Path, mount: Mount) -> None:
    mount("size=1m")
    with CheckpointStore(tmp_path).lock():
        pass
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
    assert_holds(store, 1)
    assert [entry.step for entry in store.entries()] == [1]
    with pytest.raises(CheckpointError, match=r"must be writable\. Got .*Read-only file system"):
        store.lock().__enter__()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_folder_of_somebody_else_is_refused_before_the_first_save(tmp_path: Path) -> None:
    for above in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        above.chmod(0o755)
    told = run(
        """
        import os, sys
        from rowstep.components.checkpoints import CheckpointError, CheckpointStore
        store = CheckpointStore(sys.argv[1])
        with store.lock():
            store.save(1, {}, {})
        os.chmod(f"{store.where}/step-000000000001", 0o700)
        os.chdir("/")
        os.seteuid(65534)
        for use in (lambda: store.lock().__enter__(), store.latest):
            try:
                use()
            except CheckpointError as error:
                print(error)
        """,
        tmp_path,
    )
    if "must be readable" not in told:
        pytest.skip("nobody else may enter the folders above")
    first, second = told.splitlines()
    assert "the checkpoint folder must be writable. Got [Errno 13]" in first
    assert "give this user the right to write there" in first
    assert "the checkpoint must be readable. Got [Errno 13]" in second


def test_a_place_where_nothing_can_be_made_is_refused() -> None:
    with pytest.raises(CheckpointError, match="/proc/rowstep: the checkpoint folder must be writ"):
        CheckpointStore("/proc/rowstep").lock().__enter__()


def test_looking_makes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "missing")
    assert (store.latest(or_refuse=True), store.steps(), store.entries()) == (None, [], [])
    assert not (tmp_path / "missing").exists()


def test_what_is_not_ours_below_the_root_stays(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-by-step").mkdir()
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "step-000000000009").write_text("a file")
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=1))
    with store.lock():
        for step in (1, 2, 3):
            save(store, step)
    assert store.steps() == [3]
    assert {"notes", "step-by-step", "corrupt"} < {path.name for path in tmp_path.iterdir()}


# --- nothing good is left ---------------------------------------------------------------------


def test_a_training_whose_checkpoints_are_all_damaged_refuses_until_told(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for attempt in ("first", "second"):
        store = CheckpointStore(root)
        with store.lock():
            if attempt == "first":
                assert store.latest(or_refuse=True) is None, "there never was one"
                for step in (1, 2, 3):
                    (save(store, step) / "MANIFEST.json").write_bytes(b"x")
            with pytest.raises(CheckpointError) as caught:
                store.latest(or_refuse=True)
        told = str(caught.value)
        assert told.startswith(f"{root}: one checkpoint at least must be good. Got none: ")
        for step in (1, 2, 3):
            assert f"{step:012d}" in told, attempt
        assert "delete or rename this folder to start afresh, on purpose" in told
    root.rename(tmp_path / "put away")
    store = CheckpointStore(root)
    with store.lock():
        assert store.latest(or_refuse=True) is None


def test_one_good_checkpoint_is_enough(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 1)
        (save(store, 2) / "MANIFEST.json").write_bytes(b"x")
        found = store.latest(or_refuse=True)
    assert found is not None
    assert found.step == 1


# --- clocks ------------------------------------------------------------------------------------


def test_the_order_is_that_of_the_steps_when_the_clock_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_time, real_ns, day, shift = time.time, time.time_ns, 86_400, [0]

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Clock:
            return cls.fromtimestamp(real_time() + shift[0], tz)

    monkeypatch.setattr(time, "time", lambda: real_time() + shift[0])
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + shift[0] * 10**9)
    monkeypatch.setattr(saved_state, "datetime", Clock)
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=4))
    shifts = [0, -day, 366 * day, -day, 0, -366 * day, day]
    with store.lock():
        for step, seconds in enumerate(shifts):
            shift[0] = seconds
            path = save(store, step)
            os.utime(path, (real_time() + seconds, real_time() + seconds))
            assert_holds(store, step)
    assert store.steps() == [3, 4, 5, 6]
    entries = store.entries()
    assert entries[2].saved_at < entries[0].saved_at < entries[3].saved_at, "it did jump"
    spent = [entry.training_seconds for entry in entries]
    assert spent == sorted(spent)
    assert spent[-1] < day / 2


# --- forks and memory --------------------------------------------------------------------------


def test_a_forked_copy_of_the_owner_saves_in_its_place(tmp_path: Path) -> None:
    told = run(
        """
        import os, sys
        import numpy as np
        from rowstep.components.checkpoints import CheckpointError, CheckpointStore, Retention
        store = CheckpointStore(sys.argv[1], retention=Retention(keep_last=2))
        weights = np.zeros(5)
        with store.lock():
            for step in range(1, 8):
                weights[:] = step
                before = set(sys.modules)
                child = os.fork()
                if not child:
                    store.save(step, {"m": [("w", weights)]}, {"step": step})
                    os._exit(7 if set(sys.modules) == before else 8)
                weights[:] = -1
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            state = store.latest()
            print(state.step, state.sources("m")["w"].read()[0], store.steps(), store.problems)
            store.save(8, {}, {})
            read_end, write_end = os.pipe()
            if not os.fork():
                os.close(write_end)
                os.read(read_end, 1)
                os._exit(0)
        try:
            CheckpointStore(sys.argv[1]).lock().__enter__()
        except CheckpointError as error:
            print("only one run may write" in str(error))
        os.close(write_end)
        os.wait()
        with CheckpointStore(sys.argv[1]).lock():
            print("free")
        """,
        tmp_path,
    )
    assert told.splitlines() == ["7 7.0 [6, 7] []", "True", "free"]


def test_a_save_that_was_killed_alone_leaves_room_for_the_next(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        left = tmp_path / ".tmp-save-by-a-forked-copy-that-was-killed"
        left.mkdir()
        save(store, 1)
        assert not left.exists()


def test_memory_does_not_grow_with_the_arrays(tmp_path: Path) -> None:
    # Pages of zeros that nobody wrote to take no memory, so only the store's own is seen.
    told = run(
        """
        import resource, sys
        import numpy as np
        from rowstep.components.checkpoints import CheckpointStore
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        store = CheckpointStore(sys.argv[1])
        big = np.zeros((2**21, 16), np.float32)
        with store.lock():
            store.save(1, {"m": [("warm up", np.zeros(3))]}, {})
            store.latest()
            before = peak()
            store.save(2, {"m": [("big", big), ("turned", big.T)]}, {})
            state = store.latest()
            for source in state.sources("m").values():
                for first, rows in source.pieces():
                    assert rows.nbytes <= 16 * 2**20
            print(state.step, state.num_bytes // 2**20, (peak() - before) // 1024)
        """,
        tmp_path,
    )
    step, size, grown = map(int, told.split())
    assert (step, size) == (2, 256)
    assert grown < 64


def test_a_reader_follows_a_writer_that_deletes_all_it_had_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = (CheckpointStore(tmp_path, retention=Retention(keep_last=1)) for _ in "ab")
    opened: list[str] = []

    def open_slowly(medium: Medium, folder: str) -> SavedState:
        opened.append(folder)
        if len(opened) <= 2:  # the writer commits, and deletes what is about to be opened
            monkeypatch.setattr(store, "open_verified", open_verified)
            save(writer, len(opened) + 1)
            monkeypatch.setattr(store, "open_verified", open_slowly)
        return open_verified(medium, folder)

    with writer.lock():
        save(writer, 1)
        monkeypatch.setattr(store, "open_verified", open_slowly)
        found = reader.latest()
    assert found is not None
    assert found.step == 3
    assert opened == [f"step-{step:012d}" for step in (1, 2, 3)]
    assert reader.problems == []


def test_a_lock_file_that_was_replaced_while_we_waited_is_locked_anew(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    taken: list[bool] = []

    def wait() -> None:
        with exclusive_lock(path, wait_seconds=20) as held:
            taken.append(held.is_in_place())
            with pytest.raises(LockHeldError):
                exclusive_lock(path).__enter__()

    waiting = threading.Thread(target=wait)
    with exclusive_lock(path) as mine:
        waiting.start()
        time.sleep(0.2)  # long enough for the other to have opened the file that goes now
        path.unlink()
        path.touch()
        assert not mine.is_in_place()
    waiting.join()
    assert taken == [True]


# --- pieces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [16 * 2**20, 24, 7])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(60.0).reshape(5, 4, 3),
        np.arange(6).reshape(1, 6),
        np.zeros((0, 4)),
        np.zeros((3, 0)),
        np.array(3.5),
        np.arange(7).astype(ml_dtypes.bfloat16).reshape(7, 1),
        np.array(1.5, ml_dtypes.bfloat16),
        np.arange(9).astype(ml_dtypes.float8_e5m2),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_pieces_are_the_rows_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: np.ndarray, piece_bytes: int
) -> None:
    monkeypatch.setattr(array_files, "_ASSIGNED_BYTES", piece_bytes)
    monkeypatch.setattr(array_files, "_PIECE_BYTES", piece_bytes)
    store = CheckpointStore(tmp_path)
    with store.lock():
        store.save(1, {"m": [("w", array)]}, {})
    state = store.latest()
    assert state is not None
    source = state.sources("m")["w"]
    assert (source.shape, source.dtype) == (array.shape, array.dtype)
    expected = array.reshape(array.shape or (1,))
    found, end = np.zeros_like(expected), 0
    for first, rows in source.pieces():
        assert first == end
        assert rows.dtype == array.dtype
        end += len(rows)
        found[first:end] = rows
    assert end == len(expected)
    assert found.tobytes() == expected.tobytes()
    whole = source.read()
    assert (whole.shape, whole.dtype) == (array.shape, array.dtype)
    assert whole.tobytes() == array.tobytes()
    out = np.ones_like(array)
    source.read_into(out)
    assert out.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\1"), "checksum"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "cut short"),
        (lambda file: file.write_bytes(b"x" + file.read_bytes()[1:]), "its header"),
        (lambda file: file.write_bytes(b""), "its header"),
        (lambda file: file.unlink(), "No such file"),
    ],
    ids=["flipped", "short", "header", "empty", "missing"],
)
def test_a_file_changed_after_the_check_is_one_kind_of_error(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        path = save(store, 1)
    state = store.latest()
    assert state is not None
    source = state.sources("m")["w"]
    spoil(path / "array-00000.npy")
    ways: list[Callable[[], object]] = [
        source.read,
        lambda: source.read_into(np.empty(source.shape, source.dtype)),
        lambda: list(source.pieces()),
        lambda: list(state.arrays("m")),
    ]
    for read, number in zip(ways, itertools.count()):
        with pytest.raises(CheckpointError, match=f"files must not change.*{words}"):
            raise AssertionError(f"{number}: {read()}")
