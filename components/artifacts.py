"""The artifact type that rowstep adds to ML Metadata."""

from __future__ import annotations

from tfx.types.artifact import Artifact


class Checkpoint(Artifact):
    """Hold one committed training state: model, optimizer, position and lineage.

    Its folder holds one `step-<n>` folder, in the format of `rowstep.components.checkpoints`. What
    it stands for is in custom properties (`step`, `run_key`, `mlflow_run_id`, ...). Kubeflow
    refuses an artifact type with declared PROPERTIES, and a type name that is not
    `<package>.<Class>` of a class importable from that package's root.
    """

    TYPE_NAME = "rowstep.Checkpoint"
