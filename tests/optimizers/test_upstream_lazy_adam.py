"""The tests of the LazyAdams that came before, as cases for both Keras; numbers are theirs.

The names in the docstrings are those of TensorFlow Addons' lazy_adam_test.py (TFA) and of Merlin
Models' test_optimizer.py (Merlin). Their tests never skip a row that was touched before, so plain
Adam passes them; the cases from `TOUCH_THEN_SKIP` on are what they lack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import rowstep.optimizers
import rowstep.optimizers.tf_keras
from rowstep.optimizers import OptimizerArgumentError, reference
from rowstep.optimizers.variables import native_variable


class Side(NamedTuple):
    """Hold one Keras, its optimizer, and its way to make a variable."""

    keras: Any
    lazy_adam: Any
    variable: Callable[..., Any]


SIDES = {
    "keras": Side(
        keras,
        rowstep.optimizers.LazyAdam,
        lambda value, name="var", dtype="float32": keras.Variable(value, dtype=dtype, name=name),
    ),
    "tf_keras": Side(
        tf_keras,
        rowstep.optimizers.tf_keras.LazyAdam,
        lambda value, name="var", dtype="float32": tf.Variable(value, dtype=dtype, name=name),
    ),
}
# tf_keras draws the seeds of its layers so.
pytestmark = pytest.mark.filterwarnings("ignore:non-integer arguments to randrange")


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest) -> Side:
    return SIDES[request.param]


def slices(row_ids: list[int], values: Any, num_rows: int, dtype: Any = tf.float32) -> Any:
    values = tf.constant(values, dtype)
    shape = tf.constant([num_rows, *values.shape[1:]], tf.int64)
    return tf.IndexedSlices(values, tf.constant(row_ids, tf.int32), shape)


def array(variable: Any) -> np.ndarray:
    return np.array(variable).astype(np.float64)


FIRST = [0.99900003, 0.99800005, 0.99700007]
"""What three steps with default arguments make of 1."""
SECOND = [2.99900032, 2.99800054, 2.99700072]
"""The same of 3, by a gradient that is a tenth."""


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sparse_gradients_without_repetitions(side: Side, dtype: str) -> None:
    """TFA test_sparse, Merlin test_lazy_adam_sparse, contrib testSparse."""
    optimizer = side.lazy_adam()
    variables = [
        side.variable([1.0, 1.0, 2.0], "var0", dtype),
        side.variable([3.0, 3.0, 4.0], "var1", dtype),
    ]
    gradients = [slices([0, 2], [g, g], 3, dtype) for g in (0.1, 0.01)]
    # A step is about one unit in the last place of float16, and each is rounded.
    atol = 0.005 if dtype == "float16" else 3e-7
    for first, second in zip(FIRST, SECOND, strict=True):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        np.testing.assert_allclose(array(variables[0]), [first, 1, first + 1], atol=atol)
        np.testing.assert_allclose(array(variables[1]), [second, 3, second + 1], atol=atol)
    momentum, velocity = (optimizer.get_slot(variables[0], slot) for slot in "mv")
    rtol = 1e-3 if dtype == "float16" else 1e-6  # of the gradient 0.1 itself
    np.testing.assert_allclose(momentum, [0.0271, 0, 0.0271], rtol=rtol)
    np.testing.assert_allclose(velocity, [2.997001e-5, 0, 2.997001e-5], rtol=2 * rtol)
    assert int(optimizer.iterations) == 3


@pytest.mark.parametrize("index_dtype", [tf.int32, tf.int64])
def test_a_table_is_minimized_through_a_gather(side: Side, index_dtype: tf.DType) -> None:
    """TFA and Merlin test_sparse_device_placement."""
    variable = side.variable([[1.0], [2.0]])
    ids = tf.constant([0, 1], index_dtype)
    side.lazy_adam(3.0).minimize(
        lambda: tf.reduce_sum(tf.gather(native_variable(variable), ids)), [variable]
    )
    np.testing.assert_allclose(array(variable), [[-2.0], [-1.0]], atol=1e-4)


def test_repeated_ids_equal_their_sum(side: Side) -> None:
    """TFA and Merlin test_sparse_repeated_indices."""
    repeated, aggregated = (side.variable([[1.0], [2.0]]) for _ in range(2))
    one, other = side.lazy_adam(), side.lazy_adam()
    for expected in (1.99900002, 1.99800003, 1.99700004):
        one.apply_gradients([(slices([1, 1], [[0.1], [0.1]], 2), repeated)])
        other.apply_gradients([(slices([1], [[0.2]], 2), aggregated)])
        np.testing.assert_array_equal(array(repeated), array(aggregated))
        np.testing.assert_allclose(array(repeated), [[1.0], [expected]], atol=3e-7)


@pytest.mark.parametrize(
    "rate", [0.001, lambda: 0.001, tf.constant(0.001)], ids=["number", "callable", "tensor"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dense_gradients(side: Side, rate: Any, dtype: str) -> None:
    """TFA and Merlin test_basic, test_callable_lr and test_tensor_learning_rate."""
    optimizer = side.lazy_adam(rate)
    variables = [side.variable([1.0, 2.0], "var0", dtype), side.variable([3.0, 4.0], "var1", dtype)]
    gradients = [tf.constant([g, g], dtype) for g in (0.1, 0.01)]
    for first, second in zip(FIRST, SECOND, strict=True):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        np.testing.assert_allclose(array(variables[0]), [first, first + 1], atol=4e-7)
        np.testing.assert_allclose(array(variables[1]), [second, second + 1], atol=4e-7)


def test_two_uses_of_one_optimizer_share_its_steps(side: Side) -> None:
    """TFA and Merlin test_sharing: two updates of all variables in turn."""
    optimizer = side.lazy_adam()
    variables = [side.variable([1.0, 2.0], "var0"), side.variable([3.0, 4.0], "var1")]
    gradients = [tf.constant([g, g]) for g in (0.1, 0.01)]

    def one() -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def other() -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for update, first, second in zip((one, other, one), FIRST, SECOND, strict=True):
        tf.function(update)()
        np.testing.assert_allclose(array(variables[0])[0], first, atol=3e-7)
        np.testing.assert_allclose(array(variables[1])[0], second, atol=3e-7)


def test_slots_are_made_once_for_each_variable(side: Side) -> None:
    """TFA and Merlin test_slots_unique_eager: iterations and two slots a variable."""
    variables = [side.variable(1.0, "v1"), side.variable(1.0, "v2")]
    optimizer = side.lazy_adam(1.0)
    for _ in range(2):
        optimizer.minimize(
            lambda: native_variable(variables[0]) + native_variable(variables[1]), variables
        )
    assert len(optimizer.weights) == len(optimizer.get_weights()) == 5
    assert optimizer.weights[0] is optimizer.iterations
    np.testing.assert_allclose([array(v) for v in variables], -1.0, atol=1e-5)


def test_a_serialized_optimizer_comes_back(side: Side) -> None:
    """TFA and Merlin test_serialization."""
    optimizer = side.lazy_adam(1e-4)
    config = side.keras.optimizers.serialize(optimizer)
    copy = side.keras.optimizers.deserialize(config)
    assert side.keras.optimizers.serialize(copy) == config
    assert copy.get_config() == optimizer.get_config()
    assert optimizer.get_config()["learning_rate"] == 1e-4


def model_of_tables(side: Side, num_rows: dict[str, int]) -> Any:
    layers = side.keras.layers
    inputs = {name: side.keras.Input((1,), dtype="int64", name=name) for name in num_rows}
    rows = [
        layers.Flatten()(layers.Embedding(count, 4, name=f"table_{name}")(inputs[name]))
        for name, count in num_rows.items()
    ]
    return side.keras.Model(inputs, layers.Dense(1, name="score")(layers.Concatenate()(rows)))


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_a_model_trains_with_it(side: Side, run_eagerly: bool) -> None:
    """Merlin test_lazy_adam_in_model and test_lazy_adam_in_model_by_EmbeddingTable."""
    model = model_of_tables(side, {"user": 50, "item": 30})
    model.compile(side.lazy_adam(0.05), "mse", run_eagerly=run_eagerly)
    rng = np.random.default_rng(0)
    data = {name: rng.integers(0, 20, (32, 1)) for name in ("user", "item")}
    before = model.get_weights()[0]
    losses = model.fit(data, np.ones((32, 1)), batch_size=8, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(model.get_weights()[0][20:], before[20:])


def test_it_trains_large_tables_while_another_optimizer_trains_the_rest(side: Side) -> None:
    """Merlin test_lazy_adam_for_large_embeddings: tables of 200, 20 and 90 rows, threshold 100."""
    model = model_of_tables(side, {"cat1": 200, "cat2": 20, "cat3": 90})
    large = [v for v in model.trainable_variables if v.shape[0] > 100]
    rest = [v for v in model.trainable_variables if v.shape[0] <= 100]
    assert len(large) == 1 and len(rest) == 4
    lazy, plain = side.lazy_adam(0.05), side.keras.optimizers.Adam(0.05)
    ids = {name: tf.constant([[3], [7], [3]]) for name in ("cat1", "cat2", "cat3")}
    before = array(large[0])
    losses = []
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids) - 1.0) ** 2)
        natives = [native_variable(v) for v in large + rest]
        gradients = tape.gradient(loss, natives)
        lazy.apply_gradients([(gradients[0], large[0])])
        plain.apply_gradients(zip(gradients[1:], rest, strict=True))
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    moved = np.any(array(large[0]) != before, axis=1)
    assert np.flatnonzero(moved).tolist() == [3, 7]


# --- what those tests lack ----------------------------------------------------------------------

TOUCH_THEN_SKIP = [([1, 3], [[1.0], [1.0]]), ([0], [[1.0]]), ([1], [[1.0]])]


def trained(side: Side, steps: list[Any], num_rows: int = 4, **settings: Any) -> tuple[Any, Any]:
    table = side.variable(np.ones((num_rows, 1)), "table")
    optimizer = side.lazy_adam(0.1, **settings)
    for row_ids, values in steps:
        optimizer.apply_gradients([(slices(row_ids, values, num_rows), table)])
    return table, optimizer


def test_touched_rows_do_not_drift_when_they_are_skipped(side: Side) -> None:
    expected = [
        [1, 0.9000003, 1, 0.9000003],
        [0.9255866, 0.9000003, 1, 0.9000003],
        [0.9255866, 0.8141543, 1, 0.9000003],  # Adam: .8680647, .7511946, 1, .7811992
    ]
    for count, rows in enumerate(expected, start=1):
        table, optimizer = trained(side, TOUCH_THEN_SKIP[:count])
        np.testing.assert_allclose(array(table)[:, 0], rows, rtol=1e-6)
    np.testing.assert_allclose(array(optimizer.get_slot(table, "m"))[:, 0], [0.1, 0.19, 0, 0.1])
    np.testing.assert_allclose(
        array(optimizer.get_slot(table, "v"))[:, 0], [0.001, 0.001999, 0, 0.001], rtol=1e-6
    )


def test_uneven_repetitions_are_summed_before_they_are_squared(side: Side) -> None:
    table, optimizer = trained(side, [([1, 1, 3], [[1.0], [3.0], [0.5]])])
    np.testing.assert_allclose(
        array(optimizer.get_slot(table, "m"))[:, 0], [0, 0.4, 0, 0.05], rtol=1e-6
    )
    np.testing.assert_allclose(
        array(optimizer.get_slot(table, "v"))[:, 0], [0, 0.016, 0, 0.00025], rtol=1e-6
    )


def test_a_table_read_by_gather_of_ids(side: Side) -> None:
    """The case that tells lazy from plain Adam on resource variables, where contrib's was plain."""
    table, optimizer = side.variable(np.ones((4, 2)), "table"), side.lazy_adam(0.1, epsilon=1e-8)
    expected = [[0.9, 0.9, 1, 1], [0.8, 0.9, 1, 1], [0.8, 0.9, 0.9361, 1]]
    for ids, rows in zip(([0, 1, 1], [0], [2]), expected, strict=True):

        def loss(ids: list[int] = ids) -> tf.Tensor:
            return tf.reduce_sum(tf.gather(native_variable(table), ids))

        optimizer.minimize(loss, [table])
        np.testing.assert_allclose(array(table)[:, 0], rows, atol=1e-4)


