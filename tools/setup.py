#!/usr/bin/env python3
"""Make `.venv` ready for work: find a Python 3.10, install the lock, install rowstep.

    python3 tools/setup.py        (or: make setup)

Runs on any Python from 3.8, with the standard library alone. What is done is written into a stamp
of hashes, and a second run does only what changed; when nothing did, it says nothing.

Environment:
    ROWSTEP_PYTHON  the Python 3.10 to use, instead of looking for one
    UV              the uv to use, instead of looking for one or fetching it
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "rowstep-setup.json"
LOCK = ROOT / "requirements" / "tfx-1.16-py310.txt"
ROOMS = ("pipeline", "components", "optimizers", "configs")
NO_PYTHON = (
    "setup: a working Python 3.10 is needed, since TFX 1.16 runs on no newer one. "
    "Found none on PATH, under ~/.pyenv, in conda environments or with uv, which could not fetch "
    "one either. Install one, for example with `pyenv install 3.10`, `conda create -n py310 "
    "python=3.10` or your system's packages, and run this again; or name it: "
    "ROWSTEP_PYTHON=/path/to/python3.10 make setup"
)
NO_UV = (
    "setup: uv is needed to install the lock. Found none, and none could be fetched with pip. "
    "Install it (pip install uv), or name it: UV=/path/to/uv make setup"
)


class SetupError(Exception):
    """Carry the one line that the user is to read."""


def main() -> int:
    """Bring `.venv` up to date; return the exit code."""
    try:
        bring_up_to_date()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def bring_up_to_date() -> None:
    """Do what the stamp does not show as done."""
    wanted = {"lock": digest([LOCK]), "rowstep": rowstep_digest()}
    done = read_stamp()
    if done == wanted:
        return
    packages_done = done.get("lock") == wanted["lock"]
    if STAMP.exists():
        STAMP.unlink()  # an interrupted run must not look finished
    uv = find_uv(os.environ)
    if not packages_done:
        if not is_python_310(PYTHON):
            python = find_python(os.environ, uv)
            say(f"Python 3.10 at {python}")
            shutil.rmtree(VENV, ignore_errors=True)  # older uv has no --clear
            run([uv, "venv", "--python", python, VENV], "making .venv")
        install([uv, "pip", "sync", LOCK], f"installing {LOCK.relative_to(ROOT)}")
    # Strict: type checkers do not run the import hook of the default editable mode.
    editable = ["--editable", ROOT, "--config-setting", "editable_mode=strict"]
    options = ["--no-deps", "--no-build-isolation", "--reinstall-package", "rowstep"]
    install([uv, "pip", "install", *options, *editable], "installing rowstep")
    STAMP.write_text(json.dumps(wanted), encoding="utf-8")
    say("ready in .venv")


# --- what is done already -------------------------------------------------------------------


def read_stamp() -> Mapping[str, str]:
    """Return the stamp of the last finished run, or an empty one when it cannot be trusted."""
    if not PYTHON.exists() or not glob.glob(glob.escape(str(ROOT)) + "/build/__editable__*"):
        return {}
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def digest(files: Sequence[Path]) -> str:
    """Return a hash of the contents of the files and of the place of the checkout."""
    found = hashlib.sha256(str(ROOT).encode())
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def rowstep_digest() -> str:
    """Return a hash of what an editable install depends on: the settings and the list of files."""
    suffixes = {".py", ".yaml", ".json", ".typed"}
    files = sorted(
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in suffixes or path.name == "py.typed"
    )
    text = digest([ROOT / "pyproject.toml"]) + "\n".join(files)
    return hashlib.sha256(text.encode()).hexdigest()


# --- Python and uv --------------------------------------------------------------------------


def find_python(environ: Mapping[str, str], uv: str) -> str:
    """Return a Python 3.10 that was seen to run.

    Raises:
        SetupError: when none is found and none can be fetched.
    """
    named = environ.get("ROWSTEP_PYTHON")
    if named:
        if is_python_310(named):
            return named
        raise SetupError(f"ROWSTEP_PYTHON: must be a working Python 3.10. Got {named}. Correct it.")
    for candidate in candidates(environ):
        if is_python_310(candidate):
            return candidate
    for attempt in (["find"], ["install"], ["find"]):
        answer = ask([uv, "python", *attempt, "3.10"], timeout=600)
        if attempt == ["find"] and answer and is_python_310(answer):
            return answer
    raise SetupError(NO_PYTHON)


def candidates(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the places where a Python 3.10 may be, nearest first; most do not exist."""
    for folder in environ.get("PATH", "").split(os.pathsep):
        for name in ("python3.10", "python3", "python"):
            path = os.path.join(folder or ".", name)
            if os.access(path, os.X_OK):
                yield path
    home = environ.get("HOME", "")
    pyenv = environ.get("PYENV_ROOT", os.path.join(home, ".pyenv"))
    patterns = [os.path.join(pyenv, "versions", "3.10*")]
    patterns += [os.path.join(home, ".asdf", "installs", "python", "3.10*")]
    for conda in ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "micromamba", ".conda"):
        patterns += [os.path.join(home, conda), os.path.join(home, conda, "envs", "*")]
    for pattern in patterns:
        for folder in sorted(glob.glob(pattern), reverse=True):
            yield os.path.join(folder, "bin", "python3.10")


