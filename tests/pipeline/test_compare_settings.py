"""What differs between runs is found wherever it is kept: in params, config files or tags."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from rowstep.components.build import build_optimizer
from rowstep.components.describe import describe_optimizer, optimizer_tags, run_params
from rowstep.configs import canonical_json, load_config
from rowstep.pipeline.compare_read import TrackedRun, Wanted, open_store, read_runs
from rowstep.pipeline.compare_settings import nothing_differs, setting_rows

mlflow = pytest.importorskip("mlflow")
TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
FILES = ("config.json", "optimizer_config.json")

Reporter = Callable[..., TrackedRun]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory, mlflow_template_db: Path) -> Reporter:
    """Return what makes a run as a training starts one, with some settings, and reads it back."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(mlflow_template_db, folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    client = open_store(uri)
    place = client.create_experiment("tiny", artifact_location=f"file://{folder / 'artifacts'}")

    numbers = itertools.count()

    def report(
        *overrides: str, files: Iterable[str] = FILES, data: str = "d" * 16, **more: str
    ) -> TrackedRun:
        config = load_config(TINY, [*overrides, f"tracking.run_name=run{next(numbers)}"])
        weights = keras.Variable(np.ones((3, 4), np.float32), name="embeddings")
        optimizer = build_optimizer(config.optimizer, 100, [])
        optimizer.build([weights])
        model = keras.Sequential([keras.layers.Dense(1)])
        model.build((None, 2))
        model.compile(optimizer=optimizer)
        run_id = client.create_run(place).info.run_id
        for key, value in run_params(config, model, 100).items():
            client.log_param(run_id, key, value)
        for key, value in {**optimizer_tags(optimizer), "rowstep.train_data": data, **more}.items():
            client.set_tag(run_id, key, value)
        texts = {
            "config.json": canonical_json(config),
            "optimizer_config.json": json.dumps(
                describe_optimizer(optimizer, model), indent=2, default=str
            ),
        }
        for name in files:
            client.log_text(run_id, texts.get(name, "not JSON"), name.removeprefix("bad:"))
        [run] = read_runs(client, uri, [Wanted(run_id, None)])
        return run

    return report


@pytest.fixture(scope="module")
def usual(reported: Reporter) -> TrackedRun:
    return reported()


def rows(*runs: TrackedRun, everything: bool = False) -> dict[str, list[str]]:
    return dict(setting_rows(runs, everything=everything))


LAMB = "optimizer={kind: lamb, learning_rate: 0.01"
MULTILR = "optimizer={kind: adam_multilr, learning_rate: 0.01"
COSINE = "optimizer.schedule={kind: cosine, decay_steps: 50"


@pytest.mark.parametrize(
    ("override", "row"),
    [
        ("optimizer.bias_correction=visits", {"opt.bias_correction": ["steps", "visits"]}),
        ("optimizer.idle_decay=true", {"opt.idle_decay": ["False", "True"]}),
        ("optimizer.row_velocity=true", {"opt.row_velocity": ["False", "True"]}),
        ("optimizer.learning_rate=0.003", {"opt.learning_rate": ["0.01", "0.003"]}),
        ("model.row_l2=0.5", {"model.row_l2": ["0.02", "0.5"]}),
        ("data.seed=99", {"data.seed": ["20261121", "99"]}),
        ("train.shuffle_buffer=1", {"train.shuffle_buffer": ["100000", "1"]}),
        ("train.warm_start=true", {"train.warm_start": ["False", "True"]}),
        ("features.user_id.oov_buckets=9", {"features.user_id.oov_buckets": ["1", "9"]}),
        ("tracking.every_steps=9", {"tracking.every_steps": ["10", "9"]}),
    ],
)
def test_one_changed_key_is_one_row(
    reported: Reporter, usual: TrackedRun, override: str, row: dict[str, list[str]]
) -> None:
    assert rows(usual, reported(override)) == row


@pytest.mark.parametrize(
    ("one", "other", "row"),
    [
        (LAMB + "}", LAMB + ", trust_ratio_clip: [0.5, 2]}", {"opt.trust_ratio_clip"}),
        (
            MULTILR + "}",
            MULTILR + ", pattern_lrs: [{patterns: [b], lr: 1.0}]}",
            {"opt.pattern_lrs"},
        ),
        (COSINE + "}", COSINE + ", alpha: 0.1}", {"opt.schedule.alpha"}),
    ],
)
def test_what_only_some_optimizers_have_is_a_row_too(
    reported: Reporter, one: str, other: str, row: set[str]
) -> None:
    assert set(rows(reported(one), reported(other))) == row


