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
from rowstep.pipeline.compare_run import _conclude, unequal_terms
from rowstep.pipeline.create import evaluation_config
from rowstep.pipeline.runs import Run, Variant, all_runs, twin, unfinished_twin

mlflow = pytest.importorskip("mlflow")
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


def test_variants_of_unequal_seeds_or_budgets_are_said_to_be_so(tmp_path: Path) -> None:
    usual, other = config_in(tmp_path), config_in(tmp_path, "optimizer.learning_rate=0.1")
    assert unequal_terms({"a": usual, "b": other}) == []
    longer = config_in(tmp_path, "train.epochs=5", "train.seed=8", "train.batch_size=9")
    assert unequal_terms({"a": usual, "b": usual, "c": longer}) == [
        "train.seed differs, so variants begin with other weights and see the examples in another "
        "order: a 7, b 7, c 8",
        "train.epochs differs, so variants see the data more or less often: a 2, b 2, c 5",
        "train.batch_size differs, so variants take more or fewer steps: a 64, b 64, c 9",
    ]


# --- what a variant may not touch -----------------------------------------------------------


def test_a_variant_is_measured_and_neither_judged_nor_pushed(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    pipeline = create_pipeline(config, Workspace.of(config), SOURCE, is_variant=True)
    ids = {node.id for node in pipeline.components}
    assert "Evaluator" in ids
    assert not ids & {"Pusher", "last_blessed_model"}
    [trainer] = [node for node in pipeline.components if node.id == "RecTrainer"]
    assert "last_checkpoint" not in ids and "base_checkpoint" not in trainer.inputs
    assert trainer.exec_properties["from_scratch"] == 1
    usual = create_pipeline(config, Workspace.of(config), SOURCE).components
    [trainer] = [node for node in usual if node.id == "RecTrainer"]
    assert "base_checkpoint" in trainer.inputs
    assert not trainer.exec_properties.get("from_scratch")
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


def training_of(run: Run, number: int) -> Path:
    """Leave what a training of a run's settings leaves in the state of its pipeline."""
    config = json.loads(canonical_json(run.config))
    parts = ("features", "label", "model", "optimizer", "train")
    identity = {part: config[part] for part in parts}
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


def say(run: Run, **event: object) -> None:
    with open(run.events, "a") as file:
        file.write(json.dumps({"kind": "training", "time": 0.0, **event}) + "\n")


def test_an_unfinished_run_is_found_by_the_training_that_it_began(tmp_path: Path) -> None:
    run = Run.create(config_in(tmp_path))
    for number in (1, 2, 3):
        training_of(run, number)
    say(run, run_key="key1")
    say(run, run_key="key2")
    say(run, kind="step", run_key="key3")
    with open(run.events, "a") as file:
        file.write('{"kind": "training", "run_k')
    assert mlflow_run_id(run) == "run2"


def test_a_training_whose_reports_are_elsewhere_is_found_by_what_it_said_at_its_end(
    tmp_path: Path,
) -> None:
    run = Run.create(config_in(tmp_path))
    say(run, run_key="key1")
    with pytest.raises(CompareError, match="of which nothing is there"):
        mlflow_run_id(run)
    say(run, run_key="key1", mlflow_run_id="noted")
    run.set_status("failed", text="the evaluator")
    assert mlflow_run_id(run) == "noted"


@pytest.mark.parametrize("change", ["data.seed=2", "data.num_users=299", "evaluation.max_rmse=9"])
def test_a_run_that_failed_before_its_training_has_the_numbers_of_no_other(
    tmp_path: Path, change: str
) -> None:
    before = Run.create(config_in(tmp_path), Variant("lazy", "one"))
    training_of(before, 1)
    say(before, run_key="key1")
    run = Run.create(config_in(tmp_path, change), Variant("lazy", "two"))
    say(run, kind="node", id="Transform", running=True)
    run.set_status("failed", text="Transform failed")
    with pytest.raises(CompareError, match=f"Got '{run.name}' \\(failed\\), of which nothing"):
        mlflow_run_id(run)
    assert mlflow_run_id(before) == "run1"


def test_a_variant_that_failed_early_is_left_out_of_what_is_shown(
    tmp_path: Path, mlflow_template_db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(mlflow_template_db, tmp_path / "mlflow.db")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    place = client.create_experiment("tiny", artifact_location=f"file://{tmp_path / 'artifacts'}")
    runs = {}
    for name, status in {"lazy": "finished", "lamb": "failed"}.items():
        tracked = client.create_run(place, run_name=name).info.run_id
        client.log_metric(tracked, "batch/loss", 0.5, step=10)
        older = Run.create(config_in(tmp_path), Variant(name, "of other data"))
        ack = training_of(older, len(runs))
        ack.write_text(ack.read_text().replace(f"run{len(runs)}", tracked))
        run = Run.create(config_in(tmp_path, "data.seed=2"), Variant(name, "digest"))
        note = {"run_key": f"key{len(runs)}", "mlflow_run_id": tracked}
        run.set_status(status, **({"result": {"training": note}} if status == "finished" else {}))  # type: ignore[arg-type]
        runs[name] = run
    assert _conclude(runs, runs["lazy"].workspace) == 1
    shown, errors = capsys.readouterr()
    assert "failed: lamb. The others are compared." in errors
    assert f"Got '{runs['lamb'].name}' (failed), of which nothing is there" in errors
    assert "lazy: MLflow run" in shown and "lamb" not in shown


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
