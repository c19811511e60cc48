"""One line logs any Keras training: the same numbers, the same bits, true statuses."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from rowstep import optimizers
from rowstep.components import MlflowLogger, TrackingError

mlflow = pytest.importorskip("mlflow")

NUM_BATCHES, BATCH_SIZE, ROWS = 20, 16, 40
IDS = np.random.default_rng(1).integers(0, ROWS, (NUM_BATCHES * BATCH_SIZE, 1)).astype("int32")
LABELS = np.random.default_rng(2).random((len(IDS), 1)).astype("float32")
STEP_KEYS = {
    "opt/global/grad_norm",
    "opt/global/param_norm",
    "opt/global/update_norm",
    "opt/global/update_ratio",
    "opt/global/nonfinite",
    "opt/sparse/touched_rows",
}


@pytest.fixture
def uri(tmp_path: Path, mlflow_template_db: Path) -> str:
    shutil.copy(mlflow_template_db, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROWSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def build(optimizer: Any, embedding: Any = optimizers.Embedding, **compiling: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    ids = keras.Input((1,), dtype="int32", name="ids")
    rows = keras.layers.Flatten()(embedding(ROWS, 4, name="items")(ids))
    model = keras.Model(ids, keras.layers.Dense(1, name="top")(rows), name="small")
    model.compile(optimizer, "mse", jit_compile=False, **compiling)
    return model


def fit(
    model: keras.Model,
    *callbacks: keras.callbacks.Callback,
    epochs: int = 2,
    labels: np.ndarray = LABELS,
) -> None:
    model.fit(
        IDS,
        labels,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def bits(model: keras.Model) -> list[bytes]:
    return [v.numpy().tobytes() for v in [*model.variables, *model.optimizer.variables]]


def history(uri: str, run_id: str | None, key: str) -> dict[int, float]:
    """Return the value of each step; a step with two rows fails."""
    rows = mlflow.MlflowClient(uri).get_metric_history(run_id, key)
    found = {row.step: row.value for row in rows}
    assert len(found) == len(rows)
    return found


def run_of(uri: str, logger: MlflowLogger) -> Any:
    assert logger.report is not None
    assert logger.report.num_unsent == 0
    return mlflow.MlflowClient(uri).get_run(logger.report.run_id)


class Losses(keras.callbacks.Callback):
    """Keep the loss of each batch, from a model whose loss has no running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.means.append(float((logs or {})["loss"]))

    def window(self, first: int, last: int) -> float:
        """Return the mean loss of steps first + 1 .. last; Keras' means begin with each epoch."""
        losses = []
        for step, mean in enumerate(self.means):
            number = step % NUM_BATCHES
            before = self.means[step - 1] * number if number else 0.0
            losses.append(mean * (number + 1) - before)
        return float(np.mean(losses[first:last]))


@pytest.mark.parametrize(
    ("optimizer", "embedding"),
    [
        (lambda: optimizers.LazyAdam(0.01), optimizers.Embedding),
        (lambda: keras.optimizers.Adam(0.01), keras.layers.Embedding),
        (
            lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=4),
            keras.layers.Embedding,
        ),
    ],
    ids=["LazyAdam", "Adam", "Adam-accumulating"],
)
def test_a_logged_fit_ends_in_the_bits_of_one_that_is_not(
    uri: str, optimizer: Any, embedding: Any
) -> None:
    plain, logged = build(optimizer(), embedding), build(optimizer(), embedding)
    fit(plain)
    logger = MlflowLogger(uri, "e", every_steps=5, histograms=False)
    fit(logged, logger)
    assert bits(logged) == bits(plain)
    assert run_of(uri, logger).info.status == "FINISHED"


def test_every_so_many_steps_have_one_row_of_each_statistic(uri: str) -> None:
    logger, losses = MlflowLogger(uri, "e", every_steps=8, scan_every_steps=16), Losses()
    fit(build(optimizers.LazyAdam(0.01)), losses, logger)
    run = run_of(uri, logger)
    assert run.data.metrics.keys() >= STEP_KEYS
    for key in STEP_KEYS | {"batch/loss", "opt/learning_rate"}:
        assert sorted(history(uri, run.info.run_id, key)) == [8, 16, 24, 32, 40]
    assert sorted(history(uri, run.info.run_id, "opt/slot_v/rms")) == [16, 32, 40]
    assert sorted(history(uri, run.info.run_id, "epoch/loss")) == [20, 40]
    shown = history(uri, run.info.run_id, "batch/loss")
    for step in (16, 24, 40):  # the epoch ends at 20
        assert shown[step] == pytest.approx(losses.window(step - 8, step), rel=1e-4)
    touched = history(uri, run.info.run_id, "opt/sparse/touched_rows")
    assert touched[8] == len(np.unique(IDS[7 * BATCH_SIZE : 8 * BATCH_SIZE]))


