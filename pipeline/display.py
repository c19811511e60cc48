"""Live progress on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

# Resolvers take no time and mean nothing to somebody who only runs the pipeline.
_HIDDEN = ("last_checkpoint", "last_blessed_model")


class Display(Protocol):
    """Show the events of a run; used in a `with` block."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *problem: object) -> None: ...

    def show(self, event: dict[str, Any]) -> None:
        """Show one event."""


def open_display(name: str, *, resumed: bool) -> Display:
    """Choose the display: live where standard output is a terminal, plain lines otherwise."""
    title = f"{name} (going on)" if resumed else name
    return LiveDisplay(title) if sys.stdout.isatty() else PlainDisplay(title)


def training_words(event: dict[str, Any]) -> str:
    """Word a step event: `1200/4600  epoch 3  loss 0.61  310 steps/s`."""
    words = f"{event['step']}/{event['total']}  epoch {event['epoch'] + 1}"
    if "loss" in event:
        words += f"  loss {event['loss']:.4f}"
    return f"{words}  {event['rate']:.0f} steps/s"


def node_words(event: dict[str, Any]) -> str:
    """Word the end of a step of the pipeline."""
    examples = event.get("examples")
    counts = ", ".join(f"{count:,} {split}" for split, count in (examples or {}).items())
    return f"{event['id']}  {counts}".rstrip()


class PlainDisplay:
    """Print one line an event worth a line, and a training line every ten seconds."""

    def __init__(self, title: str) -> None:
        self._title, self._started = title, time.monotonic()
        self._shown_at = 0.0

    def __enter__(self) -> PlainDisplay:
        self._print(self._title)
        return self

    def __exit__(self, *problem: object) -> None:
        sys.stdout.flush()

    def show(self, event: dict[str, Any]) -> None:
        """Print what the event says."""
        kind = event["kind"]
        if kind == "node" and not event["running"] and event["id"] not in _HIDDEN:
            self._print(f"done   {node_words(event)}")
        elif kind == "train_start":
            self._print(f"train  from {event['origin']}, {event['total'] - event['step']} steps")
        elif kind == "step" and time.monotonic() - self._shown_at >= 10:
            self._shown_at = time.monotonic()
            self._print(f"train  {training_words(event)}")
        elif kind == "epoch":
            self._print(f"epoch  {event['epoch']}  rmse {event['val_rmse']:.4f}")
        elif kind == "notice":
            self._print(f"note   {event['text']}")

    def _print(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)


class LiveDisplay:
    """Show one line a step of the pipeline, with a bar for the training."""

    def __init__(self, title: str) -> None:
        self._console = Console()
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._title = title
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LiveDisplay:
        self._console.print(f"[bold]{self._title}")
        self._progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        for task in self._progress.tasks:
            if not task.finished:
                self._progress.stop_task(task.id)
        self._progress.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Update the line that the event belongs to."""
        kind = event["kind"]
        if kind == "node" and event["id"] not in _HIDDEN:
            self._node(event)
        elif kind in ("step", "train_start") and "RecTrainer" in self._tasks:
            words = training_words(event) if kind == "step" else f"from {event['origin']}"
            self._progress.update(
                self._tasks["RecTrainer"],
                completed=event["step"],
                total=event["total"],
                words=words,
            )
        elif kind == "epoch" and "RecTrainer" in self._tasks:
            words = f"epoch {event['epoch']} done, rmse {event['val_rmse']:.4f}"
            self._progress.update(self._tasks["RecTrainer"], words=words)
        elif kind == "notice":
            self._console.print(f"[yellow]note[/]  {escape(event['text'])}", highlight=False)

    def _node(self, event: dict[str, Any]) -> None:
        name = event["id"]
        if event["running"]:
            self._tasks[name] = self._progress.add_task(name, total=None, words="")
        else:
            words = node_words(event).removeprefix(name).strip()
            if words:  # else the training's last words stay
                self._progress.update(self._tasks[name], words=words)
            self._progress.update(self._tasks[name], total=1, completed=1)
