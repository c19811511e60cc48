"""Bins by powers of ten: many fine ones while counting, 64 to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["LOWEST_DECADE", "NUM_BINS", "NUM_FINE_BINS", "PER_DECADE", "Histogram", "quantile"]

PER_DECADE = 8
LOWEST_DECADE = -46
"""The smallest float32 is above 10^-46."""
_HIGHEST_DECADE = 39
NUM_FINE_BINS = PER_DECADE * (_HIGHEST_DECADE - LOWEST_DECADE)
NUM_BINS = 64


@dataclass(frozen=True)
class Histogram:
    """Hold how many elements are how large, by absolute value.

    Attributes:
        edges: n + 1 ascending edges, at equal distances in log10.
        counts: Elements x with edges[i] <= |x| < edges[i + 1], n of them.
        num_zero: Elements that are exactly 0; they are in no bin.
        num_nonfinite: NaN and infinities; they are in no bin.
        unit: What the edges are counted in: that of the gradient, its square, the weight.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    num_zero: int
    num_nonfinite: int
    unit: str

    @classmethod
    def of_fine_counts(
        cls,
        fine: np.ndarray[Any, Any],
        num_zero: int,
        num_nonfinite: int,
        unit: str,
    ) -> Histogram:
        """Return 64 bins that hold all counts, as narrow as they can be: the top one is filled.

        A bin is an eighth of a decade wide, so that 64 of them are 8 decades, or twice, four
        times ... that.
        """
        filled = np.flatnonzero(fine)
        # Nothing to show is shown around 1.
        low, high = (filled[0], filled[-1]) if filled.size else 2 * (-PER_DECADE * LOWEST_DECADE,)
        width = 1
        while high // width - low // width >= NUM_BINS:
            width *= 2
        first = high // width - NUM_BINS + 1
        counts = np.zeros(NUM_BINS, np.int64)
        np.add.at(counts, filled // width - first, fine[filled])
        exponents = (first + np.arange(NUM_BINS + 1)) * width / PER_DECADE + LOWEST_DECADE
        edges = tuple((10.0**exponents).tolist())
        return cls(edges, tuple(counts.tolist()), num_zero, num_nonfinite, unit)


def quantile(fine: np.ndarray[Any, Any], num_zero: int, share: float) -> float:
    """Return the absolute value that a share of the finite elements does not exceed.

    Right to the width of a fine bin, 10^(1/8), and within it interpolated in log10; NaN where
    there is no element.
    """
    steps = np.concatenate([[num_zero], num_zero + np.cumsum(fine)])
    wanted = share * steps[-1]
    if steps[-1] == 0:
        return float("nan")
    if wanted <= num_zero:
        return 0.0
    index = int(np.searchsorted(steps, wanted)) - 1
    inside = (wanted - steps[index]) / (steps[index + 1] - steps[index])
    return float(10.0 ** ((index + inside) / PER_DECADE + LOWEST_DECADE))
