"""The manifest of a checkpoint: what is in which file, and how it must look.

    line 1          SHA-256 of all that follows, in hexadecimal
    the rest        one JSON object:
      format            2. A reader refuses what is newer than itself
      kind              "full": the folder holds every array as a whole
      base              null; room for kinds that build on another checkpoint
      step              the training step
      metrics           {name: number}: what was measured at this step; lower is better
      training_seconds  time spent training so far, in all attempts together
      saved_at          date and time in UTC; for people, nothing is ordered by it
      writer            {"pid", "host", "rowstep"}: who wrote it; for people
      groups            names of the groups, empty ones among them
      meta              whatever the saver put there
      arrays            one object for each array, group after group, in the order of the lists:
          group, index      the list, and the position in it
          name              distinct within the group
          shape, dtype      `dtype` as in NumPy, or bfloat16, float8_e4m3fn, float8_e5m2
          file              in `.npy` form; a type that NumPy lacks is stored as unsigned integers
          num_bytes, crc32c length and CRC-32C (Castagnoli) of the whole file

Format 1 had no `base`, `metrics`, `training_seconds`, `saved_at` and `writer`, and its `index`
counted through all groups. FORMAT.md has the same for people who read without rowstep.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from rowstep.components.checkpoints.array_files import (
    ArrayRecord,
    CheckpointError,
    DamageError,
    dtype_of,
    is_type_name,
)

FORMAT = 2
MANIFEST = "MANIFEST.json"
FILE_NAME = re.compile(r"array-\d{5,}\.npy")
_MAX_AXES = 32  # of NumPy
_MAX_BYTES = 2**63 - 1
_HEADER_BYTES = range(16, 2**16 + 10)  # its length is a 16-bit number


@dataclass(frozen=True)
class Manifest:
    """Say what a checkpoint holds; the fields are described above."""

    step: int
    groups: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    records: tuple[ArrayRecord, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    training_seconds: float = 0.0
    saved_at: str = ""
    writer: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the length of all files that the manifest names."""
        return sum(record.num_bytes for record in self.records)

    def to_bytes(self) -> bytes:
        """Return the text of the file, hash included."""
        document = {
            "format": FORMAT,
            "kind": "full",
            "base": None,
            "step": self.step,
            "metrics": self.metrics,
            "training_seconds": self.training_seconds,
            "saved_at": self.saved_at,
            "writer": self.writer,
            "groups": list(self.groups),
            "meta": self.meta,
            "arrays": [vars(record) for record in self.records],
        }
        text = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
        return hashlib.sha256(text).hexdigest().encode() + b"\n" + text

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Return the manifest in a file after checking every field of it.

        A hash only says that the bytes are those that were written. What they say is checked as
        well, so that nonsense is refused here and nothing is allocated because of it.

        Args:
            data: the bytes of the file.
            where: the checkpoint, for messages.

        Raises:
            DamageError: it is no manifest, or contradicts itself.
            CheckpointError: a newer rowstep wrote it.
        """
        digest, _, text = data.partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise DamageError(f"{MANIFEST}: its hash does not match its text")
        try:
            body = json.loads(text, parse_constant=_no_constant)
            _need(isinstance(body, dict), "it must be an object")
            _refuse_newer(body, where)
            return _read(body)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DamageError(
                f"{MANIFEST}: it is no manifest of a checkpoint ({error!r})"
            ) from error


def checked_meta(meta: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `meta` if JSON gives it back unchanged, or raise CheckpointError."""
    try:
        same = json.loads(json.dumps(dict(meta), allow_nan=False)) == meta
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: meta must be plain JSON. Got {error}. Use None for a missing number, "
            "and int(), float() or list() for NumPy values."
        ) from error
    if not same:
        raise CheckpointError(
            f"{where}: meta must come back from JSON unchanged. Got a tuple or a key that is "
            "no string. Use lists and string keys."
        )
    return dict(meta)


