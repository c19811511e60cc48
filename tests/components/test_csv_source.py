"""CSV input: every line is checked, and an error says which one."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowstep.components.csv_source import CsvSource
from rowstep.components.data_errors import DataError
from rowstep.components.sources import materialise
from rowstep.configs.schema import CsvData, TimeSplit

HEADER = "user_id,item_id,rating,timestamp"
GOOD = [f"u{i % 50},i{i % 30},{i % 5 + 1},{1000 - i}" for i in range(300)]


def write(path: Path, *lines: str, header: str = HEADER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return path


def config(path: Path, **settings: Any) -> CsvData:
    return CsvData(kind="csv", path=str(path), **settings)


def read(data: CsvData) -> list[tuple[str, ...]]:
    batches = CsvSource(data, batch_rows=64).rows()
    return [row for batch in batches for row in zip(*batch.columns, strict=True)]


# --- what is read -------------------------------------------------------------------------------


def test_columns_are_renamed_reordered_and_carried_along(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "4;x;film 1;9;alice", header="stars;unused;movie;when;who")
    data = config(
        file,
        delimiter=";",
        user_column="who",
        item_column="movie",
        rating_column="stars",
        time_column="when",
        extra_columns=("unused",),
    )
    assert CsvSource(data).columns == ("user_id", "item_id", "unused", "rating", "timestamp")
    assert read(data) == [("alice", "film 1", "x", "4.0", "9")]


def test_quoted_fields_and_a_byte_order_mark_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(
        b'\xef\xbb\xbf"user_id",item_id,rating,timestamp\r\n"a,""b""",\xc3\xa9,3.5,-7\r\n\r\n'
    )
    assert read(config(file)) == [('a,"b"', "é", "3.5", "-7")]


def test_ratings_are_written_as_floats_and_times_as_plain_integers(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "u,i,4,007", "u,i,.5,0", "u,i,1e1,-0", "u,i,-3.25,12")
    assert [row[2:] for row in read(config(file))] == [
        ("4.0", "7"),
        ("0.5", "0"),
        ("10.0", "0"),
        ("-3.25", "12"),
    ]


def test_the_files_of_a_folder_are_read_in_name_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.csv", f"{name},i,1,1")
    write(tmp_path / "notes.txt", "no data")
    write(tmp_path / ".hidden.csv", "h,i,1,1")
    assert [row[0] for row in read(config(tmp_path))] == ["a", "b", "c"]


def test_files_of_a_folder_may_order_their_columns_differently(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "u,i,1,5")
    write(tmp_path / "b.csv", "6,2,j,v", header="timestamp,rating,item_id,user_id")
    assert read(config(tmp_path)) == [("u", "i", "1.0", "5"), ("v", "j", "2.0", "6")]


text = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(ids=st.lists(st.tuples(text, text).filter(lambda p: all(map(str.strip, p))), min_size=1))
def test_any_text_survives_as_an_id(tmp_path: Path, ids: list[tuple[str, str]]) -> None:
    file = tmp_path / "any.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(HEADER.split(","))
        writer.writerows([user, item, "1", "2"] for user, item in ids)
    assert [row[:2] for row in read(config(file))] == ids


# --- splits -------------------------------------------------------------------------------------


