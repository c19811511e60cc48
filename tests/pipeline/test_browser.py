"""A browser opens MLflow's pages on a finished comparison and finds the charts of its four runs.

Headless Chromium is driven through its own debugging protocol over a pipe, which needs no package.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rowstep.components.tracking import open_tracker
from rowstep.pipeline.cli import main

mlflow = pytest.importorskip("mlflow")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

RUNS = ("Adam", "LazyAdam", "LAMB", "AdamMultilr")
SECTIONS = {
    "batch": ["batch/loss", "batch/examples_per_second"],
    "epoch": ["epoch/val_rmse"],
    "opt": ["opt/iterations", "opt/learning_rate"],
    "opt/global": ["opt/global/grad_norm", "opt/global/update_ratio"],
    "opt/slot_m": ["opt/slot_m/rms"],
    "opt/slot_v": ["opt/slot_v/rms"],
}
"""Sections of MLflow's page, which are the keys up to the last slash, and their charts."""


def wait_until(is_done: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := is_done()):
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
    return answer


class Browser:
    """One page of headless Chromium."""

    def __init__(self, folder: Path) -> None:
        for_browser, self._to = os.pipe()
        self._from, of_browser = os.pipe()
        command = [str(CHROMIUM), "--headless=new", "--remote-debugging-pipe", "--no-sandbox"]
        command += ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--window-size=1600,4000", f"--user-data-dir={folder / 'profile'}"]
        # The protocol is spoken on the descriptors 3 and 4.
        words = f'exec "$0" "$@" 3<&{for_browser} 4>&{of_browser}'
        with open(folder / "chromium.log", "wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", words, *command],
                pass_fds=(for_browser, of_browser),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(for_browser)
        os.close(of_browser)
        self._rest, self._number, self._session = b"", 0, ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass  # an event, or the answer to something else
        assert "result" in answer, answer
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from, 65536)
            assert data, "the browser has ended; see chromium.log"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def open(self, url: str) -> None:
        # Addresses that differ after the "#" only are one page, which would not be loaded again.
        self._ask("Page.navigate", url="about:blank")
        self._ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Run MLflow's own server on the store of a folder, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    uri = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, (folder / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
        try:
            wait_until(answers, "the server must come up", seconds=240)
            yield uri
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def train_four(store: str, experiment: str, folder: Path, left_out: str = "") -> None:
    """Report four short trainings, as trainings do; metrics that are left out stay away."""
    keys = [key for charts in SECTIONS.values() for key in charts if key != left_out]
    for number, name in enumerate(RUNS):
        spool = folder / f"{experiment}-{name}"
        tracker = open_tracker(store, experiment, name, str(spool), spool, on_problem=print)
        tracker.start({"opt.class": name, "train.seed": 7}, {})
        for step in range(10, 510, 10):
            tracker.log_metrics(step, dict.fromkeys(keys, (number + 1) / step))
        assert tracker.close("FINISHED", timeout_seconds=120).num_unsent == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mlflow_template_db: Path) -> Iterator[str]:
    """Serve a whole comparison and one that lacks the velocities."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copy(mlflow_template_db, folder / "mlflow.db")
    store = f"sqlite:///{folder / 'mlflow.db'}"
    train_four(store, "whole", folder)
    train_four(store, "lacking", folder, left_out="opt/slot_v/rms")
    with mlflow_server(folder) as uri:
        yield uri


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = Browser(tmp_path_factory.mktemp("browser"))
    yield chromium
    chromium.close()


# What lies behind the charts that are drawn: run, metric and number of points of every line.
DRAWN = """
[...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => (plot.data || []).map(
  line => [line.name, ((line.metricHistory || [])[0] || {}).key, (line.x || []).length]))
"""


def lines_drawn(browser: Browser) -> set[tuple[str, str, int]]:
    return {(run, key, points) for run, key, points in browser.run(DRAWN) or []}


def open_charts(browser: Browser, server: str, experiment: str) -> None:
    found = mlflow.MlflowClient(server).get_experiment_by_name(experiment)
    # The bare address of an experiment leads to a page about language models.
    place = f"#/experiments/{found.experiment_id}/runs?compareRunsMode=CHART"
    browser.open(f"{server}/{place}")
    wait_until(lambda: "4 matching runs" in browser.text(), "the runs must be listed")


def absent_lines(browser: Browser, seconds: float) -> set[tuple[str, str, int]]:
    """Return the lines, one a chart and a run, that do not appear in time."""
    wanted = {(run, key, 50) for charts in SECTIONS.values() for key in charts for run in RUNS}
    deadline = time.monotonic() + seconds
    while (absent := wanted - lines_drawn(browser)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return absent


def sections(browser: Browser) -> dict[str, int]:
    """Return the headings of the page with their number of charts, in their order."""
    rows = browser.text().splitlines()
    return {
        name: int(count[1:-1])
        for name, count in itertools.pairwise(rows)
        if count.startswith("(") and count.endswith(")") and count[1:-1].isdigit()
    }


def test_every_metric_has_its_chart_with_a_line_for_each_run(
    server: str, browser: Browser, tmp_path: Path
) -> None:
    open_charts(browser, server, "whole")
    absent = absent_lines(browser, seconds=120)
    browser.screenshot(tmp_path / "charts.png")
    assert absent == set()
    charts = {name: len(keys) for name, keys in SECTIONS.items()}
    found = sections(browser)
    assert {name: found.get(name) for name in charts} == charts
    assert [name for name in found if name in charts] == [*charts]  # what people look at first


def test_a_missing_section_is_missed(server: str, browser: Browser) -> None:
    open_charts(browser, server, "lacking")
    absent = {(run, "opt/slot_v/rms", 50) for run in RUNS}
    wait_until(lambda: absent_lines(browser, seconds=0) == absent, "the others must be drawn")
    time.sleep(5)
    assert absent_lines(browser, seconds=0) == absent
    assert "opt/slot_m" in sections(browser)
    assert "opt/slot_v" not in sections(browser)


def test_the_link_of_compare_leads_to_all_four_runs(
    server: str, browser: Browser, tmp_path: Path
) -> None:
    names = [f"whole/{run}" for run in RUNS]
    picture = tmp_path / "picture.png"
    result = CliRunner().invoke(
        main, ["compare", *names, "--uri", server, "--output", str(picture)]
    )
    assert result.exit_code == 0, result.output
    [link] = [word for word in result.stdout.split() if word.startswith(f"{server}/#/")]
    browser.open(link)
    title = "Comparing 4 Runs from 1 Experiment"
    wait_until(lambda: title in browser.text(), "the page must have all runs")
    wait_until(lambda: "Parallel Coordinates Plot" in browser.text(), "the page must have plots")
    browser.screenshot(tmp_path / "compare.png")
    assert all(run in browser.text() for run in RUNS)
    assert "opt.class" in browser.text() and "opt/slot_v/rms" in browser.text()
