"""Windows of partitions: their config, their data, and which of them a command trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rowstep.components.data_errors import DataError
from rowstep.components.partitions import at_span
from rowstep.components.progress import EVENTS_VARIABLE
from rowstep.components.sources import load_source, materialise
from rowstep.configs import ConfigError, RunConfig, load_config
from rowstep.configs.schema import CsvSpans
from rowstep.pipeline.catch_up import History, due_spans, history, late_spans
from rowstep.pipeline.cli import main
from rowstep.pipeline.launch import Stops
from rowstep.pipeline.runs import Run

SUPPORT = Path(__file__).parents[1] / "support"
SPANS = SUPPORT / "spans.yaml"
NEW_YEAR = 20_454  # days from 1970-01-01 to 2026-01-01


def write_day(folder: Path, day: int) -> None:
    """Write a small partition; no two days have a row in common."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"u{i % 17},i{(i * day) % 11},{i % 5 + 1},{day * 1000 + i}" for i in range(80)]
    text = "\n".join(["user_id,item_id,rating,timestamp", *rows]) + "\n"
    (folder / f"2026-01-{day:02}.csv").write_text(text)


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """Return a folder with the partitions of January 1, 2, 4 and 5."""
    for day in (1, 2, 4, 5):
        write_day(tmp_path / "days", day)
    return tmp_path / "days"


def settings(days: Path) -> list[str]:
    return [f"data.path='{days}/{{YYYY}}-{{MM}}-{{DD}}.csv'", f"workspace={days.parent / 'home'}"]


def config_of(days: Path, *overrides: str) -> RunConfig:
    return load_config(SPANS, [*settings(days), *overrides])


def data_of(days: Path, *overrides: str) -> CsvSpans:
    data = config_of(days, *overrides).data
    assert isinstance(data, CsvSpans)
    return data


# --- the config -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "ratings/all.csv",
        "{YYYY}-{MM}.csv",
        "{YYYY}-{MM}-{DD}/{DD}.csv",
        "{SPAN}/{SPAN}.csv",
        "{SPAN}-{YYYY}{MM}{DD}.csv",
        "{SPAN:0}.csv",
        "{SPAN}/{VERSION}.csv",
        "{SPAN}/}.csv",
    ],
)
def test_a_pattern_that_names_no_partition_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.path: must hold \{SPAN\} once, or .* Got '.*'\."):
        load_config(SPANS, [f"data.path='{path}'"])


def test_a_pattern_in_data_without_partitions_says_which_kind_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a pattern of partitions\. Write 'kind: csv_spans'\."):
        load_config(SPANS, ["data={kind: csv, path: 'days/{YYYY}-{MM}-{DD}.csv'}"])


# --- the data -------------------------------------------------------------------------------------


def test_a_window_holds_the_rows_of_its_spans_and_knows_them(days: Path, tmp_path: Path) -> None:
    source = materialise(data_of(days), tmp_path / "data")
    assert source.spans == (NEW_YEAR + 3, NEW_YEAR + 4)
    assert source.span == NEW_YEAR + 4
    assert source.folder.name == f"csv_spans-{NEW_YEAR + 4}-{source.fingerprint[:16]}"
    assert sum(source.num_examples.values()) == 160
    assert load_source(source.folder) == source


def test_the_fingerprint_depends_on_the_files_of_the_window_alone(
    days: Path, tmp_path: Path
) -> None:
    before = materialise(data_of(days), tmp_path / "data")
    write_day(days, 3)  # a new partition, older than the window
    with (days / "2026-01-01.csv").open("a") as file:
        file.write("u1,i1,5,77\n")
    write_day(days, 6)
    same = materialise(data_of(days, f"data.span={NEW_YEAR + 4}"), tmp_path / "data")
    assert same == before
    with (days / "2026-01-04.csv").open("a") as file:
        file.write("u1,i1,5,77\n")
    other = materialise(data_of(days, f"data.span={NEW_YEAR + 4}"), tmp_path / "data")
    assert other.fingerprint != before.fingerprint


def test_equal_bytes_of_other_days_are_other_data(days: Path, tmp_path: Path) -> None:
    one = materialise(data_of(days, "data.window=1"), tmp_path / "data")
    (days / "2026-01-05.csv").rename(days / "2026-01-06.csv")
    other = materialise(data_of(days, "data.window=1"), tmp_path / "data")
    assert (one.span, other.span) == (NEW_YEAR + 4, NEW_YEAR + 5)
    assert other.fingerprint != one.fingerprint


