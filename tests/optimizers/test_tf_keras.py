"""The tf_keras optimizers: the numbers of the Keras 3 ones, under the methods of tf_keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import rowstep.optimizers
import rowstep.optimizers.tf_keras
from rowstep.optimizers import OptimizerArgumentError
from rowstep.optimizers.tf_keras import LAMB, AdamMultilr, LazyAdam

NAMES = ["LazyAdam", "LAMB", "AdamMultilr"]
NUM_ROWS, WIDTH = 7, 3
ROW_IDS = [[1, 1, 3], [3, 0, 3, 3], [5], [1, 0, 5, 1]]


def gradient(row_ids: list[int], seed: int, sparse: bool, dtype: str) -> Any:
    values = np.random.default_rng(seed).normal(size=(len(row_ids), WIDTH)) * 0.1
    slices = tf.IndexedSlices(
        tf.constant(values, dtype),
        tf.constant(row_ids),
        tf.constant([NUM_ROWS, WIDTH], tf.int64),
    )
    return slices if sparse else tf.convert_to_tensor(slices)


def both_trained(
    name: str, settings: dict[str, Any], sparse: bool = True, dtype: str = "float32"
) -> tuple[Any, Any, tf.Variable, tf.Variable]:
    """Train a table and a bias with the optimizers of both Keras, on the same gradients."""
    one = getattr(rowstep.optimizers, name)(0.0625, **settings)
    other = getattr(rowstep.optimizers.tf_keras, name)(0.0625, **settings)
    table = np.random.default_rng(3).normal(size=(NUM_ROWS, WIDTH))
    with keras.name_scope("items"):
        ours = [keras.Variable(table, dtype=dtype, name="embeddings")]
    ours += [keras.Variable(np.ones(WIDTH), dtype=dtype, name="bias")]
    theirs = [tf.Variable(table, dtype=dtype, name="items/embeddings")]
    theirs += [tf.Variable(np.ones(WIDTH), dtype=dtype, name="bias")]
    for seed, row_ids in enumerate(ROW_IDS):
        grads = [gradient(row_ids, seed, sparse, dtype), tf.constant([0.5, -0.1, seed], dtype)]
        one.apply_gradients(zip(grads, ours, strict=True))
        other.apply_gradients(zip(grads, theirs, strict=True))
    return one, other, ours[0].value, theirs[0]


def assert_same_state(one: Any, other: Any) -> None:
    states = one.named_state(), other.named_state()
    assert list(states[0]) == list(states[1])
    for key in states[0]:
        np.testing.assert_array_equal(states[0][key], states[1][key], err_msg=key)


def minimized(optimizer: Any, start: Any = 1.0, num_steps: int = 1) -> float:
    """Return a number after steps with gradient 1: each is as long as the learning rate."""
    variable = tf.Variable(start, name="w")
    for _ in range(num_steps):
        optimizer.minimize(lambda: variable * 1.0, [variable])
    return float(variable)


# --- the same numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_state_equal_those_of_keras_3_to_the_bit(
    name: str, dtype: str, sparse: bool
) -> None:
    one, other, our_table, their_table = both_trained(name, {}, sparse, dtype)
    np.testing.assert_array_equal(our_table.numpy(), their_table.numpy())
    assert_same_state(one, other)
    assert list(other.named_state()) == [
        "iterations",
        "learning_rate",
        *(f"{v}/{s}" for v in ("items/embeddings", "bias") for s in ("momentum", "velocity")),
    ]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LazyAdam", {"clipnorm": 0.05, "decay": 0.5}),
        ("LazyAdam", {"clipnorm": 0.05, "clip_before_sum": True}),
        ("LazyAdam", {"global_clipnorm": 0.05, "clipvalue": 0.04}),
        ("LazyAdam", {"weight_decay": 0.1, "idle_decay": True, "loss_scale_factor": 8.0}),
        ("LazyAdam", {"bias_correction": "visits", "row_velocity": True}),
        ("LazyAdam", {"gradient_accumulation_steps": 2}),
        ("LazyAdam", {"state_dtype": "bfloat16", "seed": 4}),
        ("LAMB", {"weight_decay_rate": 0.1, "exclude_from_weight_decay": ["bias$"]}),
        ("LAMB", {"row_trust_ratio": True, "trust_ratio_clip": (0.5, 1.5)}),
        ("AdamMultilr", {"amsgrad": True, "weight_decay": 0.1}),
        ("AdamMultilr", {"pattern_lrs": [{"patterns": ["bias$"], "lr": 0.5}], "lazy": True}),
    ],
    ids=str,
)
def test_options_mean_the_same_in_both_keras(name: str, settings: dict[str, Any]) -> None:
    one, other, our_table, their_table = both_trained(name, settings)
    _, _, plain, _ = both_trained(name, {})
    np.testing.assert_array_equal(our_table.numpy(), their_table.numpy())
    assert np.any(their_table.numpy() != plain.numpy()) or "bias" in str(settings)
    assert_same_state(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_update_step_updates_one_variable_and_counts_nothing(name: str) -> None:
    table = tf.Variable(np.ones((NUM_ROWS, WIDTH)), dtype=tf.float32, name="items/embeddings")
    same = tf.Variable(table, name="items/embeddings")
    optimizer, other = (getattr(rowstep.optimizers.tf_keras, name)(0.1) for _ in range(2))
    optimizer.build([table])
    optimizer.update_step(gradient([1, 1], 0, True, "float32"), table)
    assert int(optimizer.iterations) == 0
    other.apply_gradients([(gradient([1, 1], 0, True, "float32"), same)])
    np.testing.assert_array_equal(table.numpy(), same.numpy())


def test_an_average_starts_from_the_weights_before_the_first_step() -> None:
    # The case and its numbers are tf_keras' testMovingAverageOptimizer; gradients of 1 make steps
    # of exactly the learning rate. The Keras 3 optimizer starts it after the first step: -0.25.
    optimizer = LazyAdam(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    variable = tf.Variable(2.0, name="w")
    after = []
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant(1.0), variable)])
        after.append(float(variable))
    np.testing.assert_allclose(after, [1.0, 0.0, -0.125], atol=1e-5)


def test_rows_that_are_absent_are_averaged_as_if_they_were_there() -> None:
    optimizer = LazyAdam(1.0, use_ema=True, ema_momentum=0.5)
    table = tf.Variable(np.full((2, 1), 2.0), dtype=tf.float32, name="items/embeddings")
    for row_ids in ([0, 1], [0], [0]):
        slices = tf.IndexedSlices(tf.ones((len(row_ids), 1)), tf.constant(row_ids), (2, 1))
        optimizer.apply_gradients([(slices, table)])
    optimizer.finalize_variable_values([table])
    # Row 1 stays at 1: its average is 1.5, 1.25, 1.125.
    np.testing.assert_allclose(table.numpy()[:, 0], [-0.125, 1.125], atol=1e-5)


def test_many_batch_contents_need_one_trace() -> None:
    optimizer = LazyAdam(0.1, global_clipnorm=1.0)
    table = tf.Variable(tf.ones((NUM_ROWS, WIDTH)), name="items/embeddings")
    num_traces = 0

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(row_ids: tf.Tensor) -> tf.Tensor:
        nonlocal num_traces
        num_traces += 1
        return optimizer.minimize(lambda: tf.reduce_sum(tf.gather(table, row_ids)), [table])

    optimizer.build([table])
    assert [int(step(tf.constant(ids, tf.int64))) for ids in ([0], [1, 1, 2], [])] == [1, 2, 3]
    assert num_traces == 1


def test_compiling_single_updates_is_accepted_and_not_done() -> None:
    for asked in (True, False):
        optimizer = LazyAdam(0.1, jit_compile=asked)
        assert optimizer.jit_compile is False
        assert minimized(optimizer) == pytest.approx(0.9, abs=1e-5)


# --- learning rates ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rate",
    [
        0.25,
        np.float32(0.25),
        tf.constant(0.25),
        tf.Variable(0.25),
        lambda: 0.25,
        lambda: tf.constant(0.25),
        tf_keras.optimizers.schedules.PiecewiseConstantDecay([5], [0.25, 0.0]),
    ],
    ids=["float", "numpy", "tensor", "variable", "callable", "callable tensor", "schedule"],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_learning_rate_may_be_given_in_every_form(name: str, rate: Any) -> None:
    optimizer = getattr(rowstep.optimizers.tf_keras, name)(rate)
    assert float(optimizer.learning_rate) == float(optimizer.lr) == 0.25
    assert minimized(optimizer) == pytest.approx(0.75, abs=1e-5)
    assert ("learning_rate" in optimizer.named_state()) == (
        not callable(rate) and not isinstance(rate, tf.Variable)
    )


def test_a_schedule_is_asked_for_the_step_before_it_is_counted() -> None:
    schedule = tf_keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.25, 0.0])
    optimizer = LazyAdam(schedule)
    assert minimized(optimizer, num_steps=3) == pytest.approx(0.75, abs=1e-5)
    assert float(optimizer.learning_rate) == 0.0


def test_older_arguments_have_the_meaning_they_had() -> None:
    assert minimized(LazyAdam(lr=0.25)) == pytest.approx(0.75, abs=1e-5)
    # 0.25 / (1 + 0) + 0.25 / (1 + 1)
    assert minimized(LazyAdam(0.25, decay=1.0), num_steps=2) == pytest.approx(0.625, abs=1e-5)
    with pytest.raises(OptimizerArgumentError, match="momentum is not an argument"):
        LazyAdam(momentum=0.9)


def test_a_learning_rate_can_be_set_and_is_seen_by_a_compiled_step() -> None:
    optimizer, variable = LazyAdam(0.5), tf.Variable(4.0, name="w")

    @tf.function
    def step() -> None:
        optimizer.minimize(lambda: variable * 1.0, [variable])

    step()
    optimizer.learning_rate = 0.25
    step()
    optimizer.lr = 0.125
    step()
    optimizer.learning_rate.assign(1.0)
    step()
    assert float(variable) == pytest.approx(4 - 0.5 - 0.25 - 0.125 - 1.0, abs=1e-5)


def test_a_variable_given_as_learning_rate_stays_the_users() -> None:
    rate = tf.Variable(0.5)
    optimizer = LazyAdam(rate)
    assert optimizer.learning_rate is rate
    optimizer.learning_rate = 0.25
    assert float(rate) == 0.25
    assert minimized(optimizer) == pytest.approx(0.75, abs=1e-5)
    assert optimizer.get_config()["learning_rate"] == 0.25


def test_a_schedule_is_replaced_by_a_schedule_only() -> None:
    schedule = tf_keras.optimizers.schedules.CosineDecay(0.5, 10)
    optimizer = LazyAdam(schedule)
    with pytest.raises(OptimizerArgumentError, match="whose rate is a CosineDecay"):
        optimizer.learning_rate = 0.1
    optimizer.learning_rate = tf_keras.optimizers.schedules.CosineDecay(0.25, 10)
    assert float(optimizer.learning_rate) == 0.25


def test_a_schedule_of_the_other_keras_is_refused() -> None:
    with pytest.raises(OptimizerArgumentError, match=r"Use tf_keras\.optimizers\.schedules"):
        LazyAdam(keras.optimizers.schedules.CosineDecay(0.1, 10))


# --- methods ----------------------------------------------------------------------------------


@pytest.fixture
def table() -> tf.Variable:
    return tf.Variable(np.arange(8.0).reshape(4, 2), dtype=tf.float32, name="items/embeddings")


def total(table: tf.Variable) -> Callable[[], tf.Tensor]:
    return lambda: tf.reduce_sum(tf.gather(table, [1, 1, 2]) ** 2)


@pytest.mark.parametrize("name", NAMES)
def test_all_ways_to_minimize_are_one(name: str, table: tf.Variable) -> None:
    results = []
    for way in ("callable", "tape", "third is tape", "grad_loss", "pairs"):
        optimizer = getattr(rowstep.optimizers.tf_keras, name)(0.1)
        variable, loss = tf.Variable(table, name="items/embeddings"), None
        loss = total(variable)
        with tf.GradientTape() as tape:
            value = loss()
        if way == "callable":
            count = optimizer.minimize(loss, lambda v=variable: [v])
        elif way == "tape":
            count = optimizer.minimize(value, [variable], tape=tape)
        elif way == "third is tape":  # as tf_keras' own signature has it
            count = optimizer.minimize(value, [variable], tape)
        elif way == "grad_loss":
            one = tf.constant(1.0)
            count = optimizer.minimize(value, [variable], grad_loss=one, name="a", tape=tape)
        else:
            pairs = optimizer.compute_gradients(value, [variable], tape)
            assert isinstance(pairs[0][0], tf.IndexedSlices)
            pairs = optimizer.aggregate_gradients(pairs)
            count = optimizer.apply_gradients(
                pairs, name="step", experimental_aggregate_gradients=False
            )
        assert count.numpy() == 1
        results.append(variable.numpy())
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    assert np.any(results[0] != table.numpy())


def test_a_gradient_of_the_loss_scales_the_gradients(table: tf.Variable) -> None:
    optimizer = LazyAdam(0.1)
    optimizer.minimize(total(table), [table], grad_loss=tf.constant(3.0))
    # Row 2 is [4, 5]: 0.1 * (3 * 2 * w)
    np.testing.assert_allclose(optimizer.get_slot(table, "m")[2], [2.4, 3.0], rtol=1e-6)


def test_no_pairs_do_nothing_and_no_gradients_are_an_error(table: tf.Variable) -> None:
    optimizer = LazyAdam(0.1)
    assert int(optimizer.apply_gradients([])) == 0
    with pytest.raises(OptimizerArgumentError, match="at least one variable must have a gradient"):
        optimizer.apply_gradients([(None, table)])


def test_variables_that_it_was_not_built_on_are_refused(table: tf.Variable) -> None:
    optimizer, other = LazyAdam(0.1), tf.Variable(1.0, name="other")
    optimizer.build([table])
    with pytest.raises(OptimizerArgumentError, match=r"Got other\. It knows items/embeddings"):
        optimizer.apply_gradients([(tf.constant(1.0), other)])
    assert int(optimizer.iterations) == 0


def test_a_row_id_out_of_range_stops_the_step_before_anything_moves(table: tf.Variable) -> None:
    optimizer, before = LazyAdam(0.1), table.numpy()
    slices = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, 4]), (4, 2))
    with pytest.raises(tf.errors.InvalidArgumentError, match="items/embeddings: row ids must lie"):
        optimizer.apply_gradients([(slices, table)])
    np.testing.assert_array_equal(table.numpy(), before)
    assert not any(np.any(array) for array in optimizer.get_weights())


def test_methods_of_graphs_work_in_functions_and_name_the_remedy_elsewhere(
    table: tf.Variable,
) -> None:
    optimizer = LazyAdam(0.1)
    optimizer.build([table])

    @tf.function
    def step() -> None:
        optimizer.get_updates(total(table)(), [table])

    step()
    assert int(optimizer.iterations) == 1
    np.testing.assert_allclose(table.numpy()[2], [3.9, 4.9], rtol=1e-5)
    for call in (optimizer.get_updates, optimizer.get_gradients):
        with pytest.raises(OptimizerArgumentError, match=r"use a tf\.function"):
            call(tf.constant(1.0), [table])
    with (
        tf.Graph().as_default(),
        pytest.raises(OptimizerArgumentError, match=r"the optimizer for tf\.compat"),
    ):
        LazyAdam(0.1).apply_gradients([(tf.ones(()), tf.Variable(1.0))])


def test_the_step_counter_may_be_set_before_building_and_only_then(table: tf.Variable) -> None:
    optimizer, counter = LazyAdam(0.1), tf.Variable(5, dtype=tf.int64, name="global_step")
    optimizer.iterations = counter
    optimizer.minimize(total(table), [table])
    assert optimizer.iterations is counter and int(counter) == 6
    assert optimizer.variables[0] is counter and optimizer.get_weights()[0] == 6
    with pytest.raises(OptimizerArgumentError, match="before the optimizer is built"):
        optimizer.iterations = tf.Variable(0, dtype=tf.int64)
    with pytest.raises(OptimizerArgumentError, match=r"must be an int64 tf\.Variable\. Got 3"):
        LazyAdam(0.1).iterations = 3


def test_variables_are_a_list_and_callable(table: tf.Variable) -> None:
    optimizer = LazyAdam(0.1)
    assert optimizer.variables == optimizer.variables() == optimizer.weights
    optimizer.build([table])
    slots = [optimizer.get_slot(table, slot) for slot in optimizer.get_slot_names()]
    for listed in (optimizer.variables, optimizer.variables(), optimizer.weights):
        assert [v is w for v, w in zip(listed, [optimizer.iterations, *slots], strict=True)]
    assert len(optimizer.variables) == 3


def test_variables_of_your_own_are_state_that_steps_leave_alone(table: tf.Variable) -> None:
    optimizer = LazyAdam(0.1)
    optimizer.add_variable((2,), "int64", "ones", "mine")
    optimizer.add_weight("heavy", (), initializer=tf_keras.initializers.Constant(3.0))
    start = tf.ones((4, 2))
    optimizer.add_variable_from_reference(table, "start", initial_value=start)
    optimizer.add_variable_from_reference(table, "by_row", (4, 1))
    optimizer.build([table])
    slot = optimizer.add_slot(table, "slot", tf_keras.initializers.Constant(2.0), (5,))
    assert optimizer.add_slot(table, "slot") is slot
    optimizer.minimize(total(table), [table])
    named = optimizer.named_state()
    assert list(named) == [
        "iterations",
        "learning_rate",
        "items/embeddings/momentum",
        "items/embeddings/velocity",
        "items/embeddings/slot",
        "mine",
        "heavy",
        "items/embeddings/start",
        "items/embeddings/by_row",
    ]
    np.testing.assert_array_equal(named["mine"], np.ones(2, np.int64))
    assert named["heavy"] == 3.0
    np.testing.assert_array_equal(named["items/embeddings/slot"], np.full(5, 2.0))
    np.testing.assert_array_equal(named["items/embeddings/start"], start)
    assert named["items/embeddings/by_row"].shape == (4, 1)
    assert [tuple(v.shape) for v in optimizer.variables] == [
        w.shape for w in optimizer.get_weights()
    ]


def test_slots_are_found_by_variable_and_either_name(table: tf.Variable) -> None:
    optimizer = AdamMultilr(0.1, amsgrad=True)
    optimizer.build([table])
    assert optimizer.get_slot_names() == ["momentum", "velocity", "velocity_hat"]
    assert optimizer.get_slot(table, "vhat") is optimizer.get_slot(table, "velocity_hat")
    with pytest.raises(ValueError, match="Its slots are momentum, velocity, velocity_hat"):
        optimizer.get_slot(table, "average")


def test_slots_of_half_precision_variables_are_float32() -> None:
    variable = tf.Variable(np.ones((4, 2)), dtype=tf.float16, name="items/embeddings")
    optimizer = LazyAdam(0.1, bias_correction="visits", row_velocity=True, use_ema=True)
    optimizer.build([variable])
    assert {
        slot: (optimizer.get_slot(variable, slot).dtype, *optimizer.get_slot(variable, slot).shape)
        for slot in optimizer.get_slot_names()
    } == {
        "momentum": (tf.float32, 4, 2),
        "velocity": (tf.float32, 4, 1),
        "average": (tf.float32, 4, 2),
        "average_step": (tf.int64, 4, 1),
        "num_visits": (tf.int64, 4, 1),
    }


def test_variables_excluded_from_weight_decay_do_not_decay() -> None:
    names = ["dense/kernel", "dense/bias", "norm/scale"]
    variables = [tf.Variable(1.0, name=name) for name in names]
    optimizer = LazyAdam(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[variables[2]], var_names=["bias$"])
    copy = LazyAdam.from_config(optimizer.get_config())
    for each in (optimizer, copy):
        for variable in variables:
            variable.assign(1.0)
        each.apply_gradients([(tf.constant(0.0), v) for v in variables])
        np.testing.assert_allclose([v.numpy() for v in variables], [0.95, 1, 1], rtol=1e-6)
    with pytest.raises(OptimizerArgumentError, match="must not be built yet"):
        optimizer.exclude_from_weight_decay(var_names=["kernel"])


def test_each_groups_rate_can_be_read_and_set_while_training() -> None:
    groups = [{"patterns": ["bert/"], "lr": 0.25}]
    optimizer = AdamMultilr(0.5, pattern_lrs=groups)
    variables = [tf.Variable(1.0, name="bert/kernel"), tf.Variable(1.0, name="top/kernel")]

    @tf.function
    def step() -> None:
        optimizer.apply_gradients([(tf.constant(1.0), v) for v in variables])

    step()
    optimizer.set_group_learning_rate(0, 0.125)
    step()
    assert [float(rate) for rate in optimizer.group_learning_rates] == [0.125]
    expected = [1 - 0.25 - 0.125, 0.0]
    np.testing.assert_allclose([v.numpy() for v in variables], expected, atol=1e-5)
    assert optimizer.get_config()["pattern_lrs"] == [{"patterns": ["bert/"], "lr": 0.125}]


def test_lists_of_exclusions_survive_the_config() -> None:
    optimizer = LAMB(
        weight_decay_rate=0.1, exclude_from_weight_decay=["a$"], exclude_from_layer_adaptation=[]
    )
    config = optimizer.get_config()
    assert config["exclude_from_weight_decay"] == ["a$"]
    assert config["exclude_from_layer_adaptation"] == []
    assert LAMB.from_config(config).get_config() == config
