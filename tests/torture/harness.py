"""What every harness shares: its arguments, what it counts and how it says so."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

SEED = 20_261_121
NUM_NOTES = 3
CONFIG = Path(__file__).parents[1] / "support" / "tiny.yaml"


class LossError(Exception):
    """Say what was lost."""


@dataclass
class Outcome:
    """What one harness found out about one system."""

    system: str
    version: str
    seed: int
    notes: list[str] = field(default_factory=list, kw_only=True)
    """The first few things that went wrong."""

    def note(self, text: str) -> None:
        if len(self.notes) < NUM_NOTES:
            self.notes.append(text)

    def __str__(self) -> str:
        shown = {k: v for k, v in asdict(self).items() if k not in ("system", "notes")}
        counts = ", ".join(f"{key} {value}" for key, value in shown.items())
        return "\n  ".join([f"{self.system}: {counts}", *self.notes])


def prepare(home: Path | None, scratch: Path) -> Path:
    """Return a workspace in which the tiny pipeline ran; without one given it runs in `scratch`."""
    if home is not None:
        return home
    command = [sys.executable, "-m", "rowstep.pipeline", "run", str(CONFIG)]
    environment = {**os.environ, "ROWSTEP_HOME": str(scratch)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the tiny pipeline failed:\n{done.stdout}{done.stderr}")
    return scratch


def arguments(text: str | None, **defaults: int) -> argparse.Namespace:
    """Read --seed, --only, --json and one whole number a default."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, help="the round to repeat")
    parser.add_argument("--home", type=Path, help="a workspace in which the tiny pipeline ran")
    parser.add_argument("--json", type=Path, help="a file for the counts")
    return parser.parse_args()


def finish(options: argparse.Namespace, work: Callable[[], list[Outcome]]) -> int:
    """Run a harness, print what it counted, and return its exit code."""
    begin = time.monotonic()
    try:
        outcomes = work()
    except LossError as loss:
        print(f"LOST with seed {options.seed}: {loss}\n  repeat with: {repeat(options.seed, loss)}")
        return 1
    for outcome in outcomes:
        print(outcome)
    print(f"{time.monotonic() - begin:.0f} s, seed {options.seed}", flush=True)
    if options.json:
        rows = [{"kind": type(o).__name__, **asdict(o)} for o in outcomes]
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def repeat(seed: int, loss: LossError) -> str:
    """Return the command that repeats the round of a loss; its log of before says the rest."""
    words = str(loss).split()
    only = ["--only", words[1].rstrip(",:")] if words[0] == "round" else []
    # Where an option comes twice, the last one counts.
    return " ".join(
        ["python", *sys.argv, *([] if "--seed" in sys.argv else ["--seed", str(seed)]), *only]
    )
