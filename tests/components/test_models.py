"""The models' arithmetic, and that they read the columns they should."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from rowstep.components.models import Dropout, FeatureCross, GlobalBias, build_model, model_columns
from rowstep.configs import RunConfig, load_config

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
ROWS = {"user_id": 30, "item_id": 20, "item_category": 16}
DCN = "model={kind: dcn, dim: 4, cross_layers: 2, cross_rank: 3, deep_units: [8], dropout: 0.5}"


def _config(*overrides: str) -> RunConfig:
    return load_config(TINY, overrides)


def _batch(config: RunConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, ROWS[name], 12) for name in model_columns(config)}


def test_factorisation_scores_are_mean_plus_biases_plus_inner_product() -> None:
    config = _config()
    model = build_model(config, ROWS, label_mean=3.5)
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables[:4]:
        variable.assign(rng.normal(size=variable.shape))
    tables = {v.path.split("/")[0]: v.numpy().astype(np.float64) for v in model.variables}
    batch = _batch(config)
    user, item = batch["user_id"], batch["item_id"]
    wanted = (
        tables["mean"][0]
        + tables["user_id_bias"][user, 0]
        + tables["item_id_bias"][item, 0]
        + (tables["user_id_factors"][user] * tables["item_id_factors"][item]).sum(axis=1)
    )
    np.testing.assert_allclose(model(batch).numpy(), wanted, rtol=1e-5)


def test_an_untrained_model_predicts_the_mean() -> None:
    for config in (_config("model.init_stddev=1e-9"), _config(DCN, "model.init_stddev=1e-9")):
        scores = build_model(config, ROWS, label_mean=3.25)(_batch(config)).numpy()
        np.testing.assert_allclose(scores, 3.25, atol=1e-4)


def test_cross_layer_equals_its_formula() -> None:
    rng = np.random.default_rng(2)
    first, current = rng.normal(size=(2, 5, 6)).astype(np.float32)
    layer = FeatureCross(rank=2)
    out = layer(first, current).numpy()
    layer.bias.assign(rng.normal(size=6))
    down, up, bias = (v.numpy().astype(np.float64) for v in (layer.down, layer.up, layer.bias))
    np.testing.assert_allclose(out, first * (current @ down @ up) + current, rtol=1e-4, atol=1e-6)
    out = layer(first, current).numpy()
    wanted = first * (current @ down @ up + bias) + current
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", ["model.dim=4", DCN])
def test_same_seed_builds_the_same_weights_and_names_in_one_process(model: str) -> None:
    one, two = (build_model(_config(model), ROWS, 3.0) for _ in range(2))
    other = build_model(_config(model, "train.seed=8"), ROWS, 3.0)
    assert [v.path for v in one.variables] == [v.path for v in two.variables]
    for left, right in zip(one.variables, two.variables, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())
    assert any(
        (left.numpy() != right.numpy()).any()
        for left, right in zip(one.variables, other.variables, strict=True)
    )


def test_order_of_features_in_the_file_does_not_change_the_model() -> None:
    features = "features={%s: {kind: vocabulary}, %s: {kind: vocabulary}}"
    one = _config(DCN, features % ("user_id", "item_id"))
    two = _config(DCN, features % ("item_id", "user_id"))
    left, right = build_model(one, ROWS, 3.0), build_model(two, ROWS, 3.0)
    assert [v.path for v in left.variables] == [v.path for v in right.variables]
    for a, b in zip(left.variables, right.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_dropout_drops_in_training_only_and_differs_from_call_to_call() -> None:
    layer, ones = Dropout(0.5, name="drop"), np.ones((4, 50), np.float32)
    np.testing.assert_array_equal(layer(ones, training=False), ones)
    first, second = layer(ones, training=True).numpy(), layer(ones, training=True).numpy()
    assert set(np.unique(first)) == {0.0, 2.0}
    assert (first != second).any()


@pytest.mark.parametrize("layer", [GlobalBias(2.0), FeatureCross(3), Dropout(0.25)])
def test_layers_come_back_from_their_config(layer: keras.layers.Layer) -> None:
    config = keras.saving.serialize_keras_object(layer)
    back = keras.saving.deserialize_keras_object(config)
    assert back.get_config() == layer.get_config()
