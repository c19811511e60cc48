"""AdamOptimizer's state of TensorFlow 1 goes to rowstep and back, and training goes on the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import (
    LazyAdam,
    OptimizerArgumentError,
    StateMismatchError,
    converters,
)

v1 = tf.compat.v1
SHAPES = {"items": (4, 3), "score": (3,)}
RATE = 0.05


class Trainee(NamedTuple):
    """An optimizer of any system, and its two variables."""

    optimizer: Any
    variables: list[Any]


def start_values() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]


def gradients(values: Iterable[np.ndarray], step: int) -> list[np.ndarray]:
    """Depend on the weights, so that a difference in one step shows in the next."""
    rng = np.random.default_rng(step)
    return [(v + rng.normal(size=v.shape)).astype(v.dtype) for v in values]


def keras3(optimizer: Any, values: Sequence[np.ndarray]) -> Trainee:
    variables = [
        keras.Variable(value, name=name) for name, value in zip(SHAPES, values, strict=True)
    ]
    optimizer.build(variables)
    return Trainee(optimizer, variables)


def values_of(trainee: Trainee) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in trainee.variables]


def train(trainee: Trainee, steps: range) -> Trainee:
    for step in steps:
        grads = [tf.constant(gradient) for gradient in gradients(values_of(trainee), step)]
        trainee.optimizer.apply_gradients(zip(grads, trainee.variables, strict=True))
    return trainee


def assert_close(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def assert_equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


class Graph:
    """An AdamOptimizer in a TensorFlow 1 graph, with its session."""

    def __init__(self, values: Sequence[np.ndarray], name: str = "Adam") -> None:
        self.graph = tf.Graph()
        self.session = v1.Session(graph=self.graph)
        with self.graph.as_default():
            self.variables = [
                v1.get_variable(key, initializer=tf.constant(value))
                for key, value in zip(SHAPES, values, strict=True)
            ]
            self.grads = [v1.placeholder(tf.float32, variable.shape) for variable in self.variables]
            self.step = v1.train.get_or_create_global_step()
            self.update = v1.train.AdamOptimizer(RATE, name=name).apply_gradients(
                list(zip(self.grads, self.variables, strict=True)), self.step
            )
            self.session.run(v1.global_variables_initializer())

    def train(self, steps: range) -> None:
        for step in steps:
            feeds = dict(zip(self.grads, gradients(self.values(), step), strict=True))
            self.session.run(self.update, feeds)

    def values(self) -> list[np.ndarray]:
        return list(self.session.run(self.variables))

    def named(self) -> dict[str, np.ndarray]:
        with self.graph.as_default():
            return self.session.run({v.op.name: v for v in v1.global_variables()})

    def assign(self, arrays: dict[str, Any]) -> None:
        with self.graph.as_default():
            found = {v.op.name: v for v in v1.global_variables()}
        for key, array in arrays.items():
            self.session.run(found[key].initializer, {found[key].initializer.inputs[1]: array})


@pytest.mark.parametrize("name", ["Adam", "LazyOne"])
def test_training_goes_on_the_same_from_a_tf1_checkpoint_and_back(
    tmp_path: Path, name: str
) -> None:
    original = Graph(start_values(), name)
    original.train(range(3))
    with original.graph.as_default():
        prefix = v1.train.Saver().save(original.session, str(tmp_path / "model"))
    twin = keras3(LazyAdam(RATE, epsilon=1e-8), original.values())
    state = converters.from_tf1_checkpoint(prefix, twin.variables, learning_rate=RATE)
    assert state["iterations"] == 3
    twin.optimizer.load_named_state(state)
    original.train(range(3, 5))
    train(twin, range(3, 5))
    assert_close(values_of(twin), original.values())

    back = Graph(values_of(twin), name)
    arrays = converters.to_tf1(
        twin.optimizer.named_state(), twin.variables, slots=(name, f"{name}_1")
    )
    expected = {key: array for key, array in original.named().items() if key in arrays}
    assert set(arrays) == set(expected) and "beta1_power" in arrays
    assert_close([arrays[key] for key in expected], list(expected.values()))
    back.assign(arrays)
    back.train(range(5, 7))
    original.train(range(5, 7))
    assert_close(back.values(), original.values())


def some_state(steps: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    state: dict[str, Any] = {"iterations": np.asarray(steps, np.int64)}
    for path, shape in SHAPES.items():
        for slot in ("momentum", "velocity"):
            state[f"{path}/{slot}"] = rng.random(shape, np.float32)
    return state


@pytest.mark.parametrize("steps", [0, 1, 700, 20_000, 80_000])
def test_powers_of_betas_tell_the_steps_whatever_was_rounded(steps: int) -> None:
    power, beta_2 = np.float32(0.999), np.float32(0.999)
    for _ in range(steps):
        power = power * beta_2
    arrays = converters.to_tf1(some_state(steps), list(SHAPES.items()))
    assert arrays["beta2_power"] == power and arrays["beta2_power"].dtype == np.float32
    state = converters.from_tf1(arrays, list(SHAPES.items()))
    assert state["iterations"] == steps and state["iterations"].dtype == np.int64


def test_steps_that_the_powers_no_longer_tell_come_from_global_step() -> None:
    variables = list(SHAPES.items())
    arrays = converters.to_tf1(some_state(200_000), variables)
    assert arrays["beta1_power"] == 0.0 and arrays["beta2_power"] == 0.0
    with pytest.raises(StateMismatchError, match=r"no global_step\. Pass global_step"):
        converters.from_tf1(arrays, variables)
    state = converters.from_tf1(arrays, variables, global_step=200_000)
    assert state["iterations"] == 200_000
    # Where they do tell it, they are what the bias correction goes by.
    arrays = converters.to_tf1(some_state(1_000), variables)
    assert converters.from_tf1(arrays, variables, global_step=5)["iterations"] == 1_000


@pytest.mark.parametrize("wrong", [{"beta_2": 0.99}, {"beta_1": 0.8}, {"beta_2": 0.9995}])
def test_powers_of_other_betas_are_refused(wrong: dict[str, Any]) -> None:
    arrays = converters.to_tf1(some_state(10), list(SHAPES.items()))
    with pytest.raises(StateMismatchError, match="powers of betas must be"):
        converters.from_tf1(arrays, list(SHAPES.items()), **wrong)


def test_a_power_alone_tells_that_its_beta_is_another() -> None:
    arrays = converters.to_tf1(some_state(1_000), list(SHAPES.items()))
    assert arrays["beta1_power"] == 0.0 and arrays["beta2_power"] > 0.0
    for beta_2 in (0.9985, 0.9989):
        with pytest.raises(StateMismatchError, match="powers of betas must be"):
            converters.from_tf1(arrays, list(SHAPES.items()), beta_2=beta_2)


def test_a_beta_whose_powers_never_fall_is_refused() -> None:
    arrays = converters.to_tf1(some_state(), list(SHAPES.items()))
    with pytest.raises(OptimizerArgumentError, match="beta_2 must be below 1 as a float32"):
        converters.to_tf1(some_state(), list(SHAPES.items()), beta_2=1 - 1e-9)
    with pytest.raises(OptimizerArgumentError, match=r"beta_1 must lie in \[0, 1\)"):
        converters.from_tf1(arrays, list(SHAPES.items()), beta_1=1.0)


def test_two_optimizers_of_one_name_are_told_apart_by_slots() -> None:
    variables = list(SHAPES.items())
    state, other = some_state(10), some_state(10)
    other["items/momentum"] = other["items/momentum"] + 1
    arrays = converters.to_tf1(state, variables)
    arrays |= converters.to_tf1(other, variables, slots=("Adam_2", "Adam_3"))
    with pytest.raises(StateMismatchError, match=r"2 pairs .*Adam_1'.*Adam_2', 'Adam_3'"):
        converters.from_tf1(arrays, variables)
    found = converters.from_tf1(arrays, variables, slots=("Adam_2", "Adam_3"))
    assert_equal([found[key] for key in other], list(other.values()))


def test_a_checkpoint_has_its_global_step_with_it(tmp_path: Path) -> None:
    original = Graph(start_values())
    original.train(range(3))
    original.assign({"beta1_power": np.float32(0), "beta2_power": np.float32(0)})
    with original.graph.as_default():
        prefix = v1.train.Saver().save(original.session, str(tmp_path / "model"))
    state = converters.from_tf1_checkpoint(prefix, list(SHAPES.items()))
    assert state["iterations"] == 3
    state = converters.from_tf1_checkpoint(tmp_path, list(SHAPES.items()), global_step=8)
    assert state["iterations"] == 8


def test_renamed_variables_scopes_and_second_optimizers_are_found_in_tf1_names() -> None:
    variables = list(SHAPES.items())
    names = {"items": "tower/embedding", "score": "tower/bias"}
    state, other = some_state(10), some_state(2)
    first = converters.to_tf1(state, variables, names=names, scope="train")
    second = converters.to_tf1(
        other,
        variables,
        names=names,
        slots=("Adam_2", "Adam_3"),
        beta_powers=("beta1_power_1", "beta2_power_1"),
    )
    assert "train/tower/embedding/Adam_1" in first and "tower/bias/Adam_3" in second
    both = first | second | {"tower/bias": np.zeros(3), "tower/embedding/Momentum": np.zeros(3)}
    found = converters.from_tf1(first, variables, names=names, scope="train")
    assert_equal([found[key] for key in state], list(state.values()))
    with pytest.raises(StateMismatchError, match="one pair of beta1_power"):
        converters.from_tf1(both, variables, names=names)
    found = converters.from_tf1(
        both, variables, names=names, beta_powers=("beta1_power_1", "beta2_power_1")
    )
    assert_equal([found[key] for key in other], list(other.values()))
    with pytest.raises(StateMismatchError, match="Pass names for variables that were renamed"):
        converters.from_tf1(first, variables)
