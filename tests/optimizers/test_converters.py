"""State goes to rowstep and back to where it came from, and training goes on the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from rowstep.optimizers import (
    LAMB,
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


def old_keras(optimizer: Any, values: Sequence[np.ndarray]) -> Trainee:
    variables = [tf.Variable(value, name=name) for name, value in zip(SHAPES, values, strict=True)]
    if isinstance(optimizer, tf_keras.optimizers.Optimizer):
        optimizer.build(variables)
    else:
        optimizer.iterations  # noqa: B018  it is a variable from the first look at it
        optimizer._create_all_weights(variables)
    return Trainee(optimizer, variables)


def values_of(trainee: Trainee) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in trainee.variables]


def train(trainee: Trainee, steps: range) -> Trainee:
    for step in steps:
        grads = [tf.constant(gradient) for gradient in gradients(values_of(trainee), step)]
        trainee.optimizer.apply_gradients(zip(grads, trainee.variables, strict=True))
    return trainee


def listed(optimizer: Any) -> list[np.ndarray]:
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assert_close(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def assert_equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


class System(NamedTuple):
    """An original, rowstep's twin of it, and the converters between the two."""

    place: Callable[[Any, Sequence[np.ndarray]], Trainee]
    original: Callable[[], Any]
    twin: Callable[[], Any]
    take: Callable[..., Any]
    give: Callable[..., Any]
    has_rate: bool = False


def schedule() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(RATE, 2, 0.5)


