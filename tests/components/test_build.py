"""The optimizer section of a config makes the optimizer that it describes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rowstep.components.build import build_optimizer
from rowstep.configs.schema import AnyOptimizer
from rowstep.optimizers import OPTIMIZERS

SECTIONS: list[dict[str, Any]] = [
    {
        "kind": "lazy_adam",
        "weight_decay": 0.01,
        "bias_correction": "visits",
        "idle_decay": True,
        "row_velocity": True,
    },
    {
        "kind": "lamb",
        "weight_decay_rate": 0.01,
        "exclude_from_weight_decay": ["bias$"],
        "trust_ratio_clip": [0.0, 10.0],
        "row_trust_ratio": True,
    },
    {
        "kind": "adam_multilr",
        "amsgrad": True,
        "lazy": True,
        "pattern_lrs": [{"patterns": ["embeddings$", "bias"], "lr": 0.25}],
    },
]


def parsed(section: dict[str, Any]) -> Any:
    return TypeAdapter(AnyOptimizer).validate_python(section, strict=False)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section["kind"])
def test_every_option_reaches_the_optimizer(section: dict[str, Any]) -> None:
    optimizer = build_optimizer(parsed(section), num_steps=10)
    assert type(optimizer) is OPTIMIZERS[section["kind"]]
    config = optimizer.get_config()
    for name, value in section.items():
        if name != "kind":
            assert config[name] == value, name


def test_a_clip_of_trust_ratios_must_rise() -> None:
    with pytest.raises(ValidationError, match=r"must rise. Got \[2, 1\]"):
        parsed({"kind": "lamb", "trust_ratio_clip": [2.0, 1.0]})
