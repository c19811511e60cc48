"""Checkpoints on a store that fails: kills at every call, lost answers, old listings, takeovers."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import AbstractContextManager, suppress

import numpy as np
import pytest
from faulty_store import Bucket, Client, Killed
from object_checkpoints import MANIFEST, SOON, read_back, seen, store_of, write

from rowstep.components.checkpoints import CheckpointError, CheckpointStore
from rowstep.components.checkpoints.object_store import ObjectStore
from rowstep.components.checkpoints.saved_state import open_verified


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
