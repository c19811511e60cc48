"""State of the DTensor Adam moves between layouts; its config brings the mesh back."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
worker = importlib.import_module("mesh_worker")
inputs = importlib.import_module("mesh_inputs")
sys.path.pop(0)

LAYOUTS = ("replicated", "rows", "columns", "both", "off")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return worker.results_of("mesh_state_cases.py")


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", ["columns", "off"])
def test_training_goes_on_in_another_layout_with_the_same_numbers(
    results: dict[str, Any], first: str, second: str
) -> None:
    weights, state_is_equal = results["moved_state"][f"{first}-{second}"]
    stayed, _ = results["moved_state"][f"{first}-stayed"]
    assert state_is_equal
    np.testing.assert_allclose(weights, stayed, rtol=0, atol=1e-6)
    # Forgetting the state, or the changed learning rate, would show.
    assert np.abs(np.array(stayed) - inputs.TABLE).max() > 0.1


def test_weights_are_arrays_with_iterations_first(results: dict[str, Any]) -> None:
    listed = results["listed_state"]
    assert listed["first"] == [1, "int64", "ndarray"]
    assert listed["names"] == [
        f"{name}:0"
        for name in (
            *("iteration", "average/table", "average/kernel"),
            *("m/table", "v/table", "m/kernel", "v/kernel", "vhat/table", "vhat/kernel"),
        )
    ]
    assert listed["shapes"] == [[], *[[8, 4], [4, 2]], *[[8, 4]] * 2, *[[4, 2]] * 2, [8, 4], [4, 2]]


def test_weights_can_be_set_before_the_first_step_on_a_mesh(results: dict[str, Any]) -> None:
    assert results["listed_state"]["equal"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("short", "Got 8 arrays where 9 are needed"),
        ("shape", "table/average of shape (4, 8) instead of (8, 4)"),
        ("dtype", "table/average of dtype float64 instead of float32"),
        ("names", "no table/momentum; unexpected other/momentum"),
        ("unbuilt", "Call optimizer.build(variables)"),
    ],
)
def test_state_that_does_not_fit_is_refused_by_name(
    results: dict[str, Any], fault: str, words: str
) -> None:
    assert words in results["listed_state"]["messages"][fault]


def test_refused_state_changes_nothing(results: dict[str, Any]) -> None:
    assert results["listed_state"]["unchanged"]


def test_state_is_keyed_by_variable_and_slot(results: dict[str, Any]) -> None:
    slots = ("momentum", "velocity", "velocity_hat", "average")
    keys = [f"{variable}/{slot}" for variable in ("table", "kernel") for slot in slots]
    assert results["listed_state"]["keys"] == ["iterations", "learning_rate", *keys]


@pytest.mark.parametrize("layout", ["columns", "off"])
def test_a_checkpoint_restores_on_the_mesh_and_off_it(results: dict[str, Any], layout: str) -> None:
    weights, state_is_equal = results["checkpoints"][layout]
    assert state_is_equal
    np.testing.assert_array_equal(weights, results["checkpoints"]["saved"])


# Config ----------------------------------------------------------------------------------


def test_the_config_describes_the_mesh_and_brings_it_back(results: dict[str, Any]) -> None:
    configs = results["configs"]
    assert configs["config"]["mesh"] == {
        "name": "",
        "dim_names": ["batch", "model"],
        "dim_sizes": [2, 2],
        "device_type": "CPU",
        "devices": ["CPU:0", "CPU:1", "CPU:2", "CPU:3"],
    }
    assert configs["equal"] and configs["same_mesh"] and configs["serialized"]
    assert configs["untouched"]


def test_the_config_holds_every_argument(results: dict[str, Any]) -> None:
    config = results["configs"]["config"]
    expected = {
        "beta_1": 0.8,
        "beta_2": 0.9,
        "epsilon": 1e-5,
        "amsgrad": True,
        "clipnorm": 0.5,
        "weight_decay": 0.1,
        "lazy": True,
        "adaptive_epsilon": True,
        "name": "Adam",
        "exclude_from_weight_decay": ["^a\\.b$"],
    }
    assert {key: config[key] for key in expected} == expected
    assert config["learning_rate"]["class_name"] == "ExponentialDecay"


def test_another_mesh_or_none_can_stand_in_for_the_saved_one(results: dict[str, Any]) -> None:
    assert results["configs"]["off"] is None
    assert results["configs"]["override"]


def test_a_mesh_whose_devices_are_missing_is_refused(results: dict[str, Any]) -> None:
    assert "CPU:9" in results["configs"]["absent"]
    assert "custom_objects={'mesh': mesh}" in results["configs"]["absent"]
    assert "Got none for devices" in results["configs"]["bare"]


# Cases of the tests of the original --------------------------------------------------------


def test_add_variable_from_reference_takes_name_and_layout(results: dict[str, Any]) -> None:
    result = results["add_variable_from_reference"]
    assert result["names"] == ["test/tmp:0", "given/tmp:0"]
    np.testing.assert_array_equal(result["values"][0], np.zeros([4, 4]))
    np.testing.assert_array_equal(result["values"][1], np.arange(16).reshape(4, 4))
    assert result["same_layout"] == [True, True]
    assert result["other_layout"]
    assert result["kept"] == [True] * 3
    assert result["plain"] == [0.0, 0.0]


def test_build_numbers_the_variables_in_their_order(results: dict[str, Any]) -> None:
    assert results["build_index_dict"] == 7


def test_aggregate_gradients_returns_the_same_object_on_a_mesh(results: dict[str, Any]) -> None:
    assert results["apply_gradients"]["aggregated"]


def test_apply_gradients_names_variables_and_counts_on_the_mesh(results: dict[str, Any]) -> None:
    result = results["apply_gradients"]
    assert result["iterations"] == [0, 1]
    assert result["replicated"] == [True, True]
    slots = [f"Adam/{slot}/Variable:0" for slot in ("m", "v", "vhat")]
    assert result["names"] == ["iteration:0", *slots]


def test_an_embedding_of_tf_keras_trains_on_batches_of_different_ids(
    results: dict[str, Any],
) -> None:
    losses = results["embedding_lookup_backward_path"]
    assert losses[2] < losses[0] and losses[3] < losses[1]


# Methods ---------------------------------------------------------------------------------


def test_compute_gradients_works_outside_of_a_function(results: dict[str, Any]) -> None:
    assert results["methods"]["sparse"] == "IndexedSlices"
    assert results["methods"]["none"]


def test_minimize_takes_the_tape_that_recorded_the_loss(results: dict[str, Any]) -> None:
    # The first step is the learning rate against the sign, after a decay of 0.1 * 0.1 * w.
    expected = -0.1 * np.sign(inputs.KERNEL) - 0.01 * inputs.KERNEL
    np.testing.assert_allclose(results["methods"]["moved"], expected, atol=1e-5)


def test_a_variable_without_gradient_is_left_out(results: dict[str, Any]) -> None:
    assert results["methods"]["iterations"] == 2
    np.testing.assert_array_equal(results["methods"]["untouched"], inputs.TABLE.astype(np.float64))


def test_lr_and_slots_go_by_their_older_names(results: dict[str, Any]) -> None:
    assert results["methods"]["rates"] == [0.5, 0.5]
    assert results["methods"]["slots"] == ["momentum", "velocity", "velocity_hat", "average"]
    assert results["methods"]["alias"]


def test_the_average_follows_the_weights_on_a_mesh(results: dict[str, Any]) -> None:
    moved = np.array(results["methods"]["moved"])
    expected = inputs.KERNEL + 0.4 * moved
    np.testing.assert_allclose(results["methods"]["average"], expected, atol=1e-6)
    np.testing.assert_array_equal(results["methods"]["finalized"], results["methods"]["average"])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("plain", "Got plain:0 on no mesh instead of the mesh |batch=2,model=2|"),
        ("on_mesh", "instead of no mesh"),
        ("stranger", "Got stranger. It knows table, kernel"),
        ("all_none", "at least one gradient must be there. Got None for kernel"),
        ("late", "must be called before the optimizer is built"),
        ("slot", "Got 'momentums'"),
        ("no_tape", "needs the tape"),
    ],
)
def test_misuse_is_told_in_words(results: dict[str, Any], call: str, words: str) -> None:
    assert words in results["methods"]["messages"][call]


@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_lookup_returns_the_rows_in_every_layout(results: dict[str, Any], layout: str) -> None:
    expected = inputs.TABLE[inputs.BATCHES[0]].astype(np.float64)
    np.testing.assert_allclose(results["lookups"]["rows"][layout], expected, atol=1e-7)
    np.testing.assert_array_equal(results["lookups"]["plain"], expected)


def test_lookup_in_a_table_sharded_by_rows_names_the_alternative(results: dict[str, Any]) -> None:
    for words in results["lookups"]["refused"]:
        assert "Shard it by columns" in words and "small_table=True" in words
    assert "ids must be integers" in results["lookups"]["floats"]
    assert "[rows, width]" in results["lookups"]["rank"]


@pytest.mark.parametrize("lazy", [False, True])
def test_two_replicas_off_the_mesh_equal_one_with_the_joined_batch(
    results: dict[str, Any], lazy: bool
) -> None:
    one, two = (results["replicas"][f"lazy={lazy}-{n}"] for n in (1, 2))
    np.testing.assert_array_equal(two["copies"][0], two["copies"][1])
    np.testing.assert_allclose(two["copies"][0], one["copies"][0], rtol=1e-5)
    assert two["state"]["iterations"] == one["state"]["iterations"] == 3
    for key, value in one["state"].items():
        np.testing.assert_allclose(two["state"][key], value, rtol=1e-5, atol=1e-7, err_msg=key)


def test_a_stored_array_arrives_in_the_copies_of_all_replicas(results: dict[str, Any]) -> None:
    first, second = results["stored_state"]
    np.testing.assert_array_equal(first, inputs.TABLE)
    np.testing.assert_array_equal(second, inputs.TABLE)
