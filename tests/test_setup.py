"""The set-up script finds a Python that runs, and says in one line what is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "setup.py"


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rowstep_setup", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine with a shim, a uv that finds nothing, and no Python."""
    program(tmp_path / "bin" / "python3.10", "echo 'python3.10: command not found' >&2; exit 127")
    uv = program(tmp_path / "bin" / "uv", "exit 2")
    return {"HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "bin"), "UV": str(uv)}


def run_copy(tmp_path: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script, so that the checkout's own .venv is out of its reach."""
    copy = tmp_path / "checkout" / "tools" / "setup.py"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(SCRIPT.read_bytes())
    for name in ("requirements/tfx-1.16-py310.txt", "pyproject.toml"):
        (copy.parents[1] / name).parent.mkdir(exist_ok=True)
        (copy.parents[1] / name).write_text("", encoding="utf-8")
    command = [sys.executable, str(copy)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_no_python_gives_one_line_with_the_remedy(tmp_path: Path, bare: dict[str, str]) -> None:
    result = run_copy(tmp_path, bare)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("setup: a working Python 3.10 is needed")
    assert "Install one, for example with `pyenv install 3.10`" in line


def test_a_named_python_that_does_not_fit_is_refused(tmp_path: Path, bare: dict[str, str]) -> None:
    shim = str(tmp_path / "bin" / "python3.10")
    result = run_copy(tmp_path, {**bare, "ROWSTEP_PYTHON": shim})
    assert result.returncode == 1
    assert result.stderr == (
        f"ROWSTEP_PYTHON: must be a working Python 3.10. Got {shim}. Correct it.\n"
    )


def test_a_failing_install_shows_its_output(tmp_path: Path, bare: dict[str, str]) -> None:
    program(tmp_path / "bin" / "uv", "echo no space left; exit 2")
    program(tmp_path / "fits" / "python3.10", "echo 3 10")
    environ = {**bare, "ROWSTEP_PYTHON": str(tmp_path / "fits" / "python3.10")}
    result = run_copy(tmp_path, environ)
    assert result.returncode == 1
    assert result.stderr.startswith("no space left\nsetup: making .venv failed after 0 s")


def test_a_shim_that_does_not_run_is_passed_over(
    tmp_path: Path, bare: dict[str, str], setup_script: ModuleType
) -> None:
    kept = program(tmp_path / "home/.pyenv/versions/3.10.9/bin/python3.10", "echo 3 10")
    program(tmp_path / "home/.pyenv/versions/3.11.1/bin/python3.11", "echo 3 11")
    assert setup_script.find_python(bare, bare["UV"]) == str(kept)


def test_a_python_that_uv_knows_is_taken(
    tmp_path: Path, bare: dict[str, str], setup_script: ModuleType
) -> None:
    kept = program(tmp_path / "managed" / "python3.10", "echo 3 10")
    program(tmp_path / "bin" / "uv", f"echo {kept}")
    assert setup_script.find_python(bare, bare["UV"]) == str(kept)
