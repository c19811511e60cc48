"""Which MLflow run a name on the command line means."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rowstep.components.tracking import check_uri, redact_uri
from rowstep.components.tracking.journal import read_ack
from rowstep.configs.errors import nearest
from rowstep.pipeline.compare_read import CompareError, Wanted, asking, is_unknown, open_store
from rowstep.pipeline.runs import Run, all_runs

_MAX_SHOWN = 8


def find_runs(names: Sequence[str], home: Path, uri: str | None) -> tuple[Any, str, list[Wanted]]:
    """Find the runs that names mean, and the one MLflow store that they are in.

    A name is that of a rowstep run, an MLflow run id, or `experiment/run-name`, tried in that
    order.

    Args:
        names: as on the command line.
        home: the workspace whose rowstep runs are meant.
        uri: the MLflow store; None means that of the rowstep runs, or else the workspace's own.

    Returns:
        A client of the store, its URI, and the runs.

    Raises:
        CompareError: a name means no run, more than one, or a run in another store.
        TrackingError: the URI holds credentials.
    """
    check_uri(uri)
    ours = {run.name: run for run in all_runs(home)}
    uri = uri or _one_store([ours[name] for name in names if name in ours], home)
    client = open_store(uri)
    wanted = []
    for name in names:
        if name in ours:
            variant = ours[name].variant
            label = name if variant is None else variant.name
            wanted.append(Wanted(mlflow_run_id(ours[name]), label))
        else:
            wanted.append(Wanted(_find(client, uri, name, ours), None))
    return client, uri, wanted


def _one_store(runs: Sequence[Run], home: Path) -> str:
    stores = {run.workspace.tracking_uri: run.name for run in runs}
    if len(stores) > 1:
        where = ", ".join(f"{name} in {redact_uri(uri)}" for uri, name in stores.items())
        raise CompareError(
            f"compare: all runs must be in one MLflow store. Got {where}. Compare those of one "
            "store, or name one that has them all with --uri."
        )
    return next(iter(stores), f"sqlite:///{home / 'mlflow.db'}")


def mlflow_run_id(run: Run) -> str:
    """Return the MLflow run that a rowstep run, finished or not, reports to.

    Raises:
        CompareError: it has reported nothing so far, or nothing has reached MLflow.
    """
    workspace = run.workspace
    training = run.status.get("result", {}).get("training") or run.training
    key = training.get("run_key")
    ack = read_ack(workspace.state / key / "tracking") if key else None
    if ack is not None and ack.uri == workspace.tracking_uri:
        return ack.run_id
    if training.get("mlflow_run_id"):
        return str(training["mlflow_run_id"])
    raise CompareError(
        f"compare: a run must have reported to MLflow. Got {run.name!r} ({run.status['status']}), "
        "of which nothing is there. Send what waits with 'rowstep sync', or go on with it: "
        f"rowstep resume {run.name}"
    )


def _find(client: Any, uri: str, name: str, ours: Any) -> str:
    with asking(uri):
        try:
            return str(client.get_run(name).info.run_id)
        except Exception as error:
            if not is_unknown(error):
                raise
        if "/" in name:
            return _find_by_name(client, uri, name)
    raise CompareError(
        "compare: a run must be named by its name in 'rowstep runs', its MLflow run id, or as "
        f"experiment/run-name. Got {name!r}, which is none of them in {redact_uri(uri)}. "
        + (nearest(name, ours) or "List runs with: rowstep runs")
    )


def _find_by_name(client: Any, uri: str, name: str) -> str:
    places = [at for at, character in enumerate(name) if character == "/"]
    for at in reversed(places):
        experiment = client.get_experiment_by_name(name[:at])
        if experiment is not None:
            return _in_experiment(client, experiment, name[at + 1 :])
    known = [one.name for one in client.search_experiments(max_results=100)]
    advice = nearest(name.rpartition("/")[0], known) or f"Known: {', '.join(sorted(known))}."
    raise CompareError(
        f"compare: the experiment must be in {redact_uri(uri)}. Got {name!r}. {advice}"
    )


def _in_experiment(client: Any, experiment: Any, name: str) -> str:
    mark = '"' if "'" in name else "'"
    place = [experiment.experiment_id]
    found = client.search_runs(place, f"attributes.run_name = {mark}{name}{mark}")
    if len(found) == 1:
        return str(found[0].info.run_id)
    if found:
        shown = ", ".join(_when(run) for run in found[:_MAX_SHOWN])
        raise CompareError(
            f"compare: a name must mean one run. Got {name!r}, which {len(found)} runs of "
            f"{experiment.name!r} have: {shown}. Name the run by its id."
        )
    known = {run.info.run_name for run in client.search_runs(place, max_results=1000)}
    advice = nearest(name, known)
    if not advice:
        shown = ", ".join(sorted(known)[:_MAX_SHOWN]) or "none"
        advice = f"Known: {shown}. A deleted run is not found by its name."
    raise CompareError(
        f"compare: the run must be in the experiment {experiment.name!r}. Got {name!r}. {advice}"
    )


def _when(run: Any) -> str:
    started = datetime.fromtimestamp(run.info.start_time / 1000, timezone.utc)
    return f"{run.info.run_id} ({run.info.status}, {started:%Y-%m-%d %H:%M} UTC)"
