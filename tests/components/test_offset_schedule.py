"""A schedule that begins anew in the middle of the iterations."""

from __future__ import annotations

import json
from typing import Any

import keras
import pytest
import tensorflow as tf

from rowstep.components.offset_schedule import OffsetSchedule, ScheduleError
from rowstep.optimizers import LazyAdam

COSINE = keras.optimizers.schedules.CosineDecay(0.5, 100, alpha=0.1)
STAIRS = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5, staircase=True)


@pytest.mark.parametrize("schedule", [COSINE, STAIRS], ids=["cosine", "stairs"])
@pytest.mark.parametrize("step", [0, 1, 37, 1000])
def test_it_begins_at_its_first_step(schedule: Any, step: int) -> None:
    offset = OffsetSchedule(schedule, 5000)
    assert float(offset(5000 + step)) == float(schedule(step))
    assert float(offset(tf.constant(5000 + step, tf.int64))) == float(schedule(step))
    assert float(offset(keras.Variable(5000 + step, dtype="int64"))) == float(schedule(step))


def test_steps_before_the_first_have_the_first_rate() -> None:
    assert float(OffsetSchedule(COSINE, 10)(3)) == 0.5


def test_it_counts_steps_that_float32_cannot_tell_apart() -> None:
    first = 2**25
    rates = [float(OffsetSchedule(COSINE, first)(tf.constant(first + k, tf.int64))) for k in (0, 1)]
    assert rates == [float(COSINE(0)), float(COSINE(1))]
    assert rates[0] > rates[1]


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_a_traced_step_keeps_what_was_set_before(jit_compile: bool) -> None:
    offset = OffsetSchedule(STAIRS)
    offset.first_step = 40

    @tf.function(jit_compile=jit_compile)
    def rate(step: tf.Tensor) -> tf.Tensor:
        return offset(step)

    assert float(rate(tf.constant(50, tf.int64))) == 0.25
    offset.first_step = 0  # too late for what is traced
    assert float(rate(tf.constant(50, tf.int64))) == 0.25


def test_an_optimizer_follows_it_and_carries_it_in_its_config() -> None:
    optimizer = LazyAdam(OffsetSchedule(STAIRS, 1000))
    optimizer.iterations.assign(1010)
    assert float(optimizer.learning_rate) == 0.25
    config = json.loads(json.dumps(optimizer.get_config()))
    twin = LazyAdam.from_config(config)
    twin.iterations.assign(1020)
    assert float(twin.learning_rate) == 0.125


@pytest.mark.parametrize("kind", [LazyAdam, keras.optimizers.Adam])
def test_a_built_optimizer_takes_it_in_place_of_its_schedule(kind: Any) -> None:
    optimizer, weights = kind(STAIRS, beta_1=0.0), keras.Variable([1.0], name="w")
    optimizer.build([weights])
    optimizer.iterations.assign(1000)
    optimizer.learning_rate = OffsetSchedule(STAIRS, 1000)
    step = tf.function(lambda: optimizer.apply([tf.constant([1e6])], [weights]))
    step()
    # As long as at step 1000 with no moments before: 0.5 / sqrt(1 - beta_2).
    assert 1.0 - float(weights[0]) == pytest.approx(0.5 / (1 - 0.999) ** 0.5, rel=0.25)
    assert float(optimizer.learning_rate) == 0.5


def test_it_comes_back_from_its_config() -> None:
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(OffsetSchedule(COSINE, 7))))
    back = keras.saving.deserialize_keras_object(config)
    assert back.first_step == 7
    assert back.schedule.get_config() == COSINE.get_config()
    assert float(back(57)) == float(COSINE(50))


@pytest.mark.parametrize("first_step", [-1, 2.5, True, None])
def test_first_step_must_be_a_number_of_steps(first_step: Any) -> None:
    offset = OffsetSchedule(COSINE, 3)
    with pytest.raises(ScheduleError, match=r"first_step must be .* Got .*0 or more"):
        offset.first_step = first_step
    assert offset.first_step == 3


def test_a_number_is_no_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"must be a Keras LearningRateSchedule. Got 0.1"):
        OffsetSchedule(0.1)
