"""The arithmetic of the known truth."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rowstep.components.data_errors import DataError
from rowstep.components.truth import Truth, TruthTally

TRUTH = Truth(baseline_rmse=1.0, floor_rmse=0.6, floor_stderr=0.01, num_eval=100)


def test_the_share_runs_from_the_baseline_to_the_floor() -> None:
    assert TRUTH.explained_share(1.0) == pytest.approx(0.0)
    assert TRUTH.explained_share(0.6) == pytest.approx(1.0)
    assert TRUTH.explained_share(math.sqrt(0.68)) == pytest.approx(0.5)  # of squares, not of errors
    assert TRUTH.explained_share(1.2) < 0.0


def test_a_leak_begins_three_standard_errors_of_the_squared_error_below_the_floor() -> None:
    assert not TRUTH.is_leak(math.sqrt(0.36 - 0.029))
    assert TRUTH.is_leak(math.sqrt(0.36 - 0.031))


def test_a_split_with_nothing_to_explain_has_no_share() -> None:
    flat = Truth(baseline_rmse=0.5, floor_rmse=0.5, floor_stderr=0.0, num_eval=1)
    assert math.isnan(flat.explained_share(0.4))


def test_a_truth_survives_json() -> None:
    assert Truth.from_json(json.loads(json.dumps(TRUTH.to_json()))) == TRUTH


def test_a_truth_of_another_version_is_refused() -> None:
    values = TRUTH.to_json()
    del values["num_eval"]
    with pytest.raises(DataError, match=r"its fields must be .*num_eval\. Got"):
        Truth.from_json(values)


def test_there_is_no_truth_about_an_empty_split() -> None:
    tally = TruthTally()
    tally.add_train(np.array([1.0, 5.0]))
    assert tally.result() is None
