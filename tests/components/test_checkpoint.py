"""What a checkpoint gives back, whom it refuses, and what it keeps."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rowstep import RowstepError
from rowstep.components.checkpoints import (
    CheckpointError,
    CheckpointStore,
    Retention,
    SavedState,
)

RANDOM = np.random.default_rng(5)
ARRAYS = {
    "iterations": np.array(2**53 + 1, dtype=np.int64),
    "no rows": np.zeros((0, 4), dtype=np.float32),
    "mask": np.array([True, False, True]),
    "half": RANDOM.normal(size=(3, 2)).astype(np.float16),
    "brain": RANDOM.normal(size=(5,)).astype(ml_dtypes.bfloat16),
    "eight": RANDOM.normal(size=(5,)).astype(ml_dtypes.float8_e4m3fn),
    "one brain": np.array(1.5, dtype=ml_dtypes.bfloat16),
    "fortran": np.asfortranarray(RANDOM.normal(size=(4, 3, 2))),
    "strided": RANDOM.normal(size=(6, 8))[::2, ::-3],
    "reversed brain": np.arange(6).astype(ml_dtypes.bfloat16)[::-2],
    "big endian": np.arange(4, dtype=">i4"),
    "read-only": np.broadcast_to(np.float32(3.5), (2, 3)),
    "not finite": np.array([np.nan, np.inf, -np.inf, -0.0]),
    "complex": np.array([1 + 2j]),
    "scalar": np.float32(0.1),
}


def save(store: CheckpointStore, step: int, value: float = 0.0, **meta: Any) -> Path:
    array = np.full((3,), value, dtype=np.float32)
    return Path(store.save(step, {"model": [("w", array)]}, meta))


def assert_same(left: np.ndarray, right: np.ndarray) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()


def latest(store: CheckpointStore) -> SavedState:
    state = store.latest()
    assert state is not None, store.problems
    return state


@pytest.mark.parametrize("piece_bytes", [16 * 2**20, 7])
def test_every_kind_of_array_comes_back_to_the_bit_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr("rowstep.components.checkpoints.array_files._PIECE_BYTES", piece_bytes)
    store = CheckpointStore(tmp_path / "new" / "root")
    with store.lock():
        where = store.save(7, {"optimizer": ARRAYS.items(), "none": []}, {"epoch": 2})
    state = latest(CheckpointStore(store.where))
    assert (state.where, state.step, state.meta) == (where, 7, {"epoch": 2})
    assert state.path == tmp_path / "new" / "root" / "step-000000000007"
    assert state.names("optimizer") == list(ARRAYS)
    assert state.names("none") == []
    for name, array in state.arrays("optimizer"):
        assert_same(array, np.asarray(ARRAYS[name]))


def test_a_file_is_plain_npy_that_numpy_reads_without_us(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        where = store.save(1, {"model": [("w", ARRAYS["fortran"])]}, {})
    assert_same(np.load(f"{where}/array-00000.npy"), ARRAYS["fortran"])


def test_names_may_hold_anything(tmp_path: Path) -> None:
    names = ["a/b", "..", "", "\u00fc\U0001f600 \n", "/etc/passwd", "a" * 500, "nul\0"]
    store = CheckpointStore(tmp_path / "root")
    with store.lock():
        store.save(1, {"../up": [(n, np.array(i)) for i, n in enumerate(names)]}, {})
    assert latest(store).names("../up") == names
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root"]


def test_arrays_are_taken_one_at_a_time(tmp_path: Path) -> None:
    alive = []

    def stream() -> Any:
        for number in range(3):
            alive.append(len(list(tmp_path.rglob("array-*.npy"))))
            yield str(number), np.arange(10)

    store = CheckpointStore(tmp_path)
    with store.lock():
        store.save(1, {"model": stream()}, {})
    assert alive == [0, 1, 2]


def test_meta_comes_back_exactly(tmp_path: Path) -> None:
    meta = {"f": 0.1 + 0.2, "i": 2**63, "n": None, "l": [1, [True]], "u": "\u00e9\ud800", "d": {}}
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 1, **meta)
    assert latest(store).meta == meta


@pytest.mark.parametrize(
    "meta",
    [{"a": math.nan}, {"a": math.inf}, {"a": (1,)}, {1: "a"}, {"a": np.float32(1)}, {"a": b""}],
    ids=repr,
)
def test_meta_that_json_would_change_is_refused(tmp_path: Path, meta: Any) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock(), pytest.raises(CheckpointError, match="meta must"):
        store.save(1, {}, meta)
    assert store.steps() == []


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"m": [("w", [1.0])]}, "must be a NumPy array. Got list"),
        ({"m": [("w", np.array(["a"]))]}, "m/w: the type must have a fixed meaning"),
        ({"m": [("w", np.array([None]))]}, "m/w: the type must have a fixed meaning"),
        ({"m": [("w", np.zeros(1)), ("w", np.zeros(1))]}, "Got 'w' twice in 'm'"),
    ],
)
def test_a_refused_save_leaves_nothing_behind(tmp_path: Path, groups: Any, words: str) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        with pytest.raises(CheckpointError, match=words):
            store.save(1, groups, {})
        assert [p.name for p in tmp_path.iterdir()] == ["LOCK"]


def test_an_error_of_the_caller_passes_through_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def failing() -> Any:
        yield "w", np.zeros(3)
        raise KeyboardInterrupt

    store = CheckpointStore(tmp_path)
    with store.lock():
        with pytest.raises(KeyboardInterrupt):
            store.save(1, {"m": failing()}, {})
        assert [p.name for p in tmp_path.iterdir()] == ["LOCK"]


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", np.int64(3)], ids=repr)
def test_a_step_must_be_a_plain_count(tmp_path: Path, step: Any) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock(), pytest.raises(CheckpointError, match="the step must be an integer"):
        save(store, step)


def test_steps_never_go_back_since_retention_would_delete_the_new_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 900)
        with pytest.raises(CheckpointError, match=r"Got 100\. Allowed: 900 or more"):
            save(store, 100)


def test_a_group_that_was_not_saved_is_an_error_at_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 1)
    with pytest.raises(CheckpointError, match=r"Got 'optimzer'\. Saved: model"):
        latest(store).arrays("optimzer")


def test_the_newest_step_counts_whatever_the_clock_says(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=5))
    with store.lock():
        paths = [save(store, step) for step in (2, 10, 10**13)]
    for age, path in enumerate(paths):
        os.utime(path, (10_000 - age, 10_000 - age))
    assert store.steps() == [2, 10, 10**13]
    assert latest(store).step == 10**13


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_retention_keeps_the_last_n_and_no_leftovers(tmp_path: Path, keep_last: int) -> None:
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=keep_last))
    with store.lock():
        for step in range(0, 80, 10):
            save(store, step)
            assert store.steps() == list(range(0, step + 1, 10))[-keep_last:]
    assert len(list(tmp_path.iterdir())) == keep_last + 1


def test_the_last_verified_checkpoint_outlives_damaged_newer_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=1))
    with store.lock():
        save(store, 1, 1.0)
        latest(store)
        kept = store.latest

        def damage_then_look() -> SavedState | None:
            # Stands for a disk that loses what it has just acknowledged.
            (tmp_path / "step-000000000002" / "array-00000.npy").write_bytes(b"")
            return kept()

        store.latest = damage_then_look  # type: ignore[method-assign]
        save(store, 2, 2.0)
    assert latest(CheckpointStore(tmp_path)).step == 1
    assert "step-000000000002: passed over" in store.problems[0]


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 5, 1.0, attempt=1)
        save(store, 10, 1.0, attempt=1)
        for attempt in (2, 3, 4):
            save(store, 10, float(attempt), attempt=attempt)
            ((_, array),) = latest(store).arrays("model")
            assert (array[0], latest(store).meta) == (attempt, {"attempt": attempt})
    assert store.steps() == [5, 10]
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_saving_the_same_again_is_harmless(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 10, 1.0)
        save(store, 10, 1.0)
    assert store.steps() == [10]
    assert latest(store).step == 10


def test_a_root_that_is_a_file_is_refused_before_any_save(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("in the way")
    for root in (tmp_path / "root", tmp_path / "root" / "below"):
        with pytest.raises(CheckpointError, match="the checkpoint folder must be writable"):
            CheckpointStore(root).lock().__enter__()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
def test_a_read_only_root_is_refused_before_any_save(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="the checkpoint folder must be writable"):
            CheckpointStore(tmp_path).lock().__enter__()
    finally:
        tmp_path.chmod(0o700)


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 1)
        manifest = save(store, 2) / "MANIFEST.json"
        body = json.loads(manifest.read_bytes().partition(b"\n")[2])
        text = json.dumps({**body, "format": 3}).encode()
        manifest.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        with pytest.raises(CheckpointError, match=r"Got format 3, kind 'full'\. A newer"):
            store.latest()
    assert store.steps() == [1, 2]


def test_an_empty_store_has_no_latest_and_no_problem(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert (store.latest(), store.steps(), store.problems) == (None, [], [])


def test_checkpoint_errors_belong_to_the_family() -> None:
    assert issubclass(CheckpointError, RowstepError)
    assert issubclass(CheckpointError, RuntimeError)
