"""Runs side by side as tables: how they were configured, and what came out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rowstep.pipeline.compare_read import (
    EVALUATIONS,
    LOSS,
    MOMENTUM,
    SPEEDS,
    STEPS,
    UPDATES,
    VELOCITY,
    TrackedRun,
)
from rowstep.pipeline.compare_settings import BLANK, Row

_BEST = " *"
_LOWER = ("rmse", "mse", "mae", "loss", "error", "entropy", "divergence")
_HIGHER = ("auc", "accuracy", "precision", "recall", "ndcg", "hit", "r2")
_MIN_RUN_WIDTH = 12


def is_error(key: str) -> bool | None:
    """Tell whether less of a metric is better; None when its name does not say."""
    name = key.rpartition("/")[2].lower()
    if any(word in name for word in _LOWER):
        return True
    return False if any(word in name for word in _HIGHER) else None


def outcome_rows(runs: Sequence[TrackedRun], more: Sequence[str] = ()) -> list[Row]:
    """Return the rows of the second table; the best of each evaluation has an asterisk."""
    rows = [
        ("status", [run.status.lower() for run in runs]),
        ("steps", [_steps(run) for run in runs]),
        ("time", [_time(run) for run in runs]),
    ]
    rows += _evaluations(runs)
    rows += [
        (f"{LOSS}, last", _last(runs, LOSS)),
        *_speeds(runs),
        *((f"{key}, last", _last(runs, key)) for key in (MOMENTUM, VELOCITY)),
        (f"{UPDATES}, rows of the batch, last", _last(runs, UPDATES)),
        *((f"{key}, last", _last(runs, key)) for key in more),
    ]
    bad = sorted({key for run in runs for key in run.last if key.startswith("nonfinite/")})
    rows += [(f"{key}, count", _last(runs, key)) for key in bad]
    return rows


def _evaluations(runs: Sequence[TrackedRun]) -> Iterator[Row]:
    keys = {key for run in runs for key in run.curves if key.startswith(EVALUATIONS)}
    for key in sorted(keys, key=lambda key: ("/val_" not in key, key)):
        less = is_error(key)
        if less is not None:
            values = [_extreme(run, key, less) for run in runs]
            yield f"{key}, best", _with_best_marked(values, less)
        yield f"{key}, last", _last(runs, key)


def _extreme(run: TrackedRun, key: str, less: bool) -> float | None:
    values = run.curves[key].finite if key in run.curves else []
    return (min if less else max)(values) if values else None


def _with_best_marked(values: Sequence[float | None], less: bool) -> list[str]:
    cells = [_number(value) for value in values]
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return cells
    best = _number((min if less else max)(known))
    return cells if cells.count(best) == len(known) else [c + _BEST * (c == best) for c in cells]


def _last(runs: Sequence[TrackedRun], key: str) -> list[str]:
    return [_number(run.last.get(key)) for run in runs]


def _number(value: float | None) -> str:
    if value is None:
        return BLANK
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _steps(run: TrackedRun) -> str:
    known = [run.last[STEPS]] if math.isfinite(run.last.get(STEPS, math.nan)) else []
    steps = [*known, *(curve.steps[-1] for curve in run.curves.values() if curve.steps)]
    return f"{max(steps):,.0f}" if steps else BLANK


def _speeds(runs: Sequence[TrackedRun]) -> Iterator[Row]:
    """Return rows of those speeds that are known: a callback counts no examples."""
    known = [key for key in SPEEDS if any(key in run.curves for run in runs)]
    for key in known or SPEEDS[:1]:
        yield f"{key}, median", [_speed(run, key) for run in runs]


def _speed(run: TrackedRun, key: str) -> str:
    values = run.curves[key].finite if key in run.curves else []
    if not values:
        return BLANK
    speed = median(values)  # the first one holds the compilation
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _time(run: TrackedRun) -> str:
    if run.seconds is None:
        return BLANK
    minutes, rest = divmod(round(run.seconds), 60)
    text = f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{text}, with breaks" if run.was_resumed else text


def print_table(
    console: Console, title: str, runs: Sequence[TrackedRun], rows: Sequence[Row]
) -> None:
    """Print a table with a column for each run; what is too wide becomes several tables."""
    name_width = max(len(name) for name, _ in rows) + 3
    places = max(1, (console.width - name_width) // (_MIN_RUN_WIDTH + 3))
    for first in range(0, len(runs), places):
        shown = slice(first, first + places)
        table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("", no_wrap=True)
        for run in runs[shown]:
            table.add_column(Text(run.label), justify="right", overflow="fold")
        for name, cells in rows:
            table.add_row(Text(name), *(Text(cell) for cell in cells[shown]))
        console.print(table)
