"""The file of a CSVLogger across a kill: every epoch one row, none lost and none twice."""

from __future__ import annotations

import os
from pathlib import Path

import keras
import numpy as np


def is_remote(callback: keras.callbacks.CSVLogger) -> bool:
    """Return whether the file is on no disk of this machine, so that it is left as it is."""
    return "://" in str(callback.filename)


def saved_rows(callback: keras.callbacks.CSVLogger) -> np.ndarray | None:
    """Return the bytes of the file, or None where there is none to read yet."""
    if callback.csv_file is None or is_remote(callback) or not Path(callback.filename).exists():
        return None
    if not callback.csv_file.closed:
        callback.csv_file.flush()
    return np.frombuffer(Path(callback.filename).read_bytes(), np.uint8)


def put_back(callback: keras.callbacks.CSVLogger, rows: np.ndarray | None) -> None:
    """Make the file what it was when `saved_rows` was called, and go on at its end.

    Call it after `on_train_begin` and after the callback's attributes are back. Without `append`
    that hook has just emptied the file. With it the file may hold rows of epochs that will be run
    again: they are cut off. Rows that are not the next epochs of this training, and a file that
    somebody edited, stay.
    """
    if rows is None or callback.csv_file is None:  # a finished training opens it no more
        return
    path, saved = Path(callback.filename), rows.tobytes()
    callback.csv_file.close()
    found = path.read_bytes()
    if not found:
        path.write_bytes(saved)
    elif found.startswith(saved) and _goes_on(callback, saved, found[len(saved) :]):
        os.truncate(path, len(saved))
    callback.csv_file = open(path, "a")  # noqa: SIM115 - the callback closes it
    callback.append_header = path.stat().st_size == 0


def _goes_on(callback: keras.callbacks.CSVLogger, saved: bytes, rest: bytes) -> bool:
    """Return whether `rest` is what this training wrote after `saved`; it may be cut short."""
    separator = callback.sep.encode()
    # keys is set with the first row; before that the last row is one of an earlier training.
    begun = callback.keys is not None
    last = saved.splitlines()[-1].split(separator)[0] if begun else b"-1"
    lines = rest.split(b"\n")[:-1]  # what follows the last line end is half a row
    if not begun and lines and lines[0].startswith(b"epoch"):
        lines = lines[1:]
    first = int(last) + 1
    wanted = [str(epoch).encode() for epoch in range(first, first + len(lines))]
    return [line.split(separator)[0] for line in lines] == wanted
