"""The training loop on transformed examples of the tiny pipeline: exact resume above all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import at_batch
import numpy as np
import pytest

from rowstep.components.checkpoints import CheckpointStore, SavedState, open_checkpoint
from rowstep.components.job import DivergedError, TrainingInterruptedError, TrainJob, TrainResult
from rowstep.components.train import train
from rowstep.optimizers import StateMismatchError

DCN_LAMB = [
    "model={kind: dcn, dim: 4, cross_layers: 1, deep_units: [8], dropout: 0.3}",
    "optimizer={kind: lamb, learning_rate: 0.01, weight_decay_rate: 0.01}",
    "optimizer.schedule={kind: cosine}",
]
KEEP_ALL = ["checkpoint.every_steps=null", "checkpoint.every_seconds=null"]
# In the background the next one would wait for as many steps as the writing takes.
EVERY_30 = ["checkpoint.every_steps=30", "checkpoint.background=false"]


@pytest.fixture
def job(tiny_home: Any, tmp_path: Path) -> Callable[..., TrainJob]:
    """Return a maker of jobs on the tiny pipeline's transformed examples."""
    at_batch.actions.clear()
    settings = ["train.callbacks=[at_batch.AtBatch]", "tracking.enabled=false", *KEEP_ALL]

    def make(*overrides: str, folder: str = "a", **changes: Any) -> TrainJob:
        return tiny_home.job(tmp_path / folder, [*settings, *overrides], **changes)

    return make


def _saved(result: TrainResult) -> SavedState:
    return open_checkpoint(result.checkpoint)


def _arrays(saved: SavedState) -> dict[str, np.ndarray]:
    return {f"{g}:{name}": value for g in saved.groups for name, value in saved.arrays(g)}


def _assert_same_bits(left: TrainResult, right: TrainResult) -> None:
    a, b = _arrays(_saved(left)), _arrays(_saved(right))
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name
    assert left.metrics == right.metrics


def _train_interrupted(job: TrainJob, *steps: int) -> TrainResult:
    """Train, sending this process a SIGTERM after each of the given numbers of batches."""
    for step in steps:
        at_batch.actions[step] = at_batch.interrupt
        with pytest.raises(TrainingInterruptedError):
            train(job)
        at_batch.actions.clear()
    return train(job)


def test_iterations_count_every_batch_once(job: Callable[..., TrainJob]) -> None:
    # 5,400 training examples in batches of 64 are 85 batches; a phantom step at the end of an
    # epoch would make it more than twice that.
    result = train(job())
    assert result.step == result.num_steps_run == 2 * 85


@pytest.mark.parametrize("overrides", [[], DCN_LAMB], ids=["mf-lazy_adam", "dcn-lamb-dropout"])
@pytest.mark.parametrize("steps", [(37,), (85,), (20, 90)], ids=["mid", "epoch end", "twice"])
def test_resumed_training_equals_an_uninterrupted_one_bit_for_bit(
    job: Callable[..., TrainJob], overrides: list[str], steps: tuple[int, ...]
) -> None:
    whole = train(job(*overrides, folder="whole"))
    resumed = _train_interrupted(job(*overrides, folder="parts"), *steps)
    assert resumed.started_from == f"checkpoint at step {sum(steps)}"
    _assert_same_bits(whole, resumed)


def test_another_seed_gives_other_weights(job: Callable[..., TrainJob]) -> None:
    # The comparison above must be able to fail.
    one, other = train(job(folder="a")), train(job("train.seed=8", folder="b"))
    with pytest.raises(AssertionError):
        _assert_same_bits(one, other)


def test_sigterm_commits_a_checkpoint_of_that_very_step(job: Callable[..., TrainJob]) -> None:
    at_batch.actions[11] = at_batch.interrupt
    with pytest.raises(TrainingInterruptedError, match="SIGTERM at step 11"):
        train(job())
    [folder] = job().state_dir.iterdir()
    assert CheckpointStore(folder / "checkpoints").steps() == [11]


def test_repeating_a_finished_training_trains_nothing_and_exports_again(
    job: Callable[..., TrainJob],
) -> None:
    first = train(job())
    again = train(job(serving_dir=str(job().state_dir.parent / "second")))
    assert again.num_steps_run == 0
    assert again.started_from == "finished checkpoint"
    assert again.metrics == first.metrics
    assert (job().state_dir.parent / "second" / "saved_model.pb").exists()


