"""Where a training starts: its own checkpoint, the last published one, or scratch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowstep.components import progress
from rowstep.components.checkpoints import CheckpointError, CheckpointStore, SavedState
from rowstep.components.checkpoints.array_files import DamageError
from rowstep.components.checkpoints.saved_state import open_verified
from rowstep.components.job import TrainJob
from rowstep.components.training_state import TrainingState, differences


def restore(
    state: TrainingState, store: CheckpointStore, job: TrainJob, parts: Mapping[str, Any]
) -> str:
    """Load the state to start from and say which one it was.

    The training's own folder comes first: TFX deletes what a failed execution wrote, so unfinished
    work is only there. Then the last published checkpoint: of the same training it is as good as
    our own; of another one it serves a warm start, if the config asks for that.
    """
    saved = store.latest()
    for problem in store.problems:
        progress.emit("notice", text=problem)
    if saved is None and job.base_checkpoint is not None:
        base = _published(job.base_checkpoint, required=job.config.train.warm_start)
        if base is not None and base.meta["identity"] == dict(parts):
            # Into our own folder first, where an interruption and the end of the training look.
            store.save(base.step, {g: base.arrays(g) for g in base.groups}, base.meta)
            saved = base
        elif base is not None and job.config.train.warm_start:
            state.warm_start(base)
            return f"warm start from the weights of step {base.step}"
        elif base is not None:
            changed = "; ".join(differences(base.meta["identity"], parts)[:4])
            progress.emit("notice", text=f"training starts from scratch: {changed}")
    if saved is None:
        return "scratch"
    state.load(saved)
    return "finished checkpoint" if state.finished else f"checkpoint at step {saved.step}"


def _published(artifact: Path, *, required: bool) -> SavedState | None:
    folders = sorted(artifact.glob("step-*"))
    try:
        return open_verified(folders[-1])
    except IndexError:
        why = "the artifact holds none"
    except (CheckpointError, DamageError, OSError) as error:
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
            f"{store.root}: the final checkpoint must be readable. Got none that verifies. "
            f"Problems: {'; '.join(store.problems) or 'none reported'}. "
            "Check the disk and run again."
        )
    return saved


def publish(checkpoint: Path, artifact: Path) -> None:
    """Put a committed checkpoint into an artifact's folder, by hard links where that works."""
    target = artifact / checkpoint.name
    target.mkdir(parents=True)
    for source in sorted(checkpoint.iterdir()):
        try:
            os.link(source, target / source.name)
        except OSError:  # another filesystem, or one without hard links
            shutil.copy2(source, target / source.name)
