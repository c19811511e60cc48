"""The folder of reports has a size limit, is tidied up, and survives kills while that happens."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from own_store import rows_in

from rowstep.components.tracking import Tracker, open_tracker, sync
from rowstep.components.tracking.journal import Journal
from rowstep.components.tracking.target import Ack, Target, TrackingError

TARGET = Target("http://host", "ratings", "first", "key-1")


def rows(journal: Journal, offset: int = 0) -> list[dict[str, Any]]:
    return [row for row, _ in journal.read(offset)]


def steps(journal: Journal, offset: int = 0) -> list[int]:
    return [row["step"] for row in rows(journal, offset) if row["kind"] == "metrics"]


def offset_after(journal: Journal, step: int) -> int:
    (found,) = [after for row, after in journal.read(0) if row.get("step") == step]
    return found


def acknowledge(journal: Journal, offset: int) -> None:
    journal.write_ack(Ack(offset, "run-1", "3", TARGET.uri, TARGET.experiment))


def fill(journal: Journal, first: int, last: int) -> None:
    for step in range(first, last + 1):
        assert journal.append_metrics(step, {"loss": 1.0 / step, "rate": float(step)})


def begin(folder: Path, max_bytes: int = 2**28) -> Journal:
    journal = Journal(folder, max_bytes=max_bytes)
    start = {"target": vars(TARGET), "params": {"lr": "0.1"}, "tags": {"a": "b"}}
    journal.append("start", **start)
    return journal


# --- the limit ------------------------------------------------------------------------------


def test_what_does_not_fit_is_dropped_but_never_the_status(tmp_path: Path) -> None:
    journal = begin(tmp_path / "a", max_bytes=4000)
    kept = [journal.append_metrics(step, {"loss": 1.0}) for step in range(1, 101)]
    assert kept == sorted(kept, reverse=True)
    assert 0 < sum(kept) < 100
    assert journal.num_bytes <= 4000
    assert not journal.append("text", name="a", text="x" * 1000)
    assert not journal.append_file("a.bin", b"x" * 1000)
    assert list(tmp_path.rglob("files/*")) == []
    assert journal.append("tags", tags={"c": "d"})
    assert journal.append("status", status="FINISHED")
    assert [row["kind"] for row in rows(journal)][-2:] == ["tags", "status"]
    journal.close()


def test_files_count_and_one_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    journal = begin(tmp_path / "a", max_bytes=4000)
    assert journal.append_file("one.bin", b"x" * 3000)
    assert not journal.append_file("two.bin", b"x" * 3000)
    assert journal.append_metrics(1, {"loss": 1.0})
    assert [path.stat().st_size for path in (tmp_path / "a" / "files").iterdir()] == [3000]
    journal.close()
    journal = Journal(tmp_path / "a", max_bytes=4000)
    assert not journal.append_file("two.bin", b"x" * 3000)
    journal.close()


def test_a_file_whose_report_was_never_written_is_removed(tmp_path: Path) -> None:
    journal = begin(tmp_path / "a")
    journal.append_file("one.bin", b"x")
    journal.files.write(b"left by a process killed here")
    journal.close()
    Journal(tmp_path / "a").close()
    (kept,) = (tmp_path / "a" / "files").iterdir()
    assert kept.read_bytes() == b"x"


# --- cutting away -----------------------------------------------------------------------------


def test_sent_reports_are_cut_away_and_offsets_still_mean_the_same(tmp_path: Path) -> None:
    journal = begin(tmp_path / "a", max_bytes=20_000)
    fill(journal, 1, 130)
    offset, size = offset_after(journal, 100), journal.size
    after_110 = offset_after(journal, 110)
    acknowledge(journal, offset)
    before = (tmp_path / "a" / "journal.jsonl").stat().st_size
    assert journal.compact(offset)
    assert (tmp_path / "a" / "journal.jsonl").stat().st_size < before / 2
    for _ in range(2):
        assert journal.size == size
        assert steps(journal, offset) == [*range(101, 131)]
        assert steps(journal, after_110) == [*range(111, 131)]
        head, *rest = rows(journal)
        assert (head["kind"], head["params"], head["tags"]) == (
            "compacted",
            {"lr": "0.1"},
            {"a": "b"},
        )
        assert [row["step"] for row in rest] == [*range(101, 131)]
        assert journal.target == TARGET
        assert journal.ack() is not None
        assert not journal.compact(offset)  # nothing is left of what was sent
        journal.close()
        journal = Journal(tmp_path / "a", max_bytes=20_000)
    fill_again = [journal.append_metrics(step, {"loss": 9.0}) for step in (50, 130, 131)]
    assert all(fill_again)
    assert steps(journal, size) == [131]
    journal.close()


def test_cutting_twice_keeps_what_the_first_cut_kept(tmp_path: Path) -> None:
    journal = begin(tmp_path / "a", max_bytes=10_000)
    for last in (60, 120, 180):
        fill(journal, last - 59, last)
        assert journal.compact(journal.size)
    journal.append("status", status="FAILED")
    journal.close()
    journal = Journal(tmp_path / "a", max_bytes=10_000)
    assert (journal.target, journal.history.status) == (TARGET, "FAILED")
    assert journal.history.fresh_metrics(180, {"loss": 1.0, "new": 1.0}) == {"new": 1.0}
    assert rows(journal)[0]["num_reports"] == 181
    journal.close()


def test_files_of_reports_that_were_cut_away_go_with_them(tmp_path: Path) -> None:
    journal = begin(tmp_path / "a", max_bytes=10_000)
    journal.append_file("one.bin", b"x" * 6000)
    (row,) = [row for row in rows(journal) if row["kind"] == "file"]
    offset = journal.size
    journal.files.mark_sent(row["file"])
    journal.append_file("two.bin", b"y" * 1000)
    assert journal.compact(offset)
    (kept,) = (tmp_path / "a" / "files").iterdir()
    assert kept.read_bytes() == b"y" * 1000
    journal.close()


DAMAGED = [
    '{"kind": "tags"}',
    '{"kind": "start", "target": 7}',
    '{"kind": "metrics", "metrics": 5}',
    '{"kind": "metrics", "step": "x", "metrics": {"loss": 1}}',
    '{"kind": "file", "file": ["a"], "name": "a"}',
    '{"ts_ms": "yesterday"}',
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_that_is_json_does_not_stop_a_cut(tmp_path: Path, line: str) -> None:
    journal = begin(tmp_path / "a", max_bytes=10_000)
    journal.append_metrics(1, {"loss": 1.0})
    journal.close()
    with open(tmp_path / "a" / "journal.jsonl", "a") as file:
        file.write(line + "\n")
    journal = Journal(tmp_path / "a", max_bytes=10_000)
    fill(journal, 2, 80)
    assert journal.compact(offset_after(journal, 70))
    head, *rest = rows(journal)
    assert (head["params"], head["largest_step"]["loss"]) == ({"lr": "0.1"}, 70)
    assert [row["step"] for row in rest] == [*range(71, 81)]
    journal.close()


def test_a_first_line_that_does_not_say_what_it_stands_for_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "journal.jsonl").write_text('{"kind": "compacted"}\n')
    with pytest.raises(TrackingError, match="must say how many bytes it stands for"):
        Journal(tmp_path / "a")


def test_little_is_not_cut_away(tmp_path: Path) -> None:
    journal = begin(tmp_path / "a", max_bytes=100_000)
    fill(journal, 1, 100)
    assert not journal.compact(journal.size)
    assert steps(journal) == [*range(1, 101)]
    journal.close()


KILLED = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from rowstep.components.tracking.journal import Journal

    folder, call, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    num_calls, real = 0, getattr(os, call)

    def deadly(*arguments, **keywords):
        global num_calls
        num_calls += 1
        if num_calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **keywords)

    journal = Journal(folder, max_bytes=20_000)
    setattr(os, call, deadly)
    journal.compact(journal.ack().offset)
    print("alive")
""")


