"""The files of a checkpoint: old formats, the documented one, and nonsense with a valid hash."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import pytest

from rowstep.components.checkpoints import CheckpointError, CheckpointStore, open_checkpoint

GOLDEN = Path(__file__).parent / "golden"
PAGE = Path(__file__).parents[2] / "components" / "checkpoints" / "FORMAT.md"
STEP = "step-000000000007"
TABLE = np.arange(12).reshape(4, 3)
EXPECTED = {
    "model": {
        "user/table": (TABLE / 8).astype(np.float32),
        "bias": np.array(0.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
    },
    "optimizer": {
        "iterations": np.array(7, np.int64),
        "user/table/momentum": (TABLE - 6).astype(ml_dtypes.bfloat16),
        "user/table/velocity": TABLE.astype(np.float64) ** 2,
    },
    "metrics": {},
}


def write_manifest(folder: Path, body: Any) -> None:
    text = json.dumps(body).encode()
    (folder / "MANIFEST.json").write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def read_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "MANIFEST.json").read_bytes().partition(b"\n")[2])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "format-2" / STEP, tmp_path / STEP))


@pytest.mark.parametrize("name", ["format-1", "format-2"])
def test_checkpoints_of_every_released_format_load(name: str) -> None:
    state = open_checkpoint(GOLDEN / name / STEP)
    assert (state.step, state.path) == (7, GOLDEN / name / STEP)
    assert state.meta == {"epoch": 1, "note": "\u00e9", "loss": [0.5, None, True]}
    assert state.groups == tuple(EXPECTED)
    assert state.num_bytes == sum(
        file.stat().st_size for file in state.path.iterdir() if file.suffix == ".npy"
    )
    new = name == "format-2"
    assert (state.metrics, state.training_seconds) == (
        ({"val_rmse": 0.875}, 61.5) if new else ({}, 0.0)
    )
    for group, arrays in EXPECTED.items():
        assert [record.index for record in state.records if record.group == group] == [
            *range(len(arrays))
        ]
        for (saved_name, saved), (key, array) in zip(
            state.arrays(group), arrays.items(), strict=True
        ):
            assert (saved_name, saved.dtype, saved.shape) == (key, array.dtype, array.shape)
            assert saved.tobytes() == array.tobytes()


def test_a_training_goes_on_after_a_checkpoint_of_the_first_format(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "format-1" / STEP, tmp_path / STEP)
    store = CheckpointStore(tmp_path)
    with store.lock():
        old = store.latest(or_refuse=True)
        assert old is not None
        store.save(8, {group: old.arrays(group) for group in old.groups}, old.meta)
    assert store.steps() == [7, 8]
    assert read_manifest(tmp_path / "step-000000000008")["format"] == 2


def test_the_lines_of_the_format_page_read_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    folder.rename(folder.parent / "step-000000001234")  # the name on the page
    monkeypatch.chdir(folder.parent)
    found: dict[str, Any] = {}
    exec(code, found)  # noqa: S102
    assert len(found["arrays"]) == 6
    for (group, name), array in found["arrays"].items():
        expected = EXPECTED[group][name]
        assert array.view(expected.dtype).tobytes() == expected.tobytes()


def test_the_format_page_names_every_field(folder: Path) -> None:
    body = read_manifest(folder)
    page = PAGE.read_text()
    missing = [name for name in [*body, *body["arrays"][0]] if f"`{name}`" not in page]
    assert missing == []


Change = Callable[[dict[str, Any]], object]
NONSENSE: dict[str, Change] = {
    "a step that is text": lambda b: b.update(step="7"),
    "a negative step": lambda b: b.update(step=-7),
    "a step that is true": lambda b: b.update(step=True),
    "no step": lambda b: b.pop("step"),
    "a format below 1": lambda b: b.update(format=0),
    "a format that is text": lambda b: b.update(format="2"),
    "a full one with a base": lambda b: b.update(base="step-000000000001"),
    "arrays that are a number": lambda b: b.update(arrays=3),
    "arrays of numbers": lambda b: b.update(arrays=[1, 2]),
    "groups that are text": lambda b: b.update(groups="model"),
    "a group twice": lambda b: b.update(groups=["model", "model", "optimizer"]),
    "an array of no group": lambda b: b.update(groups=["model"]),
    "a group that is a list": lambda b: b["arrays"][0].update(group=["model"]),
    "a meta that is a list": lambda b: b.update(meta=[]),
    "a metric that is text": lambda b: b.update(metrics={"a": "low"}),
    "a metric that is not finite": lambda b: b.update(metrics={"a": float("nan")}),
    "a metric beyond all floats": lambda b: b.update(metrics={"a": 10**400}),
    "negative time": lambda b: b.update(training_seconds=-1.0),
    "a negative axis": lambda b: b["arrays"][0].update(shape=[-4, -3]),
    "a shape that is a number": lambda b: b["arrays"][0].update(shape=12),
    "a shape of floats": lambda b: b["arrays"][0].update(shape=[4.0, 3.0]),
    "too many axes": lambda b: b["arrays"][1].update(shape=[1] * 40),
    "a shape beyond all memory": lambda b: b["arrays"][0].update(shape=[2**62, 2**62]),
    "an empty shape beyond all memory": lambda b: b["arrays"][2].update(shape=[0, 2**62, 2**62]),
    "a terabyte": lambda b: b["arrays"][0].update(shape=[2**38], num_bytes=2**40 + 128),
    "another shape of that size": lambda b: b["arrays"][0].update(shape=[3, 4]),
    "a shape of another size": lambda b: b["arrays"][0].update(shape=[4, 4]),
    "a negative length": lambda b: b["arrays"][0].update(num_bytes=-176),
    "objects": lambda b: b["arrays"][0].update(dtype="|O"),
    "text": lambda b: b["arrays"][0].update(dtype="<U1"),
    "a structure": lambda b: b["arrays"][0].update(dtype="f4,f4"),
    "a type of no size": lambda b: b["arrays"][0].update(dtype="|V0"),
    "a type that NumPy lacks": lambda b: b["arrays"][0].update(dtype="<f3"),
    "a type that is a number": lambda b: b["arrays"][0].update(dtype=4),
    "a type by another name": lambda b: b["arrays"][0].update(dtype="float32"),
    "another type of that size": lambda b: b["arrays"][0].update(dtype="<i4"),
    "a file elsewhere": lambda b: b["arrays"][0].update(file="../step-7/array-00000.npy"),
    "the manifest as an array": lambda b: b["arrays"][0].update(file="MANIFEST.json"),
    "a file that is a number": lambda b: b["arrays"][0].update(file=0),
    "a file twice": lambda b: b["arrays"][1].update(file="array-00000.npy"),
    "a name twice": lambda b: b["arrays"][1].update(name="user/table"),
    "a name that is a number": lambda b: b["arrays"][1].update(name=1),
    "an index out of order": lambda b: b["arrays"][1].update(index=2),
    "groups that are mixed": lambda b: b.update(arrays=b["arrays"][3:] + b["arrays"][:3]),
    "a checksum of more bits": lambda b: b["arrays"][0].update(crc32c=2**32),
    "a field too many": lambda b: b["arrays"][0].update(codec="zip"),
    "a field too few": lambda b: b["arrays"][0].pop("crc32c"),
}


@pytest.mark.parametrize("change", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_with_a_valid_hash_is_damage(folder: Path, change: Change) -> None:
    body = read_manifest(folder)
    change(body)
    write_manifest(folder, body)
    with pytest.raises(CheckpointError, match="the checkpoint must be whole"):
        open_checkpoint(folder)
    store = CheckpointStore(folder.parent)
    assert store.latest() is None
    assert "passed over" in store.problems[0]


def test_an_empty_array_beyond_all_memory_is_damage_though_its_file_agrees(folder: Path) -> None:
    body, shape = read_manifest(folder), (0, 2**62, 2**62)
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.encode()
    (folder / "array-00002.npy").write_bytes(data)
    body["arrays"][2].update(shape=shape, crc32c=google_crc32c.value(data), num_bytes=len(data))
    write_manifest(folder, body)
    with pytest.raises(CheckpointError, match=r"must be whole.*shape \(0, "):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", [b"[]", b"7", b"null", b'"', b"\xff", b"", b"[" * 10**5])
def test_what_is_no_object_is_damage(folder: Path, text: bytes) -> None:
    digest = hashlib.sha256(text).hexdigest().encode()
    (folder / "MANIFEST.json").write_bytes(digest + b"\n" + text)
    with pytest.raises(CheckpointError, match="the checkpoint must be whole"):
        open_checkpoint(folder)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything inside a value."""
    keys = value if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], (dict, list)):
            found += places(value[key])
    return found


