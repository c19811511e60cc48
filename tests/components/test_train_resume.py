"""What a training goes on with, beyond weights: callbacks, metrics, other code, more epochs."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

from rowstep.components import progress
from rowstep.components.checkpoints import (
    CheckpointError,
    CheckpointStore,
    SavedState,
    open_checkpoint,
)
from rowstep.components.job import TrainingInterruptedError, TrainJob, TrainResult
from rowstep.components.train import train

# At which batch of this process it is asked to stop, if at any.
_stop_at: list[int] = []


class Stop(keras.callbacks.Callback):
    """Send this process a SIGTERM after some batches."""

    seen = 0

    def on_train_begin(self, logs: Any = None) -> None:
        Stop.seen = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        Stop.seen += 1
        if Stop.seen in _stop_at:
            os.kill(os.getpid(), signal.SIGTERM)


def plateau() -> keras.callbacks.Callback:
    return keras.callbacks.ReduceLROnPlateau(
        monitor="val_rmse", mode="min", factor=0.5, patience=1, min_delta=9
    )


def early() -> keras.callbacks.Callback:
    return keras.callbacks.EarlyStopping(
        monitor="val_rmse", mode="min", min_delta=9, patience=2, restore_best_weights=True
    )


def halving() -> keras.callbacks.Callback:
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)


@pytest.fixture
def job(tiny_home: Any, tmp_path: Path) -> Callable[..., TrainJob]:
    """Return a maker of jobs on the tiny pipeline's transformed examples."""
    _stop_at.clear()

    def make(
        *overrides: str, callbacks: str = "Stop", folder: str = "a", **changes: Any
    ) -> TrainJob:
        named = ",".join(f"{__name__}.{name}" for name in callbacks.split())
        settings = [f"train.callbacks=[{named}]", "tracking.enabled=false", "train.batch_size=256"]
        return tiny_home.job(tmp_path / folder, [*settings, *overrides], **changes)

    return make


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    emit = progress.emit

    def listen(kind: str, **values: Any) -> None:
        if kind == "notice":
            told.append(values["text"])
        emit(kind, **values)

    monkeypatch.setattr(progress, "emit", listen)
    return told


def in_parts(job: TrainJob, *stops: int) -> TrainResult:
    """Train, stopped by a SIGTERM after each of the given numbers of batches."""
    for stop in stops:
        _stop_at[:] = [stop]
        with pytest.raises(TrainingInterruptedError):
            train(job)
        _stop_at.clear()
    return train(job)


def assert_same_bits(left: TrainResult, right: TrainResult) -> None:
    def arrays(saved: SavedState) -> dict[str, bytes]:
        return {f"{g}:{n}": a.tobytes() for g in saved.groups for n, a in saved.arrays(g)}

    one, other = open_checkpoint(left.checkpoint), open_checkpoint(right.checkpoint)
    assert arrays(one) == arrays(other)
    assert one.meta["history"] == other.meta["history"]
    assert one.meta["callbacks"] == other.meta["callbacks"]
    assert left.metrics == right.metrics


# One epoch is 22 batches.
@pytest.mark.parametrize("stops", [(5,), (22,), (30, 9)], ids=["mid", "epoch end", "twice"])
def test_rates_stops_and_metrics_go_on_as_if_nothing_had_happened(
    job: Callable[..., TrainJob], stops: tuple[int, ...]
) -> None:
    settings = ["train.epochs=6", "train.metrics=[RootMeanSquaredError, AUC]"]
    callbacks = "Stop plateau early halving"
    whole = train(job(*settings, callbacks=callbacks, folder="whole"))
    parts = in_parts(job(*settings, callbacks=callbacks, folder="parts"), *stops)
    assert len(open_checkpoint(whole.checkpoint).meta["history"]) == 3  # it did stop early
    assert {"root_mean_squared_error", "auc", "val_rmse"} <= set(whole.metrics)
    assert_same_bits(whole, parts)


