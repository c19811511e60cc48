"""LAMB's trust ratios, caught where the step computes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import keras
import tensorflow as tf

from rowstep.optimizers import update_rules
from rowstep.optimizers.row_update import Plan
from rowstep.optimizers.rules import LambRule
from rowstep.optimizers.step import RowStep

__all__ = ["Ratios", "ratio_summary", "watched"]


class Ratios(NamedTuple):
    """Hold the ratios of one variable, one or one a row, flat."""

    ratios: tf.Tensor
    clipped: tf.Tensor
    """bool: which of them the bounds changed."""


@dataclass(frozen=True)
class _WatchedRule(LambRule):
    """Be a LambRule that keeps the ratios it computes."""

    seen: list[Ratios] = field(default_factory=list, compare=False)

    def ratio(self, w: tf.Tensor, u: tf.Tensor) -> tf.Tensor:
        used = super().ratio(w, u)
        free = used
        if self.trust_ratio_clip is not None:
            free = update_rules.trust_ratio(w, u, by_row=self.by_row)
        flat = tf.cast(tf.reshape(used, [-1]), tf.float32)
        self.seen.append(Ratios(flat, tf.reshape(tf.not_equal(free, used), [-1])))
        return used


@contextmanager
def watched(optimizer: keras.optimizers.Optimizer) -> Iterator[Mapping[int, list[Ratios]]]:
    """Catch the trust ratios of the steps that are run, or traced, meanwhile.

    The graph of the step is the same but for those who read the ratios. Of an optimizer without
    ratios, or one inside a LossScaleOptimizer, whose step is a branch, nothing is caught.

    Returns:
        By the index of a variable, what each step appends.
    """
    plans: tuple[Plan, ...] = getattr(optimizer, "_plans", ())
    rules = [plan.rule for plan in plans]
    if not (isinstance(optimizer, RowStep) and any(_adapts(rule) for rule in rules)):
        yield {}
        return
    own = [f.name for f in dataclasses.fields(LambRule)]
    seen: dict[int, list[Ratios]] = {}
    replaced = list(plans)
    for index, rule in enumerate(rules):
        if _adapts(rule):
            seen[index] = []
            settings = {name: getattr(rule, name) for name in own}
            rule = _WatchedRule(**settings, seen=seen[index])
            replaced[index] = dataclasses.replace(plans[index], rule=rule)
    optimizer._plans = tuple(replaced)
    try:
        yield seen
    finally:
        optimizer._plans = plans


def _adapts(rule: object) -> bool:
    return isinstance(rule, LambRule) and rule.adapt


def ratio_summary(ratios: list[Ratios]) -> dict[str, tf.Tensor]:
    """Return min, median and max of the ratios, and the share that the bounds changed.

    Where there is none, because no row was touched, they are 1, 1, 1 and 0.
    """
    values = tf.concat([entry.ratios for entry in ratios], axis=0)
    clipped = tf.concat([tf.cast(entry.clipped, tf.float32) for entry in ratios], axis=0)
    return {
        "min": tf.reduce_min(_or_one(values)),
        "median": median(values),
        "max": tf.reduce_max(_or_one(values)),
        "clipped_frac": tf.math.divide_no_nan(
            tf.reduce_sum(clipped), tf.cast(tf.size(clipped), tf.float32)
        ),
    }


def median(values: tf.Tensor) -> tf.Tensor:
    """Return the median of a flat tensor, between the middle two of an even number; 1 of none."""
    ascending = tf.sort(_or_one(values))
    last = tf.size(ascending) - 1
    return (ascending[last // 2] + ascending[(last + 1) // 2]) / 2.0


def _or_one(values: tf.Tensor) -> tf.Tensor:
    is_empty = tf.cast(tf.equal(tf.size(values), 0), tf.int32)
    return tf.concat([values, tf.ones([is_empty], values.dtype)], axis=0)