def test_checkpoints_come_every_so_many_steps_and_only_the_last_are_kept(
    job: Callable[..., TrainJob],
) -> None:
    result = train(job(*EVERY_30, "checkpoint.keep_last=2"))
    assert CheckpointStore(Path(result.checkpoint).parent).steps() == [150, 170]


def test_damaged_checkpoint_falls_back_to_the_one_before(job: Callable[..., TrainJob]) -> None:
    whole = train(job(folder="whole"))
    broken = job(*EVERY_30, folder="parts")
    at_batch.actions[70] = at_batch.interrupt
    with pytest.raises(TrainingInterruptedError):
        train(broken)
    at_batch.actions.clear()
    [newest] = broken.state_dir.glob("*/checkpoints/step-000000000070")
    victim = sorted(newest.glob("*.npy"))[0]
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    resumed = train(broken)
    assert resumed.started_from == "checkpoint at step 60"
    _assert_same_bits(whole, resumed)


def test_published_checkpoint_of_the_same_training_is_as_good_as_our_own(
    job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    train(job(publish_dir=tmp_path / "artifact"))
    elsewhere = job(folder="b", base_checkpoint=tmp_path / "artifact")
    assert train(elsewhere).num_steps_run == 0


def test_changed_settings_start_from_scratch_or_warm_as_the_config_says(
    job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    first = train(job(publish_dir=tmp_path / "artifact"))
    base = tmp_path / "artifact"
    cold = train(job("train.seed=9", folder="b", base_checkpoint=base))
    assert cold.started_from == "scratch"
    settings = ("train.seed=9", "train.warm_start=true")
    warm = train(job(*settings, folder="c", base_checkpoint=base))
    assert warm.started_from == f"warm start from the weights and optimizer of step {first.step}"
    assert warm.step == warm.num_steps_run == cold.step
    assert warm.metrics["val_rmse"] < cold.metrics["val_rmse"]


def test_warm_start_refuses_a_model_of_another_shape_by_name(
    job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    train(job(publish_dir=tmp_path / "artifact"))
    other = job(
        "model.dim=5", "train.warm_start=true", folder="b", base_checkpoint=tmp_path / "artifact"
    )
    with pytest.raises(StateMismatchError, match="user_id_factors"):
        train(other)


def test_warm_start_goes_on_learning_under_a_falling_rate(
    job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    cosine = "optimizer.schedule={kind: cosine}"
    first = train(job(cosine, publish_dir=tmp_path / "artifact"))
    settings = (cosine, "train.seed=9", "train.warm_start=true")
    warm = train(job(*settings, folder="b", base_checkpoint=tmp_path / "artifact"))
    before, after = (dict(_saved(r).arrays("model")) for r in (first, warm))
    assert all((before[name] != after[name]).any() for name in before)


def test_signal_during_the_export_ends_in_an_interruption_and_loses_nothing(
    job: Callable[..., TrainJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    def export_and_stop(*arguments: Any) -> None:
        at_batch.interrupt()

    with monkeypatch.context() as patch:
        patch.setattr("rowstep.components.train.export_model", export_and_stop)
        with pytest.raises(TrainingInterruptedError):
            train(job())
    assert train(job()).num_steps_run == 0


def test_second_sigterm_while_a_checkpoint_is_written_is_ignored(
    job: Callable[..., TrainJob],
) -> None:
    def twice() -> None:
        at_batch.interrupt()
        at_batch.interrupt()

    at_batch.actions[11] = twice
    with pytest.raises(TrainingInterruptedError):
        train(job())


def test_diverged_training_stops_with_its_step_and_is_not_saved(
    job: Callable[..., TrainJob],
) -> None:
    with pytest.raises(DivergedError, match=r"must stay (a finite number|finite numbers)\. Got"):
        train(job("optimizer.learning_rate=1e30", "checkpoint.every_steps=30"))
    [folder] = job().state_dir.iterdir()
    assert CheckpointStore(folder / "checkpoints").steps() == []


def test_failing_callback_ends_the_training_and_keeps_its_checkpoints(
    job: Callable[..., TrainJob],
) -> None:
    def fail() -> None:
        raise ArithmeticError("made to fail")

    at_batch.actions[40] = fail
    with pytest.raises(ArithmeticError):
        train(job(*EVERY_30))
    at_batch.actions.clear()
    assert train(job(*EVERY_30)).started_from == "checkpoint at step 30"


def test_training_on_fewer_rows_is_another_training(job: Callable[..., TrainJob]) -> None:
    first = train(job())
    swapped = job(train_files=job().eval_files)
    assert train(swapped).run_key != first.run_key
