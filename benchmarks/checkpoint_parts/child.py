"""Measure one save, one restore or one save in the background, in a process of its own."""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checkpoint_parts.machine import (
    PeakMemory,
    evict,
    read_raw,
    ready_memory,
    write_direct,
    write_raw,
)
from checkpoint_parts.systems import BACKGROUND, SYSTEMS, load_rowstep, verify_rowstep
from checkpoint_parts.training import Training

_STEPS_BEFORE = 60


def measure(what: str, name: str, num_bytes: int, folder: Path, *, raw_first: bool) -> str:
    """Return the result as a line of JSON."""
    with_raw = {
        "save": save,
        "restore": restore,
        "start": start,
        "background": background,
    }[what]
    return json.dumps(with_raw(name, num_bytes, folder, raw_first))


def save(name: str, num_bytes: int, folder: Path, raw_first: bool) -> dict[str, Any]:
    """Save a state beside a plain write of the same bytes."""
    training = Training(num_bytes, seed=1)
    result: dict[str, Any] = {"digest": training.digest()}
    result["num_bytes"] = sum(array.nbytes for array in training.arrays())
    target = folder / "checkpoint"
    target.mkdir()

    def raw() -> None:
        ready_memory(2 * num_bytes)
        result["direct"] = write_direct(folder / "direct", training.arrays())
        ready_memory(2 * num_bytes)
        result["raw"] = write_raw(folder / "raw" / "raw", training.arrays())
        evict(folder / "raw")

    def timed() -> None:
        ready_memory(2 * num_bytes)
        with PeakMemory() as memory:
            start = time.perf_counter()
            SYSTEMS[name].save(training, target)
            result["seconds"] = time.perf_counter() - start
        result["extra_mib"] = memory.extra_mib

    (folder / "raw").mkdir()
    for part in (raw, timed) if raw_first else (timed, raw):
        part()
    return result


def restore(name: str, num_bytes: int, folder: Path, raw_first: bool) -> dict[str, Any]:
    """Restore what `save` left, into a training with other numbers, beside a plain read."""
    training = Training(num_bytes, seed=2)
    result: dict[str, Any] = {}

    def raw() -> None:
        evict(folder / "raw")
        ready_memory(2 * num_bytes)
        result["raw"] = read_raw(folder / "raw" / "raw")
        evict(folder / "raw")

    def timed() -> None:
        evict(folder / "checkpoint")
        ready_memory(2 * num_bytes)
        with PeakMemory() as memory:
            start = time.perf_counter()
            result["parts"] = SYSTEMS[name].restore(training, folder / "checkpoint")
            result["seconds"] = time.perf_counter() - start
        result["extra_mib"] = memory.extra_mib

    for part in (raw, timed) if raw_first else (timed, raw):
        part()
    result["digest"] = training.digest()
    return result


def start(name: str, num_bytes: int, folder: Path, raw_first: bool) -> dict[str, Any]:
    """Restore as a training does, whose model is built while the checkpoint is verified."""
    evict(folder / "raw")
    ready_memory(2 * num_bytes)
    result: dict[str, Any] = {"raw": read_raw(folder / "raw" / "raw")}
    evict(folder / "raw")
    Training(num_bytes, seed=2)  # the first one of a process also loads what TensorFlow needs
    begin = time.perf_counter()
    training = Training(num_bytes, seed=2)
    result["build"] = time.perf_counter() - begin
    del training
    evict(folder / "checkpoint")
    ready_memory(2 * num_bytes)
    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as reader:
        verified = reader.submit(verify_rowstep, folder / "checkpoint")
        training = Training(num_bytes, seed=2)
        load_rowstep(training, verified.result())
    result["seconds"] = time.perf_counter() - begin - result["build"]
    result["digest"] = training.digest()
    return result


def background(name: str, num_bytes: int, folder: Path, raw_first: bool) -> dict[str, Any]:
    """Save while steps go on, and tell what that cost them."""
    training = Training(num_bytes, seed=1)
    training.run(20)
    with BACKGROUND[name](training, folder) as save:
        ready_memory(2 * num_bytes)
        usual = statistics.median(training.run(_STEPS_BEFORE))
        num_steps, longest = 0, 0.0
        expected = training.digest()
        with PeakMemory(forks=True) as memory:
            start = time.perf_counter()
            save.start()
            call = time.perf_counter() - start
            is_busy = True
            while is_busy:
                begin = time.perf_counter()
                is_busy = save.busy()  # it may let the training wait
                if is_busy:
                    training.run(1)
                    num_steps += 1
                longest = max(longest, time.perf_counter() - begin)
            until_saved = time.perf_counter() - start
        if save.saved() != expected:
            raise RuntimeError(f"{name}: the state at the time of the call must be saved.")
    unhindered = usual * num_steps
    return {
        "call": call,
        "until_saved": until_saved,
        "stall": max(until_saved - unhindered, call),
        "longest_step": longest,
        "usual_step": usual,
        "throughput": unhindered / max(until_saved - call, 1e-9),
        "extra_mib": memory.extra_mib,
        "num_steps": num_steps,
    }
