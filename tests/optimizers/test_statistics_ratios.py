"""LAMB's trust ratios in reports: those of the reference, and what became of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LAMB, LazyAdam, StepObserver, reference

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("step_cases")
sys.path.pop(0)

RATE, DECAY = 0.1, 0.01
SUMMARY = "opt/trust_ratio_summary/"


def reference_ratio(state: reference.State, g: np.ndarray, t: int) -> float:
    """Return the ratio of a step of the reference: how much longer it is with it than without."""
    settings = {"learning_rate": RATE, "weight_decay_rate": DECAY}
    adapted = reference.lamb(state, g, t, **settings)[0] - state[0]
    plain = reference.lamb(state, g, t, adapt=False, **settings)[0] - state[0]
    return float(np.linalg.norm(adapted) / np.linalg.norm(plain))


class Reported:
    """LAMB on three variables, and what each step reports."""

    def __init__(self, **options: Any) -> None:
        self.variables = cases.new_variables()
        self.optimizer = LAMB(RATE, weight_decay_rate=DECAY, **options)
        self.optimizer.build(self.variables)
        observer = StepObserver(self.optimizer, per_variable=True)
        self.observer = observer
        self.function = tf.function(lambda *grads: observer.apply(grads, self.variables))

    def state(self, index: int) -> reference.State:
        variable = self.variables[index]
        named = self.optimizer.named_state()
        moments = (named[f"{variable.path}/{slot}"] for slot in ("momentum", "velocity"))
        return tuple(np.array(a, np.float64) for a in (variable, *moments))

    def step(self, grads: list[Any]) -> dict[str, float]:
        values = self.function(*grads).numpy().tolist()
        return dict(zip(self.observer.names, values, strict=True))


def dense(gradient: Any) -> np.ndarray:
    array, rows = cases.summed(gradient)
    if rows is None:
        return array
    return reference.dense_gradient(rows, array, (cases.ROWS, cases.WIDTH))


def check_summary(got: dict[str, float], ratios: list[float]) -> None:
    for name, value in (
        ("min", np.min(ratios)),
        ("median", np.median(ratios)),
        ("max", np.max(ratios)),
    ):
        assert got[SUMMARY + name] == pytest.approx(value, rel=1e-4), name


def test_ratios_of_variables_are_those_of_the_reference() -> None:
    reported = Reported()
    for t in range(1, 4):
        grads = cases.gradients(t)
        ratios = [
            reference_ratio(reported.state(index), dense(g), t) for index, g in enumerate(grads)
        ]
        got = reported.step(grads)
        check_summary(got, ratios)
        assert got[SUMMARY + "clipped_frac"] == 0
        for variable, ratio in zip(reported.variables, ratios, strict=True):
            name = f"opt/trust_ratio/{variable.path.replace('/', '.')}"
            assert got[name] == pytest.approx(ratio, rel=1e-4)


def test_ratios_of_rows_are_those_of_the_reference_for_each_row() -> None:
    reported = Reported(row_trust_ratio=True)
    for t in range(1, 4):
        grads = cases.gradients(t)
        w, m, v = reported.state(0)
        rows = np.unique(grads[0].indices)
        g = dense(grads[0])
        by_row = [reference_ratio((w[r], m[r], v[r]), g[r], t) for r in rows]
        others = [reference_ratio(reported.state(i), dense(grads[i]), t) for i in (1, 2)]
        got = reported.step(grads)
        check_summary(got, by_row + others)
        assert got["opt/trust_ratio/items.embeddings"] == pytest.approx(np.median(by_row), rel=1e-4)


def test_clipped_ratios_are_reported_as_used_and_counted() -> None:
    grads = cases.gradients(1)
    free = Reported(row_trust_ratio=True)
    w, m, v = free.state(0)
    g, rows = dense(grads[0]), np.unique(grads[0].indices)
    ratios = [reference_ratio((w[r], m[r], v[r]), g[r], 1) for r in rows]
    ratios += [reference_ratio(free.state(i), dense(grads[i]), 1) for i in (1, 2)]
    low, high = np.quantile(ratios, [0.3, 0.7])
    got = Reported(row_trust_ratio=True, trust_ratio_clip=(low, high)).step(grads)
    check_summary(got, list(np.clip(ratios, low, high)))
    outside = np.mean([not low <= ratio <= high for ratio in ratios])
    assert got[SUMMARY + "clipped_frac"] == pytest.approx(outside)


def test_a_variable_that_is_excluded_has_no_ratio() -> None:
    got = Reported(exclude_from_layer_adaptation=["bias", "dense"]).step(cases.gradients(1))
    assert [name for name in got if name.startswith("opt/trust_ratio/")] == [
        "opt/trust_ratio/items.embeddings"
    ]
    assert got[SUMMARY + "min"] == got[SUMMARY + "max"]


def test_ratios_are_one_between_updates() -> None:
    reported = Reported(gradient_accumulation_steps=2)
    first, second = (reported.step(cases.gradients(number)) for number in (1, 2))
    assert first[SUMMARY + "min"] == first[SUMMARY + "max"] == 1
    assert second[SUMMARY + "min"] != 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: LazyAdam(),
        lambda: keras.optimizers.Lamb(),
        lambda: LAMB(exclude_from_layer_adaptation=["."]),
    ],
)
def test_an_optimizer_without_ratios_reports_none(make: Any) -> None:
    variables, optimizer = cases.new_variables(), make()
    optimizer.build(variables)
    observer = StepObserver(optimizer, per_variable=True)
    observer.apply(cases.gradients(0), variables)
    assert not [name for name in observer.names if "trust_ratio" in name]


def test_the_optimizer_keeps_its_own_rules_when_a_step_fails() -> None:
    variables = cases.new_variables()
    optimizer = LAMB()
    optimizer.build(variables)
    plans = optimizer._plans
    nan = tf.constant([float("nan"), 0.0, 0.0, 0.0])
    with pytest.raises(tf.errors.InvalidArgumentError):
        StepObserver(optimizer).apply([*cases.gradients(0)[:2], nan], variables)
    assert optimizer._plans == plans
    assert {type(plan.rule).__name__ for plan in optimizer._plans} == {"LambRule"}
