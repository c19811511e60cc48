"""MLflow's own server as a process of its own, on a free port of this machine."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(is_done: Callable[[], bool], seconds: float = 120) -> None:
    """Return as soon as the condition holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


class MlflowServer:
    """A server on the SQLite store `<folder>/mlflow.db`; it can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.database = folder / "mlflow.db"
        self.artifacts = folder / "server-artifacts"
        self.log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> MlflowServer:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--artifacts-destination", str(self.artifacts)]
        environment = {
            **os.environ,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_until(self._answers, 240)
        except BaseException:
            self.kill()
            raise
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """Kill -9 the server and its workers."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @contextmanager
    def running(self) -> Iterator[str]:
        """Run the server until the block ends, and return its URI."""
        try:
            yield self.start().uri
        finally:
            self.kill()

    def rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Ask the database behind the back of the server."""
        database = sqlite3.connect(self.database, timeout=60)
        try:
            return database.execute(query, arguments).fetchall()
        finally:
            database.close()
