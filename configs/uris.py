"""Which tracking URIs hold credentials: one rule for config files and for arguments."""

from __future__ import annotations

import re
from urllib.parse import unquote

# An "@" is part of a file's name here, and the end of a user name everywhere else.
_LOCAL = re.compile(
    r"(?:sqlite(?:\+\w+)?:///|file:/(?!/[^/])|/(?!/)|\.{1,2}/|[A-Za-z]:[\\/](?!/))", re.IGNORECASE
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NAMED_KEY = re.compile(
    r"[?#;&][^=]*(?:pass|pwd|token|secret|credential|auth|bearer|jwt|key|sig|sas|"
    r"x-amz-|x-goog-|x-ms-)[^=]*=",
    re.IGNORECASE,
)


def credentials_in(uri: str) -> str | None:
    """Name the kind of credentials that a tracking URI holds, `a user name` or `a key`, or None.

    Percent-encoded characters count as what they stand for. Of a query only the names are judged.
    """
    plain = _decoded(uri)
    if "@" in plain and not _is_local(plain):
        return "a user name"
    return "a key" if _NAMED_KEY.search(plain) else None


def without_credentials(uri: str) -> str:
    """Return a tracking URI without user name, password and query, fit to be shown."""
    is_clean = credentials_in(uri) is None
    plain = uri if is_clean else _decoded(uri)
    if not _is_local(plain):
        found = _SCHEME.match(plain)
        scheme, rest = (found[0], plain[found.end() :]) if found else ("", plain)
        key = _NAMED_KEY.search(rest)
        if key and "@" in rest[key.start() :]:
            return f"{scheme}..."  # the end of a key, or a password that holds a question mark?
        # Up to the last "@": a password may hold any character, a slash or a question mark too.
        plain = f"{scheme}{rest.rpartition('@')[2]}"
    return re.split(r"[?#]" if is_clean else r"[?#;]", plain, maxsplit=1)[0]


def _is_local(uri: str) -> bool:
    return _LOCAL.match(uri) is not None


def _decoded(uri: str) -> str:
    plain = unquote(uri)
    while plain != uri:  # encoded twice by whoever was careful
        uri, plain = plain, unquote(plain)
    return plain
