"""The record of a run: what was asked for, what happened, and whether it can go on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rowstep import RowstepError
from rowstep.components.partitions import span_text
from rowstep.configs import ConfigError, RunConfig, canonical_json, config_from_json
from rowstep.configs.schema import CsvSpans
from rowstep.pipeline.workspace import Workspace

Status = Literal["running", "finished", "failed", "interrupted", "killed"]


class UnknownRunError(RowstepError, ValueError):
    """Say that no run has the given name."""


@dataclass(frozen=True)
class Variant:
    """Say which variant of which comparison a run is."""

    name: str
    comparison: str
    """Digest of what all variants of the comparison share."""


@dataclass(frozen=True)
class Run:
    """One run folder: `config.json`, `status.json`, `events.jsonl`, `log.txt`.

    The run of a variant has a `variant.json` too.
    """

    folder: Path
    config: RunConfig
    variant: Variant | None = None

    @property
    def name(self) -> str:
        """Return the name that `rowstep resume` takes."""
        return self.folder.name

    @property
    def title(self) -> str:
        """Return the name, and for a window of partitions its newest span."""
        data = self.config.data
        if not isinstance(data, CsvSpans) or data.span is None:
            return self.name
        return f"{self.name}  span {span_text(data.path, data.span)}"

    @property
    def workspace(self) -> Workspace:
        """Return the workspace that this run is in."""
        # The folder decides, so that a resume works where $ROWSTEP_HOME has changed since.
        home = self.folder.parent.parent.parent
        return Workspace(home, self.config.name, self.config.tracking.uri)

    @property
    def events(self) -> Path:
        """Return the file of events, appended to by every attempt."""
        return self.folder / "events.jsonl"

    @property
    def log(self) -> Path:
        """Return the file that TFX's and TensorFlow's own messages go to."""
        return self.folder / "log.txt"

    @property
    def status(self) -> dict[str, Any]:
        """Return the last status with its time."""
        return json.loads((self.folder / "status.json").read_text())

    @property
    def training(self) -> dict[str, Any]:
        """Return what the newest training that this run has begun said of itself.

        That is its `run_key`, and its `mlflow_run_id` (None where there is none) once it has ended;
        nothing where no training has begun.
        """
        if not self.events.exists():
            return {}
        said = [event for event in _events(self.events) if event.get("kind") == "training"]
        return said[-1] if said else {}

    def set_status(self, status: Status, **details: Any) -> None:
        """Replace the status at once, never half of it."""
        temporary = self.folder / ".status.json"
        temporary.write_text(json.dumps({"status": status, "time": time.time(), **details}))
        os.replace(temporary, self.folder / "status.json")

    @classmethod
    def create(cls, config: RunConfig, variant: Variant | None = None) -> Run:
        """Make the folder of a new run, named after the pipeline, the variant and the time."""
        runs = Workspace.of(config).runs
        name = config.name if variant is None else f"{config.name}-{variant.name}"
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for number in range(100):
            folder = runs / f"{name}-{stamp}{f'-{number}' if number else ''}"
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:
                continue
        (folder / "config.json").write_text(canonical_json(config))
        if variant is not None:
            (folder / "variant.json").write_text(json.dumps(asdict(variant)))
        run = cls(folder, config, variant)
        run.set_status("running")
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Read the record of a run from its folder."""
        variant = folder / "variant.json"
        return cls(
            folder,
            config_from_json((folder / "config.json").read_text()),
            Variant(**json.loads(variant.read_text())) if variant.exists() else None,
        )


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue  # half a line of a machine that went down


def all_runs(home: Path) -> list[Run]:
    """List the runs of every pipeline in a home, oldest first."""
    return _in_order(home.glob("*/runs/*/config.json"))


def runs_of(workspace: Workspace) -> list[Run]:
    """List the runs of one pipeline, oldest first."""
    return _in_order(workspace.runs.glob("*/config.json"))


def _in_order(configs: Iterable[Path]) -> list[Run]:
    return sorted(_readable(configs), key=lambda run: run.folder.stat().st_ctime_ns)


def _readable(configs: Iterable[Path]) -> Iterator[Run]:
    for config in configs:
        if not (config.parent / "status.json").exists():
            continue
        try:
            yield Run.open(config.parent)
        except ConfigError:  # written by a version with other config fields; not ours to resume
            continue


def find_run(home: Path, name: str | None) -> Run:
    """Find a run by its name, or the newest one that did not finish.

    Raises:
        UnknownRunError: "resume: must name a run of <home>. Got '<name>'. ..."
    """
    runs = all_runs(home)
    if name is None:
        runs = [run for run in runs if run.status["status"] != "finished"]
        if runs:
            return runs[-1]
        raise UnknownRunError(
            f"resume: there must be a run in {home} that did not finish. Got none. "
            "Start one with: rowstep run FILE"
        )
    for run in runs:
        if run.name == name:
            return run
    known = ", ".join(run.name for run in runs[-5:]) or "none"
    raise UnknownRunError(
        f"resume: must name a run of {home}. Got {name!r}. Known: {known}. "
        "List all with: rowstep runs"
    )


def twin(config: RunConfig, variant: Variant | None = None) -> Run | None:
    """Find the newest run of the same config, and of the same variant if it is one."""
    text = canonical_json(config)
    for run in reversed(all_runs(Workspace.of(config).home)):
        same = run.variant == variant and canonical_json(run.config) == text
        if same and run.workspace == Workspace.of(config):
            return run
    return None


def unfinished_twin(config: RunConfig) -> Run | None:
    """Find the newest run of the same config, if it did not finish."""
    run = twin(config)
    return run if run is not None and run.status["status"] != "finished" else None
