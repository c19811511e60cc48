"""Metrics of the training examples: built at once, carried by name, refused early."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.components.training_metrics import ALLOWED, TrainingMetrics
from rowstep.configs.errors import ConfigError
from rowstep.optimizers import StateMismatchError

NAMES = ("RootMeanSquaredError", "AUC", "R2Score", "MeanAbsoluteError")
_RNG = np.random.default_rng(3)
LABELS = _RNG.integers(0, 2, size=(5, 7)).astype(np.float32)
SCORES = _RNG.random(size=(5, 7)).astype(np.float32)


def held(metrics: TrainingMetrics) -> dict[str, bytes]:
    return {name: np.array(array).tobytes() for name, array in metrics.named_arrays()}


def test_every_variable_is_there_before_the_first_batch_and_empty():
    metrics = TrainingMetrics(ALLOWED)
    before = held(metrics)
    assert not any(np.any(np.frombuffer(data, np.float32)) for data in before.values())
    assert {name.split("/")[0] for name in before} == set(metrics.results())
    metrics.update(LABELS[0], SCORES[0])
    after = held(metrics)
    assert list(after) == list(before)
    changed = {name.split("/")[0] for name in after if after[name] != before[name]}
    assert changed == set(metrics.results())


def test_results_are_those_of_the_formula_over_all_batches():
    metrics = TrainingMetrics(NAMES)
    for labels, scores in zip(LABELS, SCORES, strict=True):
        metrics.update(labels, scores)
    errors = (LABELS - SCORES).astype(np.float64)
    results = metrics.results()
    assert list(results) == ["root_mean_squared_error", "auc", "r2_score", "mean_absolute_error"]
    assert results["root_mean_squared_error"] == pytest.approx(np.sqrt(np.mean(errors**2)), 1e-6)
    assert results["mean_absolute_error"] == pytest.approx(np.mean(np.abs(errors)), 1e-6)
    assert results["r2_score"] == pytest.approx(1 - np.mean(errors**2) / LABELS.var(), 1e-5)
    pairs = SCORES[LABELS == 1][:, None] - SCORES[LABELS == 0]
    assert results["auc"] == pytest.approx(np.mean(pairs > 0), abs=0.02)
    assert all(type(value) is float for value in results.values())
    metrics.reset()
    assert held(metrics) == held(TrainingMetrics(NAMES))


def test_columns_and_vectors_count_alike():
    flat, columns = TrainingMetrics(NAMES), TrainingMetrics(NAMES)
    flat.update(LABELS[0], SCORES[0])
    columns.update(LABELS[0][:, None], SCORES[0][:, None])
    mixed = TrainingMetrics(NAMES)
    mixed.update(LABELS[0], SCORES[0][:, None])
    assert held(flat) == held(columns) == held(mixed)


def test_a_resume_at_any_batch_sums_up_to_the_same_bits():
    whole = TrainingMetrics(NAMES)

    @tf.function
    def step(labels: tf.Tensor, scores: tf.Tensor) -> None:
        whole.update(labels, scores)

    saved = []
    for labels, scores in zip(LABELS, SCORES, strict=True):
        saved.append({name: np.array(array) for name, array in whole.named_arrays()})
        step(labels, scores)
    for batch, arrays in enumerate(saved):
        keras.metrics.AUC(), keras.metrics.RootMeanSquaredError()  # names count upwards
        resumed = TrainingMetrics(NAMES)
        resumed.load(arrays)
        for labels, scores in zip(LABELS[batch:], SCORES[batch:], strict=True):
            resumed.update(labels, scores)
        assert held(resumed) == held(whole)
        assert resumed.results() == whole.results()


def test_each_accumulator_is_needed_and_refused_by_name_when_it_is_missing():
    metrics = TrainingMetrics(("AUC",))
    metrics.update(LABELS[0], SCORES[0])
    arrays = {name: np.array(array) for name, array in metrics.named_arrays()}
    assert [a.shape for a in arrays.values()] == [(200,)] * 4
    for name in arrays:
        fresh = TrainingMetrics(("AUC",))
        with pytest.raises(StateMismatchError, match=f"Got no {name}"):
            fresh.load({other: array for other, array in arrays.items() if other != name})
        assert held(fresh) == held(TrainingMetrics(("AUC",)))
    with pytest.raises(
        StateMismatchError, match=r"true_positives of shape \(10,\) instead of \(200"
    ):
        metrics.load({**arrays, "auc/true_positives": np.zeros(10, np.float32)})
    with pytest.raises(StateMismatchError, match="unexpected recall/true_positives"):
        metrics.load({**arrays, "recall/true_positives": np.zeros(1, np.float32)})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("RootMeanSquareError", "Did you mean 'RootMeanSquaredError'?"),
        ("Mean", "Remove it."),
        ("MeanIoU", "Remove it."),
        ("CategoricalAccuracy", "Did you mean 'BinaryAccuracy'?"),
        ("PearsonCorrelation", "Remove it."),
    ],
)
def test_what_judges_no_single_score_is_refused(name: str, advice: str):
    with pytest.raises(ConfigError) as raised:
        TrainingMetrics(("AUC", name, "AUC"))
    first, second = str(raised.value).splitlines()
    start = "train.metrics: must name Keras metrics that judge one score an example. "
    assert first == f"{start}Got {name!r}. Allowed: {', '.join(ALLOWED)}. {advice}"
    assert (
        second == "train.metrics: must name a metric once. Got 'AUC' again. Remove the second one."
    )


def test_no_metrics_are_none():
    metrics = TrainingMetrics(())
    metrics.update(LABELS[0], SCORES[0])
    metrics.load({})
    assert metrics.results() == dict(metrics.named_arrays()) == {}
