"""Input that MLflow refuses or that would swamp it, and a process in which little works."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from own_store import OwnStore

from rowstep.components.tracking import sync
from rowstep.components.tracking.variable_cap import VariableCap

pytest.importorskip("mlflow")

HOSTILE = [
    "a[0]", "a{0}", "a@b", "a//b", "/lead", "../../up", "a/../b", "a\nb", "a\x00b", "\u00fc\u4e2d",
    "\U0001f600", "x" * 5000, "", " ", ".", "a'b", "a`b", 'a"b', "a:b", "a%2fb", "a\\b", "<b>",
    "\ud800", "drop table metrics;--", "ok/name-1.b c",
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, mlflow_template_db: Path) -> OwnStore:
    return OwnStore(tmp_path, mlflow_template_db)


# --- names and values ---------------------------------------------------------------------------


def test_hostile_names_keep_their_values_apart(store: OwnStore) -> None:
    tracker = store.tracker()
    tracker.start({name: str(n) for n, name in enumerate(HOSTILE)}, {})
    tracker.log_metrics(1, {name: float(n) for n, name in enumerate(HOSTILE)})
    tracker.set_tags({name: str(n) for n, name in enumerate(HOSTILE)})
    report = tracker.close("FINISHED", 60)
    assert (report.num_unsent, report.num_rejected, store.problems) == (0, 0, [])
    numbers = sorted(range(len(HOSTILE)))
    assert sorted(v for (v,) in store.rows("select value from metrics")) == numbers
    assert sorted(int(v) for (v,) in store.rows("select value from params")) == numbers
    tags = [int(v) for v in store.tags().values() if v.isdigit() and int(v) < 10**6]
    assert sorted(tags) == numbers


@pytest.mark.parametrize("order", [1, -1])
def test_names_that_become_one_are_told_apart_in_the_same_way_each_time(
    store: OwnStore, order: int
) -> None:
    tracker = store.tracker()
    tracker.start({}, {})
    tracker.log_metrics(1, dict([("a[0]", 1.0), ("a(0)", 2.0), ("a_0_", 3.0)][::order]))
    tracker.close("FINISHED")
    found = dict(store.rows("select key, value from metrics"))
    assert found.pop("a_0_") == 3.0  # the one that needs no change
    assert sorted(found.values()) == [1.0, 2.0]
    assert {key[:5] for key in found} == {"a_0__"}
    assert next(key for key in found if found[key] == 1.0) == "a_0__a2b5a4b9"


def test_hundreds_of_params_and_tags_and_long_ones_arrive(store: OwnStore) -> None:
    tracker = store.tracker()
    params = {f"p{n:03d}": "x" * (500 if n % 2 else 7000) for n in range(250)}
    tracker.start(params, {f"t{n:03d}": "y" * 9000 for n in range(250)})
    report = tracker.close("FINISHED", 60)
    assert (report.num_unsent, report.num_rejected) == (0, 0)
    found = dict(store.rows("select key, value from params"))
    assert set(found) == set(params)
    assert found["p001"] == "x" * 500
    assert found["p000"].startswith("sha256:")
    assert {len(v) for k, v in store.tags().items() if k.startswith("t0")} == {5000}


def test_what_is_not_finite_in_any_form_is_counted(store: OwnStore) -> None:
    import numpy as np

    tracker = store.tracker()
    tracker.start({"nan": math.nan, "inf": -math.inf, "list": [math.nan]}, {})
    for step, value in enumerate((np.float32("nan"), np.float64("-inf"), math.inf, 1e400), 1):
        tracker.log_metrics(step, {"loss": value})
    report = tracker.close("FINISHED")
    assert (report.num_unsent, report.num_rejected) == (0, 0)
    found = store.rows("select key, step, value from metrics order by step")
    assert found == [("nonfinite/loss", step, float(step)) for step in (1, 2, 3, 4)]


def test_a_long_name_that_is_not_finite_costs_no_other_metric(store: OwnStore) -> None:
    names = ["k" * length for length in (239, 240, 241, 245, 250, 400)]
    tracker = store.tracker()
    tracker.start({}, {})
    tracker.log_metrics(1, {**dict.fromkeys(names, math.nan), "loss": 1.0})
    tracker.log_metrics(2, {**dict.fromkeys(names, 0.5), "loss": 1.0})
    report = tracker.close("FINISHED", 60)
    assert (report.num_unsent, report.num_rejected, store.problems) == (0, 0, [])
    first = {key for (key,) in store.rows("select key from metrics where step = 1")}
    second = {key for (key,) in store.rows("select key from metrics where step = 2")}
    assert len(first) == len(second) == len(names) + 1
    assert {key.removeprefix("nonfinite/") for key in first} == second
    assert {"k" * 239, "k" * 240, "loss"} <= second


@pytest.mark.parametrize(
    "kind", ["accumulator_rms", "velocity_hat_rms", "average_rms", "linear_rms", "v_zero_frac"]
)
def test_any_slot_of_single_variables_is_capped(kind: str) -> None:
    names = [f"opt/{kind}/layer_{n:03d}" for n in range(250)]
    kept, left_out = VariableCap(()).split(dict.fromkeys(["opt/slot_m/rms", *names], 0.5))
    assert list(kept) == ["opt/slot_m/rms", *names[:200]]
    assert left_out is not None
    assert "Got 50 more" in left_out.words


def test_metrics_of_single_variables_are_capped_named_and_said_once(store: OwnStore) -> None:
    names = [f"opt/m_rms/layer_{n:04d}" for n in range(3000)]
    for steps in ((1, 2), (2, 3)):  # a training and its resume
        tracker = store.tracker()
        tracker.start({}, {})
        for step in steps:
            tracker.log_metrics(step, {"loss": 1.0, **dict.fromkeys(names, 0.5)})
            tracker.log_metrics(step, {f"opt/v_rms/layer_{step}": 0.5})
        assert tracker.close("FINISHED", 60).num_unsent == 0
    keys = [key for (key,) in store.rows("select distinct key from metrics order by key")]
    assert keys == ["loss", *names[:200]]
    assert store.rows("select count(*) from metrics where key = 'opt/m_rms/layer_0199'") == [(3,)]
    assert len(store.problems) == 2  # once an attempt
    assert "may have 200 names. Got 2800 more" in store.problems[0]
    assert "layer_0200, opt/m_rms/layer_0201" in store.problems[0]
    assert store.tags()["rowstep.capped_metrics"].startswith("2800 left out: opt/m_rms/layer_0200")


def test_global_metrics_have_no_cap(store: OwnStore) -> None:
    tracker = store.tracker()
    tracker.start({}, {})
    names = ["opt/slot_m/rms", "opt/sparse/touched_rows", "opt/global/update_ratio"]
    names += [f"user/{n}" for n in range(300)]
    tracker.log_metrics(1, dict.fromkeys(names, 0.5))
    tracker.close("FINISHED", 60)
    assert store.rows("select count(*) from metrics") == [(303,)]
    assert store.problems == []


# --- a process in which little works --------------------------------------------------------------


def run(
    code: str, folder: Path, import_seconds: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder), str(import_seconds)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


TRAINING = """
    import sys, time
    from pathlib import Path
    from rowstep.components.tracking import open_tracker, publisher

    publisher._SQLITE_IMPORT_SECONDS = float(sys.argv[2])
    folder = Path(sys.argv[1])
    tracker = open_tracker(
        f"sqlite:///{folder}/mlflow.db", "movies", "one", "key-1", folder / "spool",
        on_problem=lambda text: print("problem:", text, flush=True),
    )
    tracker.start({"lr": 0.1}, {})
    for step in range(1, 101):
        tracker.log_metrics(step, {"loss": 1.0 / step})
    tracker.log_file("a.bin", b"x" * 1000)
    print("trained", flush=True)
    report = tracker.close("FINISHED", 1.0)
    print("unsent", report.num_unsent, report.problem)
