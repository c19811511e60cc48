"""The typed table of RecTrainer: parameters, inputs, outputs, nothing else."""

from __future__ import annotations

from tfx.types import standard_artifacts
from tfx.types.component_spec import ChannelParameter, ComponentSpec, ExecutionParameter

from rowstep.components.artifacts import Checkpoint

CONFIG = "config"
CODE_FINGERPRINT = "code_fingerprint"
DATA_FINGERPRINT = "data_fingerprint"
STATE_DIR = "state_dir"
TRACKING_URI = "tracking_uri"
TRACKING_ARTIFACTS = "tracking_artifacts"
FROM_SCRATCH = "from_scratch"
EXAMPLES = "examples"
SCHEMA = "schema"
TRANSFORM_GRAPH = "transform_graph"
BASE_CHECKPOINT = "base_checkpoint"
MODEL = "model"
MODEL_RUN = "model_run"
CHECKPOINT = "checkpoint"


class RecTrainerSpec(ComponentSpec):
    """Name what RecTrainer takes and gives."""

    PARAMETERS = {
        CONFIG: ExecutionParameter(type=str),
        CODE_FINGERPRINT: ExecutionParameter(type=str),
        DATA_FINGERPRINT: ExecutionParameter(type=str, optional=True),
        STATE_DIR: ExecutionParameter(type=str),
        TRACKING_URI: ExecutionParameter(type=str, optional=True),
        TRACKING_ARTIFACTS: ExecutionParameter(type=str, optional=True),
        FROM_SCRATCH: ExecutionParameter(type=int, optional=True),
    }
    INPUTS = {
        EXAMPLES: ChannelParameter(type=standard_artifacts.Examples),
        SCHEMA: ChannelParameter(type=standard_artifacts.Schema),
        TRANSFORM_GRAPH: ChannelParameter(type=standard_artifacts.TransformGraph),
        BASE_CHECKPOINT: ChannelParameter(type=Checkpoint, optional=True),
    }
    OUTPUTS = {
        MODEL: ChannelParameter(type=standard_artifacts.Model),
        MODEL_RUN: ChannelParameter(type=standard_artifacts.ModelRun),
        CHECKPOINT: ChannelParameter(type=Checkpoint),
    }
