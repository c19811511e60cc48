"""Runs side by side as one picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rowstep.pipeline.compare_read import (
    EVALUATIONS,
    LOSS,
    MOMENTUM,
    UPDATES,
    VELOCITY,
    Curve,
    TrackedRun,
)
from rowstep.pipeline.compare_settings import CONFIG
from rowstep.pipeline.compare_target import writing

# Okabe and Ito's colours, in the order that keeps the first ones furthest apart for people who
# lack the cones for red or for green; their yellow is too pale for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#56B4E9", "#E69F00", "#CC79A7")
_DASHES = ("-", "--", ":", "-.")
_MARKERS = "osD^vPX"
_LOG_RANGE = 20.0
_MANY_POINTS = 25
_SETTINGS = {"font.size": 10, "axes.titlesize": 11, "agg.path.chunksize": 10_000}
_MOST_COLUMNS = 5  # of the legend
_LABEL_CHARACTERS = 100
_NOTE_CHARACTERS = 16  # for each sixth of the width
_TITLE_CHARACTERS = 17  # the same, in larger letters
_MOST_ABSENT = 4
_COLUMNS = 6  # two panels of three above, three of two below


class Panel(NamedTuple):
    """One pair of axes."""

    key: str
    title: str
    unit: str
    width: int
    is_log: bool = False
    """Whether the scale is logarithmic where the values allow it; else only for a wide range."""


def panels(runs: Sequence[TrackedRun], more: Sequence[str]) -> list[Panel]:
    """Return what is drawn: losses and evaluations above, slots below, then further metrics."""
    return [
        Panel(LOSS, "Training loss, mean since the last report", _unit_of_loss(runs), 3),
        _evaluation(runs),
        Panel(MOMENTUM, "First moment, RMS of all entries", "RMS [loss / weight]", 2, True),
        Panel(VELOCITY, "Second moment, RMS of all entries", "RMS [(loss / weight)²]", 2, True),
        Panel(UPDATES, "Update of the rows of a batch", "‖update‖ / ‖weights‖ [1]", 2, True),
        *(Panel(key, key, "value", 2) for key in more),
    ]


def _unit_of_loss(runs: Sequence[TrackedRun]) -> str:
    """Name the unit where all losses are rowstep's own, the mean squared error of the label."""
    with_loss = [run for run in runs if LOSS in run.curves]
    is_ours = bool(with_loss) and all("label" in run.files.get(CONFIG, {}) for run in with_loss)
    return "loss [label²]" if is_ours else "loss"


def _evaluation(runs: Sequence[TrackedRun]) -> Panel:
    keys = {key for run in runs for key in run.curves if key.startswith(EVALUATIONS)}
    known = {
        f"{EVALUATIONS}val_rmse": ("Evaluation after each epoch", "RMSE [label]"),
        f"{EVALUATIONS}val_mae": ("Evaluation after each epoch", "mean absolute error [label]"),
    }
    for key, (title, unit) in known.items():
        if key in keys:
            return Panel(key, title, unit, 3)
    others = sorted(keys, key=lambda key: ("/val_" not in key, key))
    key = others[0] if others else f"{EVALUATIONS}val_rmse"
    return Panel(key, "Evaluation after each epoch", key.removeprefix(EVALUATIONS), 3)


def draw(runs: Sequence[TrackedRun], path: Path, more: Sequence[str] = ()) -> None:
    """Write the picture of the runs; a file that is there is replaced in one step.

    Raises:
        CompareError: it cannot be written.
    """
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        figure = figure_of(runs, more)
        with writing(path) as fresh:
            figure.savefig(fresh)
            fresh.replace(path)