"""


@pytest.mark.parametrize(
    ("mlflow", "told"),
    [
        ("raise ImportError('a broken dependency')", "a broken dependency"),
        ("raise RuntimeError('no protobuf')", "no protobuf"),
        ("import time; time.sleep(600)", "no answer in time"),
    ],
    ids=["broken", "raises", "slow"],
)
def test_an_mlflow_that_cannot_be_imported_costs_no_report(
    store: OwnStore, mlflow: str, told: str
) -> None:
    fake = store.folder / "fake" / "mlflow"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(mlflow)
    path = os.pathsep.join([str(fake.parent), os.environ.get("PYTHONPATH", "")])
    done = run(TRAINING, store.folder, 1, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "trained" in done.stdout
    assert "unsent 103" in done.stdout
    assert told in done.stdout
    assert sync(store.spool).num_unsent == 0
    assert store.rows("select count(*) from metrics") == [(100,)]


FULL = """
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
"""


def test_a_full_disk_costs_reports_and_not_the_training(store: OwnStore) -> None:
    done = run(
        FULL + TRAINING.replace("sqlite:///{folder}/mlflow.db", "http://127.0.0.1:9"), store.folder
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if "reports must fit into" in line]
    assert len(said) == 1
    assert "trained" in done.stdout
    kept = (store.spool / "journal.jsonl").read_bytes().count(b'"kind": "metrics"')
    assert 10 < kept < 100


@pytest.mark.parametrize("place", ["/proc/spool", "under a file"])
def test_a_folder_that_cannot_be_made_costs_the_reports_and_not_the_training(
    store: OwnStore, place: str
) -> None:
    if place == "under a file":
        (store.folder / "file").write_text("in the way")
        place = str(store.folder / "file" / "spool")
    store.spool = Path(place)
    tracker = store.tracker()
    tracker.start({"lr": 0.1}, {})
    tracker.log_metrics(1, {"loss": 1.0})
    tracker.log_file("a.bin", b"x")
    report = tracker.close("FINISHED", 1)
    assert report.run_id is None
    assert len(store.problems) == 1
    assert "nothing is logged to MLflow" in store.problems[0]


def test_a_note_that_cannot_be_written_does_not_stop_the_sending(store: OwnStore) -> None:
    store.spool.mkdir()
    (store.spool / "ack.json.new").mkdir()  # what a write of the note meets
    tracker = store.tracker()
    tracker.start({"lr": 0.1}, {})
    for step in range(1, 51):
        tracker.log_metrics(step, {"loss": 1.0 / step})
    report = tracker.close("FINISHED", 20)
    assert report.num_unsent == 0
    assert store.rows("select count(*) from metrics") == [(50,)]
    assert len(store.problems) == 1
    assert "must be writable" in store.problems[0]
    (store.spool / "ack.json.new").rmdir()
    assert sync(store.spool).run_id == report.run_id
    assert store.rows("select count(*) from metrics") == [(50,)]


def test_tracking_needs_neither_tensorflow_nor_tfx(store: OwnStore) -> None:
    done = run(
        TRAINING
        + """
    names = ("tensorflow", "tfx", "keras", "tf_keras", "apache_beam", "matplotlib.pyplot")
    print("loaded", [name for name in names if name in sys.modules])
    """,
        store.folder,
    )
    assert "loaded []" in done.stdout, done.stdout + done.stderr


def test_importing_the_package_loads_neither_mlflow_nor_matplotlib(tmp_path: Path) -> None:
    done = run(
        """
    import sys
    import rowstep.components.tracking
    print([n for n in ("mlflow", "matplotlib", "PIL", "numpy", "tensorflow") if n in sys.modules])
    """,
        tmp_path,
    )
    assert done.stdout == "[]\n", done.stderr
