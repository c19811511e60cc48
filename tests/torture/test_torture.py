"""The short form of the torture: real processes, really killed. `make torture` is the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# Ways to keep state that lose it: the harnesses must see that.
NAIVE = """
import numpy as np
from corrupt import corrupt
from kill_store import torture_store
from systems import Found, Savez, arrays_of

class Raw(Savez):
    name = "plain bytes"
    def read(self, root, num_rows):
        file = root / "state.bin"
        if not file.exists():
            return Found(0, None, [])
        data, arrays = file.read_bytes(), {}
        for name, like in arrays_of(0, num_rows).items():
            arrays[name] = np.frombuffer(data[: like.nbytes], like.dtype).reshape(like.shape)
            data = data[like.nbytes :]
        return Found(int(arrays["iterations"]), arrays, [])
    def writing(self, root, num_rows):
        from contextlib import nullcontext
        class Saver:
            def save(self, step, arrays):
                (root / "state.bin").write_bytes(b"".join(a.tobytes() for a in arrays.values()))
        return nullcontext(Saver())
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python among the harnesses, which import each other as scripts do."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=HERE,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
    )


def assert_passes(*command: str) -> None:
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_kill_of_a_writer_loses_an_acknowledged_step() -> None:
    assert_passes("kill_store.py", "--kills", "25")


def test_nothing_that_is_spoiled_goes_unnoticed() -> None:
    assert_passes("corrupt.py", "--cases", "200", "--flips", "0")


def test_killed_and_stopped_trainings_end_with_the_same_bits(tiny_home: Any) -> None:
    home = str(tiny_home.home)
    # Twelve times the grace of the long form: this machine may be doing other things.
    counts = ("--kills", "3", "--signals", "1", "--grace", "60")
    assert_passes("kill_training.py", *counts, "--home", home)


def test_the_harnesses_notice_what_is_lost() -> None:
    script = NAIVE + (
        "killed = torture_store(Raw(), 25, 1, fail=False)\n"
        "assert killed.lost, killed\n"
        "spoiled = corrupt(Raw(), 1, at_most=50, fail=False)\n"
        "assert spoiled.silent['bit flip'], spoiled\n"
    )
    assert_passes("-c", script)


def test_a_loss_fails_and_says_how_to_repeat_it() -> None:
    script = NAIVE + (
        "import argparse, sys, harness\n"
        "options = argparse.Namespace(seed=1, json=None)\n"
        "sys.exit(harness.finish(options, lambda: [torture_store(Raw(), 60, 1)]))\n"
    )
    done = run("-c", script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "LOST with seed 1: round " in done.stdout
    assert "--seed 1 --only " in done.stdout
