"""What stops a step stops it before anything has moved, in any variable."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LazyAdam, OptimizerArgumentError

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("option_cases")
sys.path.pop(0)

NAN, INF = float("nan"), float("inf")
EVERYTHING = {
    **cases.EMA,
    "bias_correction": "visits",
    "idle_decay": True,
    "weight_decay": 0.1,
    "ema_overwrite_frequency": 2,
    "clipnorm": 1.0,
}


def bad_calls() -> dict[str, tuple[dict[str, Any], str]]:
    """Return calls whose fault lies in the variable that is updated last, or first."""
    rows = np.ones((2, 3), np.float32)
    kernel = np.ones((2, 3), np.float32)
    poisoned = rows * [[1, 1, 1], [1, NAN, 1]]
    endless = kernel * [[1, 1, 1], [1, -INF, 1]]
    ids = np.array([1, 3])
    return {
        "nan_row": (
            {cases.KERNEL: kernel, cases.TABLE: (ids, poisoned)},
            f"{cases.TABLE}: a gradient must be finite. Nothing was updated",
        ),
        "inf_kernel": (
            {cases.TABLE: (ids, rows), cases.KERNEL: endless},
            f"{cases.KERNEL}: a gradient must be finite",
        ),
        "negative_id": (
            {cases.KERNEL: kernel, cases.TABLE: (np.array([1, -1]), rows)},
            f"{cases.TABLE}: row ids must lie in",
        ),
        "id_too_large": (
            {cases.KERNEL: kernel, cases.TABLE: (np.array([7, 1]), rows)},
            f"{cases.TABLE}: row ids must lie in",
        ),
    }


@pytest.mark.parametrize("wrap", ["eager", "graph"])
@pytest.mark.parametrize("accumulate", [None, 2])
@pytest.mark.parametrize("bad", bad_calls())
def test_bad_gradients_leave_every_variable_and_all_state_alone(
    bad: str, accumulate: int | None, wrap: str
) -> None:
    call, message = bad_calls()[bad]
    optimizer = cases.make("lazy_adam", **EVERYTHING, gradient_accumulation_steps=accumulate)
    variables = cases.variables()
    cases.run(optimizer, variables, cases.calls(3))  # the next call makes an update
    before = snapshot(optimizer, variables)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        cases.run(optimizer, variables, [call], wrap)
    assert_same(snapshot(optimizer, variables), before)
    cases.run(optimizer, variables, cases.calls(4)[3:], wrap)
    assert np.any(snapshot(optimizer, variables)[cases.TABLE] != before[cases.TABLE])


def snapshot(optimizer: Any, variables: dict[str, keras.Variable]) -> dict[str, np.ndarray]:
    return {**optimizer.named_state(), **{n: np.array(v) for n, v in variables.items()}}


def assert_same(after: dict[str, np.ndarray], before: dict[str, np.ndarray]) -> None:
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


@pytest.mark.parametrize("options", [{}, {**EVERYTHING, "gradient_accumulation_steps": 2}])
def test_in_a_graph_every_write_waits_for_every_check(options: dict[str, Any]) -> None:
    # A graph that happens to run the check first passes the test above; this one shows the order.
    optimizer, variables = cases.make("lazy_adam", **options), cases.variables()
    optimizer.build(list(variables.values()))

    @tf.function
    def step(values: tf.Tensor, row_ids: tf.Tensor, kernel: tf.Tensor) -> None:
        slices = tf.IndexedSlices(values, row_ids, tf.constant([7, 3]))
        optimizer.apply([slices, kernel], list(variables.values()))

    specs = ([None, 3], tf.float32), ([None], tf.int64), ([2, 3], tf.float32)
    graph = step.get_concrete_function(*(tf.TensorSpec(*spec) for spec in specs)).graph
    operations = graph.get_operations()
    checks = {op for op in operations if "AssertGuard" in op.name and op.type == "If"}
    writes = [
        op
        for op in operations
        if op.type.startswith(("Assign", "ResourceScatter", "If")) and op not in checks
    ]
    assert len(checks) == 3 and len(writes) >= 7
    for write in writes:
        assert checks <= ancestors(write), f"{write.name} does not wait"


def ancestors(operation: tf.Operation) -> set[tf.Operation]:
    seen: set[tf.Operation] = set()
    left = [operation]
    while left:
        op = left.pop()
        fresh = {*(t.op for t in op.inputs), *op.control_inputs} - seen
        seen |= fresh
        left += fresh
    return seen


@pytest.mark.parametrize("wrap", ["eager", "graph"])
def test_unchecked_numbers_go_through(wrap: str) -> None:
    optimizer, variables = cases.make("lazy_adam", check_finite=False), cases.variables()
    call, _ = bad_calls()["nan_row"]
    cases.run(optimizer, variables, [call], wrap)
    table = np.array(variables[cases.TABLE])
    assert np.isnan(table[3, 1]) and np.isnan(table).sum() == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="row ids must lie in"):
        cases.run(optimizer, variables, [bad_calls()["negative_id"][0]], wrap)


@pytest.mark.parametrize(
    "shape", [(2, 1), (3,), (4, 3)], ids=["would_broadcast", "rank_too_low", "too_long"]
)
@pytest.mark.parametrize("wrap", cases.WRAPS)
def test_a_gradient_of_another_shape_is_refused(shape: tuple[int, ...], wrap: str) -> None:
    optimizer, variables = cases.make("lazy_adam", **EVERYTHING), cases.variables()
    optimizer.build(list(variables.values()))
    before = snapshot(optimizer, variables)
    call = {cases.TABLE: cases.calls(1)[0][cases.TABLE], cases.KERNEL: np.ones(shape, np.float32)}
    # TensorFlow raises an error of its own, of the same words, for any that it meets in a graph.
    error = OptimizerArgumentError if wrap == "eager" else Exception
    with pytest.raises(error, match=f"{cases.KERNEL}: a gradient must have the variable's shape"):
        cases.run(optimizer, variables, [call], wrap)
    assert_same(snapshot(optimizer, variables), before)


def test_a_variable_that_is_in_a_step_twice_is_refused() -> None:
    optimizer, kernel = LazyAdam(), keras.Variable(np.ones(2), name="kernel")
    optimizer.build([kernel])
    with pytest.raises(OptimizerArgumentError, match=r"twice in one step\. Got kernel again"):
        optimizer.apply([tf.ones(2), tf.ones(2)], [kernel, kernel])
    np.testing.assert_array_equal(np.array(kernel), [1.0, 1.0])


def test_unknown_variables_leave_the_known_ones_alone() -> None:
    optimizer, known = LazyAdam(), keras.Variable(np.ones(2), name="known")
    optimizer.build([known])
    stranger = keras.Variable(np.ones(2), name="stranger")
    with pytest.raises(OptimizerArgumentError, match=r"Got stranger\. It knows known"):
        optimizer.apply([tf.ones(2), tf.ones(2)], [known, stranger])
    np.testing.assert_array_equal(np.array(known), [1.0, 1.0])
    assert int(optimizer.iterations) == 0
