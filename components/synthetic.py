"""A world of users and items whose truth is known, and the interactions it sends forth.

    score = MEAN + b_user + b_item + <p_user, q_item>
    star  = clip(round(score + noise * N(0, 1)), 1, 5)

Items follow a Zipf law, users differ in activity, and a share of the items appears only in the
last tenth of the period. A user may rate an item again; the noise is drawn anew each time.

Every number is a pure function of the seed and of its place: row i reads its own stretch of a
counter-based stream. So rows can be made in chunks of any size and come out the same, and memory
is bounded by the parameters of users and items, however many rows there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowstep.components.part_files import Rows
from rowstep.components.splits import hash_split, num_held_out
from rowstep.components.truth import Truth, TruthTally, expected_star
from rowstep.configs.schema import SyntheticData

__all__ = ["GENERATOR_VERSION", "Interactions", "SyntheticSource", "World", "interactions"]

GENERATOR_VERSION = 1  # raise it with any change that moves a byte of the output
CHUNK_ROWS = 65_536

MEAN = 3.4
USER_BIAS_STDDEV = 0.45
ITEM_BIAS_STDDEV = 0.45
AFFINITY_STDDEV = 0.6  # of <p_user, q_item>
GROUP_SHARE = 0.5  # part of a factor's variance that the segment or the category explains
ACTIVITY_SIGMA = 0.6  # of the log-normal activity of users
NUM_SEGMENTS = 8
NUM_CATEGORIES = 12
FIRST_SECOND = 1_704_067_200  # 2024-01-01T00:00:00Z
SECONDS_PER_YEAR = 365 * 24 * 3600
_DRAWS_PER_ROW = 8  # 5 are used; Philox hands out 4 at a time

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Interactions(NamedTuple):
    """Consecutive rows, in time order; each field has shape [N]."""

    users: Ints
    items: Ints
    timestamps: Ints
    scores: Floats
    """True score: before noise, rounding and clipping."""
    stars: Floats


class World:
    """Hold the parameters of every user and every item, drawn from the seed."""

    def __init__(self, config: SyntheticData) -> None:
        """Draw the world of a config.

        Cost:
            rank + 3 floats a user, rank + 4 an item.
        """
        seed, rank = config.seed, config.rank
        # Two factors of this deviation give <p, q> the variance rank * scale^4.
        scale = (AFFINITY_STDDEV**2 / rank) ** 0.25
        self.user_bias = USER_BIAS_STDDEV * _standardised(
            _normals(seed, "user_bias", config.num_users)
        )
        self.item_bias = ITEM_BIAS_STDDEV * _standardised(
            _normals(seed, "item_bias", config.num_items)
        )
        self.user_segment = _groups(seed, "segment", config.num_users, NUM_SEGMENTS)
        self.item_category = _groups(seed, "category", config.num_items, NUM_CATEGORIES)
        self.user_factors = scale * _factors(
            seed, "user_factors", self.user_segment, NUM_SEGMENTS, rank
        )
        self.item_factors = scale * _factors(
            seed, "item_factors", self.item_category, NUM_CATEGORIES, rank
        )
        activity = np.exp(ACTIVITY_SIGMA * _normals(seed, "activity", config.num_users))
        self.user_cumulative = np.cumsum(activity)
        order = np.argsort(_uniforms(seed, "popularity", config.num_items), kind="stable")
        weights = np.empty(config.num_items)
        weights[order] = np.arange(1.0, config.num_items + 1.0) ** -config.zipf
        self.cold_items = order[_cold_ranks(config)]
        self.late_item_cumulative = np.cumsum(weights)
        weights[self.cold_items] = 0.0
        self.item_cumulative = np.cumsum(weights)

    def scores(self, users: Ints, items: Ints) -> Floats:
        """Return the true scores of pairs, shape [N]."""
        affinity = np.einsum("nd,nd->n", self.user_factors[users], self.item_factors[items])
        return np.asarray(MEAN + self.user_bias[users] + self.item_bias[items] + affinity)


def interactions(
    config: SyntheticData, world: World, chunk_rows: int = CHUNK_ROWS
) -> Iterator[Interactions]:
    """Yield all rows in time order, at most `chunk_rows` at a time.

    The rows do not depend on `chunk_rows`.
    """
    for first in range(0, config.num_interactions, chunk_rows):
        rows = np.arange(first, min(first + chunk_rows, config.num_interactions))
        yield _rows(config, world, rows)


class SyntheticSource:
    """Turn the generated interactions into rows of text, split, with their truth tallied."""

    kind = "synthetic"
    columns = ("user_id", "item_id", "user_segment", "item_category", "rating", "timestamp")

    def __init__(self, config: SyntheticData, chunk_rows: int = CHUNK_ROWS) -> None:
        self._config = config
        self._chunk_rows = chunk_rows
        self._tally = TruthTally()

    def identity(self) -> dict[str, object]:
        """Return what decides the bytes of the output."""
        return {"generator": GENERATOR_VERSION, "config": self._config.model_dump(mode="json")}

    def rows(self) -> Iterator[Rows]:
        """Yield the rows of both splits in time order."""
        config = self._config
        world = World(config)
        self._tally = TruthTally()
        # One string an id, shared by all its rows.
        users = np.array([f"u{i}" for i in range(config.num_users)], dtype=object)
        items = np.array([f"i{i}" for i in range(config.num_items)], dtype=object)
        segments = np.array([f"s{i}" for i in range(NUM_SEGMENTS)], dtype=object)
        categories = np.array([f"c{i}" for i in range(NUM_CATEGORIES)], dtype=object)
        stars = np.array([f"{i}.0" for i in range(6)], dtype=object)
        first = 0
        for chunk in interactions(config, world, self._chunk_rows):
            user_ids, item_ids = users[chunk.users].tolist(), items[chunk.items].tolist()
            columns = (
                user_ids,
                item_ids,
                segments[world.user_segment[chunk.users]].tolist(),
                categories[world.item_category[chunk.items]].tolist(),
                stars[chunk.stars.astype(np.int64)].tolist(),
                list(map(str, chunk.timestamps.tolist())),
            )
            in_eval = self._in_eval(first, user_ids, item_ids)
            first += len(user_ids)
            self._tally.add_train(chunk.stars[~in_eval])
            best = expected_star(chunk.scores[in_eval], config.noise)
            self._tally.add_eval(chunk.stars[in_eval], best)
            yield Rows(columns, in_eval)

    def truth(self) -> Truth | None:
        """Return the truth about the rows that `rows` has yielded."""
        return self._tally.result()

    def _in_eval(self, first: int, users: list[str], items: list[str]) -> NDArray[np.bool_]:
        split = self._config.split
        if split.kind == "hash":
            return hash_split(users, items, split.eval_percent)
        # Rows are made in time order, so the split is a row number.
        num_rows = self._config.num_interactions
        boundary = num_rows - num_held_out(num_rows, split.eval_percent)
        return np.arange(first, first + len(users)) >= boundary


def _rows(config: SyntheticData, world: World, rows: Ints) -> Interactions:
    first, num_rows = int(rows[0]), config.num_interactions
    draws = _uniforms(config.seed, "rows", len(rows), _DRAWS_PER_ROW, first)
    users = _pick(world.user_cumulative, draws[:, 0])
    # The same row number as the time split at 10 %, so that its training split has no cold item.
    late = rows >= num_rows - num_held_out(num_rows, 10)
    items = np.where(
        late,
        _pick(world.late_item_cumulative, draws[:, 1]),
        _pick(world.item_cumulative, draws[:, 1]),
    )
    # One event in each of `num_rows` equal stretches of the year, somewhere within it.
    timestamps = FIRST_SECOND + ((rows + draws[:, 2]) * (SECONDS_PER_YEAR / num_rows)).astype(
        np.int64
    )
    scores = world.scores(users, items)
    noise = config.noise * _box_muller(draws[:, 3], draws[:, 4])
    stars = np.clip(np.rint(scores + noise), 1.0, 5.0)
    return Interactions(users, items, timestamps, scores, stars)


def _uniforms(seed: int, stream: str, count: int, width: int = 1, first: int = 0) -> Floats:
    """Return rows `first` to `first + count` of a stream of uniforms in [0, 1), [count, width]."""
    name = f"{GENERATOR_VERSION}/{seed}/{stream}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    if first * width % 4:
        raise ValueError(f"first: first * width must be a multiple of 4. Got {first} * {width}.")
    bits = np.random.Philox(key=key, counter=first * width // 4)
    draws = np.random.Generator(bits).random((count, width))
    return draws if width > 1 else draws[:, 0]


def _box_muller(radius: Floats, angle: Floats) -> Floats:
    """Return normals from two uniforms each: a fixed number of draws, unlike a rejection method."""
    return np.asarray(np.sqrt(-2.0 * np.log1p(-radius)) * np.cos(2.0 * np.pi * angle))


def _normals(seed: int, stream: str, count: int) -> Floats:
    draws = _uniforms(seed, stream, count, 2)
    return _box_muller(draws[:, 0], draws[:, 1])


def _standardised(values: Floats) -> Floats:
    """Shift and scale columns to mean 0 and deviation 1, so that no seed is harder than another."""
    deviation = values.std(axis=0)
    return np.asarray((values - values.mean(axis=0)) / np.where(deviation > 0.0, deviation, 1.0))


def _groups(seed: int, stream: str, count: int, num_groups: int) -> Ints:
    return (_uniforms(seed, stream, count) * num_groups).astype(np.int64)


def _factors(seed: int, stream: str, groups: Ints, num_groups: int, rank: int) -> Floats:
    """Return factors [len(groups), rank] that their group explains in part."""
    centres = _normals(seed, f"{stream}/centre", num_groups * rank).reshape(num_groups, rank)
    own = _normals(seed, f"{stream}/own", len(groups) * rank).reshape(len(groups), rank)
    mixed = np.sqrt(GROUP_SHARE) * _standardised(centres)[groups] + np.sqrt(1 - GROUP_SHARE) * own
    return _standardised(mixed)


def _cold_ranks(config: SyntheticData) -> Ints:
    """Spread the cold items evenly over the popularity ranks, so that no seed hides the head."""
    num_cold = config.num_items * config.cold_item_percent // 100
    if num_cold == 0:
        return np.empty(0, dtype=np.int64)
    return ((np.arange(num_cold) + 0.5) * config.num_items / num_cold).astype(np.int64)


def _pick(cumulative: Floats, draws: Floats) -> Ints:
    """Draw indices with the given cumulative weights; a weight of zero is never drawn."""
    return np.asarray(np.searchsorted(cumulative, draws * cumulative[-1], side="right"))
