"""`rowstep checkpoint`: what people see of checkpoints, and that looking changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from rowstep.components.checkpoints import CheckpointStore, Retention
from rowstep.components.identity import run_key
from rowstep.components.trainings import mark_finished, record
from rowstep.configs import load_config
from rowstep.pipeline.checkpoint_cli import checkpoint
from rowstep.pipeline.runs import Run

TABLE = np.arange(12, dtype=np.float32).reshape(6, 2)
HALF = np.array([1.5, -2.0, 3.0], dtype=ml_dtypes.bfloat16)
META = {
    "epoch": 2,
    "batch": 7,
    "finished": False,
    "attempt": 3,
    "mlflow_run_id": "abc123",
    "identity": {"optimizer": {"name": "lazy_adam"}, "train_data": "f00d"},
    "versions": {"tensorflow": "2.16.2"},
    "vocabularies": {"user": "0123456789abcdef0123"},
    "callbacks": {"callbacks": [{"name": "0.EarlyStopping"}]},
}
TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"


def groups() -> dict[str, list[tuple[str, np.ndarray]]]:
    return {
        "model": [("items/table", TABLE), ("items table", TABLE[0]), ("half", HALF)],
        "optimizer": [("iterations", np.array(9)), ("items/table/momentum", TABLE * 2)],
    }


def fill(root: str, *steps: int, keep_last: int = 3) -> CheckpointStore:
    store = CheckpointStore(root, retention=Retention(keep_last=keep_last))
    with store.lock():
        for step in steps:
            store.save(step, groups(), META, metrics={"val_rmse": 1 / step})
    return store


def invoke(*arguments: object, home: Path | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(
        checkpoint, [str(a) for a in arguments], env={"ROWSTEP_HOME": str(home or "/nowhere")}
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def everything(folder: Path) -> dict[str, tuple[bytes | None, int]]:
    return {
        str(path): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@pytest.fixture(params=["folder", "url"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    bucket = f"memory://{uuid.uuid4().hex}"
    yield f"{bucket}/store"
    fsspec.filesystem("memory").rm(bucket, recursive=True)


def folder_of(root: str, step: int) -> str:
    store = CheckpointStore(root)
    return next(entry.where for entry in store.entries() if entry.step == step)


# --- list -------------------------------------------------------------------------------------


def test_a_folder_or_url_lists_steps_newest_first_with_what_was_measured(root: str) -> None:
    fill(root, 4, 8)
    code, shown, _ = invoke("list", root)
    assert code == 0
    newest, oldest = (line for line in shown.splitlines() if line.startswith("  step"))
    assert newest.split()[:2] == ["step", "8"] and "val_rmse 0.125" in newest
    assert oldest.split()[:2] == ["step", "4"] and "s ago)" in oldest


def test_damage_in_a_manifest_and_what_was_moved_aside_are_named(root: str) -> None:
    store = fill(root, 1, 2, 3)
    names = {step: folder_of(root, step).rpartition("/")[2] for step in (1, 2)}
    with store.lock():
        store.medium.set_aside(names[1], "corrupt-000000000001-1")
    with fsspec.open(f"{root}/{names[2]}/MANIFEST.json", "ab") as file:
        file.write(b" ")
    _, shown, _ = invoke("list", root)
    assert "step 2  damaged: MANIFEST.json: its hash does not match its text" in shown
    assert "corrupt-000000000001-1: moved aside" in shown


def test_a_step_that_was_saved_again_is_listed_by_its_folders(tmp_path: Path) -> None:
    fill(str(tmp_path), 1, 1)
    again = tmp_path / "step-000000000001.1"
    assert again.exists()
    (tmp_path / "step-000000000001").mkdir(exist_ok=True)
    _, shown, _ = invoke("list", tmp_path)
    assert "step 1 (step-000000000001.1)" in shown
    assert "step 1 (step-000000000001)    damaged: " in shown


def test_a_workspace_lists_every_training_and_why_a_checkpoint_stays(tmp_path: Path) -> None:
    config = load_config(TINY, [f"workspace={tmp_path}", "checkpoint.keep_last=2"])
    Run.create(config)
    state = tmp_path / config.name / "state"
    for key, steps in (("aaaa", (1, 2)), ("bbbb", (5,))):
        training = record(state, key, {}, str(state / key / "checkpoints"))
        fill(training.checkpoints, *steps, keep_last=9)
    mark_finished(state, training)
    fill(str(state / "aaaa" / "checkpoints"), 3, keep_last=9)
    code, shown, _ = invoke("list", home=tmp_path)
    assert code == 0
    lines = shown.splitlines()
    assert lines[0] == f"{config.name}  training 1  aaaa  unfinished"
    assert [line.split()[1] for line in lines if " step " in line] == ["3", "2", "1", "5"]
    assert lines[3].endswith("one of the last 2")
    assert lines[4].endswith("goes with the next save")
    assert f"{config.name}  training 2  bbbb  finished" in lines
    assert invoke("list", config.name, home=tmp_path)[1] == shown
    code, _, errors = invoke("list", "other", home=tmp_path)
    assert code == 2 and f"Got 'other'. Pipelines: {config.name}." in errors


def test_an_empty_workspace_says_how_to_begin(tmp_path: Path) -> None:
    code, shown, _ = invoke("list", home=tmp_path)
    assert code == 0 and "no training yet. Start one with: rowstep run FILE" in shown


# --- verify -----------------------------------------------------------------------------------


def test_good_checkpoints_verify_alone_and_together(root: str) -> None:
    fill(root, 1, 2)
    code, shown, _ = invoke("verify", root)
    assert code == 0 and shown.count("good     ") == 2 and "2 good, 0 damaged" in shown
    code, shown, _ = invoke("verify", folder_of(root, 2) + "/")
    assert code == 0 and "1 good, 0 damaged" in shown


def test_every_damaged_file_is_named_and_the_exit_code_is_1(tmp_path: Path) -> None:
    fill(str(tmp_path), 1, 2)
    step = tmp_path / "step-000000000002"
    flip(step / "array-00000.npy")
    (step / "array-00004.npy").unlink()
    code, shown, _ = invoke("verify", tmp_path)
    assert code == 1
    assert f"damaged  {step}" in shown and "1 good, 1 damaged" in shown
    assert "array-00000.npy: checksum" in shown and "(model/items/table)" in shown
    assert "array-00004.npy" in shown and "(optimizer/items/table/momentum)" in shown


def test_a_checkpoint_without_its_manifest_is_damaged_and_not_unknown(tmp_path: Path) -> None:
    fill(str(tmp_path), 1)
    (tmp_path / "step-000000000001" / "MANIFEST.json").unlink()
    code, shown, _ = invoke("verify", tmp_path / "step-000000000001")
    assert code == 1 and "MANIFEST.json" in shown


def test_a_folder_that_claims_another_step_is_damaged(tmp_path: Path) -> None:
    fill(str(tmp_path), 1)
    (tmp_path / "step-000000000001").rename(tmp_path / "step-000000000007")
    assert invoke("verify", tmp_path)[0] == 1


def test_a_checkpoint_of_a_newer_rowstep_is_unusable_and_not_damaged(tmp_path: Path) -> None:
    import hashlib

    fill(str(tmp_path), 1)
    path = tmp_path / "step-000000000001" / "MANIFEST.json"
    text = path.read_bytes().partition(b"\n")[2].replace(b'"format": 2', b'"format": 99')
    path.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    code, shown, _ = invoke("verify", tmp_path)
    assert code == 1 and shown.startswith("unusable ") and "update rowstep" in shown


@pytest.mark.parametrize("command", ["verify", "show", "list"])
def test_a_place_without_checkpoints_is_bad_input(command: str, tmp_path: Path) -> None:
    code, _, errors = invoke(command, tmp_path)
    assert code == 2
    assert f"{tmp_path}: there must be a checkpoint, or a folder of checkpoints." in errors


def test_a_place_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, errors = invoke("verify", tmp_path / "file")
    assert code == 2 and "must be readable. Got" in errors


# --- show -------------------------------------------------------------------------------------


def test_show_tells_position_origin_and_the_largest_arrays_first(root: str) -> None:
    fill(root, 4, 8)
    code, shown, _ = invoke("show", root)
    assert code == 0
    assert shown.startswith("step 8  ")
    assert "position      epoch 2, batch 7, attempt 3" in shown and "unfinished" in shown
    assert f"key {run_key(META['identity'])}" in shown and "training data f00d" in shown
    for words in ("run abc123", "tensorflow 2.16.2", "user  0123456789abcdef\n", "0.EarlyStopping"):
        assert words in shown
    assert "optimizer  2 arrays" in shown
    arrays = shown[shown.index("arrays        ") :].splitlines()
    assert arrays[0].endswith("items/table") and "float32   [6, 2]  model " in arrays[0]
    assert "bfloat16" in shown and shown.count("\n") < 40


def test_show_hides_small_arrays_unless_asked(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.lock():
        store.save(1, {"model": [(f"v{i}", np.zeros(100 - i)) for i in range(20)]}, {})
    assert "and 5 smaller ones; --all shows them" in invoke("show", tmp_path)[1]
    shown = invoke("show", tmp_path, "--all")[1]
    assert "v19" in shown and "smaller" not in shown


def test_the_manifest_prints_as_json(root: str) -> None:
    fill(root, 4)
    code, shown, _ = invoke("show", folder_of(root, 4), "--json")
    body = json.loads(shown)
    assert code == 0 and body["step"] == 4 and body["meta"] == META and len(body["arrays"]) == 5


def test_checkpoints_of_the_first_format_are_shown_and_verified() -> None:
    golden = Path(__file__).parents[1] / "components" / "golden" / "format-1"
    assert invoke("show", golden)[0] == 0
    assert invoke("verify", golden)[0] == 0


# --- export -----------------------------------------------------------------------------------


def test_an_npz_has_the_names_as_keys_and_the_exact_numbers(root: str, tmp_path: Path) -> None:
    fill(root, 3)
    target = tmp_path / "model.npz"
    code, shown, _ = invoke("export", root, target)
    assert code == 0 and f"{target}: 3 arrays of step 3" in shown
    with np.load(target) as arrays:
        assert set(arrays.files) == {"items/table", "items table", "half"}
        np.testing.assert_array_equal(arrays["items/table"], TABLE)
        np.testing.assert_array_equal(arrays["half"].view(ml_dtypes.bfloat16), HALF)
        assert arrays["half"].dtype == np.uint16
    assert "half hold their bits as unsigned integers" in shown
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_several_groups_are_told_apart(tmp_path: Path) -> None:
    fill(str(tmp_path / "store"), 3)
    both = ("--group", "model", "--group", "optimizer")
    assert invoke("export", tmp_path / "store", tmp_path / "a.npz", *both)[0] == 0
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["optimizer/iterations"] == 9 and arrays["optimizer/iterations"].shape == ()
        np.testing.assert_array_equal(arrays["optimizer/items/table/momentum"], TABLE * 2)


def test_a_folder_has_safe_names_and_an_index(root: str, tmp_path: Path) -> None:
    fill(root, 3)
    assert invoke("export", root, tmp_path / "out")[0] == 0
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    by_name = {entry["name"]: entry for entry in index["arrays"]}
    assert index["step"] == 3 and len({entry["file"] for entry in index["arrays"]}) == 3
    assert set("/ ").isdisjoint("".join(entry["file"] for entry in index["arrays"]))
    found = np.load(tmp_path / "out" / by_name["items/table"]["file"])
    np.testing.assert_array_equal(found, TABLE)
    assert (by_name["half"]["dtype"], by_name["half"]["stored_as"]) == ("bfloat16", "uint16")


@pytest.mark.parametrize("name", ["out.npz", "out"])
def test_nothing_is_replaced_unless_asked(name: str, tmp_path: Path) -> None:
    fill(str(tmp_path / "store"), 3)
    arguments = ("export", tmp_path / "store", tmp_path / name)
    assert invoke(*arguments)[0] == 0
    before = everything(tmp_path)
    code, _, errors = invoke(*arguments, "--group", "optimizer")
    assert code == 2 and "or replace it with --force." in errors and everything(tmp_path) == before
    assert invoke(*arguments, "--group", "optimizer", "--force")[0] == 0
    assert everything(tmp_path) != before


def test_force_never_deletes_a_folder_of_something_else(tmp_path: Path) -> None:
    fill(str(tmp_path / "store"), 3)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for name in ("mine", "store"):
        code, _, errors = invoke("export", tmp_path / "store", tmp_path / name, "--force")
        assert code == 2 and "a folder of something else" in errors
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("name", ["out.npz", "out"])
def test_a_damaged_checkpoint_is_not_exported(name: str, tmp_path: Path) -> None:
    fill(str(tmp_path / "store"), 3)
    flip(tmp_path / "store" / "step-000000000003" / "array-00004.npy")
    code, _, errors = invoke("export", tmp_path / "store", tmp_path / name)
    assert code == 2 and "the checkpoint must be whole. Got array-00004.npy" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("name", ["out.npz", "out"])
def test_a_group_that_was_not_saved_is_named(name: str, tmp_path: Path) -> None:
    fill(str(tmp_path / "store"), 3)
    code, _, errors = invoke("export", tmp_path / "store", tmp_path / name, "--group", "modle")
    assert code == 2 and "Got 'modle'. Saved: model, optimizer." in errors
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("name", ["no/such/out.npz", "no/such/out", "gs://bucket/out.npz"])
def test_a_place_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    fill(str(tmp_path / "store"), 3)
    target = name if "://" in name else tmp_path / name
    code, _, errors = invoke("export", tmp_path / "store", target)
    assert code == 2 and " export must " in errors


def test_an_export_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store")
    with store.lock():
        store.save(1, {"model": [("table", np.ones(10_000))]}, {})
    script = (
        "from rowstep.pipeline.checkpoint_cli import checkpoint\n"
        "for name in ('out.npz', 'out'):\n"
        "    try:\n"
        "        checkpoint(['export', 'store', name])\n"
        "    except SystemExit as stop:\n"
        "        print(stop.code)\n"
    )
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 8; exec "$0" -B -c "$1"', sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["2", "2"], done.stderr
    assert done.stderr.count("the export must fit on the disk") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


# --- all of them ------------------------------------------------------------------------------


def test_looking_takes_no_lock_and_changes_nothing(tmp_path: Path) -> None:
    store = fill(str(tmp_path / "store"), 1, 2)
    flip(tmp_path / "store" / "step-000000000002" / "array-00000.npy")
    (tmp_path / "store" / ".tmp-save-1").mkdir()
    with store.lock():  # a training is running
        (tmp_path / "store" / ".tmp-save-2").mkdir()
        before = everything(tmp_path / "store")
        for command in ("list", "verify", "show"):
            assert invoke(command, tmp_path / "store")[0] in (0, 1)
        good = tmp_path / "store" / "step-000000000001"
        assert invoke("export", good, tmp_path / "out.npz")[0] == 0
        assert everything(tmp_path / "store") == before


def test_no_command_imports_tensorflow(tmp_path: Path) -> None:
    fill(str(tmp_path / "store"), 1)
    script = (
        "import sys\n"
        "from rowstep.pipeline.checkpoint_cli import checkpoint\n"
        "for arguments in (['list', ROOT], ['list'], ['verify', ROOT], ['show', ROOT],\n"
        "                  ['export', ROOT, ROOT + '.npz']):\n"
        "    try:\n"
        "        checkpoint(arguments)\n"
        "    except SystemExit as stop:\n"
        "        assert not stop.code, arguments\n"
        "heavy = {'tensorflow', 'keras', 'tfx', 'mlflow'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    ).replace("ROOT", repr(str(tmp_path / "store")))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"ROWSTEP_HOME": str(tmp_path / "home")},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
