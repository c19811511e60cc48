"""A password is planted wherever one can get in; afterwards everything that was written is read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from mlflow_server import free_port
from switchable_proxy import SwitchableProxy

from rowstep.components.tracking import TrackingError, check_uri, open_tracker
from rowstep.components.tracking.redact import (
    is_secret_name,
    redact,
    redact_document,
    redact_text,
)

SECRET = "hunter2-and/more"
CHILD = textwrap.dedent("""
    import os, sys, time, traceback
    from pathlib import Path
    from rowstep.components.tracking import DatasetLink, ModelLink, open_tracker, sync

    uri, spool, secret = sys.argv[1], Path(sys.argv[2]), os.environ["PLANTED"]
    del os.environ["PLANTED"]
    root = spool.parent / "artifacts"

    # A configured or inherited URI with a user name is refused, whatever else goes wrong.
    for bad in (f"http://user:{secret}@host/x", os.environ["MLFLOW_TRACKING_URI"]):
        try:
            try:
                raise ValueError("before")
            except ValueError:
                open_tracker(bad, "e", "r", "k", spool, on_problem=print)
        except Exception:  # printed whole, chain included: the test reads all that is printed
            traceback.print_exc()

    said = []
    tracker = open_tracker(
        uri, "e", "r", "k", spool, on_problem=said.append, artifact_root=root
    )
    places = {
        "link": f"s3://user:{secret}@bucket/x",
        "list": [f"postgresql://u:{secret}@h/db", {"password": secret}, [{"token": secret}]],
        "signed": f"https://b.s3.com/x?X-Amz-Date=1&X-Amz-Signature={secret}&y=2",
        "sas": f"https://b.blob.com/x?sv=1&sig={secret}",
        "google": f"see https://g.com/x?X-Goog-Signature={secret} for more",
        "header": f"Authorization: Bearer {secret}",
        "words": f"password={secret}; api_key: '{secret}' and secret_key = {secret}",
        "environment": f"it is {secret}",
        "api_key": secret, "db.password": secret, "authToken": secret, "HF_TOKEN": secret,
        "connection_string": f"Server=x;Pwd={secret}", "aws_secret_access_key": secret,
        "service.credential": secret, "Authorization": f"Basic {secret}", "plain": "harmless",
    }
    tracker.start(places, {key: str(value) for key, value in places.items()})
    tracker.set_tags({key: str(value) for key, value in places.items()})
    tracker.log_text("config.json", __import__("json").dumps({"a": places}))
    tracker.log_text("notes.txt", "\\n".join(f"{k}={v}" for k, v in places.items()))
    tracker.log_inputs([DatasetLink("data", "1", places, "train")])
    tracker.log_model_link(ModelLink("m", places["signed"], {"a": places["link"]}, places))
    tracker.log_metrics(1, {"loss": 1.0})
    tracker.log_metrics(2, {"loss": f"{secret}"})
    deadline = time.monotonic() + 100
    while tracker.run_id is None and "must be reachable" not in str(said):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    print("problems", said)
    report = tracker.close("FAILED", 10)
    print(report)
    print(sync(spool, timeout_seconds=2))
    print("run", report.run_id)
