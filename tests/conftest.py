"""What every test can count on: quiet libraries, fixed seeds, no accelerator unless asked for."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rowstep.components.job import TrainJob

# Before any test module imports TensorFlow or MLflow.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# What tests share, also by the dotted names of configs.
sys.path.insert(0, str(Path(__file__).parent / "support"))


def pytest_configure(config: pytest.Config) -> None:
    """Hide the accelerator, so that results do not depend on the machine; `-m gpu` shows it."""
    if config.getoption("-m") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs an accelerator where TensorFlow sees none."""
    if item.get_closest_marker("gpu") is not None:
        import tensorflow as tf

        if not tf.config.list_physical_devices("GPU"):
            pytest.skip("needs an accelerator, and TensorFlow sees none")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seed the random states that are loaded; a test that needs none of them pays nothing."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(0)  # Python, NumPy and TensorFlow


@pytest.fixture(scope="session")
def mlflow_template_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an MLflow SQLite file with its tables made; copy it, do not write into it.

    Making the tables takes MLflow seconds, copying the file takes none.
    """
    mlflow = pytest.importorskip("mlflow")
    path = tmp_path_factory.mktemp("mlflow") / "template.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    with sqlite3.connect(path) as database:  # whatever lies in a side file goes into the file
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    return path


SUPPORT = Path(__file__).parent / "support"


class TinyHome:
    """A workspace in which `tests/support/tiny.yaml` ran once, and the means to run in it again."""

    first_run: subprocess.CompletedProcess[str]

    def __init__(self, home: Path) -> None:
        self.home = home
        self.config_file = SUPPORT / "tiny.yaml"

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of `rowstep` with this Python."""
        return [sys.executable, "-m", "rowstep.pipeline", *arguments]

    def environment(self) -> dict[str, str]:
        """Return an environment in which this home is the default one."""
        path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        return {**os.environ, "ROWSTEP_HOME": str(self.home), "PYTHONPATH": path}

    def rowstep(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a `rowstep` command to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment(),
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def outputs(self, node: str, key: str) -> list[Path]:
        """Return the folders of an output of a node, oldest execution first."""
        folders = (self.home / "tiny" / "artifacts" / node / key).iterdir()
        return sorted(folders, key=lambda folder: int(folder.name))

    def job(self, place: Path, settings: Sequence[str], **changes: Any) -> TrainJob:
        """Return a job on the transformed examples, with its folders in `place`."""
        from rowstep.components.data import split_files
        from rowstep.components.job import TrainJob
        from rowstep.configs import load_config

        examples = self.outputs("Transform", "transformed_examples")[0]
        values: dict[str, Any] = {
            "config": load_config(self.config_file, settings),
            "train_files": tuple(split_files(str(examples / "Split-train"))),
            "eval_files": tuple(split_files(str(examples / "Split-eval"))),
            "transform_graph": str(self.outputs("Transform", "transform_graph")[0]),
            "serving_dir": str(place / "serving"),
            "state_dir": place / "state",
        }
        return TrainJob(**{**values, **changes})


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory, mlflow_template_db: Path) -> TinyHome:
    """Run the whole pipeline once, by the command, and share what it left.

    While you work on the tests of `components`, $ROWSTEP_TINY_HOME may name a home that such a run
    left; the tests of `pipeline` want one of their own.
    """
    if kept := os.environ.get("ROWSTEP_TINY_HOME"):
        return TinyHome(Path(kept))
    home = TinyHome(tmp_path_factory.mktemp("home"))
    shutil.copy(mlflow_template_db, home.home / "mlflow.db")
    home.first_run = home.rowstep("run", str(home.config_file))
    assert home.first_run.returncode == 0, home.first_run.stdout + home.first_run.stderr
    return home
