"""Train the partitions that have come since the last finished run, one run for each, oldest first.

What is done is read from the run records before every run and kept nowhere else, so a kill at any
moment leaves nothing to repair: the same command goes on with the span that was not finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import click

from rowstep.components.partitions import (
    Partitions,
    at_span,
    choose_window,
    find_partitions,
    parse_span,
    span_text,
)
from rowstep.configs import RunConfig, canonical_json
from rowstep.configs.errors import one_problem
from rowstep.configs.schema import CsvSpans
from rowstep.pipeline.launch import EXIT_INTERRUPTED, Stops, launch_or_resume
from rowstep.pipeline.runs import runs_of
from rowstep.pipeline.workspace import Workspace


@dataclass(frozen=True)
class History:
    """What the records of a pipeline say about spans."""

    finished: frozenset[int]
    """Spans of finished runs."""
    read: frozenset[int]
    """Spans that the windows of finished runs held."""
    unfinished: int | None
    """Span of the newest run of the same config, if it did not finish."""


def history(config: RunConfig) -> History:
    """Read what the runs of a pipeline have trained; those of other data do not count.

    Nor do the variants of a comparison: they push no model.
    """
    finished: set[int] = set()
    read: set[int] = set()
    unfinished = None
    for run in runs_of(Workspace.of(config)):
        data, status = run.config.data, run.status
        if not isinstance(data, CsvSpans) or data.span is None or run.variant is not None:
            continue
        if status["status"] == "finished":
            finished.add(data.span)
            read.update((data.span, *status["result"].get("spans", ())))
        same = canonical_json(at_span(config, data.span)) == canonical_json(run.config)
        if same:
            unfinished = data.span if status["status"] != "finished" else None
    return History(frozenset(finished), frozenset(read), unfinished)


def due_spans(available: Iterable[int], known: History) -> list[int]:
    """Return the spans to train, oldest first.

    All that are newer than the newest finished one. Before any run has finished it is the newest
    alone; or, if a first run was cut off, its span and what came since.
    """
    spans = sorted(available)
    if known.finished:
        return [span for span in spans if span > max(known.finished)]
    if known.unfinished in spans:
        return spans[spans.index(known.unfinished) :]
    return spans[-1:]


def late_spans(available: Iterable[int], known: History) -> list[int]:
    """Return the spans that came after a newer one was trained, and that no run has read.

    What lies before the first window ever read is history, not late.
    """
    if not known.finished:
        return []
    first, last = min(known.read), max(known.finished)
    return [span for span in sorted(available) if first < span < last and span not in known.read]


def run_spans(
    config: RunConfig, command: str, stops: Stops, *, span: str | None, newest: bool
) -> int:
    """Run the pipeline for a chosen span, for the newest, or for all that are due.

    Args:
        config: the validated config; its `data.span` counts as chosen.
        command: the command without `--span` and `--newest`, for what is printed.
        stops: the signals that have come; after one no further run begins.
        span: the chosen span as text.
        newest: choose the newest one.

    Returns:
        The exit code of the first run that did not succeed, or 0; 75 when a signal came.

    Raises:
        ConfigError: the choice makes no sense for this config.
        DataError: there is no partition, or none of the chosen span; no record was made.
    """
    data = _partitioned(config, span, newest)
    if span is None and not newest and data.span is None:
        return _catch_up(config, data, command, stops)
    chosen = chosen_span(config, span=span, newest=newest)
    flag = ["--newest"] if newest else ["--span", span_text(data.path, chosen)]
    return launch_or_resume(at_span(config, chosen), " ".join([command, *flag]), stops)


def chosen_span(config: RunConfig, *, span: str | None, newest: bool) -> int:
    """Return the span that was asked for; the newest when none was.

    Raises:
        ConfigError: the choice makes no sense for this config.
        DataError: there is no partition, or none of the chosen span.
    """
    data = _partitioned(config, span, newest)
    chosen = None if newest else data.span
    if span is not None:
        chosen = parse_span(span)
    # Not there? then no run is recorded.
    return choose_window(data.model_copy(update={"span": chosen})).span


def _catch_up(config: RunConfig, data: CsvSpans, command: str, stops: Stops) -> int:
    found, known = _look(config, data)
    if not found.files:
        choose_window(data)  # has the words for it
    _say_what_is_not_trained(config, command, found, known)
    while due := due_spans(found.files, known):
        code = EXIT_INTERRUPTED
        if stops.received is None:
            if len(due) > 1:
                click.echo(f"{config.name}: {len(due)} spans are due: {found.show(*due)}")
            code = launch_or_resume(at_span(config, due[0]), command, stops)
        if code:
            click.echo(
                f"{config.name}: due are {found.show(*due)}. Go on with: {command}", err=True
            )
            return code
        # Not from memory: others may have come, or have been trained, in the meantime.
        found, known = _look(config, data)
    return 0


def _look(config: RunConfig, data: CsvSpans) -> tuple[Partitions, History]:
    Workspace.of(config).refuse_if_busy()  # whoever holds it may be training what would be due
    return find_partitions(data.path), history(config)


def _say_what_is_not_trained(
    config: RunConfig, command: str, found: Partitions, known: History
) -> None:
    late = late_spans(found.files, known)
    if late:
        click.echo(
            f"{config.name}: no run has read {found.show(*late)}, and newer spans are trained. "
            f"Train one with: {command} --span {found.show(late[0])}"
        )
    if known.finished and not due_spans(found.files, known):
        last = found.show(max(known.finished))
        click.echo(
            f"{config.name}: no span has come since {last}. Nothing is left to do. "
            f"Train it again with: {command} --span {last}"
        )


def _partitioned(config: RunConfig, span: str | None, newest: bool) -> CsvSpans:
    if span is not None and newest:
        raise one_problem(
            "run",
            "--newest",
            f"must stand alone. Got --span {span} as well. Leave one of them out.",
        )
    if not isinstance(config.data, CsvSpans):
        raise one_problem(
            "run",
            "--newest" if newest else "--span",
            f"must be given with partitioned data only. Got data of kind {config.data.kind!r}. "
            "Leave it out, or write 'kind: csv_spans'.",
        )
    return config.data
