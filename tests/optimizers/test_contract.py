"""What every optimizer of every adapter must do, against the NumPy float64 reference.

The matrix is optimizer x adapter x dtype x dense or sparse. What concerns one optimizer or adapter
alone is tested in files of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import OPTIMIZERS, OptimizerArgumentError, StateMismatchError, reference
from rowstep.optimizers.registry import ADAPTERS, optimizer_class

NUM_ROWS, WIDTH = 7, 3
RATE = 0.0625  # exact in float32, the dtype that Keras holds learning rates in
# Rounding of the weight itself: the arithmetic is float32 for all three.
RELATIVE_ERROR = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2, "float64": 1e-9}
ABSENT = 6
"""A row that no batch has."""


class System(NamedTuple):
    """Name one cell of optimizer x adapter, with an option that makes it another one."""

    adapter: str
    name: str
    option: str = ""

    @property
    def is_lazy(self) -> bool:
        return self.name == "lazy_adam" or self.option in ("lazy", "row_trust_ratio")

    def make(self, **settings: Any) -> Any:
        options: dict[str, Any] = {self.option: True} if self.option else {}
        if self.option == "row_trust_ratio":
            options["tables"] = ["table"]
        return optimizer_class(self.name, self.adapter)(learning_rate=RATE, **options, **settings)

    def variable(self, weights: np.ndarray, dtype: str, name: str = "table") -> Any:
        if self.adapter == "keras":
            return keras.Variable(weights, dtype=dtype, name=name)
        return tf.Variable(weights, dtype=dtype, name=name)


SYSTEMS = [System(adapter, name) for adapter, names in ADAPTERS.items() for name in names]
SYSTEMS += [
    System(system.adapter, system.name, option)
    for system in SYSTEMS
    for option in {"adam_multilr": ["lazy"], "adam": ["lazy"], "lamb": ["row_trust_ratio"]}.get(
        system.name, []
    )
]
every_system = pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: "-".join(filter(None, s)))
every_dtype = pytest.mark.parametrize("dtype", RELATIVE_ERROR)
sparse_and_dense = pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return a sparse gradient a step: with repetitions, rows seen once, and rows never seen."""
    rng = np.random.default_rng(7)
    row_ids = [[1, 1, 3], [3, 0, 3, 3], [5], [1, 0, 5, 1]]
    return [(np.array(ids), rng.normal(size=(len(ids), WIDTH)) * 0.1) for ids in row_ids]


def gradient(row_ids: np.ndarray, row_grads: np.ndarray, sparse: bool, dtype: str) -> Any:
    shape = tf.constant([NUM_ROWS, WIDTH], tf.int64)
    slices = tf.IndexedSlices(tf.constant(row_grads, dtype), tf.constant(row_ids), shape)
    return slices if sparse else tf.convert_to_tensor(slices)


def expected(system: System, weights: np.ndarray, sparse: bool) -> reference.State:
    state = reference.new_state(weights)
    epsilon = {"epsilon": 1e-8} if system.adapter == "tf1" else {}
    for t, (row_ids, row_grads) in enumerate(batches(), start=1):
        g = reference.dense_gradient(row_ids, row_grads, weights.shape)
        settings = {"learning_rate": RATE, **epsilon}
        if system.option == "row_trust_ratio":
            rows = range(NUM_ROWS) if not sparse else sorted(set(row_ids.tolist()))
            for row in rows:
                new = reference.lamb(tuple(part[row] for part in state), g[row], t, **settings)
                for part, value in zip(state, new, strict=True):
                    part[row] = value
        elif system.name == "lamb":
            state = reference.lamb(state, g, t, **settings)
        elif sparse and system.is_lazy:
            state = reference.lazy_adam(state, row_ids, row_grads, t, **settings)
        else:
            state = reference.adam(state, g, t, **settings)
    return state


def train(optimizer: Any, table: Any, sparse: bool, dtype: str, steps: slice = slice(None)) -> None:
    for row_ids, row_grads in batches()[steps]:
        optimizer.apply_gradients([(gradient(row_ids, row_grads, sparse, dtype), table)])


def values(variable: Any) -> np.ndarray:
    return np.array(variable).astype(np.float64)


@pytest.fixture
def weights() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(NUM_ROWS, WIDTH))


@sparse_and_dense
@every_dtype
@every_system
def test_weights_and_state_follow_the_reference(
    system: System, dtype: str, sparse: bool, weights: np.ndarray
) -> None:
    optimizer, table = system.make(), system.variable(weights, dtype)
    train(optimizer, table, sparse, dtype)
    w, m, v = expected(system, weights, sparse)
    rtol = RELATIVE_ERROR[dtype]
    if system.adapter == "tf1":
        rtol = max(rtol, 2e-5)  # its beta powers are float32 variables, as TF1's are
    np.testing.assert_allclose(values(table), w, rtol=rtol, atol=rtol / 10)
    np.testing.assert_allclose(values(optimizer.get_slot(table, "m")), m, rtol=rtol, atol=rtol / 10)
    np.testing.assert_allclose(values(optimizer.get_slot(table, "v")), v, rtol=2 * rtol, atol=1e-8)
    slot = tf.as_dtype(optimizer.get_slot(table, "m").dtype)
    assert slot == (tf.float64 if dtype == "float64" else tf.float32)


