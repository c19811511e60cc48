"""Histograms, files, data and models: what they become in MLflow, once, however often sent."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from own_store import OwnStore

from rowstep.components.tracking import (
    CloseReport,
    DatasetLink,
    ModelLink,
    NullTracker,
    Tracker,
    sync,
)
from rowstep.components.tracking.journal import Journal

pytest.importorskip("mlflow")

KEY = "opt/hist/table.velocity"


@dataclass(frozen=True)
class Bars:
    edges: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    counts: tuple[int, ...] = (1, 5, 2)
    num_zero: int = 2
    num_nonfinite: int = 3
    unit: str = "gradient squared"


class Store(OwnStore):
    """A store, a training that reports to it, and what became of its files."""

    def begin(self, **changes: Any) -> Tracker:
        tracker = self.tracker()
        tracker.start({"lr": 0.1}, {}, **changes)
        return tracker

    def forget_what_was_sent(self, *, from_the_start: bool = True) -> None:
        """Leave the notes of a process killed between a request and its note."""
        ack = self.spool / "ack.json"
        if from_the_start:
            ack.write_text(json.dumps({**json.loads(ack.read_text()), "offset": 0}))
        else:
            ack.unlink()

    def files(self, folder: str = "") -> list[str]:
        (root,) = (self.folder / "artifacts").glob("*/artifacts")
        found = (root / folder).rglob("*")
        return sorted(str(path.relative_to(root)) for path in found if path.is_file())

    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.uri)


@pytest.fixture
def store(tmp_path: Path, mlflow_template_db: Path) -> Store:
    return Store(tmp_path, mlflow_template_db)


# --- histograms -------------------------------------------------------------------------------


def test_a_histogram_becomes_a_picture_for_each_key_and_step(store: Store) -> None:
    from PIL import Image

    tracker = store.begin()
    for step in (10, 20):
        tracker.log_histogram(KEY, step, Bars())
        tracker.log_histogram("opt/hist/dense.momentum", step, Bars())
    assert tracker.close("FINISHED").num_unsent == 0
    pictures = store.files("images")
    assert len(pictures) == 8  # each with a small copy
    names = [name for name in pictures if name.endswith(".png")]
    for key in ("table.velocity", "dense.momentum"):
        for step in ("10", "20"):
            found = [n for n in names if key in n and f"step{n_sign(n)}{step}{n_sign(n)}" in n]
            assert len(found) == 1
    with Image.open(next((store.folder / "artifacts").rglob("*.png"))) as image:
        assert image.size == (640, 360)
        assert len(image.getcolors(10**6)) > 20  # bars, lines and letters
    assert store.tags()["mlflow.loggedImages"] == "True"
    assert store.problems == []


def n_sign(name: str) -> str:
    """Return what separates the parts of a picture's name; it differs between MLflow versions."""
    return "%" if "%step%" in name else "+"


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_histogram_sent_again_is_one_picture(store: Store, from_the_start: bool) -> None:
    tracker = store.begin()
    tracker.log_histogram(KEY, 10, Bars())
    tracker.log_histogram(KEY, 20, Bars())
    tracker.close("KILLED")
    before = store.files("images")
    store.forget_what_was_sent(from_the_start=from_the_start)
    assert sync(store.spool).num_unsent == 0
    assert store.files("images") == before


@pytest.mark.parametrize("lost", ["png", "webp"])
def test_half_a_picture_is_completed(store: Store, lost: str) -> None:
    from PIL import Image

    tracker = store.begin()
    tracker.log_histogram(KEY, 10, Bars())
    tracker.close("KILLED")
    before = store.files("images")
    (victim,) = (store.folder / "artifacts").rglob(f"*.{lost}")
    victim.unlink()
    store.forget_what_was_sent()
    sync(store.spool)
    assert store.files("images") == before
    with Image.open(victim) as image:
        assert image.width > 100


def test_a_resumed_training_repeats_no_histogram(store: Store) -> None:
    for first in (10, 20):
        tracker = store.begin()
        for step in range(first, 41, 10):
            tracker.log_histogram(KEY, step, Bars())
        tracker.close("KILLED")
    assert len(store.files("images")) == 8


