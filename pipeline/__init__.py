"""The whole pipeline, its runner and the `rowstep` command.

Names are loaded on first use, so that the command starts, and finds a bad config, before TFX and
TensorFlow are imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ == "pipeline":
    raise ImportError(
        "pipeline: import it as 'rowstep.pipeline'. Got 'import pipeline' from inside the "
        "checkout, which would load every class twice. Install rowstep (make setup) and use the "
        "full name."
    )

if TYPE_CHECKING:
    from rowstep.pipeline.create import create_pipeline
    from rowstep.pipeline.workspace import Workspace

_HOMES = {"Workspace": "workspace", "create_pipeline": "create"}
__all__ = ["Workspace", "create_pipeline"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"rowstep.pipeline.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'rowstep.pipeline' has no attribute {name!r}")
