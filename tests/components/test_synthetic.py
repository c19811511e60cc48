"""The generated world: reproducible, bounded in memory, and learnable up to a known floor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from rowstep.components.part_files import Rows
from rowstep.components.synthetic import (
    FIRST_SECOND,
    SECONDS_PER_YEAR,
    Interactions,
    SyntheticSource,
    World,
    interactions,
)
from rowstep.components.truth import Truth, TruthTally, expected_star
from rowstep.configs.schema import HashSplit, SyntheticData, TimeSplit

DEFAULTS = SyntheticData(kind="synthetic")
SMALL = SyntheticData(kind="synthetic", num_users=60, num_items=40, num_interactions=3000)


def together(config: SyntheticData, chunk_rows: int = 65_536) -> Interactions:
    chunks = list(interactions(config, World(config), chunk_rows))
    return Interactions(*(np.concatenate(field) for field in zip(*chunks, strict=True)))


def rmse(predicted: NDArray[np.float64], stars: NDArray[np.float64]) -> float:
    return math.sqrt(float(((predicted - stars) ** 2).mean()))


@pytest.fixture(scope="module")
def rows() -> Interactions:
    return together(DEFAULTS)


@pytest.fixture(scope="module")
def num_train(rows: Interactions) -> int:
    return len(rows.users) * 9 // 10


@pytest.fixture(scope="module")
def truth() -> Truth:
    source = SyntheticSource(DEFAULTS)
    for _ in source.rows():
        pass
    result = source.truth()
    assert result is not None
    return result


def als_predictions(
    rows: Interactions, num_train: int, stars: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Fit mean + b_user + b_item + <p, q> by alternating ridge regressions; predict the rest."""
    rank, ridge = DEFAULTS.rank, 3.0
    users, items = rows.users[:num_train], rows.items[:num_train]
    mean = stars[:num_train].mean()
    residuals = stars[:num_train] - mean
    rng = np.random.default_rng(0)
    # A user's row is (b_user, 1, p) and an item's (1, b_item, q), so their product has all terms.
    tables = [np.zeros((count, rank + 2)) for count in (DEFAULTS.num_users, DEFAULTS.num_items)]
    for side, table in enumerate(tables):
        table[:, 1 - side] = 1.0
        table[:, 2:] = rng.normal(0.0, 0.3, (len(table), rank))
    for _ in range(12):
        for side, (ids, other_ids) in enumerate(((users, items), (items, users))):
            free = [side, *range(2, rank + 2)]
            seen = tables[1 - side][other_ids]
            inputs, targets = seen[:, free], residuals - seen[:, 1 - side]
            size = len(tables[side])
            gram = np.zeros((size, len(free), len(free))) + ridge * np.eye(len(free))
            moment = np.zeros((size, len(free)))
            for i in range(len(free)):
                moment[:, i] = np.bincount(ids, inputs[:, i] * targets, minlength=size)
                for j in range(len(free)):
                    gram[:, i, j] += np.bincount(ids, inputs[:, i] * inputs[:, j], minlength=size)
            tables[side][:, free] = np.linalg.solve(gram, moment[..., None])[..., 0]
    left, right = tables[0][rows.users[num_train:]], tables[1][rows.items[num_train:]]
    return np.clip(mean + (left * right).sum(axis=1), 1.0, 5.0)


# --- what can be learned ------------------------------------------------------------------------


def test_a_plain_factorisation_reaches_most_of_the_explainable_variance(
    rows: Interactions, num_train: int, truth: Truth
) -> None:
    reached = rmse(als_predictions(rows, num_train, rows.stars), rows.stars[num_train:])
    assert 0.80 < truth.explained_share(reached) < 0.98  # cold items keep it below 1
    assert not truth.is_leak(reached)


def test_biases_alone_leave_much_for_the_factors(
    rows: Interactions, num_train: int, truth: Truth
) -> None:
    world = World(DEFAULTS)
    flat = 3.4 + world.user_bias[rows.users] + world.item_bias[rows.items]
    share = truth.explained_share(rmse(flat[num_train:], rows.stars[num_train:]))
    assert 0.2 < share < 0.7