def test_a_histogram_with_a_long_or_hostile_name_still_makes_a_file(store: Store) -> None:
    tracker = store.begin()
    for key in (f"opt/hist/{'layer.' * 60}v", "opt/hist/../../x:0<b>\u00fc", "a#b%c~d+e"):
        tracker.log_histogram(key, 10, Bars())
    report = tracker.close("FINISHED")
    assert (report.num_unsent, report.num_rejected, store.problems) == (0, 0, [])
    assert len(store.files("images")) == 6
    store.forget_what_was_sent()
    sync(store.spool)
    assert len(store.files("images")) == 6


@pytest.mark.parametrize(
    "bars",
    [
        replace(Bars(), edges=(1.0, 0.5, math.inf, 1.0)),
        replace(Bars(), edges=()),
        replace(Bars(), counts=("many",)),
        None,
    ],
    ids=["infinite", "no edges", "no numbers", "none"],
)
def test_what_cannot_be_drawn_costs_that_picture_only(store: Store, bars: Any) -> None:
    tracker = store.begin()
    tracker.log_histogram(KEY, 10, bars)
    tracker.log_histogram(KEY, 20, Bars())
    tracker.log_metrics(20, {"loss": 0.5})
    report = tracker.close("FINISHED", 60)
    assert report.num_unsent + report.num_rejected == 1
    assert len(store.problems) == 1
    assert len(store.files("images")) == 2
    assert store.rows("select value from metrics") == [(0.5,)]


def test_the_title_says_what_a_logarithmic_axis_cannot_show() -> None:
    from rowstep.components.tracking.pictures import histogram_title

    row = {"key": KEY, "step": 1000, **vars(Bars())}
    assert histogram_title(row) == (
        "opt/hist/table.velocity, step 1000\n13 elements, 15.4% zero, 3 not finite"
    )
    nothing = {**row, "counts": [0, 0, 0], "num_zero": 0, "num_nonfinite": 0}
    assert "0 elements, 0.0% zero" in histogram_title(nothing)


def test_the_axes_name_the_unit_and_are_logarithmic(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    from rowstep.components.tracking.pictures import draw_histogram

    seen: list[Any] = []
    draw = Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda self, *a: (seen.append(self), draw(self, *a))[1])
    draw_histogram({"key": KEY, "step": 1, **vars(Bars())})
    (axes,) = seen[0].axes
    assert axes.get_xlabel() == "magnitude of an element, in gradient squared (log10 bins)"
    assert axes.get_ylabel() == "share of non-zero elements (%)"
    assert (axes.get_xscale(), axes.get_xlim()) == ("log", (1e-4, 1e-1))
    heights = axes.patches[0].get_data().values
    assert list(heights) == [12.5, 62.5, 25.0]


# --- files ------------------------------------------------------------------------------------


def test_a_file_arrives_whole_and_once(store: Store) -> None:
    data = bytes(range(256)) * 1000
    tracker = store.begin()
    tracker.log_file("optimizer/slots-000001000.parquet", data)
    tracker.log_file("top.bin", b"")
    assert tracker.close("FINISHED").num_unsent == 0
    assert store.files() == ["optimizer/slots-000001000.parquet", "top.bin"]
    store.forget_what_was_sent()
    sync(store.spool)
    assert store.files() == ["optimizer/slots-000001000.parquet", "top.bin"]
    (file,) = (store.folder / "artifacts").rglob("slots*")
    assert file.read_bytes() == data


@pytest.mark.parametrize("left", [b"", b"PAR1", b"PAR1" * 200, None])
def test_a_file_that_is_not_what_was_reported_is_told_and_not_sent(
    store: Store, left: bytes | None
) -> None:
    store.spool.mkdir()
    journal = Journal(store.spool)
    journal.append_file("cut.bin", b"PAR1" * 100)
    (file,) = (store.spool / "files").iterdir()
    journal.close()
    if left is None:
        file.unlink()
    else:
        file.write_bytes(left)  # what a power cut left of it
    tracker = store.begin()
    tracker.log_file("whole.bin", b"PAR1" * 100)
    report = tracker.close("FINISHED")
    assert (report.num_unsent, report.num_rejected) == (0, 1)
    assert store.files() == ["whole.bin"]
    expected = (
        "Got no file" if left is None else f"must hold the 400 bytes of 'cut.bin'. Got {len(left)}."
    )
    assert expected in report.problem
    assert str(store.spool / "rejected.jsonl") in report.problem
    kept = [path.read_bytes() for path in store.spool.glob("rejected-files/*")]
    assert kept == ([] if left is None else [left])


