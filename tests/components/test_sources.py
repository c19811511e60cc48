"""Materialising data: once, whole or not at all, and the same for everyone."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rowstep.components import sources
from rowstep.components.data_errors import DataError
from rowstep.components.sources import SourceData, load_source, materialise
from rowstep.components.synthetic import SyntheticSource
from rowstep.configs.schema import CsvData, SyntheticData, TimeSplit

CONFIG = SyntheticData(kind="synthetic", num_users=50, num_items=30, num_interactions=2500)


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


def rows_of(data: SourceData, split: str) -> list[list[str]]:
    rows: list[list[str]] = []
    for part in sorted((data.folder / split).iterdir()):
        with part.open(newline="") as file:
            header, *body = csv.reader(file)
        assert tuple(header) == data.columns
        rows += body
    return rows


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(self: SyntheticSource) -> None:
        raise AssertionError("the rows were made again")

    monkeypatch.setattr(SyntheticSource, "rows", rows)


def test_a_folder_holds_both_splits_with_header_and_all_rows(tmp_path: Path) -> None:
    data = materialise(CONFIG, tmp_path)
    assert data.folder == tmp_path / f"synthetic-{data.fingerprint[:16]}"
    assert sorted(contents(data.folder)) == [
        "MANIFEST.json",
        "eval/part-00000.csv",
        "train/part-00000.csv",
    ]
    assert data.columns == (
        "user_id",
        "item_id",
        "user_segment",
        "item_category",
        "rating",
        "timestamp",
    )
    assert data.num_examples == {"train": 2250, "eval": 250}
    train, held_out = rows_of(data, "train"), rows_of(data, "eval")
    assert (len(train), len(held_out)) == (2250, 250)
    assert max(int(row[-1]) for row in train) <= min(int(row[-1]) for row in held_out)
    for user, item, segment, category, rating, timestamp in train + held_out:
        assert (user[0], item[0], segment[0], category[0]) == ("u", "i", "s", "c")
        assert rating in {"1.0", "2.0", "3.0", "4.0", "5.0"}
        assert timestamp.isdigit()


def test_the_generator_still_writes_the_bytes_it_always_wrote(tmp_path: Path) -> None:
    # A change that moves a byte must raise GENERATOR_VERSION, and this with it.
    manifest = json.loads((materialise(CONFIG, tmp_path).folder / "MANIFEST.json").read_text())
    assert [entry["sha256"][:16] for entry in manifest["files"]] == [
        "65baaeb2bf86431d",
        "8d22fedf42d194b1",
    ]


def test_what_was_made_can_be_loaded(tmp_path: Path) -> None:
    data = materialise(CONFIG, tmp_path)
    assert load_source(data.folder) == data
    assert data.truth is not None
    assert data.truth.num_eval == 250


def test_a_second_call_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = materialise(CONFIG, tmp_path)
    before = {p: p.stat().st_mtime_ns for p in first.folder.rglob("*")}
    forbid_reading(monkeypatch)
    assert materialise(CONFIG, tmp_path) == first
    assert {p: p.stat().st_mtime_ns for p in first.folder.rglob("*")} == before


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"noise": 0.5},
        {"num_interactions": 2501},
        {"split": TimeSplit(kind="time", eval_percent=11)},
    ],
)
def test_another_setting_is_another_folder(tmp_path: Path, change: dict[str, Any]) -> None:
    other = materialise(CONFIG.model_copy(update=change), tmp_path)
    data = materialise(CONFIG, tmp_path)
    assert other.folder != data.folder
    assert contents(other.folder) != contents(data.folder)


def test_equal_settings_give_equal_bytes_in_any_place(tmp_path: Path) -> None:
    one, two = materialise(CONFIG, tmp_path / "a"), materialise(CONFIG, tmp_path / "b" / "c")
    assert one.fingerprint == two.fingerprint
    assert contents(one.folder) == contents(two.folder)


def test_long_splits_are_cut_into_parts(tmp_path: Path) -> None:
    data = materialise(CONFIG, tmp_path, rows_per_part=100)
    parts = sorted((data.folder / "train").iterdir())
    assert [part.name for part in parts] == [f"part-{i:05d}.csv" for i in range(23)]
    assert [len(part.read_text().splitlines()) - 1 for part in parts] == [100] * 22 + [50]
    whole = materialise(CONFIG, tmp_path)
    assert whole.folder != data.folder
    for split in ("train", "eval"):
        assert rows_of(data, split) == rows_of(whole, split)


def flip_a_byte(folder: Path) -> None:
    part = folder / "train" / "part-00000.csv"
    data = bytearray(part.read_bytes())
    data[-3] ^= 1
    part.write_bytes(data)


def cut_short(folder: Path) -> None:
    part = folder / "eval" / "part-00000.csv"
    part.write_bytes(part.read_bytes()[:-10])


def remove_a_part(folder: Path) -> None:
    (folder / "eval" / "part-00000.csv").unlink()


def remove_the_manifest(folder: Path) -> None:
    (folder / "MANIFEST.json").unlink()


def garble_the_manifest(folder: Path) -> None:
    (folder / "MANIFEST.json").write_text("{")


def embellish_the_truth(folder: Path) -> None:
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    manifest["truth"]["floor_rmse"] = 0.9
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))


DAMAGES: list[tuple[Callable[[Path], None], str | None]] = [
    (flip_a_byte, None),  # sizes agree; only reading the file to the end can tell
    (cut_short, "it must have .* bytes. Got"),
    (remove_a_part, "it must be readable"),
    (remove_the_manifest, r"it must hold MANIFEST\.json"),
    (garble_the_manifest, "it must be readable JSON"),
    (embellish_the_truth, "it must match its own checksum"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_folder_is_seen_and_made_again(
    tmp_path: Path, damage: Callable[[Path], None], message: str | None
) -> None:
    data = materialise(CONFIG, tmp_path)
    whole = contents(data.folder)
    damage(data.folder)
    assert contents(data.folder) != whole
    if message is not None:
        with pytest.raises(DataError, match=message):
            load_source(data.folder)
    assert materialise(CONFIG, tmp_path) == data
    assert contents(data.folder) == whole
    assert names_in(tmp_path) == [data.folder.name]


def test_an_error_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SyntheticSource.rows

    def failing(self: SyntheticSource) -> Any:
        yield from made(self)
        raise OSError("no space left")

    monkeypatch.setattr(SyntheticSource, "rows", failing)
    with pytest.raises(OSError, match="no space left"):
        materialise(CONFIG, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_split_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"num_interactions": 5})
    with pytest.raises(DataError, match=r"at least one row\. Got 5 for training and 0 for eval"):
        materialise(config, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, recent = tmp_path / ".staging-old", tmp_path / ".staging-recent"
    for folder in (old, recent):
        (folder / "train").mkdir(parents=True)
    two_days_ago = time.time() - 2 * 86_400
    os.utime(old, (two_days_ago, two_days_ago))
    materialise(CONFIG, tmp_path)
    assert not old.exists()
    assert recent.exists()


RACER = """
import sys, time
from pathlib import Path
from rowstep.components.sources import load_source, materialise
from rowstep.components.synthetic import SyntheticSource
from rowstep.configs.schema import SyntheticData

