"""How runs were configured: MLflow's params, and what the config files of a run add to them.

Params are few and the same for every run, so that MLflow's own pages stay readable. The whole
config is in two artifacts, and a run that differs in anything else differs there alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rowstep.components.tracking.text import explain

if TYPE_CHECKING:
    from rowstep.pipeline.compare_read import TrackedRun

BLANK = "-"
"""Stands where a run has reported nothing."""
CONFIG, OPTIMIZER = "config.json", "optimizer_config.json"
RUN_NAME = "tracking.run_name"

Row = tuple[str, list[str]]
Settings = Mapping[str, str]
"""Values as texts by dotted names."""

_FINGERPRINTS = {
    "opt.config_sha256": ("opt.", "optimizer."),
    "rowstep.train_data": ("data.", "features.", "label"),
}
"""Tags that differ where runs do, and the settings that can tell why."""
_LACKING = (None, "None")
# What a run that lacks a setting does anyway.
_OFF = {"False", "0", "0.0", "[]", "{}", "()", ""}
_MAX_CHARACTERS = 40
_MAX_FLOAT32 = 3.4e38


def read_files(client: Any, run_id: str) -> tuple[dict[str, Settings], str | None]:
    """Return what the config files of a run say, by the name of the file, and what went wrong.

    Files that a run lacks are left out. What goes wrong is no error: artifacts are often kept by
    another system than the rest, and the params are there without it.

    Cost: a request for the list, and one for each file.
    """
    found: dict[str, Settings] = {}
    try:
        present = {one.path for one in client.list_artifacts(run_id)}
        with TemporaryDirectory() as folder:
            for name, flattened in ((CONFIG, _of_config), (OPTIMIZER, _of_optimizer)):
                if name in present:
                    text = Path(client.download_artifacts(run_id, name, folder)).read_text()
                    found[name] = dict(flattened(json.loads(text)))
    except Exception as error:  # of MLflow, a file system or any object store
        return found, explain(error)
    return found, None


def setting_rows(runs: Sequence[TrackedRun], *, everything: bool) -> list[Row]:
    """Return a row for each setting whose values differ, or for every one.

    A setting that one run has and another lacks, or has as None, differs if it does anything. Runs
    without config files are held against the others by their params alone. Where no setting tells
    why a fingerprint of optimizer or data differs, the fingerprint has a row.
    """
    tables = [_settings(run) for run in runs]
    params = {key for run in runs for key in run.params}
    rows = []
    for key in sorted({key for table in tables for key in table}):
        cells = [table.get(key) for table in tables]
        file = OPTIMIZER if key.startswith(("opt.", "version.")) else CONFIG
        known = [
            cell
            for run, cell in zip(runs, cells, strict=True)
            if cell is not None or key in params or file in run.files
        ]
        if everything or _differ(known):
            rows.append((key, [BLANK if cell is None else _short(cell) for cell in cells]))
    return [*rows, *_unexplained(runs, rows)]


def nothing_differs(runs: Sequence[TrackedRun]) -> str:
    """Word that there is no row, without claiming more than what is known."""
    poor = [run.label for run in runs if not run.files]
    if not poor:
        return "Nothing that is stored of their settings differs."
    return f"No params differ. The config is not known of: {', '.join(poor)}."


def _settings(run: TrackedRun) -> dict[str, str]:
    config = dict(run.files.get(CONFIG, {}))
    config.pop(RUN_NAME, None)  # it is above the column
    if OPTIMIZER in run.files:  # which has the same, as it was built
        config = {k: v for k, v in config.items() if not k.startswith("optimizer.")}
    return {**config, **run.files.get(OPTIMIZER, {}), **run.params}


def _differ(values: Sequence[str | None]) -> bool:
    there = {value for value in values if value not in _LACKING}
    return len(there) > 1 or (len(there) == 1 and len(set(values)) > 1 and not there <= _OFF)


def _unexplained(runs: Sequence[TrackedRun], rows: Sequence[Row]) -> Iterator[Row]:
    for tag, sections in _FINGERPRINTS.items():
        told = [cells for key, cells in rows if key.startswith(sections)]
        digests = [run.tags.get(tag) for run in runs]
        if any(
            digests[a] != digests[b]
            and None not in (digests[a], digests[b])
            and all(cells[a] == cells[b] for cells in told)
            for a, b in itertools.combinations(range(len(runs)), 2)
        ):
            yield tag, [BLANK if digest is None else digest[:16] for digest in digests]


# --- from nested values to texts ------------------------------------------------------------


def _of_config(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    return _flat("", document)


def _of_optimizer(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name what Keras has serialized as the params do, which stand before it."""
    yield "opt.class", str(document.get("class_name"))
    yield from _flat("version", document.get("versions", {}))
    config = document.get("config", {})
    inner = config.get("inner_optimizer")
    if isinstance(inner, dict):  # of a LossScaleOptimizer
        yield from _flat("opt", {k: v for k, v in config.items() if k != "inner_optimizer"})
        config = inner.get("config", {})
    rate = config.get("learning_rate")
    while isinstance(rate, dict) and rate.get("class_name") == "OffsetSchedule":
        rate = rate["config"]["schedule"]
    if isinstance(rate, dict):
        yield "opt.schedule", str(rate.get("class_name"))
        yield from _flat("opt.schedule", rate.get("config", {}))
        config = {key: value for key, value in config.items() if key != "learning_rate"}
    yield from _flat("opt", config)


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return str(_as_meant(value))
    if isinstance(value, (dict, list)):
        return json.dumps(value, sort_keys=True)
    return str(value)


def _as_meant(value: float) -> float:
    """Return the shortest decimal of a number that is a float32; any other as it is."""
    if not abs(value) < _MAX_FLOAT32 or _float32(value) != value:
        return value
    texts = (f"{value:.{digits}g}" for digits in range(1, 18))
    return float(next(text for text in texts if _float32(float(text)) == value))


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _short(text: str) -> str:
    """Shorten a value that would fill the table; different ones stay different."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    return f"{text[: _MAX_CHARACTERS - 10]}... {digest}"
