"""The `rowstep` command. A bad config is reported before TensorFlow or TFX is imported."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

import rowstep
from rowstep import RowstepError
from rowstep.configs import RunConfig, export_schema, load_config
from rowstep.configs.schema import CsvSpans
from rowstep.configs.variants import load_variants
from rowstep.pipeline.catch_up import run_spans
from rowstep.pipeline.checkpoint_cli import checkpoint
from rowstep.pipeline.launch import Stops, launch, launch_or_resume
from rowstep.pipeline.runs import all_runs, find_run
from rowstep.pipeline.workspace import Workspace, default_home

EXIT_BAD_INPUT = 2

_overrides = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override one key of the file, such as optimizer.learning_rate=1e-4. Repeatable.",
)
_home = click.option(
    "--home",
    type=click.Path(path_type=Path),
    default=None,
    callback=lambda context, option, home: (home or default_home()).expanduser().resolve(),
    help="Workspace to look in; $ROWSTEP_HOME or ~/.rowstep when left out.",
)


def _reports_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print rowstep's own errors as they are worded, without a traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except RowstepError as error:
            click.echo(str(error), err=True)
            sys.exit(EXIT_BAD_INPUT)

    return wrapped


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rowstep.__version__, message="rowstep %(version)s")
def main() -> None:
    """Train recommender models in TFX with optimizers that touch only the rows a batch touches."""


main.add_command(checkpoint)


@main.command()
@click.argument("file")
@_overrides
@click.option(
    "--span",
    metavar="N|YYYY-MM-DD",
    help="Partitioned data: train the window that ends with this span.",
)
@click.option(
    "--newest",
    is_flag=True,
    help="Partitioned data: train the newest window, without those that came before it.",
)
@_reports_errors
def run(file: str, overrides: tuple[str, ...], span: str | None, newest: bool) -> None:
    """Run the pipeline of a config FILE: data to pushed model.

    FILE may also be the name of a shipped config, such as "quickstart". A run of the same config
    that did not finish goes on from its last checkpoint. Of partitioned data every span that has
    come since the last finished run is trained, oldest first, one run for each; the first run takes
    the newest. Of a FILE with `compare` every variant is run, and then they are compared.
    """
    config, variants = _load(file, overrides)
    command = shlex.join(["rowstep", "run", file, *(w for o in overrides for w in ("--set", o))])
    with Stops() as stops:
        if variants:
            from rowstep.pipeline.compare_run import run_comparison

            code = run_comparison(variants, command, stops, span=span, newest=newest)
            sys.exit(code)
        if span is None and not newest and not isinstance(config.data, CsvSpans):
            sys.exit(launch_or_resume(config, command, stops))
        sys.exit(run_spans(config, command, stops, span=span, newest=newest))


@main.command()
@click.argument("run", required=False)
@_home
@_reports_errors
def resume(run: str | None, home: Path) -> None:
    """Go on with RUN, or with the newest run that did not finish."""
    found = find_run(home, run)
    if found.status["status"] == "finished":
        click.echo(f"{found.name}: this run is finished. Nothing is left to do.")
        return
    found.workspace.refuse_if_busy()
    with Stops() as stops:
        sys.exit(launch(found, f"rowstep resume {found.name}", stops, resumed=True))


@main.command()
@_home
@_reports_errors
def runs(home: Path) -> None:
    """List the runs of a workspace, oldest first."""
    for found in all_runs(home):
        span = found.title.removeprefix(found.name)
        click.echo(f"{found.name}  {found.status['status']}{span}")


@main.command()
@click.argument("runs", metavar="RUN RUN ...", nargs=-1, required=True)
@_home
@click.option(
    "--uri",
    metavar="TRACKING_URI",
    help="MLflow store to look in; that of the runs, or of the workspace, when left out.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("comparison.png"),
    show_default=True,
    help="Picture to write: .png, .svg or .pdf.",
)
@click.option(
    "--metric",
    "metrics",
    metavar="KEY",
    multiple=True,
    help="A further metric to show and to draw, such as epoch/val_mae. Repeatable.",
)
@click.option("--all", "everything", is_flag=True, help="Show equal settings too.")
@_reports_errors
def compare(
    runs: tuple[str, ...],
    home: Path,
    uri: str | None,
    output: Path,
    metrics: tuple[str, ...],
    everything: bool,
) -> None:
    """Show how RUNs differ and what came out of them, as tables and as one picture.

    A RUN is a name that `rowstep runs` lists, an MLflow run id, or EXPERIMENT/RUN-NAME of MLflow.
    Unfinished runs are shown with what they have reported so far.
    """
    from rowstep.pipeline.compare import compare_runs

    compare_runs(runs, home, uri=uri, picture=output, metrics=metrics, everything=everything)


@main.command()
@_home
@_reports_errors
def sync(home: Path) -> None:
    """Send to MLflow what it did not receive while runs were going on."""
    from rowstep.components.tracking import TrackingError
    from rowstep.components.tracking import sync as send

    folders = sorted(home.glob("*/state/*/tracking"))
    unsent = refused = 0
    for folder in folders:
        try:
            report = send(folder)
        except (TrackingError, OSError) as error:
            # Still running, not ours, or not to be read: the others are sent all the same.
            click.echo(str(error), err=True)
            unsent += 1
            continue
        unsent += report.num_unsent
        refused += report.num_rejected
        if report.num_sent or report.num_unsent or report.num_rejected:
            told = report.problem or report.link
            click.echo(f"{folder.parent.name}: {report.num_sent} sent. {told}")
    looked = f"{len(folders)} trainings looked at, {unsent or 'nothing'} left to send"
    click.echo(looked + (f", {refused} refused and put aside" if refused else ""))
    sys.exit(1 if unsent or refused else 0)


@main.command()
@click.argument("file")
@_overrides
@_reports_errors
def check(file: str, overrides: tuple[str, ...]) -> None:
    """Check a config FILE and report every error at once; nothing is run."""
    config, variants = _load(file, overrides)
    click.echo(f"{file}: fits. Pipeline {config.name!r}, workspace {Workspace.of(config).folder}")
    if variants:
        click.echo(f"variants: {', '.join(variants)}")


@main.command()
@click.argument("file")
@_overrides
@_reports_errors
def doctor(file: str, overrides: tuple[str, ...]) -> None:
    """Name what would make the training of a config FILE dense or wrong, with the remedy.

    Model and optimizer are built and tried out on tables of a few rows; no data is read. The exit
    code is 1 if there are findings.
    """
    config, variants = _load(file, overrides)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what TensorFlow imports, of Python's age
        from rowstep.components.doctor import examine, report

    num_findings = 0
    for name, one in (variants or {"": config}).items():
        findings = examine(one)
        num_findings += len(findings)
        click.echo(f"{', '.join(filter(None, [file, name]))}: {report(findings)}")
    sys.exit(1 if num_findings else 0)


@main.command()
@_reports_errors
def schema() -> None:
    """Print the JSON schema of config files, for editors."""
    click.echo(export_schema(), nl=False)


def _load(file: str, overrides: tuple[str, ...]) -> tuple[RunConfig, dict[str, RunConfig]]:
    """Return the config of a file, and its variants if it is a comparison."""
    path = Path(file)
    if not path.exists() and path.suffix == "" and path.name == file:
        shipped = Path(str(files("rowstep.configs"))) / f"{file}.yaml"
        path = shipped if shipped.exists() else path
    return load_config(path, overrides), load_variants(path, overrides)