SYSTEMS = {
    "keras3 Adam": System(
        keras3,
        lambda: keras.optimizers.Adam(RATE),
        lambda: LazyAdam(RATE),
        converters.from_keras3,
        converters.to_keras3,
        has_rate=True,
    ),
    "keras3 Adam with a schedule": System(
        keras3,
        lambda: keras.optimizers.Adam(schedule()),
        lambda: LazyAdam(schedule()),
        converters.from_keras3,
        converters.to_keras3,
        has_rate=True,
    ),
    "keras3 Lamb": System(
        keras3,
        lambda: keras.optimizers.Lamb(RATE, epsilon=1e-7),
        lambda: LAMB(RATE, epsilon=1e-7),
        converters.from_keras3,
        converters.to_keras3,
        has_rate=True,
    ),
    "tf_keras Adam": System(
        old_keras,
        lambda: tf_keras.optimizers.Adam(RATE, jit_compile=False),
        lambda: LazyAdam(RATE),
        converters.from_tf_keras,
        converters.to_tf_keras,
    ),
    "legacy Adam": System(
        old_keras,
        lambda: tf_keras.optimizers.legacy.Adam(RATE),
        lambda: LazyAdam(RATE),
        converters.from_legacy_keras,
        converters.to_legacy_keras,
    ),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_training_goes_on_the_same_there_and_back(name: str) -> None:
    system = SYSTEMS[name]
    original = train(system.place(system.original(), start_values()), range(3))
    twin = keras3(system.twin(), values_of(original))
    rate = {} if system.has_rate else {"learning_rate": RATE}
    state = system.take(listed(original.optimizer), twin.variables, **rate)
    twin.optimizer.load_named_state(state)
    train(original, range(3, 5))
    train(twin, range(3, 5))
    assert_close(values_of(twin), values_of(original))

    back = system.place(system.original(), values_of(twin))
    back.optimizer.set_weights(system.give(twin.optimizer.named_state(), twin.variables))
    assert_close(listed(back.optimizer), listed(original.optimizer))
    train(original, range(5, 7))
    train(back, range(5, 7))
    assert_close(values_of(back), values_of(original))
    # Two more steps are told apart from two first ones, and from a state that was dropped.
    fresh = train(system.place(system.original(), values_of(twin)), range(5, 7))
    assert np.abs(values_of(fresh)[0] - values_of(back)[0]).max() > 1e-3


OPTIONS = [{}, {"amsgrad": True}, {"use_ema": True}, {"amsgrad": True, "use_ema": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("line", ["keras3", "tf_keras"])
def test_slots_keep_their_names_with_amsgrad_and_averages(
    line: str, options: dict[str, bool]
) -> None:
    name = f"{line} Adam"
    system = SYSTEMS[name]
    maker = type(system.original())
    extra = {} if line == "keras3" else {"jit_compile": False}
    original = train(system.place(maker(RATE, **options, **extra), start_values()), range(3))
    state = system.take(listed(original.optimizer), list(SHAPES.items()), **options)

    held = (
        {"average": original.optimizer._model_variables_moving_average}
        if "use_ema" in options
        else {}
    )
    held |= {"velocity_hat": original.optimizer._velocity_hats} if "amsgrad" in options else {}
    held |= {"momentum": original.optimizer._momentums, "velocity": original.optimizer._velocities}
    slots = {f"{path}/{slot}" for path in SHAPES for slot in held}
    assert set(state) - {"iterations", "learning_rate"} == slots
    assert ("learning_rate" in state) == (line == "keras3")
    for slot, variables in held.items():
        for path, variable in zip(SHAPES, variables, strict=True):
            np.testing.assert_array_equal(
                state[f"{path}/{slot}"], keras.ops.convert_to_numpy(variable)
            )
    assert_equal(system.give(state, list(SHAPES.items())), listed(original.optimizer))


def test_averages_go_on_the_same_there_and_back() -> None:
    options: dict[str, Any] = {"use_ema": True, "ema_momentum": 0.8}
    original = train(keras3(keras.optimizers.Adam(RATE, **options), start_values()), range(3))
    twin = keras3(LazyAdam(RATE, **options), values_of(original))
    state = converters.from_keras3(listed(original.optimizer), twin.variables, use_ema=True)
    state = converters.with_row_counters(state, twin.variables, ["average_step"])
    twin.optimizer.load_named_state(state)
    train(original, range(3, 5))
    train(twin, range(3, 5))
    state = twin.optimizer.named_state()
    assert_close(converters.to_keras3(state, twin.variables), listed(original.optimizer))
    for trainee in (original, twin):
        trainee.optimizer.finalize_variable_values(trainee.variables)
    assert_close(values_of(twin), values_of(original))

    state["items/average_step"][1] -= 1  # a row that was not in the last batch
    with pytest.raises(StateMismatchError, match="unexpected items/average_step"):
        converters.to_keras3(state, twin.variables)
    with pytest.raises(OptimizerArgumentError, match="Got average_steps"):
        converters.with_row_counters(state, twin.variables, ["average_steps"])


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_legacy_list_restored_before_its_first_step_is_the_same_state(
    tmp_path: Path, amsgrad: bool
) -> None:
    legacy = tf_keras.optimizers.legacy.Adam
    original = train(old_keras(legacy(RATE, amsgrad=amsgrad), start_values()), range(3))
    objects = {"optimizer": original.optimizer, "variables": original.variables}
    prefix = tf.train.Checkpoint(**objects).write(str(tmp_path / "state"))

    restored = legacy(RATE, amsgrad=amsgrad)
    variables = [tf.Variable(value) for value in start_values()]
    status = tf.train.Checkpoint(optimizer=restored, variables=variables).restore(prefix)
    restored.iterations  # noqa: B018  it is a variable from the first look at it
    weights = restored.get_weights()
    assert np.shape(weights[0]) != () and weights[-1] == 3  # the trap is still there
    status.expect_partial()  # the hyperparameters were not asked for

    variables = list(SHAPES.items())
    expected = converters.from_legacy_keras(
        original.optimizer.get_weights(), variables, amsgrad=amsgrad
    )
    state = converters.from_legacy_keras(weights, variables, amsgrad=amsgrad)
    assert set(state) == set(expected)
    assert_equal([state[key] for key in expected], list(expected.values()))


def test_placeholders_of_the_first_keras_are_left_out_and_real_ones_are_not() -> None:
    variables = list(SHAPES.items())
    moments = [np.full(shape, n, np.float32) for n in (1, 2) for shape in SHAPES.values()]
    weights = [np.int64(5), *moments]
    expected = converters.from_legacy_keras(weights, variables)
    placeholders = [np.zeros(1, np.float32)] * 2
    state = converters.from_legacy_keras([*weights, *placeholders], variables)
    assert_equal(list(state.values()), list(expected.values()))
    hats = [np.full(shape, 3, np.float32) for shape in SHAPES.values()]
    with pytest.raises(StateMismatchError, match="7 arrays for 5 keys"):
        converters.from_legacy_keras([*weights, *hats], variables)
    one_bias = [np.int64(5), *np.ones((3, 1), np.float32)]  # what looks like a placeholder, but 1
    with pytest.raises(StateMismatchError, match="4 arrays for 3 keys"):
        converters.from_legacy_keras(one_bias, [("bias", (1,))])
    with_hats = converters.from_legacy_keras([*weights, *hats], variables, amsgrad=True)
    assert_equal([with_hats["score/velocity_hat"]], [hats[1]])


def test_a_counter_of_any_integer_becomes_int64() -> None:
    weights = converters.to_legacy_keras(some_state(), list(SHAPES.items()))
    for counter in (3, np.int32(3), np.uint64(3), np.asarray(3, np.int64)):
        state = converters.from_legacy_keras([counter, *weights[1:]], list(SHAPES.items()))
        assert_equal([state["iterations"]], [np.asarray(3, np.int64)])


def test_lists_of_live_variables_are_copied() -> None:
    original = train(
        SYSTEMS["legacy Adam"].place(tf_keras.optimizers.legacy.Adam(RATE), start_values()),
        range(2),
    )
    live = original.optimizer.variables()  # Merlin's get_weights returns these
    state = converters.from_legacy_keras(live, original.variables)
    before = {key: array.copy() for key, array in state.items()}
    train(original, range(2, 3))
    assert_equal(list(state.values()), list(before.values()))
    arrays = listed(original.optimizer)
    converters.from_legacy_keras(arrays, original.variables)["items/momentum"][:] = 9
    assert_equal(arrays, listed(original.optimizer))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_state_is_float32_for_half_variables_and_goes_back_to_the_bit(dtype: str) -> None:
    values = [value.astype(dtype) for value in start_values()]
    variables = [
        keras.Variable(value, dtype=dtype, name=name)
        for name, value in zip(SHAPES, values, strict=True)
    ]
    optimizer = keras.optimizers.Adam(RATE)
    optimizer.build(variables)
    for slot in optimizer.variables[2:]:
        slot.assign(np.abs(np.random.default_rng(0).normal(size=slot.shape)))
    weights = listed(optimizer)
    assert weights[2].dtype.name == dtype
    state = converters.from_keras3(weights, variables)
    expected = "float64" if dtype == "float64" else "float32"
    assert {state[key].dtype.name for key in state if "/" in key} == {expected}
    assert_equal(converters.to_keras3(state, variables), weights)


def test_a_moment_too_large_for_half_precision_is_refused() -> None:
    variables = [("items", (2,), "float16")]
    weights = [np.int64(1), np.ones(2, np.float32), np.full(2, 1e6, np.float32)]
    state = converters.from_legacy_keras(weights, variables)
    with pytest.raises(StateMismatchError, match="items/velocity with numbers that float16"):
        converters.to_legacy_keras(state, variables)


def some_state(steps: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    state: dict[str, Any] = {"iterations": np.asarray(steps, np.int64)}
    for path, shape in SHAPES.items():
        for slot in ("momentum", "velocity"):
            state[f"{path}/{slot}"] = rng.random(shape, np.float32)
    return state


def changed(position: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda weights: [*weights[:position], value, *weights[position + 1 :]]


SMALL = np.ones(3, np.float32)
BAD_LISTS: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "too short": (lambda w: w[:-1], "4 arrays for 5 keys"),
    "too long": (lambda w: [*w, SMALL], "6 arrays for 5 keys"),
    "empty": (lambda w: [], "0 arrays for 5 keys"),
    "other shape": (changed(1, SMALL), r"items/momentum of shape \(3,\) instead of \(4, 3\)"),
    "float64": (changed(2, np.ones(3)), "score/momentum of dtype float64 instead of float32"),
    "integers": (changed(4, np.ones(3, int)), "score/velocity of dtype int64 instead of float32"),
    "negative squares": (changed(4, -SMALL), "score/velocity with negative numbers"),
    "float counter": (changed(0, np.float32(3)), "3.0 as iterations"),
    "counter below 0": (changed(0, np.int64(-1)), "-1 as iterations"),
    "counter of a shape": (changed(0, np.ones(1, int)), r"array of shape \(1,\) as iterations"),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_a_list_that_does_not_fit_is_refused_by_name(name: str) -> None:
    spoil, message = BAD_LISTS[name]
    weights = converters.to_legacy_keras(some_state(), list(SHAPES.items()))
    with pytest.raises(StateMismatchError, match=f"^from_legacy_keras: .*{message}.*Nothing was"):
        converters.from_legacy_keras(spoil(weights), list(SHAPES.items()))


def test_moments_in_the_place_of_each_other_are_refused() -> None:
    original = train(keras3(keras.optimizers.Adam(RATE), start_values()), range(3))
    weights = listed(original.optimizer)
    weights[2], weights[3] = weights[3], weights[2]
    with pytest.raises(StateMismatchError, match="items/velocity with negative numbers"):
        converters.from_keras3(weights, original.variables)
    wrong_order = original.variables[::-1]
    with pytest.raises(StateMismatchError, match="score/momentum of shape"):
        converters.from_keras3(listed(original.optimizer), wrong_order)
    with pytest.raises(StateMismatchError, match=" as iterations, "):
        converters.from_legacy_keras(listed(original.optimizer)[1:], original.variables)


BAD_STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a slot missing": (lambda s: s.pop("score/velocity"), "no score/velocity"),
    "no counter": (lambda s: s.pop("iterations"), "no iterations"),
    "an unknown slot": (lambda s: s.update({"items/age": SMALL}), "unexpected items/age"),
    "half an average": (lambda s: s.update({"items/velocity_hat": SMALL}), "no score/velocity_hat"),
    "an unknown variable": (lambda s: s.update({"x/momentum": SMALL}), "unexpected x/momentum"),
    "other shape": (lambda s: s.update({"items/momentum": SMALL}), "items/momentum of shape"),
    "negative squares": (
        lambda s: s.update({"score/velocity": -SMALL}),
        "score/velocity with negative",
    ),
}


@pytest.mark.parametrize(
    "give", [converters.to_legacy_keras, converters.to_keras3, converters.to_tf_keras]
)
@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_does_not_fit_is_refused_by_name(name: str, give: Callable[..., Any]) -> None:
    spoil, message = BAD_STATES[name]
    state = some_state()
    spoil(state)
    with pytest.raises(StateMismatchError, match=f"^{give.__name__}: .*{message}"):
        give(state, list(SHAPES.items()))


def test_a_state_with_averages_has_no_place_in_a_legacy_list_or_in_tf1() -> None:
    state = some_state()
    state |= {f"{path}/average": np.zeros(shape, np.float32) for path, shape in SHAPES.items()}
    for give in (converters.to_legacy_keras, converters.to_tf1):
        with pytest.raises(StateMismatchError, match="unexpected items/average"):
            give(state, list(SHAPES.items()))
    assert len(converters.to_tf_keras(state, list(SHAPES.items()))) == 7


def test_variables_must_be_floating_and_some() -> None:
    for variables, got in (([], "Got none"), ([("ids", (2,), "int64")], "Got ids of int64")):
        with pytest.raises(OptimizerArgumentError, match=got):
            converters.from_keras3([np.int64(0)], variables)
    doubled = [("w", (2,)), ("w", (2,))]
    moments = [np.full(2, n, np.float32) for n in range(4)]
    state = converters.from_legacy_keras([np.int64(1), *moments], doubled)
    assert_equal([state["w#2/velocity"]], [moments[3]])
