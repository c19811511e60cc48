"""Which checkpoints to keep, and why: a pure function of what their manifests say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rowstep.components.checkpoints.array_files import CheckpointError

_FOLDER = re.compile(r"step-(\d{12,})(?:\.(\d+))?")


@dataclass(frozen=True)
class Best:
    """Keep the checkpoints with the lowest values of a metric.

    Args:
        metric: name of the metric, as it was given to `save`.
        count: how many to keep.
    """

    metric: str = "val_rmse"
    count: int = 1

    def __post_init__(self) -> None:
        _need(self.count >= 1, "keep_best.count must be at least 1", self.count)


@dataclass(frozen=True)
class Retention:
    """Say which committed checkpoints stay; what no rule keeps is deleted after the next commit.

    Args:
        keep_last: the newest steps; two at least, to survive a damaged one.
        keep_best: the best ones besides.
        keep_every_hours: one for every so many hours of training besides. Time that passes
            between two attempts does not count, and neither do jumps of the clock.

    Raises:
        CheckpointError: a number is too small.
    """

    keep_last: int = 3
    keep_best: Best | None = None
    keep_every_hours: float | None = None

    def __post_init__(self) -> None:
        _need(self.keep_last >= 1, "keep_last must be at least 1", self.keep_last)
        hours = self.keep_every_hours
        _need(hours is None or hours > 0, "keep_every_hours must be above 0", hours)


@dataclass(frozen=True)
class Entry:
    """Describe one committed checkpoint by its manifest.

    Args:
        step: the training step.
        where: its folder.
        num_bytes: length of its files, without the manifest.
        metrics: what was measured at that step.
        training_seconds: time spent training up to it.
        saved_at: date and time in UTC; for people.
        kept_because: the rules that keep it; empty when the next commit deletes it.
        problem: why its manifest cannot be used, or None. Such a one is never deleted by a rule.
        is_damaged: whether the problem is damage; others, such as a newer format, may pass.
    """

    step: int
    where: str
    num_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    training_seconds: float = 0.0
    saved_at: str = ""
    kept_because: tuple[str, ...] = ()
    problem: str | None = None
    is_damaged: bool = False

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return self.where.rpartition("/")[2]

    @property
    def revision(self) -> int:
        """Return how often the step had been saved before."""
        return (parse_folder(self.name) or (self.step, 0))[1]


def parse_folder(name: str) -> tuple[int, int] | None:
    """Return the step and the revision in the name of a committed folder, None for other names."""
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def folder_name(step: int, revision: int) -> str:
    """Return the name of a committed folder."""
    return f"step-{step:012d}" + (f".{revision}" if revision else "")


def with_reasons(entries: Iterable[Entry], retention: Retention) -> list[Entry]:
    """Return the entries from the oldest step to the newest, each with the rules that keep it.

    A step that was saved again counts once, by its last revision that can be read.
    """
    ordered = sorted(entries, key=lambda entry: (entry.step, entry.revision))
    usable = list({entry.step: entry for entry in ordered if entry.problem is None}.values())
    reasons: dict[str, list[str]] = {entry.where: [] for entry in ordered}
    for entry in usable[-retention.keep_last :]:
        reasons[entry.where].append(f"one of the last {retention.keep_last}")
    if retention.keep_best is not None:
        for entry in _best(usable, retention.keep_best):
            value = entry.metrics[retention.keep_best.metric]
            reasons[entry.where].append(f"best {retention.keep_best.metric} ({value:.6g})")
    if retention.keep_every_hours is not None:
        for entry in _spaced(usable, retention.keep_every_hours * 3600):
            reasons[entry.where].append(f"every {retention.keep_every_hours:g} h of training")
    for entry in ordered:
        if entry.problem is not None:
            reasons[entry.where].append("cannot be judged")
    return [replace(entry, kept_because=tuple(reasons[entry.where])) for entry in ordered]


def _best(entries: Sequence[Entry], best: Best) -> list[Entry]:
    """Return the entries with the lowest values; of equal ones the older, which stays the best."""
    measured = [entry for entry in entries if best.metric in entry.metrics]
    return sorted(measured, key=lambda entry: entry.metrics[best.metric])[: best.count]


def _spaced(entries: Sequence[Entry], seconds: float) -> list[Entry]:
    """Return each entry that is at least so many seconds of training after the one before it.

    Deleting what is not returned does not change what the next call returns.
    """
    kept: list[Entry] = []
    for entry in entries:
        if entry.training_seconds - (kept[-1].training_seconds if kept else 0.0) >= seconds:
            kept.append(entry)
    return kept


def _need(holds: bool, what: str, got: object) -> None:
    if not holds:
        raise CheckpointError(f"checkpoints: {what}. Got {got!r}. Raise it.")
