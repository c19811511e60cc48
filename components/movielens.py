"""Read MovieLens 100K from a folder that the user supplies, joined with its users and films.

`item_genre` is the first genre that the publisher's list flags; `item_year` the year in the
film's title. One film has neither title nor year: it gets the median year of the catalogue, so
that the column has no gap for the sake of nine ratings.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rowstep.components.movielens_files import read_fold, read_known
from rowstep.components.part_files import Rows
from rowstep.components.splits import hash_split, time_split
from rowstep.configs.schema import MovieLens100K

__all__ = ["MovieLensSource"]

GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip
_YEAR_IN_TITLE = re.compile(r"\((\d{4})\)")

User = tuple[str, str, str]  # age, gender, occupation
Item = tuple[str, str]  # genre, year


class MovieLensSource:
    """Turn the published files into rows; all of them are checked before the first is made.

    The official split trains on `<fold>.base` and evaluates on `<fold>.test`. The others divide
    `<fold>.base` alone, and `<fold>.test` is never opened, so that settings can be chosen without
    having looked at it.
    """

    kind = "movielens_100k"
    columns = (
        "user_id", "item_id", "user_age", "user_gender", "user_occupation", "item_genre",
        "item_year", "rating", "timestamp",
    )  # fmt: skip

    def __init__(self, config: MovieLens100K) -> None:
        self._config = config
        folder = Path(config.path)
        parts = ("base", "test") if config.split.kind == "official" else ("base",)
        self._parts = [read_fold(folder, config.fold, part) for part in parts]
        self._users = _read_users(folder)
        self._items = _read_items(folder)

    def identity(self) -> dict[str, object]:
        """Return what decides the rows: settings and contents, not the folder or its layout."""
        settings = self._config.model_dump(mode="json", exclude={"path"})
        tables = json.dumps([self._users, self._items]).encode()
        contents = [*self._parts, tables]
        return {"config": settings, "files": [hashlib.sha256(c).hexdigest() for c in contents]}

    def rows(self) -> Iterator[Rows]:
        """Yield the rows, one batch a file."""
        split = self._config.split
        for part, data in enumerate(self._parts):
            lines = data.decode().splitlines()
            fields = (line.split("\t") for line in lines)
            users, items, ratings, timestamps = zip(*fields, strict=True)
            if split.kind == "official":
                in_eval = np.full(len(lines), part == 1)
            elif split.kind == "time":
                in_eval = time_split(np.array(timestamps, dtype=np.int64), split.eval_percent)
            else:
                in_eval = hash_split(users, items, split.eval_percent)
            ages, genders, occupations = zip(*map(self._users.__getitem__, users), strict=True)
            genres, years = zip(*map(self._items.__getitem__, items), strict=True)
            stars = [f"{rating}.0" for rating in ratings]
            yield Rows(
                (users, items, ages, genders, occupations, genres, years, stars, timestamps),
                in_eval,
            )

    def truth(self) -> None:
        """Return nothing: real data keeps its truth to itself."""
        return


def _read_users(folder: Path) -> dict[str, User]:
    if _has_only(folder, "ml-100k.user", "u.user"):
        # Without its header and with other delimiters it is u.user to the byte.
        data = read_known(folder, "ml-100k.user").split(b"\n", 1)[1].replace(b"\t", b"|")
    else:
        data = read_known(folder, "u.user")
    rows = (line.split("|") for line in data.decode().splitlines())
    return {user: (age, gender, occupation) for user, age, gender, occupation, _ in rows}


def _read_items(folder: Path) -> dict[str, Item]:
    if _has_only(folder, "ml-100k.item", "u.item"):
        items = _recbole_items(read_known(folder, "ml-100k.item"))
    else:
        items = _published_items(read_known(folder, "u.item"))
    median = int(statistics.median(int(year) for _, year in items.values() if year))
    return {item: (genre, year or str(median)) for item, (genre, year) in items.items()}


def _has_only(folder: Path, name: str, published: str) -> bool:
    return (folder / name).exists() and not (folder / published).exists()


def _published_items(data: bytes) -> dict[str, Item]:
    items = {}
    for line in data.decode("latin-1").split("\n")[:-1]:
        fields = line.split("|")
        items[fields[0]] = (GENRES[fields[5:].index("1")], _year(fields[1]))
    return items


def _recbole_items(data: bytes) -> dict[str, Item]:
    items = {}
    for line in data.decode().split("\n")[1:-1]:
        item, title, year, genres = line.split("\t")
        items[item] = (genres.split(" ")[0], year if year.isdigit() else _year(title))
    return items


def _year(title: str) -> str:
    match = _YEAR_IN_TITLE.search(title)
    return match.group(1) if match else ""