def test_a_file_that_vanishes_while_a_training_goes_on_holds_nothing_up(store: Store) -> None:
    database = store.database.rename(store.folder / "hidden.db")
    store.database.mkdir()  # no store for a while
    tracker = store.begin()
    tracker.log_file("gone.bin", b"PAR1")
    (file,) = (store.spool / "files").iterdir()
    file.unlink()
    tracker.log_metrics(1, {"loss": 0.5})
    store.database.rmdir()
    database.rename(store.database)
    report = tracker.close("FINISHED")
    assert (report.num_unsent, report.num_rejected) == (0, 1)
    assert store.rows("select value from metrics") == [(0.5,)]
    assert len((store.spool / "rejected.jsonl").read_text().splitlines()) == 1


def test_a_file_of_a_journal_that_says_no_size_is_sent(store: Store) -> None:
    store.spool.mkdir()
    journal = Journal(store.spool)
    journal.append("file", name="old.bin", file=journal.files.write(b"from before"))
    journal.close()
    report = store.begin().close("FINISHED")
    assert (report.num_unsent, report.num_rejected) == (0, 0)
    assert store.files() == ["old.bin"]


def test_a_file_cannot_leave_the_artifacts_of_its_run(store: Store) -> None:
    tracker = store.begin()
    for name in ("../../../up.bin", "/abs.bin", "a/../../b.bin", "..", "a\\..\\c.bin", "d%2e%2e/e"):
        tracker.log_file(name, b"x")
    report = tracker.close("FINISHED", 60)
    assert report.num_unsent == 0
    outside = [p for p in store.folder.rglob("*.bin") if "artifacts" not in p.parts]
    assert [p for p in outside if store.spool not in p.parents] == []
    assert "up.bin" in store.files()


# --- data and models --------------------------------------------------------------------------


LINKS = [
    DatasetLink("Examples:train", "a" * 64, {"uri": "/data/1", "split": "train"}, "train"),
    DatasetLink("Examples:eval", "b" * 64, {"uri": "/data/1", "split": "eval"}, "eval"),
]


def test_data_is_named_once_a_run_over_attempts_and_replays(store: Store) -> None:
    for _ in range(2):
        tracker = store.begin()
        tracker.log_inputs(LINKS)
        report = tracker.close("FINISHED")
        store.forget_what_was_sent()
        sync(store.spool)
    assert report.num_unsent == 0
    inputs = store.client().get_run(report.run_id).inputs.dataset_inputs
    found = {i.dataset.name: (i.dataset.digest, i.tags[0].value) for i in inputs}
    assert len(inputs) == 2
    assert found == {"Examples_train": ("a" * 36, "train"), "Examples_eval": ("b" * 36, "eval")}
    source = next(i.dataset.source for i in inputs if i.dataset.name == "Examples_train")
    assert json.loads(source) == {"uri": "/data/1", "split": "train"}


def test_a_run_has_one_model_over_attempts_and_replays(store: Store) -> None:
    for attempt in (1, 2):
        tracker = store.begin()
        tracker.log_model_link(
            ModelLink(
                "movies: v1.0/x",
                f"/models/{attempt}",
                {"tfx.mlmd_artifact_id": str(attempt)},
                {"opt.class": "LazyAdam"},
                100 * attempt,
            )
        )
        report = tracker.close("FINISHED")
        assert (report.num_unsent, report.num_rejected) == (0, 0)
        store.forget_what_was_sent()
        sync(store.spool)
    run = store.client().get_run(report.run_id)
    (output,) = run.outputs.model_outputs
    (model,) = store.client().search_logged_models([run.info.experiment_id])
    assert (model.model_id, str(model.status)) == (output.model_id, "READY")
    assert model.source_run_id == report.run_id
    assert model.params == {"opt.class": "LazyAdam"}
    assert model.tags["rowstep.uri"] == "/models/2"
    assert model.tags["tfx.mlmd_artifact_id"] == "2"
    assert model.tags["mlflow.model.isExternal"] == "true"


def test_nothing_to_report_to_takes_every_report() -> None:
    tracker = NullTracker()
    tracker.start({}, {}, from_step=3)
    tracker.log_histogram(KEY, 1, Bars())
    tracker.log_file("a", b"")
    tracker.log_inputs(LINKS)
    tracker.log_model_link(ModelLink("a", "b"))
    assert tracker.close("FINISHED") == CloseReport()


# --- statuses and resumes ---------------------------------------------------------------------


