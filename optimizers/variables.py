"""Variables of any Keras, and of none: the tf.Variable behind each, and the path it goes by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

__all__ = ["matches", "native_variable", "unique_keys", "variable_path", "variables_by_path"]

Item = TypeVar("Item")


def native_variable(variable: Any) -> tf.Variable:
    """Return the tf.Variable behind a Keras variable, or the argument if it is one already."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def variable_path(variable: Any) -> str:
    """Return the path of a Keras variable, or the name of a tf.Variable without its ":0"."""
    return str(getattr(variable, "path", None) or variable.name.removesuffix(":0"))


def variables_by_path(variables: Iterable[Any]) -> dict[str, Any]:
    """Return variables by path; the second one of the same path becomes `<path>#2`, and so on.

    Paths repeat where two layers of one model have the same name. The number follows the order of
    the variables, which is the same whenever the same code builds the model.
    """
    variables = list(variables)
    return unique_keys([variable_path(variable) for variable in variables], variables)


def unique_keys(names: Sequence[str], items: Sequence[Item]) -> dict[str, Item]:
    """Return items by name, with `#2`, `#3` ... after names that come again."""
    counts: dict[str, int] = {}
    result = {}
    for name, item in zip(names, items, strict=True):
        counts[name] = counts.get(name, 0) + 1
        result[name if counts[name] == 1 else f"{name}#{counts[name]}"] = item
    return result


def matches(patterns: Iterable[str], path: str) -> bool:
    """Return whether one of the regular expressions is found in a path."""
    return any(re.search(pattern, path) for pattern in patterns)