def test_shuffled_labels_teach_nothing(rows: Interactions, num_train: int, truth: Truth) -> None:
    stars = rows.stars.copy()
    stars[:num_train] = np.random.default_rng(3).permutation(stars[:num_train])
    reached = rmse(als_predictions(rows, num_train, stars), rows.stars[num_train:])
    assert truth.explained_share(reached) < 0.02


def test_the_true_scores_reach_the_floor_and_are_no_leak(
    rows: Interactions, num_train: int, truth: Truth
) -> None:
    best = expected_star(rows.scores[num_train:], DEFAULTS.noise)
    reached = rmse(best, rows.stars[num_train:])
    assert reached == pytest.approx(truth.floor_rmse, rel=1e-12)
    assert truth.explained_share(reached) == pytest.approx(1.0)
    assert not truth.is_leak(reached)


def test_a_predictor_that_sees_a_little_of_the_noise_is_a_leak(
    rows: Interactions, num_train: int, truth: Truth
) -> None:
    stars = rows.stars[num_train:]
    best = expected_star(rows.scores[num_train:], DEFAULTS.noise)
    assert truth.is_leak(rmse(best + 0.1 * (stars - best), stars))


def test_no_simpler_use_of_the_score_beats_the_floor(
    rows: Interactions, num_train: int, truth: Truth
) -> None:
    stars, scores = rows.stars[num_train:], rows.scores[num_train:]
    assert rmse(np.clip(scores, 1.0, 5.0), stars) > truth.floor_rmse
    assert rmse(np.clip(np.rint(scores), 1.0, 5.0), stars) > truth.floor_rmse


@pytest.mark.parametrize("noise", [0.05, 0.6, 2.0])
def test_expected_star_is_the_mean_over_simulated_noise(noise: float) -> None:
    scores = np.array([-1.0, 1.0, 2.5, 3.3, 4.9, 7.0])
    draws = np.random.default_rng(1).normal(0.0, noise, (400_000, 1))
    simulated = np.clip(np.rint(scores + draws), 1.0, 5.0)
    standard_error = simulated.std(axis=0) / math.sqrt(len(draws))
    assert (
        abs(expected_star(scores, noise) - simulated.mean(axis=0)) < 5 * standard_error + 1e-4
    ).all()


@pytest.mark.parametrize("seed", [1, -5, 2**70])
def test_no_seed_is_much_harder_than_another(seed: int) -> None:
    config = DEFAULTS.model_copy(update={"seed": seed})
    tally = TruthTally()
    chunk = together(config)
    tally.add_train(chunk.stars[:144_000])
    tally.add_eval(chunk.stars[144_000:], expected_star(chunk.scores[144_000:], config.noise))
    result = tally.result()
    assert result is not None
    assert 0.60 < result.floor_rmse < 0.67
    assert 0.90 < result.baseline_rmse < 1.15


# --- the rows themselves ------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [1000, 777, 1])
def test_rows_do_not_depend_on_the_size_of_chunks(chunk_rows: int) -> None:
    config = SMALL if chunk_rows > 1 else SMALL.model_copy(update={"num_interactions": 50})
    for whole, pieces in zip(together(config), together(config, chunk_rows), strict=True):
        np.testing.assert_array_equal(whole, pieces)


def test_any_number_of_rows_passes_through_small_chunks() -> None:
    num_rows, last = 0, 0
    config = SMALL.model_copy(update={"num_interactions": 400_000})
    for batch in SyntheticSource(config, chunk_rows=10_000).rows():
        assert isinstance(batch, Rows)
        assert len(batch.in_eval) == 10_000
        assert all(len(column) == 10_000 for column in batch.columns)
        times = list(map(int, batch.columns[-1]))
        assert times == sorted(times)
        assert times[0] >= last
        num_rows, last = num_rows + len(times), times[-1]
    assert num_rows == 400_000


def test_another_seed_gives_other_rows() -> None:
    other = together(SMALL.model_copy(update={"seed": SMALL.seed + 1}))
    assert (together(SMALL).items != other.items).mean() > 0.5


def test_time_runs_through_one_year(rows: Interactions) -> None:
    assert (np.diff(rows.timestamps) >= 0).all()
    assert FIRST_SECOND <= rows.timestamps[0] < FIRST_SECOND + 3600
    end = FIRST_SECOND + SECONDS_PER_YEAR
    assert end - 3600 < rows.timestamps[-1] < end


