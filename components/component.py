"""RecTrainer as pipeline authors see it."""

from __future__ import annotations

from pathlib import Path

from tfx.dsl.components.base import base_component, executor_spec
from tfx.types import channel, standard_artifacts

from rowstep.components.artifacts import Checkpoint
from rowstep.components.executor import Executor
from rowstep.components.fingerprint import code_fingerprint
from rowstep.components.spec import RecTrainerSpec
from rowstep.components.tracking import check_uri
from rowstep.configs import RunConfig, canonical_json
from rowstep.configs.errors import one_problem


class RecTrainer(base_component.BaseComponent):
    """Train a recommender with a row-sparse optimizer, resume it after a kill, and export it.

    Example:
        trainer = RecTrainer(
            config=load_config("my.yaml"),
            examples=transform.outputs["transformed_examples"],
            transform_graph=transform.outputs["transform_graph"],
            schema=schema_gen.outputs["schema"],
            base_checkpoint=last.outputs["base_checkpoint"],
            state_dir="/data/rowstep/state",
        )

    The outputs are `model` (a SavedModel that takes raw examples), `model_run` (a report of the
    training as JSON) and `checkpoint` (see `rowstep.components.Checkpoint`).
    """

    SPEC_CLASS = RecTrainerSpec
    EXECUTOR_SPEC = executor_spec.ExecutorClassSpec(Executor)

    def __init__(
        self,
        config: RunConfig,
        *,
        examples: channel.BaseChannel,
        transform_graph: channel.BaseChannel,
        schema: channel.BaseChannel,
        state_dir: str | Path,
        base_checkpoint: channel.BaseChannel | None = None,
        data_fingerprint: str | None = None,
        tracking_uri: str | None = None,
        tracking_artifacts: str | Path | None = None,
        from_scratch: bool = False,
    ) -> None:
        """Check the arguments and put the resolved config into the execution parameters.

        Args:
            config: the validated run; its canonical JSON is what ML Metadata stores.
            examples: transformed examples with the splits `train` and `eval`.
            transform_graph: the graph that made them; it is exported with the model.
            schema: the schema of the raw examples.
            state_dir: an absolute folder that outlives executions; unfinished checkpoints live
                there, because TFX deletes the outputs of an execution that failed.
            base_checkpoint: the checkpoint of the model that was pushed last, from a resolver with
                `rowstep.components.resolvers.LatestPushedStrategy`.
            data_fingerprint: a fingerprint of the source data, where one is known.
            tracking_uri: MLflow tracking URI without credentials.
            tracking_artifacts: where an SQLite tracking store keeps its artifacts.
            from_scratch: whether the training goes on with nothing but itself, as one of several
                that are compared must.

        Raises:
            ConfigError: the state folder is relative.
            TrackingError: a tracking URI holds credentials, which would end up in ML Metadata.
        """
        if not Path(state_dir).is_absolute():
            raise one_problem(
                "RecTrainer",
                "state_dir",
                f"must be an absolute path. Got {str(state_dir)!r}. Executions run in folders of "
                "their own. Pass the full path.",
            )
        check_uri(tracking_uri)
        check_uri(config.tracking.uri)  # a config made in Python may have passed by the schema
        super().__init__(
            RecTrainerSpec(
                config=canonical_json(config),
                code_fingerprint=code_fingerprint(),
                data_fingerprint=data_fingerprint,
                state_dir=str(state_dir),
                tracking_uri=tracking_uri,
                tracking_artifacts=str(tracking_artifacts) if tracking_artifacts else None,
                from_scratch=1 if from_scratch else None,
                examples=examples,
                schema=schema,
                transform_graph=transform_graph,
                base_checkpoint=base_checkpoint,
                model=channel.Channel(type=standard_artifacts.Model),
                model_run=channel.Channel(type=standard_artifacts.ModelRun),
                checkpoint=channel.Channel(type=Checkpoint),
            )
        )
