"""RecTrainer at work: artifacts in, one TrainJob, artifacts out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tfx.dsl.components.base import base_executor
from tfx.types import Artifact, artifact_utils
from tfx.utils import path_utils
from tfx.version import __version__ as tfx_version

from rowstep.components import spec
from rowstep.components.data import split_files
from rowstep.components.job import TrainJob, TrainResult
from rowstep.components.tracking import redact_uri
from rowstep.configs import RunConfig, config_from_json
from rowstep.configs.schema import CsvSpans

Artifacts = dict[str, list[Artifact]]


class Executor(base_executor.BaseExecutor):
    """Resolve artifacts, train, and describe what came out."""

    def Do(  # noqa: N802 - TFX's name
        self, input_dict: Artifacts, output_dict: Artifacts, exec_properties: dict[str, Any]
    ) -> None:
        """Train one model; see `rowstep.components.train.train` for what that means."""
        # TensorFlow and MLflow come in here and not where a pipeline is only put together.
        from rowstep.components.train import train

        self._log_startup(input_dict, output_dict, exec_properties)
        job = self._job(input_dict, output_dict, exec_properties)
        result = train(job)
        self._describe(output_dict, exec_properties, result)

    def _job(
        self, inputs: Artifacts, outputs: Artifacts, exec_properties: dict[str, Any]
    ) -> TrainJob:
        config = config_from_json(exec_properties[spec.CONFIG])
        base = inputs.get(spec.BASE_CHECKPOINT) or []
        model_uri = artifact_utils.get_single_uri(outputs[spec.MODEL])
        tracking_artifacts = exec_properties.get(spec.TRACKING_ARTIFACTS)
        examples = inputs[spec.EXAMPLES]
        train_uris = artifact_utils.get_split_uris(examples, "train")
        eval_uris = artifact_utils.get_split_uris(examples, "eval")
        return TrainJob(
            config=config,
            train_files=tuple(f for uri in train_uris for f in split_files(uri)),
            eval_files=tuple(f for uri in eval_uris for f in split_files(uri)),
            transform_graph=artifact_utils.get_single_uri(inputs[spec.TRANSFORM_GRAPH]),
            serving_dir=path_utils.serving_model_dir(model_uri),
            state_dir=Path(exec_properties[spec.STATE_DIR]),
            base_checkpoint=Path(base[0].uri) if base else None,
            from_scratch=bool(exec_properties.get(spec.FROM_SCRATCH)),
            publish_dir=Path(artifact_utils.get_single_uri(outputs[spec.CHECKPOINT])),
            tracking_uri=exec_properties.get(spec.TRACKING_URI),
            tracking_artifacts=Path(tracking_artifacts) if tracking_artifacts else None,
            tags=self._tags(inputs, outputs, _span(config)),
        )

    def _tags(self, inputs: Artifacts, outputs: Artifacts, span: int | None) -> dict[str, str]:
        tags = {
            "tfx.version": tfx_version,
            # TFX names each output folder after the execution; its context keeps the id private.
            "tfx.execution_id": Path(outputs[spec.MODEL][0].uri).name,
            "tfx.model_uri": outputs[spec.MODEL][0].uri,
            "tfx.model_run_uri": outputs[spec.MODEL_RUN][0].uri,
            "tfx.checkpoint_uri": outputs[spec.CHECKPOINT][0].uri,
            "tfx.examples_uri": inputs[spec.EXAMPLES][0].uri,
            "tfx.transform_graph_uri": inputs[spec.TRANSFORM_GRAPH][0].uri,
        }
        if span is not None:
            tags["tfx.span"] = str(span)
        context = self._context
        if context is not None:
            if context.pipeline_info is not None:
                tags["tfx.pipeline_name"] = context.pipeline_info.id
            if context.pipeline_run_id is not None:
                tags["tfx.pipeline_run_id"] = context.pipeline_run_id
            if context.pipeline_node is not None:
                tags["tfx.node_id"] = context.pipeline_node.node_info.id
        return tags

    def _describe(
        self, outputs: Artifacts, exec_properties: dict[str, Any], result: TrainResult
    ) -> None:
        report = asdict(result) | {"checkpoint": str(result.checkpoint)}
        folder = Path(artifact_utils.get_single_uri(outputs[spec.MODEL_RUN]))
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report | {"config": json.loads(exec_properties[spec.CONFIG])}, indent=2)
        (folder / "training.json").write_text(text)

        checkpoint = artifact_utils.get_single_instance(outputs[spec.CHECKPOINT])
        checkpoint.set_int_custom_property("step", result.step)
        checkpoint.set_string_custom_property("run_key", result.run_key)
        checkpoint.set_string_custom_property("train_data_fingerprint", result.data_fingerprint)
        span = _span(config_from_json(exec_properties[spec.CONFIG]))
        if span is not None:
            checkpoint.set_int_custom_property("span", span)
        # A cached or repeated execution has no MLflow run of its own: the artifacts lead to it.
        for artifact in (checkpoint, *outputs[spec.MODEL], *outputs[spec.MODEL_RUN]):
            if result.mlflow_run_id:
                artifact.set_string_custom_property("mlflow_run_id", result.mlflow_run_id)
            if exec_properties.get(spec.TRACKING_URI):
                uri = redact_uri(exec_properties[spec.TRACKING_URI])
                artifact.set_string_custom_property("mlflow_tracking_uri", uri)


def _span(config: RunConfig) -> int | None:
    return config.data.span if isinstance(config.data, CsvSpans) else None
