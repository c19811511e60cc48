"""Run the variants of a comparison one after the other, then compare them.

What is done is read from the run records alone, so the same command goes on after a kill, and does
not train a finished variant again unless the data or the code have changed since.
"""

from __future__ import annotations

from collections.abc import Mapping

import click

from rowstep import RowstepError
from rowstep.configs import ConfigError, RunConfig
from rowstep.configs.errors import Problem, one_problem
from rowstep.configs.schema import CsvSpans
from rowstep.pipeline.compare import PICTURE, show_runs
from rowstep.pipeline.compare_find import mlflow_run_id
from rowstep.pipeline.compare_read import CompareError, Wanted, open_store, read_runs
from rowstep.pipeline.launch import EXIT_INTERRUPTED, Stops, launch
from rowstep.pipeline.runs import Run, Variant, twin
from rowstep.pipeline.workspace import Workspace

EXIT_FAILED = 1
_TERMS = {
    "seed": "begin with other weights and see the examples in another order",
    "epochs": "see the data more or less often",
    "batch_size": "take more or fewer steps",
}


def run_comparison(
    variants: Mapping[str, RunConfig],
    command: str,
    stops: Stops,
    *,
    span: str | None,
    newest: bool,
) -> int:
    """Train every variant that is not finished, and show how all of them compare.

    A variant that fails, by diverging, say, does not keep the others from running. Variants start
    from scratch, push no model and are not judged by one another; what serves in the workspace
    stays.

    Args:
        variants: the validated configs by name.
        command: the command without `--span` and `--newest`, for what is printed.
        stops: the signals that have come; after one no further variant begins.
        span: of partitioned data, the newest span of the window; None for the newest there is.
        newest: choose the newest one.

    Returns:
        0, or 1 when a variant failed or nothing can be compared, or the exit code of a variant that
        was stopped or killed.

    Raises:
        ConfigError: nothing is tracked, or a variant asks for a column that the data lacks.
        DataError: the data cannot be read; nothing was recorded.
    """
    fixed = _on_one_window(variants, span, newest)
    first = next(iter(fixed.values()))
    if not first.tracking.enabled:
        text = "must be true to compare what is tracked. Got false. Change it."
        raise one_problem("compare", "tracking.enabled", text)
    Workspace.of(first).refuse_if_busy()
    digest = _prepare(fixed)
    for text in unequal_terms(fixed):
        click.echo(f"note   {text}")
    runs: dict[str, Run] = {}
    worst = 0
    for name, config in fixed.items():
        variant = Variant(name, digest)
        run = twin(config, variant)
        if run is not None and run.status["status"] == "finished":
            runs[name] = run
            click.echo(f"{name}: finished already, as {run.name}")
            continue
        if stops.received is not None:
            return EXIT_INTERRUPTED
        click.echo(f"\n{name}: variant {len(runs) + 1} of {len(fixed)}")
        runs[name] = run or Run.create(config, variant)
        code = launch(runs[name], command, stops, resumed=run is not None)
        if runs[name].status["status"] not in ("finished", "failed"):
            click.echo(f"go on with the whole comparison: {command}", err=True)
            return code
        worst = max(worst, code)  # 1 also where a finished variant has seen its own test
    return max(worst, _conclude(runs, Workspace.of(first)))


def unequal_terms(variants: Mapping[str, RunConfig]) -> list[str]:
    """Say where variants differ in what a comparison of anything else should keep equal."""
    found = []
    for key, meaning in _TERMS.items():
        values = {name: getattr(config.train, key) for name, config in variants.items()}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{name} {value}" for name, value in values.items())
            found.append(f"train.{key} differs, so variants {meaning}: {shown}")
    return found


def _on_one_window(
    variants: Mapping[str, RunConfig], span: str | None, newest: bool
) -> dict[str, RunConfig]:
    """Let all variants train on the same spans, whatever comes while they run."""
    from rowstep.components.partitions import at_span
    from rowstep.pipeline.catch_up import chosen_span

    first = next(iter(variants.values()))
    if not isinstance(first.data, CsvSpans) and span is None and not newest:
        return dict(variants)
    chosen = chosen_span(first, span=span, newest=newest)
    return {name: at_span(config, chosen) for name, config in variants.items()}


def _prepare(variants: Mapping[str, RunConfig]) -> str:
    """Make the data ready and return a digest of what all variants share, apart from the config."""
    from rowstep.components.fingerprint import code_fingerprint
    from rowstep.components.identity import digest_of
    from rowstep.components.sources import materialise
    from rowstep.pipeline.worker import check_columns

    first = next(iter(variants.values()))
    source = materialise(first.data, Workspace.of(first).data)
    problems: list[Problem] = []
    for name, config in variants.items():
        try:
            check_columns(config, source)
        except ConfigError as error:
            problems += [p._replace(path=f"compare.{name}.{p.path}") for p in error.problems]
    if problems:
        raise ConfigError(problems)
    return digest_of({"data": source.fingerprint, "code": code_fingerprint()})[:16]


def _conclude(runs: Mapping[str, Run], workspace: Workspace) -> int:
    failed = [name for name, run in runs.items() if run.status["status"] != "finished"]
    if failed:
        click.echo(f"\nfailed: {', '.join(failed)}. The others are compared.", err=True)
    wanted = []
    for name, run in runs.items():
        try:
            wanted.append(Wanted(mlflow_run_id(run), name))
        except CompareError as error:
            click.echo(str(error), err=True)
    if not wanted:
        return EXIT_FAILED
    try:
        client = open_store(workspace.tracking_uri)
        found = read_runs(client, workspace.tracking_uri, wanted)
    except RowstepError as error:  # the trainings are done; what they sent can be read later
        click.echo(f"{error}\nCompare later with: {_later(runs)}", err=True)
        return EXIT_FAILED
    click.echo()
    show_runs(found, workspace.tracking_uri, workspace.folder / PICTURE)
    return EXIT_FAILED if failed or len(wanted) < len(runs) else 0


def _later(runs: Mapping[str, Run]) -> str:
    return " ".join(["rowstep compare", *(run.name for run in runs.values())])
