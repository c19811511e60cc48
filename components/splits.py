"""Which rows are held out for evaluation: decided once, from the data alone, never by chance."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["hash_split", "num_held_out", "time_split"]

_SALT = b"rowstep-split-1"  # changing it moves rows between splits: never change it, add another
_HASH_RANGE = 2**64


def num_held_out(num_rows: int, eval_percent: int) -> int:
    """Return how many of `num_rows` a time split holds out, rounded down."""
    return num_rows * eval_percent // 100


def hash_split(users: Iterable[str], items: Iterable[str], eval_percent: int) -> NDArray[np.bool_]:
    """Mark the rows whose (user, item) pair hashes into the evaluation split.

    A pair lands on the same side for ever: on another machine, in another order, among other
    rows. A larger `eval_percent` only adds pairs. Repeats of a pair stay together, so the split
    hits `eval_percent` in expectation, not exactly.

    Args:
        users: User ids, one a row.
        items: Item ids, one a row.
        eval_percent: Share held out, in percent.

    Returns:
        True for evaluation rows, shape [N].

    Cost:
        One BLAKE2b of a short string a row.
    """
    threshold = _HASH_RANGE * eval_percent // 100
    blake2b = hashlib.blake2b
    # The length keeps ("u1", "2") and ("u", "12") apart.
    texts = (f"{len(user)}:{user}{item}".encode() for user, item in zip(users, items, strict=True))
    digests = b"".join(blake2b(text, digest_size=8, salt=_SALT).digest() for text in texts)
    hashes: NDArray[np.uint64] = np.frombuffer(digests, dtype="<u8")
    return np.asarray(hashes < np.uint64(threshold))


def time_split(timestamps: NDArray[np.int64], eval_percent: int) -> NDArray[np.bool_]:
    """Mark the latest rows: exactly `num_held_out` of them.

    Among rows of one timestamp the later row counts as the later event.

    Args:
        timestamps: Seconds or any other unit that grows with time, in row order, shape [N].
        eval_percent: Share held out, in percent.

    Returns:
        True for evaluation rows, shape [N].

    Cost:
        O(N) time and memory: a partial sort, never a full one.
    """
    num_eval = num_held_out(len(timestamps), eval_percent)
    if num_eval == 0:
        return np.zeros(len(timestamps), dtype=np.bool_)
    first = len(timestamps) - num_eval
    threshold = np.partition(timestamps, first)[first]
    in_eval: NDArray[np.bool_] = timestamps > threshold
    tied = np.flatnonzero(timestamps == threshold)
    in_eval[tied[len(tied) - (num_eval - int(in_eval.sum())) :]] = True
    return in_eval
