"""A table and a kernel, gradients for them, and three ways to run an optimizer on both.

Rows of the table are repeated in a batch, absent, back after some steps, and never there at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers import LAMB, AdamMultilr, LazyAdam, reference_options
from rowstep.optimizers.reference_options import Call, Settings, VariableState

Array = np.ndarray
Optimizer = Any

TABLE, KERNEL = "items/embeddings", "kernel"
SHAPES = {TABLE: (7, 3), KERNEL: (2, 3)}
ROW_IDS = [[1, 1, 3, 5], [3, 0, 3, 3], [5, 5, 0, 0], [1, 0, 5, 1], [3, 3, 2, 3], [1, 5, 1, 2]]
"""By step. Row 4 and row 6 are never there; row 1 misses two steps, then one."""
ABSENT_ROWS = [4, 6]
RATE = 0.0625
"""Exact in float32, the dtype that Keras holds learning rates in."""

EMA = {"use_ema": True, "ema_momentum": 0.7}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "visits": ("lazy_adam", {"bias_correction": "visits"}),
    "idle_decay": ("lazy_adam", {"idle_decay": True}),
    "row_velocity": ("lazy_adam", {"row_velocity": True}),
    "weight_decay": ("lazy_adam", {"weight_decay": 0.3}),
    "ema": ("lazy_adam", EMA),
    "ema_overwrite": ("lazy_adam", {**EMA, "ema_overwrite_frequency": 4}),
    "accumulation": ("lazy_adam", {"gradient_accumulation_steps": 3}),
    "decay": ("lazy_adam", {"decay": 0.5}),
    "loss_scale": ("lazy_adam", {"loss_scale_factor": 1024.0}),
    "clipvalue_and_clipnorm": ("lazy_adam", {"clipvalue": 0.3, "clipnorm": 0.5}),
    "global_clipnorm": ("lazy_adam", {"global_clipnorm": 0.5}),
    "clip_before_sum": ("lazy_adam", {"clipnorm": 0.5, "clip_before_sum": True}),
    "all_lazy": (
        "lazy_adam",
        {
            **EMA,
            "bias_correction": "visits",
            "idle_decay": True,
            "row_velocity": True,
            "weight_decay": 0.3,
            "gradient_accumulation_steps": 2,
        },
    ),
    "lazy_amsgrad": ("adam_multilr", {"amsgrad": True, "beta_2": 0.5, "lazy": True, **EMA}),
    "dense_amsgrad": ("adam_multilr", {"amsgrad": True, "beta_2": 0.5, "weight_decay": 0.3, **EMA}),
    "lamb_by_row": (
        "lamb",
        {"row_trust_ratio": True, "weight_decay_rate": 0.1, "trust_ratio_clip": (0.5, 1.5), **EMA},
    ),
    "lamb_dense": (
        "lamb",
        {"row_velocity": True, "trust_ratio_clip": (0.5, 1.5), "gradient_accumulation_steps": 2},
    ),
}
"""Optimizers with options, by what is special about them."""
LAZY_CASES = [case for case in CASES if case not in ("dense_amsgrad", "lamb_dense")]

MAKERS = {"lazy_adam": LazyAdam, "lamb": LAMB, "adam_multilr": AdamMultilr}
WRAPS: dict[str, Callable[..., Any]] = {
    "eager": lambda function: function,
    "graph": tf.function,
    "xla": lambda function: tf.function(function, jit_compile=True),
}


def weights() -> dict[str, Array]:
    """Return initial weights that float16 and bfloat16 hold as they are."""
    rng = np.random.default_rng(3)
    return {name: np.round(rng.normal(size=shape) * 16) / 16 for name, shape in SHAPES.items()}


def calls(num_calls: int = 6, dense: bool = False) -> list[Call]:
    """Return gradients for each call: sparse for the table unless dense, dense for the kernel."""
    rng = np.random.default_rng(7)
    result: list[Call] = []
    for i in range(num_calls):
        row_ids = np.array(ROW_IDS[i % len(ROW_IDS)])
        row_grads = rng.normal(size=(len(row_ids), 3)).astype(np.float32) * 0.5
        kernel = rng.normal(size=SHAPES[KERNEL]).astype(np.float32)
        table: Any = (row_ids, row_grads)
        if dense:
            table = reference_options.dense_gradient(*table, SHAPES[TABLE]).astype(np.float32)
        result.append({TABLE: table, KERNEL: kernel})
    return result


def gradient(value: Any, shape: Sequence[int], dtype: str = "float32") -> Any:
    """Return a gradient of the reference as the tensor or tf.IndexedSlices that it stands for."""
    if not isinstance(value, tuple):
        return tf.constant(value, dtype)
    row_ids, row_grads = value
    row_ids = tf.constant(np.asarray(row_ids, np.int64))
    return tf.IndexedSlices(tf.constant(row_grads, dtype), row_ids, tf.constant(shape))


def variables(
    start: Mapping[str, Array] | None = None, dtype: str = "float32"
) -> dict[str, keras.Variable]:
    """Return Keras variables, by default the table and the kernel."""
    start = weights() if start is None else start
    made = {}
    for name, values in start.items():
        *scope, last = name.split("/")
        with keras.name_scope("/".join(scope) or "model"):
            made[name] = keras.Variable(values, dtype=dtype, name=last)
    return made


def make(maker: str, **options: Any) -> Optimizer:
    return MAKERS[maker](**{"learning_rate": RATE, **options})


def run(
    optimizer: Optimizer,
    trained: Mapping[str, keras.Variable],
    gradients: Sequence[Call],
    wrap: str = "eager",
) -> None:
    """Apply the gradients of each call to the variables."""
    if not optimizer.built:
        optimizer.build(list(trained.values()))

    def step(grads: dict[str, Any]) -> None:
        optimizer.apply([grads[name] for name in grads], [trained[name] for name in grads])

    step = WRAPS[wrap](step)
    for call in gradients:
        step({n: gradient(g, trained[n].shape, trained[n].dtype) for n, g in call.items()})


def settings(maker: str, **options: Any) -> Settings:
    """Return the reference's settings for the arguments of an optimizer."""
    base = {
        "lazy_adam": Settings(learning_rate=RATE),
        "adam_multilr": Settings(learning_rate=RATE, lazy=False),
        "lamb": Settings(learning_rate=RATE, formula="lamb", epsilon=1e-6),
    }[maker]
    return dataclasses.replace(base, **options)


