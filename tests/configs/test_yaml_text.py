"""YAML is read without YAML's surprises."""

from __future__ import annotations

import math

import pytest

from rowstep.configs.errors import ConfigError
from rowstep.configs.yaml_text import read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3E4", 3e4),
        (".5", 0.5),
        ("-1.25e+2", -125.0),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("7", 7),
        ("-7", -7),
        ("160_000", 160_000),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_plain_values_are_what_they_look_like(text: str, value: object) -> None:
    tree, _ = read_yaml(f"key: {text}", "text")
    assert tree == {"key": value}
    assert type(tree["key"]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "on",
        "off",
        "yes",
        "No",
        "True",
        "012",
        "0o17",
        "0x1F",
        "1:30",
        "2026-11-21",
        "1__0",
        "-",
        "=",
    ],
)
def test_everything_else_is_text(text: str) -> None:
    tree, _ = read_yaml(f"key: '{text}'", "text")
    assert tree == {"key": text}
    if text != "-":  # alone, a dash is a list
        assert read_yaml(f"key: {text}", "text")[0] == {"key": text}


def test_not_a_number_is_a_float() -> None:
    assert math.isnan(read_yaml("key: .nan", "text")[0]["key"])


def test_quotes_make_text() -> None:
    assert read_yaml("key: '1'", "text")[0] == {"key": "1"}


def test_lines_are_known_for_every_value() -> None:
    _, lines = read_yaml("a:\n  b:\n  - 1\n  - {c: 2}\n", "text")
    expected = {("a",): 1, ("a", "b"): 2, ("a", "b", 0): 3, ("a", "b", 1): 4}
    assert lines == {(): 1, **expected, ("a", "b", 1, "c"): 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n",
            "t.yaml:5: b.c: a key may appear once. Got it again; it stands on line 3 already. "
            "Remove one of the two.",
        ),
        (
            "a:\n  1: 2\n",
            "t.yaml:2: a: keys must be text. Got 1. Put it in quotes or rename it.",
        ),
        (
            "? [a, b]\n: 2\n",
            "t.yaml:1: keys must be text. Got a list or a mapping. Put it in quotes or rename it.",
        ),
        (
            "a: &x 1\nb: *x\n",
            "t.yaml:2: must be valid YAML. Got the alias *x, which is not read here at column 4. "
            "Correct the text there or just above.",
        ),
        (
            "a: [1, 2\n",
            "t.yaml:2: must be valid YAML. Got expected ',' or ']', but got '<stream end>' at "
            "column 1. Correct the text there or just above.",
        ),
        (
            "a: \x01\n",
            "t.yaml: must be valid YAML. Got special characters are not allowed. "
            "Correct the text there or just above.",
        ),
        (
            "a:\n- !!binary YQ==\n",
            "t.yaml:2: a[0]: must be plain YAML. Got a value tagged !!binary that does not fit. "
            "Remove the tag.",
        ),
        (
            "a: !thing {b: 1}\n",
            "t.yaml:1: a: must be plain YAML. Got a value tagged !thing that does not fit. "
            "Remove the tag.",
        ),
        (
            "a: !!int many\n",
            "t.yaml:1: a: must be plain YAML. Got a value tagged !!int that does not fit. "
            "Remove the tag.",
        ),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "t.yaml")
    assert str(caught.value) == message
