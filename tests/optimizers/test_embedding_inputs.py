"""Ids and weights that do not fit are refused, before a row is read where that can be known."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from rowstep.optimizers import Embedding, OptimizerArgumentError


def layer_for(combiner: str | None) -> Embedding:
    return Embedding(7, 3, combiner=combiner, name="items")


IDS = tf.constant([[1, 2]])
RAGGED = tf.ragged.constant([[1, 2], [3]])


@pytest.mark.parametrize(
    ("combiner", "ids", "weights", "message"),
    [
        (None, IDS, tf.ones((1, 2)), "weights need a combiner"),
        ("sum", IDS, tf.ones((1, 3)), r"Got dense \(1, 3\) of float32 for dense \(1, 2\)"),
        ("sum", IDS, RAGGED, "kind and shape of the ids. Got ragged"),
        ("sum", IDS, tf.ones((1, 2), tf.complex64), r"must be numbers.* of complex64 for dense"),
        ("sum", IDS, tf.constant([["a", "b"]]), r"must be numbers.* of string for dense"),
        ("sum", tf.constant([1, 2]), None, r"must have shape \[B, ..., n\] with combiner='sum'"),
        (None, tf.sparse.from_dense(IDS), None, r"sparse ids must have shape \[B, n\]"),
    ],
)
def test_ids_and_weights_that_do_not_fit_are_refused(
    combiner: str | None, ids: Any, weights: Any, message: str
) -> None:
    with pytest.raises(OptimizerArgumentError, match=f"items: {message}|items: .*{message}"):
        layer_for(combiner)(ids, weights=weights)


@pytest.mark.parametrize("symbolic_weights", [False, True])
def test_symbolic_inputs_that_do_not_fit_are_refused(symbolic_weights: bool) -> None:
    weights = keras.Input((2,)) if symbolic_weights else None
    ids = keras.Input((3,) if symbolic_weights else (), dtype="int64")
    with pytest.raises(OptimizerArgumentError, match=r"items: (ids|weights) must"):
        layer_for("sum")(ids, weights=weights)


def test_weights_of_another_layout_are_refused_at_run_time() -> None:
    layer = layer_for("sum")
    ragged_weights = tf.ragged.constant([[1.0], [1.0, 1.0]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="weights must have the shape"):
        layer(RAGGED, weights=ragged_weights)

    @tf.function(input_signature=[tf.TensorSpec([None, None], t) for t in (tf.int32, tf.float32)])
    def rows(ids: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        return layer(ids, weights=weights)

    with pytest.raises(tf.errors.InvalidArgumentError, match="weights must have the shape"):
        rows(IDS, tf.ones((1, 1)))