@sparse_and_dense
@every_dtype
@every_system
def test_absent_rows_keep_their_bits_exactly_where_the_optimizer_is_lazy(
    system: System, dtype: str, sparse: bool, weights: np.ndarray
) -> None:
    optimizer, table = system.make(), system.variable(weights, dtype)
    train(optimizer, table, True, dtype, slice(1))
    before = [values(part) for part in (table, optimizer.get_slot(table, "m"))]
    # Row 1 had a gradient in the first step and has none in the second; row 3 is in both.
    train(optimizer, table, sparse, dtype, slice(1, 2))
    after = [values(part) for part in (table, optimizer.get_slot(table, "m"))]
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[1], new[1]) == (system.is_lazy and sparse)
        assert np.all(old[3] != new[3])
    np.testing.assert_array_equal(before[1][ABSENT], after[1][ABSENT])


@sparse_and_dense
@every_dtype
@every_system
def test_a_state_that_is_taken_out_and_put_back_goes_on_to_the_same_bits(
    system: System, dtype: str, sparse: bool, weights: np.ndarray
) -> None:
    through, table = system.make(), system.variable(weights, dtype)
    train(through, table, sparse, dtype)

    first, half_way = system.make(), system.variable(weights, dtype)
    train(first, half_way, sparse, dtype, slice(2))
    saved = first.get_weights()
    assert all(isinstance(array, np.ndarray) for array in saved)
    if system.adapter != "tf1":
        assert saved[0] == 2
    second, resumed = system.make(), system.variable(values(half_way), dtype)
    second.build([resumed])
    second.set_weights(saved)
    train(second, resumed, sparse, dtype, slice(2, None))
    np.testing.assert_array_equal(values(resumed), values(table))
    for old, new in zip(through.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@sparse_and_dense
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_system
def test_steps_smaller_than_the_spacing_of_half_precision_add_up(
    system: System, dtype: str, sparse: bool
) -> None:
    optimizer = optimizer_class(system.name, system.adapter)(
        learning_rate=0.001, **({"lazy": True} if system.option == "lazy" else {})
    )
    table = system.variable(np.ones((40, 16)), dtype)
    everything = tf.ones((40, 16), dtype)
    slices = tf.IndexedSlices(everything, tf.range(40), tf.constant([40, 16]))
    for _ in range(10):
        optimizer.apply_gradients([(slices if sparse else everything, table)])
    # A constant gradient moves Adam by the rate; LAMB has the length of the weights, which is 1
    # for each of them. Half the spacing of bfloat16 below 1 is twice the rate.
    np.testing.assert_allclose(values(table).mean(), 0.99, atol=0.0015)


@every_dtype
@every_system
def test_a_list_that_does_not_fit_is_refused_and_nothing_is_assigned(
    system: System, dtype: str, weights: np.ndarray
) -> None:
    optimizer, table = system.make(), system.variable(weights, dtype)
    train(optimizer, table, True, dtype)
    before = optimizer.get_weights()
    for wrong in (
        before[:-1],
        [*before, before[-1]],
        [*before[:-1], before[-1][:-1]],
        [*before[:-1], before[-1].astype("int32")],
    ):
        with pytest.raises(StateMismatchError):
            optimizer.set_weights(wrong)
    for old, new in zip(before, optimizer.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@every_dtype
@every_system
def test_bad_gradients_are_refused_before_anything_moves(
    system: System, dtype: str, weights: np.ndarray
) -> None:
    optimizer = system.make()
    table, other = system.variable(weights, dtype), system.variable(weights, dtype, "other_table")
    good = gradient(*batches()[0], True, dtype)
    optimizer.apply_gradients([(good, table), (good, other)])
    before = [values(table), values(other), *optimizer.get_weights()]
    ids = good.indices
    bad: list[Any] = [
        tf.IndexedSlices(good.values, ids - 2, good.dense_shape),
        tf.IndexedSlices(good.values, ids + NUM_ROWS, good.dense_shape),
        tf.IndexedSlices(good.values[:, :1], ids, good.dense_shape),
        tf.ones([NUM_ROWS, 1], dtype),
        tf.ones([NUM_ROWS * WIDTH], dtype),
    ]
    if system.adapter != "tf1":  # TF1's let NaN through, and so do their users' finite checks
        bad += [
            tf.IndexedSlices(good.values * float("nan"), ids, good.dense_shape),
            tf.fill([NUM_ROWS, WIDTH], tf.constant(float("inf"), dtype)),
        ]
    for wrong in bad:
        # The good gradient comes first: it must not be applied either.
        with pytest.raises((OptimizerArgumentError, tf.errors.InvalidArgumentError)):
            optimizer.apply_gradients([(good, other), (wrong, table)])
    after = [values(table), values(other), *optimizer.get_weights()]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@every_system
def test_variables_that_the_optimizer_was_not_built_on_are_refused(
    system: System, weights: np.ndarray
) -> None:
    if system.adapter == "tf1":
        pytest.skip("TF1 optimizers make slots for variables as they come")
    optimizer, table = system.make(), system.variable(weights, "float32")
    optimizer.build([table])
    stranger = system.variable(weights, "float32", "stranger_table")
    good = gradient(*batches()[0], True, "float32")
    with pytest.raises((OptimizerArgumentError, KeyError), match="stranger_table"):
        optimizer.apply_gradients([(good, stranger)])
    assert int(optimizer.iterations) == 0


@every_system
def test_minimize_equals_compute_and_apply(system: System, weights: np.ndarray) -> None:
    results = []
    for way in ("minimize", "two steps"):
        optimizer, table = system.make(), system.variable(weights, "float32")
        native = table.value if system.adapter == "keras" else table

        def loss(native: tf.Variable = native) -> tf.Tensor:
            return tf.reduce_sum(tf.gather(native, [1, 1, 2]) ** 2)

        if way == "minimize":
            optimizer.minimize(loss, var_list=[table])
        else:
            pairs = optimizer.compute_gradients(loss, var_list=[table])
            assert isinstance(pairs[0][0], tf.IndexedSlices)
            optimizer.apply_gradients(pairs)
        results.append(values(table))
    np.testing.assert_array_equal(results[0], results[1])
    assert np.all(results[0][1] != weights.astype(np.float32)[1])


@every_system
def test_many_batch_contents_need_one_trace(system: System, weights: np.ndarray) -> None:
    optimizer, table = system.make(), system.variable(weights, "float32")
    native = table.value if system.adapter == "keras" else table
    optimizer.build([table])
    num_traces = 0

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(row_ids: tf.Tensor) -> None:
        nonlocal num_traces
        num_traces += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(native, row_ids) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, native), table)])

    for row_ids in ([0], [1, 1, 2], [6, 5, 4, 3], []):
        step(tf.constant(row_ids, tf.int64))
    assert num_traces == 1


