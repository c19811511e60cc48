"""Every config error says where, what must hold, what was found and what to do."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from rowstep import RowstepError
from rowstep.configs import ConfigError, config_from_json, parse_config
from rowstep.configs.errors import Problem

GOOD: dict[str, Any] = {
    "name": "demo",
    "data": {"kind": "synthetic"},
    "features": {"user_id": {"kind": "vocabulary"}, "item_id": {"kind": "hash", "buckets": 64}},
    "model": {"kind": "matrix_factorization"},
    "optimizer": {"kind": "lazy_adam"},
}
MISSING = object()


def changed(path: str, value: object) -> dict[str, Any]:
    """Return the good tree with one key set, or removed."""
    tree = copy.deepcopy(GOOD)
    holder = tree
    *way, last = path.split(".")
    for key in way:
        holder = holder.setdefault(key, {})
    if value is MISSING:
        del holder[last]
    else:
        holder[last] = value
    return tree


def problems_of(tree: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_from_json(json.dumps(tree))
    return [f"{problem.path}: {problem.text}" for problem in caught.value.problems]


TABLE = [
    (
        "optimizer.learning_rat",
        1e-3,
        "unknown key. Allowed here: beta_1, beta_2, bias_correction, clipnorm, clipvalue, "
        "epsilon, global_clipnorm, idle_decay, kind, learning_rate, row_velocity, schedule, "
        "weight_decay. Did you mean 'learning_rate'?",
    ),
    (
        "features.user_id.oov",
        2,
        "unknown key. Allowed here: kind, max_size, oov_buckets. Did you mean 'oov_buckets'?",
    ),
    (
        "train.zebra",
        2,
        "unknown key. Allowed here: batch_size, callbacks, epochs, metrics, seed, shuffle_buffer, "
        "warm_start, warm_start_optimizer. Remove it.",
    ),
    (
        "data.kind",
        "movielens",
        "must be one of the known kinds. Got 'movielens'. Allowed: csv, csv_spans, movielens_100k, "
        "synthetic. Did you mean 'movielens_100k'?",
    ),
    (
        "data.kind",
        MISSING,
        "is required. Got nothing. Allowed: csv, csv_spans, movielens_100k, synthetic. Add it.",
    ),
    (
        "optimizer.schedule",
        {"kind": "cosin"},
        "must be one of the known kinds. Got 'cosin'. Allowed: cosine, exponential. "
        "Did you mean 'cosine'?",
    ),
    (
        "features.item_id",
        None,
        "must be a mapping of keys to values. Got null. Allowed: hash, numeric, vocabulary. "
        "Write, for example, {kind: hash}.",
    ),
    ("model", MISSING, "is required. Got nothing. Allowed: dcn, matrix_factorization. Add it."),
    ("name", MISSING, "is required. Got nothing. Add it."),
    (
        "name",
        "Demo run",
        "must match ^[a-z][a-z0-9_-]{0,62}$. Got 'Demo run'. Write, for example, 'daily_ratings'.",
    ),
    (
        "train.epochs",
        0,
        "must be at least 1. Got 0. Change it, or leave it out for the default 5.",
    ),
    ("train.epochs", 2.0, "must be a whole number. Got 2.0. Write 2."),
    (
        "train.epochs",
        2.5,
        "must be a whole number. Got 2.5. Change it, or leave it out for the default 5.",
    ),
    (
        "train.epochs",
        True,
        "must be a whole number. Got true. Change it, or leave it out for the default 5.",
    ),
    (
        "train.epochs",
        "012",
        "must be a whole number. Got '012'. Write it without quotes and without leading zeros.",
    ),
    (
        "optimizer.beta_1",
        1,
        "must be less than 1. Got 1. Allowed: 0 <= value < 1. "
        "Change it, or leave it out for the default 0.9.",
    ),
    (
        "optimizer.learning_rate",
        "fast",
        "must be a number. Got 'fast'. Change it, or leave it out for the default 0.001.",
    ),
    ("optimizer.clipnorm", float("nan"), "must be a finite number. Got nan. Change it."),
    (
        "train.warm_start",
        "on",
        "must be true or false. Got 'on'. Change it, or leave it out for the default false.",
    ),
    (
        "data.split",
        {"kind": "time", "eval_percent": 60},
        "must be at most 50. Got 60. Allowed: 1 <= value <= 50. "
        "Change it, or leave it out for the default 10.",
    ),
    ("model.score_range", [1], "is required. Got nothing. Add it."),
    ("model.score_range", [5, 1], "must rise. Got [5, 1]. Write [low, high]."),
    ("train", [], "must be a mapping of keys to values. Got a list. Change it."),
    (
        "train.callbacks",
        ["stop"],
        r"must match ^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$. Got 'stop'. "
        "Write, for example, 'my_package.callbacks.StopEarly'.",
    ),
]
PATHS = {  # where the place of the problem is deeper than the key that was set
    "optimizer.schedule": "optimizer.schedule.kind",
    "data.split": "data.split.eval_percent",
    "train.callbacks": "train.callbacks[0]",
}


@pytest.mark.parametrize(("path", "value", "text"), TABLE)
def test_one_wrong_key_gives_one_line(path: str, value: object, text: str) -> None:
    found = problems_of(changed(path, value))
    where = PATHS.get(path, path)
    if path == "model.score_range" and value == [1]:
        where = "model.score_range[1]"
    assert found == [f"{where}: {text}"]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (
            changed("optimizer", {"kind": "lazy_adam", "clipnorm": 1, "clipvalue": 2}),
            "optimizer.clipvalue: at most one way to clip may be set. Got clipnorm, clipvalue. "
            "Keep one of them.",
        ),
        (
            changed("optimizer", {"kind": "lamb", "exclude_from_weight_decay": ["bias", "("]}),
            "optimizer.exclude_from_weight_decay[1]: must be a regular expression. Got '(' "
            "(missing ), unterminated subpattern at position 0). Escape its special characters.",
        ),
        (
            changed("model", {"kind": "matrix_factorization", "user": "visitor"}),
            "model.user: must name a vocabulary or hash feature. Got 'visitor'. "
            "Allowed: item_id, user_id. Add it under 'features'.",
        ),
        (
            changed("label", "item_id"),
            "features.item_id: must not be the label. Got the column named by 'label'. "
            "Remove it, or rename the label.",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(tree: dict[str, Any], expected: str) -> None:
    assert problems_of(tree) == [expected]


def test_empty_features_report_every_consequence() -> None:
    found = problems_of(changed("features", {}))
    assert [line.split(":")[0] for line in found] == ["features", "model.user", "model.item"]
    assert found[0] == "features: at least one is needed. Got none. Add, say, user_id."


@pytest.mark.parametrize(
    "uri",
    [
        "http://ann:secret@host:5000",
        "http://ann:se/cret@host",
        "http://ann:se#cret@host",
        "ann:secret@host",
        "http://host/api?token=secret",
        "http://host/api#token=secret",
        "http://host/api%3Ftoken=secret",
        "sqlite:///relative.db?password=secret",
    ],
)
def test_credentials_are_refused_and_not_repeated(uri: str) -> None:
    (found,) = problems_of(changed("tracking.uri", uri))
    assert found.startswith("tracking.uri: must not hold credentials.")
    assert "cret" not in found and "ann" not in found


@pytest.mark.parametrize(
    "uri",
    [
        "http://host:5000",
        "https://host/ml?x=1",
        "databricks://profile",
        "sqlite:////data/a@b/m.db",
        "file:///data/a@b",
        "/data/a@b",
    ],
)
def test_an_address_without_credentials_is_taken(uri: str) -> None:
    config = config_from_json(json.dumps(changed("tracking.uri", uri)))
    assert config.tracking.uri == uri


def test_all_problems_come_at_once_with_their_lines() -> None:
    text = "\n".join(
        [
            "name: demo",
            "data: {kind: synthetic, num_users: 0}",
            "features:",
            "  user_id: {kind: vocabulary}",
            "  item_id: {kind: hash}",
            "model: {kind: matrix_factorization}",
            "optimizer:",
            "  kind: lazy_adam",
            "  learning_rat: 1e-3",
        ]
    )
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "demo.yaml", ["train.epoch=3"])
    starts = [line.split(". ")[0] for line in str(caught.value).splitlines()]
    assert starts == [
        "demo.yaml:2: data.num_users: must be at least 1",
        "demo.yaml:5: features.item_id.buckets: is required",
        "demo.yaml:9: optimizer.learning_rat: unknown key",
        "--set: train.epoch: unknown key",
    ]


def test_text_that_is_not_json_is_said_so() -> None:
    with pytest.raises(ConfigError, match=r"^config JSON: must be valid JSON \(.*\)\. Got '\{'\."):
        config_from_json("{")


def test_long_values_are_cut() -> None:
    (found,) = problems_of(changed("train.epochs", "x" * 500))
    assert len(found) < 200


def test_the_error_is_a_rowstep_error_and_a_value_error_and_can_be_pickled() -> None:
    error = ConfigError([Problem("a.yaml:1", "b", "must be text. Got 1. Change it.")])
    assert isinstance(error, RowstepError) and isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems and str(again) == str(error)
