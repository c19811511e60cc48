"""How large the elements of slots and weights are: histograms, and a table of everything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers.statistics.bins import Histogram, quantile
from rowstep.optimizers.statistics.compiled import made_once
from rowstep.optimizers.statistics.observed import (
    ObservedVariable,
    observed_variables,
    short_name,
)
from rowstep.optimizers.statistics.summaries import Summary, summarize

__all__ = ["histograms", "table"]

_WEIGHTS = "weights"
"""What the table calls the weights among the slots."""
_UNITS = {
    _WEIGHTS: "weight",
    "average": "weight",
    "momentum": "gradient",
    "velocity": "gradient^2",
    "velocity_hat": "gradient^2",
}


class _Part(NamedTuple):
    """Hold one slot of one variable, or its weights."""

    variable: ObservedVariable
    slot: str
    values: tf.Variable


class _Measured(NamedTuple):
    """Hold what was counted of a part, fetched."""

    part: _Part
    summary: Summary
    fine: np.ndarray[Any, Any]

    def histogram(self) -> Histogram:
        return Histogram.of_fine_counts(
            self.fine,
            int(self.summary.num_zero),
            int(self.summary.num_nonfinite),
            _UNITS.get(self.part.slot, "as the optimizer keeps it"),
        )


def histograms(optimizer: keras.optimizers.Optimizer) -> dict[str, Histogram]:
    """Return a histogram of absolute values for each slot of each variable.

    Args:
        optimizer: A built optimizer.

    Returns:
        Histograms by `<variable>.m`, `<variable>.v` or `<variable>.<slot>`, those of the largest
        variable first. Their 64 bins lie where the slot has numbers, so edges may differ.

    Raises:
        StateMismatchError: the optimizer is not built.

    Cost: one pass over the state, O(V * D), dearer than that of `scan` by the logarithms; one
    compiled graph, one transfer.
    """
    return {
        f"{measured.part.variable.name}.{short_name(measured.part.slot)}": measured.histogram()
        for measured in _measure(optimizer, weights=False)
    }


def table(optimizer: keras.optimizers.Optimizer, step: int) -> dict[str, list[Any]]:
    """Return everything about slots and weights, in columns.

    Args:
        optimizer: A built optimizer.
        step: What the column `step` says.

    Returns:
        Columns of one row for each variable and slot, and for the weights as slot "weights":
        step, variable, path, slot, shape, size, rms, mean, absmax, zero_frac, nonfinite, p01, p50
        and p99 of the absolute values, hist_edges, hist_counts and unit.

    Raises:
        StateMismatchError: the optimizer is not built.

    Cost: as of `histograms`, and the weights.
    """
    rows = [_row(measured, step) for measured in _measure(optimizer, weights=True)]
    return {column: [row[column] for row in rows] for column in rows[0]} if rows else {}


def _row(measured: _Measured, step: int) -> dict[str, Any]:
    (variable, slot, _), summary, fine = measured
    size, num_nonfinite = int(summary.size), int(summary.num_nonfinite)
    histogram = measured.histogram()
    quantiles = {
        f"p{round(100 * share):02d}": quantile(fine, histogram.num_zero, share)
        for share in (0.01, 0.5, 0.99)
    }
    return {
        "step": step,
        "variable": variable.name,
        "path": variable.path,
        "slot": slot,
        "shape": [int(length) for length in measured.part.values.shape],
        "size": size,
        "rms": math.sqrt(summary.squares / size) if size else 0.0,
        "mean": float(summary.total) / size if size else 0.0,
        "absmax": math.nan if num_nonfinite else float(summary.largest),
        "zero_frac": histogram.num_zero / size if size else 0.0,
        "nonfinite": num_nonfinite,
        **quantiles,
        "hist_edges": list(histogram.edges),
        "hist_counts": list(histogram.counts),
        "unit": histogram.unit,
    }


def _measure(optimizer: keras.optimizers.Optimizer, *, weights: bool) -> list[_Measured]:
    parts, compute = made_once(
        optimizer, ("spread", weights), lambda: _compile(observed_variables(optimizer), weights)
    )
    if not parts:
        return []
    rows = compute().numpy()
    num_sums = len(Summary._fields)
    return [
        _Measured(part, Summary(*row[:num_sums]), row[num_sums:].astype(np.int64))
        for part, row in zip(parts, rows, strict=True)
    ]


def _parts(variables: list[ObservedVariable], weights: bool) -> list[_Part]:
    parts = []
    for variable in sorted(variables, key=lambda v: -v.weights.shape.num_elements()):
        if weights:
            parts.append(_Part(variable, _WEIGHTS, variable.weights))
        parts += [_Part(variable, slot, values) for slot, values in variable.slots.items()]
    return parts


def _compile(
    variables: list[ObservedVariable], weights: bool
) -> tuple[list[_Part], Callable[[], tf.Tensor]]:
    parts = _parts(variables, weights)

    @tf.function(autograph=False)
    def compute() -> tf.Tensor:
        summary, counts = summarize([part.values for part in parts], counts=True)
        columns = [tf.stack(summary, axis=1), tf.cast(counts, tf.float64)]
        return tf.concat(columns, axis=1)

    return parts, compute
