"""Checkpoints where nothing can be renamed: what counts, whom the store believes, what faults do.

What the store's answers may be is in tests/support/faulty_store.py; leases have their own tests.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import uuid
from collections import Counter
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO

import fsspec
import numpy as np
import pytest
from fsspec.registry import known_implementations

from rowstep.components.checkpoints import (
    CheckpointError,
    CheckpointStore,
    Retention,
    open_checkpoint,
)
from rowstep.components.checkpoints.medium import Medium
from rowstep.components.checkpoints.object_store import ObjectStore
from rowstep.components.checkpoints.saved_state import open_verified

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from faulty_store import Bucket, Client, Killed

sys.path.pop(0)

MANIFEST = "MANIFEST.json"
SOON = 0.03
"""A lease that is stale soon: these tests run in one process, where nobody is seen to be dead."""


def store_of(client: Client) -> ObjectStore:
    return ObjectStore(client.url, client.options, lease_seconds=SOON)


def revision(name: str) -> int:
    return int(name.rpartition(".")[2])


def write(store: Medium, step: int, parts: int = 2) -> str:
    """Save a step whose every file names the save; return the folder's name."""
    start = f"step-{step:012d}"
    taken = [revision(name) for name in store.committed() if name.startswith(start)]
    draft = store.begin(f"{start}.{store.next_revision(taken)}")
    try:
        lines = []
        for number in range(parts):
            data = f"{draft.name}/{number}/".encode() * 50
            with draft.create(f"array-{number:05d}.npy") as file:
                for begin in range(0, len(data), 300):
                    file.write(data[begin : begin + 300])
            lines.append([f"array-{number:05d}.npy", hashlib.sha256(data).hexdigest()])
        with draft.create(MANIFEST) as file:
            file.write(json.dumps({"folder": draft.name, "files": lines}).encode())
        draft.commit()
    except BaseException:
        draft.abandon()
        raise
    return draft.name


def read_back(store: Medium) -> list[str]:
    """Return the committed folders after reading every byte of them."""
    names = store.committed()
    for name in names:
        manifest = json.loads(read_all(store.open(name, MANIFEST)))
        assert manifest["folder"] == name
        for file, digest in manifest["files"]:
            data = read_all(store.open(name, file))
            assert hashlib.sha256(data).hexdigest() == digest, f"{name}/{file} is a mix"
            assert store.size(name, file) == len(data)
    return names


def read_all(file: BinaryIO) -> bytes:
    with file:
        return file.read()


def seen(bucket: Bucket) -> list[str]:
    """Return what a reader without faults finds whole."""
    return read_back(store_of(Client(bucket)))


def test_a_save_is_there_after_the_commit_and_not_before() -> None:
    url = f"memory://{uuid.uuid4().hex}/below"
    store, reader = ObjectStore(url), ObjectStore(url)
    store.probe()
    with store.lock(0):
        draft = store.begin(f"step-000000000007.{store.next_revision([])}")
        with draft.create("array-00000.npy") as file:
            file.write(b"abc")
            file.write(memoryview(b""))
            file.write(memoryview(b"defg"))
        with draft.create(MANIFEST) as file:
            file.write(b"{}")
        with pytest.raises(FileExistsError), draft.create(MANIFEST):
            pass
        assert reader.committed() == store.others() == []
        draft.commit()
        assert reader.committed() == [draft.name]
        assert reader.files(draft.name) == [MANIFEST, "array-00000.npy"]
        with reader.open(draft.name, "array-00000.npy") as file:
            assert file.read(2) == b"ab"
            rest = bytearray(9)
            assert file.readinto(rest) == 5  # type: ignore[attr-defined]
            assert rest[:5] == b"cdefg"
        with pytest.raises(FileNotFoundError):
            reader.size(draft.name, "array-00001.npy")
        with pytest.raises(FileNotFoundError):
            reader.open("step-000000000008", MANIFEST)
        assert write(store, 7) != draft.name
        store.delete(draft.name)
        assert len(seen_by := read_back(reader)) == 1
        assert draft.name not in seen_by
        assert reader.others() == []


