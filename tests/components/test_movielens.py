"""MovieLens 100K: only the published bytes are believed, in either layout."""

from __future__ import annotations

import csv
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from rowstep.components.data_errors import DataError
from rowstep.components.movielens import MovieLensSource
from rowstep.components.movielens_files import KNOWN_FILES, read_fold
from rowstep.components.sources import SourceData, materialise
from rowstep.configs.schema import HashSplit, MovieLens100K, TimeSplit

BESIDE_THE_CHECKOUT = Path(__file__).parents[3] / "shared" / "data" / "ml-100k"
FOLDER = Path(os.environ.get("ROWSTEP_ML100K", BESIDE_THE_CHECKOUT))
FOLDS = get_args(MovieLens100K.model_fields["fold"].annotation)

real_data = pytest.mark.skipif(
    not (FOLDER / "u.data").exists(),
    reason="the MovieLens 100K files may not be shipped; set ROWSTEP_ML100K to their folder",
)


def config(folder: Path, **settings: Any) -> MovieLens100K:
    return MovieLens100K(kind="movielens_100k", path=str(folder), **settings)


def rows_of(data: SourceData, split: str) -> list[list[str]]:
    with (data.folder / split / "part-00000.csv").open(newline="") as file:
        return list(csv.reader(file))[1:]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "ml-100k"
    folder.mkdir()
    for name in ("u.data", "u.user", "u.item", "u1.base", "u1.test"):
        shutil.copyfile(FOLDER / name, folder / name)  # without the rights, so that it is writable
    return folder


@pytest.fixture
def recbole(tmp_path: Path) -> Path:
    """The layout of the PyPI package, rebuilt from the published files as far as that goes."""
    folder = tmp_path / "recbole"
    folder.mkdir()
    header = b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    (folder / "ml-100k.inter").write_bytes(header + (FOLDER / "u.data").read_bytes())
    header = b"user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    users = (FOLDER / "u.user").read_bytes().replace(b"|", b"\t")
    (folder / "ml-100k.user").write_bytes(header + users)
    shutil.copyfile(FOLDER / "u.item", folder / "u.item")  # its films cannot be rebuilt
    return folder


# --- what is read -------------------------------------------------------------------------------


@real_data
def test_the_official_split_is_the_two_fold_files_joined(tmp_path: Path) -> None:
    data = materialise(config(FOLDER), tmp_path)
    assert data.num_examples == {"train": 80_000, "eval": 20_000}
    assert data.truth is None
    for split, name in (("train", "u1.base"), ("eval", "u1.test")):
        rows = rows_of(data, split)
        published = (FOLDER / name).read_text().split("\n")
        assert ["\t".join((r[0], r[1], r[-2][:1], r[-1])) for r in rows] == published[:-1]
        assert {len(r) for r in rows} == {len(data.columns)} == {9}
        assert all(r[2].isdigit() and r[3] in "MF" and r[4] and r[5] for r in rows)
        assert all(1900 < int(r[6]) < 2000 and r[-2][1:] == ".0" for r in rows)


@real_data
def test_users_are_joined_by_their_ids(tmp_path: Path) -> None:
    rows = rows_of(materialise(config(FOLDER), tmp_path), "train")
    users = dict(line.split("|", 1) for line in (FOLDER / "u.user").read_text().splitlines())
    assert all(users[r[0]].startswith("|".join(r[2:5]) + "|") for r in rows)


@real_data
def test_films_bring_their_first_genre_and_the_year_of_their_title(tmp_path: Path) -> None:
    genres = [
        line.split("|")[0] for line in (FOLDER / "u.genre").read_text().split() if "|" in line
    ]
    films = {}
    for line in (FOLDER / "u.item").read_text(encoding="latin-1").splitlines():
        item, title, released, *rest = line.split("|")
        films[item] = (genres[rest[2:].index("1")], title, released)
    rows = rows_of(materialise(config(FOLDER), tmp_path), "train")
    assert all(r[5] == films[r[1]][0] for r in rows)
    with_year = [(r[6], *films[r[1]][1:]) for r in rows if films[r[1]][2]]
    assert all(f"({year})" in title for year, title, _ in with_year)
    # Some were released again later: the column tells when the film was made.
    assert any(not released.endswith(year) for year, _, released in with_year)
    years = [title.split("(")[-1] for _, title, _ in films.values()]
    without_year = {r[6] for r in rows if not films[r[1]][2]}
    median = statistics.median(int(y[:4]) for y in years if y[:4].isdigit())
    assert without_year == {str(int(median))}


@real_data
@pytest.mark.parametrize("fold", FOLDS)
def test_every_fold_can_be_made_from_the_full_data(fold: str, copy: Path) -> None:
    (copy / "u1.base").unlink()
    (copy / "u1.test").unlink()
    base, test = read_fold(copy, fold, "base"), read_fold(copy, fold, "test")
    full = (FOLDER / "u.data").read_bytes()
    assert sorted((base + test).splitlines()) == sorted(full.splitlines())
    for part, rows in (("base", base), ("test", test)):
        published = FOLDER / f"{fold}.{part}"
        if published.exists():
            assert rows == published.read_bytes()


