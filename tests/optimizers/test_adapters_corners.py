"""Corners in which an adapter could lose state or numbers, for Keras 3 and tf_keras alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from rowstep.optimizers import OptimizerArgumentError, optimizer_class
from rowstep.optimizers.variables import native_variable

both = pytest.mark.parametrize("adapter", ["keras", "tf_keras"])
ROWS = np.ones((4, 2), np.float32)


def variable(adapter: str, path: str) -> Any:
    if adapter == "tf_keras":
        return tf.Variable(ROWS, name=path)
    scope, _, name = path.rpartition("/")
    with keras.name_scope(scope):
        return keras.Variable(ROWS, name=name)


def make(adapter: str, name: str = "lazy_adam", **options: Any) -> Any:
    return optimizer_class(name, adapter)(learning_rate=0.1, **options)


def rows(*row_ids: int) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.ones((len(row_ids), 2)), tf.constant(row_ids), tf.constant([4, 2]))


@both
def test_patterns_find_the_second_variable_of_a_path_too(adapter: str) -> None:
    tables = [variable(adapter, "item/embeddings") for _ in range(2)]
    lamb = make(adapter, "lamb", row_trust_ratio=True)
    groups = [{"patterns": ["embeddings$"], "lr": 0.0}]
    grouped = make(adapter, "adam_multilr", pattern_lrs=groups)
    grouped.apply_gradients([(rows(0), table) for table in tables])
    for table in tables:
        np.testing.assert_array_equal(np.array(table), ROWS)
    lamb.apply_gradients([(rows(0), table) for table in tables])
    for table in tables:
        np.testing.assert_array_equal(np.array(table)[1:], ROWS[1:])
        assert np.all(np.array(table)[0] != ROWS[0])
    assert [key for key in lamb.named_state() if "#2" in key]


@both
def test_only_the_variable_that_was_given_is_excluded_from_decay(adapter: str) -> None:
    first, second = variable(adapter, "same"), variable(adapter, "same")
    optimizer = make(adapter, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([first])
    optimizer.apply_gradients([(tf.zeros((4, 2)), first), (tf.zeros((4, 2)), second)])
    np.testing.assert_array_equal(np.array(first), ROWS)
    assert np.all(np.array(second) < ROWS)


@both
@pytest.mark.parametrize(
    "options",
    [
        {"use_ema": True, "ema_momentum": 0.5},
        {"gradient_accumulation_steps": 2},
        {"idle_decay": True, "bias_correction": "visits"},
        {"state_dtype": "bfloat16"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_checkpoint_that_waits_for_the_slots_fills_them(
    adapter: str, options: dict[str, Any], tmp_path: Path
) -> None:
    table, optimizer = variable(adapter, "item/embeddings"), make(adapter, **options)
    for row in (0, 1, 1):
        optimizer.apply_gradients([(rows(row, 2), table)])
    optimizer.add_slot(table, "mine").assign(5 * ROWS)
    native = native_variable(table)
    prefix = tf.train.Checkpoint(optimizer=optimizer, table=native).save(str(tmp_path / "c"))

    again, restored = variable(adapter, "item/embeddings"), make(adapter, **options)
    checkpoint = tf.train.Checkpoint(optimizer=restored, table=native_variable(again))
    checkpoint.restore(prefix)
    restored.build([again])
    restored.add_slot(again, "mine")
    for old, new in zip(optimizer.get_weights(), restored.get_weights(), strict=True):
        np.testing.assert_array_equal(np.asarray(old, np.float64), np.asarray(new, np.float64))


@both
def test_a_saved_model_keeps_averages_of_idle_rows_and_narrow_state(
    adapter: str, tmp_path: Path
) -> None:
    library = keras if adapter == "keras" else tf_keras
    ids = np.array([[0, 1], [1, 2]])

    def looked_up() -> Any:
        inputs = library.Input((2,), dtype="int64")
        out = library.layers.Flatten()(library.layers.Embedding(5, 2, name="item")(inputs))
        return library.Model(inputs, library.layers.Dense(1)(out))

    for options in ({"use_ema": True}, {"state_dtype": "bfloat16"}):
        model = looked_up()
        model.compile(make(adapter, **options), "mse")
        model.fit(ids, np.ones(2), epochs=3, verbose=0)
        model.fit(ids * 0 + 4, np.ones(2), epochs=2, verbose=0)
        if options.get("use_ema"):
            # fit has set the weights to their averages; from here on they differ again.
            model.optimizer.minimize(
                lambda model=model: tf.reduce_sum(model(ids)), model.trainable_variables
            )
        before = model.optimizer.named_state()
        model.save(tmp_path / "model.keras")
        for key, value in model.optimizer.named_state().items():
            np.testing.assert_array_equal(value, before[key], err_msg=key)
        loaded = library.models.load_model(tmp_path / "model.keras")
        for key, value in loaded.optimizer.named_state().items():
            np.testing.assert_array_equal(value, before[key], err_msg=key)


@both
def test_a_rate_that_is_someone_elses_variable_is_set_by_callbacks(adapter: str) -> None:
    rate, table = tf.Variable(0.1), variable(adapter, "table")
    optimizer = optimizer_class("lazy_adam", adapter)(learning_rate=rate)
    optimizer.learning_rate = 0.0
    optimizer.apply_gradients([(rows(1), table)])
    np.testing.assert_array_equal(np.array(table), ROWS)
    assert float(rate) == float(optimizer.lr) == 0.0
    with pytest.raises(OptimizerArgumentError, match=r"learning_rate must not be negative. Got -1"):
        optimizer.learning_rate = -1.0


def test_state_loads_from_a_model_whose_rate_was_a_variable(tmp_path: Path) -> None:
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer_class("lazy_adam")(learning_rate=tf.Variable(0.25)), "mse")
    model.fit(np.ones((4, 2)), np.ones(4), epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert float(loaded.optimizer.learning_rate) == 0.25
    for old, new in zip(model.optimizer.get_weights(), loaded.optimizer.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@both
def test_a_scaled_loss_takes_the_steps_of_the_loss(adapter: str) -> None:
    results = []
    for scale in (None, 1024.0):
        table = variable(adapter, "table")
        optimizer = make(adapter, loss_scale_factor=scale, clipnorm=0.5)
        native = native_variable(table)
        for ids in ([0, 1, 1], [1, 3]):
            optimizer.minimize(
                lambda ids=ids, native=native: tf.reduce_sum(tf.gather(native, ids) ** 2), [table]
            )
        results.append(np.array(table))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)
    assert np.all(results[0][[0, 1, 3]] < 1.0)


@both
@pytest.mark.parametrize(
    ("row_ids", "values"),
    [
        (tf.constant([1]), tf.ones((2, 2))),
        (tf.constant([[1, 2]]), tf.ones((2, 2))),
        (tf.constant([1.0, 2.0]), tf.ones((2, 2))),
    ],
    ids=["too few ids", "rank 2", "floats"],
)
def test_a_malformed_sparse_gradient_moves_no_other_variable(
    adapter: str, row_ids: tf.Tensor, values: tf.Tensor
) -> None:
    first, second = variable(adapter, "first"), variable(adapter, "second")
    wrong = tf.IndexedSlices(values, row_ids, tf.constant([4, 2]))
    with pytest.raises(OptimizerArgumentError, match="second: a sparse gradient must have one int"):
        make(adapter).apply_gradients([(tf.ones((4, 2)), first), (wrong, second)])
    np.testing.assert_array_equal(np.array(first), ROWS)


@both
def test_narrow_integer_ids_are_ids(adapter: str) -> None:
    results = []
    for dtype in (tf.int64, tf.uint8, tf.int16):
        table = variable(adapter, "table")
        slices = rows(1, 1, 3)
        ids = tf.cast(slices.indices, dtype)
        make(adapter).apply_gradients([(tf.IndexedSlices(slices.values, ids), table)])
        results.append(np.array(table))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@both
def test_a_variable_of_your_own_does_not_take_the_counters_place(adapter: str) -> None:
    optimizer, table = make(adapter), variable(adapter, "table")
    optimizer.build([table])
    optimizer.add_variable([2], name="iterations").assign([7.0, 8.0])
    optimizer.apply_gradients([(rows(1), table)])
    state = optimizer.named_state()
    assert state["iterations"] == 1 and state["iterations#2"].tolist() == [7.0, 8.0]
    assert optimizer.get_weights()[0] == 1
    assert len(optimizer.variables) == len({id(v) for v in optimizer.variables})
    natives = [native_variable(v) for v in optimizer.variables]
    assert not any(native is native_variable(table) for native in natives)


@both
def test_slots_go_by_their_short_names_when_they_are_added_too(adapter: str) -> None:
    optimizer, table = make(adapter), variable(adapter, "table")
    optimizer.build([table])
    assert optimizer.add_slot(table, "m") is optimizer.get_slot(table, "momentum")


@both
def test_a_variable_that_is_not_trainable_is_trained_where_it_is_named(adapter: str) -> None:
    if adapter == "keras":
        frozen = keras.Variable(ROWS, trainable=False, name="frozen")
    else:
        frozen = tf.Variable(ROWS, trainable=False, name="frozen")
    native = native_variable(frozen)
    make(adapter).minimize(lambda: tf.reduce_sum(native**2), [frozen])
    assert np.all(np.array(frozen) < 1.0)


@both
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o, v: o.exclude_from_weight_decay(var_names=["("]), "must be a list of regular"),
        (lambda o, v: o.exclude_from_weight_decay(var_list=v), "var_list must be a list of vari"),
        (lambda o, v: o.get_slot(v, "m"), r"Call build\(variables\) first"),
        (lambda o, v: o.set_group_learning_rate(3, 0.1), "index must be that of an entry"),
        (lambda o, v: type(o)(pattern_lrs={"patterns": []}), "pattern_lrs must be a list"),
    ],
)
def test_misuse_is_told_in_words(adapter: str, call: Any, message: str) -> None:
    with pytest.raises(OptimizerArgumentError, match=message):
        call(make(adapter, "adam_multilr"), variable(adapter, "table"))
