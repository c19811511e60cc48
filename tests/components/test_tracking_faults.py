"""Kills and a real server: what MLflow holds after a logging process, or MLflow itself, is gone."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from own_store import rows_in

from rowstep.components.tracking import Tracker, open_tracker, sync

# The value says which attempt wrote the point, so that a second point cannot pass for the first.
CHILD = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from rowstep.components.tracking import open_tracker
    folder, first, last, attempt = Path(sys.argv[1]), *map(int, sys.argv[2:])
    tracker = open_tracker(
        f"sqlite:///{folder}/mlflow.db", "movies", "one", "key-1", folder / "spool",
        on_problem=lambda text: print("problem", text, flush=True),
        artifact_root=folder / "artifacts",
    )
    tracker.start({"lr": 0.1}, {})
    for step in range(first, last + 1):
        tracker.log_metrics(step, {"loss": step + attempt / 100, "iterations": float(step)})
        print("logged", step, flush=True)
        time.sleep(0.01)
    report = tracker.close("FINISHED", 60)
    print("closed", report.run_id, report.num_unsent, flush=True)
""")


def start_child(folder: Path, first: int, last: int, attempt: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(first), str(last), str(attempt)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def points(database: Path) -> dict[str, list[tuple[int, float]]]:
    rows = rows_in(database, "select key, step, value from metrics order by step")
    found: dict[str, list[tuple[int, float]]] = {}
    for key, step, value in rows:
        found.setdefault(key, []).append((step, value))
    return found


def kill_often(folder: Path, template: Path, num_kills: int) -> None:
    """Kill a logging process, resume it from an earlier step, and count the points at the end."""
    shutil.copy(template, folder / "mlflow.db")
    chance, logged = random.Random(3), 0
    wrote_it: dict[int, int] = {}
    for attempt in range(num_kills):
        first = max(logged - 25, 0) + 1  # the last checkpoint lies before the last report
        child = start_child(folder, first, 10**6, attempt)
        assert child.stdout is not None
        assert child.stdout.readline() == f"logged {first}\n"
        time.sleep(chance.uniform(1, 8))  # MLflow's import, the first request, later ones
        os.kill(child.pid, signal.SIGKILL)
        told = [line.split() for line in child.communicate()[0].splitlines()]
        assert [words for words in told if words[0] != "logged"] == []
        for step in [first, *(int(words[1]) for words in told)]:
            wrote_it.setdefault(step, attempt)
        logged = max(wrote_it)
    last = logged + 20
    child = start_child(folder, logged - 25, last, num_kills)
    told, _ = child.communicate(timeout=120)
    assert told.splitlines()[-1].endswith(" 0"), told
    found = points(folder / "mlflow.db")
    assert [step for step, _ in found["iterations"]] == list(range(1, last + 1))
    assert [step for step, _ in found["loss"]] == list(range(1, last + 1))
    for step, value in found["loss"]:
        first_writer = wrote_it.get(step)
        # A report may be in the journal although the process died before it said so.
        allowed = {first_writer} if first_writer is not None else set(range(num_kills + 1))
        assert round((value - step) * 100) in allowed, f"step {step} shows a repeated attempt"


def test_kill_9_of_a_logging_process_leaves_one_point_per_step(
    tmp_path: Path, mlflow_template_db: Path
) -> None:
    kill_often(tmp_path, mlflow_template_db, 2)


@pytest.mark.slow
def test_fifteen_kills_leave_one_point_per_step(tmp_path: Path, mlflow_template_db: Path) -> None:
    kill_often(tmp_path, mlflow_template_db, 15)


# --- a server -------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(folder / "server.log", "ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_for_health(port, process, folder)
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.wait()


def _wait_for_health(port: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            told = (folder / "server.log").read_text()
            assert process.poll() is None and time.monotonic() < deadline, told
            time.sleep(0.2)


def test_a_server_that_comes_late_and_dies_in_between_gets_everything(
    tmp_path: Path, mlflow_template_db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    shutil.copy(mlflow_template_db, tmp_path / "mlflow.db")
    port = free_port()
    problems: list[str] = []
    spool = tmp_path / "spool"

    def attempt() -> Tracker:
        uri = f"http://127.0.0.1:{port}"
        return open_tracker(uri, "movies", "one", "key-1", spool, on_problem=problems.append)

    # Nobody is there: the training ends in bounded time, and its reports wait.
    tracker = attempt()
    tracker.start({"lr": 0.1}, {"a": "b"})
    for step in range(1, 51):
        tracker.log_metrics(step, {"loss": 1 / step})
    report = tracker.close("KILLED", timeout_seconds=2)
    assert (report.run_id, report.num_sent, report.num_unsent) == (None, 0, 52)
    assert len(problems) == 1

    with server(tmp_path, port) as process:
        tracker = attempt()
        tracker.start({"lr": 0.2}, {})
        for step in range(26, 101):
            tracker.log_metrics(step, {"loss": 1 / step})
        tracker.log_text("optimizer_config.json", "{}")
        deadline = time.monotonic() + 60
        while len(points(tmp_path / "mlflow.db").get("loss", [])) < 100:
            assert time.monotonic() < deadline, problems
            time.sleep(0.1)
        stop(process)
        for step in range(101, 151):
            tracker.log_metrics(step, {"loss": 1 / step})
        report = tracker.close("FINISHED", timeout_seconds=2)
    assert report.num_unsent > 0
    assert report.run_id is not None

    with server(tmp_path, port):
        done = sync(spool)
        assert (done.run_id, done.num_unsent) == (report.run_id, 0)
        assert done.link is not None
        assert done.link.startswith(f"http://127.0.0.1:{port}/#/experiments/")
    assert points(tmp_path / "mlflow.db")["loss"] == [(step, 1 / step) for step in range(1, 151)]
    (text,) = (tmp_path / "artifacts").rglob("optimizer_config.json")
    assert text.read_text() == "{}"