def test_a_row_that_is_present_with_zeros_moves_by_its_momentum(side: Side) -> None:
    table, _ = trained(side, [([1], [[1.0]]), ([1, 2], [[0.0], [0.0]])])
    state = reference.new_state(np.ones((4, 1)))
    state = reference.lazy_adam(state, np.array([1]), np.ones((1, 1)), 1, learning_rate=0.1)
    state = reference.lazy_adam(state, np.array([1, 2]), np.zeros((2, 1)), 2, learning_rate=0.1)
    np.testing.assert_allclose(array(table), state[0], rtol=1e-6)
    assert array(table)[1] < 0.89


def test_empty_slices_count_a_step_and_move_nothing(side: Side) -> None:
    table, optimizer = trained(side, [([1], [[1.0]]), ([], np.zeros((0, 1)))])
    np.testing.assert_allclose(array(table)[:, 0], [1, 0.9, 1, 1], rtol=1e-6)
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize("row_id", [-1, 4])
def test_ids_out_of_range_are_refused_before_anything_moves(side: Side, row_id: int) -> None:
    table, optimizer = trained(side, [([1], [[1.0]])])
    before, state = array(table), optimizer.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="row ids must lie in"):
        optimizer.apply_gradients([(slices([0, row_id], [[1.0], [1.0]], 4), table)])
    np.testing.assert_array_equal(array(table), before)
    for one, other in zip(state, optimizer.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_clipping_measures_the_summed_row(side: Side) -> None:
    # [3 + 1, 3] is of length 5; the unsummed rows would be of length sqrt(19).
    table, optimizer = trained(side, [([0, 0, 2], [[3.0], [1.0], [3.0]])], clipnorm=1.0)
    np.testing.assert_allclose(
        array(optimizer.get_slot(table, "m"))[:, 0], [0.08, 0, 0.06, 0], rtol=1e-6
    )
    table, optimizer = trained(
        side, [([0, 0, 2], [[3.0], [1.0], [3.0]])], clipnorm=1.0, clip_before_sum=True
    )
    root = np.sqrt(19)
    np.testing.assert_allclose(
        array(optimizer.get_slot(table, "m"))[:, 0], [0.4 / root, 0, 0.3 / root, 0], rtol=1e-6
    )


def test_amsgrad_is_refused(side: Side) -> None:
    with pytest.raises(OptimizerArgumentError, match=r"Use AdamMultilr\(amsgrad=True, lazy=True\)"):
        side.lazy_adam(amsgrad=True)


@pytest.mark.parametrize(("dtype", "g"), [("float16", 1e-4), ("bfloat16", 1.0)])
def test_half_precision_weights_move_by_the_learning_rate(side: Side, dtype: str, g: float) -> None:
    # Upstream a float16 weight moves by 6, and a bfloat16 one not at all.
    table, optimizer = side.variable(np.ones((4, 1)), "table", dtype), side.lazy_adam(0.1)
    for _ in range(2):
        optimizer.apply_gradients([(slices([1], [[g]], 4, dtype), table)])
    np.testing.assert_allclose(array(table)[:, 0], [1, 0.8, 1, 1], atol=0.01)
