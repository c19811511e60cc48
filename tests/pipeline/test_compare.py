"""`rowstep compare` finds runs in a real MLflow store, says how they differ, and what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from click.testing import CliRunner

from rowstep.pipeline.cli import main
from rowstep.pipeline.compare_read import Wanted, open_store, read_runs

mlflow = pytest.importorskip("mlflow")
PNG = b"\x89PNG\r\n"


class Store:
    """An MLflow store in a file, and the means to put runs into it."""

    def __init__(self, path: Path) -> None:
        self.path, self.uri = path, f"sqlite:///{path}"
        self.client = mlflow.MlflowClient(self.uri)

    def add(
        self,
        name: str,
        metrics: Mapping[str, Sequence[float]],
        params: Mapping[str, Any] | None = None,
        *,
        experiment: str = "ratings",
        status: str | None = "FINISHED",
        every: int = 10,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Make a run whose metrics have a value every so many steps; return its id."""
        from mlflow.entities import Metric, Param

        found = self.client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._experiment(experiment)
        run_id = self.client.create_run(place, start_time=1000, run_name=name).info.run_id
        rows = [
            Metric(key, value, 2000 + step, step)
            for key, values in metrics.items()
            for step, value in zip(range(every, 10**9, every), values, strict=False)
        ]
        for key, value in (tags or {}).items():
            self.client.set_tag(run_id, key, value)
        texts = [Param(key, str(value)) for key, value in (params or {}).items()]
        self.client.log_batch(run_id, rows, texts)
        if status is not None:
            self.client.set_terminated(run_id, status, end_time=66_000)
        return str(run_id)

    def _experiment(self, name: str) -> str:
        artifacts = (self.path.parent / "artifacts").as_uri()
        return str(self.client.create_experiment(name, artifact_location=artifacts))


@pytest.fixture
def store(tmp_path: Path, mlflow_template_db: Path) -> Store:
    shutil.copy(mlflow_template_db, tmp_path / "mlflow.db")
    return Store(tmp_path / "mlflow.db")


def training(scale: float) -> dict[str, list[float]]:
    return {
        "batch/loss": [scale * 4, scale * 2, scale],
        "batch/examples_per_second": [10.0, 5000.0, 5001.0],
        "epoch/val_rmse": [scale * 2, scale, scale * 1.5],
        "opt/iterations": [10, 20, 30],
        "opt/slot_m/rms": [scale / 10] * 3,
        "opt/slot_v/rms": [scale / 1000] * 3,
        "opt/global/update_ratio": [0.25, 0.125, 0.0625],
    }


@pytest.fixture
def two(store: Store) -> tuple[str, str]:
    params = {"opt.learning_rate": 0.001, "train.seed": 7}
    lazy = store.add("lazy", training(0.5), {**params, "opt.class": "LazyAdam"})
    lamb = store.add("lamb", training(0.25), {**params, "opt.class": "LAMB", "opt.clip": 1})
    return lazy, lamb


def compare(store: Store, *arguments: str, uri: bool = True) -> tuple[int, str, str]:
    folder = store.path.parent
    words = ["compare", *arguments, "--output", str(folder / "picture.png")]
    words += ["--uri", store.uri] if uri else ["--home", str(folder)]
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def cells(shown: str, name: str) -> list[str]:
    """Return the cells of the row that begins with a name."""
    [line] = [line for line in shown.splitlines() if line.strip().startswith(name)]
    return re.split(r"\s{2,}", line.strip().removeprefix(name).strip())


# --- what is shown --------------------------------------------------------------------------


def test_tables_name_what_differs_and_what_came_out(store: Store, two: tuple[str, str]) -> None:
    code, shown, errors = compare(store, *two)
    assert (code, errors) == (0, "")
    assert cells(shown, "opt.class") == ["LazyAdam", "LAMB"]
    assert cells(shown, "opt.clip") == ["-", "1"]
    assert "train.seed" not in shown
    assert cells(shown, "status") == ["finished", "finished"]
    assert cells(shown, "steps") == ["30", "30"]
    assert cells(shown, "time") == ["1 min 5 s", "1 min 5 s"]
    assert cells(shown, "epoch/val_rmse, best") == ["0.5", "0.25 *"]
    assert cells(shown, "epoch/val_rmse, last") == ["0.75", "0.375"]
    assert cells(shown, "batch/loss, last") == ["0.5", "0.25"]
    assert cells(shown, "batch/examples_per_second, median") == ["5,000", "5,000"]
    assert cells(shown, "opt/slot_m/rms, last") == ["0.05", "0.025"]
    assert cells(shown, "opt/slot_v/rms, last") == ["0.0005", "0.00025"]
    name = "opt/global/update_ratio, rows of the batch, last"
    assert cells(shown, name) == ["0.0625", "0.0625"]
    assert (store.path.parent / "picture.png").read_bytes().startswith(PNG)
    assert [path.name for path in store.path.parent.glob(".*")] == []


