"""Weight decay apart from the gradient: of rows that are present, and of nothing excluded."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LAMB, AdamMultilr, LazyAdam, OptimizerArgumentError

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("option_cases")
sys.path.pop(0)

DECAY = 0.5
KEPT = 1 - cases.RATE * DECAY
"""Share of the weights that is left after a step without gradient."""


def decayed(
    optimizer: Any, names: tuple[str, ...] = ("dense/kernel", "dense/bias", "norm/gamma")
) -> dict[str, float]:
    """Return which share of each variable is left after a step with gradients of zero."""
    variables = cases.variables({name: np.full((2, 2), 4.0) for name in names})
    cases.run(optimizer, variables, [{name: np.zeros((2, 2), np.float32) for name in names}])
    return {name: float(np.array(v)[0, 0]) / 4.0 for name, v in variables.items()}


@pytest.mark.parametrize("maker", ["lazy_adam", "adam_multilr"])
def test_weights_decay_apart_from_the_gradient(maker: str) -> None:
    shares = decayed(cases.make(maker, weight_decay=DECAY))
    assert list(shares.values()) == pytest.approx([KEPT] * 3, rel=1e-6)
    assert set(decayed(cases.make(maker, weight_decay=0.0)).values()) == {1.0}


@pytest.mark.parametrize(
    ("maker", "decays_absent_rows"), [("lazy_adam", False), ("adam_multilr", True)]
)
def test_of_a_sparse_gradient_lazy_optimizers_decay_the_rows_present(
    maker: str, decays_absent_rows: bool
) -> None:
    optimizer = cases.make(maker, weight_decay=DECAY)
    variables = cases.variables({"embeddings": np.full((4, 2), 4.0)})
    zeros = (np.array([1, 1, 3]), np.zeros((3, 2), np.float32))
    cases.run(optimizer, variables, [{"embeddings": zeros}])
    share = np.array(variables["embeddings"])[:, 0] / 4.0
    absent = KEPT if decays_absent_rows else 1.0
    # Row 1 is named twice and decays once.
    np.testing.assert_allclose(share, [absent, KEPT, absent, KEPT], rtol=1e-6)


def test_dense_training_decays_as_keras_adamw_does() -> None:
    mine, stock = LazyAdam(0.1, weight_decay=0.2), keras.optimizers.AdamW(0.1, weight_decay=0.2)
    kernels = []
    for optimizer in (mine, stock):
        variable = keras.Variable(cases.weights()[cases.KERNEL].astype(np.float32), name="kernel")
        for call in cases.calls():
            optimizer.apply([tf.constant(call[cases.KERNEL])], [variable])
        kernels.append(np.array(variable))
    np.testing.assert_allclose(kernels[0], kernels[1], rtol=1e-4, atol=1e-5)


def test_variables_are_excluded_by_name_or_as_they_are() -> None:
    optimizer = cases.make("lazy_adam", weight_decay=DECAY)
    optimizer.exclude_from_weight_decay(var_names=["bias$", "^norm/"])
    shares = decayed(optimizer)
    assert shares["dense/bias"] == shares["norm/gamma"] == 1.0
    assert shares["dense/kernel"] == pytest.approx(KEPT, rel=1e-6)

    optimizer = cases.make("adam_multilr", weight_decay=DECAY)
    variables = cases.variables({name: np.full((2,), 4.0) for name in ("a", "b")})
    optimizer.exclude_from_weight_decay(var_list=[variables["b"]])
    cases.run(optimizer, variables, [{name: np.zeros(2, np.float32) for name in "ab"}])
    np.testing.assert_allclose(np.array(variables["a"]), 4.0 * KEPT, rtol=1e-6)
    np.testing.assert_array_equal(np.array(variables["b"]), [4.0, 4.0])


def test_lamb_leaves_the_same_variables_out() -> None:
    optimizer = LAMB(cases.RATE, weight_decay_rate=DECAY)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    shares = decayed(optimizer)
    assert shares["dense/bias"] == 1.0 and shares["dense/kernel"] < 1.0


@pytest.mark.parametrize("maker", [LazyAdam, AdamMultilr, LAMB])
def test_exclusions_go_along_with_the_config(maker: Any) -> None:
    decay = "weight_decay_rate" if maker is LAMB else "weight_decay"
    optimizer = maker(cases.RATE, **{decay: DECAY})
    listed = keras.Variable(np.ones(2), name="listed")
    optimizer.exclude_from_weight_decay([listed], var_names=["bias"])
    config = keras.saving.serialize_keras_object(optimizer)
    copy = keras.saving.deserialize_keras_object(config)
    assert copy.get_config() == optimizer.get_config()
    with pytest.warns(UserWarning, match="excluded from weight decay were listed, which are not"):
        shares = decayed(copy, ("dense/bias", "dense/kernel"))
    assert shares["dense/bias"] == 1.0 and shares["dense/kernel"] < 1.0
    # A variable of the same path, in a process that built the model again.
    again = keras.Variable(np.ones(2), name="listed")
    other = maker.from_config(optimizer.get_config())
    other.apply([tf.zeros(2)], [again])
    np.testing.assert_array_equal(np.array(again), [1.0, 1.0])


def test_excluding_is_refused_once_slots_exist() -> None:
    optimizer = cases.make("lazy_adam", weight_decay=DECAY)
    optimizer.build([keras.Variable(np.ones(2), name="w")])
    with pytest.raises(OptimizerArgumentError, match="must not be built yet"):
        optimizer.exclude_from_weight_decay(var_names=["w"])


def test_a_string_is_not_a_list_of_names() -> None:
    with pytest.raises(OptimizerArgumentError, match=r"Got the string 'bias'. Write \['bias'\]"):
        LazyAdam(weight_decay=0.1).exclude_from_weight_decay(var_names="bias")
