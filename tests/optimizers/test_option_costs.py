"""No option makes a lazy step touch the whole table: its graph has no tensor of that size."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("option_cases")
sys.path.pop(0)

NUM_ROWS = 12_347  # no other number in the graphs
LAZY: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("lazy_adam", {}),
    "visits_and_idle_decay": (
        "lazy_adam",
        {"bias_correction": "visits", "idle_decay": True, "weight_decay": 0.1},
    ),
    "row_velocity": ("lazy_adam", {"row_velocity": True}),
    "bfloat16_state": ("lazy_adam", {"state_dtype": "bfloat16"}),
    "clip": ("lazy_adam", {"clipvalue": 0.1, "global_clipnorm": 0.1}),
    "clip_before_sum": ("lazy_adam", {"clipnorm": 0.1, "clip_before_sum": True}),
    "loss_scale_and_decay": ("lazy_adam", {"loss_scale_factor": 8.0, "decay": 0.1}),
    "lazy_amsgrad": ("adam_multilr", {"amsgrad": True, "lazy": True, "weight_decay": 0.1}),
    "row_trust_ratio": ("lamb", {"row_trust_ratio": True, "weight_decay_rate": 0.1}),
}


def full_size(maker: str, options: dict[str, Any], dtype: str = "float32") -> set[tuple[str, str]]:
    """Return (function, type of operation) of all tensors of V numbers and more."""
    table = keras.Variable(np.ones((NUM_ROWS, 4)), dtype=dtype, name="embeddings")
    optimizer = cases.make(maker, **options)
    optimizer.build([table])

    @tf.function
    def step(values: tf.Tensor, row_ids: tf.Tensor) -> None:
        shape = tf.constant([NUM_ROWS, 4], tf.int64)
        optimizer.apply([tf.IndexedSlices(values, row_ids, shape)], [table])

    specs = (tf.TensorSpec([None, 4], dtype), tf.TensorSpec([None], tf.int64))
    return found(step.get_concrete_function(*specs).graph, "")


def found(graph: Any, branch: str) -> set[tuple[str, str]]:
    """Look for them in a graph and in those of its conditions."""
    result = set()
    for operation in graph.get_operations():
        shapes = [output.shape for output in operation.outputs]
        if any(shape.rank and NUM_ROWS in shape.as_list() for shape in shapes):
            result.add((branch, operation.type))
        if operation.type in ("If", "StatelessIf"):
            for side in ("then_branch", "else_branch"):
                name = operation.get_attr(side).name
                inner = graph._get_function(name).graph
                result |= found(inner, side)
        assert operation.type not in ("PartitionedCall", "StatefulPartitionedCall", "While")
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", LAZY)
def test_a_lazy_step_has_no_tensor_of_the_tables_size(case: str, dtype: str) -> None:
    assert full_size(*LAZY[case], dtype=dtype) == set()


def test_the_walk_finds_a_dense_step() -> None:
    types = {kind for _, kind in full_size("adam_multilr", {})}
    assert {"ReadVariableOp", "UnsortedSegmentSum"} <= types


def test_an_average_reads_the_whole_table_to_start_with_only() -> None:
    # In the branch of a condition: the copy before the first step.
    everything = full_size("lazy_adam", {**cases.EMA, "idle_decay": True})
    assert everything and {branch for branch, _ in everything} == {"then_branch"}
    kinds = {kind for _, kind in everything}
    assert kinds <= {"ReadVariableOp", "Cast", "Identity"}, kinds


def test_an_average_that_overwrites_does_so_in_a_condition() -> None:
    everything = full_size("lazy_adam", {**cases.EMA, "ema_overwrite_frequency": 5})
    assert everything and {branch for branch, _ in everything} == {"then_branch"}


def test_accumulation_scans_one_number_a_row_when_it_is_due() -> None:
    everything = full_size("lazy_adam", {"gradient_accumulation_steps": 2, "clipnorm": 1.0})
    assert everything and {branch for branch, _ in everything} == {"then_branch"}
    # The marks of the rows and what finds those that are set.
    kinds = {kind for _, kind in everything}
    assert kinds <= {"ReadVariableOp", "Greater", "Identity"}, kinds