def test_random_nonsense_never_gets_past_the_check(folder: Path) -> None:
    chance = random.Random(3)
    values = [None, True, -1, 0, 2**70, 1.5, "", "x", [], {}, [[]], {"a": 1}, [0], "<f4", "|O"]
    before, num_refused = read_manifest(folder), 0
    for _ in range(300):
        body = copy.deepcopy(before)
        for container, key in chance.sample(places(body), chance.choice([1, 1, 2, 3])):
            if isinstance(container, dict) and chance.random() < 0.2:
                container.pop(key, None)
            elif isinstance(container, dict) or key < len(container):
                container[key] = chance.choice(values)
        write_manifest(folder, body)
        try:
            state = open_checkpoint(folder)
        except CheckpointError:
            num_refused += 1
            continue
        for group in state.groups:  # what got through changed something else, such as meta
            for source in state.sources(group).values():
                source.read()
    assert num_refused > 200


@pytest.mark.parametrize(
    ("fields", "got"),
    [({"format": 3}, "format 3, kind 'full'"), ({"kind": "rows"}, "format 2, kind 'rows'")],
)
def test_a_newer_format_or_kind_refuses_and_says_so(
    folder: Path, fields: dict[str, Any], got: str
) -> None:
    write_manifest(folder, {**read_manifest(folder), **fields, "base": "step-000000000001"})
    words = f"must have format 2 or lower and kind 'full'. Got {got}. A newer rowstep wrote it"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        open_checkpoint(folder)
    store = CheckpointStore(folder.parent)
    with store.lock():
        with pytest.raises(CheckpointError, match=re.escape(words)):
            store.latest()
        (entry,) = store.entries()
        assert words in str(entry.problem)
        assert (entry.is_damaged, entry.kept_because) == (False, ("cannot be judged",))
        for step in range(8, 14):
            store.save(step, {}, {})
    assert folder.exists(), "retention must not delete what it cannot read"


