"""The variants of a comparison start from scratch, or from where they were themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import at_batch
import pytest

from rowstep.components.job import TrainingInterruptedError, TrainJob
from rowstep.components.progress import EVENTS_VARIABLE
from rowstep.components.train import train


@pytest.fixture
def job(tiny_home: Any, tmp_path: Path) -> Callable[..., TrainJob]:
    """Return a maker of jobs on the tiny pipeline's transformed examples; an epoch is 22 steps."""
    at_batch.actions.clear()
    settings = ["train.callbacks=[at_batch.AtBatch]", "tracking.enabled=false"]
    settings += ["train.batch_size=256"]

    def make(*overrides: str, folder: str = "a", **changes: Any) -> TrainJob:
        return tiny_home.job(tmp_path / folder, [*settings, *overrides], **changes)

    return make


def stop_after(job: TrainJob, num_batches: int) -> None:
    at_batch.actions[num_batches] = at_batch.interrupt
    with pytest.raises(TrainingInterruptedError):
        train(job)
    at_batch.actions.clear()


def test_a_variant_goes_on_with_no_ordinary_training_and_none_with_it(
    job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    base = tmp_path / "artifact"
    usual = train(job(publish_dir=base))
    variant = train(job(base_checkpoint=base, from_scratch=True))
    assert (variant.started_from, variant.num_steps_run) == ("scratch", 44)
    assert variant.run_key != usual.run_key
    assert variant.metrics == usual.metrics  # the same training all the same
    longer = train(job("train.epochs=3", base_checkpoint=base, from_scratch=True))
    assert (longer.started_from, longer.num_steps_run) == ("scratch", 66)
    alone = train(job("train.epochs=4", folder="b"))
    usual_again = train(job("train.epochs=4"))
    assert usual_again.started_from == "checkpoint at step 44"  # the usual one's, not the longer's
    assert usual_again.metrics == alone.metrics


def test_a_stopped_variant_goes_on_with_itself_and_with_nothing_else(
    job: Callable[..., TrainJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(job(folder="whole", from_scratch=True))
    stop_after(job(from_scratch=True), 10)
    other = train(job("train.epochs=1", from_scratch=True))
    assert other.started_from == "scratch"
    resumed = train(job(from_scratch=True))
    assert resumed.started_from == "checkpoint at step 10"
    assert (resumed.run_key, resumed.metrics) == (whole.run_key, whole.metrics)
    stop_after(job("train.seed=8", from_scratch=True), 10)
    monkeypatch.setattr("rowstep.components.identity.code_fingerprint", lambda: "0.9+newer")
    assert train(job("train.seed=8", from_scratch=True)).started_from == "scratch"


def test_a_training_says_which_it_is_when_it_begins_and_what_mlflow_calls_it_at_its_end(
    job: Callable[..., TrainJob],
    tmp_path: Path,
    mlflow_template_db: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "mlflow.db"
    store.write_bytes(mlflow_template_db.read_bytes())
    events = tmp_path / "events.jsonl"
    monkeypatch.setenv(EVENTS_VARIABLE, str(events))
    reports = {"tracking_uri": f"sqlite:///{store}", "tracking_artifacts": tmp_path / "artifacts"}
    tracked = job("tracking.enabled=true", **reports)
    stop_after(tracked, 10)
    said = [json.loads(line) for line in events.read_text().splitlines()]
    begin, end = [event for event in said if event["kind"] == "training"]
    kinds = [event["kind"] for event in said]
    assert kinds.index("training") < kinds.index("train_start")
    assert "mlflow_run_id" not in begin
    done = train(tracked)
    assert begin["run_key"] == end["run_key"] == done.run_key
    assert end["mlflow_run_id"] == done.mlflow_run_id is not None
