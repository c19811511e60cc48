"""One writer at a time where nobody releases a dead one's lock: claims, signs of life, takeovers.

The processes are real: killed, stopped, and woken up again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from faulty_store import Bucket, Client

from rowstep.components.checkpoints.lease_holders import describe_this_process
from rowstep.components.checkpoints.object_store import ObjectStore
from rowstep.components.locks import LockHeldError

SUPPORT = Path(__file__).parents[1] / "support"

LONG = 60.0
"""A lease that outlives every test: whoever gets the lock did not wait for it to go stale."""
ELSEWHERE = {"host": "other-host", "pid": 1, "machine": "another/one", "started": "1"}


def new_url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def lease_text(holder: dict[str, Any], beat: int = 0, **fields: Any) -> bytes:
    lease = {"holder": holder, "beat": beat, "inherits": [], "saved": [], "released": False}
    return json.dumps({**lease, **fields}).encode()


@contextmanager
def a_writer(folder: Path, lease_seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock, with a draft begun."""
    script = SUPPORT / "faulty_store.py"
    with subprocess.Popen(
        [sys.executable, str(script), f"objects://{folder}", str(lease_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def ask_to_save(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("save\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_a_second_writer_is_refused_by_the_name_of_the_first_until_it_lets_go() -> None:
    url = new_url()
    first, second = ObjectStore(url, lease_seconds=LONG), ObjectStore(url, lease_seconds=LONG)
    with first.lock(0):
        for store in (first, second):
            with pytest.raises(LockHeldError, match=f"process {os.getpid()} on "), store.lock(0):
                pass
    with second.lock(0):
        assert second.next_revision([]) // 2**20 == 2


def test_a_killed_writer_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    with a_writer(tmp_path, LONG) as process:
        store = ObjectStore(f"objects://{tmp_path}", lease_seconds=LONG)
        with pytest.raises(LockHeldError, match=f"process {process.pid} on "), store.lock(0):
            pass
        assert ask_to_save(process) == "saved\n"
        process.send_signal(signal.SIGKILL)
        # Nobody has waited for the child: its process id is not free yet, and it is dead.
        with store.lock(10):
            assert store.committed() == [f"step-000000000001.{2**20 + 1}"]


def test_a_stopped_writer_is_replaced_and_cannot_commit_when_it_wakes_up(tmp_path: Path) -> None:
    with a_writer(tmp_path, 0.5) as process:
        process.send_signal(signal.SIGSTOP)
        store = ObjectStore(f"objects://{tmp_path}", lease_seconds=0.5)
        with store.lock(30):
            process.send_signal(signal.SIGCONT)
            told = ask_to_save(process)
            assert "Got attempt 1, which was silent for too long; attempt 2 (process " in told
            assert store.committed() == []
            assert store.others() == []


def test_another_process_with_the_same_number_is_not_the_holder() -> None:
    store = ObjectStore(new_url(), lease_seconds=LONG)
    reused = {**describe_this_process(), "started": "7"}
    store.objects.put("lease-00000001.json", lease_text(reused))
    with store.lock(0):
        assert store.next_revision([]) // 2**20 == 2


@pytest.mark.parametrize("text", [lease_text(ELSEWHERE), b"", b"\xff{", b"[1]", b'{"holder": 3}'])
def test_silence_from_another_machine_is_watched_for_the_whole_lease(text: bytes) -> None:
    store = ObjectStore(new_url(), lease_seconds=0.3)
    store.objects.put("lease-00000001.json", text)
    start = time.monotonic()
    with store.lock(0):
        assert time.monotonic() - start >= 0.3


def test_a_sign_of_life_from_another_machine_keeps_the_lock() -> None:
    store = ObjectStore(new_url(), lease_seconds=1.0)
    name = "lease-00000001.json"
    store.objects.put(name, lease_text(ELSEWHERE))
    ended = threading.Event()

    def beat() -> None:
        count = 0
        while not ended.wait(0.05):
            count += 1
            store.objects.put(name, lease_text(ELSEWHERE, count))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(LockHeldError, match="process 1 on other-host"), store.lock(0):
            pass
    finally:
        ended.set()
        thread.join()


def test_a_holder_gives_signs_of_life_and_none_after_the_release() -> None:
    store = ObjectStore(new_url(), lease_seconds=0.04)

    def look() -> dict[str, Any]:
        return json.loads(store.objects.read("lease-00000001.json"))

    with store.lock(0):
        first = look()["beat"]
        wait_until(lambda: look()["beat"] > first + 2)
        assert not look()["released"]
    assert look()["released"]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def test_of_many_competitors_one_gets_the_lock() -> None:
    bucket = Bucket()
    barrier = threading.Barrier(8)
    got: list[int] = []
    refused: list[str] = []

    def compete() -> None:
        client = Client(bucket)
        store = ObjectStore(client.url, client.options, lease_seconds=LONG)
        barrier.wait()
        try:
            with ExitStack() as stack:
                stack.enter_context(store.lock(0))
                got.append(store.next_revision([]) // 2**20)
                wait_until(lambda: len(got) + len(refused) == 8)
        except LockHeldError as error:
            refused.append(error.holder)

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [1]
    assert len(refused) == 7


def test_a_claim_that_was_cut_off_changes_nothing_that_counts() -> None:
    bucket = Bucket()
    client = Client(bucket)
    store = ObjectStore(client.url, client.options, lease_seconds=LONG)
    with store.lock(0):
        folder = f"step-000000000001.{store.next_revision([])}"
        draft = store.begin(folder)
        with draft.create("MANIFEST.json") as file:
            file.write(b"{}")
        draft.commit()
    claim = lease_text(ELSEWHERE, inherits=None)
    bucket.put("lease-00000002.json", claim)
    assert store.committed() == [folder]
    bucket.put("lease-00000002.json", claim.replace(b"false", b"true"))
    with store.lock(0):
        assert store.next_revision([]) // 2**20 == 3
        assert store.committed() == [folder]


def test_lost_leases_do_not_start_the_numbers_anew() -> None:
    store = ObjectStore(new_url(), lease_seconds=LONG)
    store.objects.put(f"step-000000000001.{5 * 2**20 + 1}/MANIFEST.json", b"{}")
    with store.lock(0):
        assert store.next_revision([]) // 2**20 == 6
        assert len(store.committed()) == 1


def test_old_leases_go_and_the_newest_stay() -> None:
    store = ObjectStore(new_url(), lease_seconds=LONG)
    for number in range(1, 41):
        store.objects.put(f"lease-{number:08d}.json", lease_text(ELSEWHERE, released=True))
    with store.lock(0):
        pass
    assert sorted(store.objects.listing()) == [f"lease-{n:08d}.json" for n in range(10, 42)]


def test_a_claim_that_fails_lets_go() -> None:
    bucket = Bucket()
    client = Client(bucket)
    store = ObjectStore(client.url, client.options, lease_seconds=LONG)
    client.hooks = {"after pipe lease-00000001.json": lambda: client.always.update(ls="refused")}
    with pytest.raises(OSError, match="StoreError"), store.lock(0):
        pass
    client.always = {}
    with store.lock(0):
        assert store.next_revision([]) // 2**20 == 2
