"""Measure what MLflow's outages cost a training: its time, its reports, its end.

A loop of steps of a few milliseconds reports to a real `mlflow server` behind a proxy. In the
middle third of the steps the server is in trouble; "absent" is trouble from before the start until
the training has ended. What could not be sent is sent by `sync` afterwards, and MLflow's rows are
counted. Times are relative to the median of the runs without trouble in the same script.

    python benchmarks/outages.py                     print the table
    python benchmarks/outages.py --output FILE       and write it to a file
    python benchmarks/outages.py --steps 500         a quick look
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
from rowstep.components.tracking import open_tracker, sync

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from mlflow_server import MlflowServer
from switchable_proxy import SwitchableProxy

OUTAGES = ("none", "none", "none", "absent", "refuse", "hang", "swallow", "500", "429", "403")
CLOSE_SECONDS = 10.0
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
    train_seconds: float
    longest_report_ms: float
    num_reports: int
    num_rows: int
    num_twice: int
    close_seconds: float
    num_unsent_at_close: int


def train(server: MlflowServer, folder: Path, outage: str, num_steps: int) -> Result:
    """Run one training beside an outage, and count what MLflow has in the end."""
    proxy = SwitchableProxy(server.port)
    spool = folder / f"{outage}-{time.monotonic_ns()}"
    tracker = open_tracker(
        proxy.uri, "outages", outage, spool.name, spool, on_problem=lambda text: None
    )
    if outage == "absent":
        proxy.switch("refuse")
    work = np.random.default_rng(0).standard_normal((384, 384))
    longest = 0.0
    begin = time.perf_counter()
    tracker.start({"outage": outage}, {})
    for step in range(1, num_steps + 1):
        if step == num_steps // 3 and outage not in ("none", "absent"):
            server.kill() if outage == "killed" else proxy.switch(outage)
        if step == 2 * num_steps // 3 and outage not in ("none", "absent", "killed"):
            proxy.switch("up")
        work @ work
        before = time.perf_counter()
        tracker.log_metrics(step, {"batch/loss": 1.0 / step, "opt/iterations": float(step)})
        longest = max(longest, time.perf_counter() - before)
    train_seconds = time.perf_counter() - begin
    before = time.perf_counter()
    closed = tracker.close("FINISHED", timeout_seconds=CLOSE_SECONDS)
    close_seconds = time.perf_counter() - before
    if outage == "killed":
        server.start()
    proxy.switch("up")
    report = sync(spool, timeout_seconds=120) if closed.num_unsent else closed
    proxy.close()
    rows = server.rows("select key, step from metrics where run_uuid = ?", report.run_id)
    return Result(
        outage,
        train_seconds,
        1000 * longest,
        2 * num_steps,
        len(rows),
        len(rows) - len(set(rows)),
        close_seconds,
        closed.num_unsent,
    )


def table(results: list[Result], num_steps: int) -> str:
    """Return the results as Markdown."""
    import mlflow

    bare = statistics.median(r.train_seconds for r in results if r.outage == "none")
    lines = [
        f"{num_steps} steps of {1000 * bare / num_steps:.1f} ms, two metrics reported at each of "
        f"them; trouble in the middle third; close may take {CLOSE_SECONDS:g} s without progress. "
        f"rowstep {rowstep.__version__}, MLflow {mlflow.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores.",
        "",
        "| MLflow | training time | longest report (ms) | metrics reported | rows in MLflow "
        "| twice | close (s) | unsent at close |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {_WORDS[r.outage]} | x{r.train_seconds / bare:.2f} | {r.longest_report_ms:.1f} "
        f"| {r.num_reports} | {r.num_rows} | {r.num_twice} | {r.close_seconds:.1f} "
        f"| {r.num_unsent_at_close} |"
        for r in results
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server must not outlive us
    folder = Path(tempfile.mkdtemp(prefix="rowstep-outages-"))
    server = MlflowServer(folder)
    try:
        server.start()
        train(server, folder, "none", 50)  # imports and first requests
        results = []
        for outage in (*OUTAGES, "killed"):
            results.append(train(server, folder, outage, given.steps))
            print(results[-1], file=sys.stderr, flush=True)
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    text = table(results, given.steps)
    print(text)
    if given.output is not None:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
