"""A real training of seconds: `train(TrainJob)` on what the tiny pipeline prepared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf
import training_callbacks
from children import Reporter
from harness import CONFIG

from rowstep.components.checkpoints import CheckpointStore
from rowstep.components.data import split_files
from rowstep.components.job import TrainingInterruptedError, TrainJob
from rowstep.components.train import train
from rowstep.configs import load_config

EVERY_STEPS = 10
EPOCHS = 6
NUM_BATCHES = 43
"""Batches of an epoch: 5,400 examples, 128 each."""
COMMON = [
    "model={kind: dcn, dim: 4, cross_layers: 1, deep_units: [8], dropout: 0.3}",
    "train.batch_size=128",
    f"train.epochs={EPOCHS}",
    "train.metrics=[RootMeanSquaredError]",
    "tracking.enabled=false",
    f"checkpoint.every_steps={EVERY_STEPS}",
    "checkpoint.every_seconds=null",
]
VARIANTS = {
    "lamb": [
        "optimizer={kind: lamb, learning_rate: 0.01, weight_decay_rate: 0.01}",
        "optimizer.schedule={kind: cosine}",
        "train.callbacks=[training_callbacks.Steps, training_callbacks.stop_early]",
    ],
    "lazy_adam": [
        "optimizer={kind: lazy_adam, learning_rate: 0.01}",
        "train.callbacks=[training_callbacks.Steps, training_callbacks.slow_down]",
    ],
}
VOLATILE = {"attempt", "mlflow_run_id", "versions"}
"""What of the JSON part of a checkpoint a resumed training may say otherwise."""


class Result(NamedTuple):
    """What must be equal however often a training was killed."""

    digest: str
    meta: dict[str, Any]
    metrics: dict[str, float]


def make_job(home: Path, folder: Path, *overrides: str) -> TrainJob:
    """Describe a training on the examples in `home` that writes into `folder`."""
    transform = home / "tiny" / "artifacts" / "Transform"

    def newest(key: str) -> Path:
        return max((transform / key).iterdir(), key=lambda path: int(path.name))

    examples = newest("transformed_examples")
    return TrainJob(
        config=load_config(CONFIG, [*COMMON, *overrides]),
        train_files=tuple(split_files(str(examples / "Split-train"))),
        eval_files=tuple(split_files(str(examples / "Split-eval"))),
        transform_graph=str(newest("transform_graph")),
        serving_dir=str(folder / "serving"),
        state_dir=folder / "state",
    )


def work(make: Callable[[], TrainJob], pause_seconds: float, reporter: Reporter) -> None:
    """Train in this process, and tell the result."""
    keras.utils.set_random_seed(1)
    tf.random.set_global_generator(tf.random.Generator.from_seed(1))
    training_callbacks.reporter = reporter
    training_callbacks.pause_seconds = pause_seconds
    try:
        result = train(make())
    except TrainingInterruptedError as error:
        reporter.tell(f"interrupted {error}")
        return
    reporter.tell("done " + json.dumps({"step": result.step, "metrics": dict(result.metrics)}))


def checkpoints(folder: Path) -> Path | None:
    """Return where the training in a folder keeps its checkpoints, once it does."""
    return next(folder.glob("state/*/checkpoints"), None)


def committed(folder: Path) -> int:
    """Return the newest committed step by the names of folders, 0 without one."""
    root = checkpoints(folder)
    names = [] if root is None else [path.name for path in root.glob("step-*")]
    return max((int(name[5:].partition(".")[0]) for name in names), default=0)


def result_of(folder: Path, done: str) -> Result:
    """Read the last checkpoint, every group of it, and reduce it to what must be equal."""
    root = checkpoints(folder)
    store = CheckpointStore(root) if root is not None else None
    saved = store.latest() if store is not None else None
    if store is None or saved is None or store.problems:
        raise RuntimeError(f"the final checkpoint cannot be read: {store and store.problems}")
    digest = hashlib.sha256()
    for group in sorted(saved.groups):
        for name, array in sorted(saved.arrays(group)):
            digest.update(f"{group}/{name} {array.dtype} {array.shape}\n".encode())
            digest.update(array.tobytes())
    meta = {key: value for key, value in saved.meta.items() if key not in VOLATILE}
    return Result(digest.hexdigest(), meta, json.loads(done.removeprefix("done "))["metrics"])
