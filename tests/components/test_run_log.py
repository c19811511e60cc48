"""What MLflow holds of real trainings: true statuses, one row a step, true rates and iterations."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import at_batch
import pytest
from own_store import rows_in

from rowstep.components.job import DivergedError, TrainingInterruptedError, TrainJob, TrainResult
from rowstep.components.train import train

Rows = list[tuple[Any, ...]]
NUM_STEPS = 44  # 22 batches of 256 in each of two epochs
BEGIN_SECONDS = 3.0


@pytest.fixture
def database(tmp_path: Path, mlflow_template_db: Path) -> Path:
    return Path(shutil.copy(mlflow_template_db, tmp_path / "mlflow.db"))


@pytest.fixture
def job(tiny_home: Any, tmp_path: Path, database: Path) -> Callable[..., TrainJob]:
    """Return a maker of jobs that report to the test's own store."""
    at_batch.actions.clear()
    settings = [
        "train.callbacks=[at_batch.AtBatch]",
        "train.batch_size=256",
        "tracking.every_steps=5",
        "tracking.histograms=false",
    ]
    store = {
        "tracking_uri": f"sqlite:///{database}",
        "tracking_artifacts": tmp_path / "artifacts",
    }

    def make(*overrides: str, folder: str = "a", **changes: Any) -> TrainJob:
        job: TrainJob = tiny_home.job(
            tmp_path / folder, [*settings, *overrides], **store, **changes
        )
        return job

    return make


@pytest.fixture
def ask(database: Path) -> Callable[[str], Rows]:
    """Return a function that asks the store itself, not through MLflow's eyes."""

    def answer(query: str) -> Rows:
        return rows_in(database, query)

    return answer


def interrupted(job: TrainJob, batch: int) -> None:
    at_batch.actions[batch] = at_batch.interrupt
    with pytest.raises(TrainingInterruptedError):
        train(job)
    at_batch.actions.clear()


def rows_of(ask: Callable[[str], Rows], result: TrainResult, key: str) -> dict[int, float]:
    query = f"select step, value from metrics where run_uuid = '{result.mlflow_run_id}'"
    return dict(ask(f"{query} and key = '{key}'"))


def test_a_stopped_training_is_killed_until_it_has_gone_on_to_the_end(
    job: Callable[..., TrainJob], ask: Callable[[str], Rows]
) -> None:
    for attempt, batch in enumerate((13, 8)):
        interrupted(job(), batch)
        assert ask("select status from runs") == [("KILLED",)]
        counts = ask("select value from tags where key = 'resume.count'")
        assert counts == ([(str(attempt),)] if attempt else [])
    result = train(job())
    assert ask("select run_uuid, status from runs") == [(result.mlflow_run_id, "FINISHED")]
    assert ask("select value from tags where key = 'resume.count'") == [("2",)]
    froms = ask("select value from tags where key like 'resume.%.from_step' order by key")
    assert froms == [("13",), ("21",)]


def test_a_stopped_training_has_the_rows_of_one_that_was_not(
    job: Callable[..., TrainJob], ask: Callable[[str], Rows]
) -> None:
    interrupted(job(), 13)
    resumed, whole = train(job()), train(job(folder="b", from_scratch=True))
    assert resumed.mlflow_run_id != whole.mlflow_run_id
    twice = "select run_uuid, key, step from metrics group by 1, 2, 3 having count(*) > 1"
    assert ask(twice) == []

    def shown(result: TrainResult) -> Rows:
        return ask(
            f"select key, step, value from metrics where run_uuid = '{result.mlflow_run_id}' "
            "and key != 'batch/examples_per_second' order by key, step"
        )

    assert shown(resumed) == shown(whole)
    assert {key for key, *_ in shown(whole)} >= {"batch/loss", "opt/slot_v/rms", "epoch/val_rmse"}


def test_a_training_that_diverges_has_failed(
    job: Callable[..., TrainJob], ask: Callable[[str], Rows]
) -> None:
    with pytest.raises(DivergedError):
        train(job("optimizer.learning_rate=1e30"))
    assert ask("select status from runs") == [("FAILED",)]


def test_the_speed_after_a_stop_is_that_of_this_process(
    job: Callable[..., TrainJob], ask: Callable[[str], Rows]
) -> None:
    interrupted(job(), 14)
    at_batch.actions[1] = lambda: time.sleep(BEGIN_SECONDS)
    speeds = rows_of(ask, train(job()), "batch/examples_per_second")
    # One batch of 256 since the start, and not the five of the window.
    assert speeds[15] <= 256 / BEGIN_SECONDS


def test_a_warm_start_shows_the_iterations_of_all_its_trainings(
    job: Callable[..., TrainJob], ask: Callable[[str], Rows], tmp_path: Path
) -> None:
    base = tmp_path / "artifact"
    train(job(publish_dir=base))
    warm = train(job("train.warm_start=true", "train.seed=9", folder="b", base_checkpoint=base))
    assert warm.started_from.startswith("warm start")
    iterations = rows_of(ask, warm, "opt/iterations")
    assert iterations == {step: NUM_STEPS + step for step in range(5, NUM_STEPS + 1, 5)}
