"""The client of MLflow, and what its errors mean."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from rowstep.components.tracking.redact import redact_uri
from rowstep.components.tracking.target import TrackingError
from rowstep.components.tracking.text import is_sqlite

_MENDED = (3, 7)  # the first version whose client finds the artifacts of its own server
_SLASHES_IN_IMAGES = (3, 11)


def open_client(uri: str) -> Any:
    """Import MLflow, keep it quiet, and return a client of the store at `uri`."""
    # Long waits are ours to do; the user's own settings stay.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        # Old versions set the levels again while they make a store; a filter stays.
        for name in ("alembic.runtime.migration", "mlflow.store.db.utils"):
            logging.getLogger(name).addFilter(_is_error)
    if _sends_artifacts_to_the_global_uri() and not is_sqlite(uri):
        os.environ.setdefault("MLFLOW_TRACKING_URI", uri)
    if is_sqlite(uri):
        Path(uri.partition(":///")[2].partition("?")[0]).parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def check_place_of_artifacts(uri: str) -> None:
    """Refuse to send a file where this version of MLflow would send it to another server.

    Raises:
        TrackingError: an old MLflow, and another tracking URI in the environment.
    """
    if is_sqlite(uri) or not _sends_artifacts_to_the_global_uri():
        return
    from mlflow import get_tracking_uri

    if get_tracking_uri() != uri:
        raise TrackingError(
            f"tracking: MLflow before {'.'.join(map(str, _MENDED))} sends files to the tracking "
            f"URI of the process. Got {redact_uri(get_tracking_uri())}, and "
            f"{redact_uri(uri)} for this run. Set MLFLOW_TRACKING_URI to that, or install a newer "
            "mlflow."
        )


def _sends_artifacts_to_the_global_uri() -> bool:
    """Tell a version whose client forgets its own tracking URI when it looks for artifacts."""
    return _version() < _MENDED


def takes_slashes_in_images() -> bool:
    """Tell a version that stores a picture of the key `a/b` where it can be fetched again."""
    return _version() >= _SLASHES_IN_IMAGES


def _version() -> tuple[int, ...]:
    from mlflow import __version__

    return tuple(int(part) for part in __version__.split(".")[:2])


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def is_refusal(error: Exception) -> bool:
    """Tell a report that MLflow will never take from a server that is away, busy or locked."""
    from mlflow.exceptions import MlflowException

    if not isinstance(error, MlflowException):
        return False
    code = error.get_http_status_code()
    return 400 <= code < 500 and code not in (401, 403, 408, 429, 499)