@pytest.mark.parametrize(
    ("share", "scans", "pictures"),
    [(0.0, [4, 60], {20, 60}), (1e9, [*range(4, 61, 4)], {20, 40, 60})],
)
def test_a_look_at_the_whole_state_waits_while_it_costs_too_much(
    uri: str, monkeypatch: pytest.MonkeyPatch, share: float, scans: list[int], pictures: set[int]
) -> None:
    monkeypatch.setattr("rowstep.components.optimizer_log._SCAN_EVERY_STEPS", 4)
    monkeypatch.setattr("rowstep.components.optimizer_log._SHARE", share)
    logger = MlflowLogger(uri, "e")
    fit(build(optimizers.LazyAdam(0.01)), logger, epochs=3)
    run = run_of(uri, logger)
    assert sorted(history(uri, run.info.run_id, "opt/slot_v/rms")) == scans
    images = mlflow.MlflowClient(uri).list_artifacts(run.info.run_id, "images")
    assert {int(re.findall(r"[+%]step[+%](\d+)", i.path)[0]) for i in images} == pictures


def test_the_run_says_how_the_optimizer_is_configured(uri: str) -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.02, 100)
    logger = MlflowLogger(uri, "e", params={"team": "ranking"}, tags={"why": "test"})
    fit(build(keras.optimizers.Adam(schedule), keras.layers.Embedding), logger, epochs=1)
    run = run_of(uri, logger)
    params = run.data.params
    assert (params["opt.class"], params["opt.sparse_mode"]) == ("Adam", "dense")
    assert (params["opt.learning_rate"], params["opt.schedule"]) == ("schedule", "CosineDecay")
    assert params["opt.schedule.initial_learning_rate"] == "0.02"
    assert params["model.n_embedding_rows"] == str(ROWS)
    assert (params["team"], run.data.tags["why"]) == ("ranking", "test")
    artifacts = {a.path for a in mlflow.MlflowClient(uri).list_artifacts(run.info.run_id)}
    assert {"optimizer_config.json", "optimizer_summary.md", "optimizer", "images"} <= artifacts


def test_the_same_key_goes_on_with_the_run(uri: str) -> None:
    model = build(optimizers.LazyAdam(0.01))
    for _ in range(2):
        logger = MlflowLogger(uri, "e", every_steps=10, run_key="mine", histograms=False)
        fit(model, logger, epochs=1)
    run = run_of(uri, logger)
    assert sorted(history(uri, run.info.run_id, "batch/loss")) == [10, 20, 30, 40]
    assert run.data.tags["resume.count"] == "1"


@pytest.mark.parametrize("maker", [optimizers.LazyAdam, keras.optimizers.Adam])
def test_where_gradients_accumulate_a_step_is_an_update(uri: str, maker: Any) -> None:
    logger = MlflowLogger(uri, "e", every_steps=4, scan_every_steps=8, histograms=False)
    fit(build(maker(0.01, gradient_accumulation_steps=2)), logger)
    run = run_of(uri, logger)
    for key in ("batch/loss", "opt/iterations", "opt/global/update_norm"):
        shown = history(uri, run.info.run_id, key)
        assert sorted(shown) == [4, 8, 12, 16, 20]  # of 40 batches
        assert min(shown.values()) > 0
    assert sorted(history(uri, run.info.run_id, "opt/slot_v/rms")) == [8, 16, 20]


def test_updates_that_a_loss_scale_skips_cost_a_later_fit_no_report(uri: str) -> None:
    inner = optimizers.LazyAdam(0.01)
    model = build(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**127))
    runs = []
    for _ in range(2):
        logger = MlflowLogger(uri, "e", every_steps=2, run_key="mine", histograms=False)
        fit(model, logger, epochs=1, labels=8 * LABELS)
        runs.append(run_of(uri, logger))
    num_updates = int(inner.iterations.numpy())
    assert 20 < num_updates < 40  # some were skipped
    for key in ("batch/loss", "opt/iterations", "opt/global/grad_norm"):
        shown = history(uri, runs[0].info.run_id, key)
        assert sorted(shown) == list(range(2, num_updates + 1, 2))
    assert runs[0].info.run_id == runs[1].info.run_id
    assert runs[0].data.params["opt.class"] == "LazyAdam"
    assert runs[0].data.params["opt.loss_scale"] == "dynamic"


