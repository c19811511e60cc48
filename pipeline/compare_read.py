"""Find the runs that are to be compared, and read from MLflow what they have reported."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from rowstep import RowstepError
from rowstep.components.tracking import redact_uri
from rowstep.components.tracking.text import explain, is_sqlite
from rowstep.configs.errors import nearest
from rowstep.pipeline.compare_settings import Settings, read_files

EVALUATIONS = "epoch/"
LOSS, STEPS = "batch/loss", "opt/iterations"
SPEEDS = ("batch/examples_per_second", "batch/steps_per_second")
MOMENTUM, VELOCITY, UPDATES = "opt/slot_m/rms", "opt/slot_v/rms", "opt/global/update_ratio"
_CURVES = (LOSS, *SPEEDS, MOMENTUM, VELOCITY, UPDATES)


class CompareError(RowstepError, ValueError):
    """Say why runs cannot be compared."""


class Curve(NamedTuple):
    """One metric of one run, by step; NaN and infinities as they were reported."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def finite(self) -> list[float]:
        """Return the values that can be compared."""
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True)
class TrackedRun:
    """What MLflow knows of one run."""

    label: str
    """What it is called in tables and pictures; no two runs have the same."""
    run_id: str
    experiment_id: str
    experiment: str
    status: str
    seconds: float | None
    """From start to end, and so with what lay between its parts; None while there is no end."""
    params: Mapping[str, str]
    last: Mapping[str, float]
    """The last value of each metric."""
    curves: Mapping[str, Curve]
    """The histories of the metrics that are shown, by step."""
    tags: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Settings] = field(default_factory=dict)
    """What its config files say, by the name of the file."""
    problem: str | None = None
    """Why config files could not be read."""

    @property
    def was_resumed(self) -> bool:
        """Return whether it was stopped or killed and went on later."""
        return "resume.count" in self.tags


class Wanted(NamedTuple):
    """A run to read: its id, and what to call it (its MLflow name when None)."""

    run_id: str
    label: str | None


def open_store(uri: str) -> Any:
    """Return a client of an MLflow store that must be there already.

    Raises:
        CompareError: the store is a file, and there is none.
    """
    from rowstep.components.tracking.client import open_client

    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # for two small files
    if is_sqlite(uri):
        path = uri.partition(":///")[2].partition("?")[0]
        if not Path(path).is_file():
            raise CompareError(
                f"compare: the MLflow store must be there. Got {uri!r}, where no file is. Run "
                "something first, or name the store with --uri, or the workspace with --home."
            )
    with asking(uri):
        return open_client(uri)


def read_runs(
    client: Any, uri: str, wanted: Sequence[Wanted], more: Sequence[str] = ()
) -> list[TrackedRun]:
    """Read the runs and those of their metrics that are compared.

    Args:
        client: of the store.
        uri: of the store, for errors.
        wanted: which runs.
        more: further metrics; each must be known to one run at least.

    Returns:
        The runs in the order asked for.

    Raises:
        CompareError: a run is unknown, deleted or named twice, or a metric is unknown.

    Cost: requests for each run and each of its config files, and for each 25,000 values of a
        metric.
    """
    found = [_active_run(client, uri, one.run_id) for one in wanted]
    ids = [run.info.run_id for run in found]
    for run_id in ids:
        if ids.count(run_id) > 1:
            raise CompareError(
                f"compare: every run may be named once. Got MLflow run {run_id} twice. Remove one; "
                "a run that is repeated without a change reports to the same MLflow run."
            )
    known = {key for run in found for key in run.data.metrics}
    for key in more:
        if key not in known:
            shown = nearest(key, known) or f"Known: {', '.join(sorted(known)) or 'none'}."
            raise CompareError(
                f"compare: --metric must name a metric of the runs. Got {key!r}. {shown}"
            )
    labels = _labels(found, wanted)
    with asking(uri):
        names = {i: client.get_experiment(i).name for i in {r.info.experiment_id for r in found}}
        return [
            _read(client, run, label, names[run.info.experiment_id], (*_CURVES, *more))
            for run, label in zip(found, labels, strict=True)
        ]


def _read(client: Any, run: Any, label: str, experiment: str, drawn: Iterable[str]) -> TrackedRun:
    info = run.info
    last = {key: _as_reported(value) for key, value in run.data.metrics.items()}
    keys = [*drawn, *(key for key in sorted(last) if key.startswith(EVALUATIONS))]
    files, problem = read_files(client, info.run_id)
    ended = info.end_time if info.status not in ("RUNNING", "SCHEDULED") else None
    return TrackedRun(
        label=label,
        run_id=info.run_id,
        experiment_id=str(info.experiment_id),
        experiment=experiment,
        status=info.status,
        seconds=(ended - info.start_time) / 1000 if ended else None,
        params=dict(run.data.params),
        last=last,
        curves={
            key: _curve(client, info.run_id, key) for key in dict.fromkeys(keys) if key in last
        },
        tags=dict(run.data.tags),
        files=files,
        problem=problem,
    )


def _curve(client: Any, run_id: str, key: str) -> Curve:
    # The client asks for one page after the other until there is none left.
    rows = sorted(client.get_metric_history(run_id, key), key=lambda m: (m.step, m.timestamp))
    by_step = {row.step: _as_reported(row.value) for row in rows}
    return Curve(tuple(by_step), tuple(by_step.values()))


def _as_reported(value: float) -> float:
    """Return an infinity for the largest float, as which MLflow's databases keep it."""
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value


def _active_run(client: Any, uri: str, run_id: str) -> Any:
    with asking(uri):
        run = client.get_run(run_id)
    if run.info.lifecycle_stage != "active":
        raise CompareError(
            f"compare: a run must not be deleted. Got MLflow run {run_id}, which is. Restore it "
            f"with: mlflow runs restore --run-id {run_id}"
        )
    return run


def _labels(found: Sequence[Any], wanted: Sequence[Wanted]) -> list[str]:
    """Name runs as they were asked for, or else as in MLflow; equal names get a part of the id."""
    names = [
        one.label or run.info.run_name or run.info.run_id[:8]
        for run, one in zip(found, wanted, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} {run.info.run_id[:8]}"
        for run, name in zip(found, names, strict=True)
    ]


@contextmanager
def asking(uri: str) -> Iterator[None]:
    """Word what goes wrong between MLflow and us, without credentials.

    Raises:
        CompareError: in the place of anything that MLflow and its storage raise.
    """
    try:
        yield
    except RowstepError:
        raise
    except Exception as error:  # MLflow's, its database's and its HTTP client's, which differ
        raise CompareError(
            f"compare: the MLflow store must answer. Got {explain(error)} from {redact_uri(uri)}. "
            "Start the server, or name another store with --uri."
        ) from None


def is_unknown(error: Exception) -> bool:
    """Tell that there is no such run from a store that is out of order."""
    code = getattr(error, "error_code", None)
    return code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


def page_of(runs: Sequence[TrackedRun]) -> str:
    """Return what follows the address of MLflow's pages in a link to its page on these runs."""
    ids = json.dumps([run.run_id for run in runs])
    experiments = json.dumps(list(dict.fromkeys(run.experiment_id for run in runs)))
    return f"/#/compare-runs?runs={quote(ids)}&experiments={quote(experiments)}"