root, meeting, name, num_racers = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], 3

def meet(place):
    (meeting / f"{place}-{name}").touch()
    while len(list(meeting.glob(f"{place}-*"))) < num_racers:
        time.sleep(0.001)

def together(self, made=SyntheticSource.rows):
    meet("begin")  # all have found no valid folder before any writes
    yield from made(self)
    meet("end")  # all have written everything before any renames

SyntheticSource.rows = together
load_source(materialise(SyntheticData.model_validate_json(sys.argv[4]), root).folder)
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_race_all_end_with_a_valid_folder(tmp_path: Path, damaged: bool) -> None:
    reference = contents(materialise(CONFIG, tmp_path / "reference").folder)
    root, meeting = tmp_path / "raced", tmp_path / "meeting"
    meeting.mkdir()
    if damaged:
        flip_a_byte(materialise(CONFIG, root).folder)
    command = [sys.executable, "-c", RACER, str(root), str(meeting)]
    racers = [subprocess.Popen([*command, name, CONFIG.model_dump_json()]) for name in "abc"]
    assert [racer.wait(60) for racer in racers] == [0, 0, 0]
    (name,) = names_in(root)
    assert contents(root / name) == reference


def test_a_folder_that_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it must hold MANIFEST\.json\. Got none"):
        load_source(tmp_path)


def test_csv_data_has_no_truth(tmp_path: Path) -> None:
    file = tmp_path / "ratings.csv"
    lines = [f"u{i},i{i % 7},{i % 5 + 1},{i}" for i in range(200)]
    file.write_text("\n".join(["user_id,item_id,rating,timestamp", *lines]))
    data = materialise(CsvData(kind="csv", path=str(file)), tmp_path / "out")
    assert data.truth is None
    assert sum(data.num_examples.values()) == 200


def test_tensorflow_is_not_needed_to_make_data(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from rowstep.components.sources import materialise;"
        "from rowstep.configs.schema import SyntheticData;"
        "materialise(SyntheticData(kind='synthetic', num_interactions=100), "
        f"pathlib.Path({str(tmp_path)!r}));"
        "heavy = {'tensorflow', 'keras', 'tfx', 'pandas', 'mlflow'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_room_names_one_error() -> None:
    assert sources.DataError is DataError
