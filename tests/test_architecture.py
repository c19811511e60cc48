"""The house holds: rooms import what their floor allows, and the mapping names every folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).parents[1]
STDLIB = frozenset(sys.stdlib_module_names)
FACE = frozenset({"click", "rich", "matplotlib"})
"""What talks to people."""


DRAWS = "tracking/pictures.py"
"""The one module of the components that may import matplotlib."""


class Room(NamedTuple):
    """Say what a room may import."""

    ours: frozenset[str] = frozenset()
    """Other rooms; the package root is open to all."""
    only: frozenset[str] | None = None
    """The third parties it may import, when they are few."""
    never: frozenset[str] = frozenset()
    """The third parties it may not import."""


ROOMS = {
    "configs": Room(only=frozenset({"pydantic", "yaml"})),
    "optimizers": Room(never=FACE | {"tfx", "mlflow", "apache_beam", "pydantic", "yaml"}),
    "components": Room(ours=frozenset({"configs", "optimizers"}), never=FACE),
    "pipeline": Room(ours=frozenset({"components", "configs"})),
    # Loaded with every import of the package: the standard library, and rooms on demand.
    "pipeline/_root": Room(ours=frozenset({"components"}), only=frozenset()),
}


def source_files() -> list[tuple[str, Path]]:
    """Return (room, file) for every file of the house, read where it is written."""
    files = []
    for room in ("configs", "optimizers", "components", "pipeline"):
        for path in sorted((CHECKOUT / room).rglob("*.py")):
            is_root = path.is_relative_to(CHECKOUT / "pipeline" / "_root")
            files.append(("pipeline/_root" if is_root else room, path))
    return files


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every chain of attributes, `tf.compat.v1.train` and its like."""
    for node in ast.walk(tree):
        names, inner = [], node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if names and isinstance(inner, ast.Name):
            yield node.lineno, ".".join([inner.id, *reversed(names)])  # type: ignore[attr-defined]


def import_fault(room: str, name: str, file: str = "") -> str | None:
    """Return why a file of the room may not import the dotted name, or None."""
    rules, parts = ROOMS[room], name.split(".")
    top, rest = parts[0], parts[1:]
    if name.startswith("."):
        return "relative import; write the full name"
    if top in ROOMS:
        return f"import of the bare room; write rowstep.{top}"
    if top == "rowstep":
        other = rest[0] if rest and rest[0] in ROOMS else None
        home = room.partition("/")[0] if room != "pipeline/_root" else None
        bad = other is not None and other != home and other not in rules.ours
        return f"{room} may not import {other}" if bad else None
    if top in STDLIB:
        return None
    if (room, file, top) == ("components", DRAWS, "matplotlib"):
        return None
    if top in rules.never or (rules.only is not None and top not in rules.only):
        return f"{room} may not import {top}"
    if (top, *rest[:1]) == ("tfx", "v1"):
        return "tfx.v1 loads all of TFX; import the narrow module"
    if (top, *rest[:1]) in {("tensorflow", "python"), ("keras", "src"), ("tf_keras", "src")}:
        return "private module; import the public name"
    if top in {"tensorflow", "keras", "tf_keras"} and any(part.startswith("_") for part in rest):
        return "private name; import the public one"
    return None if top != "tensorflow" else attribute_fault(name)


def attribute_fault(name: str) -> str | None:
    """Return why the dotted name may not be written, or None."""
    top, *rest = name.split(".")
    if top in {"tf", "tensorflow"}:
        if "keras" in rest:
            return "which Keras tf.keras is depends on import order; import keras or tf_keras"
        if "estimator" in rest:
            return "tf.estimator is gone from today's TensorFlow"
    return None


