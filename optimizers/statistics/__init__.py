"""Statistics of an optimizer: of one step, of its whole state, and as histograms.

    StepObserver          the statistics of a step, computed beside it: norms, touched rows, ratios
    scan                  the statistics of all slots and weights
    collect, slot_stats   the same of slots only, as numbers or as tensors
    histograms            the sizes of a slot's elements, in 64 bins by powers of ten
    table                 all of that in columns, one row for each variable and slot
    variable_names        what variables are called in the names of metrics
    slot_names            which slots they have
    innermost             the optimizer that has them, inside of a LossScaleOptimizer

Names, formulas and units of all of them are in `components/tracking/SCHEMA.md`.
"""

from __future__ import annotations

from rowstep.optimizers.statistics.bins import Histogram
from rowstep.optimizers.statistics.full_scan import collect, scan, slot_stats
from rowstep.optimizers.statistics.observed import innermost, slot_names, variable_names
from rowstep.optimizers.statistics.observer import StepObserver
from rowstep.optimizers.statistics.spread import histograms, table

__all__ = [
    "Histogram",
    "StepObserver",
    "collect",
    "histograms",
    "innermost",
    "scan",
    "slot_names",
    "slot_stats",
    "table",
    "variable_names",
]
