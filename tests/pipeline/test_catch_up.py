"""Days of data that came while nobody trained: caught up in order, through kills, by one command.

Four days, of which one comes late, in a real pipeline. Minutes long: the quick side of the same is
in test_spans.py (what is due) and test_resolvers.py (what a warm start takes).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rowstep.components.checkpoints import open_checkpoint
from rowstep.components.vocabularies import load_vocabularies

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"
NEW_YEAR = 20_454  # days from 1970-01-01 to 2026-01-01
KILLED = 128 + 9


class Home:
    """A folder with partitions beside a workspace, and the `rowstep` command for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pipeline = root / "home" / "spans"
        self.outputs: list[str] = []

    def write_day(self, day: int) -> None:
        """Write the partition of a day of January 2026; every day ten users come and ten go."""
        users = [f"u{10 * day + i % 40}" for i in range(1200)]
        rows = [
            f"{u},i{(i * day) % 25},{(i * day) % 5 + 1},{day}{i:04}" for i, u in enumerate(users)
        ]
        text = "\n".join(["user_id,item_id,rating,timestamp", *rows]) + "\n"
        temporary = self.root / "unfinished"
        temporary.write_text(text)
        (self.root / "days").mkdir(exist_ok=True)
        os.replace(temporary, self.root / "days" / f"2026-01-{day:02}.csv")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Begin a `rowstep` command."""
        path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        return subprocess.Popen(
            [sys.executable, "-m", "rowstep.pipeline", *arguments],
            env={**os.environ, "ROWSTEP_HOME": str(self.root / "home"), "PYTHONPATH": path},
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *more: str) -> subprocess.Popen[str]:
        """Begin to train what is due."""
        pattern = self.root / "days" / "{YYYY}-{MM}-{DD}.csv"
        return self.start(
            "run", str(SUPPORT / "spans.yaml"), "--set", f"data.path='{pattern}'", *more
        )

    def end(self, process: subprocess.Popen[str], code: int) -> str:
        """Wait for a command, hold its exit code against the wanted one, return what it said."""
        shown = process.communicate(timeout=900)[0]
        self.outputs.append(shown)
        assert process.returncode == code, shown
        return shown

    def wait(self, process: subprocess.Popen[str], what: Callable[[], bool]) -> None:
        """Wait until something has come true while a command runs."""
        deadline = time.monotonic() + 600
        while not what():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def runs(self) -> dict[int, dict[str, Any]]:
        """Return folder, status and events of the run of each day; a day has one run."""
        found = {}
        for config in sorted(self.pipeline.glob("runs/*/config.json")):
            folder = config.parent
            if not (folder / "status.json").exists():
                continue
            day = json.loads(config.read_text())["data"]["span"] - NEW_YEAR + 1
            assert day not in found
            found[day] = json.loads((folder / "status.json").read_text()) | {"folder": folder}
        return found

    def status(self, day: int) -> str | None:
        """Return the status of the run of a day."""
        return self.runs().get(day, {}).get("status")

    def events(self, day: int) -> list[dict[str, Any]]:
        """Return the events of the run of a day that are wholly written."""
        folder = self.runs().get(day, {}).get("folder")
        path = folder / "events.jsonl" if folder else None
        lines = path.read_bytes().split(b"\n")[:-1] if path and path.exists() else []
        return [json.loads(line) for line in lines]

    def has_checkpoint(self, day: int) -> bool:
        """Return whether the training of a day has committed a checkpoint."""
        return any(e["kind"] == "checkpoint" and e["step"] >= 20 for e in self.events(day))


def worker_of(process: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return int(children.read_text().split()[0])


@pytest.fixture(scope="module")
def caught_up(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Train January 1; let 2, 4 and 5 come; catch up through two kills; let 3 come late."""
    home = Home(tmp_path_factory.mktemp("spans"))
    home.write_day(1)
    home.end(home.run(), 0)
    for day in (2, 4, 5):
        home.write_day(day)

    first = home.run()
    home.wait(first, lambda: home.has_checkpoint(2))
    os.kill(worker_of(first), signal.SIGKILL)  # in the middle of a span
    home.end(first, KILLED)

    second = home.run()
    home.wait(second, lambda: home.status(2) == "finished")
    second.kill()  # the command itself, between two spans
    home.end(second, -signal.SIGKILL)

    home.end(home.run(), 0)
    home.write_day(3)
    home.end(home.run(), 0)
    return home


def test_every_day_is_trained_once_and_in_order(caught_up: Home) -> None:
    runs = caught_up.runs()
    assert {day: run["status"] for day, run in runs.items()} == dict.fromkeys(
        (1, 2, 4, 5), "finished"
    )
    ends = [runs[day]["time"] for day in (1, 2, 4, 5)]
    assert ends == sorted(ends)
    first, killed, *_ = caught_up.outputs
    assert "span 2026-01-01 finished" in first
    assert "3 spans are due: 2026-01-02, 2026-01-04 to 2026-01-05" in killed
    assert "due are 2026-01-02, 2026-01-04 to 2026-01-05. Go on with: rowstep run" in killed


