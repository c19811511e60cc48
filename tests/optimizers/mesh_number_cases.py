"""Steps of the DTensor Adam on a mesh. See mesh_worker.py; test_mesh_adam.py compares."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mesh_inputs as inputs
import numpy as np
import tensorflow as tf
import tf_keras
from mesh_worker import Case, Mesh, main, message
from tf_keras.dtensor.experimental.optimizers import Adam as BuiltInAdam

from rowstep.optimizers.dtensor import Adam, EmaOption, GradientsClipOption, lookup

MESH = Mesh()
CASES: dict[str, Case] = {}


def state_of(optimizer: Any, **variables: Any) -> dict[str, Any]:
    weights = {name: MESH.read(variable) for name, variable in variables.items()}
    return {**weights, **{k: v.tolist() for k, v in optimizer.named_state().items()}}


def model_step(optimizer: Any, table: Any, kernel: Any) -> Callable[[Any], None]:
    def step(ids: Any) -> None:
        def loss() -> Any:
            rows = lookup(table, ids, small_table=True)
            return tf.reduce_sum(tf.square(tf.tensordot(rows, kernel, 1)))

        optimizer.minimize(loss, [table, kernel])

    return step


def train(table: str, kernel: str, batch: str, *, lazy: bool, graph: bool) -> dict[str, Any]:
    w = MESH.variable(inputs.TABLE, table, "table")
    k = MESH.variable(inputs.KERNEL, kernel, "kernel")
    optimizer = Adam(0.1, mesh=MESH.mesh, lazy=lazy)
    optimizer.build([w, k])
    step = model_step(optimizer, w, k)
    step = tf.function(step) if graph else step
    for ids in inputs.BATCHES:
        step(MESH.put(ids, batch))
    same = [
        optimizer.get_slot(variable, slot).layout == variable.layout
        for variable, slot in itertools.product((w, k), ("momentum", "velocity"))
    ]
    counter = optimizer.iterations.layout == MESH.layout("replicated", 0)
    return {**state_of(optimizer, table=w, kernel=k), "layouts": [*same, counter]}


def built_in() -> dict[str, Any]:
    w = MESH.variable(inputs.TABLE, "columns", "table")
    k = MESH.variable(inputs.KERNEL, "replicated", "kernel")
    optimizer = BuiltInAdam(0.1, mesh=MESH.mesh, jit_compile=False)
    optimizer.build([w, k])

    @tf.function
    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.tensordot(tf.gather(w, ids), k, 1)))
        g, h = tape.gradient(loss, [w, k])
        optimizer.apply_gradients([(tf.convert_to_tensor(g), w), (h, k)])

    step(MESH.put(inputs.BATCHES[0]))
    return {"table": MESH.read(w), "kernel": MESH.read(k)}


def options(
    layout: str, dtype: str = "float32", graph: bool = False, **arguments: Any
) -> dict[str, Any]:
    """Train on fixed dense gradients, which come in another layout than the variables."""
    w = MESH.variable(inputs.TABLE, layout, "table", dtype)
    k = MESH.variable(inputs.KERNEL, "columns", "kernel", dtype)
    optimizer = Adam(**{"learning_rate": 0.1, "mesh": MESH.mesh, **arguments})
    optimizer.exclude_from_weight_decay(var_names=["^kernel$"])

    def step(g: Any, h: Any) -> None:
        optimizer.apply_gradients([(g, w), (h, k)])

    step = tf.function(step) if graph else step
    for g, h in inputs.DENSE:
        step(MESH.put(g, dtype=dtype), MESH.put(h, "rows", dtype))
    result = state_of(optimizer, table=w, kernel=k)
    if optimizer.use_ema:
        optimizer.finalize_variable_values([w, k])
        result["final"] = MESH.read(w)
    return result


def rows(layout: str, *, graph: bool = False, **arguments: Any) -> dict[str, Any]:
    """Train on fixed sparse gradients with repeated ids."""
    w = MESH.variable(inputs.TABLE, layout, "table")
    optimizer = Adam(0.1, mesh=MESH.mesh, **arguments)
    optimizer.build([w])

    def step(ids: Any, grads: Any) -> None:
        slices = tf.IndexedSlices(grads, ids, tf.constant(inputs.TABLE.shape))
        optimizer.apply_gradients([(slices, w)])

    step = tf.function(step) if graph else step
    for ids, grads in inputs.SPARSE:
        step(MESH.put(ids, "rows"), MESH.put(grads, "both"))
    return {**state_of(optimizer, table=w), "bits": MESH.read(w)[inputs.NEVER].tolist()}


for lazy in (False, True):
    for table, kernel, batch in itertools.product(
        Mesh.specs, ("replicated", "columns"), ("replicated", "rows")
    ):
        # Gathered tables train in a graph and outside of one; the others where it is cheap.
        gathered = table in ("replicated", "columns")
        modes = {not lazy, False} if gathered else {not lazy}
        # TensorFlow's faults with layouts show in a graph.
        modes |= {True} if (table, batch) in (("columns", "rows"), ("both", "rows")) else set()
        for graph in sorted(modes):
            CASES[f"{table}-{kernel}-{batch}-lazy={lazy}-graph={graph}"] = (
                lambda table=table, kernel=kernel, batch=batch, lazy=lazy, graph=graph: train(
                    table, kernel, batch, lazy=lazy, graph=graph
                )
            )

SCHEDULES = tf_keras.optimizers.schedules
ARGUMENTS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.2},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "clip_option": {"gradients_clip_option": GradientsClipOption(global_clipnorm=0.5)},
    "weight_decay": {"weight_decay": 0.3},
    "amsgrad": {"amsgrad": True, "beta_2": 0.5},
    "adaptive_epsilon": {"adaptive_epsilon": True, "epsilon": 0.1},
    "schedule": {"learning_rate": SCHEDULES.ExponentialDecay(0.2, 1, 0.5)},
    "callables": {"learning_rate": iter([0.1, 0.2, 0.1, 0.05]).__next__, "beta_1": lambda: 0.8},
    "ema": {"use_ema": True, "ema_momentum": 0.6},
    "ema_overwrite": {"ema_option": EmaOption(0.6, overwrite_frequency=2)},
    "combined": {
        "graph": True,
        "global_clipnorm": 0.5,
        "weight_decay": 0.3,
        "amsgrad": True,
        "beta_2": 0.5,
        "adaptive_epsilon": True,
        "epsilon": 0.1,
        "ema_option": EmaOption(0.6, overwrite_frequency=2),
    },
    "float64": {"dtype": "float64"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
}
for name, arguments in ARGUMENTS.items():
    CASES[f"options-{name}"] = lambda arguments=arguments: options("both", **arguments)

ROWS: dict[str, dict[str, Any]] = {
    "plain": {"lazy": True, "graph": True},
    "clipnorm": {"lazy": True, "clipnorm": 0.5},
    "weight_decay": {"lazy": True, "weight_decay": 0.3},
    "amsgrad": {"lazy": True, "amsgrad": True, "beta_2": 0.5},
    "ema": {"lazy": True, "ema_option": {"momentum": 0.6, "overwrite_frequency": 2}},
    "dense": {"lazy": False},
}
for name, arguments in ROWS.items():
    CASES[f"rows-{name}"] = lambda arguments=arguments: rows("both", **arguments)

CASES["built_in"] = built_in


def bad_gradients() -> dict[str, Any]:
    """Offer what must be refused, and return the messages and the state afterwards."""
    w = MESH.variable(inputs.TABLE, "columns", "table")
    k = MESH.variable(inputs.KERNEL, "columns", "kernel")
    optimizer = Adam(0.1, mesh=MESH.mesh)
    optimizer.build([w, k])
    good = MESH.put(inputs.DENSE[0][1])

    def offer(gradient: Any) -> str:
        pairs = [(good, k), (gradient, w)]
        kinds = (ValueError, tf.errors.InvalidArgumentError)
        return message(kinds, lambda: optimizer.apply_gradients(pairs))

    def slices(ids: list[int], width: int = 4) -> Any:
        values = MESH.put(np.ones([len(ids), width], np.float32))
        return tf.IndexedSlices(values, MESH.put(np.array(ids)), tf.constant(inputs.TABLE.shape))

    wrong = np.where(inputs.TABLE > 0.5, np.nan, inputs.TABLE)
    messages = {
        "shape": offer(MESH.put(np.ones([1, 4], np.float32))),
        "nan": offer(MESH.put(wrong, "both")),
        "negative": offer(slices([1, -1])),
        "too_high": offer(slices([1, 8])),
        "narrow": offer(slices([1], width=2)),
    }
    unchanged = state_of(optimizer, table=w, kernel=k)
    return {"messages": messages, **unchanged}


def bad_in_graph() -> dict[str, Any]:
    """Offer NaN inside a tf.function, and train on afterwards."""
    w = MESH.variable(inputs.TABLE, "columns", "table")
    optimizer = Adam(0.1, mesh=MESH.mesh)
    optimizer.build([w])
    step = tf.function(lambda g: optimizer.apply_gradients([(g, w)]))
    step(MESH.put(np.full(inputs.TABLE.shape, np.nan, np.float32)))
    kinds = (tf.errors.InvalidArgumentError, tf.errors.CancelledError)
    told = bool(message(kinds, lambda: MESH.read(w)))
    before = MESH.read(w)
    step(MESH.put(inputs.DENSE[0][0]))
    return {"told": told, "before": before, **state_of(optimizer, table=w)}


CASES["bad_gradients"] = bad_gradients
CASES["bad_in_graph"] = bad_in_graph

if __name__ == "__main__":
    main(CASES)
