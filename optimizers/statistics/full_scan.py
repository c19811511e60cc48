"""Statistics of all slots and weights, computed where they lie and fetched in one transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from rowstep.optimizers.statistics.compiled import made_once
from rowstep.optimizers.statistics.observed import (
    ObservedVariable,
    PerVariable,
    is_shown,
    largest_name,
    observed_variables,
    short_name,
)
from rowstep.optimizers.statistics.summaries import joined, summarize

__all__ = ["collect", "scan", "slot_stats"]


class _Compiled(NamedTuple):
    names: list[str]
    compute: Callable[[], tf.Tensor]


_Named: TypeAlias = "tuple[list[str], tf.Tensor]"
"""Names, and a vector of as many numbers."""


def scan(
    optimizer: keras.optimizers.Optimizer, *, per_variable: PerVariable = False
) -> dict[str, float]:
    """Return statistics of all slots and weights, as numbers.

        rms = sqrt(mean(x^2)), absmax = max(|x|), zero_frac = share of elements that are exactly 0

    over the elements of all variables' slots of a name:

        opt/slot_m/{rms,mean,absmax,zero_frac}      momentum
        opt/slot_v/{rms,mean,max,zero_frac}         velocity
        opt/slot_<slot>/{rms,mean,absmax,zero_frac} any other

    and opt/global/weights_norm, the Euclidean norm of all weights, and
    opt/sparse/rows_ever_touched_frac, the share of the tables' rows whose velocity has an element
    that is not 0; it is left out where no table has a velocity. With per_variable also
    opt/m_rms/<variable>, opt/v_rms/<variable>, opt/<slot>_rms/<variable> and
    opt/v_zero_frac/<variable>.

    Works for every Keras 3 optimizer. A number is NaN where an element is not finite.

    Args:
        optimizer: A built optimizer.
        per_variable: Whether to go into single variables, or the names of those to go into.

    Raises:
        StateMismatchError: the optimizer is not built.

    Cost: one pass over the weights and the whole state, O(V * D), in the memory of a few blocks,
    one compiled graph and one transfer. Call it every thousand steps, not every step.
    """
    chosen = per_variable if isinstance(per_variable, bool) else frozenset(per_variable)
    return _numbers(_compiled(optimizer, True, chosen))


def collect(optimizer: keras.optimizers.Optimizer) -> dict[str, float]:
    """Return `slot_stats` as numbers, fetched from the device in one transfer."""
    return _numbers(_compiled(optimizer, False, True))


def slot_stats(optimizer: keras.optimizers.Optimizer) -> dict[str, tf.Tensor]:
    """Compute what `scan` says of slots, per variable too, without fetching it.

    Works for every Keras 3 optimizer; one without slots has no statistics.

    Args:
        optimizer: A built optimizer.

    Returns:
        Scalar float32 tensors by metric name.

    Raises:
        StateMismatchError: the optimizer is not built.

    Cost: as of `scan`, without the weights.
    """
    names, compute = _compiled(optimizer, False, True)
    return dict(zip(names, tf.unstack(compute()), strict=True)) if names else {}


def _numbers(compiled: _Compiled) -> dict[str, float]:
    names, compute = compiled
    return dict(zip(names, compute().numpy().tolist(), strict=True)) if names else {}


def _compiled(
    optimizer: keras.optimizers.Optimizer, weights: bool, per_variable: bool | frozenset[str]
) -> _Compiled:
    return made_once(
        optimizer,
        ("scan", weights, per_variable),
        lambda: _compile(observed_variables(optimizer), weights, per_variable),
    )


def _compile(
    variables: list[ObservedVariable], weights: bool, per_variable: PerVariable
) -> _Compiled:
    names: list[str] = []

    @tf.function(autograph=False)
    def compute() -> tf.Tensor:
        named = _of_slots(variables, weights, per_variable)
        if weights:
            everything = joined(summarize([variable.weights for variable in variables])[0])
            named.append((["opt/global/weights_norm"], tf.sqrt([everything.squares])))
        names[:] = [name for some, _ in named for name in some]
        return tf.concat([tf.cast(values, tf.float32) for _, values in named], axis=0)

    if weights or any(variable.slots for variable in variables):
        return _Compiled(names, compute.get_concrete_function())
    return _Compiled(names, compute)


def _of_slots(
    variables: list[ObservedVariable], tables: bool, per_variable: PerVariable
) -> list[_Named]:
    overall: list[_Named] = []
    single: list[_Named] = []
    for slot in dict.fromkeys(slot for variable in variables for slot in variable.slots):
        having = [variable for variable in variables if slot in variable.slots]
        rows = [index for index, variable in enumerate(having) if variable.is_table]
        summary, _ = summarize([variable.slots[slot] for variable in having], tables=rows)
        short, everything = short_name(slot), joined(summary)
        statistics = {
            "rms": everything.rms(),
            "mean": everything.mean(),
            largest_name(slot): everything.absmax(),
            "zero_frac": everything.zero_frac(),
        }
        names = [f"opt/slot_{short}/{statistic}" for statistic in statistics]
        overall.append((names, tf.stack(list(statistics.values()))))
        if slot == "velocity" and tables and rows:
            num_rows = sum(int(having[index].weights.shape[0]) for index in rows)
            share = tf.reduce_sum(tf.gather(summary.num_live_rows, rows)) / num_rows
            overall.append((["opt/sparse/rows_ever_touched_frac"], tf.stack([share])))
        shown = [i for i, v in enumerate(having) if is_shown(v.name, per_variable)]
        if not shown:
            continue
        single.append((_names(f"{short}_rms", having, shown), tf.gather(summary.rms(), shown)))
        if slot == "velocity":
            shares = tf.gather(summary.zero_frac(), shown)
            single.append((_names(f"{short}_zero_frac", having, shown), shares))
    return overall + single


def _names(statistic: str, variables: list[ObservedVariable], shown: list[int]) -> list[str]:
    return [f"opt/{statistic}/{variables[index].name}" for index in shown]
