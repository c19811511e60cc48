"""A config carries every option: the copy is the same optimizer, in what it says and does."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from rowstep.optimizers import StepOptions

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("option_cases")
sys.path.pop(0)

OPTIONS: dict[str, Any] = {
    "clipnorm": 0.5,
    "clipvalue": 0.25,
    "clip_before_sum": True,
    "weight_decay": 0.1,
    "use_ema": True,
    "ema_momentum": 0.75,
    "ema_overwrite_frequency": 3,
    "loss_scale_factor": 4.0,
    "gradient_accumulation_steps": 2,
    "decay": 0.5,
    "state_dtype": "bfloat16",
    "tables": ["embeddings$", "^other"],
    "stochastic_rounding": False,
    "seed": 7,
    "check_finite": False,
    "beta_1": 0.8,
    "beta_2": 0.95,
    "epsilon": 1e-5,
    "name": "mine",
}
OWN: dict[str, dict[str, Any]] = {
    "lazy_adam": {"bias_correction": "visits", "idle_decay": True, "row_velocity": True},
    "adam_multilr": {
        "amsgrad": True,
        "lazy": True,
        "pattern_lrs": [{"patterns": ["kernel"], "lr": 0.25}],
    },
    "lamb": {
        "weight_decay_rate": 0.2,
        "exclude_from_weight_decay": ["kernel"],
        "exclude_from_layer_adaptation": [],
        "trust_ratio_clip": [0.5, 2.0],
        "row_trust_ratio": True,
        "row_velocity": True,
    },
}


def all_options(maker: str) -> dict[str, Any]:
    options = {**OPTIONS, **OWN[maker]}
    if maker == "lamb":
        del options["weight_decay"]  # it has weight_decay_rate
    return options


def test_the_options_here_are_all_that_there_are() -> None:
    known = set(inspect.signature(StepOptions).parameters)
    assert known == (OPTIONS.keys() | {"global_clipnorm"}) - {"beta_1", "beta_2", "epsilon", "name"}
    for maker, own in OWN.items():
        parameters = inspect.signature(cases.MAKERS[maker]).parameters.values()
        named = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
        missing = named - own.keys() - OPTIONS.keys() - {"learning_rate"}
        assert missing <= {"amsgrad"}, f"{maker}: {missing}"  # False is all that LazyAdam takes


@pytest.mark.parametrize("maker", cases.MAKERS)
def test_every_option_comes_back_from_the_config(maker: str) -> None:
    options = all_options(maker)
    optimizer = cases.make(maker, **options)
    config = optimizer.get_config()
    for name, value in options.items():
        assert config[name] == value, name
    assert json.loads(json.dumps(config)) == config
    for copy in (
        type(optimizer).from_config(config),
        type(optimizer).from_config(json.loads(json.dumps(config))),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)),
    ):
        assert copy.get_config() == config


@pytest.mark.parametrize("maker", cases.MAKERS)
def test_global_clipping_comes_back_too(maker: str) -> None:
    config = cases.make(maker, global_clipnorm=0.5).get_config()
    assert type(cases.make(maker)).from_config(config).get_config()["global_clipnorm"] == 0.5


@pytest.mark.parametrize("maker", cases.MAKERS)
def test_the_copy_trains_to_the_same_bits(maker: str) -> None:
    results = []
    optimizer = cases.make(maker, **all_options(maker))
    for one in (optimizer, type(optimizer).from_config(optimizer.get_config())):
        variables = cases.variables()
        cases.run(one, variables, cases.calls())
        results.append([np.array(v) for v in variables.values()] + one.get_weights())
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("maker", cases.MAKERS)
def test_options_that_are_left_out_are_the_defaults(maker: str) -> None:
    config = cases.make(maker).get_config()
    for name, parameter in inspect.signature(StepOptions).parameters.items():
        if not (maker == "lamb" and name == "weight_decay"):
            default = parameter.default
            assert config[name] == (list(default) if isinstance(default, tuple) else default), name