def test_kill_9_at_every_call_of_a_cut_leaves_every_report(tmp_path: Path) -> None:
    template = tmp_path / "template"
    journal = begin(template, max_bytes=20_000)
    journal.append_file("one.bin", b"x" * 100)
    (row,) = [row for row in rows(journal) if row["kind"] == "file"]
    fill(journal, 1, 130)
    offset, size = offset_after(journal, 100), journal.size
    acknowledge(journal, offset)
    journal.close()
    num_killed = 0
    for call in ("open", "write", "pread", "fsync", "replace", "close"):
        for number in range(1, 6):
            folder = tmp_path / f"{call}-{number}"
            shutil.copytree(template, folder)
            command = [sys.executable, "-c", KILLED, str(folder), call, str(number)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                assert done.stdout == "alive\n"
                break
            assert done.returncode == -signal.SIGKILL, done.stderr
            num_killed += 1
            journal = Journal(folder, max_bytes=20_000)
            ack = journal.ack()
            assert ack is not None
            assert (ack.offset, journal.size) == (offset, size)
            assert steps(journal, ack.offset) == [*range(101, 131)]
            is_cut = rows(journal)[0]["kind"] == "compacted"
            assert steps(journal) == [*range(101 if is_cut else 1, 131)]
            # A file is there as long as a report names it, and no longer.
            assert journal.files.path(row["file"]).exists() == (not is_cut)
            assert list(folder.glob("*.new-*")) == []
            journal.append_metrics(130, {"loss": 9.0, "rate": 9.0})
            journal.append_metrics(131, {"loss": 1.0})
            assert steps(journal, size) == [131]
            journal.close()
    assert num_killed >= 7


# --- with MLflow ------------------------------------------------------------------------------


class Place:
    def __init__(self, folder: Path, template: Path) -> None:
        self.spool, self.database = folder / "spool", folder / "store" / "mlflow.db"
        self.template, self.problems = template, list[str]()

    def bring_up(self) -> None:
        self.database.parent.unlink(missing_ok=True)
        self.database.parent.mkdir()
        shutil.copy(self.template, self.database)

    def tracker(self, max_spool_bytes: int) -> Tracker:
        return open_tracker(
            f"sqlite:///{self.database}",
            "movies",
            "one",
            "key-1",
            self.spool,
            on_problem=self.problems.append,
            artifact_root=self.spool.parent / "artifacts",
            max_spool_bytes=max_spool_bytes,
        )

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return rows_in(self.database, query)


@pytest.fixture
def place(tmp_path: Path, mlflow_template_db: Path) -> Place:
    pytest.importorskip("mlflow")
    return Place(tmp_path, mlflow_template_db)


def test_dropped_reports_are_counted_aloud_once_in_a_tag_and_at_the_end(place: Place) -> None:
    place.database.parent.write_text("in the way")
    tracker = place.tracker(max_spool_bytes=5000)
    tracker.start({"lr": 0.1}, {})
    for step in range(1, 201):
        tracker.log_metrics(step, {"loss": 1.0})
    report = tracker.close("FINISHED", timeout_seconds=0.5)
    said = [text for text in place.problems if "rowstep.dropped_reports" in text]
    assert len(said) == 1
    assert "0.00476837 MiB of reports, which is its limit" in said[0]
    journal = Journal(place.spool)
    kept = steps(journal)
    journal.close()
    assert kept == [*range(1, len(kept) + 1)]
    assert report.num_dropped == 200 - len(kept) > 0

    place.bring_up()
    sent = sync(place.spool)
    assert (sent.num_unsent, sent.num_dropped) == (0, report.num_dropped)
    assert "did not fit and were dropped" in sent.problem
    tags = dict(place.ask("select key, value from tags"))
    assert tags["rowstep.dropped_reports"] == str(report.num_dropped)
    assert place.ask("select status from runs") == [("FINISHED",)]
    assert place.ask("select value from params") == [("0.1",)]
    assert place.ask("select step from metrics order by 1") == [(step,) for step in kept]

    tracker = place.tracker(max_spool_bytes=10**6)
    tracker.start({"lr": 0.1}, {})
    assert tracker.close("FINISHED").num_dropped == report.num_dropped


def test_a_long_training_with_a_small_folder_loses_nothing_while_mlflow_answers(
    place: Place,
) -> None:
    place.bring_up()
    run_ids, last = set(), 0
    for _ in range(4):
        tracker = place.tracker(max_spool_bytes=60_000)
        tracker.start({"lr": 0.1}, {})
        for step in range(max(last - 20, 1), last + 201):
            tracker.log_metrics(step, {"loss": 1.0 / step})
        last += 200
        report = tracker.close("KILLED")
        assert (report.num_unsent, report.num_dropped) == (0, 0)
        run_ids.add(report.run_id)
    assert len(run_ids) == 1
    assert Journal(place.spool).read(0).__next__()[0]["kind"] == "compacted"
    assert place.ask("select step from metrics order by 1") == [(n,) for n in range(1, last + 1)]
    assert (place.spool / "journal.jsonl").stat().st_size < 60_000


def test_a_run_made_again_after_a_cut_gets_its_params_and_says_what_is_missing(
    place: Place,
) -> None:
    from mlflow import MlflowClient

    place.bring_up()
    for first in (1, 201, 401):
        tracker = place.tracker(max_spool_bytes=40_000)
        tracker.start({"lr": 0.1}, {"who": "me"})
        for step in range(first, first + 200):
            tracker.log_metrics(step, {"loss": 1.0 / step})
        report = tracker.close("FINISHED")
    MlflowClient(f"sqlite:///{place.database}").delete_run(report.run_id)
    again = sync(place.spool)
    # A journal that was sent is not looked at again; a training that goes on looks.
    assert again.run_id == report.run_id
    tracker = place.tracker(max_spool_bytes=40_000)
    tracker.start({"lr": 0.1}, {})
    tracker.log_metrics(601, {"loss": 1.0})
    report = tracker.close("FINISHED")
    run = MlflowClient(f"sqlite:///{place.database}").get_run(report.run_id)
    assert run.data.params == {"lr": "0.1"}
    assert run.data.tags["who"] == "me"
    assert int(run.data.tags["rowstep.reports_cut_away"]) > 100
    assert run.data.metrics["loss"] == 1.0
    assert json.loads((place.spool / "ack.json").read_text())["run_id"] == report.run_id


def test_a_damaged_line_is_put_aside_and_the_others_arrive(place: Place) -> None:
    place.bring_up()
    tracker = place.tracker(max_spool_bytes=10**6)
    tracker.start({"lr": 0.1}, {})
    tracker.log_metrics(1, {"loss": 1.0})
    assert tracker.close("KILLED").num_unsent == 0
    with open(place.spool / "journal.jsonl", "a") as file:
        file.write("".join(f"{line}\n" for line in DAMAGED))
    tracker = place.tracker(max_spool_bytes=10**6)
    tracker.start({"lr": 0.1}, {})
    tracker.log_metrics(2, {"loss": 0.5})
    report = tracker.close("FINISHED")
    assert (report.num_unsent, report.num_rejected) == (0, len(DAMAGED))
    assert place.ask("select step from metrics order by 1") == [(1,), (2,)]
    assert place.ask("select status from runs") == [("FINISHED",)]
    (told,) = place.problems
    assert "must accept every report" in told
