"""`kill -9` in the middle of a real pipeline run, and what the same command makes of it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# Another seed is another training, while everything up to Transform comes from the cache.
SETTINGS = ["train.seed=11", "train.callbacks=[slow_callback.Slow]"]
OVERRIDES = [part for setting in SETTINGS for part in ("--set", setting)]


class Started:
    """A `rowstep` command in the background, observed through the events of its run."""

    def __init__(self, tiny_home: Any, *arguments: str) -> None:
        self.runs = tiny_home.home / "tiny" / "runs"
        self.before = {path: path.stat().st_size for path in self.runs.glob("*/events.jsonl")}
        self.process = subprocess.Popen(
            tiny_home.command(*arguments),
            env=tiny_home.environment(),
            cwd=tiny_home.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, kind: str, at_least: int) -> None:
        """Wait until an event of a kind reports a step of at least so much."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            for path in self.runs.glob("*/events.jsonl"):
                new = path.read_bytes()[self.before.get(path, 0) :].splitlines()
                events = [json.loads(line) for line in new if line.endswith(b"}")]
                if any(e["kind"] == kind and e.get("step", -1) >= at_least for e in events):
                    return
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError(f"no {kind} event with step {at_least}")

    def worker(self) -> int:
        """Return the process id of the worker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])

    def end(self) -> tuple[int, str, str]:
        """Wait for the command and return its code and its two outputs."""
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out, err


@pytest.fixture(scope="module")
def resumed(tiny_home: Any) -> dict[str, Any]:
    """Kill a run's worker with signal 9 in mid-training, then resume it to the end."""
    command = ["run", str(tiny_home.config_file), *OVERRIDES]
    first = Started(tiny_home, *command)
    first.wait_for("checkpoint", at_least=50)
    os.kill(first.worker(), signal.SIGKILL)
    killed = first.end()
    name = killed[2].split()[0]
    second = tiny_home.rowstep("resume", name)
    assert second.returncode == 0, second.stdout + second.stderr
    folder = tiny_home.outputs("RecTrainer", "model_run")[-1]
    return {
        "killed": killed,
        "shown": second.stdout,
        "training": json.loads((folder / "training.json").read_text()),
        "name": name,
    }


def test_killed_run_says_how_to_go_on(resumed: dict[str, Any]) -> None:
    code, _, errors = resumed["killed"]
    assert code == 128 + 9
    assert "ended by signal 9 (SIGKILL)" in errors
    assert f"go on with: rowstep resume {resumed['name']}" in errors


def test_resume_goes_on_from_a_checkpoint(resumed: dict[str, Any]) -> None:
    started = resumed["training"]["started_from"]
    assert started.startswith("checkpoint at step "), started
    assert 0 < resumed["training"]["num_steps_run"] <= resumed["training"]["step"] - 50


def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    resumed: dict[str, Any], tiny_home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rowstep.components.checkpoints import open_checkpoint
    from rowstep.components.data import split_files
    from rowstep.components.job import TrainJob
    from rowstep.components.train import train
    from rowstep.configs import load_config

    monkeypatch.syspath_prepend(str(tiny_home.config_file.parent))
    examples = tiny_home.outputs("Transform", "transformed_examples")[0]
    whole = train(
        TrainJob(
            config=load_config(tiny_home.config_file, [*SETTINGS, "tracking.enabled=false"]),
            train_files=tuple(split_files(str(examples / "Split-train"))),
            eval_files=tuple(split_files(str(examples / "Split-eval"))),
            transform_graph=str(tiny_home.outputs("Transform", "transform_graph")[0]),
            serving_dir=str(tmp_path / "serving"),
            state_dir=tmp_path / "state",
        )
    )
    assert whole.num_steps_run == whole.step == resumed["training"]["step"]
    one = open_checkpoint(whole.checkpoint)
    other = open_checkpoint(resumed["training"]["checkpoint"])
    assert one.groups == other.groups
    # Global generators are everybody's; MLflow's client draws from them, and one run has none.
    for group in set(one.groups) - {"random"}:
        left, right = dict(one.arrays(group)), dict(other.arrays(group))
        assert left.keys() == right.keys()
        for key in left:
            assert left[key].tobytes() == right[key].tobytes(), f"{group}: {key}"
    assert whole.metrics == resumed["training"]["metrics"]


def test_resumed_run_continues_its_mlflow_run_with_one_row_a_step(
    resumed: dict[str, Any], tiny_home: Any
) -> None:
    run_id = resumed["training"]["mlflow_run_id"]
    with sqlite3.connect(tiny_home.home / "mlflow.db") as database:
        rows = database.execute(
            "select step, value from metrics where run_uuid = ? and key = 'batch/loss'", (run_id,)
        ).fetchall()
        runs = database.execute(
            "select count(*) from tags where key = 'rowstep.run_key' and value = ?",
            (resumed["training"]["run_key"],),
        ).fetchone()
        status = database.execute("select status from runs where run_uuid = ?", (run_id,))
        assert status.fetchone() == ("FINISHED",)
    assert runs == (1,)
    assert Counter(step for step, _ in rows) == Counter(range(10, 171, 10))


def test_sigterm_stops_after_a_checkpoint_and_the_same_command_goes_on(tiny_home: Any) -> None:
    command = ["run", str(tiny_home.config_file), *OVERRIDES, "--set", "train.seed=12"]
    started = Started(tiny_home, *command)
    started.wait_for("step", at_least=5)
    started.process.send_signal(signal.SIGTERM)
    code, _, errors = started.end()
    assert code == 75, errors
    assert "A checkpoint of that step was written." in errors
    again = tiny_home.rowstep(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "(going on)" in again.stdout
    assert "steps from checkpoint at step" in again.stdout
