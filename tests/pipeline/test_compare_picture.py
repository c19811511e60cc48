"""The picture of a comparison can be read: units, one legend, colours that all can tell apart."""

from __future__ import annotations

import itertools
import math
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text

from rowstep.pipeline import compare_picture
from rowstep.pipeline.compare_picture import draw, figure_of
from rowstep.pipeline.compare_read import CompareError, Curve, TrackedRun
from rowstep.pipeline.compare_target import SUFFIXES

STEPS = tuple(range(10, 1010, 10))
SHOWN = ("batch/loss", "epoch/val_rmse", "opt/slot_m/rms", "opt/slot_v/rms")
SHOWN += ("opt/global/update_ratio",)


def run(label: str, scale: float = 1.0, **curves: Curve | None) -> TrackedRun:
    given = {key: Curve(STEPS, tuple(scale / step for step in STEPS)) for key in SHOWN}
    given |= {key.replace("__", "/"): curve for key, curve in curves.items()}  # type: ignore[misc]
    kept = {key: curve for key, curve in given.items() if curve is not None}
    return TrackedRun(label, label * 8, "1", "ratings", "FINISHED", 1.0, {}, {}, kept)


def lines(axes: Any) -> list[Any]:
    return [line for line in axes.get_lines() if len(line.get_xdata())]


def test_every_panel_has_units_and_steps_and_there_is_one_legend() -> None:
    figure = figure_of([run("one"), run("two", 2)])
    assert [axes.get_xlabel() for axes in figure.axes] == ["optimizer steps"] * 5
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "loss, log scale",
        "RMSE [label], log scale",
        "RMS [loss / weight], log scale",
        "RMS [(loss / weight)²], log scale",
        "‖update‖ / ‖weights‖ [1], log scale",
    ]
    assert [axes.get_legend() for axes in figure.axes] == [None] * 5
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]


def test_a_run_has_the_same_colour_in_every_panel_and_no_other_has_it() -> None:
    figure = figure_of([run(f"run {n}", n + 1) for n in range(7)])
    styles = [[line.get_color() for line in lines(axes)] for axes in figure.axes]
    legend = [handle.get_color() for handle in figure.legends[0].legend_handles]
    assert styles == [legend] * 5
    assert len(set(legend)) == 7


def test_more_runs_than_colours_differ_by_their_dashes() -> None:
    figure = figure_of([run(f"run {n}") for n in range(20)])
    handles = figure.legends[0].legend_handles
    assert len({(handle.get_color(), handle.get_linestyle()) for handle in handles}) == 20


# Viénot, Brettel and Mollon 1999: linear RGB as seen without long, or without medium, cones.
PROTAN = [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]]
DEUTAN = [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]


def seen_with(colour: str, vision: np.ndarray) -> np.ndarray:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = vision @ np.array([red, green, blue]) ** 2.2
    return np.clip(linear, 0, 1) ** (1 / 2.2)


@pytest.mark.parametrize("vision", [np.eye(3), np.array(PROTAN), np.array(DEUTAN)])
def test_colours_are_told_apart_with_any_vision(vision: np.ndarray) -> None:
    seen = [seen_with(colour, vision) for colour in compare_picture._COLOURS]
    for one, other in itertools.combinations(seen[:4], 2):
        assert np.linalg.norm(one - other) > 0.2
    white = seen_with("#FFFFFF", vision)
    assert all(np.linalg.norm(white - one) > 0.35 for one in seen)


def test_a_value_that_is_no_number_leaves_a_gap() -> None:
    curve = Curve((1, 2, 3, 4), (1.0, math.nan, math.inf, 0.5))
    axes = figure_of([run("one", batch__loss=curve), run("two")]).axes[0]
    drawn = lines(axes)[0].get_ydata()
    assert drawn[0] == 1.0 and drawn[3] == 0.5
    assert math.isnan(drawn[1]) and math.isnan(drawn[2])


def test_scales_are_logarithmic_only_where_that_says_more() -> None:
    narrow = Curve(STEPS, tuple(1 + 0.1 * math.sin(step) for step in STEPS))
    signed = Curve(STEPS, tuple(math.sin(step) for step in STEPS))
    axes = figure_of([run("one", batch__loss=narrow, opt__slot_m__rms=signed)]).axes
    assert [one.get_yscale() for one in axes] == ["linear", "log", "linear", "log", "log"]
    assert axes[0].get_ylabel() == "loss"


def test_zeros_on_a_logarithmic_scale_are_left_out() -> None:
    curve = Curve((1, 2, 3), (0.0, 0.1, 10.0))
    axes = figure_of([run("one", opt__slot_v__rms=curve)]).axes[3]
    assert axes.get_yscale() == "log"
    assert math.isnan(lines(axes)[0].get_ydata()[0])


