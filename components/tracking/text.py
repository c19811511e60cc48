"""Texts that leave the training for MLflow or the screen: names, values, URIs without secrets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from rowstep.components.tracking.journal import Target, TrackingError

MAX_TAG_CHARACTERS = 5000

_MAX_PARAM_CHARACTERS = 500
_MAX_NAME_CHARACTERS = 250
_MAX_REASON_CHARACTERS = 300
_USERINFO = re.compile(r"(?<=://)[^/\s'\"]*@")
_SECRET_IN_QUERY = re.compile(r"[?&;][^=&]*(password|token|secret|credential|key)[^=&]*=", re.I)
_HINTS = {
    401: " (set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN)",
    403: " (no permission, or a server that does not know this host name: see its --allowed-hosts)",
}

# --- URIs -----------------------------------------------------------------------------------


def check_uri(uri: str | None) -> None:
    """Refuse a tracking URI that holds credentials: it ends up in metadata, logs and links.

    Raises:
        TrackingError: names the environment variables to use, and does not repeat the secret.
    """
    if uri is None:
        return
    rest = uri.partition("://")[2]
    has_user = "@" in rest and not rest.startswith("/")
    if has_user or _SECRET_IN_QUERY.search(uri):
        raise TrackingError(
            f"tracking.uri: must not hold credentials. Got {'a user name' if has_user else 'a key'}"
            f" before or after {redact_uri(uri)}. Pass it in the environment, as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        )


def redact_uri(uri: str) -> str:
    """Return a tracking URI without user name, password and query, fit to be shown."""
    scheme, separator, rest = uri.partition("://")
    if separator and not rest.startswith("/"):
        # Up to the last "@": a password may hold any character, a slash or a question mark too.
        rest = rest.rpartition("@")[2]
    return re.split(r"[?#]", f"{scheme}{separator}{rest}", maxsplit=1)[0]


def is_sqlite(uri: str) -> bool:
    """Tell a store that is a file, used in this process, from a server."""
    return uri.startswith("sqlite:")


def run_link(target: Target, experiment_id: str, run_id: str) -> str:
    """Say where a person finds the run: a page of MLflow's, or its place in a local store."""
    uri = redact_uri(target.uri)
    if uri.startswith(("http://", "https://")):
        return f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    return f"experiment '{target.experiment}', run {run_id} in {uri}"


# --- errors ---------------------------------------------------------------------------------


def explain(error: Exception) -> str:
    """Say in one line what went wrong, without credentials."""
    text = " ".join(_USERINFO.sub("", str(error)).split())
    code = getattr(error, "get_http_status_code", lambda: 0)()
    return f"{type(error).__name__}: {text[:_MAX_REASON_CHARACTERS]}{_HINTS.get(code, '')}"


# --- names and values -----------------------------------------------------------------------


def clean_name(name: str) -> str:
    """Return a name that every MLflow server takes, the same for the same name.

    Allowed are letters, digits, `_ . - /` and spaces, in parts that read as a relative path.
    """
    parts = re.sub(r"[^\w/. -]", "_", name, flags=re.ASCII).split("/")
    clean = "/".join(part for part in parts if part.strip(". ")) or "_"
    if len(clean) <= _MAX_NAME_CHARACTERS:
        return clean
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{clean[: _MAX_NAME_CHARACTERS - 9]}_{digest}"


def param_text(value: Any) -> str:
    """Return a param's value as MLflow keeps it.

    Numbers have the shortest digits that give the same number back, lists and mappings are JSON,
    and what is longer than 500 characters is named by its SHA-256.
    """
    if isinstance(value, float):
        text = float.__repr__(value)  # NumPy's own repr of its float64 names the type
    elif isinstance(value, (list, tuple, dict)):
        text = json.dumps(value, default=str)
    else:
        text = str(value)
    text = _USERINFO.sub("", text)
    if len(text) > _MAX_PARAM_CHARACTERS:
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return text


def clean_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return tags with names that MLflow takes, of a length it takes, without credentials."""
    return {
        clean_name(name): _USERINFO.sub("", str(value))[:MAX_TAG_CHARACTERS]
        for name, value in tags.items()
    }
