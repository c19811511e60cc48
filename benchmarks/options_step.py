"""Measure what the options of the lazy optimizers add to a training step, and in which state size.

One table of a million rows, the same batches for all, timed in turn as in `lazy_adam_step.py`. The
first line is LazyAdam as it comes; the second column of numbers is how often its step fits into
that of the line. Bytes are those of the optimizer's state.

    python benchmarks/options_step.py                 print the report
    python benchmarks/options_step.py --output FILE   and write it to a file
"""

from __future__ import annotations

import argparse
import platform
import statistics
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from lazy_adam_step import BATCH_SIZE, WIDTH, Case

import rowstep
from rowstep.optimizers import LAMB, AdamMultilr, Embedding, LazyAdam

NUM_ROWS = 1_000_000
CASES: list[tuple[str, Any]] = [
    ("LazyAdam()", lambda: LazyAdam()),
    ("LazyAdam(check_finite=False)", lambda: LazyAdam(check_finite=False)),
    ("LazyAdam(clipnorm=1.0)", lambda: LazyAdam(clipnorm=1.0)),
    ("LazyAdam(global_clipnorm=1.0)", lambda: LazyAdam(global_clipnorm=1.0)),
    ("LazyAdam(weight_decay=0.01)", lambda: LazyAdam(weight_decay=0.01)),
    ('LazyAdam(bias_correction="visits")', lambda: LazyAdam(bias_correction="visits")),
    ("LazyAdam(idle_decay=True)", lambda: LazyAdam(idle_decay=True)),
    ("LazyAdam(row_velocity=True)", lambda: LazyAdam(row_velocity=True)),
    ('LazyAdam(state_dtype="bfloat16")', lambda: LazyAdam(state_dtype="bfloat16")),
    ("LazyAdam(use_ema=True)", lambda: LazyAdam(use_ema=True)),
    (
        "LazyAdam(gradient_accumulation_steps=4)",
        lambda: LazyAdam(gradient_accumulation_steps=4),
    ),
    ("LAMB(row_trust_ratio=True)", lambda: LAMB(row_trust_ratio=True)),
    ("AdamMultilr(lazy=True)", lambda: AdamMultilr(lazy=True)),
    ("LAMB()", lambda: LAMB()),
    ("AdamMultilr()", lambda: AdamMultilr()),
    ("Keras Adam()", lambda: keras.optimizers.Adam()),
]
_DENSE = ("LAMB()", "AdamMultilr()", "Keras Adam()")


def cases() -> list[tuple[Case, int]]:
    """Return every case, prepared, with the bytes of its optimizer's state."""
    prepared = []
    for name, make in CASES:
        made = []

        def optimizer(make: Any = make, made: list[Any] = made) -> Any:
            made.append(make())
            return made[-1]

        steps = 2 if name in _DENSE else 60
        case = Case(name, NUM_ROWS, NUM_ROWS, lambda rows: Embedding(rows, WIDTH), optimizer, steps)
        case.prepare()
        sizes = [np.prod(v.shape) * tf.as_dtype(v.dtype).size for v in made[-1].variables]
        prepared.append((case, int(sum(sizes))))
    return prepared


def report(measured: list[tuple[Case, int]]) -> str:
    """Return the result as Markdown."""
    base = statistics.median(measured[0][0].seconds_a_step)
    lines = [
        "# Cost of the options",
        "",
        f"rowstep {rowstep.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()} CPU, "
        f"{len(tf.config.list_physical_devices('GPU'))} GPUs.",
        "",
        f"{NUM_ROWS:,} rows of width {WIDTH}, {BATCH_SIZE} ids a step, float32. Medians over "
        "interleaved rounds, with the quartiles in brackets; with rowstep's `Embedding`.",
        "",
        "| optimizer | ms a step | times the first line | MiB of state |",
        "|---|---:|---:|---:|",
    ]
    for case, num_bytes in measured:
        low, median, high = (1e3 * q for q in statistics.quantiles(case.seconds_a_step, n=4))
        lines.append(
            f"| `{case.name}` | {median:.2f} [{low:.2f}, {high:.2f}] | "
            f"{median / 1e3 / base:.2f} | {num_bytes / 2**20:.1f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print the report and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    measured = cases()
    for _ in range(arguments.rounds):
        for case, _bytes in measured:
            case.seconds_a_step.append(case.run(case.steps_a_round))
    command = f"Command: `python benchmarks/options_step.py --rounds {arguments.rounds}`\n"
    text = f"{report(measured)}\n{command}"
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
