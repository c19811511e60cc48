"""A config file, overrides and canonical JSON lead to one checked config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rowstep.configs import (
    ConfigError,
    canonical_json,
    config_from_json,
    export_schema,
    load_config,
    parse_config,
)
from rowstep.configs.variants import load_variants

CONFIGS = Path(__file__).parents[2] / "configs"
TEXT = """
name: demo
data: {kind: movielens_100k, path: ml-100k}
features:
  user_id: {kind: vocabulary}
  item_id: {kind: vocabulary}
model: {kind: matrix_factorization, dim: 8, score_range: [1, 5]}
optimizer: {kind: lazy_adam, learning_rate: 1e-3}
"""


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_says_where_it_comes_from(path: Path) -> None:
    config = load_config(path)
    load_variants(path)
    assert config.name == path.stem
    header = path.read_text(encoding="utf-8").split("name:")[0]
    assert "# Source: " in header
    assert f"# Command:  rowstep run configs/{path.name}" in header


def test_the_shipped_comparison_differs_in_the_optimizer_only() -> None:
    variants = load_variants(CONFIGS / "compare_optimizers.yaml").values()
    kinds = [config.optimizer.kind for config in variants]
    assert kinds == ["adam", "lazy_adam", "lamb", "adam_multilr"]
    kept = {"optimizer", "tracking"}
    assert len({config.model_dump_json(exclude=kept) for config in variants}) == 1
    schedules = {config.optimizer.model_dump_json(include={"schedule"}) for config in variants}
    assert len(schedules) == 1 and "cosine" in schedules.pop()


def test_the_shipped_schema_is_in_step() -> None:
    shipped = (CONFIGS / "schema.json").read_text(encoding="utf-8")
    assert shipped == export_schema(), "run: rowstep schema > configs/schema.json"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_canonical_json_goes_there_and_back(path: Path) -> None:
    config = load_config(path)
    text = canonical_json(config)
    assert config_from_json(text) == config
    assert canonical_json(config_from_json(text)) == text


def test_equal_configs_have_equal_json() -> None:
    lines = TEXT.strip().splitlines()
    text = canonical_json(parse_config(TEXT))
    assert canonical_json(parse_config("\n".join([*lines[1:], lines[0]]))) == text
    assert canonical_json(parse_config(TEXT.replace("[1, 5]", "[1.0, 5.0]"))) == text
    assert canonical_json(parse_config(TEXT, overrides=["label=rating"])) == text
    assert canonical_json(parse_config(TEXT, overrides=["model.row_l2=-0.0"])) == text
    assert canonical_json(parse_config(TEXT, overrides=["model.row_l2=1e-9"])) != text


def test_canonical_json_is_sorted_compact_and_complete() -> None:
    text = canonical_json(parse_config(TEXT))
    tree = json.loads(text)
    assert text == json.dumps(tree, sort_keys=True, separators=(",", ":"))
    assert tree["train"]["batch_size"] == 512
    assert tree["optimizer"]["learning_rate"] == 0.001


def test_floats_survive_exactly() -> None:
    config = parse_config(TEXT, overrides=["optimizer.learning_rate=0.1000000000000000055"])
    assert config_from_json(canonical_json(config)).optimizer.learning_rate == 0.1


def test_an_override_is_read_as_yaml(demo: Path) -> None:
    config = load_config(
        demo,
        [
            "optimizer.learning_rate=3e-4",
            "train.warm_start=true",
            "train.callbacks=[a.b, c.d]",
            "checkpoint.every_seconds=",
            "tracking.experiment=a=b",
        ],
    )
    assert config.optimizer.learning_rate == 3e-4
    assert config.train.warm_start is True
    assert config.train.callbacks == ("a.b", "c.d")
    assert config.checkpoint.every_seconds is None
    assert config.tracking.experiment == "a=b"


def test_the_later_override_wins(demo: Path) -> None:
    assert load_config(demo, ["train.epochs=2", "train.epochs=3"]).train.epochs == 3
    assert load_config(demo, ["train={epochs: 2}", "train.seed=3"]).train.epochs == 2


def test_the_kind_can_be_changed_when_the_other_keys_fit(demo: Path) -> None:
    assert load_config(demo, ["optimizer.kind=lamb"]).optimizer.kind == "lamb"
    demo.write_text(TEXT.replace("dim: 8", "dim: 8, user: user_id"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^.*demo.yaml:7: model.user: unknown key\."):
        load_config(demo, ["model.kind=dcn"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.epochs",
            "--set: must have the form key.path=value. Got 'train.epochs'. "
            "Write, say, train.epochs=3.",
        ),
        ("=3", "--set: must have the form key.path=value. Got '=3'. Write, say, train.epochs=3."),
        (
            "name.first=x",
            "--set: name: must be a mapping to set 'first' in it. Got 'demo'. Set name as a whole.",
        ),
        (
            "train.epochs=[1",
            "--set train.epochs:1: must be valid YAML. Got expected ',' or ']', but got "
            "'<stream end>' at column 3. Correct the text there or just above.",
        ),
        (
            "train.epochs=0",
            "--set: train.epochs: must be at least 1. Got 0. "
            "Change it, or leave it out for the default 5.",
        ),
        (
            "modl.dim=3",
            "--set: modl: unknown key. Allowed here: checkpoint, compare, data, evaluation, "
            "features, label, model, name, optimizer, tracking, train, workspace. "
            "Did you mean 'model'?",
        ),
    ],
)
def test_a_bad_override_gets_the_house_wording(demo: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(demo, [override])
    assert str(caught.value) == message


def test_paths_in_a_file_count_from_its_folder(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = demo.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    demo.write_text(TEXT + "workspace: ../runs\n", encoding="utf-8")
    config = load_config("../demo.yaml")
    assert config.data.path == str(demo.parent / "ml-100k")
    assert config.workspace == str(demo.parent.parent / "runs")


def test_paths_in_an_override_count_from_the_working_directory(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = demo.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load_config(demo, ["data.path=films"]).data.path == str(elsewhere / "films")
    absolute = load_config(demo, [f"data.path={demo.parent}"]).data.path
    assert absolute == str(demo.parent)


def test_the_home_folder_is_expanded(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert load_config(demo, ["workspace=~/runs"]).workspace == "/home/ann/runs"
    assert parse_config(TEXT.replace("ml-100k}", "~/ml}")).data.path == "/home/ann/ml"


def test_a_text_without_a_folder_keeps_its_paths() -> None:
    assert parse_config(TEXT).data.path == "ml-100k"


def test_a_missing_file_names_its_neighbour(demo: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(demo.with_name("dem.yaml"))
    assert str(caught.value) == (
        f"{demo.with_name('dem.yaml')}: must be a file. Got a path where nothing is. "
        f"Did you mean {str(demo)!r}?"
    )


def test_a_folder_an_empty_file_and_a_binary_file_are_refused(demo: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a file\. Got a folder\."):
        load_config(demo.parent)
    demo.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"must hold a mapping of keys to values\. Got nothing\."):
        load_config(demo)
    demo.write_bytes(b"name: \xff\xfe")
    with pytest.raises(
        ConfigError, match=r"must be UTF-8 text\. Got invalid start byte at byte 6\."
    ):
        load_config(demo)


def test_a_byte_order_mark_is_no_part_of_the_text(demo: Path) -> None:
    demo.write_bytes(b"\xef\xbb\xbf" + TEXT.strip().encode())
    assert load_config(demo).name == "demo"


def test_a_config_does_not_change() -> None:
    config = parse_config(TEXT)
    with pytest.raises(ValueError, match="frozen"):
        config.name = "other"


def test_reading_configs_loads_nothing_heavy() -> None:
    code = (
        "import sys; from rowstep.configs import load_config; load_config(sys.argv[1]); "
        "heavy = {'tensorflow', 'keras', 'tf_keras', 'tfx', 'mlflow', 'numpy', 'apache_beam'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(CONFIGS / "quickstart.yaml")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout.strip() == "[]"
