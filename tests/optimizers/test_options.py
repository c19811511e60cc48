"""Every option does what its definition says: the NumPy float64 reference, row by row."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("option_cases")
sys.path.pop(0)


def trained(case: str, dense: bool = False, wrap: str = "eager") -> tuple[Any, Any]:
    maker, options = cases.CASES[case]
    optimizer, variables = cases.make(maker, **options), cases.variables()
    cases.run(optimizer, variables, cases.calls(dense=dense), wrap)
    return optimizer, variables


@pytest.mark.parametrize("wrap", cases.WRAPS)
@pytest.mark.parametrize("case", cases.CASES)
def test_sparse_gradients_follow_the_reference(case: str, wrap: str) -> None:
    maker, options = cases.CASES[case]
    expected = cases.expected(maker, cases.calls(), **options)
    cases.assert_follows(*trained(case, wrap=wrap), expected)


@pytest.mark.parametrize("case", cases.CASES)
def test_dense_gradients_follow_the_reference(case: str) -> None:
    maker, options = cases.CASES[case]
    expected = cases.expected(maker, cases.calls(dense=True), **options)
    cases.assert_follows(*trained(case, dense=True), expected)


@pytest.mark.parametrize("wrap", ["graph", "xla"])
def test_dense_gradients_follow_it_in_graphs_too(wrap: str) -> None:
    maker, options = cases.CASES["all_lazy"]
    expected = cases.expected(maker, cases.calls(dense=True), **options)
    cases.assert_follows(*trained("all_lazy", dense=True, wrap=wrap), expected)


@pytest.mark.parametrize("case", cases.CASES)
def test_leaving_an_option_out_would_be_noticed(case: str) -> None:
    maker, options = cases.CASES[case]
    full = cases.expected(maker, cases.calls(), **options)[cases.TABLE]
    for option in options.keys() - {"loss_scale_factor"}:
        fewer = {name: value for name, value in options.items() if name != option}
        other = cases.expected(maker, cases.calls(), **fewer)[cases.TABLE]
        # The moving average is not in the weights before it is asked for.
        what = "average" if option in ("use_ema", "ema_momentum") else "w"
        moved = np.abs(getattr(full, what) - getattr(other, what)).max()
        assert moved > 1e-3, f"these gradients do not show {option}"


@pytest.mark.parametrize("case", cases.LAZY_CASES)
def test_rows_that_are_absent_keep_their_bits_under_every_option(case: str) -> None:
    maker, options = cases.CASES[case]
    options = {k: v for k, v in options.items() if k != "ema_overwrite_frequency"}
    optimizer, variables = cases.make(maker, **options), cases.variables()
    table = variables[cases.TABLE]
    optimizer.build(list(variables.values()))
    before = slots_of(optimizer, table)
    cases.run(optimizer, variables, cases.calls())
    after = slots_of(optimizer, table)
    for slot in before:
        np.testing.assert_array_equal(
            after[slot][cases.ABSENT_ROWS], before[slot][cases.ABSENT_ROWS], err_msg=slot
        )
    assert np.all(after["weights"][[0, 1, 2, 3, 5]] != before["weights"][[0, 1, 2, 3, 5]])


def slots_of(optimizer: Any, table: Any) -> dict[str, np.ndarray]:
    slots = {s: np.array(optimizer.get_slot(table, s)) for s in optimizer.get_slot_names()}
    return {"weights": np.array(table), **slots}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", cases.CASES)
def test_a_run_that_is_resumed_ends_in_the_same_bits(case: str, dtype: str) -> None:
    maker, options = cases.CASES[case]
    options = {**options, "state_dtype": "bfloat16"} if dtype == "bfloat16" else options
    gradients = cases.calls(5)
    whole, variables = cases.make(maker, **options), cases.variables(dtype=dtype)
    cases.run(whole, variables, gradients)

    first, halfway = cases.make(maker, **options), cases.variables(dtype=dtype)
    cases.run(first, halfway, gradients[:3])
    second = cases.make(maker, **options)
    resumed = cases.variables({n: np.array(v) for n, v in halfway.items()}, dtype=dtype)
    second.build(list(resumed.values()))
    second.load_named_state(first.named_state())
    cases.run(second, resumed, gradients[3:])

    for name in variables:
        np.testing.assert_array_equal(np.array(resumed[name]), np.array(variables[name]))
    expected = whole.named_state()
    for key, array in second.named_state().items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)


LAZY_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "bias_correction": st.just("visits"),
        "idle_decay": st.just(True),
        "row_velocity": st.just(True),
        "weight_decay": st.sampled_from([0.01, 0.5]),
        "ema": st.sampled_from([{"ema_momentum": 0.5}, {"ema_overwrite_frequency": 2}]),
        "gradient_accumulation_steps": st.sampled_from([2, 3]),
        "decay": st.just(0.5),
        "clipvalue": st.just(0.3),
        "clip_before_sum": st.just(True),
        "norm": st.sampled_from([{"clipnorm": 0.4}, {"global_clipnorm": 0.4}]),
    },
)
ROW_IDS = st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=6, max_size=6)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(options=LAZY_OPTIONS, row_ids=ROW_IDS)
def test_any_combination_of_options_follows_the_reference(
    options: dict[str, Any], row_ids: list[list[int]]
) -> None:
    ema = {"use_ema": True, **options.pop("ema")} if "ema" in options else {}
    options |= ema | options.pop("norm", {})
    gradients = cases.calls()
    rng = np.random.default_rng(len(list(itertools.chain(*row_ids))))
    for call, ids in zip(gradients, row_ids, strict=True):
        call[cases.TABLE] = (np.array(ids, int), rng.normal(size=(len(ids), 3)) * 0.5)
    optimizer, variables = cases.make("lazy_adam", **options), cases.variables()
    cases.run(optimizer, variables, gradients)
    expected = cases.expected("lazy_adam", gradients, **options)
    cases.assert_follows(optimizer, variables, expected, tolerance=5e-6)


@pytest.mark.parametrize("maker", cases.MAKERS)
def test_variables_may_lack_a_gradient_in_some_calls(maker: str) -> None:
    gradients = cases.calls()
    del gradients[2][cases.TABLE], gradients[4][cases.KERNEL]
    optimizer, variables = cases.make(maker, **cases.EMA), cases.variables()
    cases.run(optimizer, variables, gradients)
    cases.assert_follows(optimizer, variables, cases.expected(maker, gradients, **cases.EMA))


def test_dense_and_sparse_gradients_may_take_turns() -> None:
    maker, options = cases.CASES["all_lazy"]
    for dense_calls in ((0,), (1,), (0, 3, 4)):
        gradients = cases.calls()
        for i in dense_calls:
            gradients[i] = cases.calls(dense=True)[i]
        optimizer, variables = cases.make(maker, **options), cases.variables()
        cases.run(optimizer, variables, gradients)
        cases.assert_follows(optimizer, variables, cases.expected(maker, gradients, **options))


@pytest.mark.parametrize("case", ["all_lazy", "lamb_by_row", "lazy_amsgrad"])
def test_float64_variables_are_right_to_float64(case: str) -> None:
    maker, options = cases.CASES[case]
    optimizer, variables = cases.make(maker, **options), cases.variables(dtype="float64")
    cases.run(optimizer, variables, cases.calls())
    expected = cases.expected(maker, cases.calls(), **options)
    cases.assert_follows(optimizer, variables, expected, tolerance=1e-13)


def test_a_scaled_loss_is_divided_by_its_scale() -> None:
    tables = []
    for factor in (None, 3.0, 2.0**15):
        optimizer, variables = cases.make("lazy_adam", loss_scale_factor=factor), cases.variables()
        scaled = [
            {name: scaled_gradient(g, factor or 1.0) for name, g in call.items()}
            for call in cases.calls()
        ]
        cases.run(optimizer, variables, scaled)
        tables.append(np.array(variables[cases.TABLE]))
        assert float(optimizer.scale_loss(2.0)) == 2.0 * (factor or 1.0)
    np.testing.assert_allclose(tables[1], tables[0], rtol=1e-6)
    np.testing.assert_array_equal(tables[2], tables[0])


def scaled_gradient(value: Any, factor: float) -> Any:
    if isinstance(value, tuple):
        return value[0], value[1] * np.float32(factor)
    return value * np.float32(factor)
