"""On a mesh clipping, decay, averages, schedules and sparse gradients give NumPy's numbers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowstep.optimizers import reference

Array = np.ndarray
TOLERANCE = {"rtol": 0, "atol": 1e-6}

sys.path.insert(0, str(Path(__file__).parent))
worker = importlib.import_module("mesh_worker")
inputs = importlib.import_module("mesh_inputs")
sys.path.pop(0)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return worker.results_of("mesh_number_cases.py")


def adam_with(
    w: Array, slots: dict[str, Array], g: Array, t: int, **o: Any
) -> tuple[Array, dict[str, Array]]:
    """Return weights and slots after a step with the options that reference.adam has not."""
    beta_1, beta_2 = o.get("beta_1", 0.9), o.get("beta_2", 0.999)
    m = beta_1 * slots["momentum"] + (1 - beta_1) * g
    v = beta_2 * slots["velocity"] + (1 - beta_2) * g**2
    slots = {**slots, "momentum": m, "velocity": v}
    if o.get("amsgrad"):
        v = slots["velocity_hat"] = np.maximum(slots.get("velocity_hat", 0.0), v)
    epsilon = o.get("epsilon", 1e-7)
    if o.get("adaptive_epsilon"):
        epsilon = epsilon * np.sqrt(1 - beta_2**t)
    rate = o.get("rates", [0.1] * 3)[t - 1]
    step_size = rate * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    w = w - rate * o.get("weight_decay", 0.0) * w - step_size * m / (np.sqrt(v) + epsilon)
    return w, slots


def clip(gradients: list[Array], o: dict[str, Any]) -> list[Array]:
    norms = [np.sqrt(np.sum(g**2)) for g in gradients]
    if "clipnorm" in o:
        return [g * min(1, o["clipnorm"] / n) for g, n in zip(gradients, norms, strict=True)]
    if "global_clipnorm" in o:
        joint = np.sqrt(np.sum(np.square(norms)))
        return [g * min(1, o["global_clipnorm"] / joint) for g in gradients]
    if "clipvalue" in o:
        return [np.clip(g, -o["clipvalue"], o["clipvalue"]) for g in gradients]
    return gradients


def new_slots(w: Array) -> dict[str, Array]:
    return {"momentum": np.zeros_like(w), "velocity": np.zeros_like(w), "average": w.copy()}


def trained_dense(**o: Any) -> tuple[Array, Array, dict[str, Array]]:
    w, k = inputs.TABLE.astype(np.float64), inputs.KERNEL.astype(np.float64)
    slots, others = new_slots(w), new_slots(k)
    without_decay = {name: value for name, value in o.items() if name != "weight_decay"}
    for t, pair in enumerate(inputs.DENSE, start=1):
        g, h = clip([x.astype(np.float64) for x in pair], o)
        w, slots = adam_with(w, slots, g, t, **o)
        k, others = adam_with(k, others, h, t, **without_decay)
        for name, weights, own in (("w", w, slots), ("k", k, others)):
            momentum = o.get("ema", 0.0)
            own["average"] = momentum * own["average"] + (1 - momentum) * weights
            if t % o.get("overwrite", 99) == 0:
                w, k = (own["average"], k) if name == "w" else (w, own["average"])
    return w, k, slots


OPTIONS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.2},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "clip_option": {"global_clipnorm": 0.5},
    "weight_decay": {"weight_decay": 0.3},
    "amsgrad": {"amsgrad": True, "beta_2": 0.5},
    "adaptive_epsilon": {"adaptive_epsilon": True, "epsilon": 0.1},
    "schedule": {"rates": [0.2, 0.1, 0.05]},
    # The first value is asked for by the constructor.
    "callables": {"rates": [0.2, 0.1, 0.05], "beta_1": 0.8},
    "ema": {"ema": 0.6},
    "ema_overwrite": {"ema": 0.6, "overwrite": 2},
    "combined": {
        "global_clipnorm": 0.5,
        "weight_decay": 0.3,
        "amsgrad": True,
        "beta_2": 0.5,
        "adaptive_epsilon": True,
        "epsilon": 0.1,
        "ema": 0.6,
        "overwrite": 2,
    },
    "float64": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_works_on_a_mesh(results: dict[str, Any], name: str) -> None:
    result = results[f"options-{name}"]
    w, k, slots = trained_dense(**OPTIONS[name])
    np.testing.assert_allclose(result["table"], w, **TOLERANCE)
    np.testing.assert_allclose(result["kernel"], k, **TOLERANCE)
    for slot in {"velocity_hat", "average"} & {key.partition("/")[2] for key in result}:
        np.testing.assert_allclose(result[f"table/{slot}"], slots[slot], **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "float64"])
def test_every_option_changes_the_result(name: str) -> None:
    with_option, without = trained_dense(**OPTIONS[name]), trained_dense()
    # Averaging alone leaves the weights as they are until the end.
    index = "average" if name == "ema" else None
    one, other = (x[2][index] if index else x[0] for x in (with_option, without))
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("name", ["ema", "ema_overwrite", "combined"])
def test_finalizing_sets_the_weights_to_their_average(results: dict[str, Any], name: str) -> None:
    result = results[f"options-{name}"]
    np.testing.assert_array_equal(result["final"], result["table/average"])
    assert np.abs(np.array(result["final"]) - inputs.TABLE).max() > 0.01


@pytest.mark.parametrize(("dtype", "spacing"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_half_precision_weights_move_and_their_state_is_float32(
    results: dict[str, Any], dtype: str, spacing: float
) -> None:
    result = results[f"options-{dtype}"]
    w, _, slots = trained_dense()
    np.testing.assert_allclose(result["table"], w, atol=3 * spacing)
    np.testing.assert_allclose(result["table/momentum"], slots["momentum"], atol=spacing)
    stored = np.array(result["table/velocity"])
    np.testing.assert_allclose(stored, stored.astype(np.float32), rtol=0)
    assert np.abs(stored - stored.astype(np.float16)).max() > 0


# Rows ------------------------------------------------------------------------------------


def trained_rows(**o: Any) -> tuple[Array, dict[str, Array]]:
    w = inputs.TABLE.astype(np.float64)
    slots = {**new_slots(w), "velocity_hat": np.zeros_like(w)}
    for t, (ids, row_grads) in enumerate(inputs.SPARSE, start=1):
        (g,) = clip([reference.dense_gradient(ids, row_grads, w.shape)], o)
        new_w, new = adam_with(w, slots, g, t, **o)
        rows = np.unique(ids) if o.get("lazy", True) else np.arange(len(w))
        w, slots = w.copy(), {name: value.copy() for name, value in slots.items()}
        w[rows] = new_w[rows]
        for name in set(slots) - {"average"}:
            slots[name][rows] = new[name][rows]
        momentum = o.get("ema", 0.0)
        slots["average"] = momentum * slots["average"] + (1 - momentum) * w
        w = slots["average"] if t % o.get("overwrite", 99) == 0 else w
    return w, slots


ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.5},
    "weight_decay": {"weight_decay": 0.3},
    "amsgrad": {"amsgrad": True, "beta_2": 0.5},
    "ema": {"ema": 0.6, "overwrite": 2},
    "dense": {"lazy": False},
}


@pytest.mark.parametrize("name", ROWS)
def test_repeated_rows_are_summed_before_clipping_and_squaring(
    results: dict[str, Any], name: str
) -> None:
    w, slots = trained_rows(**ROWS[name])
    np.testing.assert_allclose(results[f"rows-{name}"]["table"], w, **TOLERANCE)
    np.testing.assert_allclose(
        results[f"rows-{name}"]["table/velocity"], slots["velocity"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", [name for name in ROWS if name != "dense"])
def test_rows_that_no_batch_names_keep_their_bits(results: dict[str, Any], name: str) -> None:
    kept = inputs.TABLE[inputs.NEVER].astype(np.float64)
    np.testing.assert_array_equal(results[f"rows-{name}"]["bits"], kept)


# Bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        ("shape", "table: a gradient must have the variable's shape. Got (1, 4) instead of (8, 4)"),
        ("narrow", "table: a gradient must have the variable's shape. Got (1, 2) instead of"),
        ("nan", "table: a gradient must be finite"),
        ("negative", "table: row ids must lie in [0, number of rows)"),
        ("too_high", "table: row ids must lie in [0, number of rows)"),
    ],
)
def test_a_bad_gradient_is_refused_by_name(
    results: dict[str, Any], gradient: str, words: str
) -> None:
    assert words in results["bad_gradients"]["messages"][gradient]


def test_a_refused_step_changes_nothing(results: dict[str, Any]) -> None:
    after = results["bad_gradients"]
    np.testing.assert_array_equal(after["table"], inputs.TABLE.astype(np.float64))
    np.testing.assert_array_equal(after["kernel"], inputs.KERNEL.astype(np.float64))
    assert after["iterations"] == 0
    assert not np.any(after["table/momentum"]) and not np.any(after["kernel/momentum"])


def test_nan_inside_a_tf_function_is_told_and_changes_nothing(results: dict[str, Any]) -> None:
    result = results["bad_in_graph"]
    assert result["told"]
    np.testing.assert_array_equal(result["before"], inputs.TABLE.astype(np.float64))
    expected = reference.adam(
        reference.new_state(inputs.TABLE), inputs.DENSE[0][0], 1, learning_rate=0.1
    )
    np.testing.assert_allclose(result["table"], expected[0], **TOLERANCE)
    assert result["iterations"] == 1
