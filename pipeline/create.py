"""The pipeline, as a pure function of a config and of where things are."""

from __future__ import annotations

import sys

import tensorflow_model_analysis as tfma
from ml_metadata import proto
from tfx.components import (
    CsvExampleGen,
    Evaluator,
    ExampleValidator,
    Pusher,
    SchemaGen,
    StatisticsGen,
    Transform,
)
from tfx.dsl.components.base.base_node import BaseNode
from tfx.dsl.components.common.resolver import Resolver, ResolverStrategy
from tfx.dsl.input_resolution.strategies.latest_blessed_model_strategy import (
    LatestBlessedModelStrategy,
)
from tfx.orchestration.pipeline import Pipeline
from tfx.proto import example_gen_pb2, pusher_pb2, range_config_pb2
from tfx.types import standard_artifacts
from tfx.types.channel import Channel

from rowstep.components.artifacts import Checkpoint
from rowstep.components.component import RecTrainer
from rowstep.components.partitions import at_span
from rowstep.components.preprocessing import transform_config
from rowstep.components.resolvers import LatestPushedStrategy
from rowstep.components.sources import SourceData
from rowstep.components.truth import LEAK_STANDARD_ERRORS, Truth
from rowstep.configs import RunConfig
from rowstep.pipeline.workspace import Workspace


def create_pipeline(
    config: RunConfig,
    workspace: Workspace,
    source: SourceData,
    *,
    checkpoint_strategy: type[ResolverStrategy] = LatestPushedStrategy,
    is_variant: bool = False,
) -> Pipeline:
    """Put the pipeline together; nothing runs and nothing is written.

    ExampleGen -> StatisticsGen -> SchemaGen -> ExampleValidator -> Transform -> RecTrainer ->
    Evaluator -> Pusher, with one resolver for the checkpoint of the last pushed model and one for
    the last blessed model. Every function is given by its import path, so TFX packs no modules.
    The examples of a window of partitions carry its newest span.

    Args:
        config: the validated run.
        workspace: where metadata, artifacts, state and pushed models are.
        source: the materialised splits.
        checkpoint_strategy: which checkpoint a training may start from. Kubeflow and Vertex take
            only TFX's own strategies: give them LatestArtifactStrategy.
        is_variant: whether this is one of several trainings that are only compared. Then it starts
            from scratch, or from where it was itself, whatever else was trained before; the
            Evaluator measures without judging, since the first variant would be the bar for the
            second, and there is no Pusher: what is blessed and served stays what it was.
    """
    if source.span is not None:
        config = at_span(config, source.span)  # so that ML Metadata and MLflow show it
    examples = _example_gen(source)
    statistics = StatisticsGen(examples=examples.outputs["examples"])
    schema = SchemaGen(statistics=statistics.outputs["statistics"], infer_feature_shape=True)
    validator = ExampleValidator(
        statistics=statistics.outputs["statistics"], schema=schema.outputs["schema"]
    )
    transform = Transform(
        examples=examples.outputs["examples"],
        schema=schema.outputs["schema"],
        preprocessing_fn="rowstep.components.preprocessing.preprocessing_fn",
        custom_config=transform_config(config),
    )
    last_checkpoint = Resolver(
        strategy_class=checkpoint_strategy, base_checkpoint=Channel(type=Checkpoint)
    ).with_id("last_checkpoint")
    base_checkpoint = None if is_variant else last_checkpoint.outputs["base_checkpoint"]
    trainer = RecTrainer(
        config,
        examples=transform.outputs["transformed_examples"],
        transform_graph=transform.outputs["transform_graph"],
        schema=schema.outputs["schema"],
        base_checkpoint=base_checkpoint,
        state_dir=workspace.state,
        data_fingerprint=source.fingerprint,
        tracking_uri=workspace.tracking_uri,
        tracking_artifacts=workspace.tracking_artifacts,
        from_scratch=is_variant,
    )
    nodes: list[BaseNode] = [examples, statistics, schema, validator, transform]
    nodes += [trainer] if is_variant else [last_checkpoint, trainer]
    nodes += _ending(config, workspace, source, examples, trainer, is_variant)
    return Pipeline(
        pipeline_name=config.name,
        pipeline_root=str(workspace.artifacts),
        components=nodes,
        enable_cache=True,
        metadata_connection_config=_metadata_connection(workspace),
        beam_pipeline_args=["--direct_running_mode=in_memory", "--direct_num_workers=1"],
    )