def test_a_large_read_is_one_request_and_fills_the_buffer() -> None:
    bucket = Bucket()
    client = Client(bucket)
    store = store_of(client)
    with store.lock(0):
        draft = store.begin(f"step-000000000001.{store.next_revision([])}")
        with draft.create("array-00000.npy") as file:
            file.write(bytes(5 * 2**20))
        before = client.num_calls
        with store.open(draft.name, "array-00000.npy") as file:
            assert len(file.read(128)) == 128
            assert file.readinto(bytearray(4 * 2**20)) == 4 * 2**20  # type: ignore[attr-defined]
        assert client.num_calls - before < 5


@pytest.mark.parametrize("fault", ["cut short", "one bit"])
def test_a_commit_is_refused_where_the_store_holds_other_bytes(fault: str) -> None:
    bucket = Bucket(keeps_checksums=True)
    client = Client(bucket)
    client.always = {"close array-00001.npy": fault}
    store = store_of(client)
    with store.lock(0):
        with pytest.raises(OSError, match=r"array-00001\.npy: the store holds other bytes"):
            write(store, 1)
        assert seen(bucket) == []
        assert store.others() == []
        client.always = {}
        write(store, 1)
    assert len(seen(bucket)) == 1


def test_a_process_killed_at_any_call_leaves_the_old_step_or_the_new_one_whole() -> None:
    num_calls, saved = 0, 0
    for num_calls in range(1, 200):
        bucket = Bucket()
        store = store_of(Client(bucket))
        with store.lock(0):
            old = write(store, 1)
        client = Client(bucket, seed=num_calls, kill_at=num_calls)
        new = ""
        try:
            store = store_of(client)
            with store.lock(0):
                new = write(store, 2)
                store.delete(old)
        except Killed:
            client.is_dead = True
        found = seen(bucket)
        assert found
        if new:
            saved += 1
            assert new in found
        if not client.is_dead:
            break
        store = store_of(Client(bucket))
        with store.lock(1):
            for folder in store.others():
                store.delete(folder)
            newest = write(store, 3)
            assert store.others() == []
        assert seen(bucket) == [*found, newest]
    assert num_calls > 30
    assert saved > 3


@pytest.mark.parametrize("folder", ["step-000000000001", ""])
def test_a_folder_set_aside_has_a_new_name_and_keeps_its_bytes(folder: str) -> None:
    bucket = Bucket()
    store = store_of(Client(bucket))
    with store.lock(0):
        old = folder or write(store, 1)
        if folder:
            bucket.put(f"{folder}/{MANIFEST}", b"{}")
        store.set_aside(old, "corrupt-1")
        assert store.committed() == []
        reader = store_of(Client(bucket))
        assert store.others() == reader.others() == ["corrupt-1"]
        assert "SET_ASIDE.json" in store_of(Client(bucket)).files("corrupt-1")
        store.delete("corrupt-1")
        assert store.others() == reader.others() == []
        assert not [path for path in bucket.past[-1] if "/step-" in path]


def test_setting_aside_that_was_cut_off_loses_nothing() -> None:
    bucket = Bucket()
    client = Client(bucket)
    store = store_of(client)
    with store.lock(0):
        name = write(store, 1)
        for call in ("pipe SET_ASIDE.json", f"rm {MANIFEST}"):
            client.always = {call: "refused"}
            with pytest.raises(OSError, match="503"):
                store.set_aside(name, "corrupt-1")
            client.always = {}
            store.delete("corrupt-1")
            assert seen(bucket) == [name]
        store.set_aside(name, "corrupt-2")
        assert store.others() == ["corrupt-2"]


def test_what_was_copied_here_by_hand_counts_and_is_never_a_leftover() -> None:
    bucket = Bucket()
    store = store_of(Client(bucket))
    with store.lock(0):
        pass
    for path in ("step-000000000001/MANIFEST.json", "step-000000000002.3/a.npy", "logs/a.txt"):
        bucket.put(path, b"{}")
    with store.lock(0):
        assert store.committed() == ["step-000000000001"]
        assert store.others() == []


