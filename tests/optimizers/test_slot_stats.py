"""Statistics of the state: right numbers, the same names for every optimizer, one transfer."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LAMB, LazyAdam, StateMismatchError, collect, slot_stats

PREFIX = "opt/slot_"


def built(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    with keras.name_scope("items"):
        table = keras.Variable(np.ones((4, 2), np.float32), name="embeddings")
    bias = keras.Variable(np.ones(3, np.float32), name="bias term")
    optimizer.build([table, bias])
    return [table, bias]


def step(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
    rows = tf.IndexedSlices(tf.constant([[1.0, -2.0]]), tf.constant([1]), (4, 2))
    optimizer.apply([rows, tf.constant([3.0, 0.0, -1.0])], variables)


@pytest.mark.parametrize("maker", [LazyAdam, LAMB, keras.optimizers.Adam])
def test_the_numbers_are_those_of_the_slots(maker: type[keras.optimizers.Optimizer]) -> None:
    optimizer = maker(0.1)
    step(optimizer, built(optimizer))
    m = [np.array([[0, 0], [0.1, -0.2], [0, 0], [0, 0]]), np.array([0.3, 0, -0.1])]
    v = [np.array([[0, 0], [1, 4], [0, 0], [0, 0]]) * 1e-3, np.array([9, 0, 1]) * 1e-3]
    expected = {}
    for letter, largest, arrays in (("m", "absmax", m), ("v", "max", v)):
        flat = np.concatenate([array.ravel() for array in arrays])
        expected[f"{PREFIX}{letter}/rms"] = np.sqrt(np.mean(flat**2))
        expected[f"{PREFIX}{letter}/mean"] = np.mean(flat)
        expected[f"{PREFIX}{letter}/{largest}"] = np.max(np.abs(flat))
        expected[f"{PREFIX}{letter}/zero_frac"] = 7 / 11
        for name, array in zip(("items.embeddings", "bias_term"), arrays, strict=True):
            expected[f"opt/{letter}_rms/{name}"] = np.sqrt(np.mean(array**2))
            if letter == "v":
                expected[f"opt/v_zero_frac/{name}"] = np.mean(array == 0)
    got = collect(optimizer)
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-5), name


def test_tensors_and_numbers_agree() -> None:
    optimizer = LazyAdam(0.1)
    step(optimizer, built(optimizer))
    tensors = slot_stats(optimizer)
    assert all(
        tf.is_tensor(t) and t.shape == () and t.dtype == tf.float32 for t in tensors.values()
    )
    assert {name: float(t) for name, t in tensors.items()} == collect(optimizer)


def test_the_statistics_follow_the_training() -> None:
    optimizer = LazyAdam(0.1)
    variables = built(optimizer)
    before = collect(optimizer)
    assert set(before.values()) == {0.0, 1.0}, "nothing but zeros, and a zero share of one"
    step(optimizer, variables)
    once = collect(optimizer)
    step(optimizer, variables)
    twice = collect(optimizer)
    assert before[f"{PREFIX}v/max"] < once[f"{PREFIX}v/max"] < twice[f"{PREFIX}v/max"]


def test_tiny_second_moments_are_not_rounded_to_zero() -> None:
    optimizer = LazyAdam(0.1)
    optimizer.build([keras.Variable(np.ones(2, np.float32), name="w")])
    optimizer.set_weights([np.int64(1), np.zeros(2, np.float32), np.full(2, 1e-30, np.float32)])
    # 1e-30 squared is zero in float32.
    assert collect(optimizer)[f"{PREFIX}v/rms"] == pytest.approx(1e-30, rel=1e-5)


def test_looking_at_the_state_does_not_change_it() -> None:
    results = []
    for look in (True, False):
        optimizer = LazyAdam(0.1)
        variables = built(optimizer)
        for _ in range(3):
            step(optimizer, variables)
            if look:
                collect(optimizer)
        results.append([np.array(v) for v in [*variables, *optimizer.variables]])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_optimizer_with_a_first_moment_only_has_statistics_of_that() -> None:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    step(optimizer, built(optimizer))
    assert {name.split("/")[1] for name in collect(optimizer)} == {"slot_m", "m_rms"}


def test_an_optimizer_without_state_has_no_statistics() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    built(optimizer)
    assert collect(optimizer) == {}
    assert slot_stats(optimizer) == {}


def test_an_optimizer_that_is_not_built_is_refused() -> None:
    with pytest.raises(StateMismatchError, match="must be built"):
        collect(LazyAdam())
