"""Spoil a checkpoint of a few KB at every byte, and count what goes unnoticed (T4).

    python tests/torture/corrupt.py
    python tests/torture/corrupt.py --cases 100     so many of each kind
    python tests/torture/corrupt.py --only 4711     repeat one case, and say what came of it

Two steps are saved, then the files of the second are spoiled one case at a time: one random bit of
every byte flipped, every file cut at every byte, blocks of 512 bytes zeroed, files missing, longer
by a byte, or taken from the first step; and a file too many. A start then must find the second step
right, or say what is wrong. Besides, bits are flipped in a checkpoint of 100 MB.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from children import Reporter, start
from harness import LossError, Outcome, arguments, finish
from systems import Rowstep, System, arrays_of, same

NUM_ROWS = 16
LARGE_ROWS = 100_000_000 // (16 * 4 * 3)
BLOCK = 512
MEMORY = 8 * 2**30  # a damaged length must not take the machine down
WRONG = ("wrong numbers", "nothing without a word")
OLDER = "an older step without a word"


class Case(NamedTuple):
    """One way to spoil one file."""

    kind: str
    file: str
    data: bytes | None
    """What the file then holds; None where it is gone."""


@dataclass
class CorruptOutcome(Outcome):
    """What a start said, by the way its files were spoiled."""

    num_bytes: int = 0
    tried: dict[str, int] = field(default_factory=dict)
    silent: dict[str, int] = field(default_factory=dict)
    older: dict[str, int] = field(default_factory=dict)
    """Starts that took the step before without a word; the only silent one that is not wrong."""
    results: dict[str, int] = field(default_factory=dict)

    def count(self, case: Case, result: str) -> None:
        self.tried[case.kind] = self.tried.get(case.kind, 0) + 1
        for counts, found in ((self.silent, WRONG), (self.older, (OLDER,))):
            counts[case.kind] = counts.get(case.kind, 0) + (result in found)
        self.results[result] = self.results.get(result, 0) + 1


def files_below(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def save_steps(system: System, root: Path, steps: Sequence[int], log: Path, num_rows: int) -> None:
    """Save in a process of its own: this one starts nothing that a fork would miss."""

    def work(reporter: Reporter) -> None:
        with system.writing(root, num_rows) as writer:
            for step in steps:
                writer.save(step, arrays_of(step, num_rows))

    child = start(work, log)
    if child.wait():
        raise LossError(f"{system.name}: its writer failed. {log.read_text()}")
    child.bury()


def cases_of(old: dict[str, bytes], new: dict[str, bytes], chance: random.Random) -> list[Case]:
    """Spoil every file that the second save wrote."""
    cases = []
    for file, data in sorted(new.items()):
        if old.get(file) == data or file.endswith("LOCK"):
            continue
        for position in range(len(data)):
            flipped = bytearray(data)
            flipped[position] ^= 1 << chance.randrange(8)
            cases.append(Case("bit flip", file, bytes(flipped)))
            cases.append(Case("truncation", file, data[:position]))
        for position in range(0, len(data), BLOCK):
            hole = data[position : position + BLOCK]
            zeroed = data[:position] + bytes(len(hole)) + data[position + BLOCK :]
            cases.append(Case("zeroed block", file, zeroed))
        cases.append(Case("missing file", file, None))
        cases.append(Case("longer file", file, data + b"\0"))
        cases.append(Case("extra file", f"{Path(file).parent}/extra{Path(file).suffix}", data))
        other = file.replace("2", "1")
        if other != file and other in old:
            cases.append(Case("swapped file", file, old[other]))
    return [case for case in cases if new.get(case.file) != case.data]


def result_of(system: System, root: Path) -> str:
    """Say what a start makes of the folder."""
    try:
        found = system.read(root, NUM_ROWS)
    except Exception:  # any error is a refusal, and each system has its own
        return "refused"
    if found.arrays is None:
        return "refused" if found.problems else WRONG[1]
    if not same(found.arrays, arrays_of(found.step, NUM_ROWS)) or found.step not in (
        1,
        2,
    ):
        return WRONG[0]
    if found.step == 2:
        return "unharmed"
    return "the step before, and said so" if found.problems else OLDER


def try_cases(
    system: System,
    root: Path,
    whole: dict[str, bytes],
    cases: list[Case],
    reporter: Reporter,
) -> None:
    """Spoil, read, mend; one line a case."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    mend(root, whole)
    for number, case in enumerate(cases):
        if case.data is None:
            (root / case.file).unlink()
        else:
            (root / case.file).write_bytes(case.data)
        reporter.tell(f"{number} {result_of(system, root)}")
        (root / case.file).unlink(missing_ok=True)
        mend(root, whole)


