"""The formulas where float32 makes them hard."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import update_rules


@pytest.mark.parametrize("t", [1, 2, 1000, 10_000_000])
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.99999])
def test_bias_correction_is_right_to_float32(beta: float, t: int) -> None:
    exact = -np.expm1(t * np.log(np.float64(beta))) if beta else 1.0
    got = float(update_rules.bias_correction(beta, tf.constant(t, tf.float32)))
    # 1 - pow(beta, t) in float32 misses this by a factor of hundreds at t = 1.
    assert got == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_survive_numbers_whose_squares_do_not(scale: float) -> None:
    x = tf.constant([3.0, -4.0]) * scale
    assert float(update_rules.safe_norm(x)) == pytest.approx(5 * scale, rel=1e-6)


def test_the_norm_of_zeros_and_of_nothing_is_zero() -> None:
    assert float(update_rules.safe_norm(tf.zeros(3))) == 0.0
    assert float(update_rules.safe_norm(tf.zeros((0, 3)))) == 0.0


def test_the_trust_ratio_is_one_where_a_norm_is_zero() -> None:
    x, zero = tf.constant([3.0, 4.0]), tf.zeros(2)
    assert float(update_rules.trust_ratio(x, 2 * x)) == pytest.approx(0.5)
    assert float(update_rules.trust_ratio(x, zero)) == 1.0
    assert float(update_rules.trust_ratio(zero, x)) == 1.0


def test_a_norm_of_infinity_or_nan_is_not_hidden() -> None:
    for value in (np.inf, np.nan):
        assert not np.isfinite(update_rules.safe_norm(tf.constant([1.0, value])))
