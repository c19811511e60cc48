"""Full scans: right numbers for any optimizer and any size, in the memory of a few blocks."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.optimizers import LAMB, AdamMultilr, LazyAdam, StateMismatchError
from rowstep.optimizers.statistics import (
    Histogram,
    histograms,
    scan,
    slot_names,
    summaries,
    table,
    variable_names,
)

sys.path.insert(0, str(Path(__file__).parent))
cases = importlib.import_module("step_cases")
sys.path.pop(0)

NAMES = ["items.embeddings", "dense.kernel", "bias"]
MAKERS: dict[str, Any] = {
    "LazyAdam": lambda: LazyAdam(0.1),
    "LazyAdam-bfloat16": lambda: LazyAdam(0.1, state_dtype="bfloat16"),
    "LazyAdam-rows": lambda: LazyAdam(0.1, row_velocity=True, use_ema=True, idle_decay=True),
    "LAMB": lambda: LAMB(0.1),
    "AdamMultilr": lambda: AdamMultilr(0.1, amsgrad=True),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True, use_ema=True),
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.1),
}
SLOTS = {
    "LazyAdam": ["momentum", "velocity"],
    "LazyAdam-bfloat16": ["momentum", "velocity"],
    "LazyAdam-rows": ["momentum", "velocity", "average"],
    "LAMB": ["momentum", "velocity"],
    "AdamMultilr": ["momentum", "velocity", "velocity_hat"],
    "Adam": ["average", "momentum", "velocity", "velocity_hat"],
    "SGD": ["momentum"],
    "Adagrad": ["accumulator"],
    "RMSprop": ["velocity", "momentum", "average_gradient"],
    "Ftrl": ["accumulator", "linear"],
    "Lion": ["momentum"],
}


def stepped(make: Any, num_steps: int = 2, dtype: str = "float32") -> tuple[Any, list[Any]]:
    variables, optimizer = cases.new_variables(dtype), make()
    optimizer.build(variables)
    for number in range(num_steps):
        optimizer.apply(cases.gradients(number, dtype=dtype), variables)
    return optimizer, variables


def slots_of(optimizer: Any, variables: list[Any], slot: str) -> list[np.ndarray]:
    """Return copies of a slot in float64, in the order of the variables, by the keys of state."""
    arrays = cases.everything(optimizer, variables)
    stems = [(v.path, v.path.replace("/", "_")) for v in variables]
    keys = [[f"{path}/{slot}", f"{stem}_{slot}"] for path, stem in stems]
    return [arrays[next(k for k in pair if k in arrays)].astype(np.float64) for pair in keys]


def short(slot: str) -> str:
    return {"momentum": "m", "velocity": "v"}.get(slot, slot)


SIZES = {"many-blocks": (7, 0), "one-block": (1 << 18, 0), "together": (20, 1 << 14)}


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take variables in blocks, the last of them shorter, or whole, or several in a group."""
    block, small = request.param
    monkeypatch.setattr(summaries, "_BLOCK_ELEMENTS", block)
    monkeypatch.setattr(summaries, "_SMALL_ELEMENTS", small)


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("name", MAKERS)
def test_a_scan_says_what_numpy_says_of_copies(name: str) -> None:
    optimizer, variables = stepped(MAKERS[name])
    expected = {}
    for slot in SLOTS[name]:
        arrays, letter = slots_of(optimizer, variables, slot), short(slot)
        flat = np.concatenate([array.ravel() for array in arrays])
        expected[f"opt/slot_{letter}/rms"] = np.sqrt(np.mean(flat**2))
        expected[f"opt/slot_{letter}/mean"] = np.mean(flat)
        largest = "max" if letter == "v" else "absmax"
        expected[f"opt/slot_{letter}/{largest}"] = np.max(np.abs(flat))
        expected[f"opt/slot_{letter}/zero_frac"] = np.mean(flat == 0)
        for variable, array in zip(NAMES, arrays, strict=True):
            expected[f"opt/{letter}_rms/{variable}"] = np.sqrt(np.mean(array**2))
            if slot == "velocity":
                expected[f"opt/v_zero_frac/{variable}"] = np.mean(array == 0)
        if slot == "velocity":
            alive = np.any(arrays[0] != 0, axis=1)
            expected["opt/sparse/rows_ever_touched_frac"] = np.mean(alive)
            assert 0 < np.mean(alive) < 1
    expected["opt/global/weights_norm"] = cases.joint([np.array(v) for v in variables])
    got = scan(optimizer, per_variable=True)
    assert set(got) == set(expected)
    for metric, value in expected.items():
        assert got[metric] == pytest.approx(value, rel=1e-5, abs=1e-12), metric


