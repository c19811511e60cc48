"""One tortured training: its starts, what each of them did, and what must come of them all."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from children import Child, Reporter, start
from crash_points import CrashPoints
from harness import LossError, Outcome
from tiny_training import (
    EVERY_STEPS,
    NUM_BATCHES,
    VARIANTS,
    Result,
    committed,
    make_job,
    result_of,
    work,
)

PAUSE_SECONDS = 0.005
PATIENCE_SECONDS = 240.0


@dataclass
class TrainingOutcome(Outcome):
    """What the trainings were put through."""

    kills: int = 0
    inside_a_write: int = 0
    in_a_row: int = 0
    """Kills of a start that had not run a batch since the kill before."""
    parent_only: int = 0
    """Kills that left a writer in the background alone with its work."""
    signals: int = 0
    signals_in_a_write: int = 0
    double_signals: int = 0
    trainings: int = 0
    starts: int = 0
    planned_batches: int = 0
    executed_batches: int = 0
    most_replayed: int = 0
    most_replayed_after_a_signal: int = 0
    slowest_stop_seconds: float = 0.0
    losses: int = 0
    places: dict[str, int] = field(default_factory=dict)


class Training:
    """A training in a folder of its own.

    Args:
        home: a workspace in which the tiny pipeline ran.
        folder: made here.
        outcome: counts what happens; its seed and the number of the round decide what that is.
        number: of the round.
        variant: the settings to train with.
        background: whether checkpoints are written in the background.
    """

    def __init__(
        self,
        home: Path,
        folder: Path,
        outcome: TrainingOutcome,
        number: int,
        variant: str,
        *,
        background: bool,
    ) -> None:
        self.chance = random.Random(f"{outcome.seed}/{number}")
        self.home, self.folder, self.outcome = home, folder, outcome
        self.variant, self.background = variant, background
        self.log = folder.with_suffix(".log")
        self.where = f"round {number}, {variant}, background {background}"
        self.done: str | None = None
        """The result, once a start has come to its end."""
        self.done_batches = self.newest = 0
        self.last_step = 0
        """That of the last batch of the last start; the newest committed one if it ran none."""
        self.stopped = False
        """Whether the last start ended by a signal, after which no batch may run again."""
        self.orphan: Child | None = None
        folder.mkdir()

    def fail(self, what: str) -> LossError:
        """Return an error that says where, and what the children printed."""
        tail = self.log.read_text()[-1500:] if self.log.exists() else ""
        return LossError(f"{self.where}: {what}\n{tail}")

    def start(self, point: tuple[str, int, bool] | None = None) -> Child:
        """Train in a child, which may have a crash point: place, number, whether to stop there."""
        background = f"checkpoint.background={str(self.background).lower()}"

        def run(reporter: Reporter) -> None:
            if point is not None:
                place, number, stop = point
                CrashPoints(reporter, self.folder / "state", place, number, stop=stop)
            settings = [*VARIANTS[self.variant], background]
            work(
                lambda: make_job(self.home, self.folder, *settings),
                PAUSE_SECONDS,
                reporter,
            )

        return start(run, self.log)

    def end(self, child: Child) -> Result:
        """Wait for the end of a start that nobody disturbs, and return what it came to."""
        code = child.wait(PATIENCE_SECONDS)
        self.account(child)
        child.bury()
        self.bury_orphan()
        if code != 0 or self.done is None:
            raise self.fail(f"a start that was left alone ended with exit code {code}")
        leftovers = [str(path) for path in self.folder.glob("state/*/checkpoints/.tmp-*")]
        if leftovers:
            raise self.fail(f"left behind: {leftovers}")
        self.outcome.planned_batches += self.done_batches
        return result_of(self.folder, self.done)

    def unfinished(self) -> bool:
        """Return whether a checkpoint is half written at this moment."""
        folders = self.folder.glob("state/*/checkpoints/.tmp-*")
        return any(not path.name.startswith((".tmp-delete", ".tmp-probe")) for path in folders)

    def account(self, child: Child) -> None:
        """Check that the batches of a start went on where they must, and how far they came."""
        self.outcome.starts += 1
        steps: list[int] = []
        for line in child.drain():
            if line.startswith("batch"):
                _, epoch, batch = line.split()
                steps.append(int(epoch) * NUM_BATCHES + int(batch) + 1)
            elif line.startswith("done"):
                self.done = line
        if steps:
            self._check_start(steps[0])
            if steps != list(range(steps[0], steps[-1] + 1)):
                raise self.fail(f"batches ran out of order: {steps}")
            self.done_batches = max(self.done_batches, steps[-1])
            self.stopped = False
        self.outcome.executed_batches += len(steps)
        self.last_step = steps[-1] if steps else committed(self.folder)
        self.newest = committed(self.folder)

    def _check_start(self, step: int) -> None:
        # A writer that outlived its training may have committed one more since.
        if not self.newest < step <= self.done_batches + 1:
            raise self.fail(
                f"step {self.newest} was committed and batch {self.done_batches} done. "
                f"The next start went on with batch {step}"
            )
        replayed, outcome = self.done_batches + 1 - step, self.outcome
        outcome.most_replayed = max(outcome.most_replayed, replayed)
        if self.stopped:
            outcome.most_replayed_after_a_signal = max(
                outcome.most_replayed_after_a_signal, replayed
            )
        allowed = 0 if self.stopped else EVERY_STEPS
        if replayed > allowed and (self.stopped or not self.background):
            raise self.fail(f"{replayed} batches ran again, {allowed} are allowed")

    def bury_orphan(self) -> None:
        """End a writer that outlived its training, unless it has ended by itself."""
        if self.orphan is not None:
            self.orphan.bury()
            self.orphan = None
