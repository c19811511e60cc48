"""Turn SIGTERM and SIGINT into a flag that the loop reads between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Note a SIGTERM or SIGINT instead of dying of it, while the `with` block runs.

    A second SIGINT gets the previous handler, so that an impatient Ctrl-C ends the process. Further
    SIGTERMs are ignored: service managers send one to every process, and the command passes on its
    own, while the checkpoint is being written.
    Outside the main thread, where Python cannot set handlers, nothing is caught.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        interrupt = self._previous.pop(signal.SIGINT, None)
        if interrupt is not None:
            signal.signal(signal.SIGINT, interrupt)

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
