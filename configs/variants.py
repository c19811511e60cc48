"""The variants of a comparison: the rest of a config file, with a few keys changed for each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

from rowstep.configs.errors import ConfigError, Problem
from rowstep.configs.load import (
    Origins,
    Tree,
    check_file,
    origin_of,
    read_file,
    read_tree,
    resolve_paths,
    validate,
)
from rowstep.configs.schema import RunConfig


def load_variants(
    path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> dict[str, RunConfig]:
    """Return the variants of a comparison by name, in the order of the file; see `parse_variants`.

    Args:
        path: a YAML file; relative paths as in `load_config`.
        overrides: texts `key.path=value`, for the whole file; what a variant says itself wins.

    Raises:
        ConfigError: with every problem that was found.
    """
    source = os.fspath(path)
    return parse_variants(read_file(source), source, overrides, folder=os.path.dirname(source))


def parse_variants(
    text: str,
    source: str = "config",
    overrides: Sequence[str] = (),
    *,
    folder: str | os.PathLike[str] | None = None,
) -> dict[str, RunConfig]:
    """Return the full config of each variant under `compare`; none when there is no such key.

    What a variant says is merged over the rest of the file, mapping by mapping, and the result is
    judged like any other config. Its MLflow run is named after it.

    Args:
        text: the YAML document.
        source: the name of the text in errors.
        overrides: texts `key.path=value`, for the whole file; what a variant says itself wins.
        folder: where relative paths of the text count from; they stay relative when left out.

    Raises:
        ConfigError: with every problem that was found, the keys as `compare.<variant>.<key>`; also
            when two variants would train the same, or one would not start from scratch.
    """
    tree, origins = read_tree(text, source, overrides, folder)
    check_file(tree, origins, source)
    compare: dict[str, Tree] = tree.get("compare") or {}
    variants: dict[str, RunConfig] = {}
    problems: list[Problem] = []
    for name, changes in compare.items():
        try:
            variants[name] = _variant(name, changes, tree, origins, source, folder)
        except ConfigError as error:
            problems += error.problems
    problems = problems or [*_warm_starts(variants, origins, source), *_twins(variants, origins)]
    if problems:
        raise ConfigError(problems)
    return variants


def _variant(
    name: str,
    changes: Tree,
    tree: Tree,
    origins: Origins,
    source: str,
    folder: str | os.PathLike[str] | None,
) -> RunConfig:
    rest = {key: value for key, value in tree.items() if key != "compare"}
    merged = _merged(rest, changes)
    merged["tracking"] = {**(merged.get("tracking") or {}), "run_name": name}
    here = ("compare", name)
    own = {key[2:]: where for key, where in origins.items() if key[:2] == here}
    written = {**origins, **own}
    resolve_paths(merged, written, folder)
    try:
        return validate(RunConfig, json.dumps(merged), lambda key: origin_of(key, written, source))
    except ConfigError as error:
        raise ConfigError(
            Problem(where, ".".join(filter(None, [*here, path])), text)
            for where, path, text in error.problems
        ) from None


def _merged(tree: Tree, changes: Tree) -> Tree:
    """Return a tree with the changes put over it, mapping by mapping; neither is written to."""
    result = dict(tree)
    for key, value in changes.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def _warm_starts(
    variants: dict[str, RunConfig], origins: Origins, source: str
) -> Iterator[Problem]:
    """Find variants that ask for the weights of another training, of which there may be none."""
    key = ("train", "warm_start")
    for name, config in variants.items():
        if config.train.warm_start:
            own = ("compare", name, *key)
            where = origin_of(own if own in origins else key, origins, source)
            text = "must be false: variants start from scratch. Got true. Change it."
            yield Problem(where, ".".join(own), text)


def _twins(variants: dict[str, RunConfig], origins: Origins) -> list[Problem]:
    """Find variants that would train the same: the second would only repeat the first."""
    problems = []
    seen: dict[str, str] = {}
    for name, config in variants.items():
        trained = config.model_dump_json(include={"features", "model", "optimizer", "train"})
        if trained in seen:
            text = (
                f"must differ from the other variants in features, model, optimizer or train. Got "
                f"the same as {seen[trained]!r}. Change or remove it."
            )
            where = origin_of(("compare", name), origins, "")
            problems.append(Problem(where, f"compare.{name}", text))
        seen.setdefault(trained, name)
    return problems
