"""Transformed examples as a stream of batches that a resume can enter at any step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import tensorflow as tf

from rowstep.components.data_errors import DataError

_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class ExampleSet:
    """One split of transformed examples, scanned once."""

    files: tuple[str, ...]
    spec: dict[str, tf.io.FixedLenFeature]
    label: str
    num_examples: int
    label_mean: float
    fingerprint: str
    """SHA-256 over the contents of the files, in their order; the folder does not matter."""

    def num_steps(self, batch_size: int) -> int:
        """Count the batches of one epoch, the shorter last one included."""
        return -(-self.num_examples // batch_size)

    def epoch(
        self, batch_size: int, *, shuffle_buffer: int, seed: int, epoch: int, skip: int = 0
    ) -> tf.data.Dataset:
        """Return the batches of one epoch from batch `skip` on.

        The order is a pure function of (seed, epoch), so resuming needs no iterator state: the
        batches before `skip` are read and shuffled but not parsed. Cost of a skip: reading the
        records in front of it.
        """
        records = tf.data.TFRecordDataset(list(self.files), compression_type="GZIP")
        shuffled = records.shuffle(
            min(shuffle_buffer, max(self.num_examples, 1)),
            seed=epoch_seed(seed, epoch),
            reshuffle_each_iteration=False,
        )
        return self._parsed(shuffled.batch(batch_size).skip(skip))

    def in_order(self, batch_size: int) -> tf.data.Dataset:
        """Return all batches in file order."""
        records = tf.data.TFRecordDataset(list(self.files), compression_type="GZIP")
        return self._parsed(records.batch(batch_size))

    def _parsed(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        def parse(serialized: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            columns = tf.io.parse_example(serialized, self.spec)
            columns = {name: tf.reshape(column, [-1]) for name, column in columns.items()}
            return columns, columns.pop(self.label)

        return batches.map(parse, num_parallel_calls=2, deterministic=True).prefetch(4)


def epoch_seed(seed: int, epoch: int) -> int:
    """Derive the shuffle seed of an epoch; neighbouring seeds and epochs give unrelated orders."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def scan_examples(
    files: Sequence[str], spec: dict[str, tf.io.FixedLenFeature], label: str
) -> ExampleSet:
    """Count the examples, average the label and fingerprint the files.

    Args:
        files: gzipped TFRecord files; read in name order, whatever the order given.
        spec: the transformed feature spec; columns beyond it are not parsed.
        label: the column to predict.

    Raises:
        DataError: "data: the split must hold examples. Got 0 in <files>. ..."
    """
    ordered = tuple(sorted(files))
    records = tf.data.TFRecordDataset(list(ordered), compression_type="GZIP")
    labels = records.batch(8192).map(
        lambda batch: tf.reshape(tf.io.parse_example(batch, {label: spec[label]})[label], [-1])
    )
    count, total = 0, 0.0
    for values in labels:
        count += int(tf.size(values))
        total += float(tf.reduce_sum(tf.cast(values, tf.float64)))
    if not count:
        raise DataError(
            f"data: the split must hold examples. Got 0 in {len(ordered)} files. "
            "Both splits need rows. Check the split of the 'data' section"
        )
    return ExampleSet(ordered, dict(spec), label, count, total / count, _fingerprint(ordered))


def _fingerprint(files: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in files:
        checksum, size = google_crc32c.Checksum(), 0
        with open(name, "rb") as file:
            while piece := file.read(_READ_BYTES):
                checksum.update(piece)
                size += len(piece)
        digest.update(f"{Path(name).name} {size} {checksum.hexdigest().decode()}\n".encode())
    return digest.hexdigest()


def split_files(split_uri: str) -> list[str]:
    """List the TFRecord files of one split of an Examples artifact."""
    return sorted(str(path) for path in Path(split_uri).glob("*") if path.is_file())


def feature_spec(transform_output: Any, names: Sequence[str]) -> dict[str, tf.io.FixedLenFeature]:
    """Pick the columns that the model and the loss read from the transformed feature spec."""
    full = transform_output.transformed_feature_spec()
    return {name: full[name] for name in names}