def test_a_panel_says_who_has_reported_nothing() -> None:
    figure = figure_of([run("one", opt__slot_m__rms=None, opt__slot_v__rms=None), run("two")])
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts == [[], [], ["not reported: one"], ["not reported: one"], []]
    alone = figure_of([run("one", opt__slot_m__rms=None)])
    assert [text.get_text() for text in alone.axes[2].texts] == [
        "no run has reported\nopt/slot_m/rms"
    ]


def test_one_point_alone_can_be_seen() -> None:
    axes = figure_of([run("one", epoch__val_rmse=Curve((100,), (0.9,)))]).axes[1]
    assert lines(axes)[0].get_marker() not in ("", "None", None)


def test_further_metrics_get_panels_of_their_own() -> None:
    more = ["batch/loss", "opt/slot_v/rms", "epoch/val_rmse", "opt/slot_m/rms"]
    titles = [axes.get_title(loc="left") for axes in figure_of([run("one")], more).axes]
    assert titles[5:] == more


def test_only_the_loss_of_a_run_with_our_config_has_a_unit() -> None:
    ours = [replace(run(name), files={"config.json": {"label": "rating"}}) for name in ("a", "b")]
    foreign = replace(run("c"), files={"optimizer_config.json": {"opt.class": "Adam"}})
    units = [
        figure_of(runs).axes[0].get_ylabel().split(",")[0]
        for runs in (ours, [*ours, foreign], [*ours, run("d", batch__loss=None)])
    ]
    assert units == ["loss [label²]", "loss", "loss [label²]"]


def test_the_panel_of_updates_says_whose_they_are() -> None:
    assert figure_of([run("one")]).axes[4].get_title(loc="left") == "Update of the rows of a batch"


def box_of(drawn: Any) -> Any:
    return drawn.get_window_extent()


REAL = "quickstart-20261121-06023", "movielens_100k-20261121-06023"


@pytest.mark.parametrize(
    "labels",
    [
        *([f"{name}{n}" for n in range(count)] for name in REAL for count in (2, 3, 4, 5, 14)),
        ["W" * 63, "a name of several words " * 12, "$x_1$"],
    ],
)
def test_legend_and_notes_stay_inside_whatever_runs_are_called(labels: list[str]) -> None:
    some = {"opt__slot_m__rms": None, "epoch__val_rmse": None}
    runs = [run(labels[0]), *(run(label, **some) for label in labels[1:])]
    more = ["opt/a/metric_of_one_variable/with.quite.a.long.path.and.some.more"]
    figure = figure_of(runs, more)
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    legend = box_of(figure.legends[0])
    assert legend.x0 >= 0 and legend.x1 <= width and legend.y1 <= height
    assert all(not legend.overlaps(axes.get_tightbbox()) for axes in figure.axes)
    for axes in figure.axes:
        words = axes.get_title(loc="left")
        [title] = [text for text in axes.findobj(Text) if text.get_text() == words]
        assert box_of(title).x1 <= axes.bbox.x1 + 10, words  # a panel is 10 times further away
    notes = [(axes, text) for axes in figure.axes for text in axes.texts]
    assert len(notes) == 3
    for axes, text in notes:
        box = box_of(text)
        assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1


def test_a_long_list_of_absent_runs_is_counted() -> None:
    runs = [run("there"), *(run(f"r{n}", batch__loss=None) for n in range(9))]
    [note] = figure_of(runs).axes[0].texts
    assert note.get_text().split() == [
        "not",
        "reported:",
        "r0,",
        "r1,",
        "r2,",
        "r3,",
        "and",
        "5",
        "more",
    ]


def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CompareError, match="--output must be a file that can be written"):
            draw([run("one"), run("two")], path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_no_text_of_the_picture_overlaps_another_panel() -> None:
    labels = ["a run with quite a long name", "another one", "three", "four"]
    figure = figure_of([run(label, n + 1) for n, label in enumerate(labels)])
    figure.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    for axes in figure.axes:  # a label longer than its axis would reach into the next row
        assert axes.yaxis.label.get_window_extent().height <= axes.bbox.height
    boxes.append(figure.legends[0].get_window_extent())
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    width, height = figure.canvas.get_width_height()
    assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= width and b.y1 <= height for b in boxes)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_picture_is_written_in_one_step(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    path.write_text("old")
    draw([run("$one_^"), run("_two")], path)
    assert path.stat().st_size > 5000
    assert list(tmp_path.iterdir()) == [path]
