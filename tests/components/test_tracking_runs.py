"""Which MLflow run a training reports to, and what it does with reports that cannot be taken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rowstep.components.tracking import Tracker, TrackingError, open_tracker, sync
from rowstep.components.tracking.journal import Journal

mlflow = pytest.importorskip("mlflow")

OpenTracker = Callable[..., Tracker]


@pytest.fixture
def store(tmp_path: Path, mlflow_template_db: Path) -> str:
    """Return the URI of an SQLite store of this test's own."""
    shutil.copy(mlflow_template_db, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def problems() -> list[str]:
    return []


@pytest.fixture
def started(store: str, tmp_path: Path, problems: list[str]) -> OpenTracker:
    """Return a function that starts a training, or goes on with it."""

    def start(key: str = "key-1", uri: str = store, experiment: str = "ratings") -> Tracker:
        training = open_tracker(
            uri, experiment, "first", key, tmp_path / key, on_problem=problems.append
        )
        training.start({"opt.class": "LazyAdam"}, {})
        return training

    return start


def report_steps(training: Tracker, steps: range) -> None:
    for step in steps:
        training.log_metrics(step, {"batch/loss": 1.0 / step})


def steps_of(uri: str, run_id: str | None) -> list[int]:
    """Return the step of every stored row of the loss."""
    history = mlflow.MlflowClient(uri).get_metric_history(run_id, "batch/loss")
    return sorted(metric.step for metric in history)


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_deleted_during_the_training_is_replaced_by_one_with_everything(
    started: OpenTracker, store: str
) -> None:
    training = started()
    report_steps(training, range(1, 6))
    wait_until(lambda: training.run_id is not None)
    wait_until(lambda: len(steps_of(store, training.run_id)) == 5)
    deleted = training.run_id
    mlflow.MlflowClient(store).delete_run(deleted)
    report_steps(training, range(6, 7))  # alone in its request, as a refused report would be
    wait_until(lambda: training.run_id != deleted)
    report_steps(training, range(7, 11))
    report = training.close("FINISHED")
    run = mlflow.MlflowClient(store).get_run(report.run_id)
    assert report.num_unsent == 0
    assert run.data.tags["resume.replaced_run_id"] == deleted
    assert run.info.status == "FINISHED"
    assert steps_of(store, report.run_id) == [*range(1, 11)]


def test_without_its_folder_a_training_finds_its_run_and_repeats_no_point(
    started: OpenTracker, store: str, tmp_path: Path
) -> None:
    training = started()
    report_steps(training, range(1, 11))
    first = training.close("FINISHED")
    shutil.rmtree(tmp_path / "key-1")
    training = started()
    report_steps(training, range(1, 16))
    second = training.close("FINISHED")
    assert second.run_id == first.run_id
    assert steps_of(store, first.run_id) == [*range(1, 16)]
    assert mlflow.MlflowClient(store).get_run(first.run_id).data.tags["resume.count"] == "1"


@pytest.mark.parametrize("moves_to", ["another store", "another experiment"])
def test_who_changes_the_place_of_a_training_finds_its_whole_history_there(
    started: OpenTracker, store: str, tmp_path: Path, mlflow_template_db: Path, moves_to: str
) -> None:
    training = started()
    report_steps(training, range(1, 11))
    first = training.close("KILLED")
    if moves_to == "another store":
        shutil.copy(mlflow_template_db, tmp_path / "other.db")
        place = {"uri": f"sqlite:///{tmp_path / 'other.db'}"}
    else:
        place = {"experiment": "other"}
    training = started(**place)
    report_steps(training, range(6, 21))
    second = training.close("FINISHED")
    assert second.run_id != first.run_id
    assert steps_of(place.get("uri", store), second.run_id) == [*range(1, 21)]
    assert steps_of(store, first.run_id) == [*range(1, 11)]

    # Back again: the first run goes on, with what it lacks.
    training = started()
    assert training.close("FINISHED").run_id == first.run_id
    assert steps_of(store, first.run_id) == [*range(1, 21)]


def test_a_deleted_experiment_is_named_and_its_reports_wait(
    started: OpenTracker, store: str, problems: list[str]
) -> None:
    client = mlflow.MlflowClient(store)
    client.delete_experiment(client.create_experiment("ratings"))
    training = started()
    report_steps(training, range(1, 4))
    report = training.close("FINISHED")
    assert report.num_unsent == 5
    assert len(problems) == 1
    assert "mlflow experiments restore -x" in problems[0]
    assert client.search_runs(["0", "1"]) == []


def test_two_trainings_in_one_process_report_to_their_own_runs(
    started: OpenTracker, store: str
) -> None:
    one, two = started("one"), started("two")
    for step in range(1, 21):
        one.log_metrics(step, {"batch/loss": 1.0})
        two.log_metrics(step + 100, {"batch/loss": 2.0})
    first, second = one.close("FINISHED"), two.close("FINISHED")
    assert steps_of(store, first.run_id) == [*range(1, 21)]
    assert steps_of(store, second.run_id) == [*range(101, 121)]


def test_closing_without_a_start_reports_the_earlier_run_and_changes_nothing(
    started: OpenTracker, store: str, tmp_path: Path
) -> None:
    first = started().close("FINISHED")
    for folder, run_id, link in (
        (tmp_path / "key-1", first.run_id, first.link),
        (tmp_path / "nothing", None, None),
    ):
        training = open_tracker(store, "ratings", "first", "key-1", folder, on_problem=print)
        assert training.run_id == run_id
        report = training.close("FAILED")
        assert (report.run_id, report.link) == (run_id, link)
    assert mlflow.MlflowClient(store).get_run(first.run_id).info.status == "FINISHED"
    assert not (tmp_path / "nothing").exists()


def test_a_report_that_mlflow_refuses_is_put_aside_and_the_rest_arrives(
    started: OpenTracker, store: str, tmp_path: Path, problems: list[str]
) -> None:
    training = started()
    report_steps(training, range(1, 4))
    training.close("KILLED")
    journal = Journal(tmp_path / "key-1")
    for step in (4, 5, 6, 7):  # as left by a rowstep that knew other names
        key = "batch/loss" if step % 2 else "batch[loss]"
        journal.append("metrics", step=step, metrics={key: 1.0 / step})
    journal.append("fortune", told="soon")
    journal.close()
    report = started().close("FINISHED")

    rejected = (tmp_path / "key-1" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"].get("step") for line in rejected] == [4, 6, None]
    assert steps_of(store, report.run_id) == [1, 2, 3, 5, 7]
    assert mlflow.MlflowClient(store).get_run(report.run_id).info.status == "FINISHED"
    assert len(problems) == 1
    assert "must accept every report" in problems[0]


def test_a_running_training_is_not_replayed_by_somebody_else(
    started: OpenTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowstep.components.tracking.journal._LOCK_WAIT_SECONDS", 0.0)
    training = started()
    with pytest.raises(TrackingError, match="only one process may send these reports"):
        sync(tmp_path / "key-1")
    assert training.close("FINISHED").num_unsent == 0
    assert sync(tmp_path / "key-1").num_unsent == 0


FRESH = """
import sys
from pathlib import Path
from rowstep.components.tracking import open_tracker

assert "mlflow" not in sys.modules
folder = Path(sys.argv[1])
training = open_tracker(
    f"sqlite:///{folder / 'new' / 'mlflow.db'}", "e", "r", "k", folder / "spool", on_problem=print
)
training.start({"opt.class": "LAMB"}, {})
training.log_metrics(1, {"batch/loss": 1.0})
report = training.close("FINISHED", timeout_seconds=2)
assert report.num_unsent == 0, report
"""


def test_a_new_sqlite_store_is_waited_for_and_made_in_silence(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)], capture_output=True, text=True, check=False
    )
    # Old versions of MLflow tell of single steps, in loggers of their own that cannot be hushed.
    told = [line for line in result.stderr.splitlines() if "_py] " not in line]
    assert (result.returncode, result.stdout, told) == (0, "", [])
