"""The specification itself, against numbers worked out by hand and against the papers' limits."""

from __future__ import annotations

import numpy as np
import pytest

from rowstep.optimizers import reference


def test_the_first_adam_step_is_the_learning_rate_in_each_direction() -> None:
    w, m, v = reference.adam(reference.new_state([1, 1]), [0.5, -20], 1, learning_rate=0.1)
    np.testing.assert_allclose(w, [0.9, 1.1], rtol=1e-5)
    np.testing.assert_allclose(m, [0.05, -2])
    np.testing.assert_allclose(v, [0.00025, 0.4])


def test_epsilon_stands_outside_the_bias_correction_in_adam_and_inside_in_lamb() -> None:
    settings = {"learning_rate": 1.0, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1.0}
    w, _, _ = reference.adam(reference.new_state([0.0]), [1.0], 1, **settings)
    # sqrt(1 - beta_2) / (1 - beta_1) * (1 - beta_1) / (sqrt(1 - beta_2) + 1)
    assert w[0] == pytest.approx(-np.sqrt(0.001) / (np.sqrt(0.001) + 1))
    w, _, _ = reference.lamb(reference.new_state([0.0]), [1.0], 1, **settings)
    assert w[0] == pytest.approx(-0.5)


def test_lazy_adam_with_all_rows_present_is_adam() -> None:
    rng = np.random.default_rng(0)
    lazy = dense = reference.new_state(rng.normal(size=(3, 2)))
    for t in range(1, 5):
        g = rng.normal(size=(3, 2))
        dense = reference.adam(dense, g, t)
        lazy = reference.lazy_adam(lazy, [2, 0, 1], g[[2, 0, 1]], t)
    for one, other in zip(lazy, dense, strict=True):
        np.testing.assert_array_equal(one, other)


def test_lazy_adam_leaves_its_argument_and_absent_rows_alone() -> None:
    state = reference.new_state(np.ones((3, 2)))
    after = reference.lazy_adam(state, [1], np.ones((1, 2)), 1)
    np.testing.assert_array_equal(state[0], np.ones((3, 2)))
    np.testing.assert_array_equal(after[0][[0, 2]], np.ones((2, 2)))


def test_dense_gradient_sums_repeated_rows() -> None:
    g = reference.dense_gradient([1, 1, 0], [[1], [2], [4]], (3, 1))
    np.testing.assert_array_equal(g, [[4], [3], [0]])


def test_one_lamb_step_by_hand() -> None:
    # u = sign(g) for epsilon 0, its norm is sqrt(2); the norm of w is 5.
    w, _, _ = reference.lamb(
        reference.new_state([3, 4]), [7.0, -2.0], 1, learning_rate=0.1, epsilon=0.0
    )
    np.testing.assert_allclose(w, [3 - 0.5 / np.sqrt(2), 4 + 0.5 / np.sqrt(2)])
