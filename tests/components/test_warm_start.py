"""A warm start takes each key's row to where the key is today, with all that belongs to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.components.build import build_optimizer
from rowstep.components.checkpoints import CheckpointStore, SavedState
from rowstep.components.checkpoints.saved_state import SavedArray
from rowstep.components.models import build_model
from rowstep.components.vocabularies import (
    GROUP,
    RowCounts,
    Vocabulary,
    load_vocabularies,
    vocabulary_arrays,
)
from rowstep.components.warm_start import WarmStart, column_faults, tables_of_features, warm_start
from rowstep.configs import RunConfig, load_config
from rowstep.optimizers import StateMismatchError, state

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
DCN = "model={kind: dcn, dim: 4, cross_layers: 1, cross_rank: 2, deep_units: [4], dropout: 0.0}"
USERS = [f"u{i}" for i in range(12)]
ITEMS = [f"i{i}" for i in range(6)]
CATEGORIES = 16
MIXED = ["new1", *USERS[9:4:-1], "new2", *USERS[:3]]
CHANGES: dict[str, tuple[list[str], int]] = {
    "same": (USERS, 2),
    "grown": ([*USERS, "new1", "new2", "new3"], 2),
    "shrunk": (USERS[:8], 2),
    "permuted": (USERS[::-1], 2),
    "grown, permuted and dropped": (MIXED, 2),
    "more buckets": (USERS, 4),
    "fewer buckets": (USERS, 1),
    "disjoint": (["x", "y", "z"], 2),
}
OPTIMIZERS = {
    "lazy_adam": "{kind: lazy_adam, weight_decay: 0.1}",
    "lazy_adam, all options": "{kind: lazy_adam, bias_correction: visits, idle_decay: true, "
    "row_velocity: true, weight_decay: 0.1}",
    "adam_multilr": "{kind: adam_multilr, amsgrad: true, "
    "pattern_lrs: [{patterns: [kernel], lr: 0.5}]}",
    "adam_multilr, lazy": "{kind: adam_multilr, lazy: true}",
    "lamb": "{kind: lamb, weight_decay_rate: 0.1}",
    "lamb by rows": "{kind: lamb, row_trust_ratio: true, row_velocity: true}",
    "adam": "{kind: adam}",
}


class Day:
    """A model and an optimizer over the vocabularies of a day, trained by keys."""

    def __init__(self, *overrides: str, users: Sequence[str] = USERS, num_oov: int = 2) -> None:
        self.config = load_config(
            TINY, [f"features.user_id={{kind: vocabulary, oov_buckets: {num_oov}}}", *overrides]
        )
        keys = {"user_id": (users, num_oov), "item_id": (ITEMS, 1)}
        self.vocabularies = {
            name: Vocabulary.of([key.encode() for key in names], oov)
            for name, (names, oov) in keys.items()
            if self.config.features[name].kind == "vocabulary"
        }
        rows = {name: len(names) + oov for name, (names, oov) in keys.items()}
        rows |= {name: f.buckets for name, f in self.config.features.items() if f.kind == "hash"}
        self.row_of = {
            name: {k: r for r, k in enumerate(names)} for name, (names, _) in keys.items()
        }
        self.model = build_model(self.config, rows, 3.0)
        self.optimizer = build_optimizer(self.config.optimizer, 100)
        self.optimizer.build(self.model.trainable_variables)

    def train(self, users: Sequence[str], seed: int = 0) -> None:
        """Run one step in which these users (or OOV rows, as numbers behind the keys) occur."""
        rng = np.random.default_rng(seed)
        num_users = len(self.row_of["user_id"])
        ids = [u if isinstance(u, int) else self.row_of["user_id"][u] for u in users]
        ids = [num_users - 1 - i if i < 0 else i for i in ids]
        columns = {
            "user_id": np.array(ids),
            "item_id": rng.integers(0, len(ITEMS), len(ids)),
            "item_category": rng.integers(0, CATEGORIES, len(ids)),
        }
        inputs = {name: columns[name] for name in self.model.input}
        labels = rng.normal(3.0, 1.0, len(ids)).astype(np.float32)
        with tf.GradientTape() as tape:
            scores = self.model(inputs, training=True)
            error = tf.reduce_mean(tf.square(scores - labels))
            loss = tf.add_n([error, *self.model.losses])
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        self.optimizer.apply(gradients, variables)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return copies of everything by name, without the learning rates."""
        arrays = state.named_variables(self.model.variables) | state.named_state(self.optimizer)
        return {name: a for name, a in arrays.items() if not name.startswith("learning_rate")}

    def save(self, folder: Path, **groups: Mapping[str, np.ndarray]) -> SavedState:
        """Commit a checkpoint; `groups` replace those of this day."""
        arrays = {
            "model": state.named_variables(self.model.variables),
            "optimizer": state.named_state(self.optimizer),
            GROUP: dict(vocabulary_arrays(self.vocabularies)),
        }
        store = CheckpointStore(folder)
        identity = {"features": {n: {"kind": f.kind} for n, f in self.config.features.items()}}
        with store.lock():
            pairs = {name: iter(group.items()) for name, group in (arrays | groups).items()}
            store.save(int(self.optimizer.iterations.numpy()), pairs, {"identity": identity})
        saved = store.latest()
        assert saved is not None
        return saved

    def start_from(self, saved: SavedState, *, take_optimizer: bool = True) -> WarmStart:
        return warm_start(
            self.model,
            self.optimizer,
            saved,
            tables_of_features(self.config, self.model),
            load_vocabularies(saved),
            self.vocabularies,
            take_optimizer=take_optimizer,
            other_faults=column_faults(saved, self.config),
        )