def test_a_replaced_writer_cannot_commit_nor_change_anything() -> None:
    bucket = Bucket()
    old, new = store_of(Client(bucket, seed=1)), store_of(Client(bucket, seed=2))
    with old.lock(0):
        kept = write(old, 1)
        draft = old.begin(f"step-000000000002.{old.next_revision([])}")
        with draft.create(MANIFEST) as file:
            file.write(b"{}")
        take_over(bucket, old, new)
        late = [
            draft.commit,
            lambda: old.begin("step-000000000003.1"),
            lambda: old.delete(kept),
            lambda: old.set_aside(kept, "corrupt-1"),
        ]
        for change in late:
            with pytest.raises(CheckpointError, match=r"Got attempt 1, .* attempt 2 \(process "):
                change()
        assert seen(bucket) == [kept]
        # Even a manifest that arrives late, past all checks, counts for nobody.
        bucket.put(f"{draft.name}/{MANIFEST}", b"{}")
        assert seen(bucket) == [kept]
        assert store_of(Client(bucket)).others() == [draft.name]


def take_over(bucket: Bucket, old: ObjectStore, new: ObjectStore) -> None:
    """Let the old writer's lease go stale, as if its process had been stopped, and take the lock.

    The new writer holds the lock for the length of a breath; what it says stays.
    """
    assert old._lease is not None
    old._lease._ended.set()
    with new.lock(5):
        pass


def test_a_save_during_a_takeover_is_either_inherited_or_refused() -> None:
    outcomes = []
    for moment in ("before pipe", "after pipe"):
        bucket = Bucket()
        client = Client(bucket)
        old, new = store_of(client), store_of(Client(bucket))
        with old.lock(0):
            write(old, 1)
            hook = lambda old=old, new=new, bucket=bucket: take_over(bucket, old, new)  # noqa: E731
            client.hooks = {f"{moment} {MANIFEST}": hook}
            try:
                saved = write(old, 2)
            except CheckpointError:
                outcomes.append("refused")
                assert len(seen(bucket)) == 1
            else:
                outcomes.append("inherited")
                assert saved in seen(bucket)
                with pytest.raises(CheckpointError, match="took over"):
                    write(old, 3)
    assert outcomes == ["refused", "inherited"]


def test_a_refused_save_that_a_successor_may_inherit_stays_whole() -> None:
    bucket = Bucket()
    client = Client(bucket)
    store = store_of(client)
    claim = json.dumps({"holder": {}, "inherits": None, "saved": [], "released": False}).encode()
    client.hooks = {f"after pipe {MANIFEST}": lambda: bucket.put("lease-00000002.json", claim)}
    with store.lock(0):
        with pytest.raises(CheckpointError, match="took over"):
            write(store, 1)
        assert len(seen(bucket)) == 1


def test_listings_that_never_show_anything_hide_no_acknowledged_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = Bucket()
    monkeypatch.setattr(bucket, "past", [{}])
    saved = []
    for step in (1, 2, 3):
        store = store_of(Client(bucket))
        with store.lock(0):
            saved += [write(store, step), write(store, step)]
            assert seen(bucket) == sorted(saved)


def test_a_lost_answer_is_cleared_up_by_reading_back() -> None:
    bucket = Bucket()
    client = Client(bucket)
    store = store_of(client)
    with store.lock(0):
        saved = []
        for step, fault in enumerate(["lost answer", "lost, then said to exist"]):
            client.always = {f"pipe {MANIFEST}": fault}
            saved.append(write(store, step))
        assert seen(bucket) == saved
        client.always = {f"pipe {MANIFEST}": "said to exist"}
        with pytest.raises(OSError, match="could not be created"):
            write(store, 7)
        client.always = {f"pipe {MANIFEST}": "lost answer", f"cat {MANIFEST}": "refused"}
        with pytest.raises(OSError, match="StoreError: 500"):
            write(store, 8)
        assert seen(bucket) == saved
        client.always[f"rm {MANIFEST}"] = "refused"
        with pytest.raises(OSError, match="StoreError: 500"):
            write(store, 9)
        assert len(seen(bucket)) == 3, "it may stay, but then as a whole"