""")


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PLANTED": SECRET,
        "MLFLOW_TRACKING_URI": f"http://someone:{SECRET}@127.0.0.1:9/",
        "MLFLOW_TRACKING_USERNAME": "someone",
        "MLFLOW_TRACKING_PASSWORD": SECRET,
        "MLFLOW_TRACKING_TOKEN": SECRET,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }


def run_child(
    uri: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, uri, str(folder / "spool")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def assert_nowhere(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    for secret in (SECRET, SECRET.split("/")[0], SECRET.split("/")[1] + "@"):
        assert secret not in done.stdout
        assert secret not in done.stderr
        for file in folder.rglob("*"):
            if file.is_file():
                assert secret.encode() not in file.read_bytes(), file


def test_a_planted_password_is_nowhere(tmp_path: Path, mlflow_template_db: Path) -> None:
    shutil.copy(mlflow_template_db, tmp_path / "mlflow.db")
    done = run_child(f"sqlite:///{tmp_path}/mlflow.db", tmp_path, environment())
    assert "num_unsent=1" in done.stdout  # the metric that is no number
    assert done.stderr.count("must not hold credentials") == 2
    assert (tmp_path / "spool" / "journal.jsonl").read_text().count("[redacted]") > 20
    assert "harmless" in (tmp_path / "spool" / "journal.jsonl").read_text()
    assert len(list(tmp_path.rglob("notes.txt"))) == 1
    assert b"harmless" in (tmp_path / "mlflow.db").read_bytes()
    assert_nowhere(done, tmp_path)


def test_a_password_that_is_refused_is_nowhere(tmp_path: Path) -> None:
    proxy = SwitchableProxy(free_port())
    proxy.switch("401")
    try:
        done = run_child(proxy.uri, tmp_path, environment())
    finally:
        proxy.close()
    assert proxy.num_requests["401"] > 0
    assert "MLFLOW_TRACKING_PASSWORD" in done.stdout  # says what to set
    assert "They wait in" in done.stdout
    assert_nowhere(done, tmp_path)


# --- the rules --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "password", "db_password", "DB.PASSWORD", "authToken", "api_key", "apiKey", "x-api-key",
        "client_secret", "credentials", "Authorization", "connection_string", "aws_access_key_id",
        "private_key", "MLFLOW_TRACKING_TOKEN", "hf/token",
    ],
)  # fmt: skip
def test_names_of_credentials_are_known(name: str) -> None:
    assert is_secret_name(name)
    assert redact(name, "x") == "[redacted]"


@pytest.mark.parametrize(
    "name",
    [
        "num_tokens", "tokenizer", "opt.beta_1", "data.key", "secretary", "train.seed", "author",
        "keyboard", "assignment", "rowstep.run_key", "design", "passwordless_rows",
    ],
)  # fmt: skip
def test_harmless_names_stay(name: str) -> None:
    assert redact(name, "x") == "x"


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////data/a@b/mlflow.db",
        "https://host:5000/#/experiments/1/runs/2",
        "https://host/x?page=2&size=10",
        "lr=0.001; beta_1=0.9",
        "mail me@example.org",
        '{"tokens": 12, "password": null}',
        "The token bucket is full",
    ],
)
def test_harmless_texts_stay(text: str) -> None:
    assert redact_text(text) == text
    assert redact_document(text) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("s3://u:p/w?@bucket/x", "s3://bucket/x"),
        ("https://tok@host/x", "https://host/x"),
        ("see ftp://u:p@h/x, s3://a:b@c/d", "see ftp://h/x, s3://c/d"),
        ("https://h/x?sig=abc&a=1#top", "https://h/x?[redacted]#top"),
        ("password=abc def", "password=[redacted] def"),
        ("api_key: 'a b c'", "api_key: '[redacted]'"),
        ('{"token": "abc"}', '{"token": "[redacted]"}'),
        ("Authorization: Bearer abc.def", "Authorization: [redacted]"),
        ("header Bearer abcdef.ghi ends", "header Bearer [redacted] ends"),
    ],
)
def test_credentials_are_cut_out_of_texts(text: str, clean: str) -> None:
    assert redact_text(text) == clean


def test_a_secret_of_the_environment_is_cut_out_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a-long-token")
    monkeypatch.setenv("SHORT_PASSWORD", "abc")
    assert redact_text("it is a-long-token, abc") == "it is [redacted], abc"


@pytest.mark.parametrize("name", ["PWD", "OLDPWD"])
@pytest.mark.parametrize("folder", ["there", "gone"])
def test_the_working_folder_is_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, folder: str
) -> None:
    place = tmp_path if folder == "there" else tmp_path / "gone"
    monkeypatch.setenv(name, str(place))
    text = f"{place}/data/part-1.csv"
    assert redact_text(text) == text
    assert redact("uri", [text]) == [text]


def test_where_credentials_lie_is_no_secret_and_a_key_like_a_path_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key.json").write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    monkeypatch.setenv("SAS_HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "/wJalrXUtnFEMI/K7MDENG")
    monkeypatch.setenv("DB_PWD", "correct-horse")
    text = f"{tmp_path}/key.json and {tmp_path}/out"
    assert redact_text(text) == text
    assert redact_text("/wJalrXUtnFEMI/K7MDENG, correct-horse") == "[redacted], [redacted]"


def test_a_refused_uri_is_no_part_of_the_chain_of_errors(tmp_path: Path) -> None:
    for refuse in (check_uri, lambda u: open_tracker(u, "", "", "", tmp_path, on_problem=print)):
        with pytest.raises(TrackingError) as caught:
            refuse(f"http://user:{SECRET}@host")
        error: BaseException | None = caught.value
        while error is not None:
            assert SECRET.split("/")[0] not in f"{error!r} {error.__dict__}"
            error = error.__cause__ or error.__context__
