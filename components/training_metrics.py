"""Metrics over the training examples of an epoch, by the class names of Keras."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rowstep.configs.errors import ConfigError, Problem, nearest
from rowstep.optimizers.state import iter_named_variables, load_named_variables

# Those that judge one number an example and can be made without arguments. Left out are metrics of
# class probabilities or of vectors: over a single column they give numbers that mean nothing.
ALLOWED = (
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "FalseNegatives",
    "FalsePositives",
    "Hinge",
    "LogCoshError",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "Precision",
    "R2Score",
    "Recall",
    "RootMeanSquaredError",
    "SquaredHinge",
    "TrueNegatives",
    "TruePositives",
)


class TrainingMetrics:
    """Sum up Keras metrics batch by batch, with all their variables there before the first batch.

    `RootMeanSquaredError` is called `root_mean_squared_error`, whatever metrics were made before in
    the process, so that its variables have the same paths in a resumed one. A metric for
    probabilities, such as `AUC`, does not notice scores that are none; its value then means little.

    Args:
        names: classes of `keras.metrics`, of those in `ALLOWED`.

    Raises:
        ConfigError: a name is not one of them, or comes twice. All such names are told at once.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if problems := [*_problems(names)]:
            raise ConfigError(problems)
        self._metrics = [_build(name) for name in names]

    def update(self, labels: tf.Tensor, scores: tf.Tensor) -> None:
        """Add a batch; may be called inside a `tf.function`.

        Args:
            labels: [B] or [B, 1].
            scores: [B] or [B, 1].
        """
        for metric in self._metrics:
            metric.update_state(tf.reshape(labels, [-1, 1]), tf.reshape(scores, [-1, 1]))

    def results(self) -> dict[str, float]:
        """Return the value of each metric over the batches since `reset`."""
        return {metric.name: float(metric.result()) for metric in self._metrics}

    def reset(self) -> None:
        """Begin anew, as for an epoch."""
        for metric in self._metrics:
            metric.reset_state()

    def named_arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every accumulator by path, such as `auc/true_positives`.

        Use each array before the next batch, or copy it.
        """
        return iter_named_variables(self._variables())

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Go on with the accumulators that `named_arrays` returned, all of them or none.

        Raises:
            StateMismatchError: names, shapes or dtypes do not fit. Nothing has been assigned.
        """
        load_named_variables(self._variables(), arrays)

    def _variables(self) -> list[keras.Variable]:
        return [variable for metric in self._metrics for variable in metric.variables]


def _build(name: str) -> keras.metrics.Metric:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    # The name is given, since Keras would number those of the second metric of a class.
    metric = getattr(keras.metrics, name)(name=snake)
    # Some metrics make their variables in the first update, which is too late to load them.
    column = np.zeros((1, 1), np.float32)
    metric.update_state(column, column)
    metric.reset_state()
    return metric


def _problems(names: Sequence[str]) -> Iterator[Problem]:
    for position, name in enumerate(names):
        if name not in ALLOWED:
            advice = nearest(name, ALLOWED) or "Remove it."
            yield Problem(
                "",
                "train.metrics",
                "must name Keras metrics that judge one score an example. "
                f"Got {name!r}. Allowed: {', '.join(ALLOWED)}. {advice}",
            )
        elif name in names[:position]:
            yield Problem(
                "",
                "train.metrics",
                f"must name a metric once. Got {name!r} again. Remove the second one.",
            )
