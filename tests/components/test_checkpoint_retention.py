"""Which checkpoints stay, and why."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from rowstep.components.checkpoints import Best, CheckpointError, CheckpointStore, Entry, Retention
from rowstep.components.checkpoints.retention import with_reasons

HOUR = 3600.0


def entry(step: int, *, rmse: float | None = None, hours: float = 0.0, revision: int = 0) -> Entry:
    name = f"step-{step:012d}" + (f".{revision}" if revision else "")
    metrics = {} if rmse is None else {"val_rmse": rmse}
    return Entry(step, f"/checkpoints/{name}", metrics=metrics, training_seconds=hours * HOUR)


def kept(entries: list[Entry], retention: Retention) -> dict[int, tuple[str, ...]]:
    return {e.step: e.kept_because for e in with_reasons(entries, retention) if e.kept_because}


def save(store: CheckpointStore, step: int, rmse: float | None = None) -> Path:
    metrics = {} if rmse is None else {"val_rmse": rmse}
    return Path(store.save(step, {"m": [("w", np.array(step))]}, {}, metrics))


def test_every_rule_names_itself() -> None:
    entries = [entry(1, rmse=0.5, hours=1), entry(2, rmse=0.7, hours=6), entry(3, hours=7)]
    rules = Retention(keep_last=1, keep_best=Best("val_rmse"), keep_every_hours=6)
    assert kept(entries, rules) == {
        1: ("best val_rmse (0.5)",),
        2: ("every 6 h of training",),
        3: ("one of the last 1",),
    }


def test_an_entry_may_be_kept_for_several_reasons() -> None:
    rules = Retention(keep_last=1, keep_best=Best("val_rmse"), keep_every_hours=1)
    assert len(kept([entry(1, rmse=0.5, hours=1)], rules)[1]) == 3


def test_the_lowest_values_are_the_best_and_of_equal_ones_the_older() -> None:
    values = [0.9, 0.5, 0.5, None, 0.6, 0.5]
    entries = [entry(step, rmse=value) for step, value in enumerate(values)]
    rules = Retention(keep_last=1, keep_best=Best("val_rmse", count=2))
    assert sorted(kept(entries, rules)) == [1, 2, 5]
    assert sorted(kept(entries, Retention(keep_last=1, keep_best=Best("val_mae")))) == [5]


def test_every_k_hours_does_not_change_by_deleting_what_it_does_not_keep() -> None:
    rules = Retention(keep_last=2, keep_every_hours=1.0)
    alive: list[Entry] = []
    for number in range(1, 41):
        alive.append(entry(number, hours=number * 0.3))
        alive = [e for e in with_reasons(alive, rules) if e.kept_because]
    assert [e.step for e in alive] == [4, 8, 12, 16, 20, 24, 28, 32, 36, 39, 40]


def test_the_best_so_far_is_never_lost_by_deleting_the_others() -> None:
    rules = Retention(keep_last=2, keep_best=Best("val_rmse", count=2))
    values = np.random.default_rng(1).permutation(50) / 50
    alive: list[Entry] = []
    for step, value in enumerate(values):
        alive.append(entry(step, rmse=float(value)))
        alive = [e for e in with_reasons(alive, rules) if e.kept_because]
        best = sorted(values[: step + 1])[:2]
        assert set(best) <= {e.metrics["val_rmse"] for e in alive}


def test_a_step_saved_again_counts_once_by_its_last_readable_revision() -> None:
    broken = Entry(2, "/checkpoints/step-000000000002.2", problem="damaged")
    entries = [entry(1), entry(2), entry(2, revision=1), broken]
    marked = with_reasons(entries, Retention(keep_last=2))
    assert [e.kept_because for e in marked] == [
        ("one of the last 2",),
        (),
        ("one of the last 2",),
        ("cannot be judged",),
    ]


def test_the_order_is_that_of_the_numbers_and_not_of_the_names() -> None:
    entries = [entry(2, revision=revision) for revision in (10, 9, 0)] + [entry(10**12), entry(5)]
    ordered = with_reasons(entries, Retention(keep_last=1))
    assert [(e.step, e.revision) for e in ordered] == [
        (2, 0),
        (2, 9),
        (2, 10),
        (5, 0),
        (10**12, 0),
    ]


def test_nothing_is_kept_of_nothing() -> None:
    rules = Retention(keep_best=Best(), keep_every_hours=1)
    assert with_reasons([], rules) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Retention(keep_last=0), "keep_last must be at least 1. Got 0"),
        (lambda: Retention(keep_every_hours=0.0), "keep_every_hours must be above 0. Got 0.0"),
        (lambda: Retention(keep_every_hours=float("nan")), "keep_every_hours must be above 0"),
        (lambda: Best("val_rmse", count=0), r"keep_best.count must be at least 1. Got 0"),
    ],
)
def test_rules_that_keep_nothing_are_refused(make: object, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        make()  # type: ignore[operator]


def test_the_store_keeps_last_and_best_and_says_why(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, retention=Retention(2, Best("val_rmse", 2)))
    with store.lock():
        for step, value in enumerate([0.9, 0.4, 0.8, 0.3, 0.7, 0.6]):
            save(store, step, value)
    assert [(e.step, e.kept_because) for e in store.entries()] == [
        (1, ("best val_rmse (0.4)",)),
        (3, ("best val_rmse (0.3)",)),
        (4, ("one of the last 2",)),
        (5, ("one of the last 2",)),
    ]
    assert len(list(tmp_path.iterdir())) == 5, "four checkpoints and the lock"


def test_an_entry_says_what_is_there_without_reading_arrays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        path = save(store, 3, 0.25)
    (path / "array-00000.npy").unlink()
    (found,) = CheckpointStore(tmp_path).entries()
    assert (found.step, found.where, found.metrics) == (3, str(path), {"val_rmse": 0.25})
    assert found.num_bytes == 136
    assert found.saved_at.endswith("+00:00")
    assert found.problem is None


def test_only_one_of_the_last_proves_that_older_ones_may_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, retention=Retention(2, Best("val_rmse")))
    with store.lock():
        save(store, 1, 0.1)
        assert store.latest() is not None
        for step in (2, 3):
            save(store, step, 0.9)
        assert store.trusted == "step-000000000001", "nothing had to go yet"
        save(store, 4, 0.9)
        assert store.trusted == "step-000000000004", "the best one is no proof: it always stays"
    assert store.steps() == [1, 3, 4]


def test_a_manifest_that_cannot_be_read_stops_no_pruning_and_is_moved_aside(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=2))
    with store.lock():
        save(store, 1)
        damaged = save(store, 2)
        (damaged / "MANIFEST.json").write_bytes(b"{}")
        for step in (3, 4, 5):
            save(store, step)
    assert store.steps() == [4, 5]
    assert "step-000000000002: passed over" in store.problems[0]
    (aside,) = tmp_path.glob("corrupt-*")
    assert (aside / "array-00000.npy").exists(), "damage is for people to look at"


def test_the_two_newest_damaged_ones_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=2))
    with store.lock():
        for step in range(1, 14):
            if step in (1, 13):
                save(store, step)
            else:
                (save(store, step) / "MANIFEST.json").write_bytes(b"")
                assert store.latest() is not None
    names = sorted(path.name for path in tmp_path.glob("corrupt-*"))
    assert names == ["corrupt-000000000011-10", "corrupt-000000000012-11"]


def test_time_spent_training_grows_over_attempts_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.chain([1000.0, 1060.0, 1090.0, 5.0, 15.0, 5000.0])
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seconds = []
    for attempt in ([1, 2], [3]):  # the second one runs after a reboot: its clock starts anew
        now[0] = next(ticks)
        store = CheckpointStore(tmp_path)
        with store.lock():
            for step in attempt:
                now[0] = next(ticks)
                save(store, step)
                seconds.append(store.entries()[-1].training_seconds)
    assert seconds == [60.0, 90.0, 100.0]


def test_a_forked_saver_counts_the_time_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        save(store, 1)
        first = store.entries()[-1].training_seconds
        other = CheckpointStore(tmp_path)  # what the fork saved is on the disk alone
        for step in (2, 3):
            save(store, step)
        seconds = [e.training_seconds for e in other.entries()]
    assert seconds == sorted(seconds)
    assert seconds[-1] < first + 60, "time is added to what was there when the lock was taken"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.5", None, True, 2**1024])
def test_a_metric_must_be_a_finite_number(tmp_path: Path, value: float) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock(), pytest.raises(CheckpointError, match="metrics must be finite numbers"):
        store.save(1, {}, {}, {"val_rmse": value})
    assert store.steps() == []