@sparse_and_dense
@pytest.mark.parametrize(
    "system", [s for s in SYSTEMS if s.adapter != "tf1"], ids=lambda s: "-".join(filter(None, s))
)
def test_compiled_by_xla_it_computes_the_same(
    system: System, sparse: bool, weights: np.ndarray
) -> None:
    def trained(compiled: bool) -> np.ndarray:
        optimizer, table = system.make(), system.variable(weights, "float32")
        optimizer.build([table])

        @tf.function(jit_compile=compiled)
        def step(given: Any) -> None:
            optimizer.apply_gradients([(given, table)])

        # The same number of ids each time: another number would be another shape to compile for.
        for ids in ([1, 1, 3], [3, 0, 3], [5, 5, 5]):
            step(gradient(np.array(ids), 0.1 * weights[ids], sparse, "float32"))
        assert step.experimental_get_tracing_count() == 1
        return values(table)

    results = [trained(False), trained(True)]
    np.testing.assert_allclose(results[1], results[0], rtol=2e-6)
    assert np.all(results[0][5] != weights.astype(np.float32)[5])


@pytest.mark.parametrize(
    "system", [s for s in SYSTEMS if s.adapter != "tf1"], ids=lambda s: "-".join(filter(None, s))
)
def test_a_config_makes_the_same_optimizer(system: System) -> None:
    for settings in (
        {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-5, "clipnorm": 2.0},
        {"global_clipnorm": 1.0, "name": "mine"},
    ):
        optimizer = system.make(**settings)
        config = optimizer.get_config()
        copy = type(optimizer).from_config(config)
        assert type(copy) is type(optimizer)
        assert copy.get_config() == config
        assert config | settings == config


@every_system
def test_the_older_name_of_the_learning_rate_reads_and_sets_it(system: System) -> None:
    if system.adapter == "tf1":
        pytest.skip("TF1 optimizers have no such attribute")
    optimizer = system.make()
    optimizer.lr = 0.25
    assert float(optimizer.learning_rate) == float(optimizer.lr) == 0.25


def test_the_registry_names_what_configs_offer() -> None:
    assert {name: optimizer_class(name) for name in ADAPTERS["keras"]} == OPTIMIZERS
    with pytest.raises(OptimizerArgumentError, match="Allowed are lazy_adam"):
        optimizer_class("lamb", "tf1")
    with pytest.raises(OptimizerArgumentError, match="adapter must be one that exists"):
        optimizer_class("lamb", "tf2")
