"""Measure what looking at the optimizer costs a training: bare, with reports, with full scans.

Two tables and an MLP, trained in one process by the same two functions: a plain step and an
observed one. Bare, every step is plain. With reports, every 100th is observed and its statistics go
to a tracker, whose background thread is part of this process; with scans, all slots and weights are
read every 1000 steps too. The three take turns, round after round. CPU is that of the whole
process, and of the seconds in which the background thread finishes what a round reported.

    python benchmarks/observability.py                 print the report
    python benchmarks/observability.py --output FILE   and write it to a file
    python benchmarks/observability.py --uri URI       report to this MLflow server
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import rowstep
from rowstep.components.tracking import Tracker, open_tracker, redact_uri
from rowstep.optimizers import LAMB, AdamMultilr, Embedding, LazyAdam, StepObserver
from rowstep.optimizers.statistics import histograms, scan, table

USERS, ITEMS, WIDTH = 400_000, 100_000, 32
NUM_BATCHES = 16
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "LazyAdam": LazyAdam,
    "LAMB, a ratio a row": lambda: LAMB(row_trust_ratio=True),
    "AdamMultilr, lazy": lambda: AdamMultilr(lazy=True),
}
SETTLE_SECONDS = 6.0
"""After a round: longer than the tracker keeps reports back."""
TARGET_CPU, TARGET_CALL_MS = 1.03, 1.0


@dataclass
class Mode:
    """One way to train, and what it took in each round, per step."""

    name: str
    reports: bool = False
    scans: bool = False
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass
class Costs:
    """Seconds of the training thread, one number for each time."""

    plain_step: list[float] = field(default_factory=list)
    observed_step: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    scan: list[float] = field(default_factory=list)


class Training:
    """A recommender, its two steps, and a tracker to report to."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, batch_size: int, every: int) -> None:
        keras.utils.set_random_seed(0)
        users, items = Embedding(USERS, WIDTH), Embedding(ITEMS, WIDTH)
        dense = [keras.layers.Dense(size, activation="relu") for size in (128, 64)]
        self.mlp = keras.Sequential([*dense, keras.layers.Dense(1)])
        for layer in (users, items):
            layer.build()
        self.mlp.build((None, 2 * WIDTH))
        variables = [v for layer in (users, items, self.mlp) for v in layer.trainable_variables]
        optimizer.build(variables)
        self.optimizer, self.observer = optimizer, StepObserver(optimizer)
        self.every, self.costs, self.number = every, Costs(), 0
        rng = np.random.default_rng(0)
        # Popularity as in recommender data: few items are in every batch, most in hardly any.
        ids = [
            [rng.zipf(1.2, batch_size) % rows for rows in (USERS, ITEMS)]
            for _ in range(NUM_BATCHES)
        ]
        self.batches = [
            (tf.constant(u), tf.constant(i), tf.constant(rng.random((batch_size, 1)), tf.float32))
            for u, i in ids
        ]

        def step(apply: Callable[..., Any]) -> Any:
            @tf.function(input_signature=[tf.TensorSpec(t.shape, t.dtype) for t in self.batches[0]])
            def run(u: tf.Tensor, i: tf.Tensor, labels: tf.Tensor) -> Any:
                with tf.GradientTape() as tape:
                    scores = self.mlp(tf.concat([users(u), items(i)], axis=1))
                    loss = tf.reduce_mean(tf.square(scores - labels))
                values = apply(tape.gradient(loss, [v.value for v in variables]), variables)
                return loss if values is None else values

            return run.get_concrete_function()

        self.plain, self.observed = step(optimizer.apply), step(self.observer.apply)

    def run(self, num_steps: int, mode: Mode, tracker: Tracker, scan_every: int) -> float:
        """Train, and return the seconds of a step."""
        start = time.perf_counter()
        for index in range(1, num_steps + 1):
            self.number += 1
            batch = self.batches[self.number % NUM_BATCHES]
            if mode.reports and index % self.every == 0:
                self.report(batch, tracker)
            else:
                last = self.plain(*batch)
            if mode.scans and index % scan_every == 0:
                self.scan(tracker)
        float(last)
        return (time.perf_counter() - start) / num_steps

    def report(self, batch: Any, tracker: Tracker) -> None:
        """Run one observed step and report it."""
        values = self.observed(*batch)
        called = time.perf_counter()
        numbers = dict(zip(self.observer.names, values.numpy().tolist(), strict=True))
        fetched = time.perf_counter()
        tracker.log_metrics(self.number, numbers)
        self.costs.transfer.append(fetched - called)
        self.costs.call.append(time.perf_counter() - fetched)

    def scan(self, tracker: Tracker) -> None:
        """Read all slots and weights, and report that."""
        start = time.perf_counter()
        tracker.log_metrics(self.number, scan(self.optimizer))
        self.costs.scan.append(time.perf_counter() - start)

    def time_single_steps(self, count: int) -> None:
        """Time plain and observed steps in turn, each to its end."""
        for index in range(count):
            for function, seconds in (
                (self.plain, self.costs.plain_step),
                (self.observed, self.costs.observed_step),
            ):
                start = time.perf_counter()
                function(*self.batches[index % NUM_BATCHES]).numpy()
                seconds.append(time.perf_counter() - start)

    def time_looking(self) -> dict[str, float]:
        """Return the seconds of each way to read everything, after a first time."""
        looks: dict[str, Callable[[], Any]] = {
            "`scan`": lambda: scan(self.optimizer),
            "`histograms`": lambda: histograms(self.optimizer),
            "`table`": lambda: table(self.optimizer, self.number),
        }
        result = {}
        for name, look in looks.items():
            times = []
            for _ in range(4):
                start = time.perf_counter()
                look()
                times.append(time.perf_counter() - start)
            result[name] = statistics.median(times[1:])
        return result