def yesterday(*overrides: str) -> Day:
    day = Day(*overrides)
    for step in range(3):
        day.train([*USERS[step:], *USERS[::-2], -1, -2], seed=step)
    return day


def user_rows(new: Day) -> list[tuple[int, int]]:
    """Return the old and the new row of each user, and each bucket, that is in both."""
    pairs = [(USERS.index(u), r) for u, r in new.row_of["user_id"].items() if u in USERS]
    num_users, num_oov = len(new.row_of["user_id"]), new.vocabularies["user_id"].num_oov
    return pairs + [(len(USERS) + b, num_users + b) for b in range(min(num_oov, 2))]


def assert_same_rows(old: Day, new: Day) -> None:
    """Assert that every user's rows, and all that is no row of a user, have the same bits."""
    before, after = old.arrays(), new.arrays()
    assert before.keys() == after.keys()
    pairs = user_rows(new)
    old_rows, new_rows = [o for o, _ in pairs], [n for _, n in pairs]
    for name, array in before.items():
        other = after[name]
        if name.startswith("user_id"):
            array, other = array[old_rows], other[new_rows]
        assert array.tobytes() == other.tobytes(), name


def assert_new_rows_are_new(new: Day, fresh: Mapping[str, np.ndarray], iterations: int) -> None:
    taken = {n for _, n in user_rows(new)}
    rows = [r for r in range(new.vocabularies["user_id"].num_rows) if r not in taken]
    for name, array in new.arrays().items():
        if name.startswith("user_id"):
            wanted = fresh[name][rows]
            if name.endswith("last_step"):
                wanted = np.full_like(wanted, iterations)
            elif name not in state.named_variables(new.model.variables):
                assert not wanted.any()
            np.testing.assert_array_equal(array[rows], wanted, err_msg=name)


@pytest.mark.parametrize("change", CHANGES)
def test_rows_follow_their_keys(change: str, tmp_path: Path) -> None:
    users, num_oov = CHANGES[change]
    old, new = yesterday(), Day("train.seed=8", users=users, num_oov=num_oov)
    fresh = new.arrays()
    report = new.start_from(old.save(tmp_path))
    assert_same_rows(old, new)
    assert_new_rows_are_new(new, fresh, 3)
    kept = len(user_rows(new))
    num_new = len(users) + num_oov - kept
    assert report == WarmStart(
        3, 3, {"user_id": RowCounts(kept, 14 - kept, num_new), "item_id": RowCounts(7, 0, 0)}
    )
    common = [u for u in users if u in USERS]
    for step in (10, 11):
        for day in (old, new):
            day.train([*common, *common[::-2], -1], seed=step)
    assert_same_rows(old, new)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("model", ["model.dim=3", DCN], ids=["mf", "dcn"])
