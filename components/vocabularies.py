"""Vocabularies of a training: which key owns which row, and where yesterday's rows are today.

Transform orders a vocabulary by frequency in the training split, so the same row belongs to another
key the next day. A checkpoint therefore carries the keys that its tables were trained with.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rowstep.components.checkpoints import CheckpointError, SavedState
from rowstep.configs import RunConfig
from rowstep.configs.schema import VocabularyFeature

if TYPE_CHECKING:  # saved vocabularies are read without TensorFlow
    from tensorflow_transform import TFTransformOutput

__all__ = [
    "GROUP",
    "RowCounts",
    "RowMap",
    "Vocabulary",
    "load_vocabularies",
    "read_vocabularies",
    "row_map",
    "vocabulary_arrays",
]

GROUP = "vocabularies"
"""The group of a checkpoint that holds them."""
_BLOCK = 1 << 17
"""Keys that are Python objects at a time."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Hold the keys of a feature in the order of their rows, in two arrays.

    Rows are `num_keys` rows of keys, then `num_oov` rows that all other values share.

    Args:
        data: the bytes of all keys without anything between them, uint8.
        ends: where each key ends in `data`, int64 [num_keys].
        num_oov: rows of values that are not in the vocabulary.
    """

    data: np.ndarray
    ends: np.ndarray
    num_oov: int

    @classmethod
    def of(cls, keys: Iterable[bytes], num_oov: int) -> Vocabulary:
        """Return the vocabulary of these keys in the order of their rows."""
        keys = list(keys)
        ends = np.cumsum(np.fromiter(map(len, keys), np.int64, len(keys)), dtype=np.int64)
        return cls(np.frombuffer(b"".join(keys), np.uint8), ends, num_oov)

    @property
    def num_keys(self) -> int:
        """Return the number of rows that belong to a key of their own."""
        return len(self.ends)

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the feature's tables."""
        return self.num_keys + self.num_oov

    def iter_keys(self) -> Iterator[bytes]:
        """Yield the keys in the order of their rows."""
        for first in range(0, self.num_keys, _BLOCK):
            yield from self.keys_of(np.arange(first, min(first + _BLOCK, self.num_keys)))

    def keys_of(self, rows: np.ndarray) -> Iterator[bytes]:
        """Yield the keys of these rows, one at a time."""
        data = self.data.data
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        for start, end in zip(starts.tolist(), self.ends[rows].tolist(), strict=True):
            yield bytes(data[start:end])

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of keys, their order and `num_oov`, in hexadecimal digits."""
        # The ends too: the keys "ab", "c" and "a", "bc" have the same bytes.
        digest = hashlib.sha256(f"{self.num_oov}:{self.num_keys}:".encode())
        digest.update(self.ends.astype("<i8", copy=False).data)
        digest.update(self.data.data)
        return digest.hexdigest()


class RowCounts(NamedTuple):
    """Count what became of the rows of a feature, those of unseen values included."""

    kept: int
    """Old rows that are there today."""
    dropped: int
    """Old rows that are not."""
    new: int
    """Rows of today that no old row became."""


class RowMap(NamedTuple):
    """Say where each old row is today."""

    new_rows: np.ndarray
    """int64 [old rows]: today's row, or -1 where there is none."""
    counts: RowCounts


