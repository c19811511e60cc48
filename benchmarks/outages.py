"""Measure what MLflow's outages cost a training: its time, its reports, its end.

A loop of steps of some milliseconds reports to a real `mlflow server` behind a proxy, which is in
trouble for a while; "absent" is trouble from before the start until the training has ended. What
could not be sent is sent by `sync` afterwards, and MLflow's rows are counted. The trouble lasts
long enough that several requests meet it, and a run whose trouble was met by none is an error.
The time of a step is that of the steps during the trouble, relative to the median of the runs
without trouble, which take turns with the others.

    python benchmarks/outages.py                     print the table
    python benchmarks/outages.py --output FILE       and write it to a file
    python benchmarks/outages.py --seconds 6         a quick look
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import rowstep
from rowstep.components.tracking import Tracker, open_tracker, sync

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from mlflow_server import MlflowServer
from switchable_proxy import SwitchableProxy

TURNS = (
    *("none", "absent", "refuse", "none", "hang", "swallow"),
    *("none", "500", "429", "none", "403", "killed"),
)
"""The runs in their order."""
UNCOUNTED = ("absent", "refuse")
"""Nobody is there to count who comes; that the training told of the trouble is what is known."""
CLOSE_SECONDS = 10.0
TIMEOUT_SECONDS = "3"
"""Of one request: MLflow's client would wait for a server that hangs longer than we look."""
_WORDS = {
    "none": "no outage",
    "absent": "absent from the start to the end",
    "refuse": "connections refused",
    "hang": "hangs",
    "swallow": "does what it is told, answers are lost",
    "500": "answers 500",
    "429": "answers 429",
    "403": "answers 403",
    "killed": "killed with kill -9, started again",
}


@dataclass(frozen=True)
class Result:
    outage: str
    num_met: int
    """Requests that met the trouble; of those that nobody can count, 1 if it was told of."""
    step_ms: float
    longest_report_ms: float
    num_reports: int
    num_rows: int
    num_twice: int
    close_seconds: float
    num_unsent_at_close: int


class Loop:
    """Steps that compute a little and report two metrics."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._work = np.random.default_rng(0).standard_normal((640, 640))
        self.num_steps = 0
        self.longest_ms = 0.0

    def run(self, seconds: float) -> float:
        """Go on for some seconds and return the milliseconds of a step."""
        begin, first = time.perf_counter(), self.num_steps
        while time.perf_counter() < begin + seconds:
            self.num_steps += 1
            self._work @ self._work
            metrics = {"batch/loss": 1.0 / self.num_steps, "opt/iterations": float(self.num_steps)}
            before = time.perf_counter()
            self._tracker.log_metrics(self.num_steps, metrics)
            self.longest_ms = max(self.longest_ms, 1000 * (time.perf_counter() - before))
        return 1000 * (time.perf_counter() - begin) / (self.num_steps - first)


def train(server: MlflowServer, folder: Path, outage: str, seconds: float) -> Result:
    """Run one training beside an outage, and count what MLflow has in the end."""
    proxy = SwitchableProxy(server.port)
    spool = folder / f"{outage}-{time.monotonic_ns()}"
    told: list[str] = []
    tracker = open_tracker(proxy.uri, "outages", outage, spool.name, spool, on_problem=told.append)
    if outage == "absent":
        proxy.switch("refuse")
    tracker.start({"outage": outage}, {})
    loop = Loop(tracker)
    loop.run(seconds / 4)
    num_before = proxy.num_requests["up"]
    if outage == "killed":
        server.kill()
    elif outage not in ("none", "absent"):
        proxy.switch(outage)
    step_ms = loop.run(seconds)
    if outage not in ("absent", "killed"):
        proxy.switch("up")
    loop.run(seconds / 4)
    before = time.perf_counter()
    closed = tracker.close("FINISHED", timeout_seconds=CLOSE_SECONDS)
    close_seconds = time.perf_counter() - before
    num_met = proxy.num_requests[outage]
    if outage == "killed":
        num_met = proxy.num_requests["up"] - num_before
        server.start()
    proxy.switch("up")
    report = sync(spool, timeout_seconds=120) if closed.num_unsent else closed
    proxy.close()
    rows = server.rows("select key, step from metrics where run_uuid = ?", report.run_id)
    return Result(
        outage,
        int(bool(told)) if outage in UNCOUNTED else num_met,
        step_ms,
        loop.longest_ms,
        2 * loop.num_steps,
        len(rows),
        len(rows) - len(set(rows)),
        close_seconds,
        closed.num_unsent,
    )


def table(results: list[Result], seconds: float) -> str:
    """Return the results as Markdown."""
    import mlflow

    bare = statistics.median(r.step_ms for r in results if r.outage == "none")
    lines = [
        f"Steps of {bare:.1f} ms, two metrics reported at each of them; {seconds:g} s of trouble, "
        f"{seconds / 4:g} s before and after it; a request is given up after {TIMEOUT_SECONDS} s; "
        f"close may take {CLOSE_SECONDS:g} s without progress. rowstep {rowstep.__version__}, "
        f"MLflow {mlflow.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores.",
        "",
        "| MLflow | requests that met it | time of a step | longest report (ms) "
        "| metrics reported | rows in MLflow | twice | close (s) | unsent at close |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {_WORDS[r.outage]} | {_met(r)} | x{r.step_ms / bare:.2f} | {r.longest_report_ms:.1f} "
        f"| {r.num_reports} | {r.num_rows} | {r.num_twice} | {r.close_seconds:.1f} "
        f"| {r.num_unsent_at_close} |"
        for r in sorted(results, key=lambda r: list(_WORDS).index(r.outage))
    ]
    return "\n".join(lines) + "\n"


def _met(result: Result) -> str:
    if result.outage == "none":
        return "-"
    if result.outage in UNCOUNTED:
        return "not counted, told" if result.num_met else "0"
    return str(result.num_met)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=15.0, help="how long the trouble lasts")
    given = parser.parse_args()
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = TIMEOUT_SECONDS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server must not outlive us
    folder = Path(tempfile.mkdtemp(prefix="rowstep-outages-"))
    server = MlflowServer(folder)
    try:
        server.start()
        train(server, folder, "none", 1.0)  # imports and first requests
        results = []
        for outage in TURNS:
            results.append(train(server, folder, outage, given.seconds))
            print(results[-1], file=sys.stderr, flush=True)
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    text = table(results, given.seconds)
    print(text)
    unmet = [r.outage for r in results if r.outage != "none" and not r.num_met]
    if unmet:
        sys.exit(f"no request met the trouble of: {', '.join(unmet)}. Take more --seconds.")
    if given.output is not None:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