def expected(maker: str, gradients: Sequence[Call], **options: Any) -> dict[str, VariableState]:
    """Return what the reference makes of the weights of this module."""
    return reference_options.train(weights(), gradients, settings(maker, **options), (TABLE,))


def assert_follows(
    optimizer: Optimizer,
    trained: Mapping[str, keras.Variable],
    states: Mapping[str, VariableState],
    tolerance: float = 2e-6,
) -> None:
    """Compare weights, all slots that the reference knows, and the average of all rows.

    That takes the average into the weights, so it is the end of the training.
    """
    for name, variable in trained.items():
        close(np.array(variable), states[name].w, tolerance, f"weights of {name}")
        for slot in optimizer.get_slot_names():
            if slot in _SLOTS:
                got = np.array(optimizer.get_slot(variable, slot))
                wanted = getattr(states[name], _SLOTS[slot]).reshape(got.shape)
                close(got, wanted, tolerance, f"{slot} of {name}")
    if optimizer.use_ema:
        optimizer.finalize_variable_values(list(trained.values()))
        for name, variable in trained.items():
            close(np.array(variable), states[name].average, tolerance, f"average of {name}")


_SLOTS = {
    "momentum": "m",
    "velocity": "v",
    "velocity_hat": "v_hat",
    "last_step": "last_step",
    "num_visits": "num_visits",
}


def close(got: Array, wanted: Array, tolerance: float, what: str = "") -> None:
    np.testing.assert_allclose(
        np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance, err_msg=what
    )