def row_map(old: Vocabulary, new: Vocabulary) -> RowMap:
    """Match the rows of two vocabularies: keys by their bytes, other rows by bucket number.

    Where the number of buckets changed, the values that share one are others than before; a row of
    the same number still holds the mean of many unseen values, and starts better than a random one.

    Cost: a few seconds for a million keys; memory for about 40 MiB, and 12 bytes a key.
    """
    num_parts = max(old.num_keys, new.num_keys) // _BLOCK + 1
    old_parts, new_parts = _parts(old, num_parts), _parts(new, num_parts)
    new_rows = np.full(old.num_rows, -1, np.int64)
    for part in range(num_parts):
        of_old, of_new = np.flatnonzero(old_parts == part), np.flatnonzero(new_parts == part)
        row_of = dict(zip(new.keys_of(of_new), of_new.tolist(), strict=True))
        new_rows[of_old] = [row_of.get(key, -1) for key in old.keys_of(of_old)]
    shared = min(old.num_oov, new.num_oov)
    new_rows[old.num_keys : old.num_keys + shared] = new.num_keys + np.arange(shared)
    kept = int(np.count_nonzero(new_rows >= 0))
    return RowMap(new_rows, RowCounts(kept, old.num_rows - kept, new.num_rows - kept))


def _parts(vocabulary: Vocabulary, num_parts: int) -> np.ndarray:
    """Deal the keys into parts by their checksum: a dictionary of all would be too large."""
    checksums = (zlib.crc32(key) % num_parts for key in vocabulary.iter_keys())
    return np.fromiter(checksums, np.uint16, vocabulary.num_keys)


def read_vocabularies(
    config: RunConfig, transform_output: TFTransformOutput
) -> dict[str, Vocabulary]:
    """Read the vocabulary of each vocabulary feature that Transform wrote, by feature.

    Cost: all keys of a feature as Python objects while it is read; what is returned holds the bytes
    of the keys and 8 bytes for each.
    """
    return {
        name: Vocabulary.of(transform_output.vocabulary_by_name(name), feature.oov_buckets)
        for name, feature in config.features.items()
        if isinstance(feature, VocabularyFeature)
    }


def vocabulary_arrays(
    vocabularies: Mapping[str, Vocabulary],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what a checkpoint stores in its group `vocabularies`, three arrays for a feature.

        <feature>/bytes      uint8: all keys, without anything between them
        <feature>/ends       int64: where each key ends; key k is bytes[ends[k - 1]:ends[k]]
        <feature>/num_oov    int64, a scalar: rows behind those of the keys

    Cost: nothing is copied.
    """
    for name, vocabulary in vocabularies.items():
        yield f"{name}/bytes", vocabulary.data
        yield f"{name}/ends", vocabulary.ends
        yield f"{name}/num_oov", np.asarray(vocabulary.num_oov, np.int64)


def load_vocabularies(saved: SavedState) -> dict[str, Vocabulary]:
    """Return the vocabularies that a checkpoint was trained with, by feature.

    A checkpoint from before they were saved has none: {}.

    Raises:
        CheckpointError: the arrays of a feature are not those that `vocabulary_arrays` yields.
    """
    if GROUP not in saved.groups:
        return {}
    arrays = dict(saved.arrays(GROUP))
    features = dict.fromkeys(name.rpartition("/")[0] for name in arrays)
    return {feature: _loaded(feature, arrays) for feature in features}


def _loaded(feature: str, arrays: Mapping[str, np.ndarray]) -> Vocabulary:
    parts = [arrays.get(f"{feature}/{part}") for part in ("bytes", "ends", "num_oov")]
    data, ends, num_oov = parts
    if data is None or ends is None or num_oov is None:
        problem = "one of them missing"
    elif (data.dtype, ends.dtype, num_oov.shape) != (np.uint8, np.int64, ()):
        problem = f"types {data.dtype} and {ends.dtype}, num_oov of shape {num_oov.shape}"
    elif np.any(np.diff(ends, prepend=0) < 0) or (ends[-1] if len(ends) else 0) != len(data):
        problem = f"ends that do not divide {len(data)} bytes"
    else:
        return Vocabulary(data, ends, int(num_oov))
    raise CheckpointError(
        f"vocabulary of {feature}: a checkpoint must hold {feature}/bytes (uint8), {feature}/ends "
        f"(int64) and {feature}/num_oov (a number) that fit together. Got {problem}. "
        "Use a checkpoint that rowstep wrote, or set train.warm_start to false."
    )
