"""Batches that a resume can enter at any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from rowstep.components.data import ExampleSet, epoch_seed, scan_examples
from rowstep.components.data_errors import DataError

SPEC = {
    "id": tf.io.FixedLenFeature([1], tf.int64),
    "rating": tf.io.FixedLenFeature([1], tf.float32),
}


def _write(path: Path, ids: range) -> str:
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions("GZIP")) as writer:
        for number in ids:
            features = {
                "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                "rating": tf.train.Feature(float_list=tf.train.FloatList(value=[number % 5])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString(deterministic=True))
    return str(path)


@pytest.fixture
def examples(tmp_path: Path) -> ExampleSet:
    """Return 100 examples in two files."""
    files = [_write(tmp_path / "b.gz", range(60, 100)), _write(tmp_path / "a.gz", range(60))]
    return scan_examples(files, SPEC, "rating")


def _ids(examples: ExampleSet, **options: Any) -> list[int]:
    given = {"shuffle_buffer": 1000, "seed": 7, "epoch": 0, **options}
    batches = examples.epoch(16, **given)
    return [int(i) for columns, _ in batches for i in columns["id"].numpy()]


def test_scan_counts_averages_and_orders_files_by_name(examples: ExampleSet) -> None:
    assert examples.num_examples == 100
    assert examples.label_mean == pytest.approx(2.0)
    assert [Path(f).name for f in examples.files] == ["a.gz", "b.gz"]
    assert examples.num_steps(16) == 7


def test_every_epoch_holds_every_example_once_in_an_order_of_its_own(examples: ExampleSet) -> None:
    first, second = _ids(examples), _ids(examples, epoch=1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second != list(range(100))


def test_order_is_a_function_of_seed_and_epoch_alone(examples: ExampleSet) -> None:
    assert _ids(examples) == _ids(examples)
    assert _ids(examples) != _ids(examples, seed=8)


@pytest.mark.parametrize("skip", [0, 1, 5, 6, 7])
def test_skipping_batches_gives_the_rest_of_the_same_epoch(examples: ExampleSet, skip: int) -> None:
    assert _ids(examples, skip=skip) == _ids(examples)[16 * skip :]


def test_labels_stay_with_their_examples(examples: ExampleSet) -> None:
    for columns, labels in examples.in_order(30):
        np.testing.assert_array_equal(labels.numpy(), columns["id"].numpy() % 5)


def test_fingerprint_is_of_the_contents_and_not_of_the_folder(tmp_path: Path) -> None:
    def fingerprint(folder: str, count: int) -> str:
        (tmp_path / folder).mkdir()
        return scan_examples(
            [_write(tmp_path / folder / "a.gz", range(count))], SPEC, "rating"
        ).fingerprint

    assert fingerprint("one", 10) == fingerprint("two", 10) != fingerprint("three", 11)


def test_empty_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the split must hold examples\. Got 0 in 1 files"):
        scan_examples([_write(tmp_path / "a.gz", range(0))], SPEC, "rating")


def test_neighbouring_seeds_and_epochs_do_not_share_shuffle_seeds() -> None:
    seeds = {epoch_seed(seed, epoch) for seed in range(30) for epoch in range(30)}
    assert len(seeds) == 900
