"""Run a pipeline with TFX's LocalDagRunner and read its results back from ML Metadata."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tensorflow_model_analysis as tfma
from absl import logging as absl_logging
from ml_metadata import proto
from ml_metadata.metadata_store import MetadataStore
from tfx.orchestration.local.local_dag_runner import LocalDagRunner

from rowstep.components.progress import emit
from rowstep.components.sources import SourceData
from rowstep.configs import RunConfig
from rowstep.pipeline.create import create_pipeline, error_bounds
from rowstep.pipeline.workspace import Workspace


class _NodeEvents(logging.Handler):
    """Turn the runner's own messages about nodes into events; it has no other hook."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg in ("Component %s is running.", "Component %s is finished."):
            [node] = record.args if isinstance(record.args, tuple) else [record.args]
            emit("node", id=node, running=record.msg.endswith("running."))


def run_locally(
    config: RunConfig, workspace: Workspace, source: SourceData, *, is_variant: bool = False
) -> dict[str, Any]:
    """Run the whole pipeline on materialised data and return what the summary shows.

    The variant of a comparison is neither judged nor pushed.

    Raises:
        TrainingInterruptedError: a signal stopped the training; its checkpoint is committed.
    """
    workspace.artifacts.mkdir(parents=True, exist_ok=True)
    pipeline = create_pipeline(config, workspace, source, is_variant=is_variant)
    logger = logging.getLogger("absl")
    # By absl's own call: TensorFlow's export lowers its level for a moment and puts this one back.
    absl_logging.set_verbosity(absl_logging.INFO)
    handler = _NodeEvents()
    logger.addHandler(handler)
    try:
        LocalDagRunner().run(pipeline)
    finally:
        logger.removeHandler(handler)
    return _results(config, workspace, source, is_variant)


def _results(
    config: RunConfig, workspace: Workspace, source: SourceData, is_variant: bool
) -> dict[str, Any]:
    nodes = ["Evaluator", "RecTrainer"] if is_variant else ["Evaluator", "RecTrainer", "Pusher"]
    outputs, cached = _latest_outputs(workspace, nodes)
    evaluator, trainer = outputs["Evaluator"], outputs["RecTrainer"]
    training = json.loads((Path(trainer["model_run"].uri) / "training.json").read_text())
    training.pop("config")
    if "RecTrainer" in cached:  # the report is of the run that trained
        training |= {"num_steps_run": 0, "started_from": "finished checkpoint, from TFX's cache"}
    blessed = (Path(evaluator["blessing"].uri) / "BLESSED").exists()
    pushed = None
    if not is_variant:
        pushed = outputs["Pusher"]["pushed_model"].custom_properties.get("pushed_destination")
    metrics = _metrics(evaluator["evaluation"].uri)
    return {
        "training": training,
        "metrics": metrics,
        "blessed": blessed,
        "failures": [] if blessed or is_variant else _failures(config, source, metrics),
        "judged": not is_variant,
        "pushed_model": pushed.string_value if pushed is not None and blessed else None,
        "tracking_uri": workspace.tracking_uri if config.tracking.enabled else None,
        "truth": asdict(source.truth) if source.truth else None,
        "num_examples": source.num_examples,
        "spans": source.spans,
    }


def _metrics(uri: str) -> dict[str, float]:
    found = tfma.load_eval_result(uri).get_metrics_for_slice() or {}
    return {name: v["doubleValue"] for name, v in found.items() if "doubleValue" in v}


def _failures(config: RunConfig, source: SourceData, metrics: dict[str, float]) -> list[str]:
    """Word what kept a model from being blessed; TFMA says only which metric it was."""
    error, change = metrics["mean_squared_error"], metrics.get("mean_squared_error_diff")
    lower, upper = error_bounds(config, source.truth)
    words = []
    if error > upper:
        words.append(f"mean squared error {error:.5f}, allowed at most {upper:.5f}")
    if error < lower:
        words.append(f"mean squared error {error:.5f} is below what is possible, {lower:.5f}")
    allowed = config.evaluation.max_mse_increase
    if change is not None and change > allowed:
        words.append(
            f"mean squared error {error:.5f} is {change:+.5f} against the last blessed model, "
            f"allowed {allowed:+.5f} (evaluation.max_mse_increase)"
        )
    return words or ["the evaluator did not say why; see the log"]


def _latest_outputs(
    workspace: Workspace, nodes: Sequence[str]
) -> tuple[dict[str, dict[str, proto.Artifact]], set[str]]:
    """Find the output artifacts of each node's last execution, and the nodes that were cached."""
    connection = proto.ConnectionConfig()
    connection.sqlite.filename_uri = str(workspace.metadata)
    connection.sqlite.connection_mode = proto.SqliteMetadataSourceConfig.READONLY
    store = MetadataStore(connection)
    states = (proto.Execution.COMPLETE, proto.Execution.CACHED)
    outputs: dict[str, dict[str, proto.Artifact]] = {}
    cached = set()
    for node in nodes:
        context = store.get_context_by_type_and_name("node", f"{workspace.name}.{node}")
        executions = store.get_executions_by_context(context.id)
        last = max((e for e in executions if e.last_known_state in states), key=lambda e: e.id)
        if last.last_known_state == proto.Execution.CACHED:
            cached.add(node)
        events = store.get_events_by_execution_ids([last.id])
        outputs[node] = {}
        for event in events:
            if event.type == proto.Event.OUTPUT:
                key = event.path.steps[0].key
                outputs[node][key] = store.get_artifacts_by_id([event.artifact_id])[0]
    return outputs, cached
