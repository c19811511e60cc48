"""Report what an optimizer does: each step's statistics, scans of its state, histograms, tables.

What is reported, under which names and in which units, is in `tracking/SCHEMA.md`.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from rowstep.components.describe import describe_optimizer, summarise_optimizer
from rowstep.components.tracking import Tracker
from rowstep.components.tracking.text import explain
from rowstep.optimizers.statistics import (
    StepObserver,
    histograms,
    scan,
    table,
    variable_names,  # largest first
)

_NUM_SHOWN_UNASKED = 16
_NUM_SHOWN = 33
"""Variables of their own metrics: 6 each, so that a page of charts has at most 200 of them."""
_NUM_PICTURES = 4
_SCAN_EVERY_STEPS, _SHARE = 1000, 0.01
_DRAWING_SECONDS = 0.15
"""What a picture costs the background thread, about."""


@dataclass
class OptimizerLog:
    """Report one optimizer to a tracker.

    Args:
        tracker: where to; it never waits.
        optimizer: built.
        model: what it trains.
        per_variable: whether single variables have metrics of their own; None for as many as 16.
        scan_every_steps: when to scan the state, and then each epoch ends with pictures; None for
            every 1000 steps and every epoch while that takes at most a hundredth of the time.
        histograms: whether there are pictures at all.
        on_notice: is told, in words, what is left out.
    """

    tracker: Tracker
    optimizer: keras.optimizers.Optimizer
    model: keras.Model
    per_variable: bool | None = None
    scan_every_steps: int | None = None
    histograms: bool = True
    on_notice: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        names = list(variable_names(self.optimizer))
        self._left_out = 0
        self.shown: bool | frozenset[str] = self.per_variable is not False
        if self.per_variable is None and len(names) > _NUM_SHOWN_UNASKED:
            self.shown = False
        elif self.shown and len(names) > _NUM_SHOWN:
            self.shown = frozenset(names[:_NUM_SHOWN])
            self._left_out = len(names) - _NUM_SHOWN
        self.observer = StepObserver(self.optimizer, per_variable=self.shown)
        self._scanned: dict[str, float] = {}
        self._is_blind = False
        self._began, self._spent = time.monotonic(), 0.0
        self._last_cost: dict[str, float] = {}
        self._last_pictures = -1

    def start(self) -> None:
        """Store how the optimizer is configured, as files that MLflow compares side by side."""
        if self._left_out:
            self.tracker.set_tags({"opt.variables_left_out": str(self._left_out)})
            self.on_notice(
                f"tracking.per_variable: at most {_NUM_SHOWN} variables can have metrics of their "
                f"own. Got {self._left_out} more. The largest have them. All are in the artifacts "
                "optimizer/slots-*.parquet."
            )
        described = describe_optimizer(self.optimizer, self.model)
        self.tracker.log_text("optimizer_config.json", json.dumps(described, indent=2, default=str))
        summary = summarise_optimizer(self.optimizer, described)
        self.tracker.log_text("optimizer_summary.md", summary)

    def named(self, statistics: np.ndarray) -> dict[str, float]:
        """Return what `observer.apply` returned for a step, by the names of metrics."""
        return dict(zip(self.observer.names, statistics.tolist(), strict=True))

    @property
    def steps_between_scans(self) -> int:
        """Return which steps a scan may come after: the multiples of this."""
        return self.scan_every_steps or _SCAN_EVERY_STEPS

    def affords_scan(self) -> bool:
        """Return whether a scan is worth its time now."""
        return self._affords("scan")

    def scan(self, step: int) -> None:
        """Report the whole state, as metrics and as one table.

        Cost: two passes over weights and state.
        """
        with self._looking("scan"):
            self._scanned = scan(self.optimizer, per_variable=self.shown)
            self.tracker.log_metrics(step, self._scanned)
            columns = table(self.optimizer, step)
            self.tracker.log_file(f"optimizer/slots-{step:09}.parquet", _parquet(columns))

    def epoch(self, step: int) -> None:
        """Store histograms at the end of an epoch, where that is worth its time."""
        if self.histograms and self._affords("pictures"):
            self.pictures(step)

    def pictures(self, step: int) -> None:
        """Store histograms of the largest slots, few of them: each takes a while to draw."""
        self._last_pictures = step
        with self._looking("pictures"):
            for name, histogram in list(histograms(self.optimizer).items())[:_NUM_PICTURES]:
                self.tracker.log_histogram(f"opt/hist/{name}", step, histogram)
                self._spent += _DRAWING_SECONDS

    def end(self, step: int) -> None:
        """Report the state once more, as it is at the end."""
        self.scan(step)
        if self.histograms and self._last_pictures != step:
            self.pictures(step)
        text = json.dumps({"step": step, **_finite(self._scanned)}, indent=2)
        self.tracker.log_file("optimizer/final_stats.json", text.encode())

    def _affords(self, what: str) -> bool:
        if self.scan_every_steps is not None:
            return True
        needed = self._spent + self._last_cost.get(what, 0.0)
        return what not in self._last_cost or needed <= _SHARE * (time.monotonic() - self._began)

    @contextmanager
    def _looking(self, what: str) -> Iterator[None]:
        """Take the time, and say once if the state cannot be looked at: the training goes on."""
        start, spent = time.monotonic(), self._spent
        try:
            yield
        except Exception as error:  # memory that is short, an optimizer of a kind never seen
            if not self._is_blind:
                self.on_notice(
                    "tracking: the optimizer's state must be readable for its statistics. Got "
                    f"{explain(error)}. The training goes on without them."
                )
            self._is_blind = True
        finally:
            self._spent += time.monotonic() - start
            self._last_cost[what] = self._spent - spent


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """Return numbers that JSON has; None for NaN and infinities."""
    return {name: value if np.isfinite(value) else None for name, value in numbers.items()}
