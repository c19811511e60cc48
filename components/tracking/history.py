"""What the journal remembers of its reports, so that they themselves may be cut away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rowstep.components.tracking.target import Target

Row = Mapping[str, Any]

COMPACTED = "compacted"
DROPPED_TAG = "rowstep.dropped_reports"
NON_FINITE = "nonfinite/"

_HISTOGRAM = "histogram:"  # no metric's name holds a colon


class History:
    """Summarise reports in their order: the largest step of each key, the target, the status.

    A resumed training repeats the steps since its checkpoint bit for bit, and MLflow would draw
    each of them twice: `fresh_metrics` leaves out what is at or below the largest step of its key.
    """

    def __init__(self) -> None:
        self.target: Target | None = None
        self.first_start_ms = 0
        self.last_ms = 0
        self.status: str | None = None
        """How the latest attempt ended; None while it runs, or after it was killed."""
        self.num_dropped = 0
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._largest_step: dict[str, int] = {}
        self._num_non_finite: dict[str, float] = {}
        self._num_reports = 0

    @property
    def metric_keys(self) -> Iterable[str]:
        """Return the names of all metrics so far."""
        return [key for key in self._largest_step if not key.startswith(_HISTOGRAM)]

    def note(self, row: Row) -> None:
        """Take in one report; one of a strange kind counts, and says nothing."""
        kind = row.get("kind")
        self._num_reports += 1
        self.last_ms = max(self.last_ms, row.get("ts_ms", 0))
        if kind == COMPACTED:
            self._restore(row)
        elif kind == "start":
            self.target, self.status = Target(**row["target"]), None
            self.first_start_ms = self.first_start_ms or row["ts_ms"]
            # MLflow never changes a param that it has.
            self._params = {**row.get("params", {}), **self._params}
            self._note_tags(row.get("tags", {}))
        elif kind == "tags":
            self._note_tags(row["tags"])
        elif kind == "status":
            self.status = row["status"]
        elif kind == "metrics":
            for key, value in row["metrics"].items():
                self._note_step(key, row["step"])
                if key.startswith(NON_FINITE):
                    self._num_non_finite[key] = value
        elif kind == "histogram":
            self._note_step(_HISTOGRAM + row["key"], row["step"])

    def _note_tags(self, tags: Mapping[str, str]) -> None:
        self._tags.update(tags)
        dropped = tags.get(DROPPED_TAG, "")
        self.num_dropped = int(dropped) if dropped.isdigit() else self.num_dropped

    def _note_step(self, key: str, step: int) -> None:
        self._largest_step[key] = max(step, self._largest_step.get(key, step))

    # --- what is new ------------------------------------------------------------------------

    def fresh_metrics(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that this step does not have yet.

        A NaN or an infinity cannot be drawn and breaks replays on older servers: in its place
        `nonfinite/<key>` counts how many of them there have been.
        """
        fresh = {}
        for given, number in metrics.items():
            key, value = given, number
            if not math.isfinite(value):
                key = f"{NON_FINITE}{given}"
                value = self._num_non_finite.get(key, 0.0) + 1.0
            if self._is_fresh(key, step):
                fresh[key] = value
        return fresh

    def is_fresh_histogram(self, step: int, key: str) -> bool:
        """Tell whether the histogram of this step is not there yet."""
        return self._is_fresh(_HISTOGRAM + key, step)

    def _is_fresh(self, key: str, step: int) -> bool:
        return key not in self._largest_step or step > self._largest_step[key]

    # --- one row in place of many -----------------------------------------------------------

    def as_row(self, base: int) -> dict[str, Any]:
        """Return the row that stands for everything noted, which ended at the offset `base`."""
        return {
            "kind": COMPACTED,
            "base": base,
            "ts_ms": self.first_start_ms,
            "last_ms": self.last_ms,
            "target": asdict(self.target) if self.target else None,
            "status": self.status,
            "params": self._params,
            "tags": self._tags,
            "largest_step": self._largest_step,
            "num_non_finite": self._num_non_finite,
            "num_reports": self._num_reports,
        }

    def _restore(self, row: Row) -> None:
        self.target = Target(**row["target"]) if row["target"] else None
        self.first_start_ms, self.last_ms = row["ts_ms"], row["last_ms"]
        self.status = row["status"]
        self._params = dict(row["params"])
        self._note_tags(row["tags"])
        self._largest_step = dict(row["largest_step"])
        self._num_non_finite = dict(row["num_non_finite"])
        self._num_reports = row["num_reports"]
