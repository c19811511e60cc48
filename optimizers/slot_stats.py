"""Statistics of optimizer state, computed where the state lives and fetched in one transfer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from rowstep.optimizers import state, update_rules
from rowstep.optimizers.variables import variables_by_path

__all__ = ["collect", "slot_stats"]

_SLOT_KEY = re.compile(r"(?P<path>.+)[/_](?P<slot>momentum|velocity)(?P<number>#\d+)?")
# The short name of a slot in metric names, and what its largest element is called there.
_METRIC_NAMES = {"momentum": ("m", "absmax"), "velocity": ("v", "max")}


class _Statistics(NamedTuple):
    names: tuple[str, ...]
    compute: Callable[[], tf.Tensor]


_COMPILED: WeakKeyDictionary[keras.optimizers.Optimizer, _Statistics] = WeakKeyDictionary()


def slot_stats(optimizer: keras.optimizers.Optimizer) -> dict[str, tf.Tensor]:
    """Compute statistics of the first and second moments, without fetching them.

        rms = sqrt(mean(x^2)), absmax = max(|x|), zero_frac = share of elements that are exactly 0

    over all variables for each slot:

        opt/slot_m/{rms,mean,absmax,zero_frac}, opt/slot_v/{rms,mean,max,zero_frac}

    and for each variable `opt/m_rms/<variable>` and `opt/v_rms/<variable>`, where `<variable>` is
    its path with "." for "/" and "_" for characters that MLflow does not take.

    Works for every Keras 3 optimizer; one without momentum or velocity has no statistics.

    Args:
        optimizer: A built optimizer.

    Returns:
        Scalar float32 tensors by metric name.

    Raises:
        StateMismatchError: the optimizer is not built.

    Cost: one pass over the whole state, O(V * D), in one compiled graph: call it every so many
    steps, not every step.
    """
    statistics = _statistics(optimizer)
    if not statistics.names:
        return {}
    return dict(zip(statistics.names, tf.unstack(statistics.compute()), strict=True))


def collect(optimizer: keras.optimizers.Optimizer) -> dict[str, float]:
    """Return `slot_stats` as numbers, fetched from the device in one transfer."""
    statistics = _statistics(optimizer)
    if not statistics.names:
        return {}
    values = statistics.compute().numpy().tolist()
    return dict(zip(statistics.names, values, strict=True))


def _statistics(optimizer: keras.optimizers.Optimizer) -> _Statistics:
    if optimizer not in _COMPILED:
        _COMPILED[optimizer] = _compile(_slots_by_name(optimizer))
    return _COMPILED[optimizer]


def _compile(slots: dict[str, dict[str, keras.Variable]]) -> _Statistics:
    names = [
        f"opt/slot_{letter}/{statistic}"
        for letter, largest in (_METRIC_NAMES[slot] for slot in slots)
        for statistic in ("rms", "mean", largest, "zero_frac")
    ]
    names += [f"opt/{_METRIC_NAMES[s][0]}_rms/{name}" for s in slots for name in slots[s]]

    @tf.function(autograph=False)
    def compute() -> tf.Tensor:
        overall: list[tf.Tensor] = []
        by_variable: list[tf.Tensor] = []
        for variables in slots.values():
            slot, single = _summaries(list(variables.values()))
            overall += slot
            by_variable += single
        return tf.stack([tf.cast(value, tf.float32) for value in overall + by_variable])

    return _Statistics(tuple(names), compute)


def _summaries(variables: list[keras.Variable]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return [rms, mean, absmax, zero_frac] over all variables, and the rms of each."""
    values = [_read(variable) for variable in variables]
    sizes = [tf.cast(tf.size(x, out_type=tf.int64), tf.float64) for x in values]
    norms = [tf.cast(update_rules.safe_norm(x), tf.float64) for x in values]
    sums = [tf.cast(tf.reduce_sum(x), tf.float64) for x in values]
    largest = [tf.cast(tf.reduce_max(tf.abs(x)), tf.float64) for x in values]
    zeros = [tf.cast(tf.math.count_nonzero(tf.equal(x, 0)), tf.float64) for x in values]
    size = tf.add_n(sizes)
    overall = [
        update_rules.safe_norm(tf.stack(norms)) / tf.sqrt(size),
        tf.add_n(sums) / size,
        tf.reduce_max(tf.stack(largest)),
        tf.add_n(zeros) / size,
    ]
    return overall, [norm / tf.sqrt(n) for norm, n in zip(norms, sizes, strict=True)]


def _read(variable: keras.Variable) -> tf.Tensor:
    native = variable.value
    # An ordinary read copies a variable that rows have been scattered into.
    if hasattr(native, "read_value_no_copy"):
        return native.read_value_no_copy()
    return tf.convert_to_tensor(native)


def _slots_by_name(
    optimizer: keras.optimizers.Optimizer,
) -> dict[str, dict[str, keras.Variable]]:
    paths = _paths_by_stem(optimizer)
    slots: dict[str, dict[str, keras.Variable]] = {}
    for key, variable in state.state_variables(optimizer).items():
        match = _SLOT_KEY.fullmatch(key)
        if match is None:
            continue
        path = paths.get(match["path"], match["path"]) + (match["number"] or "")
        group = slots.setdefault(match["slot"], {})
        name = _metric_name(path)
        while name in group:
            name += "_"
        group[name] = variable
    return {slot: slots[slot] for slot in _METRIC_NAMES if slot in slots}


def _paths_by_stem(optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    # Keras names a slot of "a/b" as "a_b_momentum": the path is looked up among the variables that
    # the optimizer trains, so that its metrics have the names that LazyAdam's have.
    paths = variables_by_path(getattr(optimizer, "_trainable_variables", ()))
    return {path.replace("/", "_"): path for path in paths}


def _metric_name(path: str) -> str:
    return re.sub(r"[^\w.\-]", "_", path.replace("/", "."), flags=re.ASCII)