def test_equal_params_are_shown_on_request(store: Store, two: tuple[str, str]) -> None:
    shown = compare(store, *two, "--all")[1]
    assert cells(shown, "train.seed") == ["7", "7"]
    assert cells(shown, "opt.class") == ["LazyAdam", "LAMB"]


def test_the_link_leads_to_mlflow_s_page_on_these_runs(store: Store, two: tuple[str, str]) -> None:
    other = store.add("far", training(1), experiment="other")
    shown = compare(store, *two, other)[1]
    assert f"mlflow ui --backend-store-uri {store.uri}" in shown
    [link] = re.findall(r"http://127.0.0.1:5000/#/compare-runs\S+", shown)
    runs, experiments = re.fullmatch(r".*\?runs=(\S+)&experiments=(\S+)", link).groups()  # type: ignore[union-attr]
    assert not set('[]", ') & set(link)
    assert json.loads(unquote(runs)) == [*two, other]
    assert len(json.loads(unquote(experiments))) == 2


def test_what_only_the_config_file_has_is_found_without_a_word_of_downloads(
    store: Store, two: tuple[str, str]
) -> None:
    for run_id, seed in zip(two, (1, 2), strict=True):
        config = {"data": {"kind": "csv", "seed": seed}, "label": "rating"}
        store.client.log_text(run_id, json.dumps(config), "config.json")
    code, shown, errors = compare(store, *two)
    assert (code, errors) == (0, "")
    assert cells(shown, "data.seed") == ["1", "2"]
    assert "data.kind" not in shown
    store.client.log_text(two[1], "{", "config.json")
    code, shown, errors = compare(store, *two)
    assert code == 0 and "data.seed" not in shown
    assert "note   config files cannot be read of lamb: JSONDecodeError" in errors
    store.client.log_text(two[0], "{", "config.json")
    assert "cannot be read of lazy, lamb: JSONDecodeError" in compare(store, *two)[2]


def test_steps_per_second_stand_for_examples_where_those_are_not_counted(store: Store) -> None:
    slow = {"batch/loss": [1.0] * 3, "batch/steps_per_second": [0.01, 0.125, 0.125]}
    ids = [store.add("loop", training(1)), *(store.add(name, slow) for name in ("fit", "fit 2"))]
    shown = compare(store, *ids)[1]
    assert cells(shown, "batch/examples_per_second, median") == ["5,000", "-", "-"]
    assert cells(shown, "batch/steps_per_second, median") == ["-", "0.125", "0.125"]
    shown = compare(store, *ids[1:])[1]
    assert "batch/examples_per_second" not in shown
    assert cells(shown, "batch/steps_per_second, median") == ["0.125", "0.125"]


def test_the_time_of_a_run_that_went_on_later_is_marked(store: Store, two: tuple[str, str]) -> None:
    resumed = store.add("resumed", training(1), tags={"resume.count": "2"})
    shown = compare(store, two[0], resumed)[1]
    assert cells(shown, "time") == ["1 min 5 s", "1 min 5 s, with breaks"]


def test_a_run_that_is_not_done_or_reported_little_leaves_blanks(
    store: Store, two: tuple[str, str]
) -> None:
    running = store.add("running", {"batch/loss": [1.0]}, status=None)
    silent = store.add("silent", {}, status="FAILED")
    code, shown, _ = compare(store, two[0], running, silent)
    assert code == 0
    assert cells(shown, "status") == ["finished", "running", "failed"]
    assert cells(shown, "time") == ["1 min 5 s", "-", "1 min 5 s"]
    assert cells(shown, "steps") == ["30", "10", "-"]
    assert cells(shown, "epoch/val_rmse, best") == ["0.5", "-", "-"]
    assert cells(shown, "opt/slot_v/rms, last") == ["0.0005", "-", "-"]


def test_nan_is_shown_and_never_called_the_best(store: Store) -> None:
    nan, inf = float("nan"), float("inf")
    ids = [
        store.add("bad", {"epoch/val_rmse": [0.5, nan], "batch/loss": [1.0, nan]}),
        store.add("worse", {"epoch/val_rmse": [nan, nan], "batch/loss": [1.0, inf]}),
        store.add("good", {"epoch/val_rmse": [0.9, 0.8], "nonfinite/batch/loss": [1, 2]}),
    ]
    code, shown, _ = compare(store, *ids)
    assert code == 0
    assert cells(shown, "epoch/val_rmse, best") == ["0.5 *", "-", "0.8"]
    assert cells(shown, "epoch/val_rmse, last") == ["nan", "nan", "0.8"]
    assert cells(shown, "nonfinite/batch/loss, count") == ["-", "-", "2"]


def test_more_is_better_of_some_metrics_and_nothing_is_said_of_unknown_ones(store: Store) -> None:
    metrics = {"epoch/val_auc": [0.5, 0.7, 0.6], "epoch/val_fortune": [1.0, 3.0, 2.0]}
    ids = [store.add("one", metrics), store.add("two", {**metrics, "epoch/val_auc": [0.9]})]
    shown = compare(store, *ids)[1]
    assert cells(shown, "epoch/val_auc, best") == ["0.7", "0.9 *"]
    assert cells(shown, "epoch/val_fortune, last") == ["2", "2"]
    assert "epoch/val_fortune, best" not in shown