def faults(room: str, source: str, file: str = "") -> list[tuple[int, str]]:
    """Return (line, fault) for a source text of a room, or of one file of it."""
    tree = ast.parse(source)
    found = [(line, import_fault(room, name, file)) for line, name in imported(tree)]
    found += [(line, attribute_fault(name)) for line, name in attributes(tree)]
    return sorted({(line, fault) for line, fault in found if fault is not None})


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_its_floor_allows(room: str) -> None:
    found = [
        f"{path.relative_to(CHECKOUT)}:{line}: {fault}"
        for home, path in source_files()
        if home == room
        for line, fault in faults(
            room, path.read_text(encoding="utf-8"), path.relative_to(CHECKOUT / room).as_posix()
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("configs", "import tensorflow"),
        ("configs", "import numpy"),
        ("configs", "from rowstep.optimizers import LazyAdam"),
        ("configs", "from rowstep import optimizers"),
        ("optimizers", "def f():\n    import tfx"),
        ("optimizers", "import mlflow.entities"),
        ("optimizers", "from rowstep.configs import RunConfig"),
        ("optimizers", "from tensorflow.python.framework import ops"),
        ("optimizers", "from keras.src.optimizers import base_optimizer"),
        ("optimizers", "from tensorflow import _pywrap"),
        ("optimizers", "from tensorflow import keras"),
        ("optimizers", "import tensorflow.keras as keras"),
        ("optimizers", "import tensorflow as tf\nx = tf.keras.layers.Dense"),
        ("optimizers", "import tensorflow as tf\nx = tf.compat.v1.estimator.Estimator"),
        ("components", "from rich.console import Console"),
        ("components", "from rowstep.pipeline import create_pipeline"),
        ("components", "from tfx import v1 as tfx"),
        ("components", "import tfx.v1 as tfx"),
        ("components", "from . import data"),
        ("components", "import optimizers"),
        ("pipeline", "from rowstep.optimizers.lazy_adam import LazyAdam"),
        ("pipeline/_root", "import numpy"),
        ("pipeline/_root", "from rowstep.pipeline import create_pipeline"),
    ],
)
def test_the_check_finds_what_is_not_allowed(room: str, source: str) -> None:
    assert len(faults(room, source)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("configs", "import json\nimport yaml\nfrom rowstep import RowstepError"),
        ("optimizers", "import keras\nimport tf_keras\nimport tensorflow as tf\nx = tf.compat.v1"),
        ("components", "from rowstep.optimizers import LazyAdam\nimport mlflow\nimport keras"),
        ("components", "from tfx.dsl.components.base import base_component"),
        ("pipeline", "import click\nfrom rowstep.components import RecTrainer"),
    ],
)
def test_the_check_lets_through_what_is_allowed(room: str, source: str) -> None:
    assert faults(room, source) == []


def test_one_module_of_the_components_draws() -> None:
    source = "from matplotlib.figure import Figure"
    assert faults("components", source, DRAWS) == []
    assert len(faults("components", source, "tracking/outbox.py")) == 1
    assert len(faults("optimizers", source, DRAWS)) == 1
    assert len(faults("components", "import rich", DRAWS)) == 1


# --- the mapping ----------------------------------------------------------------------------


def project() -> dict[str, Any]:
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))


def folders_of_code() -> dict[str, str]:
    """Return package name to folder, as the folders on disk say."""
    found = {"rowstep": "pipeline/_root"}
    for room, path in source_files():
        if room != "pipeline/_root":
            folder = path.parent.relative_to(CHECKOUT)
            found[".".join(["rowstep", *folder.parts])] = folder.as_posix()
    return found


def test_the_mapping_names_every_folder() -> None:
    settings = project()["tool"]["setuptools"]
    assert settings["package-dir"] == folders_of_code()
    assert sorted(settings["packages"]) == sorted(folders_of_code())


def test_every_folder_of_code_is_a_package() -> None:
    bare = [f for f in folders_of_code().values() if not (CHECKOUT / f / "__init__.py").is_file()]
    assert bare == []


@pytest.mark.parametrize("room", ["components", "configs", "optimizers", "pipeline"])
def test_importing_a_bare_room_gives_one_clear_error(room: str) -> None:
    command = [sys.executable, "-c", f"import {room}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"ImportError: {room}: import it as 'rowstep.{room}'. Got 'import {room}' from inside the "
        "checkout, which would load every class twice. "
        "Install rowstep (make setup) and use the full name."
    )
