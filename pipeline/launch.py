"""Start the worker of a run, show what it says, and see it to its end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rowstep.components.progress import EVENTS_VARIABLE
from rowstep.configs import RunConfig
from rowstep.pipeline.display import open_display
from rowstep.pipeline.report import summary_lines
from rowstep.pipeline.runs import Run, Status, unfinished_twin
from rowstep.pipeline.workspace import Workspace, default_home

EXIT_INTERRUPTED = 75
_POLL_SECONDS = 0.1
# Set before any import in the worker; a value that the user has set stays.
_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",  # errors go to the log file
    "GRPC_VERBOSITY": "ERROR",
    "GIT_PYTHON_REFRESH": "quiet",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "PYTHONUNBUFFERED": "1",
}


class Stops:
    """Hand SIGINT and SIGTERM to the worker while a `with` block runs, and remember them.

    A signal that comes while no worker runs is for the next one.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._worker: subprocess.Popen[bytes] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stops:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *problem: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def pass_on_to(self, worker: subprocess.Popen[bytes]) -> None:
        """Send what has come and what will come to a worker."""
        self._worker = worker
        if self.received is not None:
            worker.send_signal(self.received)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self._worker is not None:
            self._worker.send_signal(number)


def launch_or_resume(config: RunConfig, command: str, stops: Stops) -> int:
    """Go on with the newest run of a config if it did not finish, or begin one; see `launch`."""
    Workspace.of(config).refuse_if_busy()
    unfinished = unfinished_twin(config)
    run = unfinished or Run.create(config)
    return launch(run, command, stops, resumed=unfinished is not None)


def launch(run: Run, command: str, stops: Stops, *, resumed: bool) -> int:
    """Run the worker to its end and return the exit code of the command.

    0 finished (blessed or not), 1 failed or leaked, 75 stopped by a signal after a checkpoint,
    128 + n when the worker was killed by signal n.
    """
    run.set_status("running", pid=os.getpid())
    offset = run.events.stat().st_size if run.events.exists() else 0
    last: dict[str, Any] = {}
    started = time.monotonic()
    with open(run.log, "ab") as log, open_display(run.title, resumed=resumed) as display:
        worker = subprocess.Popen(
            [sys.executable, "-m", "rowstep.pipeline.worker", str(run.folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C reaches the command, which asks the worker to stop
            env={**_QUIET, **os.environ, EVENTS_VARIABLE: str(run.events)},
        )
        stops.pass_on_to(worker)
        for event in _follow(run.events, offset, worker):
            display.show(event)
            if event["kind"] in ("result", "error", "interrupted"):
                last = event
        code = worker.wait()
    return _conclude(run, command, code, {**last, "seconds": time.monotonic() - started})


def _follow(path: Path, offset: int, worker: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events written from `offset` on, until the worker has ended and all are read."""
    rest = b""
    while True:
        ended = worker.poll() is not None
        if path.exists():
            with open(path, "rb") as file:
                file.seek(offset)
                new = file.read()
            offset += len(new)
            *lines, rest = (rest + new).split(b"\n")
            yield from (json.loads(line) for line in lines)
        if ended:
            return
        time.sleep(_POLL_SECONDS)


def _resume_command(run: Run) -> str:
    words = ["rowstep", "resume", run.name]
    home = run.workspace.home
    if home != default_home().resolve():
        words += ["--home", str(home)]
    return shlex.join(words)


def _conclude(run: Run, command: str, code: int, last: dict[str, Any]) -> int:
    if code == 0 and last.get("kind") == "result":
        lines, is_leak = summary_lines(run, command, last)
        run.set_status("finished", result=last)
        print("\n".join(lines))
        return 1 if is_leak else 0
    status: Status = "failed"
    words = last.get("text", "the worker ended without saying why.")
    if last.get("kind") == "interrupted":
        status = "interrupted"
    elif code < 0:
        status = "interrupted" if -code in (signal.SIGTERM, signal.SIGINT) else "killed"
        words = f"the worker was ended by signal {-code} ({signal.Signals(-code).name})."
    run.set_status(status, text=words)
    print(f"{run.name} {status}: {words}", file=sys.stderr)
    if last.get("unexpected") or "kind" not in last:
        print(f"full log: {run.log}", file=sys.stderr)
    print(f"go on with: {_resume_command(run)}", file=sys.stderr)
    if status == "interrupted":
        return EXIT_INTERRUPTED
    return 128 - code if code < 0 else 1