@pytest.mark.parametrize("call", ["ls", "info"])
def test_a_store_that_is_ill_is_not_an_empty_one(call: str) -> None:
    bucket = Bucket()
    client = Client(bucket)
    store = store_of(client)
    with store.lock(0):
        name = write(store, 1)
    client.always = {call: "refused"}
    with pytest.raises(OSError, match="StoreError: 500") as caught:
        store.committed()
    assert caught.value.errno is None, "an errno could pass for damage"
    client.always = {"cat": "refused"}
    with pytest.raises(OSError, match="StoreError: 500"), store.open(name, MANIFEST) as file:
        file.read()


def test_a_range_that_comes_back_short_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket()
    store = store_of(Client(bucket))
    with store.lock(0):
        name = write(store, 1)
    read = bucket.inner.cat_file
    monkeypatch.setattr(bucket.inner, "cat_file", lambda path, **at: read(path, **at)[:-1])
    with pytest.raises(OSError, match="the store sent "), store.open(name, MANIFEST) as file:
        file.read()


def test_an_upload_that_fails_is_called_off() -> None:
    bucket = Bucket()
    client = Client(bucket)
    client.always = {"write array-00001.npy": "refused"}
    store = store_of(client)
    with store.lock(0):
        with pytest.raises(OSError, match="in the middle of an upload"):
            write(store, 1)
        assert client.num_discarded == 1
        assert [path for path in bucket.past[-1] if "/step-" in path] == []


def test_a_store_that_cannot_be_written_is_refused_by_the_probe() -> None:
    client = Client(Bucket())
    client.always = {"pipe": "refused"}
    with pytest.raises(OSError, match="StoreError: 503"):
        store_of(client).probe()
    client.always = {}
    store_of(client).probe()
    assert not client.bucket.past[-1]


def test_an_unknown_protocol_and_a_missing_package_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CheckpointError, match=r"one that fsspec knows\. Got protocol 'gss'\."):
        ObjectStore("gss://bucket/path")
    missing = {"class": "no_such_package.FileSystem", "err": "Please install it"}
    monkeypatch.setitem(known_implementations, "s3a", missing)
    with pytest.raises(CheckpointError, match=r"'s3a' without it .* Run 'pip install s3fs'\."):
        ObjectStore("s3a://bucket/path")


def test_a_store_that_ignores_the_condition_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowstep.components.checkpoints.objects._SETTLE_SECONDS", 0.01)
    bucket = Bucket()
    pipe = bucket.inner.pipe_file
    monkeypatch.setattr(bucket.inner, "pipe_file", lambda path, data, mode="": pipe(path, data))
    store, other = store_of(Client(bucket)), store_of(Client(bucket))
    for medium in (store, other):
        medium.probe()
        assert not medium.objects.creates_exclusively
    assert store.objects.create("name", b"first")
    assert not other.objects.create("name", b"second")
    with store.lock(0):
        assert seen(bucket) == [] == [write(store, 1)][:0]
    assert len(seen(bucket)) == 1


def test_changes_need_the_lock() -> None:
    store = ObjectStore(f"memory://{uuid.uuid4().hex}")
    changes = [
        lambda: store.next_revision([]),
        lambda: store.begin("step-000000000001.1"),
        lambda: store.delete("step-000000000001.1"),
        lambda: store.set_aside("step-000000000001.1", "corrupt-1"),
    ]
    for change in changes:
        with pytest.raises(CheckpointError, match="the writer must hold the lock"):
            change()
    with store.lock(0):
        with pytest.raises(CheckpointError, match=r"Got 'step-000000000001\.1' in attempt 1"):
            store.begin("step-000000000001.1")
        assert store.next_revision([2**20 + 7]) == 2**20 + 8
        assert store.next_revision([]) == 2**20 + 2
        with pytest.raises(CheckpointError, match="a million times"):
            store.next_revision([2**21 - 1])