def test_a_missing_span_is_told_and_does_not_stop_the_window(
    days: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EVENTS_VARIABLE, str(tmp_path / "events.jsonl"))
    source = materialise(data_of(days, "data.window=3"), tmp_path / "data")
    assert source.spans == (NEW_YEAR + 3, NEW_YEAR + 4)
    [event] = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event["kind"] == "notice"
    assert "no partition of 2026-01-03 between 2026-01-03 and 2026-01-05" in event["text"]


def test_tfx_reads_the_span_and_the_files_of_the_window(days: Path, tmp_path: Path) -> None:
    from tfx.components.example_gen import utils
    from tfx.components.example_gen.input_processor import FileBasedInputProcessor
    from tfx.proto import example_gen_pb2, range_config_pb2
    from tfx.utils import proto_utils

    from rowstep.pipeline import Workspace, create_pipeline

    config = config_of(days)
    workspace = Workspace.of(config)
    source = materialise(data_of(days), workspace.data)
    materialise(data_of(days, f"data.span={NEW_YEAR}"), workspace.data)  # other windows beside it
    materialise(data_of(days, "data.window=1"), workspace.data)
    pipeline = create_pipeline(config, workspace, source)
    by_id: dict[str, Any] = {node.id: node for node in pipeline.components}
    given = by_id["CsvExampleGen"].exec_properties
    splits, only = example_gen_pb2.Input(), range_config_pb2.RangeConfig()
    proto_utils.json_to_proto(given["input_config"], splits)
    proto_utils.json_to_proto(given["range_config"], only)
    processor = FileBasedInputProcessor(given["input_base"], splits.splits, only)
    span, version = processor.resolve_span_and_version()
    assert (span, version) == (source.span, None)
    for split in splits.splits:
        pattern = processor.get_pattern_for_span_version(split.pattern, span, version)
        found = sorted(Path(given["input_base"]).glob(pattern))
        assert found == sorted((source.folder / split.name).iterdir()) != []
    trained = json.loads(by_id["RecTrainer"].exec_properties["config"])
    assert trained["data"]["span"] == source.span
    assert utils.date_to_span_number(2026, 1, 1) == NEW_YEAR


# --- what is due ----------------------------------------------------------------------------------


def record(config: RunConfig, day: int, status: Any, *spans: int) -> Run:
    run = Run.create(at_span(config, NEW_YEAR + day - 1))
    details = {"result": {"spans": [NEW_YEAR + s - 1 for s in spans]}} if spans else {}
    run.set_status(status, **details)
    return run


def known(finished: set[int], read: set[int], unfinished: int | None = None) -> History:
    return History(frozenset(finished), frozenset(read), unfinished)


@pytest.mark.parametrize(
    ("past", "due", "late"),
    [
        (known(set(), set()), [9], []),
        (known(set(), set(), unfinished=7), [7, 9], []),
        (known(set(), set(), unfinished=6), [9], []),  # its partition is gone
        (known({5}, {4, 5}), [7, 9], []),
        (known({5}, {4, 5}, unfinished=7), [7, 9], []),
        (known({5, 9}, {4, 5, 9}), [], [7]),
        (known({5, 9}, {5, 7, 9}), [], []),
        (known({9}, {9}), [], []),  # what was there before the first run is history
        (known({11}, {11}), [], []),
    ],
)
def test_what_is_due_and_what_came_late(past: History, due: list[int], late: list[int]) -> None:
    assert due_spans([3, 5, 7, 9], past) == due
    assert late_spans([3, 5, 7, 9], past) == late


def test_the_history_is_what_the_run_records_say(days: Path) -> None:
    config = config_of(days)
    assert history(config) == known(set(), set())
    record(config_of(days, "train.epochs=4"), 4, "killed")  # of a config given up since
    assert history(config) == known(set(), set())
    record(config, 1, "killed")
    assert history(config) == known(set(), set(), NEW_YEAR)
    record(config, 1, "finished", 1)
    assert history(config) == known({NEW_YEAR}, {NEW_YEAR})
    record(config, 2, "finished", 1, 2)
    record(config_of(days, "train.epochs=3"), 4, "finished", 4)  # the same pipeline, tuned
    record(config_of(days, "name=other"), 5, "finished", 5)
    record(config, 5, "running")
    read = {NEW_YEAR, NEW_YEAR + 1, NEW_YEAR + 3}
    assert history(config) == known(read, read, NEW_YEAR + 4)