def test_a_scan_follows_the_training_and_changes_nothing() -> None:
    optimizer, variables = stepped(MAKERS["LazyAdam"], 1)
    before, first = cases.everything(optimizer, variables), scan(optimizer)
    assert all(isinstance(value, float) for value in first.values())
    for name, array in cases.everything(optimizer, variables).items():
        np.testing.assert_array_equal(array, before[name])
    optimizer.apply(cases.gradients(5), variables)
    second = scan(optimizer)
    rows = "opt/sparse/rows_ever_touched_frac"
    assert second[rows] > first[rows]
    assert second["opt/global/weights_norm"] != first["opt/global/weights_norm"]


def test_variables_have_metrics_of_their_own_only_when_asked_for() -> None:
    optimizer, _ = stepped(MAKERS["LazyAdam"])
    assert not [name for name in scan(optimizer) if "bias" in name]
    assert {name for name in scan(optimizer, per_variable={"bias"}) if name[-4:] == "bias"} == {
        "opt/m_rms/bias",
        "opt/v_rms/bias",
        "opt/v_zero_frac/bias",
    }


def test_without_a_velocity_nothing_is_said_of_rows() -> None:
    for name in ("SGD", "Adagrad"):
        assert "opt/sparse/rows_ever_touched_frac" not in scan(stepped(MAKERS[name])[0])


