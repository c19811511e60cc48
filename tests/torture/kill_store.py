"""Kill a writer in a loop of saves, with no training around it, and look at what is left (T2).

    python tests/torture/kill_store.py --kills 2000 --seed 1
    python tests/torture/kill_store.py --kills 2000 --seed 1 --only 17     repeat one round

After every kill the next start must find a step that is not older than the last acknowledged one,
with every bit of it. Kills come at random times, in the middle of a save, and at single calls to
the file system; those at random times do not repeat exactly.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from children import Child, Reporter, start
from crash_points import CrashPoints
from harness import LossError, Outcome, arguments, finish
from systems import Rowstep, System, arrays_of, same

NUM_ROWS = 4000
KILLS_A_ROUND = 20


@dataclass
class StoreOutcome(Outcome):
    """What a system made of the kills."""

    kills: int = 0
    lost: int = 0
    """Starts after which an acknowledged step was gone: an older one, other bits, an error."""
    unreadable: int = 0
    """Starts that raised, so that somebody had to clean up."""
    acknowledged: int = 0
    """Saves that were acknowledged before a kill."""
    places: dict[str, int] = field(default_factory=dict)

    def count(self, place: str, times: int = 1) -> None:
        self.places[place] = self.places.get(place, 0) + times


def look(system: System, root: Path, reporter: Reporter) -> int | None:
    """Read what is there, say what it is, and return its step."""
    try:
        found = system.read(root, NUM_ROWS)
    except Exception as error:
        reporter.tell(f"unreadable {type(error).__name__}: {str(error)[:200]!r}")
        return None
    right = found.arrays is None or same(found.arrays, arrays_of(found.step, NUM_ROWS))
    reporter.tell(f"found {found.step} {'right' if right and not found.problems else 'wrong'}")
    return found.step


def write_for_ever(
    system: System, root: Path, reporter: Reporter, point: tuple[str, int, bool] | None
) -> None:
    """Start as a training does: read what is there, then save step after step."""
    if point is not None:
        CrashPoints(reporter, root, *point[:2], stop=point[2])
    step = look(system, root, reporter)
    if step is None:
        return
    with system.writing(root, NUM_ROWS) as writer:
        while True:
            step += 1
            arrays = arrays_of(step, NUM_ROWS)
            reporter.tell(f"saving {step}")
            writer.save(step, arrays)
            reporter.tell(f"saved {step}")


def seconds_a_save(system: System, log: Path) -> float:
    """Time a few saves, so that kills are spread over one whatever the disk."""
    with tempfile.TemporaryDirectory() as folder:
        child = start(lambda reporter: write_for_ever(system, Path(folder), reporter, None), log)
        while child.next_line(120) != "saved 3":
            if child.wait(0) is not None:
                raise RuntimeError(f"{system.name}: its writer ended. {child.drain()}")
        begin = time.monotonic()
        while child.next_line(60) != "saved 8":
            pass
        child.bury()
        return (time.monotonic() - begin) / 5


class Round:
    """Kills of one folder, one after the other."""

    def __init__(self, system: System, root: Path, chance: random.Random, save: float) -> None:
        self.system, self.root, self.chance, self.save = system, root, chance, save
        self.log = root.with_suffix(".log")
        self.acknowledged = self.started = 0

    def kill_one(self, outcome: StoreOutcome) -> None:
        """Start a writer, judge what it finds, and kill it."""
        point = self._point()
        child = start(lambda r: write_for_ever(self.system, self.root, r, point), self.log)
        try:
            place = self._aim(child, point)
            child.kill()
            child.wait()
            lines = child.drain()
        finally:
            child.bury()
        self._judge(lines, outcome)
        outcome.kills += 1
        in_save = sum(x.startswith("saving") for x in lines) > sum(
            x.startswith("saved") for x in lines
        )
        outcome.count(place)
        outcome.count("inside a save", in_save)

    def look(self, outcome: StoreOutcome) -> None:
        """Judge what the last kill left."""
        child = start(lambda r: look(self.system, self.root, r) and None, self.log)
        child.next_line(120)
        child.wait()
        self._judge(child.drain(), outcome)
        child.bury()

    def _point(self) -> tuple[str, int, bool] | None:
        if not self.system.crash_points or self.chance.random() < 0.4:
            return None
        place = self.chance.choice(["write"] * 6 + ["cleanup", "read"])
        return (
            place,
            self.chance.randrange({"write": 45}.get(place, 6)),
            self.chance.random() < 0.5,
        )

    def _aim(self, child: Child, point: tuple[str, int, bool] | None) -> str:
        chance = self.chance
        if point is not None:
            deadline = time.monotonic() + 2.0  # a call that may never come
            while time.monotonic() < deadline and (line := child.next_line(2.0)) is not None:
                if line.startswith("at "):
                    if not point[2]:
                        time.sleep(chance.uniform(0, self.save / 20))
                    return f"at a call of a {point[0]}"
            return "at a random time"
        num_saves = chance.randrange(4)
        wanted = "found" if num_saves == 0 else "saving"
        while (line := child.next_line(60.0)) is not None:
            num_saves -= line.startswith("saving")
            if line.startswith(wanted) and num_saves <= 0:
                break
        time.sleep(chance.uniform(0, (3 if wanted == "found" else 1) * self.save))
        return "at a random time" if wanted == "found" else "at a random time of a save"

    def _judge(self, lines: list[str], outcome: StoreOutcome) -> None:
        begin = next((x for x in lines if x.startswith(("found", "unreadable"))), None)
        if begin is None:
            return  # killed while it read; the next start will tell
        words = begin.split()
        if words[0] == "unreadable":
            outcome.unreadable += 1
            self._lose(begin, outcome, lost=self.acknowledged > 0)
            shutil.rmtree(self.root)
            self.root.mkdir()
            self.acknowledged = self.started = 0
            return
        step = int(words[1])
        if not self.acknowledged <= step <= max(self.started, self.acknowledged):
            self._lose(f"found step {step}", outcome)
        elif words[2] != "right":
            self._lose(f"step {step} does not hold what was saved", outcome)
        saved = [int(x.split()[1]) for x in lines if x.startswith("saved ")]
        outcome.acknowledged += len(saved)
        saving = [int(x.split()[1]) for x in lines if x.startswith("saving ")]
        self.acknowledged, self.started = max([step, *saved]), max([step, *saving])

    def _lose(self, what: str, outcome: StoreOutcome, *, lost: bool = True) -> None:
        outcome.lost += lost
        told = f"acknowledged step {self.acknowledged}, and then: {what}"
        outcome.note(told)


def torture_store(
    system: System,
    num_kills: int,
    seed: int,
    *,
    only: int | None = None,
    fail: bool = True,
) -> StoreOutcome:
    """Kill the writer so many times.

    Raises:
        LossError: at the first loss, unless `fail` is off and losses are counted.
    """
    outcome = StoreOutcome(system.name, system.version(), seed)
    rounds = [only] if only is not None else range(-(-num_kills // KILLS_A_ROUND))
    with tempfile.TemporaryDirectory() as folder:
        save = seconds_a_save(system, Path(folder) / "first.log")
        for number in rounds:
            root = Path(folder) / str(number)
            root.mkdir()
            turn = Round(system, root, random.Random(f"{seed}/{number}"), save)
            for kill in range(min(KILLS_A_ROUND, num_kills - outcome.kills) + 1):
                if kill < KILLS_A_ROUND and outcome.kills < num_kills:
                    turn.kill_one(outcome)
                else:
                    turn.look(outcome)
                if fail and (outcome.lost or outcome.unreadable):
                    raise LossError(f"round {number}, kill {kill}: {outcome.notes[-1]}")
            shutil.rmtree(root)
    return outcome


if __name__ == "__main__":
    options = arguments(__doc__, kills=2000)
    sys.exit(
        finish(
            options,
            lambda: [torture_store(Rowstep(), options.kills, options.seed, only=options.only)],
        )
    )
