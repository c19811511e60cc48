"""The error that the shipped MovieLens 100K config promises, on the files if they are at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("ROWSTEP_ML100K", ROOT.parent / "shared" / "data" / "ml-100k"))


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="needs MovieLens 100K; set ROWSTEP_ML100K")
def test_factorisation_reaches_rmse_0_93_on_the_official_fold_u1(tmp_path: Path) -> None:
    arguments = ["run", str(ROOT / "configs" / "movielens_100k.yaml")]
    arguments += ["--set", f"data.path={DATA}"]
    done = subprocess.run(
        [sys.executable, "-m", "rowstep.pipeline", *arguments],
        env={**os.environ, "ROWSTEP_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [report] = tmp_path.glob("movielens_100k/artifacts/RecTrainer/model_run/*/training.json")
    assert json.loads(report.read_text())["metrics"]["val_rmse"] <= 0.93
