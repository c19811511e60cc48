"""Every optimizer by adapter and name; adapters are imported when one of theirs is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = ["ADAPTERS", "optimizer_class"]

ADAPTERS: Mapping[str, Mapping[str, str]] = {
    "keras": {
        "adam_multilr": "rowstep.optimizers.adam_multilr:AdamMultilr",
        "lamb": "rowstep.optimizers.lamb:LAMB",
        "lazy_adam": "rowstep.optimizers.lazy_adam:LazyAdam",
    },
    "tf_keras": {
        "adam_multilr": "rowstep.optimizers.tf_keras:AdamMultilr",
        "lamb": "rowstep.optimizers.tf_keras:LAMB",
        "lazy_adam": "rowstep.optimizers.tf_keras:LazyAdam",
    },
    "dtensor": {"adam": "rowstep.optimizers.dtensor:Adam"},
    "tf1": {"lazy_adam": "rowstep.optimizers.v1:LazyAdamOptimizer"},
}
"""Where the class of each optimizer is, by adapter and name: "<module>:<class>"."""


def optimizer_class(name: str, adapter: str = "keras") -> type[Any]:
    """Return the class of an optimizer.

    Args:
        name: "lazy_adam", "lamb", "adam_multilr" or "adam".
        adapter: "keras" (Keras 3), "tf_keras", "dtensor" or "tf1".

    Raises:
        OptimizerArgumentError: there is no such adapter, or it has no such optimizer.
    """
    for what, given, allowed in (
        ("adapter", adapter, ADAPTERS),
        ("name", name, ADAPTERS.get(adapter, {})),
    ):
        if given not in allowed:
            raise OptimizerArgumentError(
                f"optimizer_class: {what} must be one that exists. Got {given!r}. "
                f"Allowed are {', '.join(allowed)}. Choose one of them."
            )
    module, _, attribute = ADAPTERS[adapter][name].partition(":")
    return getattr(importlib.import_module(module), attribute)