def test_a_time_split_holds_out_the_latest_wherever_they_stand(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", *GOOD)  # the latest come first in this file
    data = config(file, split=TimeSplit(kind="time", eval_percent=20))
    in_eval = np.concatenate([b.in_eval for b in CsvSource(data, batch_rows=64).rows()])
    assert in_eval[:60].all()
    assert not in_eval[60:].any()


def test_a_hash_split_survives_more_data(tmp_path: Path) -> None:
    small = write(tmp_path / "small.csv", *GOOD[:100])
    large = write(tmp_path / "large.csv", *reversed(GOOD))
    one = materialise(config(small), tmp_path)
    two = materialise(config(large), tmp_path)
    for split in ("train", "eval"):
        lines_one = set((one.folder / split / "part-00000.csv").read_text().splitlines())
        lines_two = set((two.folder / split / "part-00000.csv").read_text().splitlines())
        assert lines_one < lines_two


def test_the_fingerprint_follows_the_bytes_and_not_the_place(tmp_path: Path) -> None:
    here = materialise(config(write(tmp_path / "here" / "a.csv", *GOOD)), tmp_path)
    there = materialise(config(write(tmp_path / "there" / "b.csv", *GOOD)), tmp_path)
    changed = [*GOOD[:-1], GOOD[-1] + "1"]
    other = materialise(config(write(tmp_path / "here" / "a.csv", *changed)), tmp_path)
    assert here.fingerprint == there.fingerprint
    assert here.folder == there.folder
    assert other.fingerprint != here.fingerprint


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("u,i,4", r"line 6: a row must have 4 fields, as the header has\. Got 3: 'u,i,4'"),
        ("u,i,4,5,6", r"line 6: a row must have 4 fields.* Got 5"),
        (",i,4,5", r"line 6: 'user_id' must be an id, not empty\. Got ''"),
        ("u,  ,4,5", r"line 6: 'item_id' must be an id, not empty\. Got '  '"),
        ("u,i,,5", r"line 6: 'rating' must be a finite number\. Got ''"),
        ("u,i,four,5", r"line 6: 'rating' must be a finite number\. Got 'four'"),
        ("u,i,nan,5", r"line 6: 'rating' must be a finite number\. Got 'nan'"),
        ("u,i,1e999,5", r"line 6: 'rating' must be a finite number\. Got '1e999'"),
        ("u,i,1_0,5", r"line 6: 'rating' must be a finite number\. Got '1_0'"),
        ("u,i,٤,5", r"line 6: 'rating' must be a finite number"),
        ("u,i,4,5.0", r"line 6: 'timestamp' must be an integer, .*\. Got '5\.0'"),
        ("u,i,4,2024-01-01", r"line 6: 'timestamp' must be an integer"),
        ("u,i,4,9223372036854775808", r"line 6: 'timestamp' must be an integer"),
        ('"u,i,4,5', r"line 6: it must be well-formed CSV"),
        ('"u\nv",i,4,5', r"line 7: 'user_id' must be on one line"),
        ('u,i,4,"' + "9" * 500 + '"', r"Got '9{57}\.\.\.'\."),
    ],
)
def test_a_bad_line_is_named_and_leaves_nothing_behind(
    tmp_path: Path, line: str, message: str
) -> None:
    file = write(tmp_path / "in" / "a.csv", *GOOD[:4], line)
    with pytest.raises(DataError, match=message) as caught:
        materialise(config(file), tmp_path / "out")
    assert str(caught.value).startswith(f"{file}, line ")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_bad_line_in_the_second_file_names_the_second_file(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", *GOOD)
    write(tmp_path / "b.csv", "u,i,x,1")
    with pytest.raises(DataError, match=r"b\.csv, line 2: 'rating'"):
        read(config(tmp_path))


def test_missing_columns_are_all_named_with_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "u,i,1,1", header="userId,item_id,rating,zeit")
    with pytest.raises(DataError, match=r"'user_id' is missing .Nearest: 'userId'.; 'timestamp'"):
        read(config(file))


def test_a_wrong_delimiter_shows_the_header_it_made(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "u;i;1;1", header="user_id;item_id;rating;timestamp")
    with pytest.raises(DataError, match=r"Found: 'user_id;item_id;rating;timestamp'.*delimiter"):
        read(config(file, rating_column="rating", user_column="abc"))


def test_a_doubled_column_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "u,i,1,1,2", header=HEADER + ",rating")
    with pytest.raises(DataError, match=r"a column once\. Got more than one 'rating'"):
        read(config(file))


def test_bytes_that_are_not_utf8_are_found_by_line(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes("\n".join([HEADER, *GOOD, "é,i,1,1", *GOOD]).encode("latin-1"))
    with pytest.raises(
        DataError, match=r"line 302: it must be UTF-8 text\. Got the bytes b'\\xe9'"
    ):
        read(config(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "Got an empty file"), (HEADER + "\n", "Got the header only")],
)
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        read(config(file))


def test_a_missing_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "ratings.csv", *GOOD)
    with pytest.raises(DataError, match=r"does not exist\. Nearest: 'ratings\.csv'"):
        read(config(tmp_path / "rating.csv"))


def test_a_folder_without_csv_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "ratings.tsv", *GOOD)
    with pytest.raises(DataError, match=r"at least one \*\.csv file.*Found: 'ratings\.tsv'"):
        read(config(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"item_column": "user_id"}, "data.item_column: a column must have one role"),
        ({"extra_columns": ("rating",)}, "data.extra_columns: a column must have one role"),
        ({"user_column": "u", "extra_columns": ("user_id",)}, "no name may be one that rowstep"),
        ({"delimiter": '"'}, "data.delimiter: it must be a character that separates"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        CsvSource(config(write(tmp_path / "a.csv", *GOOD), **settings))


def test_a_split_that_came_out_empty_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "in" / "a.csv", *["u,i,1,1"] * 20)  # one pair: one side of a hash
    with pytest.raises(DataError, match="each split must hold at least one row"):
        materialise(config(file), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", *GOOD)
    source = CsvSource(config(file), batch_rows=64)
    rows = source.rows()
    next(rows)
    with file.open("a") as out:
        out.write("u,i,1,1\n")
    with pytest.raises(DataError, match="must not change while it is read"):
        list(rows)
