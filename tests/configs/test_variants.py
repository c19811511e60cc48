"""A file with `compare` holds a full config for each variant, each judged before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rowstep.configs import ConfigError, canonical_json, config_from_json, parse_config
from rowstep.configs.schema import SHARED_KEYS, ConfigFile, RunConfig
from rowstep.configs.variants import load_variants, parse_variants

TEXT = """
name: demo
data: {kind: movielens_100k, path: ml-100k}
features:
  user_id: {kind: vocabulary}
  item_id: {kind: vocabulary}
model: {kind: matrix_factorization, dim: 8}
optimizer: {kind: lazy_adam, learning_rate: 0.001, bias_correction: visits}
tracking: {every_steps: 10}
compare:
  lazy: {}
  wide:
    model: {dim: 16}
"""


def errors_of(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_variants(text, "demo.yaml", overrides)
    return str(caught.value).splitlines()


def test_a_variant_is_the_rest_of_the_file_with_its_own_keys_put_over_it() -> None:
    lazy, wide = parse_variants(TEXT).values()
    assert (lazy.model.dim, wide.model.dim) == (8, 16)
    assert wide.model.kind == "matrix_factorization"
    assert wide.optimizer == lazy.optimizer == parse_config(TEXT).optimizer
    assert wide.data.path == "ml-100k"


def test_variants_keep_the_order_of_the_file_and_name_their_mlflow_runs() -> None:
    variants = parse_variants(TEXT)
    assert list(variants) == ["lazy", "wide"]
    assert [config.tracking.run_name for config in variants.values()] == ["lazy", "wide"]
    assert [config.tracking.every_steps for config in variants.values()] == [10, 10]
    assert parse_config(TEXT).tracking.run_name is None


def test_a_variant_is_a_config_like_any_other() -> None:
    wide = parse_variants(TEXT)["wide"]
    assert type(wide) is RunConfig
    assert "compare" not in json.loads(canonical_json(wide))
    assert config_from_json(canonical_json(wide)) == wide


def test_the_file_without_its_variants_is_a_config_too() -> None:
    config = parse_config(TEXT)
    assert type(config) is RunConfig
    assert config.model.dim == 8


@pytest.mark.parametrize(
    "text", [TEXT.split("compare:")[0], TEXT.split("compare:")[0] + "compare:"]
)
def test_without_the_key_there_are_no_variants(text: str) -> None:
    assert parse_variants(text) == {}


def test_an_override_is_for_all_and_what_a_variant_says_wins() -> None:
    overrides = ["model.dim=4", "train.epochs=2", "compare.lazy.train.seed=1"]
    lazy, wide = parse_variants(TEXT, overrides=overrides).values()
    assert (lazy.model.dim, wide.model.dim) == (4, 16)
    assert (lazy.train.epochs, wide.train.epochs) == (2, 2)
    assert (lazy.train.seed, wide.train.seed) == (1, 7)
    assert parse_variants(TEXT, overrides=["compare=null"]) == {}


def test_every_problem_names_its_variant_and_its_line() -> None:
    text = TEXT.replace("lazy: {}", "lazy: {optimizer: {beta_1: 2}, train: {epochs: 0}}")
    text = text.replace("{dim: 16}", "{dim: 16, dimm: 1}")
    assert errors_of(text) == [
        "demo.yaml:11: compare.lazy.optimizer.beta_1: must be less than 1. Got 2. "
        "Allowed: 0 <= value < 1. Change it, or leave it out for the default 0.9.",
        "demo.yaml:11: compare.lazy.train.epochs: must be at least 1. Got 0. "
        "Change it, or leave it out for the default 5.",
        "demo.yaml:13: compare.wide.model.dimm: unknown key. Allowed here: dim, init_stddev, item, "
        "kind, row_l2, score_range, user. Did you mean 'dim'?",
    ]


def test_a_key_of_the_rest_that_no_longer_fits_is_shown_where_it_stands() -> None:
    [line] = errors_of(TEXT + "  lamb: {optimizer: {kind: lamb}}\n")
    assert line.startswith(
        "demo.yaml:8: compare.lamb.optimizer.bias_correction: unknown key. Allowed here: beta_1,"
    )


def test_the_rest_of_the_file_is_judged_as_well() -> None:
    [line] = errors_of(TEXT.replace("every_steps: 10", "every_steps: 0"))
    assert line.startswith("demo.yaml:9: tracking.every_steps: must be at least 1. Got 0.")


@pytest.mark.parametrize("key", SHARED_KEYS)
def test_what_makes_a_comparison_fair_cannot_be_varied(key: str) -> None:
    lines = errors_of(TEXT.replace("lazy: {}", f"lazy: {{{key}: {{}}}}"))
    assert lines == [
        f"demo.yaml:11: compare.lazy.{key}: must be the same for all variants. Got a mapping. "
        f"Set '{key}' for the whole file."
    ]


def test_no_key_of_a_config_is_forgotten_when_deciding_what_may_vary() -> None:
    may_vary = {"features", "model", "optimizer", "train", "checkpoint", "evaluation"}
    assert set(ConfigFile.model_fields) == may_vary | set(SHARED_KEYS)


def test_variants_that_train_the_same_are_refused() -> None:
    assert errors_of(TEXT + "  again: {model: {dim: 16}, evaluation: {max_rmse: 1}}\n") == [
        "demo.yaml:14: compare.again: must differ from the other variants in features, model, "
        "optimizer or train. Got the same as 'wide'. Change or remove it."
    ]


def test_a_variant_that_would_start_warm_is_refused_where_that_is_asked_for() -> None:
    refusal = "train.warm_start: must be false: variants start from scratch. Got true. Change it."
    text = TEXT.replace("lazy: {}", "lazy: {train: {warm_start: true}}")
    assert errors_of(text) == [f"demo.yaml:11: compare.lazy.{refusal}"]
    assert errors_of(
        TEXT.replace("lazy: {}", "lazy: {train: {warm_start: false}}")
        + "train: {warm_start: true}\n"
    ) == [f"demo.yaml:14: compare.wide.{refusal}"]


@pytest.mark.parametrize(
    ("compare", "words"),
    [
        ("{}", "compare: must name at least two variants. Got 0. Add one, or remove 'compare'."),
        ("{a: {}}", "compare: must name at least two variants. Got 1."),
        ("{a: {}, a b: {train: {seed: 1}}}", "compare: names of variants must be letters, digits"),
        ("{a: {}, b: 3}", "compare.b: must be a mapping of keys to values. Got 3."),
        ("[a, b]", "compare: must be a mapping of keys to values. Got a list."),
    ],
)
def test_the_shape_of_the_key_is_checked(compare: str, words: str) -> None:
    [line] = errors_of(TEXT.split("compare:")[0] + f"compare: {compare}\n")
    assert line.startswith(f"demo.yaml:10: {words}")
    with pytest.raises(ConfigError):
        parse_config(TEXT.split("compare:")[0] + f"compare: {compare}\n")


def test_paths_of_a_variant_count_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text(TEXT.replace("lazy: {}", "lazy: {checkpoint: {root: states}}"))
    variants = load_variants(path)
    assert variants["lazy"].checkpoint.root == str(tmp_path / "states")
    assert variants["wide"].data.path == str(tmp_path / "ml-100k")
