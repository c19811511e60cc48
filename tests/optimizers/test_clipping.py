"""Clipping after duplicates are summed, or before for those who need the older order."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowstep.optimizers.reference import dense_gradient

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("option_cases")
sys.path.pop(0)

ROW_IDS = np.array([1, 1, 3, 0, 1])
ROW_GRADS = np.array([[3.0, 1], [-2, 1], [0.5, -2], [0, 0], [0, 4]], np.float32)
KERNEL_GRAD = np.array([[2.0, -6.0]], np.float32)
START = {"embeddings": np.ones((4, 2)), "kernel": np.ones((1, 2))}


def clipped(wrap: str = "eager", **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return what the first moments of table and kernel took in: a tenth of the gradients."""
    optimizer, variables = cases.make("lazy_adam", **options), cases.variables(START)
    call = {"embeddings": (ROW_IDS, ROW_GRADS), "kernel": KERNEL_GRAD}
    cases.run(optimizer, variables, [call], wrap)
    table, kernel = (np.array(optimizer.get_slot(v, "m")) * 10 for v in variables.values())
    return table, kernel


SUMMED = dense_gradient(ROW_IDS, ROW_GRADS, (4, 2))
RAW_NORM, NORM = np.linalg.norm(ROW_GRADS), np.linalg.norm(SUMMED)
KERNEL_NORM = np.linalg.norm(KERNEL_GRAD)


@pytest.mark.parametrize("wrap", cases.WRAPS)
@pytest.mark.parametrize("before_sum", [False, True], ids=["after_sum", "before_sum"])
def test_each_way_to_clip_by_hand(before_sum: bool, wrap: str) -> None:
    norm = RAW_NORM if before_sum else NORM
    assert abs(RAW_NORM - NORM) > 0.4
    table, kernel = clipped(wrap, clipnorm=1.5, clip_before_sum=before_sum)
    np.testing.assert_allclose(table, SUMMED * 1.5 / norm, rtol=2e-6)
    np.testing.assert_allclose(kernel, KERNEL_GRAD * 1.5 / KERNEL_NORM, rtol=2e-6)

    factor = 1.5 / np.hypot(norm, KERNEL_NORM)
    table, kernel = clipped(wrap, global_clipnorm=1.5, clip_before_sum=before_sum)
    np.testing.assert_allclose(table, SUMMED * factor, rtol=2e-6)
    np.testing.assert_allclose(kernel, KERNEL_GRAD * factor, rtol=2e-6)

    parts = dense_gradient(ROW_IDS, np.clip(ROW_GRADS, -1, 1), (4, 2))
    table, kernel = clipped(wrap, clipvalue=1.0, clip_before_sum=before_sum)
    np.testing.assert_allclose(table, parts if before_sum else np.clip(SUMMED, -1, 1), rtol=2e-6)
    np.testing.assert_allclose(kernel, np.clip(KERNEL_GRAD, -1, 1), rtol=2e-6)


def test_values_are_clipped_before_the_norm() -> None:
    table, kernel = clipped(clipvalue=2.5, clipnorm=2.0)
    by_value = np.clip(SUMMED, -2.5, 2.5)
    np.testing.assert_allclose(table, by_value * 2.0 / np.linalg.norm(by_value), rtol=2e-6)
    by_value = np.clip(KERNEL_GRAD, -2.5, 2.5)
    np.testing.assert_allclose(kernel, by_value * 2.0 / np.linalg.norm(by_value), rtol=2e-6)


@pytest.mark.parametrize("option", ["clipnorm", "clipvalue", "global_clipnorm"])
@pytest.mark.parametrize("before_sum", [False, True])
def test_a_gradient_within_the_limit_keeps_its_bits(option: str, before_sum: bool) -> None:
    limit: dict[str, Any] = {option: 1000.0}
    plain, limited = clipped(), clipped(**limit, clip_before_sum=before_sum)
    for one, other in zip(plain, limited, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_older_order_depends_on_how_a_gradient_is_split() -> None:
    tables = []
    for before_sum in (False, True):
        whole = (np.array([1]), np.array([[2.0, 2.0]], np.float32))
        split = (np.array([1, 1]), np.array([[4.0, 0.0], [-2.0, 2.0]], np.float32))
        for gradient in (whole, split):
            optimizer = cases.make("lazy_adam", clipnorm=1.0, clip_before_sum=before_sum)
            variables = cases.variables({"embeddings": START["embeddings"]})
            cases.run(optimizer, variables, [{"embeddings": gradient}])
            tables.append(np.array(optimizer.get_slot(variables["embeddings"], "m"))[1])
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-6)
    assert np.all(tables[2] > 1.5 * tables[3])
