"""The state of the TensorFlow 1 LazyAdam: checkpoints under the old names, arrays, sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import OptimizerArgumentError, StateMismatchError
from rowstep.optimizers.v1.optimizer import LazyAdamOptimizer

v1 = tf.compat.v1
both_kinds = pytest.mark.parametrize("use_resource", [False, True])
BATCHES = [[0, 1, 1], [2], [0, 3], [1, 1, 1]]
KEYS = ["beta1_power", "beta2_power", "table/momentum", "table/velocity"]


class Program:
    """A training program in a graph of its own, with a table, placeholder ids and a session."""

    def __init__(self, optimizer: Any, use_resource: bool, dtype: Any = tf.float32) -> None:
        with tf.Graph().as_default() as graph:
            start = np.linspace(-1, 1, 8).reshape(4, 2)
            self.table = v1.Variable(
                tf.constant(start, dtype), use_resource=use_resource, name="table"
            )
            self.ids = v1.placeholder(tf.int64, [None])
            loss = tf.reduce_sum(tf.square(tf.gather(self.table, self.ids)))
            self.train_op = optimizer.minimize(loss, var_list=[self.table])
            self.saver = v1.train.Saver()
            self.session = v1.Session(graph=graph)
            self.session.run(v1.global_variables_initializer())
            # Loading may add no operation: graphs of supervised sessions are finalized.
            graph.finalize()

    def train(self, batches: list[list[int]]) -> Any:
        for row_ids in batches:
            self.session.run(self.train_op, {self.ids: row_ids})
        return self.session.run(self.table)

    def save(self, folder: Path) -> str:
        with self.session.graph.as_default():
            return str(self.saver.save(self.session, str(folder / "model")))

    def restore(self, path: str) -> None:
        with self.session.graph.as_default():
            self.saver.restore(self.session, path)


@both_kinds
def test_training_goes_on_to_the_bit_from_a_saver_checkpoint(
    tmp_path: Path, use_resource: bool
) -> None:
    whole = Program(LazyAdamOptimizer(0.1), use_resource).train(BATCHES)
    first = Program(LazyAdamOptimizer(0.1), use_resource)
    first.train(BATCHES[:2])
    path = first.save(tmp_path)
    second = Program(LazyAdamOptimizer(0.1), use_resource)
    second.restore(path)
    np.testing.assert_array_equal(second.train(BATCHES[2:]), whole)
    # A row of the second half was touched in the first: its moments must have come along.
    fresh = Program(LazyAdamOptimizer(0.1), use_resource)
    assert np.any(fresh.train(BATCHES[2:]) != whole)


@both_kinds
@pytest.mark.parametrize("ours_first", [False, True])
def test_checkpoints_go_to_and_from_tensorflows_adam(
    tmp_path: Path, use_resource: bool, ours_first: bool
) -> None:
    classes = [v1.train.AdamOptimizer, LazyAdamOptimizer]
    writer, reader = reversed(classes) if ours_first else classes
    first = Program(writer(0.1), use_resource)
    first.train([[0, 1, 2, 3, 3]])
    path = first.save(tmp_path)
    assert dict(tf.train.list_variables(path)) == {
        "beta1_power": [],
        "beta2_power": [],
        "table": [4, 2],
        "table/Adam": [4, 2],
        "table/Adam_1": [4, 2],
    }
    second = Program(reader(0.1), use_resource)
    second.restore(path)
    # Where a batch names every row the two are one optimizer.
    batches = [[3, 2, 1, 0], [0, 1, 2, 3, 0]]
    np.testing.assert_allclose(second.train(batches), first.train(batches), rtol=2e-6)


@both_kinds
def test_half_slots_of_old_checkpoints_load_where_the_flag_asks_for_them(
    tmp_path: Path, use_resource: bool
) -> None:
    class HalfSlots(LazyAdamOptimizer):
        slots_in_variable_dtype = True

    old = Program(v1.train.AdamOptimizer(0.1, epsilon=1e-3), use_resource, tf.float16)
    old.train(BATCHES[:2])
    path = old.save(tmp_path)
    flagged = Program(HalfSlots(0.1, epsilon=1e-3), use_resource, tf.float16)
    flagged.restore(path)
    before = flagged.session.run(flagged.table)
    after = flagged.train([[0]])
    assert after.dtype == np.float16 and np.all(after[0] != before[0])
    np.testing.assert_array_equal(after[1:], before[1:])
    plain = Program(LazyAdamOptimizer(0.1), use_resource, tf.float16)
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not equal original dtype half"):
        plain.restore(path)


@both_kinds
def test_arrays_carry_the_state_from_one_session_to_another(use_resource: bool) -> None:
    whole = Program(LazyAdamOptimizer(0.1), use_resource).train(BATCHES)
    optimizer, other = LazyAdamOptimizer(0.1), LazyAdamOptimizer(0.1)
    first, second = Program(optimizer, use_resource), Program(other, use_resource)
    table = first.train(BATCHES[:2])
    weights = optimizer.get_weights(first.session)
    assert list(optimizer.named_state(first.session)) == KEYS
    assert all(type(array) is np.ndarray for array in weights)
    np.testing.assert_allclose(weights[:2], [0.9**3, 0.999**3], rtol=1e-6)
    with second.session.as_default(), second.session.graph.as_default():
        second.table.load(table, second.session)
        other.set_weights(weights)
        for got, given in zip(other.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(got, given)
    np.testing.assert_array_equal(second.train(BATCHES[2:]), whole)


@both_kinds
def test_a_graph_without_a_session_is_told_to_pass_one(use_resource: bool) -> None:
    optimizer = LazyAdamOptimizer()
    program = Program(optimizer, use_resource)
    with program.session.graph.as_default():
        with pytest.raises(OptimizerArgumentError, match="Pass session="):
            optimizer.get_weights()
        with pytest.raises(OptimizerArgumentError, match="Pass session="):
            optimizer.set_weights([])


@both_kinds
def test_one_optimizer_keeps_the_states_of_two_graphs_apart(use_resource: bool) -> None:
    optimizer = LazyAdamOptimizer(0.1)
    first, second = Program(optimizer, use_resource), Program(optimizer, use_resource)
    first.train(BATCHES)
    second.train(BATCHES[:1])
    powers = [optimizer.get_weights(p.session)[0] for p in (first, second)]
    np.testing.assert_allclose(powers, [0.9**5, 0.9**2], rtol=1e-6)


def eager_step(optimizer: Any, table: tf.Variable, row_ids: list[int]) -> None:
    optimizer.minimize(
        lambda: tf.reduce_sum(tf.square(tf.gather(table, row_ids))), var_list=[table]
    )


def eager_table() -> tf.Variable:
    return tf.Variable(np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2), name="table")


@pytest.mark.parametrize("by_name", [False, True])
def test_state_can_be_assigned_before_the_first_step(by_name: bool) -> None:
    optimizer, table = LazyAdamOptimizer(0.1), eager_table()
    for row_ids in BATCHES[:2]:
        eager_step(optimizer, table, row_ids)
    resumed, copy = LazyAdamOptimizer(0.1), tf.Variable(table, name="table")
    with pytest.raises(StateMismatchError, match=r"Call minimize, apply_gradients or build"):
        resumed.get_weights()
    resumed.build([copy])
    if by_name:
        resumed.load_named_state(optimizer.named_state())
    else:
        resumed.set_weights(optimizer.get_weights())
    for row_ids in BATCHES[2:]:
        eager_step(optimizer, table, row_ids)
        eager_step(resumed, copy, row_ids)
    np.testing.assert_array_equal(copy.numpy(), table.numpy())
    assert list(optimizer.named_state()) == KEYS


def test_arrays_are_copies_that_later_steps_leave_alone() -> None:
    optimizer, table = LazyAdamOptimizer(0.1), eager_table()
    eager_step(optimizer, table, [0])
    weights = optimizer.get_weights()
    before = [array.copy() for array in weights]
    eager_step(optimizer, table, [0])
    for array, old in zip(weights, before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights[:-1], "Got 3 arrays where 4 are needed"),
        (lambda weights: [*weights[:2], weights[2][:2], weights[3]], "table/momentum of shape"),
        (
            lambda weights: [*weights[:3], weights[3].astype("f8")],
            "table/velocity of dtype float64",
        ),
        (lambda weights: [*weights[:3], -weights[3]], "table/velocity with negative numbers"),
    ],
)
def test_state_that_does_not_fit_is_refused_by_name(
    in_graph: bool, change: Any, message: str
) -> None:
    optimizer, session = LazyAdamOptimizer(0.1), None
    if in_graph:
        session = Program(optimizer, use_resource=False).session
    else:
        optimizer.build([eager_table()])
    weights = optimizer.get_weights(session)
    with pytest.raises(StateMismatchError, match=message):
        optimizer.set_weights(change([array + np.ones_like(array) for array in weights]), session)
    for got, before in zip(optimizer.get_weights(session), weights, strict=True):
        np.testing.assert_array_equal(got, before)


def test_an_object_checkpoint_restores_slots_that_do_not_exist_yet(tmp_path: Path) -> None:
    optimizer, table = LazyAdamOptimizer(0.1), eager_table()
    for row_ids in BATCHES[:2]:
        eager_step(optimizer, table, row_ids)
    path = tf.train.Checkpoint(optimizer=optimizer, table=table).save(str(tmp_path / "model"))
    resumed, copy = LazyAdamOptimizer(0.1), eager_table()
    status = tf.train.Checkpoint(optimizer=resumed, table=copy).restore(path)
    for row_ids in BATCHES[2:]:
        eager_step(optimizer, table, row_ids)
        eager_step(resumed, copy, row_ids)
    status.assert_consumed()
    np.testing.assert_array_equal(copy.numpy(), table.numpy())
