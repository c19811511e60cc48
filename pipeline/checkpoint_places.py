"""Find the checkpoints that a person means: one of them, a folder of them, or those of a pipeline.

Everything here only reads. No lock is taken and nothing is moved, so a training that is running is
not disturbed; what its retention deletes meanwhile is passed over.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from rowstep import RowstepError
from rowstep.components.checkpoints import CheckpointError, Entry, Retention, messages
from rowstep.components.checkpoints.array_files import ArrayRecord, DamageError, check_file
from rowstep.components.checkpoints.catalog import Catalog
from rowstep.components.checkpoints.manifest import MANIFEST, Manifest
from rowstep.components.checkpoints.medium import Medium
from rowstep.components.checkpoints.places import medium_at
from rowstep.components.checkpoints.retention import parse_folder, with_reasons
from rowstep.components.checkpoints.saved_state import read_manifest
from rowstep.components.trainings import Training, retention, trainings
from rowstep.pipeline.runs import Run, runs_of
from rowstep.pipeline.workspace import Workspace

_ASIDE = "corrupt-"
_PARTS = ("features", "label", "model", "optimizer", "train")


class UnknownCheckpointError(RowstepError, ValueError):
    """Say that a path, a URL or a name leads to no checkpoint."""


@dataclass(frozen=True)
class Shelf:
    """A folder or URL that holds checkpoints, and what is known of their training.

    Args:
        medium: the disk or the object store.
        training: its record, where the shelf was found through a workspace.
        rules: how its checkpoints are kept, where a config of the pipeline says so.
    """

    medium: Medium
    training: Training | None = None
    rules: Retention | None = None

    def entries(self) -> list[Entry]:
        """Describe the committed checkpoints, oldest first; without rules no reason is known."""
        found = Catalog(self.medium).entries()
        return with_reasons(found, self.rules) if self.rules else found

    def folders(self) -> list[str]:
        """Return the names of committed checkpoints, the one that counts most last."""
        return [folder.name for folder in Catalog(self.medium).committed()]

    def set_aside(self) -> list[str]:
        """Return the names of checkpoints that were moved aside because they are damaged."""
        return Catalog(self.medium).corrupt()

    def unfinished(self) -> list[str]:
        """Return the names of saves that are going on, or that a killed writer left."""
        return Catalog(self.medium).leftovers()


@dataclass(frozen=True)
class Finding:
    """What reading every byte of a checkpoint found."""

    where: str
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    is_damaged: bool = False
    """Whether bytes are not what was saved; else it cannot be judged, of a newer format, say."""


def find_shelf(place: str) -> Shelf:
    """Return the folder of checkpoints at a path or URL.

    Raises:
        UnknownCheckpointError: there is none.
        CheckpointError: it may not be read, or the URL cannot be used.
    """
    shelf = Shelf(medium_at(place if "://" in place else os.path.abspath(place)))
    if not (shelf.folders() or shelf.set_aside() or shelf.unfinished()):
        raise _unknown(place)
    return shelf


def find_checkpoint(place: str) -> tuple[Medium, str] | None:
    """Return the medium and the folder of one checkpoint, or None where there is something else."""
    place = place.removeprefix("file://")
    where = (place if "://" in place else os.path.abspath(place)).rstrip("/")
    root, _, name = where.rpartition("/")
    if "://" in where and root.endswith(("/", ":")):
        return None  # a bucket
    medium = medium_at(root or "/")
    try:
        medium.size(name, MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        # A committed folder whose manifest is lost is a checkpoint too: a damaged one.
        return (medium, name) if medium.is_local and _is_step_folder(where) else None
    except OSError as error:
        raise messages.unreadable(where, error) from error
    return medium, name


def find_checkpoint_or_newest(place: str) -> tuple[Medium, str]:
    """Return one checkpoint: the one at a place, or the newest of the folder there.

    Raises:
        UnknownCheckpointError: there is none.
        CheckpointError: it may not be read.
    """
    found = find_checkpoint(place)
    if found is None:
        shelf = find_shelf(place)
        if not shelf.folders():
            raise _unknown(place)
        found = shelf.medium, shelf.folders()[-1]
    return found


def shelves_of(home: Path, pipeline: str | None) -> list[tuple[str, Shelf]]:
    """Return the trainings of one pipeline, or of all in a home, as (pipeline, shelf).

    Raises:
        UnknownCheckpointError: no pipeline has that name.
    """
    names = sorted(path.parent.name for path in home.glob("*/state"))
    if pipeline is not None and pipeline not in names:
        known = ", ".join(names) or "none"
        raise UnknownCheckpointError(
            f"checkpoint list: must name a pipeline of {home}, a folder or a URL. "
            f"Got {pipeline!r}. Pipelines: {known}. List all with: rowstep checkpoint list"
        )
    found = []
    for name in [pipeline] if pipeline else names:
        workspace = Workspace(home, name)
        runs = runs_of(workspace)
        for training in trainings(workspace.state):
            rules = _rules_of(training, runs)
            found.append((name, Shelf(medium_at(training.checkpoints), training, rules)))
    return found


def verify(medium: Medium, folder: str) -> Finding | None:
    """Read every byte of a checkpoint and name each file that is not what was saved.

    Returns:
        What was found, or None if the checkpoint was deleted meanwhile.
    """
    where = f"{medium.where}/{folder}"
    num_bytes, problems, is_damaged = 0, [], True
    try:
        manifest = read_manifest(medium, folder)
        num_bytes = manifest.num_bytes
        problems = [p for record in manifest.records if (p := _problem(medium, folder, record))]
    except DamageError as error:
        problems.append(str(error))
    except CheckpointError as error:
        problems, is_damaged = [str(error)], False
    if problems and parse_folder(folder) and not Catalog(medium).has(folder):
        return None
    return Finding(where, num_bytes, problems, is_damaged and bool(problems))


def manifest_of(medium: Medium, folder: str) -> Manifest:
    """Return the manifest of a checkpoint; its arrays are not looked at.

    Raises:
        CheckpointError: it is damaged, or may not be read.
    """
    try:
        return read_manifest(medium, folder)
    except DamageError as error:
        raise CheckpointError(
            f"{medium.where}/{folder}: the manifest must be whole. Got {error}. "
            "Look for another checkpoint with: rowstep checkpoint list"
        ) from error


def is_pipeline_name(home: Path, text: str) -> bool:
    """Return whether a text names a pipeline of a home, and not a path or URL."""
    return "/" not in text and ((home / text / "state").is_dir() or not Path(text).exists())


def _problem(medium: Medium, folder: str, record: ArrayRecord) -> str | None:
    try:
        check_file(medium, folder, record)
    except DamageError as error:
        return f"{error} ({record.group}/{record.name})"
    except OSError as error:
        return f"{record.file}: {error} ({record.group}/{record.name})"
    return None


def _is_step_folder(where: str) -> bool:
    path = Path(where)
    is_ours = parse_folder(path.name) is not None or path.name.startswith(_ASIDE)
    return is_ours and path.is_dir()


def _rules_of(training: Training, runs: list[Run]) -> Retention | None:
    """Return the rules of the newest run that trained this, or of the newest run at all."""
    chosen = None
    for run in reversed(runs):
        dumped = json.loads(run.config.model_dump_json())
        chosen = chosen or run
        if all(training.identity.get(part) == dumped[part] for part in _PARTS):
            chosen = run
            break
    return retention(chosen.config) if chosen else None


def _unknown(place: str) -> UnknownCheckpointError:
    return UnknownCheckpointError(
        f"{place}: there must be a checkpoint, or a folder of checkpoints. Got neither. "
        "List those of a workspace with: rowstep checkpoint list"
    )