def test_after_a_kill_the_same_command_goes_on_with_the_span_that_was_cut_off(
    caught_up: Home,
) -> None:
    second, third = caught_up.outputs[2:4]
    assert "span 2026-01-02 (going on)" in second
    assert "span 2026-01-02 finished" in second
    starts = [e for e in caught_up.events(2) if e["kind"] == "train_start"]
    assert starts[0]["origin"].startswith("warm start")
    assert starts[-1]["origin"].startswith("checkpoint at step ")
    assert "2 spans are due: 2026-01-04 to 2026-01-05" in third
    assert "span 2026-01-02" not in third
    assert third.index("span 2026-01-04 finished") < third.index("span 2026-01-05 finished")


def test_a_window_is_the_newest_days_without_those_that_are_missing(caught_up: Home) -> None:
    runs = caught_up.runs()
    spans = {day: [s - NEW_YEAR + 1 for s in run["result"]["spans"]] for day, run in runs.items()}
    assert spans == {1: [1], 2: [1, 2], 4: [4], 5: [4, 5]}
    assert "no partition of 2026-01-03 between 2026-01-03 and 2026-01-04" in caught_up.outputs[3]


def test_a_day_that_came_late_is_named_and_left_alone(caught_up: Home) -> None:
    last = caught_up.outputs[-1]
    assert "no run has read 2026-01-03, and newer spans are trained." in last
    assert "no span has come since 2026-01-05." in last


def keys_of(run: dict[str, Any]) -> dict[str, set[bytes]]:
    """Return the keys that the tables of a run's last checkpoint were trained with."""
    saved = open_checkpoint(run["result"]["training"]["checkpoint"])
    return {name: set(found.iter_keys()) for name, found in load_vocabularies(saved).items()}


def test_rows_of_yesterdays_keys_are_kept_and_those_of_new_keys_begin_afresh(
    caught_up: Home,
) -> None:
    runs = caught_up.runs()
    for yesterday, today in ((1, 2), (2, 4), (4, 5)):
        before, after = keys_of(runs[yesterday]), keys_of(runs[today])
        notices = [e["text"] for e in caught_up.events(today) if "rows kept" in e.get("text", "")]
        for name in ("user_id", "item_id"):
            kept = len(before[name] & after[name]) + 1  # and the row of unknown keys
            gone, new = len(before[name] - after[name]), len(after[name] - before[name])
            assert f"{name}: {kept} rows kept, {gone} dropped, {new} new" in notices[0]
    assert len(keys_of(runs[2])["user_id"]) == 50
    assert len(keys_of(runs[2])["user_id"] - keys_of(runs[4])["user_id"]) == 30


def test_runs_are_listed_with_their_spans(caught_up: Home) -> None:
    shown = caught_up.end(caught_up.start("runs"), 0)
    assert [line.rpartition("  ")[2] for line in shown.splitlines()] == [
        f"span 2026-01-{day:02}" for day in (1, 2, 4, 5)
    ]


def test_metadata_shows_the_spans_and_that_each_day_began_from_the_last_pushed(
    caught_up: Home,
) -> None:
    from ml_metadata import proto
    from ml_metadata.metadata_store import MetadataStore

    connection = proto.ConnectionConfig()
    connection.sqlite.filename_uri = str(caught_up.pipeline / "metadata.db")
    store = MetadataStore(connection)
    raw = [a for a in store.get_artifacts_by_type("Examples") if "/CsvExampleGen/" in a.uri]
    read = {a.custom_properties["span"].int_value - NEW_YEAR + 1 for a in raw}
    assert read == {1, 2, 4, 5}

    live = [
        a
        for a in store.get_artifacts_by_type("rowstep.Checkpoint")
        if a.state == proto.Artifact.LIVE
    ]
    by_day = {a.custom_properties["span"].int_value - NEW_YEAR + 1: a.id for a in live}
    assert sorted(by_day) == [1, 2, 4, 5]
    began_from = {}
    for event in store.get_events_by_artifact_ids(list(by_day.values())):
        if event.type == proto.Event.OUTPUT:
            inputs = store.get_events_by_execution_ids([event.execution_id])
            given = [e.artifact_id for e in inputs if e.path.steps[0].key == "base_checkpoint"]
            began_from[event.artifact_id] = given
    assert began_from == {
        by_day[1]: [],
        by_day[2]: [by_day[1]],
        by_day[4]: [by_day[2]],
        by_day[5]: [by_day[4]],
    }
