"""Run every harness in its long form, and write the table of the README.

    make torture                             about an hour
    python tests/torture/torture.py --short  the same in minutes, to see that it works

It prints counts and seeds as they come, stops at the first loss, and writes
benchmarks/results/torture_<date>.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import SEED, prepare

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
LONG = {
    "kill_store": ["--kills", "2000"],
    "corrupt": ["--flips", "2000"],
    "kill_training": ["--kills", "200", "--signals", "20", "--grace", "30"],
    "peers": ["--kills", "60", "--cases", "1000"],
}
SHORT = {
    "kill_store": ["--kills", "40"],
    "corrupt": ["--cases", "100", "--flips", "20"],
    "kill_training": ["--kills", "6", "--signals", "2", "--grace", "60"],
    "peers": ["--kills", "4", "--cases", "20"],
}
EXPLANATION = """\
Every system keeps the same arrays and is killed with `kill -9` by the same schedule, at random
times and inside saves. Then its checkpoint of a few KB is spoiled: every byte of rowstep's, a
random sample of the others'. *Silent* is a start that takes wrong numbers, or nothing at all,
without an error or a warning; one that takes an older state without saying so is counted apart.
For the last column a training is killed in mid-epoch and goes on; for the others it is a small
Keras model with dropout on data in a fixed order. BackupAndRestore saves every 10 batches,
`np.savez` keeps the list of weights and optimizer variables and no position in the data, and
CheckpointManager keeps model, optimizer and the iterator of the data, as TensorFlow's guide does:
it finds its batch again, but not the state of Keras' dropout."""
Rows = list[dict[str, Any]]


def run(name: str, arguments: list[str], scratch: Path) -> Rows:
    """Run one harness in a process of its own, and return what it counted."""
    counts = scratch / f"{name}.json"
    command = [
        sys.executable,
        str(HERE / f"{name}.py"),
        *arguments,
        "--json",
        str(counts),
    ]
    print(f"== {name} {' '.join(arguments)}", flush=True)
    quiet = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONWARNINGS": "ignore",
    }
    if subprocess.run(command, env={**os.environ, **quiet}).returncode:
        sys.exit(1)
    return json.loads(counts.read_text())


def table(rows: Rows) -> list[str]:
    """Return the comparison, a line a system."""
    lines = [
        "| system | kills | losses of an acknowledged step | unreadable, needs a human "
        "| bit flips silently wrong | truncations silent | mid-epoch resume bit-identical |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for kills in (row for row in rows if row["kind"] == "StoreOutcome"):
        [spoiled] = of(rows, "CorruptOutcome", kills["system"])
        flips, cuts = unnoticed(spoiled, "bit flip"), unnoticed(spoiled, "truncation")
        name = f"{kills['system']} ({kills['version']})"
        cells = [name, kills["kills"], kills["lost"], kills["unreadable"], flips, cuts]
        lines.append(f"| {' | '.join(map(str, cells))} | {resumes(rows, kills['system'])} |")
    return lines


def unnoticed(spoiled: dict[str, Any], kind: str) -> str:
    """Say how often a damaged state was taken for a whole one, or for none at all."""
    older = spoiled["older"][kind]
    more = f"; {older} took the step before" if older else ""
    return f"{spoiled['silent'][kind]} of {spoiled['tried'][kind]}{more}"


def of(rows: Rows, kind: str, system: str) -> Rows:
    return [row for row in rows if row["kind"] == kind and row["system"] == system]


def resumes(rows: Rows, system: str) -> str:
    """Say whether a killed training ended with the same bits, where that was tried."""
    for row in of(rows, "TrainingOutcome", system):
        return f"yes, {row['kills']} kills of {row['trainings']} trainings"
    for row in of(rows, "ResumeOutcome", system):
        answer = "yes" if row["identical"] else "no"
        return f"{answer}, {row['executed_batches']} batches instead of {row['planned_batches']}"
    return "not tried"


def details(rows: Rows) -> list[str]:
    """Return what our own harnesses counted, in words."""
    lines = []
    for row in rows:
        if not row["system"].startswith("rowstep"):
            continue
        hidden = {"kind", "system", "version", "seed", "notes"}
        counts = []
        for key, value in row.items():
            if isinstance(value, dict):
                value = ", ".join(f"{name} {number}" for name, number in value.items())
                counts.append(f"{key} ({value})")
            elif key not in hidden:
                counts.append(f"{key.replace('_', ' ')} {value}")
        lines.append(f"- {row['kind']}, {row['system']}, seed {row['seed']}: {'; '.join(counts)}")
    return lines


def report(rows: Rows, command: str) -> str:
    """Return the page."""
    today = datetime.date.today()
    machine = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs"
    return "\n".join(
        [
            f"# Torture of checkpoints, {today}",
            "",
            f"{machine}, CPU only. Command: `{command}`.",
            "",
            *table(rows),
            "",
            EXPLANATION,
            "",
            "What rowstep was put through:",
            "",
            *details(rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="a handful of each")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--home", type=Path, help="a workspace in which the tiny pipeline ran")
    parser.add_argument("--output", type=Path, help="the page to write")
    arguments = parser.parse_args()
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = prepare(arguments.home, Path(folder) / "home")
        for name, amounts in (SHORT if arguments.short else LONG).items():
            common = ["--seed", str(arguments.seed), "--home", str(home)]
            rows += run(name, [*amounts, *common], Path(folder))
    page = report(rows, f"python tests/torture/torture.py --seed {arguments.seed}")
    output = arguments.output or RESULTS / f"torture_{datetime.date.today()}.md"
    output.write_text(page)
    print(f"{page}\nwritten to {output}")


if __name__ == "__main__":
    main()