def is_python_310(path: str | Path) -> bool:
    """Say whether the path runs and is Python 3.10; a pyenv shim exists without running."""
    code = "import sys, ssl, venv; print(*sys.version_info[:2])"
    return ask([path, "-c", code]) == "3 10"


def find_uv(environ: Mapping[str, str]) -> str:
    """Return a uv that was seen to run; fetch one into the user's cache when there is none.

    Raises:
        SetupError: when none is found and none can be fetched.
    """
    if environ.get("UV"):
        return environ["UV"]
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~"), ".cache"))
    own = cache.expanduser() / "rowstep" / "uv"
    found = [shutil.which("uv", path=environ.get("PATH")), own / "bin" / "uv"]
    found += [Path(environ.get("HOME", "~"), place, "uv") for place in (".local/bin", ".cargo/bin")]
    for path in found:
        if path and (ask([path, "--version"]) or "").startswith("uv"):
            return str(path)
    say("fetching uv")
    pythons = [sys.executable, *(path for path in candidates(environ) if is_python_310(path))]
    for python in pythons:
        shutil.rmtree(own, ignore_errors=True)
        made = ask([python, "-m", "venv", own]) is not None
        if (
            made
            and ask([own / "bin" / "python", "-m", "pip", "install", "-q", "uv"], 600) is not None
        ):
            return str(own / "bin" / "uv")
    raise SetupError(NO_UV)


# --- running programs -----------------------------------------------------------------------


def ask(command: Sequence[str | Path], timeout: float = 120) -> str | None:
    """Return what the program prints, or None when it cannot run or fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def install(command: list[str | Path], doing: str) -> None:
    """Run uv on `.venv`."""
    run([*command[:3], "--python", PYTHON, *command[3:]], doing)


def run(command: Sequence[str | Path], doing: str) -> None:
    """Run a program quietly; show the end of its output when it fails.

    Raises:
        SetupError: when it fails.
    """
    say(doing)
    start = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command],
        cwd=str(ROOT),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    seconds = time.monotonic() - start
    if done.returncode == 0:
        say(f"  done in {seconds:.0f} s")
        return
    output = done.stdout.decode(errors="replace").strip().splitlines()
    print("\n".join(output[-40:]), file=sys.stderr)
    hint = ""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        hint = " A C compiler is missing, and one package is built from source: install gcc."
    raise SetupError(f"setup: {doing} failed after {seconds:.0f} s; its output is above.{hint}")


def say(text: str) -> None:
    """Print a line of progress at once."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