def test_the_checkpoint_store_keeps_its_promises_on_an_object_store() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    arrays = {"b": np.arange(5), "none": np.zeros((0, 3)), "w": np.ones((300, 7), np.float32)}
    store = CheckpointStore(url, retention=Retention(keep_last=2))
    with store.lock():
        places = [store.save(step, {"model": arrays.items()}, {"n": step}) for step in (1, 2, 2, 3)]
    assert store.steps() == [2, 3]
    reader = CheckpointStore(url)
    state = reader.latest()
    assert state is not None
    assert (state.where, state.path, state.meta) == (places[-1], None, {"n": 3})
    assert state.names("model") == list(arrays)
    for name, array in state.arrays("model"):
        np.testing.assert_array_equal(array, arrays[name], strict=True)
    assert open_checkpoint(places[-1]).step == 3

    with fsspec.open(f"{places[-1]}/array-00002.npy", "r+b") as file:
        file.seek(1000)
        file.write(b"?")
    reader = CheckpointStore(url)
    state = reader.latest()
    assert state is not None
    assert (state.step, len(reader.problems)) == (2, 1)
    with store.lock():
        state = store.latest()
        assert state is not None
        assert state.step == 2
        assert "kept as corrupt-000000000003" in store.problems[0]
        store.save(4, {"model": arrays.items()}, {})
    assert store.steps() == [2, 4]
    assert [entry.step for entry in CheckpointStore(url).entries()] == [2, 4]


class Trial:
    """Write and read as a user would, once through the medium alone, once through the store."""

    def __init__(self, client: Client, *, through_store: bool) -> None:
        self.store = CheckpointStore(client.url, storage_options=client.options)
        medium = self.store.medium
        assert isinstance(medium, ObjectStore)
        medium.leases.lease_seconds = SOON
        self.medium = medium
        self.through_store = through_store

    def lock(self) -> AbstractContextManager[None]:
        return self.store.lock(5) if self.through_store else self.medium.lock(5)

    def save(self, step: int) -> str:
        if self.through_store:
            arrays = [(name, np.full(50, step)) for name in "abc"]
            return self.store.save(step, {"model": arrays}, {}).rpartition("/")[2]
        with suppress(OSError):
            for folder in self.medium.others():
                self.medium.delete(folder)
        name = write(self.medium, step)
        with suppress(OSError):
            for folder in self.medium.committed()[:-3]:
                self.medium.delete(folder)
        return name

    def read(self) -> list[str]:
        """Return all committed folders; each one is whole."""
        if not self.through_store:
            return read_back(self.medium)
        names = self.medium.committed()
        for name in names:
            state = open_verified(self.medium, name)
            assert {int(x) for _, array in state.arrays("model") for x in array} == {state.step}
        return names


@pytest.mark.parametrize("through_store", [False, True])
def test_faults_of_every_kind_lose_no_acknowledged_save_and_show_no_half_one(
    through_store: bool,
) -> None:
    """At least 100 faults and 5 kills, with listings that are late and answers that get lost."""
    bucket = Bucket(delay=6, keeps_checksums=through_store)
    reader = Trial(Client(bucket), through_store=through_store)
    chance = random.Random(6)
    last, step = "", 0
    count: Counter[str] = Counter()
    while count["faults"] < 100 or count["kills"] < 5:
        kill_at = chance.randrange(20, 400) if chance.random() < 0.5 else None
        client = Client(bucket, seed=chance.randrange(2**32), rate=0.02, kill_at=kill_at)
        trial = Trial(client, through_store=through_store)
        try:
            with trial.lock():
                for _ in range(6):
                    step += 1
                    try:
                        last = trial.save(step)
                        count["saves"] += 1
                    except (OSError, CheckpointError):
                        count["refused"] += 1
                    found = reader.read()
                    assert not last or last in found, "an acknowledged save is gone"
        except (OSError, CheckpointError):
            count["refused"] += 1
        except Killed:
            count["kills"] += 1
        client.is_dead = True
        found = reader.read()
        assert not last or last in found, "an acknowledged save is gone"
        count["faults"] += client.faults.total()
    assert count["saves"] > 10
    assert count["refused"] > 10