def test_many_runs_become_several_tables_without_losing_one(store: Store) -> None:
    ids = [store.add(f"run-{n}", {"batch/loss": [float(n)]}, {"n": n}) for n in range(14)]
    shown = compare(store, *ids)[1]
    rows = [line for line in shown.splitlines() if line.strip().startswith("batch/loss, last")]
    assert len(rows) > 1
    assert [int(n) for row in rows for n in row.split()[2:]] == [*range(14)]
    assert max(len(line) for line in shown.splitlines() if "run-" in line) <= 160


def test_a_history_of_several_pages_is_read_whole(store: Store) -> None:
    run_id = store.add("long", {"batch/loss": [1.0]})
    rows = [("batch/loss", 1.0 / step, step, run_id, step, 0) for step in range(11, 26_011)]
    with sqlite3.connect(store.path) as database:
        database.executemany(
            "insert into metrics (key, value, timestamp, run_uuid, step, is_nan) "
            "values (?, ?, ?, ?, ?, ?)",
            rows,
        )
    database.close()
    [run] = read_runs(open_store(store.uri), store.uri, [Wanted(run_id, None)])
    assert run.curves["batch/loss"].steps == (10, *range(11, 26_011))


# --- names ----------------------------------------------------------------------------------


def test_a_run_goes_by_its_id_or_by_experiment_and_name(store: Store, two: tuple[str, str]) -> None:
    store.add("it's one", training(1), experiment="a/b")
    by_id = compare(store, *two)[1]
    assert compare(store, "ratings/lazy", "ratings/lamb")[1] == by_id
    shown = compare(store, "ratings/lazy", "a/b/it's one", uri=False)[1]
    assert cells(shown, "batch/loss, last") == ["0.5", "1"]


def test_runs_of_one_name_are_told_apart(store: Store, two: tuple[str, str]) -> None:
    again = store.add("lazy", training(1))
    shown = compare(store, two[0], again)[1]
    assert f"lazy {two[0][:8]}: MLflow run {two[0]}, experiment 'ratings'" in shown
    assert f"lazy {again[:8]}: MLflow run {again}, experiment 'ratings'" in shown
    code, _, errors = compare(store, "ratings/lazy", two[1])
    assert code == 2
    assert "compare: a name must mean one run. Got 'lazy', which 2 runs of 'ratings'" in errors
    assert two[0] in errors and again in errors


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["ratings/lazy"], "compare: at least two runs must be named. Got 1."),
        (["ratings/lazy", "ratings/lazi"], "Got 'lazi'. Did you mean 'lazy'?"),
        (["ratings/lazy", "rating/lazy"], "Got 'rating/lazy'. Did you mean 'ratings'?"),
        (["ratings/lazy", "lamb"], "compare: a run must be named by its name in 'rowstep runs'"),
        (["ratings/lazy", "0" * 32], f"Got '{'0' * 32}', which is none of them in sqlite:"),
        (["ratings/lazy", "ratings/lazy"], "compare: every run may be named once."),
        (["ratings/lazy", "ratings/lamb", "--metric", "epoch/val_rmsf"], "Got 'epoch/val_rmsf'"),
    ],
)
def test_what_cannot_be_found_is_named(
    store: Store, two: tuple[str, str], names: list[str], words: str
) -> None:
    code, shown, errors = compare(store, *names)
    assert (code, shown) == (2, "")
    assert words in errors
    assert not (store.path.parent / "picture.png").exists()


def test_a_deleted_run_is_refused_with_the_way_back(store: Store, two: tuple[str, str]) -> None:
    store.client.delete_run(two[1])
    code, _, errors = compare(store, *two)
    assert code == 2
    assert f"Restore it with: mlflow runs restore --run-id {two[1]}" in errors


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("picture.txt", "Allowed: names that end in .png, .svg, .pdf."),
        ("no/such/folder.png", "must name a file in a folder that is there"),
        ("/proc/self/picture.png", "--output must be a file that can be written"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, output: str, words: str
) -> None:
    result = CliRunner().invoke(main, ["compare", "a", "b", "--output", str(tmp_path / output)])
    assert result.exit_code == 2
    assert words in result.stderr


# --- stores ---------------------------------------------------------------------------------


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    words = ["compare", "a", "b", "--home", str(tmp_path), "--output", str(tmp_path / "p.png")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "compare: the MLflow store must be there." in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{probe.getsockname()[1]}"
    words = ["compare", "a", "b", "--uri", uri, "--output", str(tmp_path / "p.png")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "compare: the MLflow store must answer. Got MlflowException" in result.stderr
    assert uri in result.stderr


def test_credentials_in_the_address_are_refused_and_not_repeated(tmp_path: Path) -> None:
    uri = "http://ann:sesame@127.0.0.1:1"
    words = ["compare", "a", "b", "--uri", uri, "--output", str(tmp_path / "p.png")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "must not hold credentials" in result.stderr
    assert "sesame" not in result.output + result.stderr
