"""`rowstep doctor`: findings on the screen, and the exit code says whether there are any."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner

from rowstep.components.doctor import examine
from rowstep.configs import load_config
from rowstep.pipeline.cli import main

GOOD = Path(__file__).parents[1] / "support" / "tiny.yaml"


def _invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_healthy_config_exits_with_0(tmp_path: Path) -> None:
    # In a process of its own: nothing of TensorFlow's noise may reach the screen either.
    done = subprocess.run(
        [sys.executable, "-m", "rowstep.pipeline", "doctor", str(GOOD)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{GOOD}: Nothing found: steps cost O(R), the rows of the batch.\n"
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_findings_exit_with_1_and_come_with_the_remedy() -> None:
    code, shown, _ = _invoke(str(GOOD), "--set", "optimizer={kind: adam, global_clipnorm: 1.0}")
    assert code == 1
    assert shown.startswith(f"{GOOD}: 4 findings.")
    for words in (
        "[dense] Adam: a step must touch the rows of the batch only.",
        "[wrong] Adam: gradients of an id that comes twice in a batch must be summed",
        "[dense] Adam(global_clipnorm=1.0): an option must not cost O(V).",
        "[wrong] Adam(global_clipnorm=1.0): a gradient must be clipped after",
        "Use rowstep.optimizers.LazyAdam.",
    ):
        assert words in shown


def test_bad_config_exits_with_2_before_anything_is_built() -> None:
    code, shown, errors = _invoke(str(GOOD), "--set", "train.epochs=0")
    assert (code, shown) == (2, "")
    assert "train.epochs: must be at least 1. Got 0." in errors


@pytest.mark.parametrize(
    ("name", "codes"),
    [("quickstart", []), ("dcn_synthetic", ["not_lazy"]), ("movielens_100k", [])],
)
def test_shipped_configs_are_what_they_claim_to_be(name: str, codes: list[str]) -> None:
    # dcn_synthetic trains with LAMB, whose norms are over whole variables.
    path = Path(str(files("rowstep.configs"))) / f"{name}.yaml"
    assert [finding.code for finding in examine(load_config(path, ()))] == codes


def test_numeric_features_have_no_table(tmp_path: Path) -> None:
    numeric = (
        "model={kind: dcn, dim: 4, cross_layers: 1, cross_rank: 2, deep_units: [4]}",
        "features.age={kind: numeric}",
        "data={kind: csv, path: none.csv, extra_columns: [age]}",
    )
    assert examine(load_config(GOOD, numeric)) == []
