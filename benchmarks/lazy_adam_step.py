"""Measure what a training step costs at two table sizes: rowstep beside stock Keras 3.

Each model is one table [rows, 16] looked up 2048 times a step, a sum and a squared error, in a
tf.function of its own. All models of a process are timed in turn, round after round, so that a busy
moment of the machine meets all of them; the table shows medians over the rounds.

    python benchmarks/lazy_adam_step.py                 print the report
    python benchmarks/lazy_adam_step.py --output FILE   and write it to a file
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import rowstep
from rowstep.optimizers import Embedding, LazyAdam

SMALL_ROWS = 100_000
LARGE_ROWS = 5_000_000
WIDTH = 16
BATCH_SIZE = 2048
NUM_BATCHES = 8
LONGEST_SECONDS = 60.0


@dataclass
class Case:
    """One model to time."""

    name: str
    num_rows: int
    num_ids: int
    """Ids are drawn from [0, num_ids)."""
    make_layer: Callable[[int], keras.layers.Layer]
    make_optimizer: Callable[[], keras.optimizers.Optimizer]
    steps_a_round: int
    seconds_a_step: list[float] = field(default_factory=list)
    step: Callable[[tf.Tensor], tf.Tensor] | None = None
    batches: list[tf.Tensor] = field(default_factory=list)

    def prepare(self) -> None:
        """Make the table and compile the step."""
        layer, optimizer = self.make_layer(self.num_rows), self.make_optimizer()
        layer.build()
        optimizer.build(layer.trainable_variables)

        @tf.function(input_signature=[tf.TensorSpec([BATCH_SIZE], tf.int64)])
        def step(ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.reduce_sum(layer(ids), axis=1) - 1.0) ** 2)
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply(gradients, layer.trainable_variables)
            return loss

        rng = np.random.default_rng(0)
        ids = rng.integers(0, self.num_ids, (NUM_BATCHES, BATCH_SIZE))
        self.batches = [tf.constant(batch) for batch in ids]
        self.step = step.get_concrete_function()
        self.run(3)

    def run(self, num_steps: int) -> float:
        """Return the seconds of one step, over num_steps of them."""
        step = self.step
        if step is None:
            raise RuntimeError("Case.run: call prepare first.")
        start = time.perf_counter()
        for index in range(num_steps):
            loss = step(self.batches[index % NUM_BATCHES])
        float(loss)  # waits for the last step
        return (time.perf_counter() - start) / num_steps


def cases() -> list[Case]:
    """Return what is compared; the first one is what the others are measured against."""

    def ours(num_rows: int) -> keras.layers.Layer:
        return Embedding(num_rows, WIDTH)

    def stock(num_rows: int) -> keras.layers.Layer:
        return keras.layers.Embedding(num_rows, WIDTH)

    rowstep_name, keras_name = "rowstep LazyAdam + Embedding", "Keras Adam + Embedding"
    mixed_name = "rowstep LazyAdam + Keras Embedding"
    return [
        Case(rowstep_name, SMALL_ROWS, SMALL_ROWS, ours, LazyAdam, 100),
        Case(rowstep_name, LARGE_ROWS, SMALL_ROWS, ours, LazyAdam, 100),
        Case(rowstep_name, LARGE_ROWS, LARGE_ROWS, ours, LazyAdam, 100),
        Case(mixed_name, SMALL_ROWS, SMALL_ROWS, stock, LazyAdam, 10),
        Case(mixed_name, LARGE_ROWS, SMALL_ROWS, stock, LazyAdam, 1),
        Case(keras_name, SMALL_ROWS, SMALL_ROWS, stock, keras.optimizers.Adam, 10),
        Case(keras_name, LARGE_ROWS, SMALL_ROWS, stock, keras.optimizers.Adam, 1),
    ]


def measure(num_rounds: int) -> list[Case]:
    """Prepare all cases, then time them in turn."""
    prepared = cases()
    for case in prepared:
        case.prepare()
    for _ in range(num_rounds):
        for case in prepared:
            # A case that takes long is timed in fewer rounds, and the report says in how many.
            if sum(case.seconds_a_step) * case.steps_a_round < LONGEST_SECONDS:
                case.seconds_a_step.append(case.run(case.steps_a_round))
    return prepared


def report(measured: list[Case]) -> str:
    """Return the result as Markdown."""
    base = statistics.median(measured[0].seconds_a_step)
    lines = [
        "# Cost of a training step by table size",
        "",
        f"rowstep {rowstep.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}, "
        f"NumPy {np.__version__}, Python {platform.python_version()}, {platform.machine()} CPU, "
        f"{len(tf.config.list_physical_devices('GPU'))} GPUs.",
        "",
        f"Width {WIDTH}, {BATCH_SIZE} ids a step, float32. Medians over interleaved rounds, with "
        "the quartiles in brackets.",
        "",
        "| optimizer and layer | rows | ids from | ms a step | times the first line | rounds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case in measured:
        low, median, high = (1e3 * q for q in statistics.quantiles(case.seconds_a_step, n=4))
        lines.append(
            f"| {case.name} | {case.num_rows:,} | {case.num_ids:,} | {median:.2f} "
            f"[{low:.2f}, {high:.2f}] | {median / 1e3 / base:.2f} | {len(case.seconds_a_step)} |"
        )
    ratio = statistics.median(measured[1].seconds_a_step) / base
    lines += [
        "",
        f"**With rowstep the same batches cost {ratio:.2f} times as much at {LARGE_ROWS:,} rows as "
        f"at {SMALL_ROWS:,}.**",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print the report and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = report(measure(arguments.rounds))
    command = f"Command: `python benchmarks/lazy_adam_step.py --rounds {arguments.rounds}`\n"
    text = f"{text}\n{command}"
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
