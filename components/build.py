"""From config sections to a Keras optimizer: the one place where both ground rooms meet."""

from __future__ import annotations

import keras

from rowstep.components.offset_schedule import OffsetSchedule
from rowstep.configs.schema import AdamConfig, AnyOptimizer, CosineSchedule
from rowstep.optimizers import OPTIMIZERS

# Keras' own Adam is offered to compare with, and is not one of rowstep's optimizers.
PEERS = {"adam": keras.optimizers.Adam}


def build_optimizer(
    config: AnyOptimizer, num_steps: int, schedules: list[OffsetSchedule] | None = None
) -> keras.optimizers.Optimizer:
    """Build the configured optimizer.

    Args:
        config: the `optimizer` section.
        num_steps: length of the whole training; a cosine schedule without `decay_steps` ends there.
        schedules: is given the schedule, where there is one, in a form that may begin at a later
            iteration; a warm start needs that.
    """
    arguments = config.model_dump(exclude={"kind", "learning_rate", "schedule"})
    kinds = PEERS if isinstance(config, AdamConfig) else OPTIMIZERS
    rate = _learning_rate(config, num_steps)
    if schedules is not None and not isinstance(rate, float):
        rate = OffsetSchedule(rate)
        schedules.append(rate)
    return kinds[config.kind](learning_rate=rate, **arguments)


def _learning_rate(
    config: AnyOptimizer, num_steps: int
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    schedule = config.schedule
    if schedule is None:
        return config.learning_rate
    if isinstance(schedule, CosineSchedule):
        return keras.optimizers.schedules.CosineDecay(
            config.learning_rate, schedule.decay_steps or num_steps, alpha=schedule.alpha
        )
    return keras.optimizers.schedules.ExponentialDecay(
        config.learning_rate, schedule.decay_steps, schedule.decay_rate
    )
