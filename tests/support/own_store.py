"""An SQLite store of one test's own, and the tracker that reports to it."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

from rowstep.components.tracking import Tracker, open_tracker


def rows_in(database: Path, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
    """Ask a store's SQLite file behind MLflow's back."""
    opened = sqlite3.connect(database)
    try:
        return opened.execute(query, arguments).fetchall()
    finally:
        opened.close()


class OwnStore:
    """The store `<folder>/mlflow.db`, copied from a template, and what its trackers complain of."""

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder, self.spool, self.database = folder, folder / "spool", folder / "mlflow.db"
        shutil.copy(template, self.database)
        self.uri = f"sqlite:///{self.database}"
        self.problems: list[str] = []

    def tracker(self) -> Tracker:
        return open_tracker(
            self.uri,
            "movies",
            "one",
            "key-1",
            self.spool,
            on_problem=self.problems.append,
            artifact_root=self.folder / "artifacts",
        )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return rows_in(self.database, query)

    def tags(self) -> dict[str, str]:
        return dict(self.rows("select key, value from tags"))