def _ending(
    config: RunConfig,
    workspace: Workspace,
    source: SourceData,
    examples: CsvExampleGen,
    trainer: RecTrainer,
    is_variant: bool,
) -> list[BaseNode]:
    """Return what comes after the training: measure, judge, push; for a variant, measure."""
    if is_variant:
        # Without thresholds TFX blesses nothing.
        return [
            Evaluator(
                examples=examples.outputs["examples"],
                model=trainer.outputs["model"],
                eval_config=evaluation_config(config, source.truth, judge=False),
                example_splits=["eval"],
            )
        ]
    last_blessed = Resolver(
        strategy_class=LatestBlessedModelStrategy,
        model=Channel(type=standard_artifacts.Model),
        model_blessing=Channel(type=standard_artifacts.ModelBlessing),
    ).with_id("last_blessed_model")
    evaluator = Evaluator(
        examples=examples.outputs["examples"],
        model=trainer.outputs["model"],
        baseline_model=last_blessed.outputs["model"],
        eval_config=evaluation_config(config, source.truth),
        example_splits=["eval"],
    )
    pusher = Pusher(
        model=trainer.outputs["model"],
        model_blessing=evaluator.outputs["blessing"],
        push_destination=pusher_pb2.PushDestination(
            filesystem=pusher_pb2.PushDestination.Filesystem(base_directory=str(workspace.serving))
        ),
    )
    return [last_blessed, evaluator, pusher]


def _metadata_connection(workspace: Workspace) -> proto.ConnectionConfig:
    # TFX's own helper would create the folder.
    connection = proto.ConnectionConfig()
    connection.sqlite.filename_uri = str(workspace.metadata)
    connection.sqlite.connection_mode = proto.SqliteMetadataSourceConfig.READWRITE_OPENCREATE
    return connection


def _example_gen(source: SourceData) -> CsvExampleGen:
    if source.span is None:
        return CsvExampleGen(input_base=str(source.folder), input_config=_splits(""))
    # TFX reads the span from the path and from nowhere else; the folder's name holds it.
    before, _, after = source.folder.name.partition(f"-{source.span}-")
    only = range_config_pb2.StaticRange(start_span_number=source.span, end_span_number=source.span)
    return CsvExampleGen(
        input_base=str(source.folder.parent),
        input_config=_splits(f"{before}-{{SPAN}}-{after}/"),
        range_config=range_config_pb2.RangeConfig(static_range=only),
    )


def _splits(folder: str) -> example_gen_pb2.Input:
    return example_gen_pb2.Input(
        splits=[
            example_gen_pb2.Input.Split(name=name, pattern=f"{folder}{name}/*")
            for name in ("train", "eval")
        ]
    )


def error_bounds(config: RunConfig, truth: Truth | None) -> tuple[float, float]:
    """Return the mean squared errors between which a model may be blessed."""
    wanted = config.evaluation
    # The largest float stands for "no bound": TFMA takes a missing bound for a finite one.
    upper = wanted.max_rmse**2 if wanted.max_rmse else sys.float_info.max
    if truth is None:
        return 0.0, upper
    if wanted.min_explained_share is not None:
        explainable = truth.baseline_rmse**2 - truth.floor_rmse**2
        upper = min(upper, truth.baseline_rmse**2 - wanted.min_explained_share * explainable)
    return truth.floor_rmse**2 - LEAK_STANDARD_ERRORS * truth.floor_stderr, upper


def evaluation_config(
    config: RunConfig, truth: Truth | None, *, judge: bool = True
) -> tfma.EvalConfig:
    """Say what blesses a model: an error below the bounds, and no worse than the last blessed one.

    On generated data the bounds come from the ground truth as well: a model that explains too
    little has not learned, and one below the noise floor has seen its own test. `judge` False
    leaves all of that out: the errors are measured and nothing is blessed.
    """
    lower, upper = error_bounds(config, truth)
    threshold = tfma.MetricThreshold(
        value_threshold=tfma.GenericValueThreshold(
            lower_bound={"value": lower}, upper_bound={"value": upper}
        ),
        change_threshold=tfma.GenericChangeThreshold(
            direction=tfma.MetricDirection.LOWER_IS_BETTER,
            absolute={"value": config.evaluation.max_mse_increase},
        ),
    )
    metrics = [
        tfma.MetricConfig(class_name="ExampleCount"),
        tfma.MetricConfig(class_name="MeanSquaredError", threshold=threshold if judge else None),
        tfma.MetricConfig(class_name="MeanAbsoluteError"),
    ]
    slices = [tfma.SlicingSpec(feature_keys=[column]) for column in config.evaluation.slices]
    return tfma.EvalConfig(
        model_specs=[tfma.ModelSpec(signature_name="serving_default", label_key=config.label)],
        metrics_specs=[tfma.MetricsSpec(metrics=metrics)],
        slicing_specs=[tfma.SlicingSpec(), *slices],
    )
