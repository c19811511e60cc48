"""A fingerprint of the code, so that TFX's cache notices an edited source."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import rowstep

# What a training's result depends on; an edit elsewhere must not retrain anybody's model.
_ROOMS = ("rowstep.components", "rowstep.optimizers", "rowstep.configs")


@cache
def code_fingerprint() -> str:
    """Return the version and a hash over the sources that a training runs."""
    digest = hashlib.sha256()
    for room in _ROOMS:
        spec = find_spec(room)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{room}/{path.relative_to(folder)}\n".encode())
                digest.update(path.read_bytes())
    return f"{rowstep.__version__}+{digest.hexdigest()[:16]}"