def test_runs_of_data_without_partitions_have_no_spans(days: Path) -> None:
    plain = config_of(days, f"data={{kind: csv, path: {days}}}")
    Run.create(plain).set_status("finished", result={})
    assert history(config_of(days)) == known(set(), set())


# --- the command ----------------------------------------------------------------------------------


def invoke(days: Path, *arguments: str) -> tuple[int, str, str]:
    options = [part for text in settings(days) for part in ("--set", text)]
    result = CliRunner().invoke(main, ["run", str(SPANS), *options, *arguments])
    return result.exit_code, result.stdout, result.stderr


def recorded(days: Path) -> list[Path]:
    return list(days.parent.glob("home/*/runs/*"))


def test_with_nothing_new_the_command_says_so_and_runs_nothing(days: Path) -> None:
    record(config_of(days), 5, "finished", 4, 5)
    code, shown, errors = invoke(days)
    assert code == 0, errors
    assert "spans: no span has come since 2026-01-05. Nothing is left to do." in shown
    assert shown.rstrip().endswith("--span 2026-01-05")
    assert len(recorded(days)) == 1


def test_a_day_that_came_late_is_named_and_not_trained(days: Path) -> None:
    record(config_of(days), 2, "finished", 1, 2)
    record(config_of(days), 5, "finished", 4, 5)
    assert "no run has read" not in invoke(days)[1]
    write_day(days, 3)
    code, shown, _ = invoke(days)
    assert code == 0
    assert "no run has read 2026-01-03, and newer spans are trained. Train one with: " in shown
    assert len(recorded(days)) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--span", "2026-01-03"], "data.span: there must be a partition of it. Got 2026-01-03"),
        (["--span", "soon"], "--span: it must be the number of a partition, or a date"),
        (["--span", "3", "--newest"], "run: --newest: must stand alone. Got --span 3 as well."),
        (["--set", "data={kind: csv, path: x}", "--newest"], "run: --newest: must be given with"),
        (["--set", "data={kind: csv, path: x}", "--span", "3"], "run: --span: must be given with"),
        (["--set", "data.path='{SPAN}.csv'"], "data.path: there must be at least one partition."),
        (["--set", "data.path='{SPAN}.csv'", "--newest"], "data.path: there must be at least one"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused_before_any_record(
    days: Path, arguments: list[str], words: str
) -> None:
    code, _, errors = invoke(days, *arguments)
    assert code == 2
    assert words in errors
    assert recorded(days) == []


def test_partitions_are_listed_without_importing_tensorflow(days: Path) -> None:
    record(config_of(days), 5, "finished", 4, 5)
    options = [part for text in settings(days) for part in ("--set", text)]
    script = (
        "import sys\n"
        "from rowstep.pipeline.cli import main\n"
        "try:\n"
        f"    main(['run', {str(SPANS)!r}, *{options!r}])\n"
        "except SystemExit as stop:\n"
        "    heavy = {'tensorflow', 'keras', 'tfx', 'mlflow'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else stop.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Nothing is left to do." in done.stdout


def test_runs_are_listed_with_their_spans(days: Path) -> None:
    dated = record(config_of(days), 2, "finished", 1, 2)
    numbered = Run.create(at_span(config_of(days, "data.path='{SPAN}.csv'"), 17))
    plain = Run.create(config_of(days, f"data={{kind: csv, path: {days}}}"))
    result = CliRunner().invoke(main, ["runs", "--home", str(days.parent / "home")])
    assert result.stdout.splitlines() == [
        f"{dated.name}  finished  span 2026-01-02",
        f"{numbered.name}  running  span 17",
        f"{plain.name}  running",
    ]


# --- signals between two runs ---------------------------------------------------------------------


def test_a_signal_between_two_runs_is_not_lost(days: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stops() as stops:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.received == signal.SIGTERM
        worker = subprocess.Popen(["sleep", "60"])
        stops.pass_on_to(worker)
        assert worker.wait() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_after_a_signal_no_further_run_begins(days: Path) -> None:
    from rowstep.pipeline.catch_up import run_spans

    stops = Stops()
    stops.received = signal.SIGTERM
    code = run_spans(config_of(days), "rowstep run spans", stops, span=None, newest=False)
    assert code == 75
    assert recorded(days) == []


def test_a_span_that_is_not_there_leaves_data_alone(days: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there must be a partition of it"):
        materialise(data_of(days, "data.span=3"), tmp_path / "data")
    assert not (tmp_path / "data").exists()
