"""What a training reports besides numbers: histograms, datasets, the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Status = Literal["FINISHED", "FAILED", "KILLED"]


class HistogramData(Protocol):
    """What a histogram has to have; `rowstep.optimizers.statistics.Histogram` has it."""

    @property
    def edges(self) -> Sequence[float]:
        """Return n + 1 ascending edges, in `unit`."""

    @property
    def counts(self) -> Sequence[int]:
        """Return how many elements lie in each of the n bins."""

    @property
    def num_zero(self) -> int:
        """Return how many elements are exactly zero; they are in no bin."""

    @property
    def num_nonfinite(self) -> int:
        """Return how many elements are NaN or infinite; they are in no bin."""

    @property
    def unit(self) -> str:
        """Return what the edges are counted in."""


@dataclass(frozen=True)
class DatasetLink:
    """Name data that a training read; nothing is copied."""

    name: str
    digest: str
    """Fingerprint of the data; MLflow keeps 36 characters."""
    source: Mapping[str, Any]
    """Where the data is, as JSON: uri, split, ids."""
    context: Literal["train", "eval"]


@dataclass(frozen=True)
class ModelLink:
    """Name the model that a training made; nothing is copied."""

    name: str
    uri: str
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    """Optimizer iterations that the model has seen."""
