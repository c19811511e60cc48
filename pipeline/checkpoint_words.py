"""Word checkpoints for people: one line each in a list, a page for one of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from rowstep.components.checkpoints import Entry
from rowstep.components.checkpoints.array_files import ArrayRecord, dtype_of
from rowstep.components.checkpoints.manifest import Manifest
from rowstep.components.identity import run_key
from rowstep.pipeline.checkpoint_places import Shelf

_NUM_ARRAYS_SHOWN = 15
_WIDTH = 14


def shelf_lines(pipeline: str | None, shelf: Shelf, now: datetime) -> list[str]:
    """Word a training and its checkpoints, the newest first."""
    training = shelf.training
    lines = [shelf.medium.where]
    if training is not None:
        state = "finished" if training.finished else "unfinished"
        lines = [f"{pipeline}  training {training.number}  {training.key}  {state}", *lines]
    indent = "  " if training is not None else ""
    lines[1:] = [indent + line for line in lines[1:]]
    entries = shelf.entries()
    times = Counter(entry.step for entry in entries)
    rows = [_entry_row(entry, shelf, now, times[entry.step]) for entry in reversed(entries)]
    lines += [f"{indent}  {line}" for line in _columns(rows)]
    for name in reversed(shelf.set_aside()):
        lines.append(f"{indent}  {name}: moved aside, its bytes are not what was saved")
    if unfinished := shelf.unfinished():
        lines.append(f"{indent}  {len(unfinished)} unfinished: being saved, or left by a kill")
    if not entries:
        lines.append(f"{indent}  no checkpoint")
    return lines


def manifest_lines(
    where: str, manifest: Manifest, now: datetime, *, all_arrays: bool = False
) -> list[str]:
    """Word one checkpoint: position, origin, and the largest of its arrays."""
    meta = manifest.meta
    writer = manifest.writer
    by = ", ".join(
        text
        for text in (
            f"process {writer['pid']} on {writer['host']}" if "host" in writer else "",
            f"rowstep {writer['rowstep']}" if "rowstep" in writer else "",
        )
        if text
    )
    lines = [f"step {manifest.step:,}  {size_words(manifest.num_bytes)}", where]
    lines += _rows("saved", [f"{age_words(manifest.saved_at, now)} by {by}".strip()] if by else [])
    lines += _rows("position", [_position(manifest)])
    lines += _rows("metrics", [number_words(manifest.metrics)] if manifest.metrics else [])
    lines += _rows("training", _identity(meta.get("identity")))
    lines += _rows("mlflow", [f"run {run}"] if (run := meta.get("mlflow_run_id")) else [])
    versions = meta.get("versions")
    if isinstance(versions, Mapping):
        lines += _rows("versions", [", ".join(f"{k} {v}" for k, v in versions.items())])
    lines += _rows("vocabularies", _vocabularies(meta.get("vocabularies")))
    lines += _rows("callbacks", _callbacks(meta.get("callbacks")))
    lines += _rows("groups", [_group(manifest, group) for group in manifest.groups])
    return [*lines, *_rows("arrays", _arrays(manifest.records, all_arrays))]


def size_words(num_bytes: int) -> str:
    """Word a length in bytes."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min(int(math.log(num_bytes, 1024)), 4)
    return f"{num_bytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def age_words(saved_at: str, now: datetime) -> str:
    """Word a date with how long ago it is; clocks may disagree, so the date comes first."""
    try:
        saved = datetime.fromisoformat(saved_at)
        seconds = (now - saved.astimezone(timezone.utc)).total_seconds()
    except (ValueError, TypeError):
        return saved_at or "no date"
    stamp = saved.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    if seconds < 0:
        return f"{stamp} (in the future)"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{stamp} ({seconds / length:.0f} {unit} ago)"
    return f"{stamp} ({seconds:.0f} s ago)"


def number_words(numbers: Mapping[str, float]) -> str:
    """Word metrics."""
    return "  ".join(f"{name} {value:.6g}" for name, value in numbers.items())


def _entry_row(entry: Entry, shelf: Shelf, now: datetime, times: int) -> tuple[str, ...]:
    step = f"step {entry.step:,}" + (f" ({entry.name})" if times > 1 else "")
    if entry.problem is not None:
        return step, ("damaged: " if entry.is_damaged else "unusable: ") + entry.problem
    kept = ""
    if shelf.rules is not None:
        kept = ", ".join(entry.kept_because) or "goes with the next save"
    size, age = size_words(entry.num_bytes), age_words(entry.saved_at, now)
    return step, size, age, number_words(entry.metrics), kept


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Align rows of texts; a short row is a sentence and sets no width."""
    full = [row for row in rows if len(row) > 2]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    lines = []
    for row in rows:
        padded = [text.ljust(widths[i]) if i < len(widths) else text for i, text in enumerate(row)]
        if len(row) == 2 and widths:
            padded[1] = row[1]
        lines.append("  ".join(text for text in padded if text).rstrip())
    return lines


def _rows(label: str, texts: Iterable[str]) -> list[str]:
    return [f"{label if i == 0 else '':{_WIDTH}}{text}" for i, text in enumerate(texts)]


def _position(manifest: Manifest) -> str:
    meta = manifest.meta
    parts = [f"{name} {meta[name]}" for name in ("epoch", "batch", "attempt") if name in meta]
    if manifest.training_seconds:
        parts.append(f"{manifest.training_seconds:,.0f} s of training")
    if "finished" in meta:
        parts.append("finished" if meta["finished"] else "unfinished")
    return ", ".join(parts) or "not told"


def _identity(identity: Any) -> list[str]:
    if not isinstance(identity, Mapping):
        return []
    lines = [f"key {run_key(identity)}"]
    for part in ("model", "optimizer"):
        settings = identity.get(part)
        if isinstance(settings, Mapping):
            name = settings.get("name") or settings.get("kind") or ""
            lines.append(f"{part} {name}".rstrip())
    names = {"train_data": "training data", "eval_data": "evaluation data", "code": "code"}
    lines += [f"{said} {identity[key]}" for key, said in names.items() if key in identity]
    return lines


def _vocabularies(fingerprints: Any) -> list[str]:
    if not isinstance(fingerprints, Mapping):
        return []
    return [f"{name}  {str(fingerprint)[:16]}" for name, fingerprint in fingerprints.items()]


def _callbacks(callbacks: Any) -> list[str]:
    if not isinstance(callbacks, Mapping):
        return []
    entries = callbacks.get("callbacks")
    if isinstance(entries, list):
        return [str(e["name"]) for e in entries if isinstance(e, Mapping) and "name" in e]
    return [str(name) for name in callbacks]  # format 1


def _group(manifest: Manifest, group: str) -> str:
    records = [record for record in manifest.records if record.group == group]
    num_bytes = sum(record.num_bytes for record in records)
    return f"{group}  {len(records)} arrays, {size_words(num_bytes)}"


def _arrays(records: Iterable[ArrayRecord], all_arrays: bool) -> list[str]:
    largest = sorted(records, key=lambda record: -record.num_bytes)
    shown = largest if all_arrays else largest[:_NUM_ARRAYS_SHOWN]
    rows: list[tuple[str, ...]] = [
        (size_words(r.data_bytes), dtype_of(r.dtype).name, str(list(r.shape)), r.group, r.name)
        for r in shown
    ]
    lines = _columns(rows)
    left = len(largest) - len(shown)
    return [*lines, f"and {left} smaller ones; --all shows them"] if left else lines
