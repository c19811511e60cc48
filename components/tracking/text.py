"""Texts that leave the training for MLflow or the screen: names, values, links, errors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rowstep.components.tracking.history import NON_FINITE
from rowstep.components.tracking.redact import (
    REDACTED,
    is_secret_name,
    redact,
    redact_text,
    redact_uri,
)
from rowstep.components.tracking.target import Target

MAX_TAG_CHARACTERS = 5000

_MAX_PARAM_CHARACTERS = 500
_MAX_NAME_CHARACTERS = 250
MAX_METRIC_NAME_CHARACTERS = _MAX_NAME_CHARACTERS - len(NON_FINITE)
"""Of the name that a caller gives; where its value is not finite, a prefix comes before it."""
_MAX_REASON_CHARACTERS = 300
_HINTS = {
    401: " (set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN)",
    403: " (no permission, or a server that does not know this host name: see its --allowed-hosts)",
}


def is_sqlite(uri: str) -> bool:
    """Tell a store that is a file, used in this process, from a server."""
    return uri.startswith("sqlite:")


def run_link(target: Target, experiment_id: str, run_id: str) -> str:
    """Say where a person finds the run: a page of MLflow's, or its place in a local store."""
    uri = redact_uri(target.uri)
    if uri.startswith(("http://", "https://")):
        return f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    return f"experiment '{target.experiment}', run {run_id} in {uri}"


def explain(error: BaseException) -> str:
    """Say in one line what went wrong, without credentials."""
    text = " ".join(redact_text(str(error)).split())
    code = getattr(error, "get_http_status_code", lambda: 0)()
    return f"{type(error).__name__}: {text[:_MAX_REASON_CHARACTERS]}{_HINTS.get(code, '')}"


# --- names and values -----------------------------------------------------------------------


def clean_name(name: str, max_characters: int = _MAX_NAME_CHARACTERS) -> str:
    """Return a name that every MLflow server takes, the same for the same name.

    Allowed are letters, digits, `_ . - /` and spaces, in parts that read as a relative path.
    """
    parts = re.sub(r"[^\w/. -]", "_", name, flags=re.ASCII).split("/")
    clean = "/".join(part for part in parts if part.strip(". ")) or "_"
    return clean if len(clean) <= max_characters else _marked(clean, name, max_characters)


def _marked(clean: str, name: str, max_characters: int) -> str:
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{clean[: max_characters - 9]}_{digest}"


def clean_names(names: Iterable[str], max_characters: int = _MAX_NAME_CHARACTERS) -> dict[str, str]:
    """Return {name: clean name}; two names that would become one are told apart by a hash.

    The first of them in sorted order keeps the plain form, whatever order they come in.
    """
    clean: dict[str, str] = {}
    taken: set[str] = set()
    # Names that need no cleaning come first, so that nobody takes their place.
    for name in sorted(names, key=lambda name: (clean_name(name, max_characters) != name, name)):
        text = clean_name(name, max_characters)
        if text in taken:
            text = _marked(text, name, max_characters)
        taken.add(text)
        clean[name] = text
    return clean


def clean_params(params: Mapping[str, Any]) -> dict[str, str]:
    """Return params as MLflow keeps them, without credentials."""
    names = clean_names(map(str, params))
    return {
        names[str(name)]: REDACTED
        if is_secret_name(str(name)) and value is not None and not isinstance(value, bool)
        else param_text(value)
        for name, value in params.items()
    }


def param_text(value: Any) -> str:
    """Return a param's value as MLflow keeps it.

    Numbers have the shortest digits that give the same number back, lists and mappings are JSON,
    and what is longer than 500 characters is named by its SHA-256.
    """
    if isinstance(value, float):
        text = float.__repr__(value)  # NumPy's own repr of its float64 names the type
    elif isinstance(value, (list, tuple, dict)):
        text = json.dumps(redact("", value), default=str)
    else:
        text = redact_text(str(value))
    if len(text) > _MAX_PARAM_CHARACTERS:
        return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"
    return text


def clean_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """Return tags with names that MLflow takes, of a length it takes, without credentials."""
    names = clean_names(map(str, tags))
    return {
        names[str(name)]: str(redact(str(name), str(value)))[:MAX_TAG_CHARACTERS]
        for name, value in tags.items()
    }
