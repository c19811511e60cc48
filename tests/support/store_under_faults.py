"""Run a save that is killed, stopped or refused at each of its file-system calls; see --help.

It is a process of its own, so that it may fork: one child for each call. Python reports nearly all
calls to an audit hook before they are made; `write` and `fsync` are wrapped beside that. Prints one
JSON object of counts; the first loss ends it with a traceback.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rowstep.components.checkpoints import (
    CheckpointError,
    CheckpointStore,
    Retention,
    SavedState,
    local_disk,
)

RETENTION = Retention(keep_last=2)
WATCHED = {
    *("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.truncate", "os.scandir"),
    *("os.listdir", "fcntl.flock"),
}
_at_call: Callable[[str, str], None] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _at_call is not None and event in WATCHED:
        _at_call(event, str(arguments[0]))


def _install() -> None:
    sys.addaudithook(_watch)
    plain_fsync, plain_write = os.fsync, local_disk._WrittenFile.write

    def fsync(descriptor: int) -> None:
        if _at_call is not None:
            _at_call("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        plain_fsync(descriptor)

    def write(file: Any, data: Any) -> int:
        if _at_call is None:
            return plain_write(file, data)
        half = len(data) // 2
        _at_call("write", str(file.name))
        plain_write(file, data[:half])
        _at_call("write", str(file.name))  # in the middle
        return half + plain_write(file, data[half:])

    os.fsync = fsync
    local_disk._WrittenFile.write = write  # type: ignore[method-assign]


_size = 700


def _groups(step: int, attempt: int) -> dict[str, list[tuple[str, np.ndarray]]]:
    value = 10 * step + attempt
    return {"model": [("w", np.full(_size, value)), ("b", np.array(value))], "optimizer": []}


def _save(store: CheckpointStore, step: int, attempt: int = 0) -> None:
    store.save(step, _groups(step, attempt), {"step": step, "attempt": attempt})


def _whole(state: SavedState | None) -> tuple[int, int]:
    """Return (step, attempt) of a state after comparing everything in it."""
    assert state is not None
    step, attempt = state.meta["step"], state.meta["attempt"]
    assert state.step == step
    expected = _groups(step, attempt)
    assert state.groups == tuple(expected)
    for group, pairs in expected.items():
        assert state.names(group) == [name for name, _ in pairs]
        for (_, array), (_, saved) in zip(pairs, state.arrays(group), strict=True):
            assert saved.dtype == array.dtype and np.array_equal(saved, array)
    return step, attempt


def _prepare(root: Path) -> None:
    """Make a root with steps 1 and 2, three damaged ones, and what dead writers leave."""
    store = CheckpointStore(root, retention=RETENTION)
    with store.lock():
        _save(store, 1)
        _save(store, 2)
        for number in range(3):
            shutil.copytree(root / "step-000000000001", root / f"corrupt-00000000000{number}-7")
    for name in (".tmp-save-x", ".tmp-delete-y"):
        shutil.copytree(root / "step-000000000001", root / name)
        (root / name / "MANIFEST.json").unlink()


def _work(root: Path, step: int) -> str:
    """Do what a training does, from the lock to the commit; return what became of it."""
    store = CheckpointStore(root, retention=RETENTION)
    try:
        with store.lock():
            _whole(store.latest(or_refuse=True))
            _save(store, step, 1)
            return "saved"
    except CheckpointError as error:
        return f"refused: {error}"


def _check_afterwards(root: Path, step: int) -> tuple[int, int]:
    """Look as the next process does, then go on as it does; return what it found."""
    reader = CheckpointStore(root, retention=RETENTION)
    found = _whole(reader.latest())
    assert found in [(2, 0), (step, 1)], found
    assert reader.problems == [], reader.problems
    store = CheckpointStore(root, retention=RETENTION)
    with store.lock():
        assert _whole(store.latest()) == found
        _save(store, step, 2)
        assert _whole(store.latest()) == (step, 2)
        assert store.steps() == ([2, 3] if step == 3 else [1, 2]), store.steps()
        assert store.problems == [], store.problems
        assert not list(root.glob(".tmp-*"))
        assert len(list(root.glob("step-*"))) == 2
        assert len(list(root.glob("corrupt-*"))) == 2
    return found


def _in_child(
    root: Path, number: int, act: Callable[[str], None], step: int, *, lasting: bool = False
) -> int:
    """Work in a child that acts at its n-th call, or from it on; return its process number."""
    global _at_call
    process = os.fork()
    if process:
        return process
    calls = 0

    def count(event: str, _: str) -> None:
        nonlocal calls
        calls += 1
        if calls == number or (lasting and calls > number):
            act(event)

    code = 3
    try:
        _at_call = count
        outcome = _work(root, step)
        _at_call = None
        code = 4 if calls < number else 0 if outcome == "saved" else 5
        if code == 5:
            (root / "outcome").write_text(outcome)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def kill(template: Path, root: Path, step: int) -> Counter[str]:
    """Kill a save before each of its calls, and in the middle of each write."""
    counts: Counter[str] = Counter()

    def die(_: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for number in range(1, 10_000):
        shutil.copytree(template, root)
        _, status = os.waitpid(_in_child(root, number, die, step), 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 4, f"call {number}: exit {os.WEXITSTATUS(status)}"
            return counts
        found = _check_afterwards(root, step)
        counts["old" if found == (2, 0) else "new"] += 1
        shutil.rmtree(root)
    raise AssertionError("the save never ended")


def fail(
    template: Path, root: Path, step: int, number_of_error: int, *, lasting: bool
) -> Counter[str]:
    """Let each call fail, alone or with all that follow; afterwards the disk works again."""
    counts: Counter[str] = Counter()

    def refuse(event: str) -> None:
        raise OSError(number_of_error, os.strerror(number_of_error), event)

    for number in range(1, 10_000):
        shutil.copytree(template, root)
        _, status = os.waitpid(_in_child(root, number, refuse, step, lasting=lasting), 0)
        code = os.WEXITSTATUS(status)
        assert code in (0, 4, 5), f"call {number}: exit {code}"
        if code == 4:
            return counts
        outcome = root / "outcome"
        if code == 5:
            text = outcome.read_text()
            # The lock file gone unreadable, or an errno that a lock takes for "held".
            lock = ("LOCK: the lock file must stay", "only one run may write")
            assert any(words in text for words in (os.strerror(number_of_error), *lock)), text
            outcome.unlink()
        store = CheckpointStore(root, retention=RETENTION)
        found = _whole(store.latest())
        assert found == (step, 1) if code == 0 else found[0] in (1, 2, step), (number, found)
        with store.lock():
            _save(store, step, 2)
            assert _whole(store.latest()) == (step, 2)
            assert not list(root.glob(".tmp-*"))
        counts["saved" if code == 0 else "refused"] += 1
        shutil.rmtree(root)
    raise AssertionError("the save never ended")


def stop(template: Path, root: Path, step: int) -> Counter[str]:
    """Stop an owner before each of its calls, replace it, and let it go on."""
    counts: Counter[str] = Counter()

    def pause(_: str) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    for number in range(1, 10_000):
        shutil.copytree(template, root)
        process = _in_child(root, number, pause, step)
        _, status = os.waitpid(process, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            assert os.WEXITSTATUS(status) == 4
            return counts
        counts[_take_over(root, process)] += 1
        shutil.rmtree(root)
    raise AssertionError("the save never ended")


def _take_over(root: Path, process: int) -> str:
    """Replace a stopped owner; return what became of it."""
    (root / "LOCK").unlink(missing_ok=True)
    new = CheckpointStore(root, retention=RETENTION)
    with new.lock():
        before = _whole(new.latest())
        _save(new, 7)
        os.kill(process, signal.SIGCONT)
        _, status = os.waitpid(process, 0)
        assert os.WEXITSTATUS(status) in (0, 5), status
        assert _whole(new.latest()) == (7, 0)
        if os.WEXITSTATUS(status) == 0:
            # It had committed before it was stopped, or it waited for a lock of nobody.
            assert before[1] == 1, "a replaced writer says that it saved"
            return "had saved"
        told = (root / "outcome").read_text()
        seen = ("LOCK: the lock file must stay", "only one run may write", "not below the newest")
        assert any(words in told for words in seen), told
        _save(new, 8)
        assert _whole(new.latest()) == (8, 0)
        assert new.steps() == [7, 8], new.steps()
        assert new.problems == []
    return "refused"


def loop(template: Path, root: Path, num_kills: int) -> Counter[str]:
    """Kill a process that saves without a pause: at random times, and inside a save."""
    global _size
    _size = 200_000  # so that most of the time is spent in the save itself
    shutil.rmtree(template)
    _prepare(template)
    chance, counts, acknowledged = random.Random(11), Counter[str](), 2
    shutil.copytree(template, root)
    for number in range(num_kills):
        process, read_end = _saving_for_ever(root)
        with open(read_end) as lines:
            last = [lines.readline() for _ in range(chance.randrange(1, 4))][-1]
            time.sleep(chance.uniform(0, 0.02))
            if number % 2:
                _wait_for_a_save(root)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            told = [last, *lines.read().splitlines()]
        steps = [int(line) for line in told if line.strip().isdigit()]
        store = CheckpointStore(root, retention=RETENTION)
        found = _whole(store.latest())[0]
        assert found >= max([acknowledged, *steps]), "an acknowledged checkpoint was lost"
        assert store.problems == []
        counts["kills"] += 1
        counts["inside a save"] += bool(list(root.glob(".tmp-save-*")))
        acknowledged = found
    counts["steps"] = acknowledged
    return counts


def _wait_for_a_save(root: Path) -> None:
    for _ in range(100_000):
        if any(name.startswith(".tmp-save-") for name in os.listdir(root)):
            return


def _saving_for_ever(root: Path) -> tuple[int, int]:
    """Start a process that saves; return its number, and a pipe with what it acknowledges."""
    read_end, write_end = os.pipe()
    process = os.fork()
    if process:
        os.close(write_end)
        return process, read_end
    try:
        store = CheckpointStore(root, retention=RETENTION)
        with store.lock(wait_seconds=10):
            step = _whole(store.latest())[0]
            os.write(write_end, b"ready\n")
            while True:
                step += 1
                _save(store, step)
                os.write(write_end, b"%d\n" % step)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(3)


def race(template: Path, root: Path, num_races: int) -> Counter[str]:
    """Let several processes start at once; one of them may write."""
    counts: Counter[str] = Counter()
    for number in range(num_races):
        shutil.copytree(template, root)
        go_read, go_write = os.pipe()
        end_read, end_write = os.pipe()
        runners = [_runner(root, go_read, end_read, (go_write, end_write)) for _ in range(4)]
        os.close(go_write)  # all begin
        results = []
        for _ in runners[1:]:
            results.append(os.WEXITSTATUS(os.wait()[1]))
        os.close(end_write)  # the winner may end once all others have
        results.append(os.WEXITSTATUS(os.wait()[1]))
        assert sorted(results) == [0, 5, 5, 5], (number, results)
        assert _whole(CheckpointStore(root).latest()) == (3, 1)
        counts["races"] += 1
        os.close(go_read)
        os.close(end_read)
        shutil.rmtree(root)
    return counts


def _runner(root: Path, go: int, end: int, others: tuple[int, int]) -> int:
    process = os.fork()
    if process:
        return process
    code = 3
    try:
        for descriptor in others:
            os.close(descriptor)
        os.read(go, 1)
        store = CheckpointStore(root, retention=RETENTION)
        try:
            with store.lock():
                _save(store, 3, 1)
                os.read(end, 1)
                code = 0
        except CheckpointError as error:
            code = 5 if "only one run may write" in str(error) else 6
            if code == 6:
                traceback.print_exc()
    finally:
        os._exit(code)


def trace(template: Path, root: Path, step: int) -> list[tuple[str, str]]:
    """Return the calls of one save, in order."""
    global _at_call
    shutil.copytree(template, root)
    calls: list[tuple[str, str]] = []
    store = CheckpointStore(root, retention=RETENTION)
    with store.lock():
        _at_call = lambda event, name: calls.append((event, name))  # noqa: E731
        _save(store, step)
        _at_call = None
    return calls


def main() -> None:
    """Run one mode; the folder must be empty or missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["kill", "fail", "stop", "loop", "race", "trace"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", type=int, default=3, help="the step to save")
    parser.add_argument("--times", type=int, default=10, help="of 'loop' and 'race'")
    parser.add_argument("--error", default="ENOSPC")
    parser.add_argument("--lasting", action="store_true", help="the error stays")
    arguments = parser.parse_args()
    template, root = arguments.folder / "template", arguments.folder / "root"
    _prepare(template)
    _install()
    if arguments.mode == "fail":
        number = getattr(errno, arguments.error)
        result: object = fail(template, root, arguments.step, number, lasting=arguments.lasting)
    elif arguments.mode in ("loop", "race"):
        repeat = {"loop": loop, "race": race}[arguments.mode]
        result = repeat(template, root, arguments.times)
    else:
        run = {"kill": kill, "stop": stop, "trace": trace}[arguments.mode]
        result = run(template, root, arguments.step)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
