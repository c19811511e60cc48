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
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from mlflow_server import MlflowServer

from rowstep.components import MlflowLogger
from rowstep.components.tracking import sync
from rowstep.optimizers import LAMB, AdamMultilr, Embedding, LazyAdam
from rowstep.pipeline.cli import main

mlflow = pytest.importorskip("mlflow")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

RUNS = ("Adam", "LazyAdam", "LAMB", "AdamMultilr")
VARIABLES = ("users.embeddings", "items.embeddings")
SECTIONS = {
    "batch": {"loss", "steps_per_second"},
    "epoch": {"loss", "rmse", "val_loss", "val_rmse"},
    "opt": {"iterations", "learning_rate", "epoch"},
    "opt/global": {"grad_norm", "param_norm", "update_norm", "update_ratio", "nonfinite"}
    | {"weights_norm"},
    "opt/slot_m": {"rms", "mean", "absmax", "zero_frac"},
    "opt/slot_v": {"rms", "mean", "max", "zero_frac"},
    "opt/sparse": {"touched_rows", "touched_frac", "rows_ever_touched_frac"},
    "opt/touched_m": {"rms", "absmax"},
    "opt/touched_v": {"rms", "max"},
    "opt/trust_ratio_summary": {"min", "median", "max", "clipped_frac"},
    "opt/m_rms": set(VARIABLES),
    "opt/v_rms": set(VARIABLES),
    "opt/update_ratio": set(VARIABLES),
}
"""Sections of MLflow's page, which are the keys up to the last slash, and charts that they have.

The third column of `tracking/SCHEMA.md`, for two tables; not all that is reported.
"""
HISTOGRAMS = [f"opt/hist/{name}.{slot}" for name in VARIABLES for slot in "mv"]
EVERY_STEPS, NUM_STEPS = 5, 30


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
        command += ["--window-size=1600,20000", f"--user-data-dir={folder / 'profile'}"]
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


def tiny_model() -> keras.Model:
    """Return a model of two tables whose gradients are sparse."""
    ids = keras.Input((2,), dtype="int32")
    users = Embedding(40, 4, name="users")(ids[:, 0])
    items = Embedding(20, 4, name="items")(ids[:, 1])
    return keras.Model(ids, keras.ops.sum(users * items, axis=1))


