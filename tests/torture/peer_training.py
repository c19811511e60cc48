"""Kill a small Keras training twice in the middle of an epoch, with each way to keep its state.

The data come in a fixed order and never end, which spares Keras its extra step at the end of a data
set. A resume is bit-identical when weights, optimizer state and iterations at the end are those of
a training that was not killed.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from children import Reporter, start
from harness import Outcome

EPOCHS, NUM_BATCHES, EVERY = 3, 40, 10
KILLED_AFTER = ("batch 1 25", "batch 2 7")


@dataclass
class ResumeOutcome(Outcome):
    """How a training that was killed twice ended."""

    identical: bool = False
    planned_batches: int = EPOCHS * NUM_BATCHES
    executed_batches: int = 0


def new_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((4,), dtype="int32"),
        keras.layers.Embedding(50, 8),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3, seed=4),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def batches() -> tf.data.Dataset:
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 50, (NUM_BATCHES * 16, 4)).astype(np.int32)
    labels = rng.random((NUM_BATCHES * 16, 1), dtype=np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(16).repeat()


def state_of(model: keras.Model) -> list[np.ndarray]:
    """Return weights, seeds and the optimizer's list."""
    return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


class Tell(keras.callbacks.Callback):
    """Tell of every batch, and save after some of them."""

    def __init__(self, reporter: Reporter, save: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.reporter, self.save = reporter, save

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (batch + 1) % EVERY == 0:
            self.save()
        self.reporter.tell(f"batch {self.epoch} {batch}")


def backup_and_restore(root: Path, reporter: Reporter) -> keras.Model:
    model = new_model()
    backup = keras.callbacks.BackupAndRestore(
        str(root / "backup"), save_freq=EVERY, delete_checkpoint=False
    )
    model.fit(
        batches(),
        epochs=EPOCHS,
        steps_per_epoch=NUM_BATCHES,
        callbacks=[backup, Tell(reporter)],
        verbose=0,
    )
    return model


def savez(root: Path, reporter: Reporter) -> keras.Model:
    model, file = new_model(), root / "state.npz"
    variables = [*model.variables, *model.optimizer.variables]
    if file.exists():
        with np.load(file) as saved:
            for index, variable in enumerate(variables):
                variable.assign(saved[f"arr_{index}"])
    # The list holds no position in the data: the epoch that the iterations point to starts anew.
    first = int(model.optimizer.iterations.numpy()) // NUM_BATCHES
    model.fit(
        batches(),
        initial_epoch=first,
        epochs=EPOCHS,
        steps_per_epoch=NUM_BATCHES,
        callbacks=[Tell(reporter, lambda: np.savez(file, *state_of(model)))],
        verbose=0,
    )
    return model


def checkpoint_manager(root: Path, reporter: Reporter) -> keras.Model:
    """Train in a loop of its own, the iterator in the checkpoint, as TensorFlow's guide says."""
    model, iterator = new_model(), iter(batches())
    checkpoint = tf.train.Checkpoint(
        step=tf.Variable(0), net=model, optimizer=model.optimizer, iterator=iterator
    )
    manager = tf.train.CheckpointManager(checkpoint, str(root), max_to_keep=3)
    manager.restore_or_initialize()

    @tf.function
    def train_step(ids: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(ids, training=True) - labels))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        model.optimizer.apply(gradients, variables)

    while int(checkpoint.step) < EPOCHS * NUM_BATCHES:
        train_step(*next(iterator))
        checkpoint.step.assign_add(1)
        step = int(checkpoint.step)
        if step % EVERY == 0:
            manager.save(checkpoint_number=step)
        reporter.tell(f"batch {(step - 1) // NUM_BATCHES} {(step - 1) % NUM_BATCHES}")
    return model


WAYS = {
    "Keras BackupAndRestore": backup_and_restore,
    "np.savez, in place": savez,
    "tf.train.CheckpointManager": checkpoint_manager,
}


def train_once(name: str, root: Path, kill_after: str | None, log: Path) -> tuple[str, int]:
    """Train until the kill or the end; return the digest at the end, and the batches that ran."""

    def work(reporter: Reporter) -> None:
        reporter.stops_after = kill_after  # a kill that comes late would meet a save
        digest = hashlib.sha256()
        for array in state_of(WAYS[name](root, reporter)):
            digest.update(array.tobytes())
        reporter.tell("done " + json.dumps(digest.hexdigest()))

    child = start(work, log)
    while (line := child.next_line(240)) is not None and not line.startswith("done"):
        if line == kill_after:
            child.kill()
            break
    child.wait()
    lines = child.drain()
    child.bury()
    done = [line for line in lines if line.startswith("done")]
    if kill_after is None and not done:
        raise RuntimeError(f"{name}: the training failed. {log.read_text()[-2000:]}")
    return (done[0] if done else ""), sum(line.startswith("batch") for line in lines)


def resume_mid_epoch(name: str, seed: int) -> ResumeOutcome:
    """Compare a training that was killed in two epochs with one that was not."""
    outcome = ResumeOutcome(name, f"TensorFlow {tf.__version__}, Keras {keras.__version__}", seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, parts, log = (
            Path(folder) / "whole",
            Path(folder) / "parts",
            Path(folder) / "log",
        )
        whole.mkdir()
        parts.mkdir()
        wanted, _ = train_once(name, whole, None, log)
        for kill_after in (*KILLED_AFTER, None):
            found, num_batches = train_once(name, parts, kill_after, log)
            outcome.executed_batches += num_batches
        outcome.identical = found == wanted
    return outcome