def figure_of(runs: Sequence[TrackedRun], more: Sequence[str] = ()) -> Any:
    """Return matplotlib's figure of the runs: a panel for each metric, one legend for all."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = 2 + math.ceil(len(more) / 3)
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(11, 3.4 * num_rows + 0.5), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(num_rows, _COLUMNS)
        row = column = 0
        first = None
        for panel in panels(runs, more):
            if column + panel.width > _COLUMNS:
                row, column = row + 1, 0
            place = grid[row, column : column + panel.width]
            axes = figure.add_subplot(place, sharex=first)  # a step is at the same place in all
            _draw_panel(axes, panel, runs)
            first = first or axes
            column += panel.width
        if first is not None:
            first.set_xlim(left=0)
        _add_legend(figure, [_line(number, run.label) for number, run in enumerate(runs)])
    return figure


def _add_legend(figure: Any, handles: Sequence[Any]) -> None:
    """Put a legend above all panels, in as many columns as its labels leave room for."""
    width = figure.canvas.get_width_height()[0]
    for columns in range(min(len(handles), _MOST_COLUMNS), 0, -1):
        legend = figure.legend(
            handles=handles, loc="outside upper center", ncols=columns, frameon=False
        )
        if columns == 1 or legend.get_window_extent().width <= width:
            break
        legend.remove()
    # The panels keep their height.
    figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / figure.dpi)


def _wrapped(text: str, characters: int) -> str:
    """Break a text into lines, at spaces where there are some."""
    return textwrap.fill(text, characters, break_on_hyphens=False)


def _style(number: int) -> dict[str, Any]:
    """Return colour and dashes; more runs than colours differ by dashes."""
    dashes = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": dashes, "linewidth": 1.5}


def _line(number: int, label: str) -> Any:
    from matplotlib.lines import Line2D

    marker = _MARKERS[number % len(_MARKERS)]
    # "$" would begin a formula.
    text = _wrapped(label, _LABEL_CHARACTERS).replace("$", r"\$")
    return Line2D([], [], label=text, marker=marker, **_style(number))


def _draw_panel(axes: Any, panel: Panel, runs: Sequence[TrackedRun]) -> None:
    curves = [run.curves.get(panel.key) for run in runs]
    values = [value for curve in curves if curve for value in curve.finite]
    is_log = _is_log(panel, values)
    for number, curve in enumerate(curves):
        if curve is not None:
            heights = [_height(value, is_log) for value in curve.values]
            axes.plot(curve.steps, heights, **_style(number), **_marks(number, curve))
    title = _wrapped(panel.title, _TITLE_CHARACTERS * panel.width)
    axes.set_title(title.replace("$", r"\$"), loc="left")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(f"{panel.unit}{', log scale' if is_log else ''}")
    if is_log:
        _scale_by_decades(axes)
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.locator_params(axis="x", nbins=6 if panel.width == 3 else 4, integer=True)
    absent = [
        run.label for run, curve in zip(runs, curves, strict=True) if not (curve and curve.finite)
    ]
    if absent:
        _say_absent(axes, panel, absent, is_empty=not values)


def _scale_by_decades(axes: Any) -> None:
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if math.log10(high / low) < 2:  # else there would be one labelled tick, or none
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(9, 9)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _is_log(panel: Panel, values: Sequence[float]) -> bool:
    positive = [value for value in values if value > 0]
    if not positive or min(values) < 0:
        return False
    return panel.is_log or max(positive) / min(positive) > _LOG_RANGE


def _height(value: float, is_log: bool) -> float:
    drawable = math.isfinite(value) and (value > 0 or not is_log)
    return value if drawable else math.nan  # a gap


def _marks(number: int, curve: Curve) -> dict[str, Any]:
    """Mark the points of a short curve; one point alone would have no line."""
    if len(curve.steps) > _MANY_POINTS:
        return {}
    return {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 4}


def _say_absent(axes: Any, panel: Panel, absent: Sequence[str], *, is_empty: bool) -> None:
    more = len(absent) - _MOST_ABSENT
    if is_empty:
        lines = ["no run has reported", panel.key]
        place = {"x": 0.5, "y": 0.5, "ha": "center", "va": "center"}
        axes.set_yticks([])
    else:
        shown = [*absent[:_MOST_ABSENT], *([f"and {more} more"] if more > 0 else [])]
        lines = [f"not reported: {', '.join(shown)}"]
        place = {"x": 0.98, "y": 0.97, "ha": "right", "va": "top"}
    text = "\n".join(_wrapped(line, _NOTE_CHARACTERS * panel.width) for line in lines)
    text = text.replace("$", r"\$")
    axes.text(s=text, **place, color="0.4", fontsize=9, transform=axes.transAxes)
