"""`rowstep sync` says what it sent, and what MLflow refused for good."""

from __future__ import annotations

import shutil
from pathlib import Path

from click.testing import CliRunner

from rowstep.components.tracking import open_tracker
from rowstep.components.tracking.journal import Journal
from rowstep.pipeline.cli import main


def test_sync_says_what_was_refused_and_where_it_lies(
    tmp_path: Path, mlflow_template_db: Path
) -> None:
    shutil.copy(mlflow_template_db, tmp_path / "mlflow.db")
    folder = tmp_path / "movies" / "state" / "key-1" / "tracking"
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = open_tracker(uri, "ratings", "first", "key-1", folder, on_problem=print)
    tracker.start({}, {})
    assert tracker.close("FINISHED").num_unsent == 0
    journal = Journal(folder)
    journal.append("metrics", step=2, metrics={"a[b]": 1.0})  # as no tracker writes it
    journal.close()

    done = CliRunner().invoke(main, ["sync", "--home", str(tmp_path)])
    assert "Got 1 that were refused for good and put aside" in done.output
    assert "a[b]" in done.output  # MLflow's reason
    assert f"Look at {folder / 'rejected.jsonl'}." in done.output
    assert "1 trainings looked at, nothing left to send, 1 refused and put aside" in done.output
    assert done.exit_code == 1

    again = CliRunner().invoke(main, ["sync", "--home", str(tmp_path)])
    assert again.output == "1 trainings looked at, nothing left to send\n"
    assert again.exit_code == 0