def test_unfinished_training_of_other_code_goes_on_and_says_so(
    job: Callable[..., TrainJob], monkeypatch: pytest.MonkeyPatch, notices: list[str]
) -> None:
    whole = train(job(folder="whole"))
    _stop_at[:] = [10]
    with pytest.raises(TrainingInterruptedError):
        train(job())
    _stop_at.clear()
    monkeypatch.setattr("rowstep.components.identity.code_fingerprint", lambda: "0.9+newer")
    resumed = train(job())
    assert resumed.started_from == "checkpoint at step 10"
    assert any("goes on with an earlier training: code:" in text for text in notices)
    assert resumed.run_key != whole.run_key
    assert resumed.metrics == whole.metrics
    # A finished one of other code is no reason not to train.
    monkeypatch.setattr("rowstep.components.identity.code_fingerprint", lambda: "1.0+newest")
    assert train(job()).started_from == "scratch"


def test_more_epochs_go_on_to_the_bits_of_one_long_training(
    job: Callable[..., TrainJob],
) -> None:
    long = train(job("train.epochs=3", folder="long"))
    train(job("train.epochs=2"))
    longer = train(job("train.epochs=3"))
    assert longer.started_from == "checkpoint at step 44"
    assert longer.num_steps_run == 22
    assert_same_bits(long, longer)
    assert train(job("train.epochs=2")).started_from == "finished checkpoint"


def test_a_schedule_over_the_whole_length_is_not_stretched(job: Callable[..., TrainJob]) -> None:
    cosine = "optimizer.schedule={kind: cosine}"
    train(job(cosine, "train.epochs=1"))
    assert train(job(cosine, "train.epochs=2")).started_from == "scratch"


def test_only_so_many_trainings_keep_their_checkpoints(job: Callable[..., TrainJob]) -> None:
    results = [
        train(job("train.epochs=1", "checkpoint.keep_trainings=2", f"train.seed={seed}"))
        for seed in (1, 2, 3)
    ]
    left = [Path(result.checkpoint).exists() for result in results]
    assert left == [False, True, True]


def test_when_all_checkpoints_are_damaged_the_training_refuses_to_start_over(
    job: Callable[..., TrainJob],
) -> None:
    _stop_at[:] = [10]
    with pytest.raises(TrainingInterruptedError):
        train(job())
    _stop_at.clear()
    [victim] = job().state_dir.glob("*/checkpoints/step-*/array-00001.npy")
    victim.write_bytes(b"")
    for _ in range(2):  # the second time it has been moved aside already
        with pytest.raises(CheckpointError, match=r"(step|corrupt)-000000000010"):
            train(job())


def test_best_checkpoints_are_kept_with_their_metric(job: Callable[..., TrainJob]) -> None:
    settings = ["train.epochs=6", "checkpoint.keep_best={metric: val_rmse}"]
    result = train(job(*settings, "optimizer.learning_rate=0.2", "checkpoint.keep_last=2"))
    saved = open_checkpoint(result.checkpoint)
    errors = [epoch["val_rmse"] for epoch in saved.meta["history"]]
    best = 22 * (errors.index(min(errors)) + 1)
    entries = CheckpointStore(Path(result.checkpoint).parent).entries()
    assert best in [entry.step for entry in entries]
    assert {entry.step: entry.metrics.get("val_rmse") for entry in entries}[best] == min(errors)


def test_checkpoints_on_an_object_store_are_those_of_a_disk(
    job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    whole = train(job(folder="whole"))
    root = f"memory://bucket-{uuid.uuid4().hex}"
    elsewhere = job(f"checkpoint.root={root}", folder="b", publish_dir=tmp_path / "artifact")
    resumed = in_parts(elsewhere, 10, 20)
    assert resumed.checkpoint.startswith(root)
    assert_same_bits(whole, resumed)
    [published] = (tmp_path / "artifact").iterdir()
    assert open_checkpoint(published).step == whole.step


def test_a_warm_start_goes_on_with_the_optimizer_and_begins_the_schedule_anew(
    job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    cosine = "optimizer.schedule={kind: cosine}"
    base = tmp_path / "artifact"
    train(job(cosine, publish_dir=base))
    settings = [cosine, "train.seed=9", "train.warm_start=true"]
    warm = in_parts(job(*settings, folder="b", base_checkpoint=base), 7)
    whole = train(job(*settings, folder="c", base_checkpoint=base))
    saved = open_checkpoint(warm.checkpoint)
    iterations = {n: a for n, a in saved.arrays("optimizer") if n == "iterations"}
    assert (warm.step, int(iterations["iterations"])) == (44, 88)
    assert saved.meta["first_iteration"] == 44
    assert_same_bits(whole, warm)
