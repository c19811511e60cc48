"""The forked writer hands pages back to the training, and only those that nobody needs again."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rowstep.components.checkpoints import CheckpointStore
from rowstep.components.checkpoints.background import Saver
from rowstep.components.checkpoints.forked_memory import ForkedMemory

PAGE = mmap.PAGESIZE
BASE = np.arange(400_000, dtype=np.float32)
TABLE = BASE.reshape(-1, 40)


def aligned(num_pages: int) -> np.ndarray:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, num_pages * PAGE, flags=flags), np.uint8)


def test_whole_pages_are_given_back_and_their_neighbours_are_not_touched() -> None:
    memory = aligned(40)
    memory[:] = 7
    inner = memory[PAGE // 2 : 38 * PAGE + 9]
    assert ForkedMemory([inner]).give_back(inner) == 37 * PAGE
    assert not memory[PAGE : 38 * PAGE].any()
    assert (memory[:PAGE] == 7).all()
    assert (memory[38 * PAGE :] == 7).all()


@pytest.mark.parametrize(
    "views",
    [
        [slice(0, 30), slice(29, 40)],
        [slice(0, 40), slice(3, 4), slice(35, 40)],
        [slice(0, 20), slice(0, 20)],
    ],
    ids=["overlapping", "inside", "twice"],
)
def test_arrays_that_share_memory_are_kept(views: Sequence[slice]) -> None:
    memory = aligned(40)
    memory[:] = 7
    arrays = [memory[view.start * PAGE : view.stop * PAGE] for view in views]
    owner = ForkedMemory(arrays)
    assert [owner.give_back(array) for array in arrays] == [0] * len(arrays)
    assert (memory == 7).all()


def test_memory_of_something_else_is_kept() -> None:
    memory = aligned(80)
    memory[:] = 7
    owner = ForkedMemory([memory[: 40 * PAGE]])
    assert owner.give_back(memory[40 * PAGE :]) == 0
    assert owner.give_back(memory[20 * PAGE : 60 * PAGE]) == 0
    assert owner.give_back(memory[: 2 * PAGE]) == 0, "too little to be worth a call"
    assert (memory == 7).all()


@pytest.mark.parametrize(
    "arrays",
    [
        [BASE],
        [BASE, BASE],
        [TABLE, TABLE.T],
        [TABLE[:, :3], TABLE[:, 3:]],
        [BASE[:200_000], BASE[200_000:], BASE[:0]],
        [BASE[:300_000], BASE[100_000:]],
        [TABLE.T, np.float32(3.5)],
    ],
    ids=["one", "twice", "transposed", "columns", "halves", "overlap", "scalar"],
)
def test_what_a_forked_writer_saves_is_what_the_training_has(
    tmp_path: Path, arrays: Sequence[np.ndarray]
) -> None:
    store = CheckpointStore(tmp_path)
    before = BASE.copy()
    with store.lock():
        saver = Saver(store)
        saver.save(1, {"model": [(str(i), array) for i, array in enumerate(arrays)]}, {})
        saver.wait()
        state = store.latest()
    assert state is not None
    for (_, found), array in zip(state.arrays("model"), arrays, strict=True):
        np.testing.assert_array_equal(found, array)
    np.testing.assert_array_equal(BASE, before)


def test_the_forked_writer_gives_back_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, give_back = tmp_path / "given", ForkedMemory.give_back

    def told(self: ForkedMemory, piece: np.ndarray) -> int:
        num_bytes = give_back(self, piece)
        with given.open("a") as file:
            file.write(f"{num_bytes}\n")
        return num_bytes

    monkeypatch.setattr(ForkedMemory, "give_back", told)
    store = CheckpointStore(tmp_path / "store")
    array = np.ones(3 * 2**20, np.float32)
    with store.lock():
        saver = Saver(store)
        saver.save(1, {"model": [("w", array)]}, {})
        saver.wait()
    assert sum(map(int, given.read_text().split())) > 0.98 * array.nbytes
    assert (array == 1).all()
