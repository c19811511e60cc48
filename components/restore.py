"""Where a training starts: its own checkpoint, another training's, or scratch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowstep.components import progress
from rowstep.components.checkpoints import (
    CheckpointError,
    CheckpointStore,
    SavedState,
    open_checkpoint,
)
from rowstep.components.identity import differences
from rowstep.components.job import TrainJob
from rowstep.components.training_state import TrainingState, changed_versions
from rowstep.components.trainings import predecessor
from rowstep.components.vocabularies import load_vocabularies
from rowstep.components.warm_start import column_faults, tables_of_features, warm_start

_COPY_BYTES = 16 << 20


def restore(
    state: TrainingState,
    own: SavedState | None,
    job: TrainJob,
    parts: Mapping[str, Any],
    key: str,
) -> tuple[str, SavedState | None]:
    """Load the state to start from; say which one it was, and return it unless it was scratch.

    The training's own checkpoint comes first: TFX deletes what a failed execution wrote, so
    unfinished work is only there. Then a training that only the version of the code or the number
    of epochs tells from this one. Then the checkpoint of the last pushed model: of the same
    training it is as good as our own; of another one it serves a warm start, if the config asks
    for that. A job that is from scratch goes on with its own checkpoint only.

    Args:
        state: the new training.
        own: the newest good checkpoint of this very training, if there is one.
        job: what is trained, and where other checkpoints are.
        parts: the identity of the training.
        key: its short name.

    Raises:
        CheckpointError: a warm start is asked for, and its checkpoint is damaged.
        StateMismatchError: the one to start from does not fit; nothing was assigned.
    """
    saved = own
    is_open = not job.from_scratch
    if saved is None and is_open:
        saved = _of_predecessor(job, parts, key)
    if saved is None and is_open and job.base_checkpoint is not None:
        base = _published(job.base_checkpoint, required=job.config.train.warm_start)
        if base is not None and base.meta["identity"] == dict(parts):
            saved = base
        elif base is not None and job.config.train.warm_start:
            return _warm_start(state, job, base), None
        elif base is not None:
            why = "; ".join(differences(base.meta["identity"], parts)[:4])
            progress.emit("notice", text=f"training starts from scratch: {why}")
    if saved is None:
        return "scratch", None
    state.load(saved)
    if changed := changed_versions(saved.meta):
        told = f"goes on correctly, but not to the bit, with other versions: {', '.join(changed)}"
        progress.emit("notice", text=f"training {told}")
    if saved.meta["identity"]["train"]["epochs"] != parts["train"]["epochs"]:
        state.finished = False
    return "finished checkpoint" if state.finished else f"checkpoint at step {saved.step}", saved


def _of_predecessor(job: TrainJob, parts: Mapping[str, Any], key: str) -> SavedState | None:
    changed: list[str] = []
    training = predecessor(job.state_dir, key, parts, changed)
    if training is None:
        return None
    store = CheckpointStore(training.checkpoints)
    saved = store.latest()
    for problem in store.problems:
        progress.emit("notice", text=problem)
    if saved is not None:
        progress.emit("notice", text=f"goes on with an earlier training: {'; '.join(changed)}")
    return saved


def _warm_start(state: TrainingState, job: TrainJob, base: SavedState) -> str:
    config = job.config
    report = warm_start(
        state.model,
        state.optimizer,
        base,
        tables_of_features(config, state.model),
        load_vocabularies(base),
        state.vocabularies,
        take_optimizer=config.train.warm_start_optimizer,
        other_faults=column_faults(base, config),
    )
    progress.emit("notice", text=str(report))
    state.first_iteration = report.iterations
    taken = "weights and optimizer" if config.train.warm_start_optimizer else "weights"
    return f"warm start from the {taken} of step {base.step}"


def _published(artifact: Path, *, required: bool) -> SavedState | None:
    folders = sorted(artifact.glob("step-*"))
    try:
        if not folders:
            raise CheckpointError("the artifact holds none")
        return open_checkpoint(folders[-1])
    except CheckpointError as error:
        why = str(error)
    if required:
        raise CheckpointError(
            f"{artifact}: a warm start needs the last published checkpoint whole. Got {why}. "
            "Publish another one, or set train.warm_start to false."
        )
    progress.emit("notice", text=f"the last published checkpoint is not used: {why}")
    return None


def newest(store: CheckpointStore) -> SavedState:
    """Return the checkpoint that ends a training, read back and verified."""
    saved = store.latest()
    if saved is None:
        raise CheckpointError(
            f"{store.where}: the final checkpoint must be readable. Got none that verifies. "
            f"Problems: {'; '.join(store.problems) or 'none reported'}. "
            "Check the disk and run again."
        )
    return saved


def publish(saved: SavedState, artifact: Path) -> None:
    """Put a committed checkpoint into an artifact's folder, by hard links where that works."""
    target = artifact / saved.folder
    target.mkdir(parents=True)
    for name in saved.medium.files(saved.folder):
        try:
            if saved.path is None:
                raise OSError("it is on an object store")
            os.link(saved.path / name, target / name)
        except OSError:  # that, another filesystem, or one without hard links
            with saved.medium.open(saved.folder, name) as source, open(target / name, "wb") as copy:
                shutil.copyfileobj(source, copy, _COPY_BYTES)
