"""Programs as users of the five originals wrote them run with nothing but the import changed."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parent / "switched").glob("*.py"))


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    def run(program: Path) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(program)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    with ThreadPoolExecutor(max_workers=2) as pool:
        results = pool.map(run, PROGRAMS)
        return dict(zip((program.stem for program in PROGRAMS), results, strict=True))


def test_there_is_a_program_for_each_of_the_five() -> None:
    assert [program.stem for program in PROGRAMS] == [
        "capreolus_adam_multilr",
        "contrib_lazy_adam",
        "dtensor_adam",
        "merlin_lazy_adam",
        "model_garden_lamb",
    ]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_program_runs_and_learns(program: Path, outputs: dict[str, str]) -> None:
    source = program.read_text()
    assert re.search(r"^from rowstep\.optimizers(\.\w+)? import \w+$", source, re.MULTILINE)
    last = outputs[program.stem].splitlines()[-1]
    first_loss, last_loss = re.fullmatch(r".*loss ([\d.]+) -> ([\d.]+).*", last).groups()  # type: ignore[union-attr]
    assert float(last_loss) < float(first_loss)