def test_every_optimizer_goes_on_as_if_rows_had_not_moved(
    model: str, kind: str, tmp_path: Path
) -> None:
    settings = (model, f"optimizer={OPTIMIZERS[kind]}")
    old, new = yesterday(*settings), Day(*settings, "train.seed=8", users=MIXED)
    fresh = new.arrays()
    new.start_from(old.save(tmp_path))
    assert_same_rows(old, new)
    assert_new_rows_are_new(new, fresh, 3)
    common = [u for u in MIXED if u in USERS]
    for day in (old, new):
        day.train([*common, *common[::-2], -1, -2], seed=10)
    if kind != "lamb":  # its ratio is that of the whole table, rows that differ among them
        assert_same_rows(old, new)


def test_without_the_optimizer_it_stays_new(tmp_path: Path) -> None:
    old, new = yesterday(), Day(users=MIXED)
    report = new.start_from(old.save(tmp_path), take_optimizer=False)
    assert report.iterations == 0
    assert str(report).startswith("warm start from the weights of step 3; user_id: 10 rows kept, 4")
    fresh = state.named_state(Day(users=MIXED).optimizer)
    for name, array in state.named_state(new.optimizer).items():
        np.testing.assert_array_equal(array, fresh[name])
    old.optimizer, new.optimizer = Day().optimizer, Day(users=MIXED).optimizer
    assert_same_rows(old, new)


def test_rate_and_random_state_are_those_of_today(tmp_path: Path) -> None:
    dropout = DCN.replace("dropout: 0.0", "dropout: 0.5")
    old = yesterday(dropout)
    new = Day(dropout, "train.seed=8", "optimizer.learning_rate=0.25")
    name = "dropout_0_seed/seed_generator_state"
    before = new.arrays()[name]
    new.start_from(old.save(tmp_path / "a"))
    assert float(new.optimizer.learning_rate) == 0.25
    np.testing.assert_array_equal(new.arrays()[name], before)
    assert (old.arrays()[name] != before).any()
    # And so dropout may come and go, and a schedule too.
    Day(DCN, "optimizer.schedule={kind: cosine}").start_from(old.save(tmp_path / "b"))
    new.start_from(Day(DCN, "optimizer.schedule={kind: cosine}").save(tmp_path / "c"))


def test_tables_are_written_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = [f"u{i}" for i in range(70_000)]  # 17 MiB a table: two pieces
    old, new = Day("model.dim=64", users=users), Day("model.dim=64", users=users[:0:-1])
    slot = state.state_variables(old.optimizer)["user_id_factors/embeddings/velocity"]
    slot.assign(np.arange(70_002 * 64, dtype=np.float32).reshape(-1, 64))
    saved = old.save(tmp_path)
    pieces = saved.sources("optimizer")["user_id_factors/embeddings/velocity"].pieces()
    assert sum(1 for _ in pieces) > 1

    read_whole = SavedArray.read

    def read(source: SavedArray) -> np.ndarray:
        assert source.record.group == GROUP, f"{source.record.name} was read as a whole"
        return read_whole(source)

    monkeypatch.setattr(SavedArray, "read", read)
    new.start_from(saved)
    before, after = old.arrays(), new.arrays()
    for name in (n for n in before if n.startswith("user_id")):
        np.testing.assert_array_equal(after[name][:69_999], before[name][69_999:0:-1])
        np.testing.assert_array_equal(after[name][69_999:], before[name][70_000:])


def test_tables_of_a_hash_feature_of_several_pieces_keep_their_rows(tmp_path: Path) -> None:
    settings = ("model.dim=64", "features.user_id={kind: hash, buckets: 70000}")
    old, new = (Day(*settings, f"train.seed={seed}") for seed in (1, 2))
    new.start_from(old.save(tmp_path))
    for name, array in old.arrays().items():
        assert array.tobytes() == new.arrays()[name].tobytes(), name