def test_equal_runs_have_no_row_and_that_is_said(reported: Reporter, usual: TrackedRun) -> None:
    again = reported()
    assert rows(usual, again) == {}
    assert nothing_differs([usual, again]) == "Nothing that is stored of their settings differs."
    shown = rows(usual, again, everything=True)
    assert shown["train.seed"] == ["7", "7"] and shown["opt.beta_1"] == ["0.9", "0.9"]


def test_optimizers_of_two_kinds_differ_in_what_they_do_and_not_in_what_they_lack(
    reported: Reporter, usual: TrackedRun
) -> None:
    found = rows(usual, reported("optimizer={kind: adam, learning_rate: 0.01}"))
    assert found["opt.class"] == ["LazyAdam", "Adam"]
    assert found["opt.bias_correction"][0] == "steps"
    assert "opt.idle_decay" not in found and "opt.row_velocity" not in found
    assert "optimizer.kind" not in found and len(found) < 8


def test_a_run_without_config_files_is_held_against_others_by_its_params(
    reported: Reporter, usual: TrackedRun
) -> None:
    poor = reported("data.seed=99", "train.seed=8", files=())
    assert rows(usual, poor) == {"train.seed": ["7", "8"]}
    assert rows(poor, reported("data.seed=99", "train.seed=8")) == {}
    text = nothing_differs([poor, usual])
    assert text == f"No params differ. The config is not known of: {poor.label}."


def test_a_fingerprint_that_nothing_explains_is_shown(
    reported: Reporter, usual: TrackedRun
) -> None:
    other_data = reported(data="e" * 16)
    assert rows(usual, other_data) == {"rowstep.train_data": ["d" * 16, "e" * 16]}
    explained = reported("data.seed=99", data="e" * 16)
    assert set(rows(usual, explained)) == {"data.seed"}
    # Of three runs, one pair is explained and another one is not.
    assert set(rows(usual, explained, other_data)) == {"data.seed", "rowstep.train_data"}
    other_code = reported(**{"opt.config_sha256": "f" * 64})
    assert rows(usual, other_code)["opt.config_sha256"][1] == "f" * 16
    poor = reported("optimizer.weight_decay=0.5", files=())
    assert rows(poor, reported("optimizer.weight_decay=0.5")) == {}


def test_a_config_file_that_cannot_be_read_leaves_the_params_and_says_so(
    reported: Reporter, usual: TrackedRun
) -> None:
    bad = reported("train.seed=8", files=["bad:config.json"])
    assert bad.problem is not None and "JSONDecodeError" in bad.problem
    assert set(rows(usual, bad)) == {"train.seed"}


def test_long_values_are_shortened_and_stay_distinct(reported: Reporter) -> None:
    patterns = ", ".join(f"layer_{n}" for n in range(30))
    one, other = (
        reported(f"{LAMB}, exclude_from_weight_decay: [{patterns}, {last}]}}") for last in "ab"
    )
    for row in rows(one, other).values():
        assert len(set(row)) == 2 and max(map(len, row)) <= 40


def test_a_schedule_that_begins_anew_looks_like_the_schedule_itself(usual: TrackedRun) -> None:
    from rowstep.components.offset_schedule import OffsetSchedule
    from rowstep.pipeline.compare_settings import _of_optimizer

    def flat(rate: Any) -> dict[str, str]:
        optimizer = keras.optimizers.Adam(rate, beta_1=0.8)
        if not isinstance(rate, float):
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        serialized = keras.saving.serialize_keras_object(optimizer)
        return dict(_of_optimizer({**serialized, "versions": {"keras": "3"}}))

    schedule = keras.optimizers.schedules.CosineDecay(0.1, 70)
    found = flat(OffsetSchedule(schedule, 3))
    assert found == flat(schedule)
    assert found["opt.schedule"] == "CosineDecay" and found["opt.schedule.decay_steps"] == "70"
    assert found["opt.beta_1"] == flat(0.5)["opt.beta_1"] == "0.8"
    assert flat(0.1)["opt.learning_rate"] == "0.1" and found["version.keras"] == "3"