def test_a_metric_of_several_numbers_has_one_row_of_each(uri: str) -> None:
    logger, model = MlflowLogger(uri, "e", histograms=False), build(optimizers.LazyAdam(0.01))
    several = keras.metrics.MeanMetricWrapper(lambda true, _: true, name="several")
    several.result = lambda: keras.ops.convert_to_tensor([1.5, 2.5])
    model.compile(model.optimizer, "mse", metrics=[several], jit_compile=False)
    fit(model, logger, epochs=1)
    metrics = run_of(uri, logger).data.metrics
    assert (metrics["epoch/several.0"], metrics["epoch/several.1"]) == (1.5, 2.5)


def test_a_fit_after_an_interrupted_one_goes_on_with_the_run(uri: str) -> None:
    class Trouble(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
            raise KeyboardInterrupt

    problems: list[str] = []
    logger = MlflowLogger(uri, "e", every_steps=10, histograms=False, on_problem=problems.append)
    model = build(optimizers.LazyAdam(0.01))
    with pytest.raises(KeyboardInterrupt):
        fit(model, logger, Trouble())
    fit(model, logger, epochs=1)
    run = run_of(uri, logger)
    assert run.info.status == "FINISHED"
    assert sorted(history(uri, run.info.run_id, "opt/global/grad_norm")) == [10, 20, 30, 40]
    assert not problems


def test_a_state_that_cannot_be_looked_at_ends_no_training(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("not a byte is left")

    monkeypatch.setattr("rowstep.components.optimizer_log.scan", no_memory)
    problems: list[str] = []
    logger = MlflowLogger(uri, "e", scan_every_steps=5, on_problem=problems.append)
    fit(build(optimizers.LazyAdam(0.01)), logger, epochs=1)
    assert run_of(uri, logger).info.status == "FINISHED"
    [problem] = problems
    assert "not a byte is left" in problem


def test_nothing_is_measured_after_the_fit(uri: str) -> None:
    model = build(optimizers.LazyAdam(0.01))
    logger = MlflowLogger(uri, "e", every_steps=5, histograms=False)
    fit(model, logger, epochs=1)
    assert sorted(history(uri, run_of(uri, logger).info.run_id, "opt/global/grad_norm"))[-1] == 20
    assert not {"apply", "apply_gradients"} & vars(model.optimizer).keys()
    assert model.train_function is None  # the next fit traces its step anew


def test_several_steps_an_execution_are_reported(uri: str) -> None:
    logger = MlflowLogger(uri, "e", every_steps=10, histograms=False)
    fit(build(optimizers.LazyAdam(0.01), steps_per_execution=4), logger, epochs=1)
    run = run_of(uri, logger)
    assert sorted(history(uri, run.info.run_id, "opt/global/grad_norm")) == [10, 20]


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_a_fit_that_does_not_end_well_says_so(
    uri: str, error: type[BaseException], status: str
) -> None:
    class Trouble(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
            raise error

    model = build(optimizers.LazyAdam(0.01))
    with pytest.raises(error), MlflowLogger(uri, "e", histograms=False) as logger:
        fit(model, logger, Trouble())
    assert run_of(uri, logger).info.status == status
    assert "apply" not in vars(model.optimizer)


def test_a_program_that_dies_of_an_exception_leaves_no_run_running(
    uri: str, tmp_path: Path
) -> None:
    program = f"""
    import keras, numpy as np
    from rowstep.components import MlflowLogger

    class Trouble(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise ValueError("no more")

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    logger = MlflowLogger({uri!r}, "e", histograms=False)
    model.fit(np.zeros((8, 2)), np.zeros((8, 1)), verbose=0, callbacks=[logger, Trouble()])
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no more" in done.stderr
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert [run.info.status for run in runs] == ["FAILED"]


def test_credentials_are_refused_before_anything_is_trained() -> None:
    with pytest.raises(TrackingError, match="must not hold credentials") as caught:
        MlflowLogger("http://me:hunter2@example.com")
    assert "hunter2" not in str(caught.value)


def test_reports_of_a_server_that_is_away_wait_where_sync_looks(home: Path) -> None:
    problems: list[str] = []
    logger = MlflowLogger(
        "http://127.0.0.1:9", "e", run_key="k", histograms=False, on_problem=problems.append
    )
    fit(build(optimizers.LazyAdam(0.01)), logger, epochs=1)
    assert logger.report is not None
    assert logger.report.num_unsent > 0
    assert [p.parent.name for p in home.glob("*/state/*/tracking")] == ["k"]
    assert "rowstep sync" in problems[-1]