CHILD = textwrap.dedent("""
    import signal, sys, time
    from pathlib import Path
    from rowstep.components.tracking import open_tracker

    folder, how = Path(sys.argv[1]), sys.argv[2]
    tracker = open_tracker(
        f"sqlite:///{folder}/mlflow.db", "movies", "one", "key-1", folder / "spool",
        on_problem=lambda text: print("problem", text, flush=True),
        artifact_root=folder / "artifacts",
    )

    def stop(number, frame):
        raise SystemExit("stopped")

    signal.signal(signal.SIGTERM, stop)
    tracker.start({"lr": 0.1}, {}, from_step=0)
    try:
        for step in range(1, 10**6):
            tracker.log_metrics(step, {"loss": 1.0 / step})
            if tracker.run_id is not None:
                print("running", flush=True)
            if how == "exception" and tracker.run_id is not None:
                raise RuntimeError("diverged")
            time.sleep(0.01)
    except SystemExit:
        tracker.close("KILLED")
    except RuntimeError:
        tracker.close("FAILED")
""")


def end_child(store: Store, how: str) -> None:
    command = [sys.executable, "-c", CHILD, str(store.folder), how]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "running\n"
    if how != "exception":
        deadline = time.monotonic() + 60
        while not store.rows("select step from metrics"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(child.pid, signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    child.communicate(timeout=120)


def status(store: Store) -> str:
    ((found,),) = store.rows("select status from runs")
    return str(found)


@pytest.mark.parametrize(("how", "left"), [("exception", "FAILED"), ("SIGTERM", "KILLED")])
def test_a_training_that_ends_badly_leaves_a_true_status(store: Store, how: str, left: str) -> None:
    end_child(store, how)
    assert status(store) == left
    sync(store.spool)
    assert status(store) == left


def test_sync_ends_the_run_of_a_training_that_was_killed(store: Store) -> None:
    end_child(store, "SIGKILL")
    assert status(store) == "RUNNING"
    journal = Journal(store.spool)
    last_ms = journal.history.last_ms
    journal.close()
    assert sync(store.spool).num_unsent == 0
    assert status(store) == "KILLED"
    assert store.rows("select end_time from runs") == [(last_ms,)]  # not when sync came by
    assert sync(store.spool).num_sent == 0
    tracker = store.begin(from_step=7)
    tracker.close("FINISHED")
    assert status(store) == "FINISHED"
    tags = store.tags()
    assert (tags["resume.count"], tags["resume.1.from_step"]) == ("1", "7")
    assert tags["resume.1.reason"] == "it was KILLED"


def test_the_next_start_takes_over_the_run_of_a_training_that_was_killed(store: Store) -> None:
    end_child(store, "SIGKILL")
    tracker = store.begin(from_step=1)
    tracker.close("FINISHED")
    assert (status(store), len(store.rows("select 1 from runs"))) == ("FINISHED", 1)
    assert store.tags()["resume.1.reason"] == "it was killed without a word"


def test_resumes_are_counted_once_however_often_their_report_is_sent(store: Store) -> None:
    for attempt in range(3):
        tracker = store.begin(from_step=100 * attempt)
        tracker.close("FAILED")
        for from_the_start in (True, False):
            store.forget_what_was_sent(from_the_start=from_the_start)
            sync(store.spool)
    tags = store.tags()
    assert tags["resume.count"] == "2"
    assert (tags["resume.1.from_step"], tags["resume.2.from_step"]) == ("100", "200")
    assert "resume.3.from_step" not in tags
    assert status(store) == "FAILED"


def test_empty_runs_of_a_repeated_creation_are_removed(store: Store) -> None:
    """MLflow's client repeats a request whose answer was lost; here the repetition is made."""
    tracker = store.begin()
    tracker.log_metrics(1, {"loss": 1.0})
    report = tracker.close("KILLED")
    client = store.client()
    run = client.get_run(report.run_id)
    twin = client.create_run(run.info.experiment_id, tags=run.data.tags)
    other = client.create_run(
        run.info.experiment_id, tags={**run.data.tags, "rowstep.creation": "another"}
    )
    store.forget_what_was_sent(from_the_start=False)
    assert sync(store.spool).run_id == report.run_id
    assert client.get_run(twin.info.run_id).info.lifecycle_stage == "deleted"
    assert client.get_run(other.info.run_id).info.lifecycle_stage == "active"
    assert store.rows("select count(*) from metrics") == [(1,)]
