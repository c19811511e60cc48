"""What tagged values know of TensorFlow, Keras and code: objects that hold state, and names."""

from __future__ import annotations

import collections
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

ABSENT = object()


class Holder(NamedTuple):
    """Say how to read and to set what an object of some type holds."""

    types: tuple[type, ...]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def _assign_all(metric: keras.metrics.Metric, values: list[np.ndarray]) -> None:
    for variable, value in zip(metric.variables, values, strict=True):
        variable.assign(value)


HOLDERS = (
    Holder(
        (tf.Variable, keras.Variable),
        lambda v: np.asarray(keras.ops.convert_to_numpy(v)),
        lambda v, array: v.assign(array),
    ),
    Holder(
        (keras.metrics.Metric,),
        lambda m: [np.asarray(keras.ops.convert_to_numpy(v)) for v in m.variables],
        _assign_all,
    ),
    Holder(
        (tf.random.Generator, keras.random.SeedGenerator),
        lambda g: np.asarray(keras.ops.convert_to_numpy(g.state)),
        lambda g, array: g.state.assign(array),
    ),
    Holder(
        (np.random.Generator,),
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
    Holder(
        (np.random.RandomState,),
        lambda g: g.get_state(legacy=False),
        lambda g, state: g.set_state(state),
    ),
    Holder((random.Random,), lambda g: g.getstate(), lambda g, state: g.setstate(state)),
)

# Of these it matters whether two places hold the same object: they can be written into.
SHARED = (
    list,
    set,
    dict,
    collections.deque,
    bytearray,
    np.ndarray,
    *(type_ for holder in HOLDERS for type_ in holder.types),
)


def public_name(code: Any) -> str | None:
    """Return `module:name` of a function or class that can be found by it, or None."""
    name = str(getattr(code, "__qualname__", None) or getattr(code, "__name__", ""))
    if getattr(keras.ops, name, None) is code:
        return f"keras.ops:{name}"  # where users find it; its own module is private to Keras
    module = getattr(code, "__module__", None) or "numpy"  # a ufunc does not say its module
    found = f"{module}:{name}"
    return found if find_code(found) is code else None


def find_code(name: str) -> Any:
    """Return what `public_name` named, if its module is imported, or ABSENT."""
    module, _, path = name.partition(":")
    found = sys.modules.get(module, ABSENT)
    for part in path.split("."):
        found = getattr(found, part, ABSENT)
    return found


def shapes(state: Any) -> Any:
    """Return what two states of one object must agree on."""
    if isinstance(state, dict):
        return state.get("bit_generator")
    if isinstance(state, list):
        return [shapes(value) for value in state]
    return (state.dtype.name, state.shape) if isinstance(state, np.ndarray) else "a state"
