"""Keep credentials out of everything that is written down or shown.

Two rules: a value whose name sounds like a credential is replaced as a whole, and what looks like a
credential inside any text is cut out of it. The journal is written after both, so nothing later,
neither MLflow nor an exception, can repeat what was never kept.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from rowstep.components.tracking.target import TrackingError
from rowstep.configs.uris import credentials_in, without_credentials

REDACTED = "[redacted]"

_SECRET_NAMES = (
    "password|passwd|passphrase|pwd|token|secret|credential|credentials|authorization|bearer|"
    "api_?key|apikey|access_?key(?:_?id)?|account_?key|private_?key|secret_?key|"
    "connection_?string|signature|sig|sas"
)
_SECRET_NAME = re.compile(rf"(?:^|_)(?:{_SECRET_NAMES}|passwords|secrets)(?:_|$)")
# Up to the last "@" where there is a colon: a password may hold a slash or a question mark.
_USERINFO = re.compile(r"(?<=://)(?:[^/\s'\"<>@:]*:[^\s'\"<>]*@|[^/\s'\"<>@]+@)")
_SIGNED_QUERY = re.compile(
    rf"(?<=\?)(?=[^\s'\"<>]*(?:{_SECRET_NAMES}|x-amz-|x-goog-|x-ms-|key)[^\s'\"<>=]*=)[^\s'\"<>#]+",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(
    rf"(?<![A-Za-z])((?:[A-Za-z0-9]+[_.-])*(?:{_SECRET_NAMES})[\"']?\s*[=:]\s*)"
    r"(\"[^\"]*\"|'[^']*'|(?:(?:Bearer|Basic)\s+)?[^\s,;&\"'}\])]+)",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9+/=._~-]{6,}")
_MIN_SECRET_CHARACTERS = 6


# --- URIs -----------------------------------------------------------------------------------


def check_uri(uri: str | None) -> None:
    """Refuse a tracking URI that holds credentials: it ends up in metadata, logs and links.

    Raises:
        TrackingError: names the environment variables to use, and does not repeat the secret.
    """
    found = None if uri is None else credentials_in(uri)
    if uri is not None and found is not None:
        raise TrackingError(
            f"tracking.uri: must not hold credentials. Got {found} before or after "
            f"{redact_uri(uri)}. Pass it in the environment, as MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD."
        )


def redact_uri(uri: str) -> str:
    """Return a tracking URI without user name, password and query, fit to be shown."""
    return without_credentials(uri)


# --- names and texts ------------------------------------------------------------------------


def is_secret_name(name: str) -> bool:
    """Tell whether a value of this name must not be written down: `db.password`, `apiKey`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return _SECRET_NAME.search(re.sub(r"[^A-Za-z0-9]+", "_", words).lower()) is not None


def redact_text(text: str) -> str:
    """Return the text without user names in URIs, signed queries, `key=value` secrets and headers.

    What the environment holds under the name of a secret, such as MLFLOW_TRACKING_PASSWORD, is cut
    out wherever it stands.
    """
    for secret in _secrets_of_environment():
        text = text.replace(secret, REDACTED)
    text = _USERINFO.sub("", text)
    text = _SIGNED_QUERY.sub(REDACTED, text)
    text = _ASSIGNMENT.sub(_hide_assigned, text)
    return _SCHEME.sub(rf"\1 {REDACTED}", text)


def _hide_assigned(match: re.Match[str]) -> str:
    value = match[2]
    if value in ("None", "null", "True", "False", "true", "false") or value.startswith("["):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match[1]}{quote}{REDACTED}{quote}"


def redact(name: str, value: Any) -> Any:
    """Return a value without credentials, judged by its name and by what it holds; for JSON."""
    if value is None or isinstance(value, (bool, int, float)):
        is_hidden = is_secret_name(name) and not (value is None or isinstance(value, bool))
        return REDACTED if is_hidden else value
    if is_secret_name(name):
        return REDACTED
    if isinstance(value, Mapping):
        return {str(key): redact(str(key), inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(name, inner) for inner in value]
    return redact_text(str(value))


def redact_document(text: str) -> str:
    """Return a text file without credentials; JSON keeps its layout when there were none."""
    try:
        document = json.loads(text)
    except ValueError:
        return redact_text(text)
    clean = redact("", document)
    return text if clean == document else json.dumps(clean, indent=2)


def _secrets_of_environment() -> list[str]:
    values = {
        value
        for name, value in os.environ.items()
        # A short one would blank out harmless text.
        if len(value) >= _MIN_SECRET_CHARACTERS and is_secret_name(name)
        # PWD is no password, and GOOGLE_APPLICATION_CREDENTIALS says where some are. A key may
        # begin with a slash too, so there must be such a file.
        if name != "PWD" and not (os.path.isabs(value) and os.path.lexists(value))
    }
    return sorted(values, key=len, reverse=True)  # a long one may contain a shorter one
