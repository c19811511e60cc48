"""Saving while training goes on: what is saved, what a failure costs, and who survives whom."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from rowstep.components.checkpoints import (
    CheckpointError,
    CheckpointStore,
    SavedState,
    background,
    local_disk,
)
from rowstep.components.checkpoints.background import Saver


def groups(value: float, size: int = 1000) -> dict[str, list[tuple[str, np.ndarray]]]:
    return {"model": [("w", np.full(size, value)), ("step", np.array(int(value)))]}


def latest(store: CheckpointStore) -> SavedState:
    saved = store.latest()
    assert saved is not None, store.problems
    return saved


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every flush to the disk take a while; a forked writer inherits that."""
    flush = os.fsync
    monkeypatch.setattr(local_disk.os, "fsync", lambda fd: (time.sleep(0.15), flush(fd))[1])


@pytest.mark.parametrize("root", ["{}", "memory://test_background/{}"], ids=["fork", "thread"])
def test_a_save_in_the_background_is_the_save_that_would_have_been_waited_for(
    tmp_path: Path, root: str
) -> None:
    told: list[int] = []
    store = CheckpointStore(root.format(tmp_path))
    with store.lock():
        saver = Saver(store, on_commit=told.append)
        saver.save(3, groups(3), {"epoch": 1}, {"val_rmse": 0.5})
        saver.wait()
        assert told == [3]
    saved = latest(store)
    assert (saved.step, saved.meta, saved.metrics) == (3, {"epoch": 1}, {"val_rmse": 0.5})
    for (name, array), (wanted, expected) in zip(
        saved.arrays("model"), groups(3)["model"], strict=True
    ):
        assert name == wanted
        np.testing.assert_array_equal(array, expected)


def test_training_goes_on_while_the_checkpoint_of_before_is_written(
    tmp_path: Path, slow_disk: None
) -> None:
    weights = np.zeros(1000)
    store = CheckpointStore(tmp_path)
    with store.lock():
        saver = Saver(store)
        saver.save(1, {"model": [("w", weights)]}, {})
        num_steps = 0
        while saver.busy:
            weights += 1  # what an optimizer does, in place
            num_steps += 1
        assert num_steps > 1
    ((_, array),) = latest(store).arrays("model")
    np.testing.assert_array_equal(array, np.zeros(1000))


@pytest.mark.parametrize(
    ("allowed", "least", "waits"),
    [
        pytest.param(2**20, 0, True, id="more-than-set"),
        pytest.param(2**24, 0, False, id="less-than-set"),
        pytest.param(None, 0, True, id="more-than-a-twentieth"),
        pytest.param(None, 128 * 2**20, False, id="less-than-the-least"),
    ],
)
def test_training_waits_once_it_has_had_too_much_memory_copied(
    tmp_path: Path,
    slow_disk: None,
    monkeypatch: pytest.MonkeyPatch,
    allowed: int | None,
    least: int,
    waits: bool,
) -> None:
    monkeypatch.setattr(background, "_LEAST_COPIED_BYTES", least)
    weights = np.zeros(2**20)  # 8 MiB
    store = CheckpointStore(tmp_path)
    with store.lock():
        saver = Saver(store, copied_bytes=allowed)
        saver.save(1, {"model": [("w", weights)]}, {})
        weights[:1000] += 1
        saver.spare_memory()
        assert saver.busy
        weights += 1
        saver.spare_memory()
        assert saver.busy is not waits
        saver.wait()
    np.testing.assert_array_equal(dict(latest(store).arrays("model"))["w"], 0)


def test_tables_that_rows_are_scattered_into_meanwhile_are_saved_as_they_were(
    tmp_path: Path, slow_disk: None
) -> None:
    import keras
    import tensorflow as tf

    from rowstep.optimizers import LazyAdam
    from rowstep.optimizers.state import iter_named_state, named_state

    table = keras.Variable(np.ones((500, 4), "float32"), name="table")
    optimizer = LazyAdam(0.1)
    optimizer.build([table])
    gradient = tf.IndexedSlices(tf.ones([3, 4]), tf.constant([1, 2, 499]), tf.constant([500, 4]))
    optimizer.apply([gradient], [table])
    before = named_state(optimizer)
    store = CheckpointStore(tmp_path)
    with store.lock():
        saver = Saver(store)
        saver.save(1, {"optimizer": iter_named_state(optimizer)}, {})
        assert saver.busy
        optimizer.apply([gradient], [table])
        saver.wait()
    saved = dict(latest(store).arrays("optimizer"))
    assert saved.keys() == before.keys()
    assert all(saved[key].tobytes() == before[key].tobytes() for key in before)
    assert named_state(optimizer)["table/momentum"].tobytes() != before["table/momentum"].tobytes()


