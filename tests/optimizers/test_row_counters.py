"""Counters by row: bias correction by visits, and decay for the steps that a row missed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowstep.optimizers import reference

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("option_cases")
sys.path.pop(0)


def sparse(row_ids: list[int], value: float = 1.0, width: int = 3) -> dict[str, Any]:
    grads = np.full((len(row_ids), width), value, np.float32)
    return {cases.TABLE: (np.array(row_ids), grads)}


def table_only() -> dict[str, np.ndarray]:
    return {cases.TABLE: cases.weights()[cases.TABLE]}


def test_with_visits_a_rare_row_takes_a_full_first_step() -> None:
    optimizer = cases.make("lazy_adam", bias_correction="visits")
    variables = cases.variables(table_only())
    cases.run(optimizer, variables, [sparse([0])] * 50 + [sparse([1, 1], 0.7)])
    taken = table_only()[cases.TABLE] - np.array(variables[cases.TABLE])
    # A step of a constant gradient is the learning rate long; t = 51 would make it 0.7 of that.
    np.testing.assert_allclose(taken[1], cases.RATE, rtol=1e-4)
    np.testing.assert_allclose(taken[0], 50 * cases.RATE, rtol=1e-4)
    visits = np.array(optimizer.get_slot(variables[cases.TABLE], "num_visits"))
    np.testing.assert_array_equal(visits[:, 0], [50, 1, 0, 0, 0, 0, 0])


def test_with_visits_each_row_trains_as_if_it_were_alone() -> None:
    optimizer = cases.make("lazy_adam", bias_correction="visits")
    variables = cases.variables(table_only())
    gradients = [{cases.TABLE: call[cases.TABLE]} for call in cases.calls()]
    cases.run(optimizer, variables, gradients)
    for row in range(6):
        own = [reference.dense_gradient(*call[cases.TABLE], (7, 3)) for call in gradients]
        present = [row in call[cases.TABLE][0] for call in gradients]
        state = reference.new_state(table_only()[cases.TABLE][row])
        own = [g[row] for g, there in zip(own, present, strict=True) if there]
        for t, g in enumerate(own, start=1):
            state = reference.adam(state, g, t, learning_rate=cases.RATE)
        got = np.array(variables[cases.TABLE])[row]
        np.testing.assert_allclose(got, state[0], rtol=1e-5, atol=1e-6)


def test_with_idle_decay_the_moments_of_a_touched_row_are_those_of_adam() -> None:
    optimizer = cases.make("lazy_adam", idle_decay=True)
    variables = cases.variables(table_only())
    dense = reference.new_state(table_only()[cases.TABLE])
    for t, call in enumerate(cases.calls(), start=1):
        call = {cases.TABLE: call[cases.TABLE]}
        cases.run(optimizer, variables, [call])
        g = reference.dense_gradient(*call[cases.TABLE], (7, 3))
        dense = reference.adam(dense, g, t, learning_rate=cases.RATE)
        rows = np.unique(call[cases.TABLE][0])
        for slot, wanted in (("momentum", dense[1]), ("velocity", dense[2])):
            got = np.array(optimizer.get_slot(variables[cases.TABLE], slot))
            np.testing.assert_allclose(got[rows], wanted[rows], rtol=1e-5, atol=1e-9)


def test_without_it_they_are_not() -> None:
    optimizer, variables = cases.make("lazy_adam"), cases.variables(table_only())
    cases.run(optimizer, variables, [sparse([1]), sparse([0]), sparse([1], 0.0)])
    momentum = np.array(optimizer.get_slot(variables[cases.TABLE], "momentum"))[1]
    np.testing.assert_allclose(momentum, 0.9 * 0.1, rtol=1e-6)
    optimizer = cases.make("lazy_adam", idle_decay=True)
    variables = cases.variables(table_only())
    cases.run(optimizer, variables, [sparse([1]), sparse([0]), sparse([1], 0.0)])
    momentum = np.array(optimizer.get_slot(variables[cases.TABLE], "momentum"))[1]
    np.testing.assert_allclose(momentum, 0.9**2 * 0.1, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_of_a_row_that_comes_back_decayed_as_often_as_those_of_others(dtype: str) -> None:
    optimizer = cases.make("lazy_adam", idle_decay=True, weight_decay=0.001)
    variables = cases.variables(table_only(), dtype=dtype)
    cases.run(optimizer, variables, [sparse([0], 0.0)] * 300 + [sparse([0, 1], 0.0)])
    # Gradients of zero leave nothing but the decay: (1 - rate * 0.001)^301 for both rows.
    wanted = table_only()[cases.TABLE] * (1 - cases.RATE * 0.001) ** 301
    got = np.array(variables[cases.TABLE])
    tolerance = {"float32": 3e-7, "float64": 1e-13}[dtype]
    np.testing.assert_allclose(got[1], wanted[1], rtol=tolerance)
    # The other row was rounded 301 times.
    np.testing.assert_allclose(got[0], wanted[0], rtol=100 * tolerance)


def test_decay_over_many_idle_steps_is_right_to_float32() -> None:
    # 0.999 in float32, to the power of 10000, is off in the fourth digit.
    optimizer = cases.make("lazy_adam", idle_decay=True)
    variables = cases.variables(table_only())
    cases.run(optimizer, variables, [sparse([1])])
    state = optimizer.named_state()
    optimizer.load_named_state(state | {"iterations": np.array(10_000, state["iterations"].dtype)})
    cases.run(optimizer, variables, [sparse([1], 0.0)])
    velocity = np.array(optimizer.get_slot(variables[cases.TABLE], "velocity"))[1]
    np.testing.assert_allclose(velocity, 0.001 * 0.999**10_000, rtol=2e-6)


def test_a_row_velocity_is_the_mean_over_the_row_of_what_adam_keeps() -> None:
    # Without the root between them, means and moments may change places.
    narrow, wide = cases.make("lazy_adam", row_velocity=True), cases.make("lazy_adam")
    slots = []
    for optimizer in (narrow, wide):
        variables = cases.variables()
        cases.run(optimizer, variables, cases.calls())
        slots.append([np.array(optimizer.get_slot(v, "velocity")) for v in variables.values()])
    assert slots[0][0].shape == (7, 1)
    np.testing.assert_allclose(slots[0][0][:, 0], slots[1][0].mean(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(slots[0][1], slots[1][1])  # a kernel keeps the full one
