"""A save that is killed, refused, stopped or raced at each of its file-system calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "support" / "store_under_faults.py"
# A crash of the process alone loses nothing that was written, synced or not: a file system in
# memory finds the same faults as a disk, without waiting for one.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=MEMORY))
    yield path
    shutil.rmtree(path)


def run(mode: str, folder: Path, *options: str) -> Any:
    command = [sys.executable, str(SCRIPT), mode, str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("step", ["3", "2"], ids=["a new step", "a step saved again"])
def test_a_kill_at_any_call_leaves_the_old_or_the_new_step_whole(folder: Path, step: str) -> None:
    counts = run("kill", folder, "--step", step)
    assert counts["old"] > 40, counts
    assert counts["new"] > 20, counts


def test_kills_at_random_times_lose_nothing_acknowledged(tmp_path: Path) -> None:
    counts = run("loop", tmp_path, "--times", "12")
    assert counts["inside a save"] > 0, counts


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    counts = run("loop", tmp_path, "--times", "200")
    assert counts["inside a save"] > 20, counts


def test_an_error_of_the_disk_at_any_call_is_told_and_loses_nothing(folder: Path) -> None:
    counts = run("fail", folder, "--error", "ENOSPC")
    assert counts["refused"] > 30, counts
    assert counts["saved"] > 20, counts


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [[], ["--lasting"]], ids=["once", "from then on"])
@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "EACCES", "ESTALE"])
@pytest.mark.parametrize("step", ["3", "2"])
def test_every_kind_of_error_at_any_call_loses_nothing(
    folder: Path, error: str, step: str, lasting: list[str]
) -> None:
    counts = run("fail", folder, "--error", error, "--step", step, *lasting)
    assert counts["refused"] > 30, counts


def test_an_owner_that_was_replaced_while_it_stood_still_commits_nothing(folder: Path) -> None:
    counts = run("stop", folder)
    assert counts["refused"] > 40, counts
    assert counts["had saved"] > 20, counts


def test_of_several_that_start_at_once_exactly_one_writes(folder: Path) -> None:
    assert run("race", folder, "--times", "8") == {"races": 8}


@pytest.mark.slow
def test_of_several_that_start_at_once_exactly_one_writes_fifty_times(folder: Path) -> None:
    assert run("race", folder, "--times", "50") == {"races": 50}


def test_a_power_cut_finds_every_byte_on_the_disk_before_the_name(folder: Path) -> None:
    calls = [(event, Path(name)) for event, name in run("trace", folder)]
    root = folder / "root"
    renames = [n for n, (event, _) in enumerate(calls) if event == "os.rename"]
    commit, first_deletion = renames[0], renames[1]
    draft = calls[commit][1]
    assert draft.name.startswith(".tmp-save-")
    before = calls[:commit]
    written = {name for event, name in before if event == "write"}
    assert len(written) == 3
    for file in written:
        assert [event for event, name in before if name == file][-1] == "fsync", file
    assert before[-1] == ("fsync", draft), "the names of the files, too"
    files = [name.name for event, name in before if event == "fsync" and name != draft]
    assert files[-1] == "MANIFEST.json"
    assert ("fsync", root) in calls[commit:first_deletion], "nothing goes before the new one stays"
