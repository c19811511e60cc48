"""Histograms as pictures; the one module of the components that draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INCHES, _DOTS_PER_INCH = (6.4, 3.6), 100
_AXES = (0.1, 0.15, 0.87, 0.7)  # left, bottom, width, height; a layout engine draws twice


def draw_histogram(row: Mapping[str, Any]) -> Any:
    """Return the histogram of one report as an image of Pillow's.

    Magnitudes with log10 bins, shares of the non-zero finite elements; what has no place on a
    logarithmic axis, zeros and what is not finite, is counted in the title.

    Args:
        row: `key`, `step`, `edges` [n + 1], `counts` [n], `num_zero`, `num_nonfinite`, `unit`.

    Cost: the first call imports Matplotlib; each one takes a fraction of a second.
    """
    # Not pyplot: it keeps figures and a backend for the whole process, and this is no main thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator
    from PIL import Image

    edges, counts = row["edges"], row["counts"]
    num_shown = sum(counts)
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes(_AXES)
    shares = [100 * count / max(num_shown, 1) for count in counts]
    axes.stairs(shares, edges, fill=True, color="#3b6ea5")
    if edges[0] > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=9))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(_axis_name(str(row["unit"]), is_log=edges[0] > 0))
    axes.set_ylabel("share of non-zero elements (%)")
    axes.grid(axis="both", alpha=0.3)
    axes.set_title(histogram_title(row), fontsize=9)
    canvas.draw()
    return Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")


def _axis_name(unit: str, *, is_log: bool) -> str:
    return f"magnitude of an element, in {unit}" + (" (log10 bins)" if is_log else "")


def histogram_title(row: Mapping[str, Any]) -> str:
    """Return the two lines above a histogram: what it shows, and what it cannot show."""
    num_zero, num_nonfinite = row["num_zero"], row["num_nonfinite"]
    num_elements = sum(row["counts"]) + num_zero + num_nonfinite
    share = num_zero / num_elements if num_elements else 0.0
    name = str(row["key"])
    name = name if len(name) <= 70 else f"...{name[-67:]}"
    return (
        f"{name}, step {row['step']}\n"
        f"{num_elements:,} elements, {share:.1%} zero, {num_nonfinite:,} not finite"
    )