def checked_metrics(metrics: Mapping[str, float], where: str) -> dict[str, float]:
    """Return the metrics as plain numbers, or raise CheckpointError."""
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_number(value):
            raise CheckpointError(
                f"{where}: metrics must be finite numbers by name. Got {name!r}: {value!r}. "
                "Leave out what is not finite, and convert others with float()."
            )
    return {name: float(value) for name, value in metrics.items()}


def _refuse_newer(body: Mapping[str, Any], where: str) -> None:
    number, kind = body["format"], body["kind"]
    _need(_is_count(number) and number >= 1, f"format {number!r}")
    if number > FORMAT or kind != "full":
        raise CheckpointError(
            f"{where}: the checkpoint must have format {FORMAT} or lower and kind 'full'. "
            f"Got format {number}, kind {kind!r}. A newer rowstep wrote it: update rowstep, or use "
            "another checkpoint folder."
        )


def _read(body: Mapping[str, Any]) -> Manifest:
    groups, meta = body["groups"], body["meta"]
    _need(_is_count(body["step"]), f"step {body['step']!r}")
    _need(_are_names(groups), f"groups {groups!r}")
    _need(isinstance(meta, dict), "meta")
    records = _records(body["arrays"], groups, number_all=body["format"] == 1)
    if body["format"] == 1:
        return Manifest(body["step"], tuple(groups), meta, records)
    metrics, seconds = body["metrics"], body["training_seconds"]
    _need(body["base"] is None, "a full checkpoint has no base")
    _need(isinstance(metrics, dict) and all(map(_is_number, metrics.values())), "metrics")
    _need(_is_number(seconds) and seconds >= 0, f"training_seconds {seconds!r}")
    _need(isinstance(body["saved_at"], str) and isinstance(body["writer"], dict), "saved_at")
    return Manifest(
        step=body["step"],
        groups=tuple(groups),
        meta=meta,
        records=records,
        metrics={name: float(value) for name, value in metrics.items()},
        training_seconds=float(seconds),
        saved_at=body["saved_at"],
        writer=body["writer"],
    )


def _records(
    arrays: list[dict[str, Any]], groups: list[str], *, number_all: bool
) -> tuple[ArrayRecord, ...]:
    _need(isinstance(arrays, list), "arrays")
    lengths = dict.fromkeys(groups, 0)
    records, names, files = [], set(), set()
    for number, fields in enumerate(arrays):
        shape = fields["shape"]
        _need(isinstance(shape, list) and all(map(_is_count, shape)), f"shape {shape!r}")
        record = ArrayRecord(**{**fields, "shape": tuple(shape)})
        _check(record)
        index = lengths[record.group]
        expected = number if number_all else index
        _need(record.index == expected, f"array {record.index} of {record.group!r} out of order")
        lengths[record.group] += 1
        records.append(replace(record, index=index))
        names.add((record.group, record.name))
        files.add(record.file)
    _need(len(names) == len(files) == len(records), "two arrays share a name or a file")
    order = [groups.index(record.group) for record in records]
    _need(order == sorted(order), "the groups are mixed")
    return tuple(records)


def _check(record: ArrayRecord) -> None:
    _need(isinstance(record.name, str), f"name {record.name!r}")
    _need(
        isinstance(record.file, str) and FILE_NAME.fullmatch(record.file) is not None,
        f"file {record.file!r}",
    )
    _need(is_type_name(record.dtype), f"dtype {record.dtype!r}")
    _need(_is_count(record.index) and _is_count(record.num_bytes), "index or num_bytes")
    _need(_is_count(record.crc32c) and record.crc32c < 2**32, f"crc32c {record.crc32c!r}")
    _need(len(record.shape) <= _MAX_AXES, f"{len(record.shape)} axes")
    room = math.prod(max(size, 1) for size in record.shape) * dtype_of(record.dtype).itemsize
    _need(room <= _MAX_BYTES, f"shape {record.shape}")
    header = record.num_bytes - record.data_bytes
    _need(header in _HEADER_BYTES, f"{record.num_bytes} bytes for shape {record.shape}")


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # also of integers that are too large for a float


def _are_names(value: object) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(name, str) for name in value)
        and len(set(value)) == len(value)
    )
