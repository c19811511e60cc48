"""A comparison runs its variants on equal terms, pushes nothing, and goes on after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from rowstep.components.sources import SourceData
from rowstep.configs import RunConfig, canonical_json, load_config
from rowstep.configs.variants import load_variants
from rowstep.pipeline import Workspace, create_pipeline
from rowstep.pipeline.catch_up import history
from rowstep.pipeline.cli import main
from rowstep.pipeline.compare_find import mlflow_run_id
from rowstep.pipeline.compare_read import CompareError
from rowstep.pipeline.create import evaluation_config
from rowstep.pipeline.runs import Run, Variant, all_runs, twin, unfinished_twin

SUPPORT = Path(__file__).parents[1] / "support"
TINY = SUPPORT / "tiny.yaml"
SOURCE = SourceData(Path("/data"), "f" * 64, {"train": 9, "eval": 1}, ("user_id",), None)
VARIANTS = """
compare:
  lazy: {}
  lamb: {optimizer: {kind: lamb}}
"""


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_compare.yaml"
    path.write_text(TINY.read_text() + VARIANTS)
    return path


def invoke(*arguments: str, home: Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(arguments), env={"ROWSTEP_HOME": str(home)})
    return result.exit_code, result.stdout, result.stderr


def config_in(home: Path, *overrides: str) -> RunConfig:
    return load_config(TINY, [f"workspace={home}", *overrides])


# --- before anything runs -------------------------------------------------------------------


def test_check_judges_every_variant(comparison: Path, tmp_path: Path) -> None:
    code, shown, _ = invoke("check", str(comparison), home=tmp_path)
    assert code == 0
    assert "variants: lazy, lamb" in shown
    bad = ["--set", "compare.lamb.optimizer.beta_1=2", "--set", "compare.lazy.train.epochs=0"]
    code, _, errors = invoke("check", str(comparison), *bad, home=tmp_path)
    assert code == 2
    assert "compare.lamb.optimizer.beta_1: must be less than 1. Got 2." in errors
    assert "compare.lazy.train.epochs: must be at least 1. Got 0." in errors


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "compare.lamb.features.nope={kind: numeric}",
            "compare.lamb.features: every feature, slice and the label must be a column of the "
            "data. Got nope.",
        ),
        ("tracking.enabled=false", "compare: tracking.enabled: must be true"),
        ("data={kind: csv, path: none.csv}", "none.csv"),
        ("compare.lamb.nope=1", "compare.lamb.nope: unknown key."),
    ],
)
def test_what_is_wrong_with_one_variant_stops_all_before_any_is_recorded(
    comparison: Path, tmp_path: Path, override: str, words: str
) -> None:
    code, _, errors = invoke("run", str(comparison), "--set", override, home=tmp_path / "home")
    assert code == 2
    assert words in errors
    assert list((tmp_path / "home").glob("*/runs")) == []


def test_a_span_of_data_without_spans_is_refused(comparison: Path, tmp_path: Path) -> None:
    code, _, errors = invoke("run", str(comparison), "--span", "3", home=tmp_path / "home")
    assert code == 2
    assert "--span: must be given with partitioned data only" in errors


# --- what a variant may not touch -----------------------------------------------------------


def test_a_variant_is_measured_and_neither_judged_nor_pushed(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    pipeline = create_pipeline(config, Workspace.of(config), SOURCE, is_variant=True)
    ids = {node.id for node in pipeline.components}
    assert "Evaluator" in ids
    assert not ids & {"Pusher", "last_blessed_model"}
    [specs] = evaluation_config(config, None, judge=False).metrics_specs
    assert not any(metric.HasField("threshold") for metric in specs.metrics)
    [specs] = evaluation_config(config, None).metrics_specs
    assert any(metric.HasField("threshold") for metric in specs.metrics)


def test_the_days_that_a_comparison_trained_are_still_due(tmp_path: Path) -> None:
    data = "data={kind: csv_spans, path: 'days/{SPAN}.csv', span: 3}"
    config = config_in(tmp_path, data)
    Run.create(config, Variant("lazy", "d")).set_status("finished", result={"spans": [3]})
    assert history(config).finished == frozenset()
    Run.create(config).set_status("finished", result={"spans": [3]})
    assert history(config).finished == {3}


def test_the_run_of_a_variant_is_nobody_else_s(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    of_lazy = Run.create(config, Variant("lazy", "digest"))
    assert of_lazy.name.startswith("tiny-lazy-")
    assert Run.open(of_lazy.folder) == of_lazy
    assert [run.name for run in all_runs(tmp_path)] == [of_lazy.name]
    assert twin(config, Variant("lazy", "digest")) == of_lazy
    assert unfinished_twin(config) is None
    assert twin(config, Variant("lamb", "digest")) is None
    assert twin(config, Variant("lazy", "of other data")) is None


# --- which MLflow run is meant --------------------------------------------------------------


def training_of(run: Run, number: int, **changes: object) -> Path:
    config = json.loads(canonical_json(run.config))
    parts = ("features", "label", "model", "optimizer", "train")
    identity = {part: config[part] for part in parts} | changes
    folder = run.workspace.state / f"key{number}"
    folder.mkdir(parents=True)
    record = {"key": folder.name, "number": number, "identity": identity, "checkpoints": ""}
    (folder / "TRAINING.json").write_text(json.dumps(record))
    tracking = folder / "tracking"
    tracking.mkdir()
    ack = {"offset": 1, "run_id": f"run{number}", "experiment_id": "1", "experiment": "tiny"}
    text = json.dumps({**ack, "uri": run.workspace.tracking_uri})
    (tracking / "ack.json").write_text(text)
    return tracking / "ack.json"


def test_an_unfinished_run_is_found_by_the_settings_of_its_training(tmp_path: Path) -> None:
    run = Run.create(config_in(tmp_path))
    with pytest.raises(CompareError, match="compare: a run must have reported to MLflow"):
        mlflow_run_id(run)
    training_of(run, 1)
    training_of(run, 2)
    training_of(run, 3, optimizer={"kind": "lamb"})
    assert mlflow_run_id(run) == "run2"


def test_a_finished_run_is_found_by_what_it_noted(tmp_path: Path) -> None:
    run = Run.create(config_in(tmp_path))
    note = {"run_key": "key1", "mlflow_run_id": "noted"}
    run.set_status("finished", result={"training": note})
    assert mlflow_run_id(run) == "noted"
    training_of(run, 1)
    training_of(run, 2)
    assert mlflow_run_id(run) == "run1"  # sent since, by `rowstep sync`


# --- a real one -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_comparison_goes_on_and_repeats_no_finished_variant(
    comparison: Path, tmp_path: Path, mlflow_template_db: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(mlflow_template_db, home / "mlflow.db")
    python_path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    words = ["-m", "rowstep.pipeline", "run", str(comparison)]
    words += ["--set", "train.callbacks=[slow_callback.Slow]"]

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "ROWSTEP_HOME": str(home), "PYTHONPATH": python_path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = begin()
    deadline = time.monotonic() + 500
    while not any(
        b'"checkpoint"' in path.read_bytes()
        for path in (home / "tiny" / "runs").glob("tiny-lamb-*/events.jsonl")
    ):
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.05)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text()
    os.kill(int(children.split()[0]), signal.SIGKILL)
    _, errors = first.communicate(timeout=300)
    assert first.returncode == 128 + 9
    assert f"go on with the whole comparison: rowstep run {comparison}" in errors

    second = begin()
    shown, errors = second.communicate(timeout=500)
    assert second.returncode == 0, shown + errors
    [lazy, lamb] = load_variants(comparison, words[5:6])
    by_name = {run.variant.name: run for run in all_runs(home) if run.variant}
    assert f"lazy: finished already, as {by_name[lazy].name}" in shown
    assert f"{by_name[lamb].name} (going on)" in shown
    assert len(all_runs(home)) == 2
    assert "opt.class" in shown and "epoch/val_rmse, best" in shown
    assert (home / "tiny" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert not (home / "tiny" / "serving").exists()
    with sqlite3.connect(home / "mlflow.db") as database:
        rows = database.execute("select name, status, experiment_id from runs order by 1")
        assert rows.fetchall() == [("lamb", "FINISHED", 1), ("lazy", "FINISHED", 1)]
    database.close()

    third = begin()
    shown, errors = third.communicate(timeout=100)
    assert third.returncode == 0, shown + errors
    assert "lamb: finished already" in shown and "lazy: finished already" in shown
    assert len(all_runs(home)) == 2
