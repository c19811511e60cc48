"""State goes out and comes back whole, by name, or is refused before anything changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LAMB, OPTIMIZERS, Embedding, LazyAdam, StateMismatchError, state

MAKERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {
    **OPTIMIZERS,
    "keras_adam": keras.optimizers.Adam,
    "keras_sgd": lambda rate=0.01: keras.optimizers.SGD(rate, momentum=0.9),
}


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((2,), dtype="int64", name="ids")
    rows = keras.layers.Flatten(name="flat")(Embedding(9, 3, name="items")(ids))
    return keras.Model(ids, keras.layers.Dense(1, name="score")(rows))


def train(model: keras.Model, optimizer: Any, steps: range) -> None:
    for step in steps:
        rng = np.random.default_rng(step)
        ids = tf.constant(rng.integers(0, 9, (8, 2)))
        labels = tf.constant(rng.normal(size=(8, 1)), tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids) - labels) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def trained(maker: Callable[..., Any] = LazyAdam) -> tuple[keras.Model, Any]:
    model = make_model()
    optimizer = maker(0.05)
    train(model, optimizer, range(3))
    return model, optimizer


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert list(one) == list(other)
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)


@pytest.mark.parametrize("name", MAKERS)
def test_saving_mid_run_and_going_on_equals_never_stopping(name: str) -> None:
    model, optimizer = trained(MAKERS[name])
    saved = state.named_variables(model.variables), state.named_state(optimizer)
    train(model, optimizer, range(3, 6))

    resumed_model, resumed_optimizer = make_model(), MAKERS[name](0.9)
    resumed_optimizer.build(resumed_model.trainable_variables)
    state.load_named_variables(resumed_model.variables, saved[0])
    state.load_named_state(resumed_optimizer, saved[1])
    train(resumed_model, resumed_optimizer, range(3, 6))

    assert_same(
        state.named_variables(model.variables), state.named_variables(resumed_model.variables)
    )
    assert_same(state.named_state(optimizer), state.named_state(resumed_optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_lists_go_round_before_the_first_step(name: str) -> None:
    _, optimizer = trained(OPTIMIZERS[name])
    weights = optimizer.get_weights()
    fresh = OPTIMIZERS[name](0.05)
    fresh.build(make_model().trainable_variables)
    fresh.set_weights(weights)
    for one, other in zip(weights, fresh.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(fresh.iterations) == 3


def test_the_list_is_iterations_then_slots_without_the_learning_rate() -> None:
    model, optimizer = trained()
    weights = optimizer.get_weights()
    assert all(type(array) is np.ndarray for array in weights)
    assert weights[0].shape == () and weights[0] == 3
    assert [w.shape for w in weights[1:]] == [
        tuple(v.shape) for v in model.trainable_variables for _ in range(2)
    ]
    by_schedule = LazyAdam(keras.optimizers.schedules.CosineDecay(0.1, 5))
    by_schedule.build(model.trainable_variables)
    assert len(by_schedule.get_weights()) == len(weights)


def test_keys_are_variable_path_and_slot() -> None:
    _, optimizer = trained()
    assert list(optimizer.named_state()) == [
        "iterations",
        "learning_rate",
        "items/embeddings/momentum",
        "items/embeddings/velocity",
        "score/kernel/momentum",
        "score/kernel/velocity",
        "score/bias/momentum",
        "score/bias/velocity",
    ]


def test_a_learning_rate_changed_in_mid_training_comes_back() -> None:
    model, optimizer = trained()
    optimizer.learning_rate = 0.03125
    fresh = LazyAdam(0.05)
    fresh.build(model.trainable_variables)
    fresh.load_named_state(optimizer.named_state())
    assert float(fresh.learning_rate) == 0.03125


def test_the_name_of_a_keras_optimizer_is_not_part_of_its_keys() -> None:
    # Keras counts unnamed optimizers in the process; a resumed process may count differently.
    keys = []
    for _ in range(2):
        optimizer = keras.optimizers.Adam()
        optimizer.build(make_model().trainable_variables)
        keys.append(list(state.named_state(optimizer)))
    assert keys[0] == keys[1]
    assert keys[0][:3] == ["iterations", "learning_rate", "items_embeddings_momentum"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop(), "Got 6 arrays where 7 are needed"),
        (lambda w: w.append(w[-1]), "Got 8 arrays where 7 are needed"),
        (lambda w: w.clear(), "Got 0 arrays where 7 are needed"),
        (
            lambda w: w.__setitem__(1, w[1].T.copy()),
            r"items/embeddings/momentum of shape \(3, 9\) instead of \(9, 3\)",
        ),
        (
            lambda w: w.__setitem__(2, w[2].astype(np.float64)),
            "items/embeddings/velocity of dtype float64 instead of float32",
        ),
        (
            lambda w: w.__setitem__(0, np.float32(3)),
            "iterations of dtype float32 instead of int64",
        ),
        (
            lambda w: w.__setitem__(slice(1, 5), [w[3], w[4], w[1], w[2]]),
            r"score/kernel/momentum of shape \(9, 3\) instead of \(6, 1\)",
        ),
        (
            lambda w: w.__setitem__(slice(1, 3), [w[2], w[1]]),
            "items/embeddings/velocity with negative numbers",
        ),
    ],
    ids=["short", "long", "empty", "shape", "dtype", "iterations", "swapped", "slots swapped"],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_assigned(
    edit: Callable[[list[np.ndarray]], Any], message: str
) -> None:
    _, optimizer = trained()
    before = optimizer.named_state()
    weights = [array + np.ones((), array.dtype) for array in optimizer.get_weights()]
    weights[1] = -weights[1]
    edit(weights)
    with pytest.raises(StateMismatchError, match=message):
        optimizer.set_weights(weights)
    assert_same(before, optimizer.named_state())


def test_all_misfits_of_a_named_state_are_named_at_once() -> None:
    _, optimizer = trained()
    before = optimizer.named_state()
    wrong = {key: array * 0 for key, array in before.items()}
    del wrong["score/bias/momentum"]
    wrong["scores/bias/momentum"] = np.zeros(1, np.float32)
    wrong["items/embeddings/momentum"] = np.zeros((9, 4), np.float32)
    wrong["iterations"] = np.int32(0)
    with pytest.raises(StateMismatchError) as caught:
        optimizer.load_named_state(wrong)
    message = str(caught.value)
    assert message.startswith("LazyAdam.load_named_state: the state must fit the variables")
    for part in (
        "no score/bias/momentum",
        "unexpected scores/bias/momentum",
        "items/embeddings/momentum of shape (9, 4) instead of (9, 3)",
        "iterations of dtype int32 instead of int64",
        "Nothing was assigned.",
    ):
        assert part in message
    assert_same(before, optimizer.named_state())


def test_a_state_saved_with_a_schedule_does_not_load_into_a_plain_learning_rate() -> None:
    model, optimizer = trained()
    scheduled = LazyAdam(keras.optimizers.schedules.CosineDecay(0.1, 5))
    scheduled.build(model.trainable_variables)
    with pytest.raises(StateMismatchError, match="no learning_rate"):
        optimizer.load_named_state(scheduled.named_state())
    with pytest.raises(StateMismatchError, match="unexpected learning_rate"):
        scheduled.load_named_state(optimizer.named_state())


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_that_is_not_built_has_no_state(name: str) -> None:
    optimizer = MAKERS[name](0.1)
    for call in (
        lambda: state.get_weights(optimizer),
        lambda: state.set_weights(optimizer, []),
        lambda: state.named_state(optimizer),
        lambda: state.iter_named_state(optimizer),
        lambda: state.load_named_state(optimizer, {}),
    ):
        with pytest.raises(StateMismatchError, match=r"must be built.*optimizer.build\("):
            call()


def test_iterated_arrays_are_read_only_and_copies_are_not() -> None:
    _, optimizer = trained()
    for key, array in optimizer.iter_named_state():
        assert not array.flags.writeable, key
    for key, array in optimizer.named_state().items():
        assert array.flags.writeable and array.flags.owndata, key


def test_iterating_copies_nothing_on_a_cpu() -> None:
    _, optimizer = trained()
    addresses = [
        {key: a.__array_interface__["data"][0] for key, a in optimizer.iter_named_state()}
        for _ in range(2)
    ]
    key = "items/embeddings/momentum"
    assert addresses[0][key] == addresses[1][key]


def test_copies_do_not_follow_later_steps() -> None:
    model, optimizer = trained()
    copy = optimizer.named_state()
    frozen = {key: array.copy() for key, array in copy.items()}
    train(model, optimizer, range(3, 5))
    assert_same(copy, frozen)


def test_half_precision_variables_go_round() -> None:
    variables = [keras.Variable([1.5, 2], dtype="bfloat16", name="w")]
    saved = state.named_variables(variables)
    assert str(saved["w"].dtype) == "bfloat16"
    other = [keras.Variable([0, 0], dtype="bfloat16", name="w")]
    state.load_named_variables(other, saved)
    np.testing.assert_array_equal(np.array(other[0]), np.array(variables[0]))


def test_variables_of_one_path_are_numbered_in_order() -> None:
    variables = [keras.Variable([float(i)], name="w") for i in range(3)]
    assert list(state.named_variables(variables)) == ["w", "w#2", "w#3"]
    optimizer = LAMB()
    optimizer.build(variables)
    assert "w#3/velocity" in optimizer.named_state()


def test_a_keras_file_brings_the_whole_state_back(tmp_path: Path) -> None:
    model = make_model()
    model.compile(LazyAdam(0.05, clipnorm=1.0), "mse")
    model.fit(np.zeros((8, 2), np.int64), np.ones(8), batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert_same(model.optimizer.named_state(), loaded.optimizer.named_state())
    assert int(loaded.optimizer.iterations) == 2


@pytest.mark.parametrize("built_first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tensorflow_checkpoint_brings_the_whole_state_back(
    name: str, built_first: bool, tmp_path: Path
) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "ckpt"))
    other_model, other = make_model(), OPTIMIZERS[name](0.9)
    if built_first:
        other.build(other_model.trainable_variables)
    tf.train.Checkpoint(model=other_model, optimizer=other).restore(path)
    for m, o in ((model, optimizer), (other_model, other)):
        train(m, o, range(3, 5))
    assert_same(optimizer.named_state(), other.named_state())
    assert_same(
        state.named_variables(model.variables), state.named_variables(other_model.variables)
    )


def test_a_pickled_optimizer_keeps_its_config() -> None:
    optimizer = LAMB(0.05, exclude_from_weight_decay=["bias"])
    copy = pickle.loads(pickle.dumps(optimizer))
    assert copy.get_config() == optimizer.get_config()


def test_slots_are_found_by_variable_and_either_name() -> None:
    model, optimizer = trained()
    table = model.trainable_variables[0]
    assert optimizer.get_slot_names() == ["momentum", "velocity"]
    assert optimizer.get_slot(table, "m") is optimizer.get_slot(table.value, "momentum")
    with pytest.raises(ValueError, match="Its slots are momentum, velocity"):
        optimizer.get_slot(table, "vhat")
    with pytest.raises(ValueError, match="every variable must be one that"):
        optimizer.get_slot(keras.Variable([1.0], name="other"), "m")


def test_an_optimizer_takes_no_new_variables_once_it_is_built() -> None:
    model, optimizer = trained()
    other = keras.Variable([1.0], name="other")
    with pytest.raises(ValueError, match=r"Got other\. It knows items/embeddings"):
        optimizer.apply([tf.constant([1.0])], [other])
    num_variables = len(optimizer.variables)
    optimizer.build(model.trainable_variables)
    assert len(optimizer.variables) == num_variables