def test_a_read_of_a_table_copies_nothing_afterwards(tmp_path: Path) -> None:
    old, new = yesterday(), Day(users=MIXED)
    new.start_from(old.save(tmp_path))
    tables = state.state_variables(new.optimizer)
    tables["table"] = new.model.get_layer("user_id_factors").embeddings
    for name, variable in tables.items():
        if variable.shape.rank:
            one, two = (np.asarray(memoryview(variable.value.read_value())) for _ in range(2))
            assert np.shares_memory(one, two), name


@pytest.mark.parametrize(("count", "reach"), [("steps", 3.16), ("visits", 1.0)])
def test_first_step_of_a_new_row_late_in_a_training(
    count: str, reach: float, tmp_path: Path
) -> None:
    settings = (f"optimizer.bias_correction={count}", "optimizer.learning_rate=0.001")
    old = yesterday(*settings)
    old.optimizer.iterations.assign(1_000_000)
    new = Day(*settings, users=[*USERS, "new"])
    new.start_from(old.save(tmp_path))
    before = new.arrays()["user_id_bias/embeddings"]
    new.train(["new", *USERS], seed=5)
    moved = np.abs(new.arrays()["user_id_bias/embeddings"] - before)[12, 0]
    assert moved / 0.001 == pytest.approx(reach, rel=0.01)


def test_a_new_row_does_not_decay_for_steps_before_it_was_there(tmp_path: Path) -> None:
    settings = (
        "optimizer={kind: lazy_adam, learning_rate: 0.001, weight_decay: 0.1, "
        "idle_decay: true, bias_correction: visits}",
    )
    old = yesterday(*settings)
    old.optimizer.iterations.assign(1_000_000)
    new = Day(*settings, users=[*USERS, "new"])
    new.start_from(old.save(tmp_path))
    table = new.model.get_layer("user_id_factors").embeddings
    table.assign(tf.ones_like(table))
    new.train(["new"], seed=5)
    np.testing.assert_allclose(table.numpy()[12], 1.0, atol=0.002)  # one decay, one step


# --- refusals -------------------------------------------------------------------------------


def refused(old: SavedState, new: Day, *, take_optimizer: bool = True) -> str:
    before = new.arrays()
    with pytest.raises(StateMismatchError) as caught:
        new.start_from(old, take_optimizer=take_optimizer)
    after = new.arrays()
    assert all(after[name].tobytes() == array.tobytes() for name, array in before.items())
    message = str(caught.value)
    form = r"warm start from .*: the checkpoint must fit .*\. Got .*\. Nothing was assigned\. Go .*"
    assert re.fullmatch(form, message), message
    return message


def test_another_width_names_every_table_and_slot(tmp_path: Path) -> None:
    message = refused(yesterday().save(tmp_path), Day("model.dim=5", users=MIXED))
    for feature, rows in (("user_id", 14), ("item_id", 7)):
        for name in ("", "/momentum", "/velocity"):
            part = f"{feature}_factors/embeddings{name} of shape ({rows}, 4) instead of ({rows}, 5)"
            assert part in message
    assert "_bias" not in message
    assert message.endswith("or set train.warm_start to false to train from scratch.")


@pytest.mark.parametrize("added", [True, False], ids=["added", "removed"])
def test_another_set_of_features_is_named(added: bool, tmp_path: Path) -> None:
    less = "features={user_id: {kind: vocabulary, oov_buckets: 2}, item_id: {kind: vocabulary}}"
    old, new = ((DCN, less), (DCN,)) if added else ((DCN,), (DCN, less))
    message = refused(Day(*old).save(tmp_path), Day(*new))
    word = "no" if added else "unexpected"
    for key in ("", "/momentum", "/velocity"):
        assert f"{word} item_category_rows/embeddings{key};" in message
    wide, narrow = "(12, 4)", "(8, 4)"
    was, wanted = (narrow, wide) if added else (wide, narrow)
    assert f"deep_0/kernel of shape {was} instead of {wanted}" in message