def test_an_optimizer_without_slots_has_a_norm_of_its_weights() -> None:
    optimizer, _ = stepped(lambda: keras.optimizers.SGD(0.1))
    assert set(scan(optimizer)) == {"opt/global/weights_norm"}
    assert histograms(optimizer) == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype_is_summed_in_float64(dtype: str) -> None:
    optimizer, variables = stepped(lambda: keras.optimizers.SGD(0.1, momentum=0.9), 0, dtype)
    variables[0].assign(np.full((cases.ROWS, cases.WIDTH), 300.0))  # its square is no float16
    expected = cases.joint([cases.everything(optimizer, variables)[v.path] for v in variables])
    assert scan(optimizer)["opt/global/weights_norm"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("block_size")
def test_numbers_that_are_not_finite_are_seen() -> None:
    optimizer, variables = stepped(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    variables[1].assign(np.full((cases.WIDTH, 4), np.nan))
    kernel = optimizer.momentums[1]
    values = np.array(kernel)
    values[0, 0], values[1, 1] = np.inf, np.nan
    kernel.assign(values)
    got = scan(optimizer)
    assert np.isnan(got["opt/slot_m/absmax"]) and np.isnan(got["opt/slot_m/rms"])
    assert np.isnan(got["opt/global/weights_norm"])
    rows = table(optimizer, 3)
    by_key = dict(
        zip(zip(rows["variable"], rows["slot"], strict=True), rows["nonfinite"], strict=True)
    )
    assert by_key["dense.kernel", "momentum"] == 2
    assert by_key["dense.kernel", "weights"] == 3 * 4
    assert by_key["bias", "momentum"] == 0
    assert histograms(optimizer)["dense.kernel.m"].num_nonfinite == 2


def test_hostile_names_are_made_harmless_and_stay_apart() -> None:
    variables = [
        keras.Variable(np.ones(size), name=name)
        for size, name in ((2, "a b"), (3, "a?b"), (5, "x" * 500), (4, "ünï"))
    ]
    optimizer = LazyAdam()
    optimizer.build(variables)
    names = variable_names(optimizer)
    assert list(names.values()) == ["x" * 500, "ünï", "a?b", "a b"]
    longest, *others = names
    assert set(others) == {"_n_", "a_b", "a_b_"}
    assert len(longest) < 140 and longest.startswith("x" * 120)
    assert f"opt/m_rms/{longest}" in scan(optimizer, per_variable=True)


def test_slots_are_named_for_each_variable_counters_too() -> None:
    paths = ["items/embeddings", "dense/kernel", "bias"]
    for name, slots in SLOTS.items():
        named = slot_names(stepped(MAKERS[name], 0)[0])
        assert list(named) == paths
        counters = {"average_step", "last_step"} if name == "LazyAdam-rows" else set()
        assert {path: set(found) for path, found in named.items()} == {
            path: set(slots) | counters for path in paths
        }


def test_two_variables_of_the_same_path_have_slots_of_their_own() -> None:
    for maker in (LazyAdam, keras.optimizers.Adam):
        variables = [keras.Variable(np.ones(2), name="w") for _ in range(2)]
        optimizer = maker(0.1)
        optimizer.build(variables)
        optimizer.apply([tf.constant([1.0, 1.0]), tf.constant([3.0, 3.0])], variables)
        got = scan(optimizer, per_variable=True)
        assert got["opt/m_rms/w"] == pytest.approx(0.1)
        assert got["opt/m_rms/w_2"] == pytest.approx(0.3)


def test_an_optimizer_that_is_not_built_is_refused() -> None:
    for function in (scan, histograms, lambda optimizer: table(optimizer, 0)):
        with pytest.raises(StateMismatchError, match="must be built"):
            function(LazyAdam())


# --- histograms and the table -----------------------------------------------------------------


@pytest.mark.usefixtures("block_size")
def test_a_histogram_counts_every_element_once_and_where_it_belongs() -> None:
    optimizer, variables = stepped(MAKERS["LazyAdam"])
    got = histograms(optimizer)
    assert list(got) == [f"{name}.{letter}" for name in NAMES for letter in "mv"]
    for slot in ("momentum", "velocity"):
        for name, array in zip(NAMES, slots_of(optimizer, variables, slot), strict=True):
            histogram = got[f"{name}.{short(slot)}"]
            assert len(histogram.counts) == 64 and len(histogram.edges) == 65
            sizes = np.abs(array[array != 0])
            assert histogram.num_zero == np.sum(array == 0)
            expected, _ = np.histogram(sizes, bins=histogram.edges)
            np.testing.assert_array_equal(histogram.counts, expected)
            assert sum(histogram.counts) == sizes.size
            assert histogram.unit == {"momentum": "gradient", "velocity": "gradient^2"}[slot]


@pytest.mark.parametrize(
    ("values", "bins_a_decade"),
    [([1e-3, 2.0], 8), ([1e-9, 2.0], 4), ([3e-20, 2.0], 2), ([3e-37, 2e38], 0.5)],
)
def test_bins_are_as_narrow_as_64_of_them_can_be(values: list[float], bins_a_decade: float) -> None:
    variable = keras.Variable(np.array([*values, 0.0], np.float32), name="w")
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build([variable])
    optimizer.momentums[0].assign(variable)
    histogram = histograms(optimizer)["w.m"]
    assert sum(histogram.counts) == 2 and histogram.num_zero == 1
    np.testing.assert_allclose(np.diff(np.log10(histogram.edges)), 1 / bins_a_decade, rtol=1e-9)
    for value in np.float32(values):
        place = np.searchsorted(histogram.edges, value, side="right") - 1
        assert histogram.counts[place] == 1


def test_a_slot_of_zeros_has_an_empty_histogram() -> None:
    optimizer, _ = stepped(MAKERS["LazyAdam"], 0)
    histogram = histograms(optimizer)["bias.m"]
    assert isinstance(histogram, Histogram)
    assert sum(histogram.counts) == 0 and histogram.num_zero == 4
    assert np.all(np.diff(histogram.edges) > 0)


@pytest.mark.usefixtures("block_size")
def test_the_table_has_a_row_for_each_slot_and_the_weights() -> None:
    optimizer, variables = stepped(MAKERS["Adam"])
    columns = table(optimizer, 42)
    assert {len(column) for column in columns.values()} == {3 * 5}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for row in rows:
        index = NAMES.index(row["variable"])
        array = (
            np.array(variables[index], np.float64)
            if row["slot"] == "weights"
            else slots_of(optimizer, variables, row["slot"])[index]
        )
        assert row["step"] == 42 and row["path"] == variables[index].path
        assert row["shape"] == list(array.shape) and row["size"] == array.size
        assert row["rms"] == pytest.approx(np.sqrt(np.mean(array**2)), rel=1e-6)
        assert row["mean"] == pytest.approx(np.mean(array), rel=1e-6, abs=1e-12)
        assert row["absmax"] == pytest.approx(np.max(np.abs(array)), rel=1e-6)
        assert row["zero_frac"] == pytest.approx(np.mean(array == 0))
        assert row["nonfinite"] == 0
        assert sum(row["hist_counts"]) == np.sum(array != 0)
        assert type(row["rms"]) is float and type(row["hist_counts"][0]) is int


def test_percentiles_are_right_to_an_eighth_of_a_decade() -> None:
    values = np.random.default_rng(0).lognormal(-9, 3, 5000).astype(np.float32)
    values[:1000] = 0.0
    variable = keras.Variable(values * np.where(np.arange(5000) % 2, 1, -1), name="w")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([variable])
    columns = table(optimizer, 1)
    assert columns["p01"] == [0.0]
    for column, share in (("p50", 0.5), ("p99", 0.99)):
        exact = np.quantile(values, share)
        assert abs(np.log10(columns[column][0] / exact)) < 1 / 8, column


MEMORY = """
import keras, numpy as np, tensorflow as tf
from pathlib import Path
from rowstep.optimizers import LazyAdam
from rowstep.optimizers.statistics import histograms, scan

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

with keras.name_scope("items"):
    table = keras.Variable(np.ones((16 * 1024, 1024), np.float32), name="embeddings")
optimizer, warm = LazyAdam(), LazyAdam()
optimizer.build([table])
warm.build([keras.Variable(np.ones(3), name="w")])
scan(warm), histograms(warm)
rows = tf.IndexedSlices(tf.ones([1, 1024]), tf.constant([5]), tf.constant(table.shape))
optimizer.apply([rows], [table])
Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts anew
before = peak()
scan(optimizer), histograms(optimizer)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_scanning_a_table_makes_no_copy_of_it() -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 40, "MiB; the table has 64, and so has each slot"
