"""Load what users name by a dotted path."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import keras

from rowstep.configs.errors import ConfigError, one_problem


def load_callbacks(paths: Sequence[str]) -> list[keras.callbacks.Callback]:
    """Build the callbacks of `train.callbacks`, each a class or a function without arguments.

    Raises:
        ConfigError: "train.callbacks: must name ... Got '<path>' (<why>). ..."
    """
    callbacks = []
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            made = getattr(import_module(module), name)()
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise _bad(path, f"{type(error).__name__}: {error}") from error
        if not isinstance(made, keras.callbacks.Callback):
            raise _bad(path, f"it made a {type(made).__name__}")
        callbacks.append(made)
    return callbacks


def _bad(path: str, why: Any) -> ConfigError:
    return one_problem(
        "",
        "train.callbacks",
        "must name Keras callbacks, or functions that return one, by an importable dotted path. "
        f"Got {path!r} ({why}). Example: my_package.my_module.MyCallback. "
        "Install the package that holds it.",
    )
