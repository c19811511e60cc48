"""A real server behind a proxy that refuses, hangs, answers errors or swallows what it was told.

No call of a training may wait: while a proxy hangs, nobody but the test itself can switch it back,
so a call that waited for MLflow would never return.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow_server import MlflowServer, wait_until
from switchable_proxy import SwitchableProxy

from rowstep.components.tracking import (
    CloseReport,
    DatasetLink,
    ModelLink,
    Tracker,
    open_tracker,
    patience,
    sync,
)

pytest.importorskip("mlflow")

OUTAGES = ("refuse", "hang", "swallow", "500", "429", "403")


@dataclass(frozen=True)
class Bars:
    edges: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    counts: tuple[int, ...] = (1, 5, 2)
    num_zero: int = 2
    num_nonfinite: int = 0
    unit: str = "gradient"


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, mlflow_template_db: Path
) -> Iterator[MlflowServer]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(mlflow_template_db, folder / "mlflow.db")
    found = MlflowServer(folder)
    try:
        yield found.start()
    finally:
        found.kill()


class Training:
    """One training that reports through a proxy of its own."""

    def __init__(self, server: MlflowServer, spool: Path, key: str) -> None:
        self.server, self.spool, self.key = server, spool, key
        self.proxy = SwitchableProxy(server.port)
        self.problems: list[str] = []
        self.tracker: Tracker = self.open()
        self.num_steps = 0

    def open(self, **changes: Any) -> Tracker:
        given = {"uri": self.proxy.uri, "experiment": "ratings", "run_name": "first"}
        return open_tracker(
            **{**given, **changes},
            run_key=self.key,
            spool_dir=self.spool,
            on_problem=self.problems.append,
        )

    def start(self, **params: Any) -> None:
        self.tracker.start({"opt.class": "LazyAdam", **params}, {"where": "here"})

    def report(self, num_steps: int) -> None:
        """Report every kind of thing, as a training does."""
        first = self.num_steps + 1
        self.num_steps += num_steps
        for step in range(first, self.num_steps + 1):
            self.tracker.log_metrics(step, {"batch/loss": 1.0 / step, "opt/iterations": step})
        self.tracker.log_histogram("opt/hist/table.velocity", self.num_steps, Bars())
        self.tracker.log_text("optimizer_config.json", "{}")
        self.tracker.log_file(f"optimizer/slots-{self.num_steps:09d}.parquet", b"PAR1" * 100)
        self.tracker.log_inputs([DatasetLink("Examples:train", "d" * 40, {"uri": "u"}, "train")])

    def end(self, timeout_seconds: float = 60) -> CloseReport:
        self.tracker.log_model_link(ModelLink("movies", "/models/1", step=self.num_steps))
        return self.tracker.close("FINISHED", timeout_seconds)

    def is_known(self) -> bool:
        return self.tracker.run_id is not None

    def has_failed(self) -> bool:
        return len(self.problems) > 0

    def assert_whole(self, report: CloseReport, reported_at: list[int]) -> None:
        """Count what MLflow has: each thing once, behind the back of the server and through it."""
        from mlflow import MlflowClient

        assert (report.num_unsent, report.num_dropped) == (0, 0), report.problem
        assert not (self.spool / "rejected.jsonl").exists()
        run_id = str(report.run_id)
        client = MlflowClient(self.server.uri)
        for key in ("batch/loss", "opt/iterations"):
            history = client.get_metric_history(run_id, key)
            assert sorted(m.step for m in history) == [*range(1, self.num_steps + 1)]
        run = client.get_run(run_id)
        assert run.info.status == "FINISHED"
        assert run.data.params["opt.class"] == "LazyAdam"
        assert self.paths(client, run_id, "optimizer") == [
            f"optimizer/slots-{step:09d}.parquet" for step in reported_at
        ]
        assert "optimizer_config.json" in self.paths(client, run_id)
        pictures = self.paths(client, run_id, "images")
        assert [name.rpartition(".")[2] for name in pictures].count("png") == len(reported_at)
        assert len(pictures) == 2 * len(reported_at), pictures  # with a small copy of each
        assert len(run.inputs.dataset_inputs) == 1
        assert len(run.outputs.model_outputs) == 1
        models = client.search_logged_models([run.info.experiment_id])
        assert [str(m.status) for m in models if m.source_run_id == run_id] == ["READY"]
        found = client.search_runs(
            [run.info.experiment_id], f"tags.`rowstep.run_key` = '{self.key}'"
        )
        assert [one.info.run_id for one in found] == [run_id]

    @staticmethod
    def paths(client: Any, run_id: str, folder: str | None = None) -> list[str]:
        return sorted(file.path for file in client.list_artifacts(run_id, folder))


@pytest.fixture
def training(
    server: MlflowServer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Training]:
    # MLflow's own attempts last minutes; the outbox makes its own.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    found = Training(server, tmp_path / "spool", request.node.name)
    # Before 3.7 MLflow sends files to the process's URI, and this process has one for each test.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", found.proxy.uri)
    yield found
    found.proxy.close()


# --- a server that works ------------------------------------------------------------------------


def test_everything_that_is_reported_is_there_once(training: Training) -> None:
    training.start()
    training.report(20)
    training.report(20)
    training.assert_whole(training.end(), [20, 40])
    assert training.problems == []


# --- outages ------------------------------------------------------------------------------------


def outage_in_the_middle(training: Training, mode: str) -> None:
    training.start()
    training.report(20)
    wait_until(training.is_known)
    training.proxy.switch(mode)
    training.report(20)
    wait_until(training.has_failed)
    training.report(20)
    training.proxy.switch("up")
    training.report(20)
    training.assert_whole(training.end(), [20, 40, 60, 80])
    assert len(training.problems) == 1
    assert "must be reachable" in training.problems[0]


def outage_from_the_start(training: Training, mode: str) -> None:
    training.proxy.switch(mode)
    training.start()
    training.report(20)
    wait_until(training.has_failed)
    training.proxy.switch("up")
    training.report(20)
    training.assert_whole(training.end(), [20, 40])


def outage_until_after_the_end(training: Training, mode: str) -> None:
    training.start()
    training.report(20)
    wait_until(training.is_known)
    training.proxy.switch(mode)
    training.report(20)
    report = training.end(timeout_seconds=1.5)
    assert report.num_unsent > 0
    assert "rowstep sync" in report.problem
    training.proxy.switch("up")
    training.assert_whole(sync(training.spool), [20, 40])


CASES = {
    "middle": outage_in_the_middle,
    "start": outage_from_the_start,
    "end": outage_until_after_the_end,
}
FAST = [("middle", "refuse"), ("middle", "swallow"), ("start", "500"), ("end", "hang")]
SLOW = [(when, mode) for when in CASES for mode in OUTAGES if (when, mode) not in FAST]


@pytest.mark.parametrize(
    ("when", "mode"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_an_outage_costs_no_report_and_doubles_none(
    training: Training, when: str, mode: str
) -> None:
    CASES[when](training, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", OUTAGES)
def test_mlflows_own_repetitions_double_nothing(
    training: Training, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    outage_from_the_start(training, mode)


@pytest.mark.slow
def test_a_server_killed_and_started_again_gets_everything_once(
    training: Training, server: MlflowServer
) -> None:
    training.start()
    training.report(20)
    wait_until(training.is_known)
    server.kill()
    training.report(20)
    wait_until(training.has_failed)
    server.start()
    training.assert_whole(training.end(), [20, 40])


@pytest.mark.slow
def test_a_server_that_comes_and_goes_all_the_time_gets_everything_once(
    training: Training,
) -> None:
    training.start()
    at = []
    for mode in ("500", "up", "swallow", "up", "refuse", "up", "hang", "swallow", "429", "up"):
        training.proxy.switch(mode)
        training.report(10)
        at.append(training.num_steps)
        time.sleep(1.5)  # long enough for a request or two
    training.assert_whole(training.end(), at)


def test_a_server_that_refuses_a_password_for_a_while_gets_everything_and_repeats_it_nowhere(
    training: Training, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, "hunter2-and-more")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "someone")
    training.proxy.switch("401")
    training.start(note="it is hunter2-and-more")
    training.report(20)
    wait_until(training.has_failed)
    training.proxy.switch("up")
    training.assert_whole(training.end(), [20])
    assert "MLFLOW_TRACKING_PASSWORD" in training.problems[0]  # what to set
    told = capfd.readouterr()
    assert "hunter2" not in f"{told.out}{told.err}{training.problems}"
    folders = (training.spool, training.server.folder)
    for file in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        assert b"hunter2" not in file.read_bytes(), file


# --- one report that the server cannot take -----------------------------------------------------


def test_a_report_that_fails_for_ever_is_put_aside_and_the_others_arrive(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_MIN_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    training.proxy.bad_words[b"poison"] = "500"
    training.start()
    training.tracker.log_metrics(1, {"loss": 1.0})
    training.tracker.log_metrics(2, {"poison": 1.0})
    training.tracker.log_metrics(3, {"loss": 3.0})
    wait_until(lambda: (training.spool / "rejected.jsonl").exists())
    training.tracker.log_metrics(4, {"loss": 4.0})
    report = training.tracker.close("FINISHED", 60)
    (line,) = (training.spool / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["row"]["metrics"] == {"poison": 1.0}
    assert (report.num_unsent, report.num_rejected) == (0, 1)
    steps = training.server.rows(
        "select step from metrics where run_uuid = ? order by step", report.run_id
    )
    assert steps == [(1,), (3,), (4,)]
    assert any("put aside" in text for text in training.problems)


def test_a_training_that_goes_on_reporting_does_not_keep_a_bad_report_alive(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_MIN_SECONDS", 0.5)
    monkeypatch.setattr("rowstep.components.tracking.publisher._LAST_RETRY_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    training.proxy.bad_words[b"poison"] = "500"
    training.start()
    training.tracker.log_metrics(1, {"poison": 1.0})
    steps = iter(range(2, 10_000))

    def is_put_aside() -> bool:
        training.tracker.log_metrics(next(steps), {"loss": 1.0})
        return (training.spool / "rejected.jsonl").exists()

    wait_until(is_put_aside, seconds=40)  # before a request is full and takes no more
    last = next(steps)
    report = training.tracker.close("FINISHED", 60)
    assert (report.num_unsent, report.num_rejected) == (0, 1)
    stored = training.server.rows(
        "select step from metrics where run_uuid = ? order by step", report.run_id
    )
    assert stored == [(step,) for step in range(2, last)]


def test_a_server_in_trouble_as_a_whole_costs_no_report_however_long(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_MIN_SECONDS", 0.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("rowstep.components.tracking.publisher._LAST_RETRY_SECONDS", 0.5)
    training.start()
    wait_until(training.is_known)
    # Reading works, writing does not: a database whose disk is full.
    training.proxy.bad_words[b"runs/log-batch"] = "500"
    training.proxy.bad_words[b"runs/set-tag"] = "500"
    training.report(20)
    wait_until(lambda: training.proxy.num_requests["500"] > 12)
    training.proxy.bad_words.clear()
    training.assert_whole(training.end(), [20])


def test_a_dead_letter_keeps_its_file(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    training.proxy.bad_words[b"bad.bin"] = "500"
    training.start()
    training.tracker.log_file("data/bad.bin", b"precious")
    training.tracker.log_file("data/good.bin", b"fine")
    report = training.tracker.close("FINISHED", 60)
    assert (report.num_unsent, report.num_rejected) == (0, 1)
    (kept,) = (training.spool / "rejected-files").iterdir()
    assert kept.read_bytes() == b"precious"
    row = json.loads((training.spool / "rejected.jsonl").read_text())["row"]
    assert (row["name"], row["file"]) == ("data/bad.bin", kept.name)
    (good,) = training.server.artifacts.rglob("good.bin")
    assert good.read_bytes() == b"fine"
