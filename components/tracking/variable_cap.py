"""A limit on metrics of single variables: MLflow's pages show one card for each name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

MAX_VARIABLE_KEYS = 200

_TAG = "rowstep.capped_metrics"
_MAX_NAMED = 5
_OF_A_VARIABLE = re.compile(
    r"(?:nonfinite/)?opt/(?:\w+_rms|\w+_zero_frac|update_ratio|trust_ratio|touched_frac)/."
)


class LeftOut(NamedTuple):
    """Say which metrics were left out, to people and to MLflow; empty when nothing is new."""

    words: str
    tags: dict[str, str]


class VariableCap:
    """Let the first 200 names of metrics of single variables through, and name the rest.

    Which names come first is for the caller to say: the order is that of the mapping.

    Args:
        known: names that a resumed training already has.
    """

    def __init__(self, known: Iterable[str]) -> None:
        self._admitted = {key for key in known if _OF_A_VARIABLE.match(key)}
        self._left_out: dict[str, None] = {}
        self._was_said = False

    def split(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], LeftOut | None]:
        """Return the metrics that may be reported, and what to say, once, of the others."""
        kept, num_before = {}, len(self._left_out)
        for key, value in metrics.items():
            if _OF_A_VARIABLE.match(key) and key not in self._admitted:
                if len(self._admitted) >= MAX_VARIABLE_KEYS:
                    self._left_out[key] = None
                    continue
                self._admitted.add(key)
            kept[key] = value
        if len(self._left_out) == num_before or self._was_said:
            return kept, None
        self._was_said = True
        return kept, self._describe()

    def _describe(self) -> LeftOut:
        names = list(self._left_out)
        some = ", ".join(names[:_MAX_NAMED]) + (" ..." if len(names) > _MAX_NAMED else "")
        return LeftOut(
            f"tracking: metrics of single variables may have {MAX_VARIABLE_KEYS} names. Got "
            f"{len(names)} more, which are left out: {some}. The files of the run have them all.",
            {_TAG: f"{len(names)} left out: {some}"},
        )
