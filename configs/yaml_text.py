"""Read YAML text without YAML's surprises.

Of YAML 1.1, which PyYAML speaks, four habits change the meaning of a config without a word: `1e-3`
is text, `on` and `no` are booleans, `012` is ten, and of two equal keys the last one wins. Here
numbers are read as in YAML 1.2, only `true` and `false` are booleans, a number with a leading zero
stays text (and so fails where a number is wanted), and a repeated key is an error. Tags and
aliases, which a config never needs, are refused.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from rowstep.configs.errors import ConfigError, Path, one_problem, path_text

Lines = dict[Path, int]

_MAP = "tag:yaml.org,2002:map"
_SEQ = "tag:yaml.org,2002:seq"
_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_STR = "tag:yaml.org,2002:str"

_SCALARS = {
    _NULL: lambda text: None,
    _BOOL: lambda text: text == "true",
    _INT: lambda text: int(text),
    _FLOAT: lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
    _STR: lambda text: text,
}


class _Loader(yaml.SafeLoader):
    """Resolve plain scalars by the patterns below and by nothing else."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"the alias *{event.anchor}, which is not read here", event.start_mark
            )
        return super().compose_node(parent, index)


_DIGITS = r"(?:0|[1-9][0-9]*(?:_[0-9]+)*)"  # 160_000 is welcome, 012 is not a number
_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver(_BOOL, re.compile(r"(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver(_INT, re.compile(rf"[-+]?{_DIGITS}$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        rf"(?:[-+]?(?:\.[0-9]+|{_DIGITS}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"
    ),
    list("-+.0123456789"),
)


def read_yaml(text: str, source: str) -> tuple[Any, Lines]:
    """Return the values of one YAML document, and the line on which each of them starts.

    Args:
        text: the document.
        source: the name of the text in errors, such as a file's path.

    Raises:
        ConfigError: "<source>:<line>: must be valid YAML. Got <what>. ..." and the like.
    """
    try:
        root = _Loader(text).get_single_node()
    except yaml.YAMLError as error:
        raise _syntax_error(error, source) from None
    lines: Lines = {}
    return (None if root is None else _value(root, (), lines, source)), lines


def _value(node: Node, path: Path, lines: Lines, source: str) -> Any:
    lines[path] = node.start_mark.line + 1
    if isinstance(node, MappingNode) and node.tag == _MAP:
        return _mapping(node, path, lines, source)
    if isinstance(node, SequenceNode) and node.tag == _SEQ:
        return [_value(item, (*path, i), lines, source) for i, item in enumerate(node.value)]
    try:
        return _SCALARS[node.tag](node.value)
    except (KeyError, ValueError):
        where = f"{source}:{lines[path]}"
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        text = f"must be plain YAML. Got a value tagged {tag} that does not fit. Remove the tag."
        raise one_problem(where, path_text(path), text) from None


def _mapping(node: MappingNode, path: Path, lines: Lines, source: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line, key = key_node.start_mark.line + 1, key_node.value
        if not isinstance(key_node, ScalarNode) or key_node.tag != _STR:
            shown = key if isinstance(key_node, ScalarNode) else "a list or a mapping"
            text = f"keys must be text. Got {shown}. Put it in quotes or rename it."
            raise one_problem(f"{source}:{line}", path_text(path), text)
        full = (*path, key)
        if key in result:
            text = (
                f"a key may appear once. Got it again; it stands on line {lines[full]} already. "
                "Remove one of the two."
            )
            raise one_problem(f"{source}:{line}", path_text(full), text)
        result[key] = _value(value_node, full, lines, source)
        lines[full] = line
    return result


def _syntax_error(error: yaml.YAMLError, source: str) -> ConfigError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = source if mark is None else f"{source}:{mark.line + 1}"
    column = "" if mark is None else f" at column {mark.column + 1}"
    found = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable text"
    text = f"must be valid YAML. Got {found}{column}. Correct the text there or just above."
    return one_problem(where, "", text)
