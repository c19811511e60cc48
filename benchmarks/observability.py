"""Measure what looking at the optimizer costs a training: bare, with reports, with full scans.

Two tables and an MLP with a falling rate, trained in one process. Bare, every step is a plain one.
With reports, every 100th is observed and all goes the way that it goes in RecTrainer: RunLog, which
fetches loss, rate and statistics, and a tracker, whose background thread is part of this process.
The third one also scans all slots and weights every 1000 steps and stores a table of them, as a
config may ask for; when it does not, scans wait while they would take more than a hundredth of the
time. The three take turns of 100 steps, since a machine that others use too is never the same for
long; ten turns of each make a round. CPU is that of the whole process: of the training by rounds,
and of the tracker's thread, which lags behind, over all rounds together.

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
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import rowstep
from rowstep import configs
from rowstep.components.job import TrainJob
from rowstep.components.run_log import RunLog
from rowstep.components.tracking import redact_uri
from rowstep.components.training_state import TrainingState
from rowstep.configs import load_config
from rowstep.optimizers import LAMB, AdamMultilr, Embedding, LazyAdam
from rowstep.optimizers.statistics import histograms, scan, table

USERS, ITEMS, WIDTH = 400_000, 100_000, 32
NUM_BATCHES = 16
RATE = keras.optimizers.schedules.CosineDecay(0.001, 100_000)
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "LazyAdam": lambda: LazyAdam(RATE),
    "LAMB, a ratio a row": lambda: LAMB(RATE, row_trust_ratio=True),
    "AdamMultilr, lazy": lambda: AdamMultilr(RATE, lazy=True),
}
SETTLE_SECONDS = 6.0
"""Longer than the tracker keeps reports back."""
TARGET_CPU, TARGET_REPORT_MS = 1.03, 1.0
_NEVER = 10**9


@dataclass
class Mode:
    """One way to train, and what it took in each round, per step."""

    name: str
    step: int = 0
    publishers: list[threading.Thread] = field(default_factory=list)
    background: float = 0.0
    """CPU seconds of its publishers, per step."""
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass
class Costs:
    """Seconds of the training thread, one number for each time."""

    plain_step: list[float] = field(default_factory=list)
    observed_step: list[float] = field(default_factory=list)
    nothing: list[float] = field(default_factory=list)
    report: list[float] = field(default_factory=list)
    scan: list[float] = field(default_factory=list)


class Training:
    """A recommender, its plain step, and for each way to report a log and an observed step."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, batch_size: int) -> None:
        keras.utils.set_random_seed(0)
        ids = [keras.Input((), dtype="int64", name=name) for name in ("users", "items")]
        rows = [Embedding(n, WIDTH)(x) for n, x in zip((USERS, ITEMS), ids, strict=True)]
        x = keras.layers.Concatenate()(rows)
        for size in (128, 64):
            x = keras.layers.Dense(size, activation="relu")(x)
        self.model = keras.Model(ids, keras.layers.Dense(1)(x))
        optimizer.build(self.model.trainable_variables)
        self.model.optimizer = self.optimizer = optimizer
        self.state = TrainingState(self.model, optimizer)
        rng = np.random.default_rng(0)
        # Popularity as in recommender data: few items are in every batch, most in hardly any.
        zipf = [
            [rng.zipf(1.2, batch_size) % rows for rows in (USERS, ITEMS)]
            for _ in range(NUM_BATCHES)
        ]
        self.batches = [
            (tf.constant(u), tf.constant(i), tf.constant(rng.random((batch_size, 1)), tf.float32))
            for u, i in zipf
        ]
        self.costs = Costs()
        self.plain = self.step(optimizer.apply)
        self.observed: dict[str, Any] = {}
        self.logs: dict[str, RunLog] = {}

    def step(self, apply: Callable[..., Any]) -> Any:
        """Return a compiled step: a batch in, the loss and what `apply` returns out."""

        @tf.function(input_signature=[tf.TensorSpec(t.shape, t.dtype) for t in self.batches[0]])
        def run(u: tf.Tensor, i: tf.Tensor, labels: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.model([u, i], training=True) - labels))
            variables = self.model.trainable_variables
            gradients = tape.gradient(loss, [v.value for v in variables])
            statistics = apply(gradients, variables)
            self.state.loss_sum.assign_add(tf.cast(loss, tf.float64))
            return loss, None if statistics is None else self.state.measured(statistics)

        return run.get_concrete_function()

    def open_log(self, mode: Mode, job: TrainJob, identity: dict[str, str]) -> None:
        """Open the log of a mode, and wait until its run is there, so that no round pays."""
        key = f"benchmark-{os.getpid()}-{time.time_ns()}"
        log = RunLog(job, self.state, key, job.state_dir / key, 1)
        log.start("scratch", identity, [])
        until = time.monotonic() + 180
        while log.meta()["mlflow_run_id"] is None:
            if time.monotonic() > until:
                raise SystemExit("observability: no MLflow run could be made in 3 minutes.")
            time.sleep(0.2)
        self.logs[mode.name] = log
        self.observed[mode.name] = self.step(log.optimizer.observer.apply)

    def run(self, num_steps: int, mode: Mode) -> float:
        """Train, and return the seconds that it took."""
        state, log = self.state, self.logs.get(mode.name)
        state.step = mode.step  # each way to train reports and scans at its own round numbers
        start = time.perf_counter()
        for _ in range(num_steps):
            batch = self.batches[state.step % NUM_BATCHES]
            observes = log is not None and log.observes(state.step + 1)
            loss, measured = (self.observed[mode.name] if observes else self.plain)(*batch)
            state.step += 1
            state.window_steps += 1
            if log is not None:
                self.report(log, measured)
        float(loss)
        mode.step = state.step
        return time.perf_counter() - start

    def report(self, log: RunLog, measured: Any) -> None:
        """Do what the training loop does after a step, and time it if it reports."""
        start = time.perf_counter()
        log.step(None if measured is None else measured.numpy())
        seconds = time.perf_counter() - start
        tracking = log.job.config.tracking
        if self.state.step % tracking.slots_every_steps == 0:
            self.costs.scan.append(seconds)
        elif self.state.step % tracking.every_steps == 0:
            self.costs.report.append(seconds)
        elif measured is None:
            self.costs.nothing.append(seconds)

    def time_single_steps(self, count: int, observed: Any) -> None:
        """Time plain and observed steps in turn, each to its end."""
        for index in range(count):
            for function, seconds in (
                (self.plain, self.costs.plain_step),
                (observed, self.costs.observed_step),
            ):
                start = time.perf_counter()
                function(*self.batches[index % NUM_BATCHES])[0].numpy()
                seconds.append(time.perf_counter() - start)

    def time_looking(self) -> dict[str, float]:
        """Return the seconds of each way to read everything, after a first time."""
        looks: dict[str, Callable[[], Any]] = {
            "`scan`": lambda: scan(self.optimizer),
            "`histograms`": lambda: histograms(self.optimizer),
            "`table`": lambda: table(self.optimizer, self.state.step),
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


def job_of(arguments: argparse.Namespace, folder: Path, scan_every: int) -> TrainJob:
    """Return a job that reports as a config says, of which nothing else is used."""
    settings = [
        f"tracking.every_steps={arguments.every}",
        f"tracking.slots_every_steps={scan_every}",
        "tracking.experiment=observability benchmark",
        f"train.batch_size={arguments.batch_size}",
    ]
    return TrainJob(
        config=load_config(Path(configs.__file__).with_name("quickstart.yaml"), settings),
        train_files=(),
        eval_files=(),
        transform_graph="",
        serving_dir="",
        state_dir=folder / "state",
        tracking_uri=arguments.uri or f"sqlite:///{folder / 'mlflow.db'}",
        tracking_artifacts=folder / "artifacts",
    )


def measure(training: Training, arguments: argparse.Namespace, folder: Path) -> list[Mode]:
    """Let the modes take turns, starting with another one each time."""
    every = arguments.scan_every
    modes = [
        Mode("bare"),
        Mode(f"reports every {arguments.every} steps"),
        Mode(f"and scans every {every}"),
    ]
    for mode, scan_every in ((modes[1], _NEVER), (modes[2], every)):
        others = set(threading.enumerate())
        identity = {"train_data": "0" * 64, "eval_data": "0" * 64}
        training.open_log(mode, job_of(arguments, folder, scan_every), identity)
        mode.publishers = [t for t in threading.enumerate() if t not in others]
    for mode in modes:  # the first transfer and scan of each kind
        training.run(every, mode)
    time.sleep(SETTLE_SECONDS)
    training.costs = Costs()
    before = [cpu_seconds(mode.publishers) for mode in modes]
    publishers = [thread for mode in modes for thread in mode.publishers]
    num_turns = arguments.steps // arguments.every
    num_steps = num_turns * arguments.every
    for _ in range(arguments.rounds):
        for mode in modes:
            mode.wall.append(0.0)
            mode.cpu.append(0.0)
        for turn in range(num_turns):
            first = turn % len(modes)
            for mode in modes[first:] + modes[:first]:
                cpu = time.process_time() - cpu_seconds(publishers)
                mode.wall[-1] += training.run(arguments.every, mode) / num_steps
                cpu = time.process_time() - cpu_seconds(publishers) - cpu
                mode.cpu[-1] += cpu / num_steps
    time.sleep(SETTLE_SECONDS)
    for mode, spent in zip(modes, before, strict=True):
        spent = cpu_seconds(mode.publishers) - spent
        mode.background = spent / (arguments.rounds * num_steps)
    training.time_single_steps(arguments.steps // 5, training.observed[modes[1].name])
    for log in training.logs.values():
        log.close("FINISHED")
    return modes


def cpu_seconds(threads: Sequence[threading.Thread]) -> float:
    """Return the CPU time of threads that are alive."""
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads]
    return sum(map(time.clock_gettime, clocks))


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


def times_bare(mode: Mode, bare: Mode) -> float:
    """Return how often the CPU time of the bare training fits into that of this one."""
    background = mode.background / statistics.median(bare.cpu)
    return statistics.median(ratios(mode, bare, "cpu")) + background


def p95(values: list[float]) -> float:
    """Return the 95th percentile in milliseconds."""
    return float(np.quantile(values, 0.95)) * 1e3


def section(name: str, training: Training, modes: list[Mode], looks: dict[str, float]) -> list[str]:
    """Return what was measured of one optimizer."""
    bare, costs = modes[0], training.costs
    lines = [
        f"## {name}",
        "",
        "| training | ms CPU a step | in the background | times bare, CPU, both | ms a step "
        "| times bare, wall |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {mode.name} | {spread(mode.cpu, 1e3, 2)} | {mode.background * 1e3:.3f} "
        f"| {times_bare(mode, bare):.3f} | {spread(mode.wall, 1e3, 2)} "
        f"| {spread(ratios(mode, bare, 'wall'))} |"
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
        "after a step without a report": costs.nothing,
        "**a report: fetching loss, rate, statistics, handing them over**": costs.report,
        "a report with a scan and its table": costs.scan,
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
    bare = modes[0]
    cpu, scans = (times_bare(mode, bare) for mode in modes[1:])
    report = p95(training.costs.report)
    met = "met" if cpu <= TARGET_CPU and report <= TARGET_REPORT_MS else "missed"
    return (
        f"- {name}: {100 * (cpu - 1):+.1f} % CPU with reports, {report:.2f} ms (p95) a report: "
        f"{met}. With every scan as well: {100 * (scans - 1):+.1f} %."
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
        f"batches of {arguments.batch_size}, float32. {arguments.rounds} rounds of "
        f"{arguments.steps} steps each, in turns of {arguments.every}. Medians over the rounds, "
        "with the quartiles in brackets.",
        "",
        f"Targets: at most {100 * (TARGET_CPU - 1):.0f} % more CPU with reports, and at most "
        f"{TARGET_REPORT_MS:g} ms (p95) of the training thread for one, the observed step apart.",
        "",
    ]


def main() -> None:
    """Measure, print the report and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
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
    store = redact_uri(arguments.uri) if arguments.uri else "SQLite"
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.optimizers:
            training = Training(OPTIMIZERS[name](), arguments.batch_size)
            modes = measure(training, arguments, Path(folder))
            lines += section(name, training, modes, training.time_looking())
            verdicts.append(verdict(name, training, modes))
    options = " ".join(f"--{key} {getattr(arguments, key)}" for key in ("rounds", "steps"))
    command = f"Command: `python benchmarks/observability.py {options}`"
    text = "\n".join([*heading(store, arguments, load), *verdicts, "", *lines, command, ""])
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
