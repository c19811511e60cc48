"""The whole pipeline, run by the command on a small config: what a user ends up with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rowstep.components.checkpoints import CheckpointStore


@pytest.fixture(scope="module")
def training(tiny_home: Any) -> dict[str, Any]:
    """Return the report that the trainer left of the first run."""
    folder = tiny_home.outputs("RecTrainer", "model_run")[0]
    return json.loads((folder / "training.json").read_text())


def _example(**columns: str) -> bytes:
    import tensorflow as tf

    features = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))
        for name, value in columns.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def test_summary_names_metric_model_run_checkpoint_and_next_command(tiny_home: Any) -> None:
    shown = tiny_home.first_run.stdout
    for part in ("finished in", "best reachable", "serving/", "mlflow", "checkpoint", "next"):
        assert part in shown, shown


def test_noise_of_tfx_goes_to_the_log_and_not_to_the_screen(tiny_home: Any) -> None:
    assert tiny_home.first_run.stderr == ""
    assert "absl" not in tiny_home.first_run.stdout
    log = sorted((tiny_home.home / "tiny" / "runs").glob("*/log.txt"))[0]
    assert "Component Transform is running." in log.read_text()


def test_every_component_ran(tiny_home: Any) -> None:
    ran = {folder.name for folder in (tiny_home.home / "tiny" / "artifacts").iterdir()}
    wanted = "CsvExampleGen StatisticsGen SchemaGen ExampleValidator Transform RecTrainer"
    assert {*wanted.split(), "Evaluator", "Pusher"} <= ran


def test_pushed_model_scores_raw_examples_without_rowstep_or_keras(tiny_home: Any) -> None:
    import tensorflow as tf

    pushed = sorted((tiny_home.home / "tiny" / "serving").iterdir())[0]
    score = tf.saved_model.load(str(pushed)).signatures["serving_default"]
    known, other, unseen = (
        _example(user_id=user, item_id=item, item_category="c1")
        for user, item in (("u1", "i1"), ("u2", "i1"), ("nobody", "nothing"))
    )
    scores = score(examples=tf.constant([known, other, unseen]))["outputs"].numpy()
    assert scores.shape == (3, 1)
    assert ((scores > 0) & (scores < 6)).all()
    assert scores[0] != scores[1] != scores[2]


def test_evaluator_and_trainer_agree_on_the_error(tiny_home: Any, training: dict[str, Any]) -> None:
    # The trainer sees transformed columns, TFMA the served model on raw ones: equal errors mean
    # that serving transforms as training did.
    import tensorflow_model_analysis as tfma

    folder = tiny_home.outputs("Evaluator", "evaluation")[0]
    metrics = tfma.load_eval_result(str(folder)).get_metrics_for_slice()
    error = metrics["mean_squared_error"]["doubleValue"] ** 0.5
    assert error == pytest.approx(training["metrics"]["val_rmse"], rel=1e-5)


def test_checkpoint_artifact_carries_its_lineage(tiny_home: Any, training: dict[str, Any]) -> None:
    from ml_metadata import proto
    from ml_metadata.metadata_store import MetadataStore

    connection = proto.ConnectionConfig()
    connection.sqlite.filename_uri = str(tiny_home.home / "tiny" / "metadata.db")
    store = MetadataStore(connection)
    artifact = store.get_artifacts_by_type("rowstep.Checkpoint")[0]
    properties = artifact.custom_properties
    assert properties["step"].int_value == training["step"] > 0
    assert properties["mlflow_run_id"].string_value == training["mlflow_run_id"]
    assert properties["train_data_fingerprint"].string_value == training["data_fingerprint"]
    saved = CheckpointStore(Path(artifact.uri)).latest()
    assert saved is not None
    assert saved.step == training["step"]


def test_execution_parameters_are_the_config_and_fingerprints(tiny_home: Any) -> None:
    from ml_metadata import proto
    from ml_metadata.metadata_store import MetadataStore

    from rowstep.components.fingerprint import code_fingerprint
    from rowstep.configs import canonical_json, load_config

    connection = proto.ConnectionConfig()
    connection.sqlite.filename_uri = str(tiny_home.home / "tiny" / "metadata.db")
    store = MetadataStore(connection)
    executions = store.get_executions_by_type("rowstep.components.component.RecTrainer")
    properties = executions[0].custom_properties
    assert properties["config"].string_value == canonical_json(load_config(tiny_home.config_file))
    assert properties["code_fingerprint"].string_value == code_fingerprint()
    assert len(properties["data_fingerprint"].string_value) == 64


def test_mlflow_run_shows_config_iterations_and_slots(
    tiny_home: Any, training: dict[str, Any]
) -> None:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tiny_home.home / 'mlflow.db'}")
    run = client.get_run(training["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["opt.class"] == "LazyAdam"
    assert run.data.params["opt.learning_rate"] == "0.01"
    assert run.data.metrics["opt/iterations"] == training["step"] // 10 * 10
    assert run.data.metrics["epoch/val_rmse"] == pytest.approx(training["metrics"]["val_rmse"])
    for slot in ("m", "v"):
        assert run.data.metrics[f"opt/slot_{slot}/rms"] > 0
    assert run.data.tags["tfx.pipeline_name"] == "tiny"
    assert run.data.tags["tfx.model_uri"] == str(tiny_home.outputs("RecTrainer", "model")[0])
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert "optimizer_config.json" in names


def test_running_again_trains_nothing_and_reuses_what_is_cached(
    tiny_home: Any, training: dict[str, Any]
) -> None:
    import mlflow

    # How a model is judged is no part of a training; and other tests may have pushed a better one.
    judged = ("--set", "evaluation.max_mse_increase=5.0")
    again = tiny_home.rowstep("run", str(tiny_home.config_file), *judged)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "0 steps from finished checkpoint" in again.stdout
    assert len(tiny_home.outputs("Transform", "transformed_examples")) == 1
    assert "/serving/" in again.stdout

    run_id = training["mlflow_run_id"]
    assert f"run {run_id}" in again.stdout
    client = mlflow.MlflowClient(f"sqlite:///{tiny_home.home / 'mlflow.db'}")
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["tfx.model_uri"] == str(tiny_home.outputs("RecTrainer", "model")[-1])