def train_four(
    uri: str, experiment: str, folder: Path, optimizers: Sequence[keras.optimizers.Optimizer]
) -> None:
    """Train a model four times in little, as people do it."""
    random = np.random.default_rng(0)
    ids = random.integers(0, (40, 20), (NUM_STEPS * 8, 2), dtype=np.int32)
    labels = random.normal(3, 1, len(ids)).astype(np.float32)
    for name, optimizer in zip(RUNS, optimizers, strict=True):
        logger = MlflowLogger(
            uri,
            experiment,
            name,
            every_steps=EVERY_STEPS,
            scan_every_steps=2 * EVERY_STEPS,
            spool_dir=folder / f"{experiment}-{name}",
            on_problem=print,
        )
        model = tiny_model()
        model.compile(optimizer, "mse", metrics=[keras.metrics.RootMeanSquaredError(name="rmse")])
        fit = {"batch_size": 16, "epochs": 2, "validation_data": (ids[:32], labels[:32])}
        with logger:
            model.fit(ids, labels, verbose=0, callbacks=[logger], **fit)
        assert sync(logger.spool_dir, timeout_seconds=120).num_unsent == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mlflow_template_db: Path) -> Iterator[str]:
    """Serve a whole comparison, and one of an optimizer that has no second moments."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copy(mlflow_template_db, folder / "mlflow.db")
    with MlflowServer(folder).running() as uri:
        adam = keras.optimizers.Adam(0.01)
        ours = [LazyAdam(0.01), LAMB(0.01), AdamMultilr(0.01)]
        train_four(uri, "whole", folder, [adam, *ours])
        lacking = [keras.optimizers.SGD(rate, momentum=0.9) for rate in (0.1, 0.2, 0.3, 0.4)]
        train_four(uri, "lacking", folder, lacking)
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


# A card begins at step 0, whatever the first step of its pictures is, also when drawn anew.
FIRST_STEP = """
[...document.querySelectorAll('[role=slider][aria-valuenow="0"]')].map(
  slider => slider.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))
).length
"""
# The addresses of pictures that have come from the artifacts and could be read.
PICTURES = """
[...document.querySelectorAll('img')].filter(
  image => image.complete && image.naturalWidth > 100 && image.src.includes('get-artifact')
).map(image => decodeURIComponent(image.src).replaceAll('~', '/'))
"""


def lines_drawn(browser: Browser) -> set[tuple[str, str, int]]:
    return {(run, key, points) for run, key, points in browser.run(DRAWN) or []}


def open_charts(browser: Browser, server: str, experiment: str) -> None:
    found = mlflow.MlflowClient(server).get_experiment_by_name(experiment)
    # The bare address of an experiment leads to a page about language models.
    place = f"#/experiments/{found.experiment_id}/runs?compareRunsMode=CHART"
    browser.open(f"{server}/{place}")
    wait_until(lambda: "4 matching runs" in browser.text(), "the runs must be listed")


def lines_reported(server: str, experiment: str) -> set[tuple[str, str, int]]:
    """Return what MLflow has of the runs: a line for each metric of each, and its points."""
    client = mlflow.MlflowClient(server)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return {
        (run.info.run_name, key, len(client.get_metric_history(run.info.run_id, key)))
        for run in found
        for key in run.data.metrics
    }


def absent_lines(
    browser: Browser, wanted: set[tuple[str, str, int]], seconds: float
) -> set[tuple[str, str, int]]:
    """Return the lines, one a chart and a run, that do not appear in time."""
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


def by_section(lines: set[tuple[str, str, int]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for _, key, _ in lines:
        section, _, chart = key.rpartition("/")
        found.setdefault(section, set()).add(chart)
    return found


def test_every_metric_has_its_chart_with_a_line_for_each_run(
    server: str, browser: Browser, tmp_path: Path
) -> None:
    wanted = lines_reported(server, "whole")
    charts = by_section(wanted)
    assert {name: keys - charts.get(name, set()) for name, keys in SECTIONS.items()} == {
        name: set() for name in SECTIONS
    }
    open_charts(browser, server, "whole")
    absent = absent_lines(browser, wanted, seconds=120)
    browser.screenshot(tmp_path / "charts.png")
    assert absent == set()
    found = sections(browser)
    assert {name: found.get(name) for name in charts} == {n: len(k) for n, k in charts.items()}


def test_every_histogram_has_a_card_with_a_picture_for_each_run(
    server: str, browser: Browser, tmp_path: Path
) -> None:
    open_charts(browser, server, "whole")
    wait_until(lambda: sections(browser).get("opt/hist") == len(HISTOGRAMS), "cards must be there")
    wanted = len(HISTOGRAMS) * len(RUNS)

    def all_loaded() -> bool:
        browser.run(FIRST_STEP)
        return len(browser.run(PICTURES)) == wanted

    wait_until(all_loaded, "all pictures must be loaded", seconds=240)
    browser.screenshot(tmp_path / "pictures.png")
    named = Counter(key for key in HISTOGRAMS for src in browser.run(PICTURES) if key in src)
    assert named == dict.fromkeys(HISTOGRAMS, len(RUNS))


def test_a_missing_section_is_missed(server: str, browser: Browser) -> None:
    wanted = lines_reported(server, "lacking")
    assert "opt/slot_m" in by_section(wanted) and "opt/slot_v" not in by_section(wanted)
    open_charts(browser, server, "lacking")
    velocities = {(run, "opt/slot_v/rms", NUM_STEPS // EVERY_STEPS // 2) for run in RUNS}
    absent = absent_lines(browser, wanted | velocities, seconds=60)
    assert absent == velocities
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
    # Its tables hold in the page what can be seen of them, so their first rows.
    wait_until(lambda: "opt.class" in browser.text(), "the page must have the params")
    wait_until(lambda: "batch/loss" in browser.text(), "the page must have the metrics")
