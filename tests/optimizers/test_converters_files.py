"""Checkpoints and files hold what the optimizer that wrote them held."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from rowstep.optimizers import StateMismatchError, converters

v1 = tf.compat.v1
RATE = 0.05


def listed(optimizer: Any) -> list[np.ndarray]:
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assert_equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def sequential(library: Any, optimizer: Any) -> Any:
    layers = [library.layers.Dense(3, name="items"), library.layers.Dense(1, name="score")]
    model = library.Sequential([library.Input((2,)), *layers])
    model.compile(optimizer, "mse", run_eagerly=True)  # tracing would take most of the time
    return model


def trained_model(library: Any, optimizer: Any) -> tuple[Any, dict[str, tuple[int, ...]]]:
    model = sequential(library, optimizer)
    for step in range(3):
        rng = np.random.default_rng(step)
        model.train_on_batch(rng.normal(size=(4, 2)), rng.normal(size=(4, 1)))
    names = ["items/kernel", "items/bias", "score/kernel", "score/bias"]
    variables = model.trainable_variables
    return model, {n: tuple(v.shape) for n, v in zip(names, variables, strict=True)}


def rate_schedule(library: Any) -> Any:
    return library.optimizers.schedules.ExponentialDecay(RATE, 2, 0.5)


HATS: dict[str, Any] = {"amsgrad": True}
FILES: dict[str, tuple[Any, Callable[[], Any], Callable[..., Any], dict[str, Any]]] = {
    "keras3": (keras, lambda: keras.optimizers.Adam(RATE, **HATS), converters.from_keras3, HATS),
    "keras3 with a schedule": (
        keras,
        lambda: keras.optimizers.Adam(rate_schedule(keras)),
        converters.from_keras3,
        {},
    ),
    "tf_keras": (
        tf_keras,
        lambda: tf_keras.optimizers.Adam(RATE, jit_compile=False, **HATS),
        converters.from_tf_keras,
        HATS,
    ),
    "tf_keras with a schedule": (
        tf_keras,
        lambda: tf_keras.optimizers.Adam(rate_schedule(tf_keras), jit_compile=False),
        converters.from_tf_keras,
        {},
    ),
    "legacy": (
        tf_keras,
        lambda: tf_keras.optimizers.legacy.Adam(RATE, **HATS),
        converters.from_legacy_keras,
        HATS,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_checkpoints_and_files_hold_the_state_that_the_list_holds(
    tmp_path: Path, name: str
) -> None:
    library, maker, take, options = FILES[name]
    optimizer = maker()
    model, shapes = trained_model(library, optimizer)
    variables = list(shapes.items())
    expected = take(listed(optimizer), variables, **options)
    assert expected["iterations"] == 3

    checkpoints = {
        "optimizer": tf.train.Checkpoint(model=model, optimizer=optimizer),
        "model/optimizer": tf.train.Checkpoint(model=model),
    }
    for place, checkpoint in checkpoints.items():
        prefix = checkpoint.write(str(tmp_path / place.replace("/", "_")))
        for where in (None, place):
            state = converters.from_tf_checkpoint(prefix, variables, optimizer=where, **options)
            rate = state.pop("learning_rate", None)
            assert (rate is None) == ("schedule" in name)
            assert rate is None or rate == np.float32(RATE)
            slots = {k: v for k, v in expected.items() if k != "learning_rate"}
            assert set(state) == set(slots)
            assert_equal([state[key] for key in slots], list(slots.values()))

    for ending in [".h5"] if name == "legacy" else [".h5", ".keras"]:
        path = tmp_path / f"model{ending}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that HDF5 is of yesterday
            model.save(path)
        state = take(converters.read_keras_file(path), variables, **options)
        assert_equal([state[key] for key in expected], list(expected.values()))
    if library is keras:
        model.save_weights(tmp_path / "only.weights.h5")
        weights = converters.read_keras_file(tmp_path / "only.weights.h5")
        state = take(weights, variables, **options)
        assert_equal([state[key] for key in expected], list(expected.values()))


def test_a_list_of_names_too_long_for_one_attribute_is_read_whole(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="x" * 20_000)])
    model.compile(keras.optimizers.Adam(RATE), "mse")
    model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)))
    model.save(tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5") as file:
        assert "weight_names1" in file["optimizer_weights"].attrs
    assert_equal(converters.read_keras_file(tmp_path / "model.h5"), listed(model.optimizer))


def test_bfloat16_state_is_read_from_a_keras_file(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="bfloat16")])
    model.compile(keras.optimizers.Adam(RATE), "mse")
    model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)))
    model.save(tmp_path / "model.keras")
    weights = converters.read_keras_file(tmp_path / "model.keras")
    assert_equal(weights, listed(model.optimizer))
    assert weights[2].dtype.name == "bfloat16" and np.any(weights[2])


def test_a_v1_optimizer_is_read_from_an_object_checkpoint(tmp_path: Path) -> None:
    optimizer = v1.train.AdamOptimizer(RATE)
    shapes = {"items": (4, 3), "score": (3,)}
    variables = [tf.Variable(tf.ones(shape)) for shape in shapes.values()]
    for step in range(3):
        grads = [(step + 1) * tf.ones_like(variable) for variable in variables]
        optimizer.apply_gradients(zip(grads, variables, strict=True))
    prefix = tf.train.Checkpoint(optimizer=optimizer, variables=variables).write(
        str(tmp_path / "state")
    )
    state = converters.from_tf_checkpoint(prefix, shapes.items())
    assert state["iterations"] == 3
    for path, variable in zip(shapes, variables, strict=True):
        for slot, letter in (("momentum", "m"), ("velocity", "v")):
            expected = optimizer.get_slot(variable, letter).numpy()
            np.testing.assert_array_equal(state[f"{path}/{slot}"], expected)


def test_legacy_slots_of_one_shape_are_told_apart_by_names_only(tmp_path: Path) -> None:
    optimizer = tf_keras.optimizers.legacy.Adam(RATE)
    one, two = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    optimizer.apply_gradients([(tf.constant([1.0, 1.0]), one), (tf.constant([2.0, 2.0]), two)])
    prefix = tf.train.Checkpoint(optimizer=optimizer, a=one, b=two).write(str(tmp_path / "state"))
    variables = [("one", (2,)), ("two", (2,))]
    with pytest.raises(StateMismatchError, match=r"one of shape \(2,\).*a \(2,\), b \(2,\)"):
        converters.from_tf_checkpoint(prefix, variables)
    state = converters.from_tf_checkpoint(prefix, variables, names={"one": "b", "two": "a"})
    np.testing.assert_allclose(state["one/momentum"], [0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(state["two/momentum"], [0.1, 0.1], rtol=1e-6)


def test_files_without_an_optimizer_are_refused(tmp_path: Path) -> None:
    prefix = tf.train.Checkpoint(a=tf.Variable(1.0)).write(str(tmp_path / "state"))
    with pytest.raises(StateMismatchError, match="must hold one optimizer"):
        converters.from_tf_checkpoint(prefix, [("a", ())])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(StateMismatchError, match="must hold the variables of an optimizer"):
        converters.read_keras_file(tmp_path / "model.weights.h5")
