"""One-way messages from a running pipeline to whoever shows its progress.

The pipeline writes JSON lines to the file that `ROWSTEP_EVENTS` names; the command reads them. With
no such file nothing is written, so the trainer behaves the same under any other runner.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

EVENTS_VARIABLE = "ROWSTEP_EVENTS"


def emit(kind: str, **fields: Any) -> None:
    """Append one event; one `write` call a line, so a reader never sees half of one."""
    path = os.environ.get(EVENTS_VARIABLE)
    if not path:
        return
    line = json.dumps({"kind": kind, "time": time.time(), **fields}) + "\n"
    with open(path, "ab", buffering=0) as file:
        file.write(line.encode())