def test_a_folder_of_another_name_is_not_taken_for_that_step(folder: Path) -> None:
    folder.rename(folder.parent / "step-000000000008")
    store = CheckpointStore(folder.parent)
    assert store.latest() is None
    assert "it is of step 7" in store.problems[0]
    with pytest.raises(CheckpointError, match="it is of step 7"):
        open_checkpoint(folder.parent / "step-000000000008")
    (folder.parent / "step-000000000008").rename(folder.parent / "mine")
    assert open_checkpoint(folder.parent / "mine").step == 7, "any other name is a person's choice"


def test_the_error_for_a_folder_that_holds_none_says_where(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "missing", str(tmp_path) + "/"):
        with pytest.raises(CheckpointError, match=f"^{tmp_path}.*MANIFEST.json"):
            open_checkpoint(where)


def test_a_file_url_is_a_folder_and_a_squeezed_url_is_refused(folder: Path) -> None:
    assert open_checkpoint(f"file://{folder}/").path == folder
    assert CheckpointStore(f"file://{folder.parent}").steps() == [7]
    for use in (CheckpointStore, open_checkpoint):
        with pytest.raises(CheckpointError, match="a URL must be given as a string"):
            use(Path("gs://bucket/a/step-000000000001"))


def test_a_relative_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert open_checkpoint(STEP).path == folder
    store = CheckpointStore(".")
    monkeypatch.chdir("/")
    assert store.steps() == [7]
