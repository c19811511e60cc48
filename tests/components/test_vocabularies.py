"""Which row a key has, and which it had."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstep.components.checkpoints import CheckpointError, CheckpointStore, SavedState
from rowstep.components.vocabularies import (
    GROUP,
    RowCounts,
    Vocabulary,
    load_vocabularies,
    read_vocabularies,
    row_map,
    vocabulary_arrays,
)

KEYS = st.lists(st.binary(max_size=4), unique=True, max_size=12)
OOV = st.integers(1, 3)


def saved(folder: Path, *pairs: tuple[str, np.ndarray], group: str = GROUP) -> SavedState:
    store = CheckpointStore(folder)
    with store.lock():
        store.save(1, {group: iter(pairs)}, {})
    state = store.latest()
    assert state is not None
    return state


@given(KEYS, KEYS, OOV, OOV)
@settings(max_examples=100, deadline=None)
def test_rows_go_where_their_key_is(
    old_keys: list[bytes], new_keys: list[bytes], old_oov: int, new_oov: int
) -> None:
    rows, counts = row_map(Vocabulary.of(old_keys, old_oov), Vocabulary.of(new_keys, new_oov))
    wanted = [new_keys.index(key) if key in new_keys else -1 for key in old_keys]
    wanted += [len(new_keys) + b if b < new_oov else -1 for b in range(old_oov)]
    assert rows.tolist() == wanted
    assert rows.dtype == np.int64
    kept = sum(row >= 0 for row in wanted)
    num_old, num_new = len(old_keys) + old_oov, len(new_keys) + new_oov
    assert counts == RowCounts(kept, num_old - kept, num_new - kept)


@given(KEYS, OOV)
@settings(max_examples=50, deadline=None)
def test_keys_come_back_in_their_order(keys: list[bytes], num_oov: int) -> None:
    vocabulary = Vocabulary.of(iter(keys), num_oov)
    assert list(vocabulary.iter_keys()) == keys
    assert (vocabulary.num_keys, vocabulary.num_rows) == (len(keys), len(keys) + num_oov)


def test_a_fingerprint_knows_keys_order_borders_and_buckets() -> None:
    one = Vocabulary.of([b"ab", b"c"], 1)
    others = [([b"a", b"bc"], 1), ([b"c", b"ab"], 1), ([b"ab", b"c"], 2), ([b"ab", b"d"], 1)]
    prints = {Vocabulary.of(keys, num_oov).fingerprint for keys, num_oov in others}
    assert len(prints | {one.fingerprint}) == 5
    assert one.fingerprint == Vocabulary.of([b"ab", b"c"], 1).fingerprint


def test_a_checkpoint_gives_vocabularies_back(tmp_path: Path) -> None:
    vocabularies = {
        "user_id": Vocabulary.of([b"u7", b"\xff\x00", b"", b"u1"], 2),
        "a/b": Vocabulary.of([], 1),
    }
    loaded = load_vocabularies(saved(tmp_path, *vocabulary_arrays(vocabularies)))
    assert {name: v.fingerprint for name, v in loaded.items()} == {
        name: v.fingerprint for name, v in vocabularies.items()
    }
    assert list(loaded["user_id"].iter_keys()) == [b"u7", b"\xff\x00", b"", b"u1"]


def test_numpy_alone_reads_the_keys() -> None:
    arrays = dict(vocabulary_arrays({"f": Vocabulary.of([b"ab", b"", b"c"], 1)}))
    starts = np.r_[0, arrays["f/ends"][:-1]]
    keys = [arrays["f/bytes"][s:e].tobytes() for s, e in zip(starts, arrays["f/ends"], strict=True)]
    assert keys == [b"ab", b"", b"c"]


def test_a_checkpoint_without_vocabularies_has_none(tmp_path: Path) -> None:
    assert load_vocabularies(saved(tmp_path, ("w", np.zeros(1)), group="model")) == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"f/ends": None}, "one of them missing"),
        ({"f/num_oov": np.ones(2, np.int64)}, r"num_oov of shape \(2,\)"),
        ({"f/ends": np.array([2.0, 3.0])}, "types uint8 and float64"),
        ({"f/ends": np.array([2, 9])}, "ends that do not divide 3 bytes"),
        ({"f/ends": np.array([3, 2, 3])}, "ends that do not divide 3 bytes"),
        ({"f/ends": np.array([], np.int64)}, "ends that do not divide 3 bytes"),
    ],
)
def test_arrays_that_are_no_vocabulary_are_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    arrays = dict(vocabulary_arrays({"f": Vocabulary.of([b"ab", b"c"], 1)})) | change
    state = saved(tmp_path, *((k, v) for k, v in arrays.items() if v is not None))
    with pytest.raises(CheckpointError, match=f"vocabulary of f: .* Got .*{problem}.*[.] Use a"):
        load_vocabularies(state)


def test_many_keys_are_matched_by_one_pass_each() -> None:
    keys = [str(i).encode() for i in range(200_000)]
    shuffled = keys[:]
    random.Random(1).shuffle(shuffled)
    rows, counts = row_map(Vocabulary.of(keys, 1), Vocabulary.of(shuffled, 1))
    assert counts == RowCounts(200_001, 0, 0)
    assert shuffled[rows[123_456]] == keys[123_456]


def test_vocabularies_of_transform_have_the_rows_of_the_tables(tiny_home: Any) -> None:
    tft = pytest.importorskip("tensorflow_transform")
    from rowstep.components.preprocessing import num_rows
    from rowstep.configs import load_config

    config = load_config(tiny_home.config_file, ["features.item_id.oov_buckets=3"])
    graph = tft.TFTransformOutput(str(tiny_home.outputs("Transform", "transform_graph")[0]))
    vocabularies = read_vocabularies(config, graph)
    rows = num_rows(config, graph)
    assert {name: v.num_rows for name, v in vocabularies.items()} == {
        name: rows[name] for name in ("user_id", "item_id")
    }
    assert next(vocabularies["item_id"].iter_keys()).isascii()
