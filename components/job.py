"""What a training is given and what it gives back; no TensorFlow needed to build either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rowstep import RowstepError
from rowstep.configs import RunConfig


class TrainingInterruptedError(RowstepError, RuntimeError):
    """Say that a SIGTERM or SIGINT stopped the training after a checkpoint was written."""


class DivergedError(RowstepError, RuntimeError):
    """Say that the loss stopped being a finite number."""


@dataclass(frozen=True)
class TrainJob:
    """Describe one training by plain values, whoever asks for it: RecTrainer, run_fn or a test."""

    config: RunConfig
    train_files: tuple[str, ...]
    """Gzipped TFRecord files of transformed examples."""
    eval_files: tuple[str, ...]
    transform_graph: str
    """Folder of the transform graph; serving needs it to read raw examples."""
    serving_dir: str
    """Folder that the SavedModel is written to."""
    state_dir: Path
    """Folder of rowstep's own for unfinished and finished checkpoints and the tracking journal."""
    base_checkpoint: Path | None = None
    """Folder of the last published Checkpoint artifact."""
    from_scratch: bool = False
    """Whether no other training may be gone on with, for trainings that are compared. Such a one
    is a training of its own, also beside one of the same settings."""
    publish_dir: Path | None = None
    """Folder of the Checkpoint artifact to fill."""
    tracking_uri: str | None = None
    tracking_artifacts: Path | None = None
    """Where MLflow keeps the artifacts of an experiment created in an SQLite store."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Lineage (pipeline, execution, artifacts) for the MLflow run and the checkpoint."""


@dataclass(frozen=True)
class TrainResult:
    """Report what a training did."""

    step: int
    num_steps_run: int
    """Zero when a finished checkpoint of the same config and data was found."""
    started_from: str
    """`scratch`, `checkpoint at step N`, `finished checkpoint`, `warm start from the weights of
    step N` or `warm start from the weights and optimizer of step N`."""
    metrics: Mapping[str, float]
    run_key: str
    data_fingerprint: str
    checkpoint: str
    """Folder or URL of the checkpoint that ends the training."""
    mlflow_run_id: str | None
    mlflow_link: str | None
    """Where a browser, or `mlflow ui`, shows the run; without credentials."""
