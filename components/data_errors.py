"""The error for input data that cannot be trusted, and the wording its messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from rowstep import RowstepError

__all__ = ["DataError", "cut", "nearest"]


class DataError(RowstepError, ValueError):
    """Say which file, and which line of it, is missing, doctored or malformed."""


def cut(text: str, limit: int = 60) -> str:
    """Quote a piece of input, shortened so that a damaged file cannot flood the message."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def nearest(name: str, known: Iterable[str], limit: int = 12) -> str:
    """Word the known name closest to `name`, or list the first `limit` when none is close."""
    names = list(known)
    # Folding first: the usual slip is one of case or of an underscore.
    folded: dict[str, str] = {}
    for candidate in names:
        folded.setdefault(_fold(candidate), candidate)
    match = difflib.get_close_matches(_fold(name), folded, n=1, cutoff=0.6)
    if match:
        return f"Nearest: {folded[match[0]]!r}"
    listed = ", ".join(map(repr, names[:limit])) + (", ..." if len(names) > limit else "")
    return f"Found: {listed or 'nothing'}"


def _fold(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")
