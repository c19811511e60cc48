"""Bags of ids: combiners, weights and padding, for dense, ragged and sparse ids alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstep.optimizers import Embedding

NUM_ROWS, WIDTH, PAD = 7, 3, -1
TABLE = np.random.default_rng(3).normal(size=(NUM_ROWS, WIDTH))
COMBINERS = ["sum", "mean", "sqrtn"]

Bag = list[tuple[int, float]]


def bag_factors(bag: Bag, combiner: str) -> np.ndarray:
    """Return what each row of a bag is multiplied with, in float64."""
    weights = np.array([weight for _, weight in bag], np.float64)
    divisor = {
        "sum": 1.0,
        "mean": weights.sum(),
        "sqrtn": np.sqrt(np.square(weights).sum()),
    }[combiner]
    return weights / divisor if divisor != 0 else 0 * weights


def expected_rows(bags: list[Bag], combiner: str) -> np.ndarray:
    rows = np.zeros((len(bags), WIDTH))
    for bag, row in zip(bags, rows, strict=True):
        for (row_id, _), factor in zip(bag, bag_factors(bag, combiner), strict=True):
            row += factor * TABLE[row_id]
    return rows


def expected_gradient(bags: list[Bag], combiner: str, upstream: np.ndarray) -> np.ndarray:
    gradient = np.zeros((NUM_ROWS, WIDTH))
    for bag, above in zip(bags, upstream, strict=True):
        for (row_id, _), factor in zip(bag, bag_factors(bag, combiner), strict=True):
            gradient[row_id] += factor * above
    return gradient


def as_input(bags: list[Bag], kind: str) -> tuple[Any, Any]:
    """Return ids and weights as tensors: padded, ragged or sparse."""
    ids = tf.RaggedTensor.from_row_lengths(
        tf.constant([row_id for bag in bags for row_id, _ in bag], tf.int64),
        [len(bag) for bag in bags],
    )
    weights = ids.with_flat_values(
        tf.constant([weight for bag in bags for _, weight in bag], tf.float32)
    )
    if kind == "ragged":
        return ids, weights
    if kind == "sparse":
        return ids.to_sparse(), weights.to_sparse()
    # The weight of padding must not matter, so it is what would spoil any sum.
    return ids.to_tensor(PAD), weights.to_tensor(np.nan)


def layer_for(combiner: str | None, **arguments: Any) -> Embedding:
    return Embedding(NUM_ROWS, WIDTH, weights=TABLE, combiner=combiner, **arguments)


def sparse_gradient(
    layer: Embedding, ids: Any, weights: Any = None, upstream: Any = 1.0
) -> tuple[Any, tf.IndexedSlices]:
    with tf.GradientTape() as tape:
        rows = layer(ids, weights=weights)
        loss = tf.reduce_sum(rows * tf.cast(upstream, rows.dtype))
    gradient = tape.gradient(loss, layer.embeddings.value)
    assert isinstance(gradient, tf.IndexedSlices)
    return rows, gradient


bags_of_ids = st.lists(
    st.lists(st.tuples(st.integers(0, NUM_ROWS - 1), st.floats(0.125, 4.0, width=32)), max_size=4),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
@settings(max_examples=15, deadline=None)
@given(bags=bags_of_ids, weighted=st.booleans())
def test_bags_are_those_of_numpy(combiner: str, kind: str, bags: list[Bag], weighted: bool) -> None:
    if not weighted:
        bags = [[(row_id, 1.0) for row_id, _ in bag] for bag in bags]
    layer = layer_for(combiner, padding_id=PAD)
    ids, weights = as_input(bags, kind)
    upstream = np.linspace(-1, 2, len(bags) * WIDTH).reshape(len(bags), WIDTH)
    rows, gradient = sparse_gradient(layer, ids, weights if weighted else None, upstream)
    np.testing.assert_allclose(rows, expected_rows(bags, combiner), rtol=1e-5, atol=1e-5)
    expected = expected_gradient(bags, combiner, upstream)
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-5, atol=1e-5)
    looked_up = {row_id for bag in bags for row_id, _ in bag}
    if looked_up or kind != "dense":
        assert set(gradient.indices.numpy().tolist()) == looked_up


BAGS = [[(3, 0.5), (1, 2.0)], [], [(3, 1.5), (3, 1.0), (6, 0.25)]]


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_bags_are_those_of_embedding_lookup_sparse(
    combiner: str, weighted: bool, kind: str
) -> None:
    sparse_ids, sparse_weights = as_input(BAGS, "sparse")
    theirs = tf.nn.safe_embedding_lookup_sparse(
        tf.constant(TABLE, tf.float32),
        sparse_ids,
        sparse_weights if weighted else None,
        combiner=combiner,
    )
    ids, weights = as_input(BAGS, kind)
    ours = layer_for(combiner, padding_id=PAD)(ids, weights=weights if weighted else None)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_weights_of_ids_can_be_learned(combiner: str) -> None:
    ids, weights = as_input(BAGS, "dense")
    layer = layer_for(combiner, padding_id=PAD)

    def total(weights: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(layer(ids, weights=weights) ** 2)

    weights = tf.where(ids == PAD, 0.0, weights)
    (numeric,), (symbolic,) = reversed(tf.test.compute_gradient(total, [weights], delta=1e-2))
    np.testing.assert_allclose(symbolic, numeric, rtol=2e-2, atol=2e-2)
    np.testing.assert_array_equal(symbolic[0][np.ravel(ids) == PAD], 0)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_divisor_of_zero_gives_zeros_and_no_nan(combiner: str) -> None:
    ids = tf.constant([[1, 2], [3, 3]])
    weights = tf.Variable([[0.0, 0.0], [1.0, -1.0]])
    layer = layer_for(combiner)
    with tf.GradientTape() as tape:
        rows = layer(ids, weights=weights)
        loss = tf.reduce_sum(rows)
    np.testing.assert_array_equal(rows[0], np.zeros(WIDTH))
    for gradient in tape.gradient(loss, [layer.embeddings.value, weights]):
        assert np.isfinite(tf.convert_to_tensor(gradient)).all()
    np.testing.assert_array_equal(layer(tf.zeros((2, 0), tf.int64)), np.zeros((2, WIDTH)))


def test_without_padding_every_id_counts() -> None:
    rows = layer_for("mean")(tf.constant([[0, 0, 1]]))
    np.testing.assert_allclose(rows[0], (2 * TABLE[0] + TABLE[1]) / 3, rtol=1e-6)


def test_mask_zero_with_a_combiner_leaves_row_0_out_of_the_bag() -> None:
    layer = layer_for("mean", mask_zero=True)
    rows, gradient = sparse_gradient(layer, tf.constant([[0, 0, 1], [2, 0, 4]]))
    np.testing.assert_allclose(rows, [TABLE[1], (TABLE[2] + TABLE[4]) / 2], rtol=1e-6)
    assert set(gradient.indices.numpy()) == {1, 2, 4}
    assert layer.compute_mask(tf.constant([[0, 1]])) is None
    assert layer.get_config()["padding_id"] is None


def test_padding_without_a_combiner_gives_zero_rows() -> None:
    layer = layer_for(None, padding_id=2)
    rows, gradient = sparse_gradient(layer, tf.constant([[1, 2, 5], [2, 2, 1]]))
    expected = np.where(np.array([[[1], [0], [1]], [[0], [0], [1]]]), TABLE[[1, 2, 5]], 0)
    expected[1, 2] = TABLE[1]
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    assert set(gradient.indices.numpy()) == {1, 5}
    np.testing.assert_array_equal(
        tf.convert_to_tensor(gradient)[:, 0], np.bincount([1, 1, 5], minlength=NUM_ROWS)
    )


def test_a_row_that_is_not_finite_does_not_leak_through_padding() -> None:
    layer = layer_for("sum", padding_id=PAD)
    layer.embeddings.value.scatter_update(tf.IndexedSlices([[np.inf, np.nan, 1.0]], [6]))
    rows = layer(tf.constant([[6, PAD], [1, PAD]]))
    np.testing.assert_allclose(rows[1], TABLE[1], rtol=1e-6)


@pytest.mark.parametrize(("padding_id", "named"), [(4, 4), (-1, 0), (NUM_ROWS, 0)])
def test_a_batch_of_padding_names_one_row_with_gradient_zero(padding_id: int, named: int) -> None:
    layer = layer_for("mean", padding_id=padding_id, row_l2=1.0)
    rows, gradient = sparse_gradient(layer, tf.fill([2, 3], padding_id))
    np.testing.assert_array_equal(rows, np.zeros((2, WIDTH)))
    np.testing.assert_array_equal(gradient.indices, [named] * 6)
    np.testing.assert_array_equal(gradient.values, np.zeros((6, WIDTH)))
    assert float(layer.losses[0]) == 0.0


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_row_l2_counts_real_look_ups_by_example(kind: str) -> None:
    layer = layer_for("sum", padding_id=PAD, row_l2=0.5)
    ids, weights = as_input(BAGS, kind)
    layer(ids, weights=weights)
    expected = 0.5 * np.sum(TABLE[[3, 1, 3, 3, 6]] ** 2) / 3
    assert float(layer.losses[0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("row_id", [-2, NUM_ROWS])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_an_id_without_a_row_is_an_error_beside_padding(row_id: int, kind: str) -> None:
    ids, _ = as_input([[(row_id, 1.0), (2, 1.0)], []], kind)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{row_id} is not in \[0, 7\)"):
        layer_for("sum", padding_id=PAD)(ids)


def test_half_precision_is_summed_in_float32() -> None:
    ids = tf.zeros((1, 4096), tf.int64)
    layer = Embedding(1, 1, "ones", combiner="sum", dtype="bfloat16")
    for kind in (ids, tf.RaggedTensor.from_tensor(ids), tf.ragged.stack([ids[0]]).to_sparse()):
        assert float(layer(kind)[0, 0]) == 4096.0  # in bfloat16, 256 + 1 is 256
    mixed = Embedding(1, 1, "ones", combiner="sum", dtype="mixed_float16")
    # In float16, 2049 is 2048.
    rows, gradient = sparse_gradient(mixed, ids[:, :2], tf.constant([[2049.0, -2048.0]]))
    assert float(rows[0, 0]) == 1.0
    assert (rows.dtype, gradient.dtype) == (tf.float16, tf.float32)


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_an_empty_batch_gives_no_rows(kind: str) -> None:
    ids = tf.zeros((0, 2), tf.int64)
    ids = {
        "dense": ids,
        "ragged": tf.RaggedTensor.from_row_lengths(tf.zeros((0,), tf.int64), []),
        "sparse": tf.sparse.from_dense(ids),
    }[kind]
    rows, gradient = sparse_gradient(layer_for("mean", padding_id=PAD, row_l2=1.0), ids)
    assert rows.shape == (0, WIDTH)
    assert gradient.indices.shape == (0,)
