"""The front doors: what they list is sorted, complete, and there."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
FRONT_DOORS = {
    "rowstep": "pipeline/_root",
    "rowstep.components": "components",
    "rowstep.configs": "configs",
    "rowstep.optimizers": "optimizers",
    "rowstep.pipeline": "pipeline",
}


def tree_of(door: str) -> ast.Module:
    path = CHECKOUT / FRONT_DOORS[door] / "__init__.py"
    return ast.parse(path.read_text(encoding="utf-8"))


def listed(door: str) -> list[str]:
    """Return `__all__` as it is written."""
    for node in tree_of(door).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def exposed(door: str) -> set[str]:
    """Return the names that the source binds for others: its own, and those taken from rowstep."""
    names: set[str] = set()
    nodes = list(tree_of(door).body)
    nodes += [inner for node in nodes if is_type_checking(node) for inner in node.body]  # type: ignore[attr-defined]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rowstep"):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return {name for name in names if not name.startswith("_") or name == "__version__"}


def in_order(name: str) -> tuple[int, str]:
    """Sort as ruff does: CONSTANTS, Classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("door", FRONT_DOORS)
def test_the_list_of_a_front_door_is_sorted_and_not_empty(door: str) -> None:
    assert listed(door)
    assert listed(door) == sorted(set(listed(door)), key=in_order)


@pytest.mark.parametrize("door", FRONT_DOORS)
def test_a_front_door_lists_all_that_it_exposes(door: str) -> None:
    assert set(listed(door)) == exposed(door)


@pytest.mark.parametrize("door", FRONT_DOORS)
def test_every_listed_name_is_there(door: str) -> None:
    module = importlib.import_module(door)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []


@pytest.mark.parametrize("door", FRONT_DOORS)
def test_a_name_that_is_not_there_is_an_attribute_error(door: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module(door).no_such_name  # noqa: B018


def test_opening_the_upper_front_doors_loads_nothing_heavy() -> None:
    doors = [door for door in FRONT_DOORS if door != "rowstep.optimizers"]
    code = (
        f"import sys, {', '.join(doors)}; "
        "heavy = {'tensorflow', 'keras', 'tf_keras', 'tfx', 'mlflow', 'apache_beam'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert result.stdout.strip() == "[]"


def test_the_installed_package_has_every_module_of_the_checkout() -> None:
    modules = [
        ".".join([door, path.stem])
        for door, folder in FRONT_DOORS.items()
        for path in sorted((CHECKOUT / folder).glob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    assert missing == [], "run: make setup"
