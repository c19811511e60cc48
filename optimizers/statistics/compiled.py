"""Functions that are traced once for an optimizer and go when it goes."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import keras

__all__ = ["made_once"]

Made = TypeVar("Made")

_MADE: WeakKeyDictionary[keras.optimizers.Optimizer, dict[Hashable, Any]] = WeakKeyDictionary()
# TensorFlow's functions complain when they go after its modules have gone.
atexit.register(_MADE.clear)


def made_once(
    optimizer: keras.optimizers.Optimizer, key: Hashable, make: Callable[[], Made]
) -> Made:
    """Return what `make` returned for this optimizer and key, now or before.

    What is made must not hold the optimizer, or neither would ever go.
    """
    known = _MADE.setdefault(optimizer, {})
    if key not in known:
        known[key] = make()
    return known[key]