def test_a_second_save_waits_for_the_first(tmp_path: Path, slow_disk: None) -> None:
    told: list[int] = []
    store = CheckpointStore(tmp_path)
    with store.lock():
        saver = Saver(store, on_commit=told.append)
        for step in (1, 2, 3):
            saver.save(step, groups(step), {})
            assert told == list(range(1, step))
        saver.save(4, groups(4), {}, wait=True)
        assert told == [1, 2, 3, 4]
    assert store.steps() == [2, 3, 4]


def _full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_disk.os, "fsync", refuse)


def test_a_failure_is_raised_in_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        saver = Saver(store)
        saver.save(1, groups(1), {}, wait=True)
        with monkeypatch.context() as patch:
            _full_disk(patch)
            saver.save(2, groups(2), {})
            with pytest.raises(CheckpointError, match="No space left on device"):
                saver.wait()
        assert latest(store).step == 1
        assert not list(tmp_path.glob(".tmp-*"))


def test_so_many_failures_in_a_row_are_told_and_the_next_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    store = CheckpointStore(tmp_path)
    with store.lock():
        saver = Saver(store, max_failed=2, on_problem=told.append)
        for round_ in range(2):  # a success in between forgives what was before
            with monkeypatch.context() as patch:
                _full_disk(patch)
                for _ in range(2):
                    saver.save(2, groups(2), {})
                    saver.wait()
            assert len(told) == 2 * (round_ + 1)
            assert "failure 2 in a row, 2 are allowed" in told[-1]
            saver.save(3, groups(3), {})
            saver.wait()
        _full_disk(monkeypatch)
        for _ in range(2):
            saver.save(4, groups(4), {})
            saver.wait()
        saver.save(4, groups(4), {})
        with pytest.raises(CheckpointError, match="step 4"):
            saver.wait()


def test_a_save_that_is_waited_for_may_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        _full_disk(monkeypatch)
        with pytest.raises(CheckpointError, match="No space left"):
            Saver(store, max_failed=5).save(1, groups(1), {}, wait=True)


def _children() -> list[int]:
    return [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_a_writer_that_was_killed_is_a_failure_that_says_so(
    tmp_path: Path, slow_disk: None
) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        saver = Saver(store)
        saver.save(1, groups(1), {}, wait=True)
        before = set(_children())
        saver.save(2, groups(2), {})
        [writer] = set(_children()) - before
        os.kill(writer, signal.SIGKILL)
        with pytest.raises(CheckpointError, match=r"writer of step 2 must run to its end\. Got"):
            saver.wait()
        saver.save(3, groups(3), {}, wait=True)
        assert store.steps() == [1, 3]
        assert not list(tmp_path.glob(".tmp-*"))


def test_a_writer_ignores_the_signals_that_stop_a_training(tmp_path: Path, slow_disk: None) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        saver = Saver(store)
        before = set(_children())
        saver.save(1, groups(1), {})
        [writer] = set(_children()) - before
        time.sleep(0.1)
        os.kill(writer, signal.SIGTERM)
        os.kill(writer, signal.SIGINT)
        saver.wait()
    assert latest(store).step == 1


ORPHAN = (
    f"from __future__ import annotations\nimport numpy as np\n{inspect.getsource(groups)}"
    + textwrap.dedent("""
    import os, signal, sys, time
    from rowstep.components.checkpoints import CheckpointStore
    from rowstep.components.checkpoints.background import Saver
    flush = os.fsync
    os.fsync = lambda fd: (time.sleep(0.3), flush(fd))[1]
    store = CheckpointStore(sys.argv[1])
    with store.lock():
        Saver(store).save(7, groups(7), {})
        os.kill(os.getpid(), signal.SIGKILL)
    """)
)


def test_the_writer_survives_a_training_that_is_killed_and_the_next_one_waits_for_it(
    tmp_path: Path,
) -> None:
    killed = subprocess.run([sys.executable, "-c", ORPHAN, str(tmp_path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="only one run may write"), store.lock():
        pass
    with store.lock(wait_seconds=30):
        assert latest(store).step == 7


def test_closing_lets_the_writer_end_and_tells_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    store = CheckpointStore(tmp_path)
    with store.lock():
        saver = Saver(store, on_problem=told.append)
        saver.save(1, groups(1), {})
        saver.close()
        assert store.steps() == [1]
        _full_disk(monkeypatch)
        saver.save(2, groups(2), {})
        saver.close()
    assert len(told) == 1
    assert "No space left" in told[0]


@pytest.mark.parametrize("background", [True, False])
def test_both_ways_keep_what_retention_says(tmp_path: Path, background: bool) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        saver = Saver(store, background=background)
        for step in range(1, 6):
            saver.save(step, groups(step), {})
            saver.wait()
    assert store.steps() == [3, 4, 5]
