"""A learning rate schedule that begins at a later step than the optimizer's first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from rowstep import RowstepError

__all__ = ["OffsetSchedule", "ScheduleError"]

_Schedule = keras.optimizers.schedules.LearningRateSchedule


class ScheduleError(RowstepError, ValueError):
    """Say that a schedule cannot begin where it is asked to."""


@keras.saving.register_keras_serializable(package="rowstep")
class OffsetSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Begin a schedule anew at a step: schedule(max(step - first_step, 0)).

    A warm start goes on with the optimizer's iterations, so that moments and their correction fit
    together; a schedule over iterations would then be at its end before the first step.

    `first_step` is known only once a checkpoint has been read, which is after the optimizer was
    built. Until the training step is traced it may be set, or another schedule assigned to
    `optimizer.learning_rate`: a traced step keeps what it saw. A resume must begin where the
    training began that it resumes, so the number belongs into the checkpoint.

    Args:
        schedule: the schedule that begins anew, or its config as Keras serializes it.
        first_step: the iterations at which it is at its step 0; 0 or more.

    Raises:
        ScheduleError: an argument is not that.
    """

    def __init__(self, schedule: Any, first_step: int = 0) -> None:
        super().__init__()
        if isinstance(schedule, Mapping):
            schedule = keras.saving.deserialize_keras_object(dict(schedule))
        if not isinstance(schedule, _Schedule):
            raise ScheduleError(
                f"OffsetSchedule: schedule must be a Keras LearningRateSchedule. Got {schedule!r}. "
                "A constant learning rate needs no offset: pass the number to the optimizer."
            )
        self.schedule = schedule
        self.first_step = first_step

    @property
    def first_step(self) -> int:
        """The iterations at which the schedule is at its step 0."""
        return self._first_step

    @first_step.setter
    def first_step(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ScheduleError(
                f"OffsetSchedule: first_step must be a whole number of steps. Got {value!r}. "
                "Allowed: 0 or more. Pass int(optimizer.iterations.numpy())."
            )
        self._first_step = value

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of a step, a number or a scalar tensor."""
        # Subtracted as whole numbers: in float32, steps above 2^24 are no longer distinct.
        return self.schedule(keras.ops.maximum(step - self._first_step, 0))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, the schedule serialized."""
        return {
            "schedule": keras.saving.serialize_keras_object(self.schedule),
            "first_step": self._first_step,
        }
