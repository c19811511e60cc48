"""Kill real trainings until they have come to their end, and compare every bit of it (T1).

    python tests/torture/kill_training.py --kills 200 --seed 1
    python tests/torture/kill_training.py --kills 200 --seed 1 --only 4    repeat one round

A round is one training: it is started, killed, started again, and at last left alone. Its last
checkpoint must then hold the same names and bytes as that of a training which nobody disturbed, its
metrics must be the same numbers, no batch may be left out, and every start must go on from the
newest committed step. Kills whose moment is a time do not repeat exactly.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import training_callbacks  # noqa: F401  loads Keras before the first fork
from children import Child, Reporter, start
from crash_points import CrashPoints
from harness import Failure, Outcome, arguments, finish
from tiny_training import (
    EVERY_STEPS,
    NUM_BATCHES,
    VARIANTS,
    Result,
    checkpoints,
    committed,
    make_job,
    prepare,
    result_of,
    work,
)

KILLS_A_ROUND = 10
PAUSE_SECONDS = 0.005
PATIENCE_SECONDS = 240.0
# Of ten kills. A read is a resume: most of them come straight after another kill.
PLACES = ["write"] * 5 + ["any", "read", "epoch", "evaluation", "cleanup", "export"]


@dataclass
class TrainingOutcome(Outcome):
    """What the trainings were put through."""

    kills: int = 0
    trainings: int = 0
    starts: int = 0
    inside_a_write: int = 0
    in_a_row: int = 0
    """Kills of a start that had not yet run a batch after the kill before."""
    parent_only: int = 0
    """Kills that left a writer in the background alone with its work."""
    planned_batches: int = 0
    executed_batches: int = 0
    most_replayed: int = 0
    losses: int = 0
    places: dict[str, int] = field(default_factory=dict)


class Training:
    """One round: a training, its kills and what must come of it."""

    def __init__(self, home: Path, folder: Path, seed: int, number: int) -> None:
        self.chance = random.Random(f"{seed}/{number}")
        self.variant = sorted(VARIANTS)[number % 2]
        self.background = number // 2 % 2 == 0
        self.home, self.folder, self.log = home, folder, folder.with_suffix(".log")
        self.where = f"round {number}, {self.variant}, background {self.background}"
        self.done: str | None = None
        self.done_batches = 0
        folder.mkdir()

    def fail(self, what: str) -> Failure:
        tail = self.log.read_text()[-1500:] if self.log.exists() else ""
        return Failure(f"{self.where}: {what}\n{tail}")

    def start(self, point: tuple[str, int, bool] | None) -> Child:
        background = f"checkpoint.background={str(self.background).lower()}"

        def run(reporter: Reporter) -> None:
            if point is not None:
                place, number, stop = point
                CrashPoints(reporter, self.folder / "state", place, number, stop=stop)
            settings = [*VARIANTS[self.variant], background]
            work(lambda: make_job(self.home, self.folder, *settings), PAUSE_SECONDS, reporter)

        return start(run, self.log)

    def leave_alone(self, outcome: TrainingOutcome) -> Result:
        """Start once more and wait for the end."""
        child = self.start(None)
        if child.wait(PATIENCE_SECONDS) != 0:
            child.bury()
            raise self.fail("a start that was left alone did not come to its end")
        self.account(child, outcome)
        child.bury()
        if self.done is None:
            raise self.fail("the training ended without a result")
        leftovers = [str(path) for path in self.folder.glob("state/*/checkpoints/.tmp-*")]
        if leftovers:
            raise self.fail(f"left behind: {leftovers}")
        return result_of(self.folder, self.done)

    def kill_one(self, place: str, outcome: TrainingOutcome) -> None:
        """Start, wait for the place, kill; or see the training come to its end before."""
        point = self._point(place)
        child = self.start(point)
        hit = self._aim(child, place, point)
        if not hit and child.wait(0) is not None:
            if child.wait(0) != 0:
                raise self.fail("a start failed")
            self.account(child, outcome)
            child.bury()
            return
        alone = self.chance.random() < 0.5
        child.kill(group=not alone)
        unfinished = self._unfinished()
        child.wait()
        if alone:
            child.let_go()
        self.account(child, outcome)
        outcome.kills += 1
        outcome.parent_only += alone
        outcome.inside_a_write += unfinished
        outcome.in_a_row += outcome.kills > 1 and not any(
            line.startswith("batch") for line in child.lines
        )
        outcome.places[place] = outcome.places.get(place, 0) + 1
        if alone:  # until the next start has the lock, so that it has to wait for the writer
            self.orphan = child
        else:
            child.bury()

    def _unfinished(self) -> bool:
        folders = self.folder.glob("state/*/checkpoints/.tmp-*")
        return any(not path.name.startswith((".tmp-delete", ".tmp-probe")) for path in folders)

    def _point(self, place: str) -> tuple[str, int, bool] | None:
        most = {"write": 150, "cleanup": 8, "read": 60}.get(place)
        stop = self.chance.random() < 0.7
        return None if most is None else (place, self.chance.randrange(most), stop)

    def _aim(self, child: Child, place: str, point: tuple[str, int, bool] | None) -> bool:
        """Wait until it is time to kill; return whether that was where it was meant to be."""
        chance = self.chance
        if place == "any":
            time.sleep(chance.uniform(0.0, 8.0))
            return False
        wanted = {
            "epoch": "epoch_end",
            "evaluation": f"batch {chance.randrange(2)} {NUM_BATCHES - 1}",
            "export": "train_end",
        }.get(place, "at ")
        while (line := child.next_line(PATIENCE_SECONDS)) is not None:
            if line.startswith(wanted):
                break
            if line.startswith("done"):
                return False
        if line is None:
            return False
        if place == "export":
            self._await_export(child)
        elif point is None or not point[2]:
            time.sleep(chance.uniform(0.0, {"evaluation": 0.2, "epoch": 0.02}.get(place, 0.004)))
        return True

    def _await_export(self, child: Child) -> None:
        begin = time.time()
        serving = self.folder / "serving"
        while child.wait(0) is None and time.time() < begin + PATIENCE_SECONDS:
            if serving.exists() and serving.stat().st_mtime >= begin:
                time.sleep(self.chance.uniform(0.0, 0.3))
                return
            time.sleep(0.01)

    def account(self, child: Child, outcome: TrainingOutcome) -> None:
        """Check that the batches of a start go on where they must, and note how far they came."""
        outcome.starts += 1
        first = None
        for line in child.drain():
            if line.startswith("batch"):
                _, epoch, batch = line.split()
                step = int(epoch) * NUM_BATCHES + int(batch) + 1
                first = step if first is None else first
                if first == step:
                    self._check_start(step, outcome)
                elif step != previous + 1:
                    raise self.fail(f"batch {step} came after batch {previous}")
                previous = step
                outcome.executed_batches += 1
            elif line.startswith("done"):
                self.done = line
        if first is not None:
            self.done_batches = max(self.done_batches, previous)
        self.newest = committed(self.folder)

    newest = 0
    orphan: Child | None = None

    def _check_start(self, step: int, outcome: TrainingOutcome) -> None:
        # A writer that outlived its training may have committed one more since.
        if step <= self.newest or step > self.done_batches + 1:
            raise self.fail(
                f"committed step {self.newest}, executed {self.done_batches}, went on with {step}"
            )
        replayed = self.done_batches + 1 - step
        outcome.most_replayed = max(outcome.most_replayed, replayed)
        if not self.background and replayed > EVERY_STEPS:
            raise self.fail(f"{replayed} batches ran again, {EVERY_STEPS} are allowed")

    def end_orphan(self) -> None:
        if self.orphan is not None:
            self.orphan.bury()
            self.orphan = None


def run_round(
    home: Path, scratch: Path, number: int, kills: int, wanted: Result, outcome: TrainingOutcome
) -> None:
    """Kill one training so many times, and compare its end."""
    training = Training(home, scratch / str(number), outcome.seed, number)
    places = [training.chance.choice(PLACES[:-1]) for _ in range(kills)]
    if kills > 3 and number % 2:
        places[-1] = "export"
    before = outcome.kills
    for place in places:
        training.kill_one(place, outcome)
        if training.done is not None:
            break
    training.end_orphan()
    found = training.leave_alone(outcome)
    outcome.trainings += 1
    outcome.planned_batches += training.done_batches
    compare(training, wanted, found)
    print(f"  {training.where}: {outcome.kills - before} kills, same bits", flush=True)


def compare(training: Training, wanted: Result, found: Result) -> None:
    """Raise Failure unless a training ended like the undisturbed one."""
    for key in wanted.meta.keys() | found.meta.keys():
        if wanted.meta.get(key) != found.meta.get(key):
            raise training.fail(f"{key} is {found.meta.get(key)}, not {wanted.meta.get(key)}")
    if wanted.metrics != found.metrics:
        raise training.fail(f"metrics are {found.metrics}, not {wanted.metrics}")
    if wanted.digest != found.digest:
        raise training.fail("the arrays of the last checkpoint differ")


def torture_training(
    home: Path | None, num_kills: int, seed: int, only: int | None = None
) -> TrainingOutcome:
    """Kill trainings so many times in all.

    Raises:
        Failure: at the first one that does not end like an undisturbed one.
    """
    import rowstep

    outcome = TrainingOutcome("rowstep", f"rowstep {rowstep.__version__}", seed)
    with tempfile.TemporaryDirectory() as folder:
        home = prepare(home, Path(folder) / "home")
        wanted: dict[str, Result] = {}
        number = 0 if only is None else only
        while outcome.kills < num_kills:
            variant = sorted(VARIANTS)[number % 2]
            if variant not in wanted:
                undisturbed = Training(home, Path(folder) / variant, seed, number)
                aside = TrainingOutcome("", "", seed)
                wanted[variant] = undisturbed.leave_alone(aside)
                print(f"  {variant}: undisturbed, {aside.executed_batches} batches", flush=True)
            kills = min(KILLS_A_ROUND, num_kills - outcome.kills)
            run_round(home, Path(folder), number, kills, wanted[variant], outcome)
            number += 1
            if only is not None:
                break
    return outcome


if __name__ == "__main__":
    options = arguments(__doc__, kills=200)
    sys.exit(
        finish(
            options,
            lambda: [torture_training(options.home, options.kills, options.seed, options.only)],
        )
    )
