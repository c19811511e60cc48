"""tf_keras models train with the optimizers: fit, callbacks, half precision, files and copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from rowstep.optimizers.tf_keras import LAMB, AdamMultilr, LazyAdam

IDS = np.random.default_rng(0).integers(0, 8, (16, 2))  # row 8 is never looked up
LABELS = np.random.default_rng(1).normal(size=(16, 1)).astype(np.float32)
# tf_keras draws the seeds of its layers so.
pytestmark = pytest.mark.filterwarnings("ignore:non-integer arguments to randrange")

MAKERS: dict[str, Callable[..., Any]] = {
    "lazy_adam": lambda: LazyAdam(0.01, clipnorm=1.0),
    "lamb": lambda: LAMB(0.01, weight_decay_rate=0.1, exclude_from_weight_decay=["bias$"]),
    "adam_multilr": lambda: AdamMultilr(
        tf_keras.optimizers.schedules.CosineDecay(0.1, 20),
        pattern_lrs=[
            {"patterns": ["kernel$"], "lr": 0.25},
            {
                "patterns": ["bias$"],
                "lr": tf_keras.optimizers.schedules.PolynomialDecay(0.1, 20, 0.0),
            },
        ],
        use_ema=True,
        lazy=True,
    ),
}


def make_model(optimizer: Any, **compiled: Any) -> tf_keras.Model:
    tf_keras.utils.set_random_seed(1)
    ids = tf_keras.Input((2,), dtype="int64", name="ids")
    rows = tf_keras.layers.Embedding(9, 3, name="items")(ids)
    rows = tf_keras.layers.Flatten(name="flat")(rows)
    scores = tf_keras.layers.Dense(1, name="score", dtype="float32")(rows)
    model = tf_keras.Model(ids, scores)
    model.compile(optimizer, "mse", **compiled)
    return model


def fitted(optimizer: Any, callbacks: Any = (), **compiled: Any) -> Any:
    model = make_model(optimizer, **compiled)
    model.history = model.fit(
        IDS, LABELS, batch_size=4, epochs=3, shuffle=False, callbacks=list(callbacks), verbose=0
    )
    return model


def assert_same_training(one: tf_keras.Model, other: tf_keras.Model) -> None:
    states = one.optimizer.named_state(), other.optimizer.named_state()
    assert list(states[0]) == list(states[1])
    for key in states[0]:
        np.testing.assert_array_equal(states[0][key], states[1][key], err_msg=key)
    for mine, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", MAKERS)
def test_fit_trains_by_a_compiled_step_as_by_an_eager_one(name: str) -> None:
    compiled, eager = fitted(MAKERS[name]()), fitted(MAKERS[name](), run_eagerly=True)
    losses = compiled.history.history["loss"]
    assert losses[-1] < losses[0]
    assert int(compiled.optimizer.iterations) == 12
    for one, other in zip(compiled.get_weights(), eager.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_rows_that_no_batch_looked_up_keep_their_bits() -> None:
    optimizer = LazyAdam(0.1)
    start, model = make_model("sgd").get_weights()[0], fitted(optimizer)
    table = model.get_weights()[0]
    np.testing.assert_array_equal(table[8], start[8])
    assert np.all(table[:8] != start[:8])


def test_a_step_compiled_by_xla_trains_the_same() -> None:
    # DTensor, once used in the process, leaves a bridge switched on by which TensorFlow 2.16 cannot
    # compile a sum over a number of segments that depends on the data.
    tf.config.experimental.disable_mlir_bridge()
    plain, compiled = fitted(LazyAdam(0.1)), fitted(LazyAdam(0.1), jit_compile=True)
    for one, other in zip(plain.get_weights(), compiled.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [0.5, tf.Variable(0.5)], ids=["number", "variable"])
def test_callbacks_change_the_learning_rate(rate: Any) -> None:
    halve = tf_keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    plateau = tf_keras.callbacks.ReduceLROnPlateau("loss", 0.25, patience=1, min_delta=1e9)
    model = fitted(LazyAdam(rate), [halve, plateau])
    # The plateau is noticed in the second epoch and in the third.
    assert model.history.history["lr"] == [0.25, 0.125, 0.015625]
    assert float(model.optimizer.lr) == 0.00390625


def test_weights_are_their_average_after_fit() -> None:
    model = fitted(LazyAdam(0.1, use_ema=True, ema_momentum=0.5))
    for variable in model.trainable_variables:
        average = model.optimizer.get_slot(variable, "average")
        np.testing.assert_array_equal(variable.numpy(), average.numpy())
    assert np.any(model.get_weights()[0] != fitted(LazyAdam(0.1)).get_weights()[0])


@pytest.fixture
def half_precision() -> Iterator[None]:
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    tf_keras.mixed_precision.set_global_policy("float32")


@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize("name", MAKERS)
def test_mixed_precision_wraps_it_and_skips_steps_that_overflow(name: str) -> None:
    model = make_model(MAKERS[name]())
    assert isinstance(model.optimizer, tf_keras.mixed_precision.LossScaleOptimizer)
    before = model.get_weights()
    model.fit(IDS, LABELS * np.float32(1e30), batch_size=16, verbose=0)
    inner = model.optimizer.inner_optimizer
    assert int(inner.iterations) == 1
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    history = model.fit(IDS, LABELS, batch_size=4, epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert int(inner.iterations) == 13


def test_a_loss_scale_optimizer_changes_no_number() -> None:
    wrapped = tf_keras.mixed_precision.LossScaleOptimizer(
        LazyAdam(0.1), dynamic=False, initial_scale=1024.0
    )
    plain, scaled = fitted(LazyAdam(0.1)), fitted(wrapped)
    for one, other in zip(plain.get_weights(), scaled.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning")
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_file_brings_optimizer_and_state_back(name: str, suffix: str, tmp_path: Path) -> None:
    model = fitted(MAKERS[name]())
    model.save(tmp_path / f"model{suffix}")
    loaded = tf_keras.models.load_model(tmp_path / f"model{suffix}")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert_same_training(model, loaded)
    for each in (model, loaded):
        each.fit(IDS, LABELS, batch_size=4, shuffle=False, verbose=0)
    assert_same_training(model, loaded)


def test_a_saved_model_brings_the_optimizer_back_without_its_state(tmp_path: Path) -> None:
    # As of tf_keras' own optimizers: this format keeps their config only.
    model = fitted(MAKERS["adam_multilr"]())
    model.save(tmp_path / "model", save_format="tf")
    loaded = tf_keras.models.load_model(tmp_path / "model")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    loaded.fit(IDS, LABELS, batch_size=4, verbose=0)
    assert int(loaded.optimizer.iterations) == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_model_goes_on_as_the_first(copied: Callable[[Any], Any]) -> None:
    model = make_model(LazyAdam(0.1))
    model.fit(IDS, LABELS, verbose=0)
    other = copied(model)
    assert_same_training(model, other)
    model.fit(IDS[:4], LABELS[:4], verbose=0)
    assert int(other.optimizer.iterations) == 1
