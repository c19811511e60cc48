"""How a config error is worded: one line a problem, every problem at once.

    <file>:<line>: <path>: <what must hold>. Got <value>. <allowed or nearest>. <what to do>.

The words come from pydantic's list of errors and from the JSON schema of the config, so a new field
needs no wording of its own. A validator in `schema.py` words its own problem.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rowstep import RowstepError

Path = tuple[str | int, ...]
Node = Mapping[str, Any]


class Problem(NamedTuple):
    """Say what is wrong at one place."""

    where: str
    """Where it was written, such as `quickstart.yaml:12` or `--set`; empty when not known."""
    path: str
    """The key, such as `train.epochs`; empty when the problem is the file itself."""
    text: str
    """What must hold, what was found, and what to do."""

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


class ConfigError(RowstepError, ValueError):
    """Report that a config file, an override or a config's JSON does not fit.

    Carries every problem that was found in `problems`; its text is one line a problem.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def one_problem(where: str, path: str, text: str) -> ConfigError:
    """Return the error for a single problem."""
    return ConfigError([Problem(where, path, text)])


def path_text(path: Path) -> str:
    """Return `("a", "b", 1)` as `a.b[1]`."""
    parts = [f"[{item}]" if isinstance(item, int) else f".{item}" for item in path]
    return "".join(parts).removeprefix(".")


def show(value: object) -> str:
    """Return a value as a reader of YAML knows it, cut to fit a line."""
    words = {"NoneType": "null", "dict": "a mapping", "list": "a list"}
    kind = type(value).__name__
    if isinstance(value, bool):
        return str(value).lower()
    text = words.get(kind) or repr(value)
    return text if len(text) <= 60 else text[:56] + "...'"


def nearest(word: object, known: Iterable[str]) -> str:
    """Return `Did you mean 'x'?`, or an empty text when nothing is near."""
    words = list(known)
    near = difflib.get_close_matches(str(word), words, n=1)
    near = near or [known for known in words if known.startswith(f"{word}_")]
    return f"Did you mean {near[0]!r}?" if near else ""


def describe(
    errors: Sequence[Mapping[str, Any]], schema: Node, where: Callable[[Path], str]
) -> ConfigError:
    """Return pydantic's errors in the wording of the house.

    Args:
        errors: what `ValidationError.errors()` returns.
        schema: the JSON schema of the model that was validated.
        where: says where a path was written.
    """
    problems: list[Problem] = []
    for error in errors:
        path, node = _walk(schema, error["loc"])
        if error["type"] == "value_error":
            problems += _own_words(error, path, where)
        elif error["type"] == "extra_forbidden":
            _, parent = _walk(schema, error["loc"][:-1])
            problems.append(Problem(where(path), path_text(path), _unknown_key(path, parent)))
        else:
            if error["type"].startswith("union_tag"):
                path = (*path, "kind")
            problems.append(Problem(where(path), path_text(path), _words(error, node)))
    return ConfigError(problems)


def _own_words(
    error: Mapping[str, Any], path: Path, where: Callable[[Path], str]
) -> Iterable[Problem]:
    """Return the lines of a validator, `<key>: <what must hold>. ...`, the key made absolute."""
    for line in str(error["ctx"]["error"]).splitlines():
        key, text = re.fullmatch(r"(?:([\w.]+): )?(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        full = (*path, *key.split(".")) if key else path
        yield Problem(where(full), path_text(full), text)


def _unknown_key(path: Path, parent: Node) -> str:
    allowed = sorted(parent.get("properties", {}))
    advice = nearest(path[-1], allowed) or "Remove it."
    return f"unknown key. Allowed here: {', '.join(allowed)}. {advice}"


# --- the place of an error in the schema ----------------------------------------------------


def _walk(schema: Node, loc: Sequence[str | int]) -> tuple[Path, Node]:
    """Follow pydantic's location; return it without the union tags, and the schema found there."""
    path: list[str | int] = []
    node = _resolve(schema, schema)
    for item in loc:
        kinds = node.get("discriminator", {}).get("mapping")
        if kinds:  # pydantic puts the tag of the chosen member into the location; readers did not
            node = _resolve({"$ref": kinds[item]}, schema)
            continue
        path.append(item)
        node = _resolve(_child(node, item), schema)
    return tuple(path), node


def _child(node: Node, item: str | int) -> Node:
    if isinstance(item, int):
        fixed = node.get("prefixItems", [])
        found = fixed[item] if item < len(fixed) else node.get("items")
    else:
        found = node.get("properties", {}).get(item, node.get("additionalProperties"))
    return found if isinstance(found, dict) else {}


def _resolve(node: Node, schema: Node) -> Node:
    """Follow a reference, and look through `X or null`; what the outer node says wins."""
    while "$ref" in node or "anyOf" in node:
        rest = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
        if "$ref" in node:
            inner = schema["$defs"][node["$ref"].rpartition("/")[2]]
        else:
            inner = next(member for member in node["anyOf"] if member.get("type") != "null")
        node = {**inner, **rest}
    return node


# --- the words ------------------------------------------------------------------------------

_MUST = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping of keys to values",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "int_type": "must be a whole number",
    "json_invalid": "must be valid JSON ({error})",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be one of the known values",
    "missing": "is required",
    "model_attributes_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be text",
    "too_long": "must have at most {max_length} items",
    "too_short": "must have at least {min_length} items",
    "tuple_type": "must be a list",
    "union_tag_invalid": "must be one of the known kinds",
    "union_tag_not_found": "is required",
}


def _words(error: Mapping[str, Any], node: Node) -> str:
    kind, value = error["type"], error["input"]
    must = _MUST[kind].format(**error.get("ctx", {})) if kind in _MUST else error["msg"].lower()
    if kind == "union_tag_invalid":
        value = value["kind"]
    absent = kind in ("missing", "union_tag_not_found")
    got = "nothing" if absent else show(value)
    sentences = [must, f"Got {got}", _allowed(node), _advice(value, node, absent=absent)]
    return " ".join(s if s.endswith("?") else s + "." for s in sentences if s)


def _allowed(node: Node) -> str:
    """Return what the schema allows: the kinds of a union, the known values, or the range."""
    known = _known(node)
    if known:
        return f"Allowed: {', '.join(known)}"
    low, high = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    if (low is None and above is None) or (high is None and below is None):
        return ""  # what must hold has said it already
    start = f"{above:g} <" if low is None else f"{low:g} <="
    end = f"< {below:g}" if high is None else f"<= {high:g}"
    return f"Allowed: {start} value {end}"


def _known(node: Node) -> list[str]:
    values = node.get("discriminator", {}).get("mapping") or node.get("enum") or ()
    return sorted(str(value) for value in values)


def _advice(value: object, node: Node, *, absent: bool) -> str:
    if absent:
        return "Add it"
    known = _known(node)
    if near := nearest(value, known):
        return near
    if "discriminator" in node and not isinstance(value, str):
        return f"Write, for example, {{kind: {known[0]}}}"
    numeric = node.get("type") in ("integer", "number")
    if numeric and isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+(e[-+]?\d+)?", value):
        return "Write it without quotes and without leading zeros"
    if node.get("type") == "integer" and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}"
    if node.get("examples"):
        return f"Write, for example, {show(node['examples'][0])}"
    default = node.get("default")
    if isinstance(default, (int, float, str)):
        return f"Change it, or leave it out for the default {show(default)}"
    return "Change it"
