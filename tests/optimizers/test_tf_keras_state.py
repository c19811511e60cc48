"""State of the tf_keras optimizers: by name as in Keras 3, as lists, and in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import rowstep.optimizers
from rowstep.optimizers import Embedding, StateMismatchError
from rowstep.optimizers.tf_keras import LAMB, AdamMultilr, LazyAdam

# tf_keras draws the seeds of its layers so.
pytestmark = pytest.mark.filterwarnings("ignore:non-integer arguments to randrange")
MAKERS: dict[str, Callable[..., Any]] = {
    "LazyAdam": LazyAdam,
    "LAMB": LAMB,
    "AdamMultilr": AdamMultilr,
}


def tf_keras_model() -> tf_keras.Model:
    tf_keras.utils.set_random_seed(1)
    ids = tf_keras.Input((2,), dtype="int64", name="ids")
    rows = tf_keras.layers.Embedding(9, 3, name="items")(ids)
    rows = tf_keras.layers.Flatten(name="flat")(rows)
    return tf_keras.Model(ids, tf_keras.layers.Dense(1, name="score")(rows))


def keras_model() -> keras.Model:
    ids = keras.Input((2,), dtype="int64", name="ids")
    rows = keras.layers.Flatten(name="flat")(Embedding(9, 3, name="items")(ids))
    return keras.Model(ids, keras.layers.Dense(1, name="score")(rows))


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        rng = np.random.default_rng(step)
        ids = tf.constant(rng.integers(0, 9, (8, 2)))
        labels = tf.constant(rng.normal(size=(8, 1)), tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids) - labels) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def trained(name: str = "LazyAdam", **settings: Any) -> tuple[tf_keras.Model, Any]:
    model, optimizer = tf_keras_model(), MAKERS[name](0.05, **settings)
    train(model, optimizer, range(3))
    return model, optimizer


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray], rtol: float) -> None:
    assert list(one) == list(other)
    for key in one:
        np.testing.assert_allclose(one[key], other[key], rtol=rtol, atol=rtol / 10, err_msg=key)


@pytest.mark.parametrize("from_keras_3", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_in_the_other_keras_with_equal_numbers(
    name: str, from_keras_3: bool
) -> None:
    groups = {"pattern_lrs": [{"patterns": ["bias$"], "lr": 0.01}]} if name == "AdamMultilr" else {}
    makers = [getattr(rowstep.optimizers, name), MAKERS[name]]
    models = [keras_model(), tf_keras_model()]
    models[0].set_weights(models[1].get_weights())
    if not from_keras_3:
        makers.reverse()
        models.reverse()
    first, second = makers[0](0.05, **groups), makers[1](0.9, **groups)
    train(models[0], first, range(3))
    models[1].set_weights(models[0].get_weights())
    second.build(models[1].trainable_variables)
    second.load_named_state(first.named_state())
    assert_close(first.named_state(), second.named_state(), rtol=0)
    assert float(second.learning_rate) == pytest.approx(0.05)
    for model, optimizer in zip(models, (first, second), strict=True):
        train(model, optimizer, range(3, 6))
    assert_close(first.named_state(), second.named_state(), rtol=1e-5)
    for one, other in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_a_list_goes_round_before_the_first_step_given_the_variables(name: str) -> None:
    model, optimizer = trained(name)
    weights = optimizer.get_weights()
    assert all(type(array) is np.ndarray for array in weights)
    assert weights[0].shape == () and weights[0] == 3
    fresh = MAKERS[name](0.05)
    with pytest.raises(StateMismatchError, match=r"must be built.*optimizer.build\("):
        fresh.set_weights(weights)
    fresh.set_weights(weights, var_list=model.trainable_variables)
    assert_close(optimizer.named_state(), fresh.named_state(), rtol=0)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop(), "Got 6 arrays where 7 are needed"),
        (lambda w: w.append(w[-1]), "Got 8 arrays where 7 are needed"),
        (
            lambda w: w.__setitem__(1, w[1].T.copy()),
            r"items/embeddings/momentum of shape \(3, 9\) instead of \(9, 3\)",
        ),
        (
            lambda w: w.__setitem__(0, np.float32(3)),
            "iterations of dtype float32 instead of int64",
        ),
    ],
    ids=["short", "long", "shape", "dtype"],
)
def test_a_list_that_does_not_fit_is_refused_and_nothing_is_assigned(
    edit: Callable[[list[np.ndarray]], Any], message: str
) -> None:
    _, optimizer = trained()
    before = optimizer.named_state()
    weights = [array * 0 for array in optimizer.get_weights()]
    edit(weights)
    with pytest.raises(StateMismatchError, match=message):
        optimizer.set_weights(weights)
    assert_close(before, optimizer.named_state(), rtol=0)


def test_repeated_names_are_numbered() -> None:
    optimizer = LAMB()
    variables = [tf.Variable([float(i)], name="w") for i in range(3)]
    optimizer.build(variables)
    assert "w#3/velocity" in optimizer.named_state()
    assert len({variable.name for variable in optimizer.variables}) == 7


@pytest.mark.parametrize("built_first", [True, False])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LazyAdam", {"idle_decay": True, "gradient_accumulation_steps": 2}),
        ("LAMB", {"weight_decay_rate": 0.1, "exclude_from_weight_decay": ["bias$"]}),
        ("AdamMultilr", {"pattern_lrs": [{"patterns": ["bias$"], "lr": 0.01}], "use_ema": True}),
    ],
)
def test_a_tensorflow_checkpoint_brings_the_whole_state_back(
    name: str, settings: dict[str, Any], built_first: bool, tmp_path: Path
) -> None:
    model, optimizer = trained(name, **settings)
    optimizer.learning_rate = 0.03125
    if name == "AdamMultilr":
        optimizer.set_group_learning_rate(0, 0.125)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "ckpt"))
    other_model, other = tf_keras_model(), MAKERS[name](0.9, **settings)
    if built_first:
        other.build(other_model.trainable_variables)
    status = tf.train.Checkpoint(model=other_model, optimizer=other).restore(path)
    for m, o in ((model, optimizer), (other_model, other)):
        train(m, o, range(3, 6))
    status.assert_consumed()
    assert_close(optimizer.named_state(), other.named_state(), rtol=0)
    for one, two in zip(model.get_weights(), other_model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_step_counter_of_your_own_is_what_checkpoints_have(tmp_path: Path) -> None:
    model, optimizer = tf_keras_model(), LazyAdam(0.05)
    optimizer.iterations = tf.Variable(10, dtype=tf.int64)
    train(model, optimizer, range(3))
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "ckpt"))
    other = LazyAdam(0.05)
    other.build(model.trainable_variables)
    status = tf.train.Checkpoint(optimizer=other).restore(path)
    status.assert_consumed().assert_existing_objects_matched()
    assert int(other.iterations) == 13
    # The counter that it replaced is not there beside it.
    names = [name for name, shape in tf.train.list_variables(path) if shape == []]
    counters = {name.split("/.ATTRIBUTES")[0] for name in names if name.startswith("optimizer")}
    assert counters == {"optimizer/_iterations", "optimizer/_learning_rate"}


def test_a_checkpoint_of_tf_keras_own_adam_goes_on_here(tmp_path: Path) -> None:
    model, optimizer = tf_keras_model(), tf_keras.optimizers.Adam(0.05)
    train(model, optimizer, range(3))
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "ckpt"))
    other_model, other = tf_keras_model(), LazyAdam(0.9)
    tf.train.Checkpoint(model=other_model, optimizer=other).restore(path)
    for m, o in ((model, optimizer), (other_model, other)):
        variables = m.trainable_variables
        o.apply_gradients([(tf.ones(v.shape), v) for v in variables])
    assert int(other.iterations) == 4
    for one, two in zip(model.get_weights(), other_model.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


# --- configs ----------------------------------------------------------------------------------


def schedule() -> Any:
    return tf_keras.optimizers.schedules.CosineDecay(0.1, 10)


@pytest.mark.parametrize(
    "optimizer",
    [
        LazyAdam(0.001, beta_1=0.8, epsilon=1e-5, clipnorm=2.0, idle_decay=True, name="mine"),
        LazyAdam(schedule(), use_ema=True, ema_overwrite_frequency=5, tables=["items"]),
        LAMB(schedule(), exclude_from_weight_decay=["a"], trust_ratio_clip=(0.0, 10.0)),
        AdamMultilr(
            0.1,
            pattern_lrs=[
                {"patterns": ["a$"], "lr": schedule()},
                {"patterns": ["b"], "lr": 0.3},
            ],
            decay=0.5,
        ),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_a_config_goes_through_json_and_makes_the_same_optimizer(optimizer: Any) -> None:
    config = json.loads(json.dumps(tf_keras.optimizers.serialize(optimizer)))
    assert config["registered_name"] == f"rowstep>{type(optimizer).__name__}"
    for copy in (
        tf_keras.optimizers.deserialize(config),
        tf_keras.optimizers.get(config),
        type(optimizer).from_config(json.loads(json.dumps(optimizer.get_config()))),
    ):
        assert type(copy) is type(optimizer)
        assert copy.get_config() == optimizer.get_config()


def test_classes_of_your_own_are_found_by_custom_objects() -> None:
    class Halving(tf_keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: tf.Tensor) -> tf.Tensor:
            return 0.5 ** tf.cast(step, tf.float32)

        def get_config(self) -> dict[str, Any]:
            return {}

    config = LazyAdam(Halving()).get_config()
    config["learning_rate"]["module"] = "elsewhere"
    copy = LazyAdam.from_config(config, custom_objects={"Halving": Halving})
    assert float(copy.learning_rate) == 1.0


# --- sharded variables, as a parameter server's partitioner makes them --------------------------


def sharded_table(values: np.ndarray) -> Any:
    parts = np.array_split(values, 2)
    return tf.__internal__.distribute.ShardedVariable(
        [tf.Variable(part, name=f"items/embeddings/part_{k}") for k, part in enumerate(parts)],
        name="items/embeddings",
    )


def apply_rows(optimizer: Any, tables: list[tf.Variable], row_ids: list[int]) -> None:
    """Apply a gradient of ones to rows of a table that lies in parts of four rows."""
    gradients = []
    for k, part in enumerate(tables):
        ids = [i - 4 * k for i in row_ids if 0 <= i - 4 * k < part.shape[0]]
        ones = tf.ones((len(ids), part.shape[1]))
        gradients.append(tf.IndexedSlices(ones, tf.constant(ids, tf.int64), tuple(part.shape)))
    optimizer.apply_gradients(zip(gradients, tables, strict=True))


SETTINGS = [
    ("LazyAdam", {"row_velocity": True, "global_clipnorm": 0.5, "bias_correction": "visits"}),
    ("AdamMultilr", {"pattern_lrs": [{"patterns": ["embeddings$"], "lr": 0.5}], "lazy": True}),
    ("LAMB", {"row_trust_ratio": True}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_a_table_in_parts_trains_as_a_whole_and_restores_into_one(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    values = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    sharded, whole = sharded_table(values), tf.Variable(values, name="items/embeddings")
    optimizer, other = MAKERS[name](0.1, **settings), MAKERS[name](0.1, **settings)
    for row_ids in ([0, 5, 5], [5, 7], [1]):
        apply_rows(optimizer, sharded.variables, row_ids)
        apply_rows(other, [whole], row_ids)
    trained = np.concatenate([part.numpy() for part in sharded.variables])
    np.testing.assert_allclose(trained, whole.numpy(), rtol=1e-6)
    assert np.any(trained[5] != values[5])
    named = optimizer.named_state()
    for slot in other.get_slot_names():
        parts = [named[f"items/embeddings/part_{k}/{slot}"] for k in range(2)]
        np.testing.assert_allclose(
            np.concatenate(parts), other.named_state()[f"items/embeddings/{slot}"], rtol=1e-6
        )
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "ckpt"))
    fresh = MAKERS[name](0.9, **settings)
    fresh.build([whole])
    tf.train.Checkpoint(optimizer=fresh).restore(path).assert_consumed()
    assert_close(fresh.named_state(), other.named_state(), rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (LazyAdam(clipnorm=1.0), r"part_0 with clipnorm. Use global_clipnorm\."),
        (LAMB(), "part_0 with a trust ratio. Use row_trust_ratio or an exclusion"),
    ],
    ids=["clipnorm", "LAMB"],
)
def test_what_needs_the_norm_of_a_sharded_variable_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer.build(sharded_table(np.ones((8, 3), np.float32)).variables)