def test_a_number_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    old, new = ((DCN, f"features.{name}={{kind: numeric}}") for name in ("age", "price"))
    message = refused(Day(*old).save(tmp_path), Day(*new))
    assert "Got no column price; unexpected column age. Nothing" in message


@pytest.mark.parametrize(
    ("optimizer", "part"),
    [
        ("{kind: adam}", "no user_id_factors_embeddings_momentum; "),
        ("{kind: adam}", "; unexpected user_id_factors/embeddings/momentum; "),
        ("{kind: adam_multilr, amsgrad: true}", "no mean/bias/velocity_hat. "),
        ("{kind: lazy_adam, bias_correction: visits}", "no item_id_bias/embeddings/num_visits; "),
        ("{kind: lazy_adam, row_velocity: true}",
         "user_id_factors/embeddings/velocity of shape (14, 4) instead of (14, 1); "),
    ],
)  # fmt: skip
def test_another_optimizer_is_refused_and_its_weights_can_be_taken(
    optimizer: str, part: str, tmp_path: Path
) -> None:
    old, new = yesterday().save(tmp_path), Day(f"optimizer={optimizer}", users=MIXED)
    message = refused(old, new)
    assert part in message
    assert message.endswith("set train.warm_start_optimizer to false to take the weights alone.")
    new.start_from(old, take_optimizer=False)


def test_optimizers_with_the_same_slots_exchange_their_state(tmp_path: Path) -> None:
    old, new = yesterday(), Day("optimizer={kind: lamb}", users=MIXED)
    new.start_from(old.save(tmp_path))
    assert_same_rows(old, new)


def test_another_number_of_hash_buckets_is_refused(tmp_path: Path) -> None:
    new = Day(DCN, "features.item_category={kind: hash, buckets: 17}")
    message = refused(Day(DCN).save(tmp_path), new)
    assert "item_category_rows/embeddings of shape (16, 4) instead of (17, 4)" in message


@pytest.mark.parametrize("hashed_then", [True, False])
def test_rows_of_a_hash_do_not_become_rows_of_keys(hashed_then: bool, tmp_path: Path) -> None:
    hashed = "features.user_id={kind: hash, buckets: 14}"
    old, new = (Day(hashed), Day()) if hashed_then else (Day(), Day(hashed))
    message = refused(old.save(tmp_path), new)
    part = "embeddings without the vocabulary" if hashed_then else "embeddings with rows by a voc"
    assert message.count(f"user_id_factors/{part}") == 1


def test_a_checkpoint_from_before_vocabularies_were_saved_is_refused(tmp_path: Path) -> None:
    message = refused(yesterday().save(tmp_path, **{GROUP: {}}), Day())
    assert "item_id_bias/embeddings without the vocabulary of item_id that tells whose" in message


def test_types_are_compared(tmp_path: Path) -> None:
    old = yesterday()
    arrays = state.named_variables(old.model.variables)
    arrays["user_id_bias/embeddings"] = arrays["user_id_bias/embeddings"].astype(np.float64)
    message = refused(old.save(tmp_path, model=arrays), Day())
    assert "Got user_id_bias/embeddings of dtype float64 instead of float32. N" in message


def test_a_model_that_was_not_built_on_its_vocabulary_is_refused(tmp_path: Path) -> None:
    new = Day(users=MIXED)
    new.vocabularies["user_id"] = Vocabulary.of([b"u1"], 2)
    message = refused(yesterday().save(tmp_path), new)
    assert "user_id_bias/embeddings for 12 rows, where user_id has 3 today" in message


def test_tables_are_those_of_the_inputs_they_look_up() -> None:
    assert tables_of_features((day := Day(DCN)).config, day.model) == {
        f"{name}_rows/embeddings": name for name in ("item_category", "item_id", "user_id")
    }
    day = Day()
    stranger = build_model(day.config, {"user_id": 2, "item_id": 2}, 0.0)
    config: RunConfig = load_config(TINY, ["features.other={kind: vocabulary}", "model.user=other"])
    with pytest.raises(StateMismatchError, match="user_id_factors must look up a feature"):
        tables_of_features(config, stranger)
    assert isinstance(stranger, keras.Model)
