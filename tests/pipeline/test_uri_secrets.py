"""Credentials in a tracking URI reach neither ML Metadata nor the folder of a run.

Each URI goes in wherever one can be given; afterwards every byte that was written is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rowstep import RowstepError
from rowstep.configs import ConfigError, RunConfig, load_config
from rowstep.pipeline.cli import main
from rowstep.pipeline.runs import Run

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
SECRET = "hunter2secret"
WITH_CREDENTIALS = [
    f"http://ann:{SECRET}@host:5000",
    f"http://ann:hun/{SECRET}@host:5000",
    f"http://ann:hun#{SECRET}@host",
    f"http://host/api?token={SECRET}",
    f"http://host/api?token={SECRET}@more",
    f"http://host/#access_token={SECRET}",
    f"http://host/api%3Ftoken={SECRET}",
    f"http://ann%3A{SECRET}%40host",
    f"http:///ann:{SECRET}@host",
    f"//ann:{SECRET}@host:5000",
    f"ann:{SECRET}@host:5000",
    f"postgresql://h/db?user=ann&pass={SECRET}",
    f"mssql+pyodbc:///?odbc_connect=UID%3Dann%3BPWD%3D{SECRET}",
    f"sqlite+pysqlcipher://:{SECRET}@//data/mlflow.db",
]
WITHOUT = [
    "http://host:5000/team",
    "https://host/ml?page=1",
    "databricks://profile",
    "sqlite:////data/a@b/mlflow.db",
    "postgresql://host/db?sslmode=require",
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROWSTEP_HOME", str(tmp_path))
    return tmp_path


def holders(folder: Path, text: str) -> list[str]:
    """Return the files whose bytes hold the text."""
    return [
        file.name
        for file in folder.rglob("*")
        if file.is_file() and text.encode() in file.read_bytes()
    ]


def unchecked(uri: str) -> RunConfig:
    """Return a config as a program makes it, past the schema."""
    config = load_config(TINY)
    return config.model_copy(update={"tracking": config.tracking.model_copy(update={"uri": uri})})


def recorded(properties: dict[str, Any], folder: Path) -> None:
    """Write execution properties into ML Metadata, as TFX does."""
    from ml_metadata.metadata_store import metadata_store
    from ml_metadata.proto import metadata_store_pb2 as pb

    place = pb.ConnectionConfig()
    place.sqlite.filename_uri = str(folder / "metadata.sqlite")
    place.sqlite.connection_mode = pb.SqliteMetadataSourceConfig.READWRITE_OPENCREATE
    store = metadata_store.MetadataStore(place)
    kind = store.put_execution_type(pb.ExecutionType(name="RecTrainer"))
    execution = pb.Execution(type_id=kind)
    for name, value in properties.items():
        execution.custom_properties[name].string_value = str(value)
    store.put_executions([execution])


def trainer_properties(config: RunConfig, uri: str | None) -> dict[str, Any]:
    from tfx.types import channel, standard_artifacts

    from rowstep.components import RecTrainer

    trainer = RecTrainer(
        config,
        examples=channel.Channel(type=standard_artifacts.Examples),
        transform_graph=channel.Channel(type=standard_artifacts.TransformGraph),
        schema=channel.Channel(type=standard_artifacts.Schema),
        state_dir="/state",
        tracking_uri=uri,
    )
    return dict(trainer.spec.exec_properties)


def stock_properties(config: RunConfig, uri: str | None) -> dict[str, Any]:
    from rowstep.components.run_fn import custom_config

    return custom_config(config, state_dir="/state", tracking_uri=uri)


@pytest.mark.parametrize("uri", WITH_CREDENTIALS)
def test_a_config_with_credentials_leaves_no_run_and_no_word(home: Path, uri: str) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.uri: must not hold credentials") as caught:
        Run.create(load_config(TINY, [f"tracking.uri='{uri}'"]))
    assert SECRET not in repr(caught.value)
    for command in ("check", "run"):
        done = CliRunner().invoke(main, [command, str(TINY), "--set", f"tracking.uri='{uri}'"])
        assert done.exit_code == 2
        assert SECRET not in done.output
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("properties", [trainer_properties, stock_properties])
def test_ml_metadata_never_sees_credentials(
    home: Path, properties: Callable[[RunConfig, str | None], dict[str, Any]]
) -> None:
    for uri in WITH_CREDENTIALS:
        for config, argument in ((load_config(TINY), uri), (unchecked(uri), None)):
            with pytest.raises(RowstepError, match="must not hold credentials") as caught:
                recorded(properties(config, argument), home)
            assert SECRET not in str(caught.value)
    assert holders(home, SECRET) == []


@pytest.mark.parametrize("properties", [trainer_properties, stock_properties])
def test_a_uri_without_credentials_is_recorded_as_it_is(
    home: Path, properties: Callable[[RunConfig, str | None], dict[str, Any]]
) -> None:
    for uri in WITHOUT:
        config = load_config(TINY, [f"tracking.uri='{uri}'"])
        recorded(properties(config, uri), home)
        Run.create(config)
        assert {"metadata.sqlite", "config.json"} <= set(holders(home, uri))
