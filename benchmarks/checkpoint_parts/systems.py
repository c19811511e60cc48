"""The ways to save and restore that are compared, each as its documentation has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from checkpoint_parts.machine import flush
from checkpoint_parts.training import Training, checksum

from rowstep.components.checkpoints import CheckpointStore, SavedState
from rowstep.components.checkpoints.background import Saver
from rowstep.optimizers.state import (
    get_weights,
    iter_named_state,
    load_named_state,
    set_weights,
    state_variables,
)


@dataclass(frozen=True)
class System:
    """One way to save and to restore. `save` returns when the bytes survive a power cut."""

    save: Callable[[Training, Path], None]
    restore: Callable[[Training, Path], dict[str, float]]
    """Returns seconds of its parts, where they are of interest."""


@dataclass(frozen=True)
class BackgroundSave:
    """One save that goes on beside the training."""

    start: Callable[[], None]
    busy: Callable[[], bool]
    saved: Callable[[], int | None]
    """Returns the checksum of what was saved; asked for when all is over."""


# --- rowstep ----------------------------------------------------------------------------------


def save_rowstep(training: Training, folder: Path) -> None:
    store = CheckpointStore(folder / "store")
    with store.lock():
        store.save(3, {"optimizer": iter_named_state(training.optimizer)}, {"epoch": 0})


def verify_rowstep(folder: Path) -> SavedState:
    saved = CheckpointStore(folder / "store").latest()
    if saved is None:
        raise RuntimeError(f"{folder}: there is no checkpoint.")
    return saved


def load_rowstep(training: Training, saved: SavedState) -> None:
    load_named_state(training.optimizer, saved.sources("optimizer"))


def restore_rowstep(training: Training, folder: Path) -> dict[str, float]:
    start = time.perf_counter()
    saved = verify_rowstep(folder)
    verified = time.perf_counter()
    load_rowstep(training, saved)
    return {"verify": verified - start, "load": time.perf_counter() - verified}


@contextmanager
def background_rowstep(training: Training, folder: Path) -> Iterator[BackgroundSave]:
    store = CheckpointStore(folder / "store")
    with store.lock():
        saver = Saver(store)

        def start() -> None:
            saver.save(3, {"optimizer": iter_named_state(training.optimizer)}, {"epoch": 0})

        def busy() -> bool:
            saver.spare_memory()  # as the training loop does after every step
            return saver.busy

        def saved() -> int | None:
            found = store.latest()
            return found and checksum([array for _, array in found.arrays("optimizer")])

        yield BackgroundSave(start, busy, saved)
        saver.close()


# --- TensorFlow, Keras, NumPy, Orbax ------------------------------------------------------------


def save_tensorflow(training: Training, folder: Path) -> None:
    tf.train.Checkpoint(state=training.natives()).write(str(folder / "state"))
    flush(folder)


def restore_tensorflow(training: Training, folder: Path) -> dict[str, float]:
    checkpoint = tf.train.Checkpoint(state=training.natives())
    checkpoint.read(str(folder / "state")).assert_consumed()
    return {}


@contextmanager
def background_tensorflow(training: Training, folder: Path) -> Iterator[BackgroundSave]:
    done: list[str] = []
    options = tf.train.CheckpointOptions(
        enable_async=True, experimental_write_callbacks=[lambda path: done.append(path)]
    )
    checkpoint = tf.train.Checkpoint(state=training.natives())

    def start() -> None:
        checkpoint.save(str(folder / "state"), options=options)

    def saved() -> int | None:
        checkpoint.sync()
        checkpoint.restore(done[0]).assert_existing_objects_matched()
        return training.digest()

    yield BackgroundSave(start, lambda: not done, saved)


def _keras_model(training: Training) -> keras.Model:
    """Return a small model that carries the optimizer, since BackupAndRestore saves models."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.optimizer = training.optimizer
    return model


def save_keras(training: Training, folder: Path) -> None:
    _keras_model(training).save_weights(folder / "latest.weights.h5")
    flush(folder)


def restore_keras(training: Training, folder: Path) -> dict[str, float]:
    _keras_model(training).load_weights(folder / "latest.weights.h5")
    return {}


def save_npz(training: Training, folder: Path) -> None:
    np.savez(folder / "state.npz", *get_weights(training.optimizer))
    flush(folder)


def restore_npz(training: Training, folder: Path) -> dict[str, float]:
    with np.load(folder / "state.npz") as arrays:
        set_weights(training.optimizer, [arrays[name] for name in arrays.files])
    return {}


def save_orbax(training: Training, folder: Path) -> None:
    import orbax.checkpoint as ocp

    tree = {str(i): array for i, array in enumerate(training.arrays())}
    ocp.PyTreeCheckpointer().save(folder / "state", tree)
    flush(folder)


def restore_orbax(training: Training, folder: Path) -> dict[str, float]:
    import orbax.checkpoint as ocp

    tree = ocp.PyTreeCheckpointer().restore(folder / "state")
    keys = state_variables(training.optimizer)
    state = {key: np.asarray(tree[str(i)]) for i, key in enumerate(keys)}
    load_named_state(training.optimizer, state)
    return {}


SYSTEMS = {
    "rowstep": System(save_rowstep, restore_rowstep),
    "tensorflow": System(save_tensorflow, restore_tensorflow),
    "keras": System(save_keras, restore_keras),
    "npz": System(save_npz, restore_npz),
    "orbax": System(save_orbax, restore_orbax),
}
BACKGROUND: dict[str, Callable[[Training, Path], AbstractContextManager[BackgroundSave]]] = {
    "rowstep": background_rowstep,
    "tensorflow": background_tensorflow,
}
