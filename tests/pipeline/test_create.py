"""The pipeline as a pure function, what blesses a model, and what Kubeflow accepts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rowstep.components.sources import SourceData
from rowstep.components.truth import Truth
from rowstep.configs import ConfigError, RunConfig, load_config
from rowstep.pipeline import Workspace, create_pipeline
from rowstep.pipeline.create import error_bounds
from rowstep.pipeline.report import summary_lines
from rowstep.pipeline.runs import Run

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
TRUTH = Truth(baseline_rmse=1.0, floor_rmse=0.6, floor_stderr=0.01, num_eval=1000)
SOURCE = SourceData(Path("/data"), "f" * 64, {"train": 9, "eval": 1}, ("user_id",), None)


def _config(*overrides: str) -> RunConfig:
    return load_config(TINY, overrides)


def test_pipeline_has_the_promised_components_and_writes_nothing(tmp_path: Path) -> None:
    pipeline = create_pipeline(_config(), Workspace(tmp_path, "tiny"), SOURCE)
    ids = [node.id for node in pipeline.components]
    wanted = "CsvExampleGen StatisticsGen SchemaGen ExampleValidator Transform RecTrainer"
    assert {*wanted.split(), "Evaluator", "Pusher"} <= set(ids)
    assert list(tmp_path.iterdir()) == []


def test_kubeflow_accepts_the_checkpoint_type(tmp_path: Path) -> None:
    from tfx.dsl.input_resolution.strategies.latest_artifact_strategy import (
        LatestArtifactStrategy,
    )
    from tfx.orchestration.kubeflow.v2.kubeflow_v2_dag_runner import (
        KubeflowV2DagRunner,
        KubeflowV2DagRunnerConfig,
    )

    runner = KubeflowV2DagRunner(
        config=KubeflowV2DagRunnerConfig(default_image="rowstep"),
        output_dir=str(tmp_path),
        output_filename="pipeline.json",
    )
    pipeline = create_pipeline(
        _config(),
        Workspace(tmp_path, "tiny"),
        SOURCE,
        checkpoint_strategy=LatestArtifactStrategy,
    )
    runner.run(pipeline)
    compiled = json.loads((tmp_path / "pipeline.json").read_text())
    trainer = compiled["pipelineSpec"]["components"]["RecTrainer"]
    checkpoint = trainer["outputDefinitions"]["artifacts"]["checkpoint"]
    assert "rowstep.Checkpoint" in json.dumps(checkpoint)


def test_checkpoint_type_is_found_in_the_package_root() -> None:
    import rowstep
    from rowstep.components.artifacts import Checkpoint

    module, _, name = Checkpoint.TYPE_NAME.partition(".")
    assert getattr(__import__(module), name) is rowstep.Checkpoint is Checkpoint
    assert not Checkpoint.PROPERTIES


def test_relative_state_folder_is_refused(tmp_path: Path) -> None:
    workspace = replace(Workspace(tmp_path, "tiny"), home=Path("here"))
    with pytest.raises(ConfigError, match=r"state_dir: must be an absolute path\. Got 'here"):
        create_pipeline(_config(), workspace, SOURCE)


def test_known_truth_bounds_the_error_from_both_sides() -> None:
    lower, upper = error_bounds(_config("evaluation.min_explained_share=0.75"), TRUTH)
    assert lower == pytest.approx(0.36 - 0.03)
    assert upper == pytest.approx(1.0 - 0.75 * 0.64)
    assert TRUTH.explained_share(math.sqrt(upper)) == pytest.approx(0.75)


def test_without_truth_only_the_configured_bound_counts() -> None:
    assert error_bounds(_config("evaluation.max_rmse=0.9"), None) == (0.0, pytest.approx(0.81))


def _result(rmse: float) -> dict[str, Any]:
    training = {
        "num_steps_run": 5,
        "started_from": "scratch",
        "mlflow_link": None,
        "mlflow_run_id": None,
        "checkpoint": "/c",
    }
    return {
        "training": training,
        "metrics": {"mean_squared_error": rmse**2},
        "truth": TRUTH.to_json(),
        "blessed": False,
        "pushed_model": None,
        "failures": ["mean_squared_error: too large"],
        "tracking_uri": None,
        "seconds": 75.0,
    }


def test_an_error_below_the_possible_is_called_a_leak() -> None:
    run = Run(Path("/runs/tiny-1"), _config())
    lines, is_leak = summary_lines(run, "rowstep run tiny", _result(0.5))
    assert is_leak
    assert "The evaluation split was seen in training." in lines[-1]
    assert not summary_lines(run, "rowstep run tiny", _result(0.61))[1]


def test_summary_says_why_a_model_was_not_pushed() -> None:
    run = Run(Path("/runs/tiny-1"), _config())
    shown = "\n".join(summary_lines(run, "rowstep run tiny", _result(0.9))[0])
    assert "not blessed and not pushed" in shown
    assert "mean_squared_error: too large" in shown
    assert "1 min 15 s" in shown