@real_data
@pytest.mark.parametrize("split", [HashSplit(kind="hash"), TimeSplit(kind="time")])
def test_other_splits_divide_the_base_and_never_open_the_test(
    copy: Path, tmp_path: Path, split: HashSplit | TimeSplit
) -> None:
    (copy / "u1.test").write_text("not even looked at")
    (copy / "u.data").unlink()
    data = materialise(config(copy, split=split), tmp_path / "out")
    train, held_out = rows_of(data, "train"), rows_of(data, "eval")
    keys = sorted("\t".join((r[0], r[1], r[-2][:1], r[-1])) for r in train + held_out)
    assert keys == sorted((FOLDER / "u1.base").read_text().splitlines())
    assert 0.09 < len(held_out) / 80_000 < 0.11
    if split.kind == "time":
        assert len(held_out) == 8000
        assert max(int(r[-1]) for r in train) <= min(int(r[-1]) for r in held_out)


@real_data
def test_both_layouts_give_the_same_data(recbole: Path, tmp_path: Path) -> None:
    ours = materialise(config(recbole), tmp_path / "a")
    theirs = materialise(config(FOLDER), tmp_path / "b")
    assert ours.fingerprint == theirs.fingerprint
    assert rows_of(ours, "eval") == rows_of(theirs, "eval")


@real_data
def test_the_films_of_the_package_are_read_like_the_published_ones() -> None:
    folder = os.environ.get("ROWSTEP_ML100K_RECBOLE")
    if folder is None:
        pytest.skip("set ROWSTEP_ML100K_RECBOLE to recbole/dataset_example/ml-100k of its wheel")
    package = MovieLensSource(config(Path(folder)))
    assert package.identity() == MovieLensSource(config(FOLDER)).identity()


# --- what is refused ----------------------------------------------------------------------------


def add_a_header(data: bytes) -> bytes:
    return b"user\titem\trating\ttime\n" + data


def add_a_user(data: bytes) -> bytes:
    return b"0\t50\t5\t880000000\n" + data


def repeat_a_row(data: bytes) -> bytes:
    return data + data[: data.index(b"\n") + 1]


def convert_line_endings(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def change_a_rating(data: bytes) -> bytes:
    return data.replace(b"\t3\t", b"\t4\t", 1)


def break_a_row(data: bytes) -> bytes:
    lines = data.split(b"\n")
    lines[41] = lines[41].rsplit(b"\t", 1)[0]
    return b"\n".join(lines)


def empty(data: bytes) -> bytes:
    return b""


@real_data
@pytest.mark.parametrize(
    ("doctor", "cause"),
    [
        (add_a_header, r"line 1 is not a row of it: 'user\\titem\\trating\\ttime'"),
        (add_a_user, r"line 1 is not a row of it: '0\\t50"),
        (repeat_a_row, "it has 80001 rows instead of 80000"),
        (convert_line_endings, "its line endings were converted to CRLF"),
        (change_a_rating, "values were changed"),
        (break_a_row, r"line 42 is not a row of it"),
        (empty, "the file is empty"),
    ],
)
def test_a_doctored_copy_is_refused_with_its_likely_cause(
    copy: Path, tmp_path: Path, doctor: Callable[[bytes], bytes], cause: str
) -> None:
    file = copy / "u1.base"
    file.write_bytes(doctor(file.read_bytes()))
    with pytest.raises(DataError, match=cause) as caught:
        materialise(config(copy), tmp_path / "out")
    assert str(caught.value).startswith(f"{file}: it must be the published file of 1586544 bytes")
    assert "pip download" in str(caught.value)
    assert not (tmp_path / "out").exists()


@real_data
@pytest.mark.parametrize("name", ["u.data", "u.user", "u.item"])
def test_no_file_is_believed_unchecked(copy: Path, name: str) -> None:
    (copy / "u1.base").unlink()  # so that u.data is needed
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    with pytest.raises(DataError, match=f"{name}: it must be the published file"):
        MovieLensSource(config(copy))


@real_data
@pytest.mark.parametrize("name", ["u.user", "u.item"])
def test_a_missing_table_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: the MovieLens 100K folder must hold {name}\."):
        MovieLensSource(config(copy))


def test_a_folder_without_interactions_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "u1_base").write_text("")
    with pytest.raises(DataError) as caught:
        MovieLensSource(config(tmp_path))
    message = str(caught.value)
    assert "must hold u1.base (or u.data or ml-100k.inter, to make it from)" in message
    assert "Nearest: 'u1_base'" in message
    assert "pip download --no-deps recbole==1.2.1" in message


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="which is no folder"):
        MovieLensSource(config(tmp_path / "nowhere"))


def test_a_stranger_under_a_known_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("1\t2\t3\t880000000\n")
    with pytest.raises(DataError, match="it has 1 rows instead of 100000"):
        MovieLensSource(config(tmp_path))


def test_every_fold_is_known() -> None:
    expected = {f"{fold}.{part}" for fold in FOLDS for part in ("base", "test")}
    assert expected <= set(KNOWN_FILES)
    for fold in FOLDS:
        base, test = KNOWN_FILES[f"{fold}.base"], KNOWN_FILES[f"{fold}.test"]
        assert base.num_rows + test.num_rows == KNOWN_FILES["u.data"].num_rows
        assert base.num_bytes + test.num_bytes == KNOWN_FILES["u.data"].num_bytes