def test_popularity_follows_the_zipf_law(rows: Interactions) -> None:
    early = rows.items[: len(rows.items) // 2]
    counts = np.sort(np.bincount(early, minlength=DEFAULTS.num_items))[::-1]
    ranks = np.arange(5, 200)  # beyond, sorting by count bends the line
    slope = np.polyfit(np.log(ranks + 1), np.log(counts[ranks]), 1)[0]
    assert slope == pytest.approx(-DEFAULTS.zipf, abs=0.1)


def test_zipf_zero_makes_items_equally_popular() -> None:
    flat = together(SMALL.model_copy(update={"zipf": 0.0, "cold_item_percent": 0}))
    counts = np.bincount(flat.items, minlength=SMALL.num_items)
    assert counts.min() > 0.5 * counts.mean()


def test_users_differ_in_activity(rows: Interactions) -> None:
    counts = np.sort(np.bincount(rows.users, minlength=DEFAULTS.num_users))
    assert counts[-100:].sum() > 5 * counts[:100].sum()


def test_cold_items_appear_only_in_the_last_tenth(rows: Interactions, num_train: int) -> None:
    cold = World(DEFAULTS).cold_items
    assert len(cold) == 50
    assert not np.isin(rows.items[:num_train], cold).any()
    assert 0.02 < np.isin(rows.items[num_train:], cold).mean() < 0.08


def test_segments_and_categories_tell_something_about_the_factors() -> None:
    world = World(DEFAULTS)
    for factors, groups in (
        (world.user_factors, world.user_segment),
        (world.item_factors, world.item_category),
    ):
        means = np.stack(
            [factors[groups == group].mean(axis=0) for group in range(groups.max() + 1)]
        )
        explained = 1 - ((factors - means[groups]) ** 2).sum() / (factors**2).sum()
        assert 0.3 < explained < 0.7


def test_one_user_and_one_item_are_enough_for_a_world() -> None:
    config = SyntheticData(kind="synthetic", num_users=1, num_items=1, num_interactions=20)
    assert np.isfinite(together(config).scores).all()


# --- splits -------------------------------------------------------------------------------------


def held_out(config: SyntheticData) -> tuple[NDArray[np.bool_], list[tuple[str, str]]]:
    batches = list(SyntheticSource(config, chunk_rows=500).rows())
    pairs = [pair for b in batches for pair in zip(b.columns[0], b.columns[1], strict=True)]
    return np.concatenate([b.in_eval for b in batches]), pairs


@pytest.mark.parametrize("percent", [1, 7, 10, 50])
def test_a_time_split_is_the_exact_share_at_the_end(percent: int) -> None:
    split = TimeSplit(kind="time", eval_percent=percent)
    in_eval, _ = held_out(SMALL.model_copy(update={"split": split}))
    assert in_eval.sum() == 3000 * percent // 100
    assert in_eval[-int(in_eval.sum()) :].all()


def test_a_hash_split_keeps_a_pair_on_one_side() -> None:
    split = HashSplit(kind="hash", eval_percent=30)
    in_eval, pairs = held_out(SMALL.model_copy(update={"split": split}))
    sides: dict[tuple[str, str], bool] = {}
    repeats = 0
    for pair, side in zip(pairs, in_eval, strict=True):
        repeats += pair in sides
        assert sides.setdefault(pair, bool(side)) == bool(side)
    assert repeats > 100
    assert 0.2 < np.mean(list(sides.values())) < 0.4


def test_the_truth_is_about_the_held_out_rows_whatever_the_split() -> None:
    split = HashSplit(kind="hash", eval_percent=30)
    config = SMALL.model_copy(update={"split": split})
    source = SyntheticSource(config, chunk_rows=500)
    in_eval = np.concatenate([batch.in_eval for batch in source.rows()])
    chunk, result = together(config), source.truth()
    assert result is not None
    stars = chunk.stars[in_eval]
    best = expected_star(chunk.scores[in_eval], config.noise)
    errors = (stars - best) ** 2
    assert result.num_eval == len(stars)
    assert result.baseline_rmse == pytest.approx(rmse(chunk.stars[~in_eval].mean(), stars))
    assert result.floor_rmse == pytest.approx(rmse(best, stars))
    assert result.floor_stderr == pytest.approx(errors.std() / math.sqrt(len(errors)))
