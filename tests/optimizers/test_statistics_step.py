"""Observing a step: right numbers, and the very step that it would be without an observer."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import (
    LAMB,
    AdamMultilr,
    LazyAdam,
    OptimizerArgumentError,
    StateMismatchError,
    StepObserver,
)

# Tests are no package: step_cases.py lies beside this file.
sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("step_cases")
sys.path.pop(0)

PATHS = ["items/embeddings", "dense/kernel", "bias"]
MAKERS: dict[str, Any] = {
    "LazyAdam": lambda: LazyAdam(0.1),
    "LazyAdam-options": lambda: LazyAdam(
        0.1, clipnorm=1.0, weight_decay=0.01, idle_decay=True, use_ema=True
    ),
    "LAMB": lambda: LAMB(0.1, weight_decay_rate=0.01),
    "LAMB-rows": lambda: LAMB(0.1, row_trust_ratio=True, trust_ratio_clip=(0.5, 1.5)),
    "AdamMultilr": lambda: AdamMultilr(0.1, pattern_lrs=[{"patterns": ["dense"], "lr": 0.01}]),
    "AdamMultilr-lazy": lambda: AdamMultilr(0.1, lazy=True),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True, global_clipnorm=1.0),
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.1, weight_decay=0.01),
    "accumulating": lambda: LazyAdam(0.1, gradient_accumulation_steps=2),
    "accumulating-LAMB": lambda: LAMB(0.1, gradient_accumulation_steps=2),
    "accumulating-Adam": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
}


class Observed:
    """An optimizer on three variables, and an observer in a tf.function."""

    def __init__(self, make: Any, *, dtype: str = "float32", **options: Any) -> None:
        self.variables = cases.new_variables(dtype)
        self.optimizer = make()
        self.optimizer.build(self.variables)
        self.observer = StepObserver(self.optimizer, **options)
        self.function = tf.function(lambda *grads: self.observer.apply(grads, self.variables))

    def step(self, grads: list[Any]) -> dict[str, float]:
        values = self.function(*grads)
        assert values.dtype == tf.float32 and values.shape == (len(self.observer.names),)
        return dict(zip(self.observer.names, values.numpy().tolist(), strict=True))

    def now(self) -> Any:
        return cases.everything(self.optimizer, self.variables)


def plain_steps(make: Any, steps: list[list[Any]]) -> Any:
    variables, optimizer = cases.new_variables(), make()
    optimizer.build(variables)

    @tf.function
    def step(*grads: Any) -> None:
        optimizer.apply(grads, variables)

    for grads in steps:
        step(*grads)
    return cases.everything(optimizer, variables)


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_observed_step_is_the_plain_one_to_the_bit(make: Any, sparse: bool) -> None:
    steps = [cases.gradients(number, sparse=sparse) for number in range(4)]
    observed = Observed(make, per_variable=True)
    for grads in steps:
        observed.step(grads)
    got, expected = observed.now(), plain_steps(make, steps)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("name", [name for name in MAKERS if "accumulating" not in name])
def test_norms_are_those_of_copies_taken_before_and_after(name: str) -> None:
    observed = Observed(MAKERS[name], per_variable=True)
    for number in range(3):
        grads, before = cases.gradients(number), observed.now()
        got = observed.step(grads)
        after = observed.now()
        expected = cases.norms(grads, PATHS, before, after)
        for path, gradient in zip(PATHS, grads, strict=True):
            single = cases.norms([gradient], [path], before, after)["opt/global/update_ratio"]
            expected[f"opt/update_ratio/{path.replace('/', '.')}"] = single
        for metric, value in expected.items():
            assert got[metric] == pytest.approx(value, rel=2e-5), metric
        distinct = len(np.unique(grads[0].indices))
        assert distinct < cases.BATCH
        assert got["opt/sparse/touched_rows"] == distinct
        assert got["opt/sparse/touched_frac"] == pytest.approx(distinct / cases.ROWS)
        assert got["opt/touched_frac/items.embeddings"] == pytest.approx(distinct / cases.ROWS)


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("LazyAdam", {"m": "momentum", "v": "velocity"}),
        ("LAMB-rows", {"m": "momentum", "v": "velocity"}),
        ("Adam", {"m": "momentum", "v": "velocity", "velocity_hat": "velocity_hat"}),
        ("SGD", {"m": "momentum"}),
        ("Adagrad", {"accumulator": "accumulator"}),
        ("RMSprop", {"m": "momentum", "v": "velocity"}),
        ("Ftrl", {"accumulator": "accumulator", "linear": "linear"}),
    ],
)
def test_slots_of_touched_rows_are_shown_by_their_names(name: str, slots: dict[str, str]) -> None:
    observed = Observed(MAKERS[name])
    observed.step(cases.gradients(0))
    grads = cases.gradients(1)
    got, after = observed.step(grads), observed.now()
    rows = np.unique(grads[0].indices)
    expected = {}
    for short, slot in slots.items():
        key = next(k for k in after if k.startswith("items") and k[17:] == slot)
        values = after[key][rows].astype(np.float64)
        expected[f"opt/touched_{short}/rms"] = np.sqrt(np.mean(values**2))
        largest = "max" if short == "v" else "absmax"
        expected[f"opt/touched_{short}/{largest}"] = np.max(np.abs(values))
    assert {metric for metric in got if metric.startswith("opt/touched_")} == set(expected)
    for metric, value in expected.items():
        assert got[metric] == pytest.approx(value, rel=2e-5), metric


def test_without_a_sparse_gradient_nothing_is_said_of_rows() -> None:
    got = Observed(MAKERS["LazyAdam"], per_variable=True).step(cases.gradients(0, sparse=False))
    assert {name.split("/")[1] for name in got} == {"global", "update_ratio"}


def test_names_of_variables_choose_whose_metrics_are_shown() -> None:
    observed = Observed(MAKERS["LazyAdam"], per_variable=["bias"])
    got = observed.step(cases.gradients(0))
    assert [name for name in got if "bias" in name or "embeddings" in name] == [
        "opt/update_ratio/bias"
    ]


@pytest.mark.parametrize("maker", [LazyAdam, keras.optimizers.Adam])
def test_the_gradient_is_measured_unclipped_and_unscaled(maker: Any) -> None:
    options = [{"clipnorm": 1e-3}, {"global_clipnorm": 1e-3}, {"clipvalue": 1e-3}]
    for option in [*options, {"loss_scale_factor": 8.0}]:
        grads = cases.gradients(0, sparse=maker is LazyAdam)  # Keras cannot unscale sparse ones
        expected = cases.joint([cases.summed(gradient)[0] for gradient in grads])
        got = Observed(lambda option=option: maker(0.1, **option)).step(grads)
        scale = option.get("loss_scale_factor", 1.0)
        assert got["opt/global/grad_norm"] == pytest.approx(expected / scale, rel=1e-5)


@pytest.mark.parametrize("maker", [LazyAdam, keras.optimizers.Adam])
def test_a_step_that_only_accumulates_changes_nothing(maker: Any) -> None:
    observed = Observed(lambda: maker(0.1, gradient_accumulation_steps=2))
    updates = [observed.step(cases.gradients(0))["opt/global/update_norm"] for _ in range(4)]
    assert updates[0] == updates[2] == 0.0
    assert updates[1] > 0.0 and updates[3] > 0.0


def test_rows_of_earlier_calls_are_seen_to_move_when_their_sum_is_applied() -> None:
    observed = Observed(lambda: LazyAdam(0.1, gradient_accumulation_steps=3))
    before = observed.now()
    reports = [observed.step(cases.gradients(number)) for number in range(3)]
    after = observed.now()
    moved = cases.joint([after[path] - before[path].astype(np.float64) for path in PATHS])
    assert reports[-1]["opt/global/update_norm"] == pytest.approx(moved, rel=1e-5)
    rows = np.unique(np.concatenate([cases.gradients(n)[0].indices for n in range(3)]))
    assert reports[-1]["opt/sparse/touched_rows"] == len(rows)


def test_rows_that_wait_are_seen_to_move_though_the_last_call_has_no_gradient_of_them() -> None:
    observed = Observed(lambda: LazyAdam(0.1, gradient_accumulation_steps=2), per_variable=True)
    table, kernel, bias = cases.gradients(0)
    before = observed.now()
    observed.step([table, kernel, bias])
    with pytest.warns(UserWarning, match="No gradient reached items/embeddings, dense/kernel"):
        values = observed.observer.apply([None, None, bias], observed.variables)
    got = dict(zip(observed.observer.names, values.numpy(), strict=True))
    after = observed.now()
    moved = cases.joint([after[path] - before[path].astype(np.float64) for path in PATHS])
    assert got["opt/global/update_norm"] == pytest.approx(moved, rel=1e-5)
    assert got["opt/sparse/touched_rows"] == len(np.unique(table.indices))
    assert got["opt/update_ratio/dense.kernel"] > 0


@pytest.mark.parametrize("bad", [-1, cases.ROWS])
def test_a_row_that_is_not_there_is_named_as_without_observing(bad: int) -> None:
    observed = Observed(MAKERS["LazyAdam"])
    grads = [cases.of_rows(tf.ones([1, cases.WIDTH]), [bad]), *cases.gradients(0)[1:]]
    with pytest.raises(tf.errors.InvalidArgumentError, match="row ids must lie in") as expected:
        observed.optimizer.apply(grads, observed.variables)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        observed.observer.apply(grads, observed.variables)
    assert caught.value.message == expected.value.message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("maker", [LazyAdam, keras.optimizers.SGD])
def test_half_precision_is_summed_in_float32(maker: Any, dtype: str) -> None:
    observed = Observed(lambda: maker(0.1), dtype=dtype)
    grads = [
        cases.of_rows(tf.fill([12, cases.WIDTH], tf.cast(300.0, dtype)), tf.range(12)),
        *cases.gradients(0, dtype=dtype)[1:],
    ]
    before = observed.now()
    got = observed.step(grads)  # 36 squares of 300 are above the largest float16
    for metric, value in cases.norms(grads, PATHS, before, observed.now()).items():
        assert got[metric] == pytest.approx(value, rel=1e-5), metric


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("maker", [LazyAdam, keras.optimizers.SGD])
def test_elements_that_are_not_finite_are_counted(maker: Any, bad: float) -> None:
    options = {"check_finite": False} if maker is LazyAdam else {}
    observed = Observed(lambda: maker(0.1, **options))
    grads = cases.gradients(0)
    assert observed.step(grads)["opt/global/nonfinite"] == 0
    values = grads[0].values.numpy()
    ids = np.arange(cases.BATCH)
    values[0, 0] = values[3, 1] = bad
    grads[0] = cases.of_rows(values, ids)
    got = observed.step([*grads[:2], tf.constant([bad, 0, 0, 0])])
    assert got["opt/global/nonfinite"] == 3
    assert not np.isfinite(got["opt/global/grad_norm"])


def test_an_optimizer_that_refuses_nan_refuses_it_when_observed() -> None:
    observed = Observed(MAKERS["LazyAdam"])
    before = observed.now()
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be finite"):
        observed.step([*cases.gradients(0)[:2], tf.constant([float("nan"), 0, 0, 0])])
    for name, array in observed.now().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_variable_without_a_gradient_is_left_out() -> None:
    observed = Observed(MAKERS["LazyAdam"], per_variable=True)
    grads = cases.gradients(0)
    with pytest.warns(UserWarning, match="No gradient reached dense/kernel"):
        values = observed.observer.apply([grads[0], None, grads[2]], observed.variables)
    got = dict(zip(observed.observer.names, values.numpy(), strict=True))
    assert "opt/update_ratio/dense.kernel" not in got and "opt/update_ratio/bias" in got
    expected = cases.joint([cases.summed(gradient)[0] for gradient in (grads[0], grads[2])])
    assert got["opt/global/grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_rows_has_numbers() -> None:
    observed = Observed(MAKERS["LAMB-rows"], per_variable=True)
    none = cases.of_rows(tf.zeros([0, cases.WIDTH]), tf.zeros([0], tf.int32))
    got = observed.step([none, *cases.gradients(0)[1:]])
    assert got["opt/sparse/touched_rows"] == 0
    assert got["opt/touched_m/rms"] == got["opt/touched_m/absmax"] == 0
    assert got["opt/trust_ratio/items.embeddings"] == 1
    assert np.all(np.isfinite(list(got.values())))


def test_a_loss_scale_optimizer_is_seen_through() -> None:
    observed = Observed(
        lambda: keras.optimizers.LossScaleOptimizer(LazyAdam(0.1), initial_scale=16.0)
    )
    grads, before = cases.gradients(0), observed.now()
    got = observed.step(grads)
    expected = cases.norms(grads, PATHS, before, observed.now())
    expected["opt/global/grad_norm"] /= 16
    for metric, value in expected.items():
        assert got[metric] == pytest.approx(value, rel=1e-5), metric
    assert got["opt/touched_m/rms"] > 0


@pytest.mark.parametrize("name", ["LazyAdam", "LAMB-rows", "LAMB", "SGD"])
def test_xla_compiles_an_observed_step(name: str) -> None:
    graph, compiled = Observed(MAKERS[name]), Observed(MAKERS[name])
    compiled.function = tf.function(
        lambda *grads: compiled.observer.apply(grads, compiled.variables), jit_compile=True
    )
    for number in range(2):
        expected = graph.step(cases.gradients(number))
        got = compiled.step(cases.gradients(number))
        assert got.keys() == expected.keys()
        for metric, value in expected.items():
            assert got[metric] == pytest.approx(value, rel=1e-4), metric


def test_nothing_is_named_before_the_first_trace() -> None:
    assert Observed(MAKERS["LazyAdam"]).observer.names == ()


def test_an_optimizer_that_is_not_built_cannot_be_observed() -> None:
    with pytest.raises(StateMismatchError, match="must be built"):
        StepObserver(LazyAdam())


def test_a_variable_that_the_optimizer_does_not_know_is_refused_by_name() -> None:
    observed = Observed(MAKERS["SGD"])
    other = keras.Variable(np.ones(4), name="stranger")
    with pytest.raises(OptimizerArgumentError, match="Got stranger"):
        observed.observer.apply([tf.ones(4)], [other])
