"""Compare runs: two tables, one picture and a link to MLflow's own page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from rowstep.components.tracking import redact_uri
from rowstep.pipeline.compare_find import find_runs
from rowstep.pipeline.compare_picture import draw
from rowstep.pipeline.compare_read import CompareError, TrackedRun, page_of, read_runs
from rowstep.pipeline.compare_settings import nothing_differs, setting_rows
from rowstep.pipeline.compare_table import outcome_rows, print_table
from rowstep.pipeline.compare_target import check_target

PICTURE = "comparison.png"

_WIDTH_OF_A_FILE = 160
_LOCAL_UI = "http://127.0.0.1:5000"


def compare_runs(
    names: Sequence[str],
    home: Path,
    *,
    uri: str | None,
    picture: Path,
    metrics: Sequence[str] = (),
    everything: bool = False,
) -> None:
    """Print how runs differ and what came out of them, and draw their curves.

    Args:
        names: at least two; see `find_runs`.
        home: the workspace whose rowstep runs are meant.
        uri: the MLflow store; None means that of the runs.
        picture: the file to write.
        metrics: further metrics to show and to draw.
        everything: whether equal settings are shown too.

    Raises:
        CompareError: fewer than two runs, a run or a metric that is not there, a store that does
            not answer, or a place where no picture can be written.
    """
    if len(names) < 2:
        raise CompareError(
            f"compare: at least two runs must be named. Got {len(names)}. Name another; "
            "list them with: rowstep runs"
        )
    check_target(picture)
    client, uri, wanted = find_runs(names, home, uri)
    extra = list(dict.fromkeys(metrics))
    runs = read_runs(client, uri, wanted, extra)
    show_runs(runs, uri, picture, extra, everything=everything)


def show_runs(
    runs: Sequence[TrackedRun],
    uri: str,
    picture: Path,
    metrics: Sequence[str] = (),
    *,
    everything: bool = False,
) -> None:
    """Print the tables of runs that were read, draw them, and say where MLflow shows them."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    for problem in dict.fromkeys(run.problem for run in runs if run.problem):
        labels = ", ".join(run.label for run in runs if run.problem == problem)
        click.echo(f"note   config files cannot be read of {labels}: {problem}", err=True)
    if rows := setting_rows(runs, everything=everything):
        print_table(console, "settings" if everything else "settings that differ", runs, rows)
    else:
        click.echo(nothing_differs(runs))
    print_table(console, "outcomes (* best)", runs, outcome_rows(runs, metrics))
    for run in runs:
        click.echo(f"  {run.label}: MLflow run {run.run_id}, experiment {run.experiment!r}")
    draw(runs, picture, metrics)
    click.echo(f"\npicture  {picture}")
    click.echo("\n".join(link_lines(runs, uri)))


def link_lines(runs: Sequence[TrackedRun], uri: str) -> list[str]:
    """Say where a browser shows the runs side by side; a store in a file needs a server first."""
    shown = redact_uri(uri)
    if shown.startswith(("http://", "https://")):
        return [f"mlflow   {shown.rstrip('/')}{page_of(runs)}"]
    command = shlex.join(["mlflow", "ui", "--backend-store-uri", shown])
    return [f"mlflow   start its UI: {command}", f"         then open: {_LOCAL_UI}{page_of(runs)}"]
