"""The journal keeps whole reports, each metric once a step, whatever happens to the process."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from rowstep.components.tracking.journal import Journal
from rowstep.components.tracking.target import Ack, Target, TrackingError

TARGET = Target("http://host", "ratings", "first", "key-1")


def rows(journal: Journal, offset: int = 0) -> list[dict[str, Any]]:
    return [row for row, _ in journal.read(offset)]


def reported(journal: Journal) -> list[tuple[int, dict[str, float]]]:
    return [(row["step"], row["metrics"]) for row in rows(journal) if row["kind"] == "metrics"]


def test_a_half_written_line_is_cut_off_wherever_it_ends(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.append("start", target=vars(TARGET))
    journal.append_metrics(1, {"loss": 0.5})
    whole = journal.size
    journal.append_metrics(2, {"loss": 0.25})
    journal.close()
    text = (tmp_path / "a" / "journal.jsonl").read_bytes()
    for length in range(whole, len(text)):
        (tmp_path / "a" / "journal.jsonl").write_bytes(text[:length])
        journal = Journal(tmp_path / "a")
        assert reported(journal) == [(1, {"loss": 0.5})]
        journal.append_metrics(2, {"loss": 0.75})
        assert reported(journal) == [(1, {"loss": 0.5}), (2, {"loss": 0.75})]
        journal.close()


def test_a_half_written_line_longer_than_what_is_read_at_once_is_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.append("start", target=vars(TARGET))
    journal.close()
    with open(tmp_path / "a" / "journal.jsonl", "ab") as file:
        file.write(b"x" * 200_000)
    journal = Journal(tmp_path / "a")
    assert [row["kind"] for row in rows(journal)] == ["start"]
    assert journal.target == TARGET
    journal.close()


def test_a_damaged_line_costs_that_line_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.append_metrics(1, {"loss": 0.5})
    journal.close()
    with open(tmp_path / "a" / "journal.jsonl", "ab") as file:
        file.write(b'{"kind": \x00\x00\n17\n')
    journal = Journal(tmp_path / "a")
    journal.append_metrics(2, {"loss": 0.25})
    assert reported(journal) == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]
    journal.close()


def test_repeated_steps_are_dropped_for_each_metric_by_itself(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.append_metrics(10, {"loss": 0.5})
    journal.append_metrics(20, {"loss": 0.25, "rate": 1.0})
    journal.close()
    journal = Journal(tmp_path / "a")
    journal.append_metrics(10, {"loss": 9.0, "new": 9.0})
    journal.append_metrics(20, {"loss": 9.0, "rate": 9.0})
    journal.append_metrics(30, {"loss": 0.125})
    assert reported(journal) == [
        (10, {"loss": 0.5}),
        (20, {"loss": 0.25, "rate": 1.0}),
        (10, {"new": 9.0}),
        (30, {"loss": 0.125}),
    ]
    journal.close()


def test_a_full_disk_leaves_no_half_report(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.append_metrics(1, {"loss": 0.5})
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"full|large"):
            journal.append_metrics(2, {"loss": 0.25})
        with pytest.raises(OSError, match=r"full|large"):
            journal.append_metrics(3, {"loss": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    journal.append_metrics(2, {"loss": 0.125})
    assert reported(journal) == [(1, {"loss": 0.5}), (2, {"loss": 0.125})]
    journal.close()


def test_what_was_acknowledged_counts_only_for_the_same_target(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.append("start", target=vars(TARGET))
    ack = Ack(journal.size, "run-1", "3", TARGET.uri, TARGET.experiment)
    journal.write_ack(ack)
    assert journal.ack() == ack
    journal.append("start", target={**vars(TARGET), "experiment": "other"})
    assert journal.ack() is None
    journal.append("start", target=vars(TARGET))
    assert journal.ack() == ack
    journal.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"offset": 1}', "\x00\x00"])
def test_an_unreadable_acknowledgement_is_none(tmp_path: Path, text: str) -> None:
    journal = Journal(tmp_path / "a")
    journal.append("start", target=vars(TARGET))
    (tmp_path / "a" / "ack.json").write_text(text)
    assert journal.ack() is None
    journal.close()


def test_a_link_in_place_of_the_folder_or_the_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(TrackingError, match="must not be a link"):
        Journal(tmp_path / "link")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "real" / "journal.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        Journal(tmp_path / "real")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_closed_journal_takes_nothing_and_lets_the_next_one_in(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.append("tags", tags={})
    before = os.listdir("/proc/self/fd")
    journal.close()
    journal.append("tags", tags={})
    journal.flush()
    assert len(os.listdir("/proc/self/fd")) == len(before) - 2
    again = Journal(tmp_path / "a")
    assert [row["kind"] for row in rows(again)] == ["tags"]
    again.close()


def test_a_report_that_is_no_json_is_refused_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    with pytest.raises(TypeError):
        journal.append("text", text=object())
    with pytest.raises(ValueError, match="JSON"):
        journal.append("metrics", step=1, metrics={"loss": float("nan")})
    assert journal.size == 0
    assert json.loads((tmp_path / "a" / "lock").read_text())["pid"] == os.getpid()
    journal.close()
