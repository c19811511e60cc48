"""Partitions: which there are, what they are called, and which a window takes."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstep.components.data_errors import DataError
from rowstep.components.partitions import (
    Window,
    choose_window,
    find_partitions,
    parse_span,
    span_text,
)
from rowstep.configs.schema import CsvSpans

NEW_YEAR = 20_454  # days from 1970-01-01 to 2026-01-01
DATED = "day={YYYY}-{MM}-{DD}"


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def days(root: Path, *numbers: int) -> Path:
    return touch(root, *(f"day=2026-01-{number:02}/ratings.csv" for number in numbers))


def window(root: Path, size: int, span: int | None = None) -> Window:
    path = str(root / DATED)
    return choose_window(CsvSpans(kind="csv_spans", path=path, window=size, span=span))


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names", "spans"),
    [
        ("{SPAN}.csv", ["7.csv", "12.csv", "x.csv", "1_2.csv", "-3.csv", "9.csv.tmp"], [7, 12]),
        ("{SPAN:3}/a.csv", ["007/a.csv", "12/a.csv", "0012/a.csv", "100/b.csv"], [7]),
        ("s{SPAN}/*.csv", ["s1/a.csv", "s1/b.csv", "s2/c.txt", "t3/a.csv"], [1]),
        (DATED, ["day=2026-01-02/a.csv", "day=2026-1-3/a.csv", "2026-01-04/a.csv"], [NEW_YEAR + 1]),
        (
            "{YYYY}/{MM}/{DD}.csv",
            ["2026/01/01.csv", "2026/01.csv", "1970/01/01.csv"],
            [0, NEW_YEAR],
        ),
        ("{DD}{MM}{YYYY}*", ["02012026-final", "02012026"], [NEW_YEAR + 1]),
        ("[x]+{SPAN}?", ["[x]+1a", "x+2b", "[x]+3"], [1]),
        ("*{SPAN}/*", ["a1/a", ".b2/a", "c3/.a"], [1]),
    ],
)
def test_a_pattern_finds_its_partitions_and_nothing_else(
    tmp_path: Path, pattern: str, names: list[str], spans: list[int]
) -> None:
    touch(tmp_path, *names)
    assert list(find_partitions(str(tmp_path / pattern)).files) == spans


def test_a_partition_is_a_file_or_the_visible_csv_files_of_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "1/b.csv", "1/a.csv", "1/.c.csv", "1/notes.txt", "2")
    found = find_partitions(str(tmp_path / "{SPAN}")).files
    assert found == {
        1: (tmp_path / "1" / "a.csv", tmp_path / "1" / "b.csv"),
        2: (tmp_path / "2",),
    }


def test_a_folder_without_files_is_no_partition_yet(tmp_path: Path) -> None:
    days(tmp_path, 1)
    (tmp_path / "day=2026-01-02").mkdir()
    assert list(find_partitions(str(tmp_path / DATED)).files) == [NEW_YEAR]


def test_an_impossible_date_is_named(tmp_path: Path) -> None:
    touch(days(tmp_path, 1), "day=2026-02-30/a.csv")
    with pytest.raises(DataError, match=r"day=2026-02-30: its name must hold a date.*'2026-02-30'"):
        find_partitions(str(tmp_path / DATED))


def test_a_span_written_in_two_ways_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "7.csv", "007.csv")
    with pytest.raises(DataError, match=r"written in one way\. Got '7' and '007'"):
        find_partitions(str(tmp_path / "{SPAN}.csv"))
    assert list(find_partitions(str(tmp_path / "{SPAN:3}.csv")).files) == [7]


# --- what spans are called ------------------------------------------------------------------------


@given(st.integers(0, (date.max - date(1970, 1, 1)).days))
def test_a_date_and_its_span_lead_to_each_other(span: int) -> None:
    text = span_text(DATED, span)
    assert date.fromisoformat(text) == date(1970, 1, 1) + timedelta(days=span)
    assert parse_span(text) == parse_span(str(span)) == span


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "2026-02-30", "1969-12-31", "1_0", "٣"])
def test_a_span_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"--span: it must be the number of a partition, or a date"):
        parse_span(text)


def test_neighbours_are_worded_as_a_range_and_long_lists_are_cut(tmp_path: Path) -> None:
    found = find_partitions(str(days(tmp_path, 1) / DATED))
    assert found.show(NEW_YEAR) == "2026-01-01"
    assert found.show(*range(NEW_YEAR, NEW_YEAR + 3), NEW_YEAR + 4) == (
        "2026-01-01 to 2026-01-03, 2026-01-05"
    )
    numbers = find_partitions(str(tmp_path / "{SPAN}"))
    assert numbers.show(*range(0, 14, 2)) == "0, 2, 4, 6, 8 and 2 more"


# --- windows --------------------------------------------------------------------------------------


def test_a_window_ends_with_the_newest_span(tmp_path: Path) -> None:
    chosen = window(days(tmp_path, 1, 2, 3), size=2)
    assert (chosen.span, chosen.spans) == (NEW_YEAR + 2, (NEW_YEAR + 1, NEW_YEAR + 2))
    assert [path.parent.name for path in chosen.files] == ["day=2026-01-02", "day=2026-01-03"]
    assert chosen.notice is None


def test_a_window_ends_with_the_span_that_is_asked_for(tmp_path: Path) -> None:
    chosen = window(days(tmp_path, 1, 2, 3), size=2, span=NEW_YEAR + 1)
    assert chosen.spans == (NEW_YEAR, NEW_YEAR + 1)


def test_a_missing_span_makes_a_window_poorer_and_is_named(tmp_path: Path) -> None:
    chosen = window(days(tmp_path, 1, 2, 6), size=4)
    assert chosen.spans == (NEW_YEAR + 5,)
    assert chosen.notice == (
        "no partition of 2026-01-03 to 2026-01-05 between 2026-01-03 and 2026-01-06: "
        "the training goes on without"
    )


def test_what_lies_before_the_first_partition_is_not_missing(tmp_path: Path) -> None:
    chosen = window(days(tmp_path, 1, 2), size=1000)
    assert chosen.spans == (NEW_YEAR, NEW_YEAR + 1)
    assert chosen.notice is None


def test_a_span_without_a_partition_is_refused(tmp_path: Path) -> None:
    days(tmp_path, 1, 2, 4)
    with pytest.raises(
        DataError,
        match=r"data\.span: there must be a partition of it\. Got 2026-01-03, .*"
        r"Found: 2026-01-01 to 2026-01-02, 2026-01-04\. Name one",
    ):
        window(tmp_path, size=2, span=NEW_YEAR + 2)


@pytest.mark.parametrize("names", [[], ["day_2026-01-01/a.csv"]])
def test_a_pattern_without_any_partition_is_refused(tmp_path: Path, names: list[str]) -> None:
    touch(tmp_path, *names)
    words = r"Found: 'day_2026-01-01'" if names else r"Found: nothing"
    with pytest.raises(DataError, match=rf"data\.path: there must be at least one.*{words}"):
        window(tmp_path, size=1)
