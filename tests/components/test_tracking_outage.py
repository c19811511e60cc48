"""A server that is away, hangs, or comes and goes costs the training nothing, and no report."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow_server import MlflowServer, free_port, wait_until

from rowstep.components.tracking import Tracker, open_tracker, sync

mlflow = pytest.importorskip("mlflow")


def steps_of(uri: str, run_id: str | None, key: str = "batch/loss") -> list[int]:
    """Return the step of every stored row of a metric."""
    return sorted(m.step for m in mlflow.MlflowClient(uri).get_metric_history(run_id, key))


@pytest.fixture
def problems() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, mlflow_template_db: Path) -> str:
    shutil.copy(mlflow_template_db, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def begin(uri: str, tmp_path: Path, problems: list[str]) -> Tracker:
    training = open_tracker(
        uri, "ratings", "first", "key-1", tmp_path / "spool", on_problem=problems.append
    )
    training.start({"opt.class": "LazyAdam"}, {})
    return training


def report_steps(training: Tracker, steps: range) -> None:
    for step in steps:
        training.log_metrics(step, {"batch/loss": 1.0 / step})


def test_an_absent_server_costs_neither_the_training_nor_a_report(
    tmp_path: Path, store: str, problems: list[str]
) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    training = begin(uri, tmp_path, problems)
    report_steps(training, range(1, 101))
    began = time.monotonic()
    report = training.close("FINISHED", timeout_seconds=1)
    assert time.monotonic() - began < 5
    assert (report.run_id, report.link) == (None, None)
    assert (report.num_sent, report.num_unsent) == (0, 102)
    assert f"They wait in {tmp_path / 'spool'}" in report.problem
    assert "rowstep sync" in report.problem
    assert len(problems) <= 1  # none when the time was over before the first attempt failed

    # The reports are whole: another store gets every one of them.
    training = begin(store, tmp_path, problems)
    later = training.close("FINISHED")
    assert later.num_unsent == 0
    assert steps_of(store, later.run_id) == [*range(1, 101)]


def test_an_absent_server_is_told_once_and_names_the_folder(
    tmp_path: Path, problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    training = begin(f"http://127.0.0.1:{free_port()}", tmp_path, problems)
    wait_until(lambda: len(problems) == 1)
    report_steps(training, range(1, 11))
    began = time.monotonic()
    report = training.close("KILLED", timeout_seconds=60)
    assert time.monotonic() - began < 30  # a few attempts are enough at the end
    assert report.num_unsent == 12
    assert len(problems) == 1
    assert "must be reachable" in problems[0]
    assert str(tmp_path / "spool") in problems[0]


@contextmanager
def hanging_server() -> Iterator[int]:
    """Accept connections and never answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    taken.append(listener.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        for connection in taken:
            connection.close()


def test_a_hanging_server_does_not_hold_up_the_end(tmp_path: Path, problems: list[str]) -> None:
    with hanging_server() as port:
        training = begin(f"http://127.0.0.1:{port}", tmp_path, problems)
        report_steps(training, range(1, 11))
        time.sleep(0.5)
        began = time.monotonic()
        report = training.close("FINISHED", timeout_seconds=1.5)
        assert 1 < time.monotonic() - began < 5
    assert report.num_unsent == 12
    assert "They wait in" in report.problem


def test_an_accepted_request_whose_acknowledgement_was_lost_gives_no_second_point(
    tmp_path: Path, store: str, problems: list[str]
) -> None:
    training = begin(store, tmp_path, problems)
    for step in range(1, 21):
        training.log_metrics(step, {f"opt/m_rms/{n}": float(step) for n in range(150)})
    report = training.close("KILLED")
    ack = tmp_path / "spool" / "ack.json"
    text = ack.read_text()
    offset = int(text.split('"offset": ')[1].split(",")[0])
    ack.write_text(text.replace(f'"offset": {offset}', '"offset": 0'))
    replayed = sync(tmp_path / "spool")
    assert replayed.run_id == report.run_id
    assert replayed.num_sent == 22
    for n in (0, 149):
        assert steps_of(store, report.run_id, f"opt/m_rms/{n}") == [*range(1, 21)]


# --- a real server ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_comes_late_dies_and_comes_back_gets_every_report_once(
    tmp_path: Path, store: str, problems: list[str]
) -> None:
    server = MlflowServer(tmp_path)
    training = begin(server.uri, tmp_path, problems)
    training.log_text("optimizer_config.json", "{}")
    report_steps(training, range(1, 101))
    wait_until(lambda: len(problems) == 1)
    with server.running():
        wait_until(lambda: training.run_id is not None)
        report_steps(training, range(101, 501))
        wait_until(lambda: len(steps_of(store, training.run_id)) > 100)
    report_steps(training, range(501, 1001))
    began = time.monotonic()
    report = training.close("FINISHED", timeout_seconds=3)
    assert time.monotonic() - began < 10
    assert report.num_unsent > 500
    assert len(problems) == 1

    with server.running() as uri:
        replayed = sync(tmp_path / "spool")
        run = mlflow.MlflowClient(uri).get_run(report.run_id)
        files = [file.path for file in mlflow.MlflowClient(uri).list_artifacts(report.run_id)]
    assert replayed.num_unsent == 0
    assert steps_of(store, report.run_id) == [*range(1, 1001)]
    assert run.info.status == "FINISHED"
    assert run.info.start_time < run.info.end_time
    assert files == ["optimizer_config.json"]
    assert replayed.link == f"{uri}/#/experiments/{run.info.experiment_id}/runs/{report.run_id}"
