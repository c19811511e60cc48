"""The trainings of a pipeline: one folder each, a record in it, and which of them may go.

    <state>/<run key>/TRAINING.json     what is trained, and the number of the training
    <state>/<run key>/checkpoints/      unless the config names another root
    <state>/<run key>/tracking/         the journal of MLflow

The number counts trainings in the order in which they were first started; clocks decide nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rowstep.components.checkpoints import Best, CheckpointError, CheckpointStore, Retention
from rowstep.components.identity import differences
from rowstep.configs import RunConfig

RECORD = "TRAINING.json"
_MAY_DIFFER = {"code", "train.epochs"}


@dataclass(frozen=True)
class Training:
    """One training, as its record says."""

    key: str
    number: int
    identity: dict[str, Any]
    checkpoints: str
    """Folder or URL of its checkpoints."""
    finished: bool = False


def checkpoint_root(config: RunConfig, state_dir: Path, key: str) -> str:
    """Return where the checkpoints of a training are."""
    if config.checkpoint.root is None:
        return str(state_dir / key / "checkpoints")
    return f"{config.checkpoint.root.rstrip('/')}/{config.name}/{key}"


def retention(config: RunConfig) -> Retention:
    """Return the rules by which a training keeps its checkpoints."""
    rules = config.checkpoint
    wanted = rules.keep_best
    best = None if wanted is None else Best(wanted.metric, wanted.count)
    return Retention(rules.keep_last, best, rules.keep_every_hours)


def record(state_dir: Path, key: str, identity: Mapping[str, Any], root: str) -> Training:
    """Write down a training that starts, or return the record that it has."""
    known = {training.key: training for training in trainings(state_dir)}
    if key in known and known[key].checkpoints == root:
        return known[key]
    number = max((training.number for training in known.values()), default=0) + 1
    training = Training(key, number, dict(identity), root)
    _write(state_dir, training)
    return training


def mark_finished(state_dir: Path, training: Training) -> None:
    """Note that a training has reached its end."""
    _write(state_dir, Training(**{**asdict(training), "finished": True}))


def trainings(state_dir: Path) -> list[Training]:
    """Return the recorded trainings of a pipeline, oldest first; unreadable records count not."""
    return sorted(_records(state_dir), key=lambda training: training.number)


def predecessor(
    state_dir: Path, key: str, identity: Mapping[str, Any], found: list[str]
) -> Training | None:
    """Return an earlier training that this one may go on with to the same end, if there is one.

    That is one that differs in the version of the code only and is unfinished, or in a smaller
    number of epochs on whose total nothing in its settings depends.

    Args:
        state_dir: the folder of the pipeline's trainings.
        key: the run key of this training, which is not its own predecessor.
        identity: what this training is.
        found: is given what the two disagree on.
    """
    for training in reversed(trainings(state_dir)):
        if training.key == key:
            continue
        changed = differences(training.identity, identity)
        paths = {text.split(":")[0] for text in changed}
        if not paths <= _MAY_DIFFER:
            continue
        if training.finished and paths != {"train.epochs"}:
            return None  # done by other code: what is older was left behind on purpose
        if "train.epochs" in paths and not _may_be_longer(training.identity, identity):
            continue
        found.extend(changed)
        return training
    return None


def _may_be_longer(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    schedule = new["optimizer"].get("schedule") or {}
    by_length = schedule.get("kind") == "cosine" and schedule.get("decay_steps") is None
    return new["train"]["epochs"] > old["train"]["epochs"] and not by_length


def forget_old(state_dir: Path, keep: int | None, current: str) -> list[str]:
    """Delete the checkpoints of all but the newest `keep` trainings; return what was in the way.

    The journal of MLflow and the record stay. A training that is running keeps its checkpoints.
    """
    problems: list[str] = []
    known = trainings(state_dir)
    for training in known[: -keep if keep else 0]:
        if training.key == current:
            continue
        try:
            _forget(training)
            (state_dir / training.key / RECORD).unlink(missing_ok=True)
        except (CheckpointError, OSError) as error:
            problems.append(f"old checkpoints stay: {error}")
    return problems


def _forget(training: Training) -> None:
    store = CheckpointStore(training.checkpoints)
    with store.lock():
        for name in [*store.medium.committed(), *store.medium.others()]:
            store.medium.delete(name)
    if store.is_local:
        shutil.rmtree(training.checkpoints)


def _records(state_dir: Path) -> Iterator[Training]:
    for path in state_dir.glob(f"*/{RECORD}"):
        try:
            yield Training(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # half a record of a killed start: its training writes it again


def _write(state_dir: Path, training: Training) -> None:
    path = state_dir / training.key / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}.new")
    new.write_text(json.dumps(asdict(training), indent=1))
    new.replace(path)
