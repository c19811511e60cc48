"""Splits are a function of the data: stable, exact where they can be, never drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstep.components.splits import hash_split, num_held_out, time_split

USERS = [f"u{i % 97}" for i in range(20_000)]
ITEMS = [f"i{i % 211}" for i in range(20_000)]


def test_a_hash_split_does_not_depend_on_order_or_company() -> None:
    whole = hash_split(USERS, ITEMS, 20)
    backwards = hash_split(USERS[::-1], ITEMS[::-1], 20)
    np.testing.assert_array_equal(whole, backwards[::-1])
    np.testing.assert_array_equal(whole[500:600], hash_split(USERS[500:600], ITEMS[500:600], 20))


@pytest.mark.parametrize("percent", [1, 10, 50])
def test_a_hash_split_hits_its_share(percent: int) -> None:
    share = hash_split(USERS, ITEMS, percent).mean()
    assert share == pytest.approx(percent / 100, abs=4 * (percent / 1e2 / 2e4) ** 0.5)


def test_a_larger_share_only_adds_rows() -> None:
    small, large = hash_split(USERS, ITEMS, 5), hash_split(USERS, ITEMS, 15)
    assert (small <= large).all()
    assert large.sum() > small.sum()


def test_the_border_between_user_and_item_counts() -> None:
    users = [f"{'1' * n}" for n in range(1, 400)]
    items = [f"{'1' * (400 - n)}" for n in range(1, 400)]
    # All pairs have the same joined text; were it alone hashed, they would share one side.
    assert 0 < hash_split(users, items, 50).sum() < 399


def test_the_hash_of_a_pair_never_changes() -> None:
    # Written down once: another outcome would move rows between splits that people have on disk.
    got = "".join("01"[int(side)] for side in hash_split(USERS[:64], ITEMS[:64], 50))
    assert got == "1111011000001101011010001110101110010010100110100101100010110101"


def test_ids_may_be_any_text() -> None:
    assert len(hash_split(["Zoë", "日本", ""], ["a", "b", "c"], 50)) == 3


def test_no_rows_have_no_split() -> None:
    assert len(hash_split([], [], 10)) == 0
    assert len(time_split(np.array([], dtype=np.int64), 10)) == 0


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        hash_split(["a", "b"], ["c"], 10)


@given(
    timestamps=st.lists(st.integers(-3, 8), max_size=60),
    percent=st.integers(1, 50),
)
def test_a_time_split_holds_out_exactly_the_latest(timestamps: list[int], percent: int) -> None:
    times = np.array(timestamps, dtype=np.int64)
    in_eval = time_split(times, percent)
    # A stable sort puts equal times in row order: the specification, at a higher price.
    latest = np.argsort(times, kind="stable")[len(times) - num_held_out(len(times), percent) :]
    assert sorted(np.flatnonzero(in_eval)) == sorted(latest)
