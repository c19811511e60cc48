"""Kill and stop real trainings until they have come to their end, and compare every bit (T1, T10).

    python tests/torture/kill_training.py --kills 200 --signals 20 --seed 1
    python tests/torture/kill_training.py --only 4 --seed 1      repeat one round

A round is one training: it is started, killed with SIGKILL, started again, stopped with SIGTERM,
and at last left alone. Its last checkpoint must then hold the same names and bytes as that of a
training which nobody disturbed, its metrics must be the same numbers, no batch may be left out, and
every start must go on from the newest committed step. At least half of the kills fall into a
write. Kills whose moment is a time do not repeat exactly.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

import training_callbacks  # noqa: F401  loads Keras before the first fork
from children import Child
from harness import arguments, finish, prepare
from sigterm import stop
from tiny_training import NUM_BATCHES, VARIANTS, Result
from training_round import PATIENCE_SECONDS, Training, TrainingOutcome

import rowstep
from rowstep.components.fingerprint import code_fingerprint

KILLS_A_ROUND = 10
# A read is a resume: a kill there is the second one in a row.
PLACES = ["write", "any", "read", "read", "epoch", "evaluation", "cleanup"]
NUM_CALLS = {"write": 150, "cleanup": 8, "read": 60}


def kill_one(training: Training, place: str) -> None:
    """Start, wait for the place, kill; or see the training come to its end before."""
    chance, outcome = training.chance, training.outcome
    point = None
    if place in NUM_CALLS:
        point = (place, chance.randrange(NUM_CALLS[place]), chance.random() < 0.7)
    child = training.start(point)
    aim(training, child, place, hold=point is not None and point[2])
    if child.wait(0) is not None:
        training.account(child)
        child.bury()
        if training.done is None:
            raise training.fail("a start failed")
        return
    alone = outcome.kills % 2 == 1
    child.kill(group=not alone)
    outcome.inside_a_write += training.unfinished()
    child.wait()
    if alone:
        child.let_go()
    training.account(child)
    outcome.kills += 1
    outcome.parent_only += alone
    outcome.in_a_row += training.newest > 0 and not any(x.startswith("batch") for x in child.lines)
    outcome.places[place] = outcome.places.get(place, 0) + 1
    training.bury_orphan()
    if alone:  # its writer may still be at work when the next start asks for the lock
        training.orphan = child
    else:
        child.bury()


def aim(training: Training, child: Child, place: str, *, hold: bool) -> None:
    """Return when it is time to kill, or the child is done.

    Args:
        hold: whether the child waits at its crash point.
    """
    chance = training.chance
    if place == "any":
        time.sleep(chance.uniform(0.0, 8.0))
        return
    wanted = {
        "epoch": "epoch_end",
        "evaluation": f"batch [0-9]+ {NUM_BATCHES - 1}$",
        "export": "train_end",
    }.get(place, "at ")
    while (line := child.next_line(PATIENCE_SECONDS)) is not None:
        if line.startswith("done"):
            child.wait(PATIENCE_SECONDS)
            return
        if re.match(wanted, line):
            break
    if place == "export":
        await_export(training, child)
    elif not hold:
        time.sleep(chance.uniform(0.0, {"evaluation": 0.2, "epoch": 0.02}.get(place, 0.004)))


def await_export(training: Training, child: Child) -> None:
    """Return when the served model is being written."""
    begin = time.time()
    serving = training.folder / "serving"
    while child.wait(0) is None and time.time() < begin + PATIENCE_SECONDS:
        if serving.exists() and serving.stat().st_mtime >= begin:
            time.sleep(training.chance.uniform(0.0, 0.3))
            return
        time.sleep(0.01)


def next_place(training: Training, num_left: int, *, export: bool) -> str:
    """Choose where to kill: half of all into a write, the last of some rounds into the export."""
    place, outcome = training.chance.choice(PLACES), training.outcome
    if export and num_left <= 2:
        return "export"
    return "write" if outcome.inside_a_write * 2 <= outcome.kills else place


def run_round(
    training: Training, kills: int, signals: int, *, export: bool, grace_seconds: float
) -> Result:
    """Kill and stop one training, then let it come to its end."""
    before, num_done = training.outcome.kills, training.outcome.signals
    places = ["kill"] * kills + ["signal"] * signals
    if signals:
        training.chance.shuffle(places)
    while places and training.done is None:
        if places.pop() == "signal":
            stop(training, grace_seconds)
        else:
            left = places.count("kill") + 1
            kill_one(training, next_place(training, left, export=export))
    result = training.end(training.start())
    before, num_done = (
        training.outcome.kills - before,
        training.outcome.signals - num_done,
    )
    print(f"  {training.where}: {before} kills, {num_done} signals", flush=True)
    return result


def compare(training: Training, wanted: Result, found: Result) -> None:
    """Raise LossError unless a training ended like the undisturbed one."""
    for key in wanted.meta.keys() | found.meta.keys():
        if wanted.meta.get(key) != found.meta.get(key):
            parts = f"{found.meta.get(key)!s:.300}, not {wanted.meta.get(key)!s:.300}"
            raise training.fail(f"{key} is {parts}")
    if wanted.metrics != found.metrics:
        raise training.fail(f"metrics are {found.metrics}, not {wanted.metrics}")
    if wanted.digest != found.digest:
        raise training.fail("the arrays of the last checkpoint differ")


def torture(
    home: Path | None,
    num_kills: int,
    num_signals: int,
    seed: int,
    *,
    only: int | None = None,
    grace_seconds: float = 5.0,
) -> TrainingOutcome:
    """Kill and stop trainings so many times in all.

    Raises:
        LossError: at the first one that does not go on, or end, as it must.
    """
    outcome = TrainingOutcome("rowstep", f"rowstep {rowstep.__version__}", seed)
    aside = TrainingOutcome("", "", seed)
    with tempfile.TemporaryDirectory() as folder:
        home, scratch = prepare(home, Path(folder) / "home"), Path(folder)
        code_fingerprint()  # kept from now on: what is edited meanwhile is not what runs
        wanted: dict[str, Result] = {}
        number = only or 0
        while outcome.kills < num_kills or outcome.signals < num_signals:
            variant, background = sorted(VARIANTS)[number % 2], number // 2 % 2 == 0
            kills = min(KILLS_A_ROUND, num_kills - outcome.kills)
            left = num_signals - outcome.signals
            # Spread over the rounds, so that they meet all kinds of them.
            signals = min(left, -(-left * KILLS_A_ROUND // max(num_kills, 1)))
            quiet = None
            if variant not in wanted:  # beside the first round, on another core
                folder_of_it = scratch / variant
                quiet = Training(home, folder_of_it, aside, number, variant, background=False)
                alone = quiet.start()
            training = Training(
                home,
                scratch / str(number),
                outcome,
                number,
                variant,
                background=background,
            )
            found = run_round(
                training,
                kills,
                signals,
                export=number % 2 == 1,
                grace_seconds=grace_seconds,
            )
            if quiet is not None:
                wanted[variant] = quiet.end(alone)
            compare(training, wanted[variant], found)
            outcome.trainings += 1
            number += 1
            if only is not None:
                break
    return outcome


if __name__ == "__main__":
    options = arguments(__doc__, kills=200, signals=20, grace=5)
    sys.exit(
        finish(
            options,
            lambda: [
                torture(
                    options.home,
                    options.kills,
                    options.signals,
                    options.seed,
                    only=options.only,
                    grace_seconds=options.grace,
                )
            ],
        )
    )
