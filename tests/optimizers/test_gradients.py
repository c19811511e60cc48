"""Clipping must see the gradient that is applied: rows summed, absent rows zero, nothing dense."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LazyAdam, OptimizerArgumentError, gradients
from rowstep.optimizers.sparse_rows import RowGradient

SHAPE = (4, 2)
CLIPS = ({"clipnorm": 1.0}, {"clipvalue": 0.5}, {"global_clipnorm": 1.0})


def sparse_and_dense() -> tuple[tf.IndexedSlices, tf.Tensor]:
    """Return one gradient in both forms; row 1 is there twice, once with the opposite sign."""
    values = tf.constant([[3.0, 1.0], [-2.0, 1.0], [0.5, -2.0]])
    slices = tf.IndexedSlices(values, tf.constant([1, 1, 3]), tf.constant(SHAPE))
    return slices, tf.convert_to_tensor(slices)


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: next(iter(clip)))
def test_a_sparse_gradient_is_clipped_like_the_dense_one(clip: dict[str, float]) -> None:
    # From zero state, the first moment after one step is a tenth of the clipped gradient.
    moments = []
    bias_gradient = tf.constant([2.0])
    for gradient in sparse_and_dense():
        table, bias = (
            keras.Variable(np.ones(SHAPE, np.float32), name="table"),
            keras.Variable([0.0], name="b"),
        )
        optimizer = LazyAdam(**clip)
        optimizer.apply([gradient, bias_gradient], [table, bias])
        moments.append([np.array(optimizer.get_slot(v, "m")) * 10 for v in (table, bias)])
    np.testing.assert_allclose(moments[0][0], moments[1][0], rtol=1e-6)
    np.testing.assert_allclose(moments[0][1], moments[1][1], rtol=1e-6)
    dense, joint = sparse_and_dense()[1].numpy(), 2.0
    norm = np.linalg.norm(dense)
    expected = {
        "clipnorm": dense / norm,
        "clipvalue": np.clip(dense, -0.5, 0.5),
        "global_clipnorm": dense / np.hypot(norm, joint),
    }[next(iter(clip))]
    np.testing.assert_allclose(moments[0][0], expected, rtol=1e-6)


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: next(iter(clip)))
def test_clipping_does_not_make_a_sparse_gradient_dense(clip: dict[str, float]) -> None:
    num_rows = 12_345
    table = keras.Variable(np.ones((num_rows, 2), np.float32), name="table")
    optimizer = LazyAdam(**clip)
    optimizer.build([table])

    @tf.function
    def step(values: tf.Tensor, row_ids: tf.Tensor) -> None:
        optimizer.apply([tf.IndexedSlices(values, row_ids, (num_rows, 2))], [table])

    graph = step.get_concrete_function(
        tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int64)
    ).graph
    large = [
        op.name for op in graph.get_operations() for out in op.outputs if num_rows in out.shape
    ]
    assert large == []


def test_a_gradient_that_is_short_enough_is_left_as_it_is() -> None:
    gradient = tf.constant([0.3, -0.4])
    for clip in (gradients.by_norm, gradients.by_global_norm, gradients.by_value):
        np.testing.assert_array_equal(clip([gradient], 0.5)[0], gradient)
    np.testing.assert_allclose(gradients.by_norm([gradient], 0.25)[0], gradient / 2)


def test_a_gradient_of_zeros_is_clipped_to_zeros() -> None:
    rows = RowGradient(tf.constant([1]), tf.zeros((1, 2)))
    np.testing.assert_array_equal(gradients.by_norm([rows], 1.0)[0].row_grads, [[0, 0]])


def test_a_gradient_that_merely_broadcasts_is_refused() -> None:
    table = keras.Variable(np.ones(SHAPE), name="table")
    optimizer = LazyAdam()
    with pytest.raises(
        OptimizerArgumentError,
        match=r"LazyAdam, table: a gradient must have the variable's shape. Got \(1, 2\)",
    ):
        optimizer.apply([tf.ones((1, 2))], [table])
    np.testing.assert_array_equal(np.array(table), np.ones(SHAPE))
    assert int(optimizer.iterations) == 0


def test_a_variable_without_gradient_is_left_alone_and_named() -> None:
    used, unused = keras.Variable([1.0], name="used"), keras.Variable([1.0], name="unused")
    optimizer = LazyAdam(0.1)
    with pytest.warns(UserWarning, match="No gradient reached unused"):
        optimizer.apply([tf.constant([1.0]), None], [used, unused])
    assert np.array(unused)[0] == 1.0
    assert np.array(used)[0] < 1.0


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ([None], "at least one variable must have a gradient. Got None for w"),
        ([], "one gradient for each. Got 0 gradients for 1 variables"),
    ],
)
def test_a_step_without_gradients_is_refused(grads: list[Any], message: str) -> None:
    variable = keras.Variable([1.0], name="w")
    with pytest.raises(OptimizerArgumentError, match=message):
        LazyAdam().apply(grads, [variable])
