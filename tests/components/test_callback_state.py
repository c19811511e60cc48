"""Callbacks over a kill: a training resumed anywhere ends as the one that was never stopped."""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep import RowstepError
from rowstep.components.callback_state import CallbackStates
from rowstep.components.checkpoints import CheckpointError
from rowstep.configs.errors import ConfigError
from rowstep.optimizers.state import (
    load_named_state,
    load_named_variables,
    named_state,
    named_variables,
)

EPOCHS, BATCHES = 9, 2
Callbacks = list[keras.callbacks.Callback]
_RNG = np.random.default_rng(27)
_X = _RNG.normal(size=(BATCHES, 8, 3)).astype(np.float32)
_Y = _RNG.normal(size=(BATCHES, 8, 1)).astype(np.float32)
_X_HELD, _Y_HELD = _RNG.normal(size=(16, 3)), _RNG.normal(size=(16, 1))


class Training:
    """Drive callbacks as rowstep's loop does, over a model small enough to do it often."""

    def __init__(self, make: Callable[[], Callbacks]) -> None:
        keras.utils.set_random_seed(7)
        layers = [keras.Input((3,)), keras.layers.Dense(1, name="dense")]
        self.model = keras.Sequential(layers, name="model")
        optimizer = keras.optimizers.SGD(0.5, momentum=0.6)
        optimizer.build(self.model.trainable_variables)
        self.model.compile(optimizer=optimizer)
        self.callbacks = make()
        self.states = CallbackStates(self.callbacks)
        self.rates: list[float] = []
        self.epoch = self.batch = 0

    def snapshot(self) -> dict[str, Any]:
        return {
            "position": (self.epoch, self.batch, bool(self.model.stop_training), [*self.rates]),
            "model": named_variables(self.model.variables),
            "optimizer": named_state(self.model.optimizer),
            "arrays": {name: np.array(array) for name, array in self.states.arrays()},
            "meta": json.dumps(self.states.meta(), allow_nan=False, sort_keys=True),
        }

    def _settle(self, saved: dict[str, Any]) -> None:
        load_named_variables(self.model.variables, saved["model"])
        load_named_state(self.model.optimizer, saved["optimizer"])
        self.notices = self.states.load(json.loads(saved["meta"]), saved["arrays"])
        self.epoch, self.batch, self.model.stop_training, self.rates = saved["position"]
        self.rates = [*self.rates]

    def run(self, saved: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Yield a snapshot at every place where a checkpoint may be taken."""
        hooks = keras.callbacks.CallbackList([*self.callbacks], model=self.model)
        self.model.stop_training = False
        hooks.on_train_begin()
        if saved and saved["position"][1] == 0:
            self._settle(saved)
            saved = None
        while self.epoch < EPOCHS and not (self.model.stop_training and self.batch == 0):
            hooks.on_epoch_begin(saved["position"][0] if saved else self.epoch)
            if saved:
                self._settle(saved)
                saved = None
            while self.batch < BATCHES and not (self.model.stop_training and self.batch):
                hooks.on_train_batch_begin(self.batch)
                loss = self._step(self.batch)
                self.batch += 1
                hooks.on_train_batch_end(self.batch - 1, {"loss": loss})
                yield self.snapshot()
            scores = keras.ops.convert_to_numpy(self.model(_X_HELD))
            self.epoch, self.batch = self.epoch + 1, 0
            hooks.on_epoch_end(
                self.epoch - 1, {"val_loss": float(np.mean((scores - _Y_HELD) ** 2))}
            )
            self.rates.append(float(self.model.optimizer.learning_rate.numpy()))
            yield self.snapshot()
        hooks.on_train_end()

    def _step(self, batch: int) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(_X[batch]) - _Y[batch]))
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        self.model.optimizer.apply(gradients, variables)
        return loss

    def end(self) -> str:
        """Return all that must be equal at the end, as one text."""
        last = self.snapshot()
        arrays = [last[group] for group in ("model", "optimizer", "arrays")]
        texts = [{name: (a.tobytes().hex(), a.shape) for name, a in g.items()} for g in arrays]
        return repr((last["position"], texts, json.loads(last["meta"])["callbacks"]))


def run_whole(make: Callable[[], Callbacks]) -> tuple[Training, list[dict[str, Any]]]:
    training = Training(make)
    return training, list(training.run())


def resume(make: Callable[[], Callbacks], saved: dict[str, Any]) -> Training:
    training = Training(make)
    for _ in training.run(saved):
        pass
    return training


def stopping_early() -> Callbacks:
    return [
        keras.callbacks.EarlyStopping(
            "val_loss", min_delta=0.01, patience=4, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("val_loss", min_delta=0.01, patience=2, cooldown=1),
    ]


def stopping_early_without_weights() -> Callbacks:
    return [keras.callbacks.EarlyStopping("val_loss", patience=2, baseline=1.2)]


@pytest.mark.parametrize("make", [stopping_early, stopping_early_without_weights])
def test_a_training_that_stops_early_ends_the_same_from_wherever_it_is_resumed(make: Any):
    whole, saved = run_whole(make)
    assert whole.epoch < EPOCHS  # or nothing was stopped early
    for snapshot in saved:
        assert resume(make, snapshot).end() == whole.end()


def test_the_rate_is_reduced_and_the_best_weights_are_not_the_last():
    whole, saved = run_whole(stopping_early)
    assert len(set(whole.rates)) > 2
    best = whole.callbacks[0].best_epoch
    assert 0 < best < whole.epoch - 2
    assert '"keras.ops:less"' in saved[-1]["meta"]  # not by a path that is private to Keras
    at_best = saved[(best + 1) * (BATCHES + 1) - 1]
    np.testing.assert_array_equal(
        whole.model.get_weights()[0], at_best["model"]["model/dense/kernel"]
    )


CHANGED = [
    *(("0.EarlyStopping", name) for name in ("wait", "best", "best_epoch", "best_weights")),
    *(("0.EarlyStopping", name) for name in ("stopped_epoch", "monitor_op", "min_delta")),
    *(("1.ReduceLROnPlateau", name) for name in ("wait", "best", "cooldown_counter")),
    *(("1.ReduceLROnPlateau", name) for name in ("monitor_op", "min_delta")),
]


def test_each_attribute_that_a_training_changes_is_needed():
    whole, saved = run_whole(stopping_early)
    for name, attribute in CHANGED:
        ends = (resume(stopping_early, without(s, name, attribute)).end() for s in saved[::-1])
        assert any(end != whole.end() for end in ends), attribute


def test_no_other_attribute_of_these_callbacks_changes():
    _, saved = run_whole(stopping_early)
    built = Training(stopping_early).states.meta()["callbacks"]
    changed = set()
    for snapshot in saved:
        for before, after in zip(built, json.loads(snapshot["meta"])["callbacks"], strict=True):
            old, new = dict(before["attributes"]), dict(after["attributes"])
            changed |= {
                (before["name"], name) for name in {*old, *new} if old.get(name) != new.get(name)
            }
    assert changed == set(CHANGED)


def without(saved: dict[str, Any], name: str, attribute: str) -> dict[str, Any]:
    """Return a snapshot as if that attribute had been forgotten."""
    meta = json.loads(saved["meta"])
    entry = next(e for e in meta["callbacks"] if e["name"] == name)
    entry["attributes"] = [pair for pair in entry["attributes"] if pair[0] != attribute]
    entry["stays"].append(attribute)
    return {**saved, "meta": json.dumps(meta)}


def halve(epoch: int, rate: float) -> float:
    return rate * 0.5 if epoch % 2 else rate


def keeping_books(folder: Path, *, append: bool) -> Callable[[], Callbacks]:
    seen: list[int] = []
    return lambda: [
        keras.callbacks.LearningRateScheduler(halve),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch)),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.History(),
        keras.callbacks.ModelCheckpoint(
            str(folder / "best.weights.h5"),
            monitor="val_loss",
            mode="min",
            save_best_only=True,
            save_weights_only=True,
        ),
        keras.callbacks.ModelCheckpoint(
            str(folder / "{epoch}-{batch}.weights.h5"), save_weights_only=True, save_freq=3
        ),
        keras.callbacks.CSVLogger(str(folder / "log.csv"), append=append),
    ]


@pytest.mark.parametrize("append", [True, False])
def test_callbacks_that_keep_books_go_on_where_they_were(tmp_path: Path, append: bool):
    (tmp_path / "log.csv").write_text("epoch,val_loss\r\n0,0.5\r\n" if append else "")
    make = keeping_books(tmp_path, append=append)
    whole, saved = run_whole(make)
    rows = (tmp_path / "log.csv").read_bytes()
    files = {path.name for path in tmp_path.iterdir()}
    assert rows.count(b"\n") == EPOCHS + (2 if append else 1)
    assert len(whole.callbacks[3].history["val_loss"]) == EPOCHS
    for position, snapshot in enumerate(saved[::7]):  # all three places of an epoch
        if position % 2 == 0:  # the killed training had gone on, half a row further
            (tmp_path / "log.csv").write_bytes(rows + b"9,0.12")
        for path in tmp_path.glob("*-*.h5"):
            path.unlink()
        assert resume(make, snapshot).end() == whole.end()
        assert (tmp_path / "log.csv").read_bytes() == rows
        assert {path.name for path in tmp_path.iterdir()} <= files


def test_rows_of_somebody_else_stay_in_the_file(tmp_path: Path):
    make = keeping_books(tmp_path, append=True)
    _, saved = run_whole(make)
    snapshot = saved[3 * (BATCHES + 1) - 1]
    text = snapshot["arrays"]["6.CSVLogger/csv_file"].tobytes() + b"0,0.7,0.1\r\n"
    (tmp_path / "log.csv").write_bytes(text)
    resume(make, snapshot)
    assert (tmp_path / "log.csv").read_bytes().startswith(text)


def test_a_finished_training_is_loaded_without_its_hooks_and_leaves_files_alone(tmp_path: Path):
    make = keeping_books(tmp_path, append=False)
    _, saved = run_whole(make)
    rows = (tmp_path / "log.csv").read_bytes()
    states = CallbackStates(make())
    states.load(json.loads(saved[-1]["meta"]), saved[-1]["arrays"])
    assert (tmp_path / "log.csv").read_bytes() == rows
    assert states.meta()["callbacks"] == json.loads(saved[-1]["meta"])["callbacks"]


def test_tensorboard_goes_on_counting_and_saves_in_mid_training(tmp_path: Path):
    def make() -> Callbacks:
        return [keras.callbacks.TensorBoard(str(tmp_path), update_freq="batch", write_graph=False)]

    whole, saved = run_whole(make)
    assert whole.states.gaps() == []
    resumed = resume(make, saved[4])
    assert resumed.callbacks[0]._global_train_batch == EPOCHS * BATCHES


class Everything(keras.callbacks.Callback):
    """Hold one of each kind of value."""

    def __init__(self) -> None:
        super().__init__()
        shared = [1]
        self.plain = [None, True, 3, -0.0, float("-inf"), "é", b"\x00", bytearray(b"a"), 10**30]
        self.tuples = {(1, "a"): ("x", {1, 2}), 2: frozenset({3}), "2": [(), {}]}
        self.numbers = [np.float32(0.1), np.int64(-3), np.float64("nan"), np.bool_(True)]
        self.last = collections.deque([1.5, np.zeros(2)], maxlen=3)
        self.counts = collections.Counter("abb")
        self.by_user: Any = collections.defaultdict(list, {"u/1": [np.arange(3)]})
        self.once, self.again = shared, shared
        self.around: list[Any] = [0]
        self.around.append(self.around)
        self.folder = Path("a") / "b"
        self.tensor = tf.constant([1.0, 2.0])
        self.weights = [keras.Variable([1.0, 2.0]), tf.Variable([[3]])]
        self.mean = keras.metrics.Mean()
        self.rng = np.random.default_rng(1)
        self.seed = keras.random.SeedGenerator(3)
        self.read_only = np.arange(4)
        self.doomed = 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.plain[3] += 1.0
        self.tuples[(1, "a")] = (float("nan"), {epoch})
        self.numbers[0] += np.float32(0.3)
        self.last.append(np.full(2, epoch))
        self.counts["c"] += 1
        self.by_user[f"u{epoch}"].append(np.float32(epoch))
        self.once.append(epoch)
        self.around[0] += 1
        self.weights[0].assign_add([1.0, 0.5])
        self.weights[1].assign_add([[2]])
        self.mean.update_state(float(epoch))
        self.drawn = self.rng.normal(), float(keras.random.uniform((), seed=self.seed))
        self.tensor = self.tensor * 1.5
        self.read_only = self.read_only + 1
        if epoch == 0:
            del self.doomed


def test_every_kind_of_plain_value_comes_back():
    whole, saved = run_whole(lambda: [Everything()])
    assert whole.states.gaps() == []
    for snapshot in saved[::7]:
        resumed = resume(lambda: [Everything()], snapshot)
        assert resumed.end() == whole.end()
        held = resumed.callbacks[0]
        assert held.once is held.again and held.around[1] is held.around
        assert type(held.by_user) is collections.defaultdict and held.by_user["new"] == []
        assert held.last.maxlen == 3 and isinstance(held.folder, Path)
        assert held.drawn == whole.callbacks[0].drawn
        assert not hasattr(held, "doomed")
        assert list(held.tuples) == [(1, "a"), 2, "2"]


class WithSlots(keras.callbacks.Callback):
    __slots__ = ("count",)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1


def test_what_lies_in_slots_travels():
    whole, saved = run_whole(lambda: [WithSlots()])
    resumed = resume(lambda: [WithSlots()], saved[5])
    assert resumed.callbacks[0].count == whole.callbacks[0].count == EPOCHS * BATCHES


class Asked(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1

    def get_state(self) -> Any:
        return {"steps": (self.steps, float("inf"))}

    def set_state(self, state: Any) -> None:
        self.steps, infinity = state["steps"]
        assert infinity == float("inf")


def test_a_callback_with_a_state_of_its_own_is_asked():
    whole, saved = run_whole(lambda: [Asked()])
    assert whole.states.gaps() == []
    resumed = resume(lambda: [Asked()], saved[7])
    assert resumed.callbacks[0].steps == whole.callbacks[0].steps == EPOCHS * BATCHES


def test_a_checkpoint_of_format_1_gives_callbacks_what_they_had_said():
    callbacks = [keras.callbacks.History(), Asked()]
    states = CallbackStates(callbacks)
    states.check({"1.Asked": {"steps": [5, float("inf")]}})
    states.load({"1.Asked": {"steps": [5, float("inf")]}}, {})
    assert callbacks[1].steps == 5
    with pytest.raises(CheckpointError, match=r"Got 1\.Asked\. The checkpoint has none"):
        states.check({})


class Locked(keras.callbacks.Callback):
    def __init__(self, lock: Any = None, function: Any = None) -> None:
        super().__init__()
        self.lock, self.function = lock, function


def test_a_gap_is_named_when_the_training_begins():
    training = Training(lambda: [Locked(threading.Lock(), lambda: 0)])
    assert training.states.gaps() == [
        "train.callbacks: 0.Locked.lock must be a plain value to be saved. Got a lock. A resumed "
        "training begins with a new one. Give Locked get_state() and set_state(state) to keep it."
    ]
    training.snapshot()  # and it may stay


def test_a_gap_takes_nothing_with_it_that_another_attribute_holds_too():
    shared = np.arange(3)

    def make() -> Callbacks:
        callback = Locked([shared, threading.Lock()])
        callback.later = shared
        return [callback]

    _, saved = run_whole(make)
    assert list(saved[0]["arrays"]) == ["0.Locked/later"]
    np.testing.assert_array_equal(resume(make, saved[0]).callbacks[0].later, shared)


@pytest.mark.parametrize(
    ("attribute", "value", "found"),
    [
        ("lock", threading.Lock(), "a lock"),
        ("lock", [1, {"a": threading.Lock()}], "a lock"),
        ("function", lambda: 1, "a function"),
        ("new", object(), "an? object"),
        ("lock", np.array([object()]), "a ndarray of object"),
        ("lock", np.ma.masked_array([1, 2]), "a MaskedArray of int64"),
    ],
)
def test_a_value_that_stops_being_plain_makes_the_save_fail(attribute: str, value: Any, found: str):
    training = Training(lambda: [Locked(None, lambda: 0)])
    assert training.states.gaps() == []
    setattr(training.callbacks[0], attribute, value)
    for save in (training.states.meta, training.states.arrays):
        with pytest.raises(
            CheckpointError, match=rf"0\.Locked\.{attribute} must hold .* Got {found} "
        ):
            save()


def test_the_model_and_other_callbacks_are_not_saved_twice():
    class Looking(keras.callbacks.Callback):
        def __init__(self, other: Any) -> None:
            super().__init__()
            self.other = other

        def on_train_begin(self, logs: Any = None) -> None:
            self.seen, self.kernel = self.model, self.model.layers[0].kernel
            self.iterations = self.model.optimizer.iterations

    def make() -> Callbacks:
        history = keras.callbacks.History()
        return [history, Looking(history)]

    whole, saved = run_whole(make)
    assert whole.states.gaps() == []
    assert saved[0]["arrays"] == {}
    resumed = resume(make, saved[3])
    assert resumed.callbacks[1].kernel is resumed.model.layers[0].kernel
    assert resumed.end() == whole.end()


def test_other_callbacks_are_refused_by_name():
    _, saved = run_whole(stopping_early)
    meta = json.loads(saved[3]["meta"])
    with pytest.raises(CheckpointError, match=r"Got 0\.ReduceLROnPlateau, 1\.EarlyStopping\. The "):
        CallbackStates(stopping_early()[::-1]).check(meta)
    with pytest.raises(CheckpointError, match=r"Got 0\.EarlyStopping\. The checkpoint has 0\.E"):
        CallbackStates(stopping_early()[:1]).load(meta, saved[3]["arrays"])
    with pytest.raises(CheckpointError, match=r"Got none\. The checkpoint has 0\.EarlyStopping, 1"):
        CallbackStates([]).check(meta)


def test_a_class_with_other_attributes_is_refused_by_name():
    old, new = Training(lambda: [Locked()]), Training(lambda: [Locked()])
    meta = old.states.meta()
    new.callbacks[0].added = 1
    del new.callbacks[0].lock
    with pytest.raises(CheckpointError, match=r"0\.Locked must be .* difference in added, lock\."):
        CallbackStates(new.callbacks).check(meta)
    changed = Training(lambda: [Asked()])
    meta["callbacks"][0]["name"] = "0.Asked"
    with pytest.raises(CheckpointError, match="difference in get_state, set_state"):
        changed.states.check(meta)


def test_nothing_is_changed_when_an_array_or_a_variable_is_missing():
    training, saved = run_whole(lambda: [stopping_early()[0], Everything()])
    arrays = dict(saved[-1]["arrays"])
    fresh = Training(lambda: [stopping_early()[0], Everything()])
    before = fresh.end()
    del arrays["1.Everything/read_only"]
    with pytest.raises(CheckpointError, match=r"read_only must find .* Got no array 1\.Everything"):
        fresh.states.load(training.states.meta(), arrays)
    fresh.callbacks[1].weights[0] = keras.Variable([1.0, 2.0, 3.0])
    with pytest.raises(CheckpointError, match=r"weights must .* a Variable of .*\(3,\).*\(2,\)"):
        fresh.states.load(training.states.meta(), saved[-1]["arrays"])
    fresh.callbacks[1].weights[0] = keras.Variable([1.0, 2.0])
    assert fresh.end() == before


def test_the_checkpoint_wins_over_a_changed_setting_and_says_so():
    def patient() -> Callbacks:
        return [keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True)]

    def impatient() -> Callbacks:
        return [keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)]

    whole, saved = run_whole(patient)
    resumed = resume(impatient, saved[2])
    assert resumed.callbacks[0].patience == 5 and resumed.epoch == whole.epoch
    assert resumed.notices == [
        "train.callbacks: 0.EarlyStopping.patience must stay while a training goes on. Got 1, and "
        "5 when it began. The checkpoint's value is used. Start a new training to change it."
    ]
    assert resume(patient, saved[2]).notices == []


def test_backup_and_restore_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"0\.BackupAndRestore\. rowstep saves and resumes") as e:
        CallbackStates([keras.callbacks.BackupAndRestore(str(tmp_path))])
    assert isinstance(e.value, RowstepError)


def test_swapped_average_weights_are_remembered():
    states = CallbackStates([swap := keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
    swap._ema_weights_in_model = True
    fresh = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    CallbackStates([fresh]).load(states.meta(), {})
    assert fresh._ema_weights_in_model


def test_a_file_that_is_on_no_local_disk_is_a_gap():
    states = CallbackStates([keras.callbacks.CSVLogger("gs://bucket/log.csv")])
    assert ["0.CSVLogger.filename must be on a local disk" in text for text in states.gaps()] == [
        True
    ]