def opened(uri: str | None, folder: Path) -> tuple[Tracker, str]:
    """Return a tracker whose run is there, so that no round pays for making one."""
    uri = uri or f"sqlite:///{folder / 'mlflow.db'}"
    problems: list[str] = []
    tracker = open_tracker(
        uri,
        "observability benchmark",
        "observability",
        f"benchmark-{os.getpid()}-{time.time_ns()}",
        folder / "spool",
        on_problem=problems.append,
        artifact_root=folder / "artifacts",
    )
    tracker.start({"opt.class": "several"}, {"benchmark": "observability"})
    tracker.log_metrics(0, {"warm": 1.0})
    until = time.monotonic() + 180
    while tracker.run_id is None and time.monotonic() < until:
        time.sleep(0.2)
    if tracker.run_id is None:
        raise SystemExit(f"observability: no MLflow run could be made. Got: {problems}.")
    return tracker, "SQLite" if uri.startswith("sqlite") else redact_uri(uri)


def measure(training: Training, tracker: Tracker, arguments: argparse.Namespace) -> list[Mode]:
    """Let the modes take turns, starting with another one each round."""
    modes = [
        Mode("bare"),
        Mode(f"reports every {training.every} steps", reports=True),
        Mode(f"and scans every {arguments.scan_every}", reports=True, scans=True),
    ]
    for mode in modes:  # traces, and the first transfer of each kind
        training.run(training.every, mode, tracker, training.every)
    time.sleep(SETTLE_SECONDS)
    training.costs = Costs()
    for number in range(arguments.rounds):
        turn = number % len(modes)
        for mode in modes[turn:] + modes[:turn]:
            cpu = time.process_time()
            wall = training.run(arguments.steps, mode, tracker, arguments.scan_every)
            if mode.reports:
                time.sleep(SETTLE_SECONDS)
            mode.wall.append(wall)
            mode.cpu.append((time.process_time() - cpu) / arguments.steps)
    training.time_single_steps(arguments.steps // 5)
    return modes


def spread(values: list[float], unit: float = 1.0, digits: int = 3) -> str:
    """Return the median, with the quartiles in brackets where there are enough values."""
    middle = f"{statistics.median(values) * unit:.{digits}f}"
    if len(values) < 4:
        return middle
    low, _, high = statistics.quantiles(values, n=4)
    return f"{middle} [{low * unit:.{digits}f}, {high * unit:.{digits}f}]"


def ratios(mode: Mode, bare: Mode, which: str) -> list[float]:
    """Return, round by round, how often the bare training fits into this one."""
    return [a / b for a, b in zip(getattr(mode, which), getattr(bare, which), strict=True)]


def p95(values: list[float]) -> float:
    """Return the 95th percentile in milliseconds."""
    return float(np.quantile(values, 0.95)) * 1e3


def section(name: str, training: Training, modes: list[Mode], looks: dict[str, float]) -> list[str]:
    """Return what was measured of one optimizer."""
    bare, costs = modes[0], training.costs
    lines = [
        f"## {name}",
        "",
        "| training | ms CPU a step | times bare, CPU | ms a step | times bare, wall |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {mode.name} | {spread(mode.cpu, 1e3, 2)} | {spread(ratios(mode, bare, 'cpu'))} | "
        f"{spread(mode.wall, 1e3, 2)} | {spread(ratios(mode, bare, 'wall'))} |"
        for mode in modes
    ]
    lines += [
        "",
        "| on the training thread | ms, median | ms, p95 | times |",
        "|---|---:|---:|---:|",
    ]
    rows = {
        "a plain step": costs.plain_step,
        "an observed step": costs.observed_step,
        "fetching its statistics": costs.transfer,
        "**handing them to the tracker**": costs.call,
        "a scan, and handing it over": costs.scan,
    }
    lines += [
        f"| {label} | {1e3 * statistics.median(seconds):.3f} | {p95(seconds):.3f} "
        f"| {len(seconds)} |"
        for label, seconds in rows.items()
        if seconds
    ]
    seen = ", ".join(f"{look} {seconds * 1e3:.0f} ms" for look, seconds in looks.items())
    return [*lines, "", f"Reading everything, with no other work: {seen}.", ""]


def verdict(name: str, training: Training, modes: list[Mode]) -> str:
    """Return one line about the two targets."""
    cpu = statistics.median(ratios(modes[1], modes[0], "cpu"))
    call = p95(training.costs.call)
    met = "met" if cpu <= TARGET_CPU and call <= TARGET_CALL_MS else "missed"
    return (
        f"- {name}: {100 * (cpu - 1):+.1f} % CPU with reports, {call:.2f} ms (p95) a call: {met}."
    )


def heading(store: str, arguments: argparse.Namespace, load: tuple[float, ...]) -> list[str]:
    """Return what was measured, on what."""
    return [
        "# Cost of looking at the optimizer",
        "",
        f"rowstep {rowstep.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}, "
        f"MLflow {version('mlflow')}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} CPUs, {len(tf.config.list_physical_devices('GPU'))} GPUs. Load before "
        f"and after (1 minute): {load[0]:.1f}, {os.getloadavg()[0]:.1f}. Reports go to {store}.",
        "",
        f"Tables of {USERS:,} and {ITEMS:,} rows of width {WIDTH}, an MLP of 128, 64 and 1, "
        f"batches of {arguments.batch_size}, float32. {arguments.rounds} interleaved rounds of "
        f"{arguments.steps} steps each. Medians over the rounds, with the quartiles in brackets; "
        "CPU is that of the process with its background thread.",
        "",
        f"Targets: at most {100 * (TARGET_CPU - 1):.0f} % more CPU with reports, and at most "
        f"{TARGET_CALL_MS:g} ms (p95) on the training thread to hand one over.",
        "",
    ]


def main() -> None:
    """Measure, print the report and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--scan-every", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--uri")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()
    lines, verdicts = [], []
    with tempfile.TemporaryDirectory() as folder:
        tracker, store = opened(arguments.uri, Path(folder))
        for name in arguments.optimizers:
            training = Training(OPTIMIZERS[name](), arguments.batch_size, arguments.every)
            modes = measure(training, tracker, arguments)
            lines += section(name, training, modes, training.time_looking())
            verdicts.append(verdict(name, training, modes))
        tracker.close("FINISHED")
    options = " ".join(f"--{key} {getattr(arguments, key)}" for key in ("rounds", "steps"))
    command = f"Command: `python benchmarks/observability.py {options}`"
    text = "\n".join([*heading(store, arguments, load), *verdicts, "", *lines, command, ""])
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
