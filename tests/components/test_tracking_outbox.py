"""What reaches MLflow, what is kept when nothing can, and what is never written down."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_store import rows_in

from rowstep import RowstepError
from rowstep.components.tracking import (
    Tracker,
    TrackingError,
    check_uri,
    open_tracker,
    redact_uri,
    sync,
)

SECRET = "hunter2"


class Store:
    """One SQLite store, read behind the back of MLflow, and trackers that write to it."""

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder, self.template = folder, template
        self.database = folder / "store" / "mlflow.db"
        self.uri = f"sqlite:///{self.database}"
        self.spool = folder / "spool"
        self.problems: list[str] = []

    def bring_up(self) -> Store:
        self.database.parent.mkdir()
        shutil.copy(self.template, self.database)
        return self

    def tracker(self, **changes: Any) -> Tracker:
        given = {"uri": self.uri, "experiment": "movies", "run_name": "one", "run_key": "key-1"}
        return open_tracker(
            **{**given, **changes},
            spool_dir=self.spool,
            on_problem=self.problems.append,
            artifact_root=self.folder / "artifacts",
        )

    def rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        return rows_in(self.database, query, *arguments)

    def points(self, run_id: str | None) -> list[tuple[str, int, float]]:
        found = self.rows("select key, step, value from metrics where run_uuid = ?", run_id)
        return sorted(found)

    def pairs(self, table: str, run_id: str | None) -> dict[str, str]:
        return dict(self.rows(f"select key, value from {table} where run_uuid = ?", run_id))

    def status(self, run_id: str | None) -> str:
        return self.rows("select status from runs where run_uuid = ?", run_id)[0][0]


@pytest.fixture
def store(tmp_path: Path, mlflow_template_db: Path) -> Store:
    return Store(tmp_path, mlflow_template_db).bring_up()


def log_steps(tracker: Tracker, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        tracker.log_metrics(step, {"batch/loss": scale / step, "opt/iterations": float(step)})


def expected_points(last: int, scale: float = 1.0) -> list[tuple[str, int, float]]:
    losses = [("batch/loss", step, scale / step) for step in range(1, last + 1)]
    return losses + [("opt/iterations", step, float(step)) for step in range(1, last + 1)]


# --- a training -----------------------------------------------------------------------------


def test_a_run_holds_all_that_was_reported(store: Store) -> None:
    tracker = store.tracker()
    tracker.start({"opt.beta_1": 0.9, "opt.class": "LazyAdam"}, {"tfx.node_id": "RecTrainer"})
    log_steps(tracker, range(1, 31))
    tracker.log_text("optimizer_config.json", '{"class_name": "LazyAdam"}')
    tracker.set_tags({"note": "b"})
    report = tracker.close("FINISHED")
    run = report.run_id
    assert (report.num_unsent, report.problem, store.problems) == (0, "", [])
    assert store.points(run) == expected_points(30)
    assert store.pairs("params", run) == {"opt.beta_1": "0.9", "opt.class": "LazyAdam"}
    tags = store.pairs("tags", run)
    assert (tags["tfx.node_id"], tags["note"]) == ("RecTrainer", "b")
    assert (tags["rowstep.run_key"], tags["mlflow.runName"]) == ("key-1", "one")
    assert store.status(run) == "FINISHED"
    (text,) = (store.folder / "artifacts").rglob("optimizer_config.json")
    assert text.read_text() == '{"class_name": "LazyAdam"}'
    assert report.link is not None
    assert run in report.link


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_ends_with_the_status_that_was_given(store: Store, status: Any) -> None:
    tracker = store.tracker()
    tracker.start({}, {})
    report = tracker.close(status)
    assert store.status(report.run_id) == status


def test_times_are_those_of_the_report_and_not_of_the_sending(store: Store) -> None:
    store.database.rename(store.folder / "away.db")
    store.database.parent.rmdir()
    store.database.parent.write_text("in the way")
    tracker = store.tracker()
    tracker.start({}, {})
    log_steps(tracker, range(1, 4))
    assert tracker.close("FINISHED", timeout_seconds=1).num_unsent > 0
    told = [json.loads(line) for line in (store.spool / "journal.jsonl").read_text().splitlines()]
    store.database.parent.unlink()
    store.database.parent.mkdir()
    (store.folder / "away.db").rename(store.database)
    report = sync(store.spool)
    sent = store.rows("select distinct timestamp from metrics order by 1")
    assert [t for (t,) in sent] == sorted({r["ts_ms"] for r in told if r["kind"] == "metrics"})
    (begin,) = store.rows("select start_time, end_time from runs")
    assert begin == (told[0]["ts_ms"], told[-1]["ts_ms"])
    assert report.num_unsent == 0


def test_a_number_that_is_not_finite_is_counted_in_its_place(store: Store) -> None:
    tracker = store.tracker()
    tracker.start({}, {})
    for step, loss in enumerate([1.0, math.nan, math.inf, 2.0], start=1):
        tracker.log_metrics(step, {"loss": loss, "good": 1.0})
    run = tracker.close("FINISHED").run_id
    assert store.points(run) == sorted(
        [("good", step, 1.0) for step in (1, 2, 3, 4)]
        + [("loss", 1, 1.0), ("loss", 4, 2.0), ("nonfinite/loss", 2, 1.0)]
        + [("nonfinite/loss", 3, 2.0)]
    )


def test_names_that_mlflow_refuses_are_made_to_fit_and_lose_nothing(store: Store) -> None:
    names = ["a[0]", "m@x", "a//b", "/lead", "../up", "\u00fc", "x" * 300, "", "ok/name-1.b c"]
    tracker = store.tracker()
    tracker.start(dict.fromkeys(names, 1), dict.fromkeys(names, "v"))
    for name in names:
        tracker.log_metrics(1, {name: 1.0})
    report = tracker.close("FINISHED")
    assert report.num_unsent == 0
    assert store.problems == []
    assert not (store.spool / "rejected.jsonl").exists()
    assert "ok/name-1.b c" in {key for key, _, _ in store.points(report.run_id)}


def test_thousands_of_metrics_of_one_step_arrive(store: Store) -> None:
    metrics = {f"score/{n:04d}": float(n) for n in range(2500)}
    tracker = store.tracker()
    tracker.start({}, {})
    tracker.log_metrics(1, metrics)
    run = tracker.close("FINISHED", timeout_seconds=60).run_id
    assert store.points(run) == [(key, 1, value) for key, value in metrics.items()]


def test_a_value_that_is_no_number_costs_its_report_and_not_the_training(store: Store) -> None:
    tracker = store.tracker()
    tracker.start({}, {})
    bad: Any = {"loss": "high"}
    tracker.log_metrics(1, bad)
    tracker.log_metrics(2, {"loss": np.float32(0.5)})
    report = tracker.close("FINISHED")
    assert store.points(report.run_id) == [("loss", 2, 0.5)]
    assert report.num_unsent == 1
    assert len(store.problems) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.001, "0.001"),
        (np.float64(0.1), "0.1"),
        (1e-7, "1e-07"),
        (3, "3"),
        (True, "True"),
        (None, "None"),
        ([0.5, "a"], '[0.5, "a"]'),
        ("short", "short"),
    ],
    ids=repr,
)
def test_a_param_is_written_with_the_shortest_digits(store: Store, value: Any, text: str) -> None:
    tracker = store.tracker()
    tracker.start({"p": value}, {})
    run = tracker.close("FINISHED").run_id
    assert store.pairs("params", run) == {"p": text}


def test_a_param_that_is_too_long_is_named_by_its_hash_and_not_cut(store: Store) -> None:
    tracker = store.tracker()
    tracker.start({"long": "x" * 7000}, {})
    run = tracker.close("FINISHED").run_id
    assert store.pairs("params", run)["long"].startswith("sha256:")


# --- the same training again ----------------------------------------------------------------


def test_a_resumed_training_has_one_point_per_step(store: Store) -> None:
    first = store.tracker()
    first.start({}, {})
    log_steps(first, range(1, 36))
    one = first.close("KILLED")
    second = store.tracker()
    assert second.run_id == one.run_id
    second.start({}, {})
    log_steps(second, range(21, 51))
    two = second.close("FINISHED")
    assert two.run_id == one.run_id
    assert store.points(one.run_id) == expected_points(50)
    assert store.status(one.run_id) == "FINISHED"
    assert store.pairs("tags", one.run_id)["resume.count"] == "1"


def test_a_resumed_run_is_running_again_until_it_ends(store: Store) -> None:
    first = store.tracker()
    first.start({}, {})
    run = first.close("FAILED").run_id
    second = store.tracker()
    second.start({}, {"seen": "yes"})
    second.log_text("a.txt", "a")
    seen = []

    def look() -> bool:
        seen.append(store.status(run))
        return "RUNNING" in seen

    wait_until(look)
    second.close("FINISHED")
    assert store.status(run) == "FINISHED"


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_a_changed_param_becomes_a_tag_and_new_ones_are_added(store: Store) -> None:
    first = store.tracker()
    first.start({"lr": 0.1, "same": 1}, {})
    first.close("KILLED")
    second = store.tracker()
    second.start({"lr": 0.2, "same": 1, "new": 2}, {})
    run = second.close("FINISHED").run_id
    assert store.pairs("params", run) == {"lr": "0.1", "same": "1", "new": "2"}
    drift = json.loads(store.pairs("tags", run)["resume.1.param_drift"])
    assert drift == {"lr": ["0.1", "0.2"]}


@pytest.mark.parametrize("left_of_ack", [None, b"", b"{", b"[1]"], ids=repr)
def test_a_lost_note_of_what_was_sent_gives_no_second_points(
    store: Store, left_of_ack: bytes | None
) -> None:
    first = store.tracker()
    first.start({}, {})
    log_steps(first, range(1, 21))
    run = first.close("KILLED").run_id
    (store.spool / "ack.json").unlink()
    if left_of_ack is not None:
        (store.spool / "ack.json").write_bytes(left_of_ack)
    second = store.tracker()
    second.start({}, {})
    log_steps(second, range(11, 31))
    assert second.close("FINISHED").run_id == run
    assert store.points(run) == expected_points(30)


def test_a_deleted_run_is_replaced_by_one_with_the_whole_history(store: Store) -> None:
    from mlflow import MlflowClient

    first = store.tracker()
    first.start({"lr": 0.1}, {})
    log_steps(first, range(1, 11))
    gone = first.close("KILLED").run_id
    MlflowClient(store.uri).delete_run(gone)
    second = store.tracker()
    second.start({"lr": 0.1}, {})
    log_steps(second, range(11, 21))
    run = second.close("FINISHED").run_id
    assert run != gone
    assert store.points(run) == expected_points(20)
    assert store.pairs("params", run) == {"lr": "0.1"}
    assert store.pairs("tags", run)["resume.replaced_run_id"] == gone


@pytest.mark.parametrize("torn", [b'{"kind": "metr', b"\x00\xff", b'{"kind": "metrics"}'])
def test_a_half_written_last_line_is_cut_off(store: Store, torn: bytes) -> None:
    first = store.tracker()
    first.start({}, {})
    log_steps(first, range(1, 6))
    first.close("KILLED")
    with open(store.spool / "journal.jsonl", "ab") as file:
        file.write(torn)
    second = store.tracker()
    second.start({}, {})
    log_steps(second, range(6, 11))
    run = second.close("FINISHED").run_id
    assert store.points(run) == expected_points(10)
    assert torn not in (store.spool / "journal.jsonl").read_bytes().splitlines()


def test_another_training_gets_a_run_of_its_own(store: Store) -> None:
    runs = []
    for key in ("key-1", "key-2"):
        store.spool = store.folder / key
        tracker = store.tracker(run_key=key)
        tracker.start({}, {})
        log_steps(tracker, range(1, 4))
        runs.append(tracker.close("FINISHED").run_id)
    assert None not in runs
    assert runs[0] != runs[1]
    assert store.points(runs[0]) == store.points(runs[1]) == expected_points(3)


# --- trouble --------------------------------------------------------------------------------


def test_an_absent_store_costs_nothing_but_the_sending(
    tmp_path: Path, mlflow_template_db: Path
) -> None:
    store = Store(tmp_path, mlflow_template_db)
    store.database.parent.write_text("in the way")
    tracker = store.tracker()
    tracker.start({"lr": 0.1}, {})
    log_steps(tracker, range(1, 101))
    report = tracker.close("FINISHED", timeout_seconds=1)
    assert report.run_id is None
    assert report.num_unsent == 102  # the start, the steps, the end
    assert "rowstep sync" in report.problem
    assert len(store.problems) == 1
    assert "The training goes on" in store.problems[0]

    store.database.parent.unlink()
    store.bring_up()
    report = sync(store.spool)
    assert (report.num_sent, report.num_unsent, report.problem) == (102, 0, "")
    assert store.points(report.run_id) == expected_points(100)
    assert store.status(report.run_id) == "FINISHED"
    assert sync(store.spool).num_sent == 0


def test_what_one_attempt_could_not_send_the_next_one_sends(
    tmp_path: Path, mlflow_template_db: Path
) -> None:
    store = Store(tmp_path, mlflow_template_db)
    store.database.parent.write_text("in the way")
    tracker = store.tracker()
    tracker.start({}, {})
    log_steps(tracker, range(1, 41))
    tracker.close("KILLED", timeout_seconds=1)
    store.database.parent.unlink()
    store.bring_up()
    tracker = store.tracker()
    tracker.start({}, {})
    log_steps(tracker, range(31, 61))
    report = tracker.close("FINISHED")
    assert report.num_unsent == 0
    assert store.points(report.run_id) == expected_points(60)


def test_a_second_writer_of_one_folder_is_told_and_its_training_goes_on(store: Store) -> None:
    first = store.tracker()
    first.start({}, {})
    second = store.tracker()
    second.start({}, {})
    second.log_metrics(1, {"loss": 1.0})
    second.set_tags({"a": "b"})
    second.close("FINISHED")
    assert any("nothing is logged to MLflow" in text for text in store.problems)
    assert any(f"process {os.getpid()} on" in text for text in store.problems)
    log_steps(first, range(1, 4))
    report = first.close("FINISHED")
    assert store.points(report.run_id) == expected_points(3)


def test_a_broken_place_for_artifacts_does_not_hold_up_the_metrics(store: Store) -> None:
    (store.folder / "artifacts").write_text("in the way")
    tracker = store.tracker()
    tracker.start({}, {})
    tracker.log_text("a.txt", "a")
    log_steps(tracker, range(1, 4))
    report = tracker.close("FINISHED", timeout_seconds=20)
    assert store.points(report.run_id) == expected_points(3)
    (rejected,) = (store.spool / "rejected.jsonl").read_text().splitlines()
    assert json.loads(rejected)["row"]["name"] == "a.txt"
    assert any("put aside" in text for text in store.problems)


def test_whoever_listens_to_problems_may_fail(tmp_path: Path, mlflow_template_db: Path) -> None:
    store = Store(tmp_path, mlflow_template_db)
    store.database.parent.write_text("in the way")

    def fail(text: str) -> None:
        raise RuntimeError(text)

    tracker = open_tracker(store.uri, "e", "r", "k", store.spool, on_problem=fail)
    tracker.start({}, {})
    log_steps(tracker, range(1, 4))
    assert tracker.close("FINISHED", timeout_seconds=1).num_unsent == 5


@pytest.mark.parametrize("case", ["disabled", "no uri", "no mlflow"])
def test_without_mlflow_everything_can_be_called_and_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    problems: list[str] = []
    if case == "no mlflow":
        monkeypatch.setitem(sys.modules, "mlflow", None)
    uri = None if case == "no uri" else f"sqlite:///{tmp_path}/m.db"
    enabled = case != "disabled"
    spool = tmp_path / "spool"
    tracker = open_tracker(uri, "e", "r", "k", spool, enabled=enabled, on_problem=problems.append)
    tracker.start({"a": 1}, {"b": "c"})
    tracker.log_metrics(1, {"loss": 1.0})
    tracker.log_text("a", "b")
    tracker.set_tags({"a": "b"})
    report = tracker.close("FINISHED")
    assert (report.run_id, report.num_unsent, tracker.run_id) == (None, 0, None)
    assert len(problems) == (case == "no mlflow")
    assert list(tmp_path.iterdir()) == []


# --- secrets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (f"http://user:{SECRET}@host:5000/p", "http://host:5000/p"),
        (f"https://{SECRET}@host", "https://host"),
        (f"http://user:a/{SECRET}@host/p", "http://host/p"),
        (f"http://user:a#?{SECRET}@host/p", "http://host/p"),
        (f"postgresql://u:{SECRET}@h/db", "postgresql://h/db"),
        (f"http://host/p?api_key={SECRET}#x", "http://host/p"),
    ],
)
def test_a_uri_with_credentials_is_refused_without_repeating_them(
    tmp_path: Path, uri: str, shown: str
) -> None:
    assert redact_uri(uri) == shown
    with pytest.raises(TrackingError, match="MLFLOW_TRACKING_USERNAME and") as caught:
        open_tracker(uri, "e", "r", "k", tmp_path / "spool", on_problem=print)
    assert SECRET not in str(caught.value)
    assert shown in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "uri",
    ["http://host:5000", "sqlite:////data/a@b/mlflow.db", "https://h/ml?x=1", "databricks", None],
)
def test_a_uri_without_credentials_is_taken(uri: str | None) -> None:
    check_uri(uri)


def test_a_local_path_is_shown_as_it_is() -> None:
    assert redact_uri("sqlite:////data/a@b/mlflow.db") == "sqlite:////data/a@b/mlflow.db"


def test_credentials_inside_values_are_not_written_down(store: Store) -> None:
    tracker = store.tracker()
    link = f"s3://user:{SECRET}@bucket/x"
    tracker.start({"source": link}, {"where": f"see {link} and {link}"})
    tracker.set_tags({"again": link})
    tracker.close("FINISHED")
    assert_no_secret(store)


def test_credentials_inside_lists_are_not_written_down(store: Store) -> None:
    tracker = store.tracker()
    tracker.start({"list": [f"s3://user:{SECRET}@bucket/x"]}, {})
    tracker.close("FINISHED")
    assert_no_secret(store)


def assert_no_secret(store: Store) -> None:
    for file in [*store.spool.iterdir(), store.database]:
        assert SECRET.encode() not in file.read_bytes(), file.name


def test_only_the_owner_may_read_the_reports(store: Store) -> None:
    store.spool.mkdir(mode=0o755)
    tracker = store.tracker()
    tracker.start({}, {})
    tracker.close("FINISHED")
    assert stat.S_IMODE(store.spool.stat().st_mode) == 0o700
    for name in ("journal.jsonl", "ack.json"):
        assert stat.S_IMODE((store.spool / name).stat().st_mode) == 0o600


def test_a_linked_folder_is_not_written_into(store: Store) -> None:
    elsewhere = store.folder / "elsewhere"
    elsewhere.mkdir()
    store.spool.symlink_to(elsewhere)
    tracker = store.tracker()
    tracker.start({}, {})
    tracker.close("FINISHED")
    assert list(elsewhere.iterdir()) == []
    assert "must not be a link" in store.problems[0]


def test_sync_of_a_folder_without_a_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"Got no journal\.jsonl"):
        sync(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tracking_errors_belong_to_the_family() -> None:
    assert issubclass(TrackingError, RowstepError)
    assert issubclass(TrackingError, RuntimeError)
