"""Checkpoints where nothing can be renamed: what counts, what is refused, what comes back.

What a failing store does to them is in test_object_store_faults.py; leases have their own tests.
"""

from __future__ import annotations

import uuid

import fsspec
import numpy as np
import pytest
from faulty_store import Bucket, Client
from fsspec.registry import known_implementations
from object_checkpoints import MANIFEST, read_back, seen, store_of, write

from rowstep.components.checkpoints import (
    CheckpointError,
    CheckpointStore,
    Retention,
    open_checkpoint,
)
from rowstep.components.checkpoints.object_store import ObjectStore


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
        name = write(store, 1)
    assert seen(bucket) == [name]


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
