"""The specification of the options: without them it is the older one, with them it is by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rowstep.optimizers import reference
from rowstep.optimizers.reference_options import Settings, VariableState, train

START = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
STEPS = [([1, 1, 2], 0.5), ([0], -1.0), ([2, 1], 2.0)]
GRADS = [(np.array(ids), np.full((len(ids), 2), value) * [1, -3]) for ids, value in STEPS]


def trained(gradients: list[Any], **settings: Any) -> VariableState:
    calls = [{"w": g} for g in gradients]
    return train({"w": START}, calls, Settings(learning_rate=0.1, **settings), ("w",))["w"]


def test_without_options_it_is_the_plain_specification() -> None:
    lazy = dense = lamb = reference.new_state(START)
    for t, (row_ids, row_grads) in enumerate(GRADS, start=1):
        g = reference.dense_gradient(row_ids, row_grads, START.shape)
        lazy = reference.lazy_adam(lazy, row_ids, row_grads, t, learning_rate=0.1)
        dense = reference.adam(dense, g, t, learning_rate=0.1)
        lamb = reference.lamb(lamb, g, t, learning_rate=0.1, weight_decay_rate=0.2, epsilon=1e-6)
    options = {"formula": "lamb", "weight_decay_rate": 0.2, "epsilon": 1e-6}
    for state, settings in ((lazy, {}), (dense, {"lazy": False}), (lamb, options)):
        got = trained(GRADS, **settings)
        for array, wanted in zip((got.w, got.m, got.v), state, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=1e-14)


def test_idle_decay_makes_lazy_moments_those_of_adam() -> None:
    lazy, dense = trained(GRADS, idle_decay=True), trained(GRADS, lazy=False)
    np.testing.assert_allclose(lazy.m[[1, 2]], dense.m[[1, 2]], rtol=1e-14)
    np.testing.assert_allclose(lazy.v[[1, 2]], dense.v[[1, 2]], rtol=1e-14)
    assert np.all(trained(GRADS).m[1] != dense.m[1])


def test_one_number_of_each_option_by_hand() -> None:
    one = [(np.array([1]), np.array([[3.0, -4.0]]))]
    assert trained(one, loss_scale_factor=10.0).m[1, 0] == pytest.approx(0.03)
    assert trained(one, clipnorm=1.0).m[1, 0] == pytest.approx(0.06)
    assert trained(one, clipvalue=2.0).m[1, 1] == pytest.approx(-0.2)
    assert trained(one, clipvalue=2.0, clipnorm=1.0).m[1, 1] == pytest.approx(-0.1 / np.sqrt(2))
    assert trained(one, row_velocity=True).v[1, 0] == pytest.approx(0.001 * 12.5)
    assert trained(one, weight_decay=0.5).w[1, 0] == pytest.approx(3.0 * 0.95 - 0.1, rel=1e-5)
    assert trained(one * 2, decay=1.0).w[1, 0] == pytest.approx(3.0 - 0.1 - 0.05, rel=1e-5)
    twice = trained(one * 2, gradient_accumulation_steps=2)
    np.testing.assert_allclose(twice.w, trained(one).w, rtol=1e-15)
    assert trained(one * 3, bias_correction="visits").num_visits.tolist() == [0, 3, 0]


def test_the_average_by_hand() -> None:
    steps = [(np.array([1]), np.ones((1, 2)))] * 3  # each takes 0.1
    state = trained(steps, use_ema=True, ema_momentum=0.5)
    assert state.average[1, 0] == pytest.approx(2.9 / 4 + 2.8 / 4 + 2.7 / 2, rel=1e-6)
    older = trained(steps, use_ema=True, ema_momentum=0.5, average_starts_at_first_step=False)
    assert older.average[1, 0] == pytest.approx((3.0 + 2.9) / 8 + 2.8 / 4 + 2.7 / 2, rel=1e-6)
    state = trained(steps, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    assert state.w[1, 0] == state.average[1, 0]


def test_amsgrad_divides_by_the_largest_second_moment() -> None:
    steps = [(np.array([1]), np.full((1, 2), value)) for value in (10.0, 0.0, 0.0)]
    plain, amsgrad = trained(steps, beta_2=0.5), trained(steps, beta_2=0.5, amsgrad=True)
    np.testing.assert_allclose(amsgrad.v_hat[1], 50.0)
    np.testing.assert_allclose(amsgrad.v[1], 12.5)
    assert np.all(amsgrad.w[1] > plain.w[1])


def test_lamb_by_row_measures_each_row_and_clamps_its_ratio() -> None:
    options = {"formula": "lamb", "row_trust_ratio": True}
    grads = [(np.array([0, 2]), np.array([[1.0, -1.0], [5.0, 5.0]]))]
    taken = START - trained(grads, **options).w
    lengths = np.linalg.norm(taken, axis=1)
    np.testing.assert_allclose(lengths, 0.1 * np.linalg.norm(START, axis=1) * [1, 0, 1], rtol=1e-5)
    taken = START - trained(grads, **options, trust_ratio_clip=(0.0, 2.0)).w
    # u is 1 in each element, so the ratio of row 0 is 1.58 and that of row 2, 5.5, is clamped.
    np.testing.assert_allclose(taken[2], [0.2, 0.2], rtol=1e-5)
    np.testing.assert_allclose(taken[0], [0.1581, -0.1581], rtol=1e-3)
