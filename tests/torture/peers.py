"""What the same harnesses do to other ways of keeping a training's state.

    python tests/torture/peers.py --kills 60 --cases 1000

Losses are counted, not raised.
"""

from __future__ import annotations

import sys

import corrupt
import kill_store
import peer_training
from harness import Outcome, arguments, finish
from systems import Savez, System
from systems_of_tensorflow import BackupAndRestore, CheckpointManager


def main() -> list[Outcome]:
    systems: list[System] = [
        Savez(),
        BackupAndRestore(),
        BackupAndRestore(double_checkpoint=True),
        CheckpointManager(),
    ]
    outcomes: list[Outcome] = []
    for name in peer_training.WAYS:
        outcomes.append(peer_training.resume_mid_epoch(name, options.seed))
        print(outcomes[-1], flush=True)
    for system in systems:
        outcomes.append(kill_store.torture_store(system, options.kills, options.seed, fail=False))
        print(outcomes[-1], flush=True)
        cases = min(options.cases, 300) if "double" in system.name else options.cases
        outcomes.append(corrupt.corrupt(system, options.seed, at_most=cases, fail=False))
        print(outcomes[-1], flush=True)
    return outcomes


if __name__ == "__main__":
    options = arguments(__doc__, kills=60, cases=1000)
    sys.exit(finish(options, main))
