"""From YAML text to a checked config, and to canonical JSON and back.

Every config is validated once and through JSON, so a file, an override and the JSON that travels
through TFX are judged by one rule.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rowstep.configs import errors
from rowstep.configs.errors import one_problem, path_text, show
from rowstep.configs.schema import ConfigFile, RunConfig
from rowstep.configs.yaml_text import read_yaml

PATH_KEYS: tuple[errors.Path, ...] = (("data", "path"), ("workspace",), ("checkpoint", "root"))
"""Keys whose value is a path."""
OVERRIDE = "--set"

Tree = dict[str, Any]
Origins = dict[errors.Path, str]
_Config = TypeVar("_Config", bound=RunConfig)


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file, apply the overrides and return the checked config.

    A relative path in the file counts from the file's folder; one in an override counts from the
    working directory, as everywhere on a command line. `~` is expanded in both. The variants of a
    comparison are left out: `rowstep.configs.variants.load_variants` returns them.

    Args:
        path: a YAML file (JSON is YAML too).
        overrides: texts `key.path=value`, the value in YAML; a later one wins.

    Raises:
        ConfigError: with every problem that was found.
    """
    source = os.fspath(path)
    return parse_config(read_file(source), source, overrides, folder=os.path.dirname(source))


def parse_config(
    text: str,
    source: str = "config",
    overrides: Sequence[str] = (),
    *,
    folder: str | os.PathLike[str] | None = None,
) -> RunConfig:
    """Return the checked config of a YAML text.

    Args:
        text: the YAML document.
        source: the name of the text in errors.
        overrides: texts `key.path=value`, the value in YAML; a later one wins.
        folder: where relative paths of the text count from; they stay relative when left out.

    Raises:
        ConfigError: with every problem that was found.
    """
    tree, origins = read_tree(text, source, overrides, folder)
    return check_file(tree, origins, source)


def read_tree(
    text: str, source: str, overrides: Sequence[str], folder: str | os.PathLike[str] | None
) -> tuple[Tree, Origins]:
    """Return the values of a file with the overrides applied, and where each was written."""
    tree, lines = read_yaml(text, source)
    if not isinstance(tree, dict):
        got = "nothing" if tree is None else show(tree)
        text = f"must hold a mapping of keys to values. Got {got}. Start with 'name: ...'."
        raise one_problem(source, "", text)
    origins = {key: f"{source}:{line}" for key, line in lines.items()}
    for override in overrides:
        _apply(override, tree, origins)
    resolve_paths(tree, origins, folder)
    return tree, origins


def check_file(tree: Tree, origins: Origins, source: str) -> RunConfig:
    """Judge a whole file, and return what it says beside `compare`."""
    validate(ConfigFile, json.dumps(tree), lambda key: origin_of(key, origins, source))
    rest = {key: value for key, value in tree.items() if key != "compare"}
    return RunConfig.model_validate_json(json.dumps(rest))


def canonical_json(config: RunConfig) -> str:
    """Return the one JSON text of a config: every key, sorted, without spaces.

    Equal configs have equal texts, and `config_from_json` returns an equal config.
    """
    return json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def config_from_json(text: str) -> RunConfig:
    """Return the config that `canonical_json` wrote.

    Raises:
        ConfigError: with every problem that was found.
    """
    return validate(RunConfig, text, lambda key: "config JSON")


def export_schema() -> str:
    """Return the JSON schema of a config file, as `configs/schema.json` holds it."""
    schema = ConfigFile.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=2) + "\n"


def validate(kind: type[_Config], text: str, where: Callable[[errors.Path], str]) -> _Config:
    """Judge a JSON text; `where` says where a key was written."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise errors.describe(found, kind.model_json_schema(), where) from None


def origin_of(key: errors.Path, origins: Origins, source: str) -> str:
    """Return where a key, or else the nearest mapping around it, was written."""
    while key and key not in origins:
        key = key[:-1]
    return origins[key] if key else source


def read_file(source: str) -> str:
    """Return the text of a file, or say why it cannot be read."""
    try:
        return Path(source).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        near = errors.nearest(source, (str(p) for p in Path(source).parent.glob("*.yaml")))
        text = f"must be a file. Got a path where nothing is. {near or 'Check the path.'}"
    except IsADirectoryError:
        text = "must be a file. Got a folder. Name the YAML file in it."
    except UnicodeDecodeError as error:
        text = f"must be UTF-8 text. Got {error.reason} at byte {error.start}. Save it as UTF-8."
    except OSError as error:
        text = f"must be readable. Got {error.strerror}. Check its permissions."
    raise one_problem(source, "", text)


def _apply(override: str, tree: Tree, origins: Origins) -> None:
    """Write one `key.path=value` into the tree, making the mappings on the way."""
    name, equals, value = override.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        text = f"must have the form key.path=value. Got {override!r}. Write, say, train.epochs=3."
        raise one_problem(OVERRIDE, "", text)
    mapping: Any = tree
    for depth, key in enumerate(keys):
        if not isinstance(mapping, dict):
            text = f"must be a mapping to set {keys[depth]!r} in it. Got {show(mapping)}."
            advice = f"Set {path_text(keys[:depth])} as a whole."
            raise one_problem(OVERRIDE, path_text(keys[:depth]), f"{text} {advice}")
        if depth < len(keys) - 1:
            if key not in mapping:
                mapping[key] = {}
                origins[keys[: depth + 1]] = OVERRIDE
            mapping = mapping[key]
    mapping[keys[-1]], _ = read_yaml(value, f"{OVERRIDE} {name.strip()}")
    for known in [known for known in origins if known[: len(keys)] == keys]:
        del origins[known]
    origins[keys] = OVERRIDE


def resolve_paths(
    tree: Tree,
    origins: Origins,
    folder: str | os.PathLike[str] | None,
) -> None:
    """Make the paths in a tree absolute."""
    for keys in PATH_KEYS:
        holder: Any = tree
        for key in keys[:-1]:
            holder = holder.get(key) if isinstance(holder, dict) else None
        value = holder.get(keys[-1]) if isinstance(holder, dict) else None
        if not isinstance(value, str) or not value:
            continue  # the validation has the words for it
        if "://" in value:
            continue  # an object store has no working folder
        base = os.getcwd() if origin_of(keys, origins, "") == OVERRIDE else folder
        expanded = os.path.expanduser(value)
        if base is not None:
            expanded = os.path.abspath(os.path.join(base, expanded))
        holder[keys[-1]] = expanded
