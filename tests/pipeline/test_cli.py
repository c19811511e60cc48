"""The command's manners: errors early, in words, with the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rowstep.components.locks import exclusive_lock
from rowstep.configs import export_schema
from rowstep.pipeline import workspace
from rowstep.pipeline.cli import main

GOOD = Path(__file__).parents[1] / "support" / "tiny.yaml"


def _invoke(*arguments: str, home: Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(arguments), env={"ROWSTEP_HOME": str(home)})
    return result.exit_code, result.stdout, result.stderr


def test_check_reports_every_error_at_once(tmp_path: Path) -> None:
    code, _, errors = _invoke(
        "check",
        str(GOOD),
        "--set",
        "train.epochs=0",
        "--set",
        "optimizer.learning_rat=1",
        home=tmp_path,
    )
    assert code == 2
    assert "train.epochs: must be at least 1. Got 0." in errors
    assert "Did you mean 'learning_rate'?" in errors


def test_check_of_a_good_file_says_so(tmp_path: Path) -> None:
    code, shown, _ = _invoke("check", str(GOOD), home=tmp_path)
    assert code == 0
    assert "fits. Pipeline 'tiny'" in shown


def test_shipped_configs_go_by_their_name(tmp_path: Path) -> None:
    assert _invoke("check", "quickstart", home=tmp_path)[0] == 0


def test_bad_config_is_reported_without_importing_tensorflow(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from rowstep.pipeline.cli import main\n"
        "try:\n"
        f"    main(['run', {str(GOOD)!r}, '--set', 'train.epochs=0'])\n"
        "except SystemExit as stop:\n"
        "    heavy = {'tensorflow', 'keras', 'tfx', 'mlflow'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else stop.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True)
    assert done.returncode == 2, done.stderr.decode()
    assert list(tmp_path.iterdir()) == []


def test_schema_is_the_exported_one(tmp_path: Path) -> None:
    assert _invoke("schema", home=tmp_path)[1] == export_schema()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("resume", "nothing"), "resume: must name a run of"),
        (("resume",), "Got none. Start one with: rowstep run FILE"),
        (("run", "no-such-file.yaml"), "no-such-file.yaml"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    code, _, errors = _invoke(*arguments, home=tmp_path)
    assert code == 2
    assert words in errors


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "features.nope={kind: numeric}",
            "must be a column of the data. Got nope. Columns: user_id",
        ),
        ("data={kind: csv, path: bad.csv}", "bad.csv, line 3: 'rating' must be a finite number"),
        ("data={kind: csv, path: none.csv}", "none.csv"),
    ],
)
def test_bad_data_reaches_the_screen_before_anything_is_trained(
    tmp_path: Path, override: str, words: str
) -> None:
    rows = "user_id,item_id,rating,timestamp\nu1,i1,4,1\nu2,i2,four,2\n"
    (tmp_path / "bad.csv").write_text(rows)
    done = subprocess.run(
        [sys.executable, "-m", "rowstep.pipeline", "run", str(GOOD), "--set", override],
        env={**os.environ, "ROWSTEP_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "home" / "tiny" / "artifacts").exists()


def test_second_run_in_a_busy_workspace_is_refused_and_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "_LOCK_WAIT_SECONDS", 0.0)
    folder = tmp_path / "tiny"
    folder.mkdir()
    with exclusive_lock(folder / "LOCK"):
        code, _, errors = _invoke("run", str(GOOD), home=tmp_path)
    assert code == 2
    assert f"held by process {os.getpid()}" in errors
