"""The doctor for a config: its model and its optimizer, without its data."""

from __future__ import annotations

from rowstep.components.build import build_optimizer
from rowstep.components.models import build_model
from rowstep.configs import RunConfig
from rowstep.configs.schema import NumericFeature
from rowstep.optimizers.diagnosis.doctor import Finding, doctor, report

__all__ = ["examine", "report"]

_NUM_ROWS = 4
"""Rows of each table: a vocabulary's size is known from data only, and what a step does to a table
does not hang on it."""


def examine(config: RunConfig) -> list[Finding]:
    """Return what would make the training of a config dense or wrong; `report` words it."""
    tables = {n: _NUM_ROWS for n, f in config.features.items() if not isinstance(f, NumericFeature)}
    model = build_model(config, tables, label_mean=0.0)
    return doctor(model, build_optimizer(config.optimizer, num_steps=1))