def mend(root: Path, whole: dict[str, bytes]) -> None:
    for file, data in whole.items():
        path = root / file
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def corrupt(
    system: System,
    seed: int,
    *,
    at_most: int | None = None,
    only: int | None = None,
    fail: bool = True,
) -> CorruptOutcome:
    """Try every case, or so many of each kind at random.

    Raises:
        LossError: at the first one that goes unnoticed, unless `fail` is off and they are counted.
    """
    outcome = CorruptOutcome(system.name, system.version(), seed)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        root, log = Path(folder) / "root", Path(folder) / "log"
        root.mkdir()
        save_steps(system, root, [1], log, NUM_ROWS)
        old = files_below(root)
        save_steps(system, root, [2], log, NUM_ROWS)
        whole = files_below(root)
        cases = list(enumerate(cases_of(old, whole, chance)))
        outcome.num_bytes = sum(len(whole[f]) for f in {c.file for _, c in cases} & whole.keys())
        if only is not None:
            cases = cases[only : only + 1]
        elif at_most is not None:
            cases = sampled(cases, at_most, chance)
        while cases:
            results = run_batch(system, root, whole, cases, log)
            for (number, case), result in zip(cases, results, strict=False):
                outcome.count(case, result)
                if result in (*WRONG, OLDER):
                    outcome.note(f"case {number}: {case.kind} of {case.file}: {result}")
                    if fail:
                        raise LossError(f"round {number}: {outcome.notes[-1]}")
            cases = cases[len(results) :]
    return outcome


def sampled(
    cases: list[tuple[int, Case]], at_most: int, chance: random.Random
) -> list[tuple[int, Case]]:
    kinds = {case.kind: [pair for pair in cases if pair[1].kind == case.kind] for _, case in cases}
    few = [chance.sample(some, min(at_most, len(some))) for some in kinds.values()]
    return sorted(pair for some in few for pair in some)


def run_batch(
    system: System,
    root: Path,
    whole: dict[str, bytes],
    cases: list[tuple[int, Case]],
    log: Path,
) -> list[str]:
    """Try cases in a child until they are done or one of them kills it; at least one result."""
    child = start(lambda r: try_cases(system, root, whole, [c for _, c in cases], r), log)
    results: list[str] = []
    while len(results) < len(cases) and (line := child.next_line(60)) is not None:
        results.append(line.partition(" ")[2])
    if len(results) < len(cases):
        results.append("the process died, or did not end")
    child.bury()
    return results


def corrupt_large(num_flips: int, seed: int) -> CorruptOutcome:
    """Flip bits of a checkpoint of 100 MB, in place.

    Raises:
        LossError: at the first one that goes unnoticed.
    """
    system, chance = Rowstep(), random.Random(seed)
    outcome = CorruptOutcome(f"{system.name}, 100 MB", system.version(), seed)
    with tempfile.TemporaryDirectory() as folder:
        root, log = Path(folder) / "root", Path(folder) / "log"
        save_steps(system, root, [1], log, NUM_ROWS)
        old = set(root.rglob("*"))
        save_steps(system, root, [2], log, LARGE_ROWS)
        files = sorted(p for p in root.rglob("*") if p.is_file() and p not in old)
        sizes = [file.stat().st_size for file in files]
        outcome.num_bytes = sum(sizes)
        for number in range(num_flips):
            # As many in the small files, the manifest among them, as in the large ones.
            [file] = chance.choices(files, sizes if number % 2 else None)
            case = Case("bit flip", file.name, None)
            with open(file, "r+b") as opened:
                position = chance.randrange(os.fstat(opened.fileno()).st_size)
                byte = os.pread(opened.fileno(), 1, position)[0]
                os.pwrite(opened.fileno(), bytes([byte ^ 1 << chance.randrange(8)]), position)
                result = result_of(system, root)
                os.pwrite(opened.fileno(), bytes([byte]), position)
            outcome.count(case, result)
            if result != "the step before, and said so":
                raise LossError(f"100 MB, byte {position} of {file.name}: {result}")
    return outcome


def main() -> list[Outcome]:
    outcomes: list[Outcome] = [
        corrupt(Rowstep(), options.seed, at_most=options.cases or None, only=options.only)
    ]
    if options.only is None and options.flips:
        outcomes.append(corrupt_large(options.flips, options.seed))
    return outcomes


if __name__ == "__main__":
    options = arguments(__doc__, cases=0, flips=2000)
    sys.exit(finish(options, main))
