"""fsspec file systems for tests: a store that fails by a seeded plan, and one of real files.

`faulty://` wraps another file system. A `Client` is what one process would be: its calls fail as
its plan says, and after a kill all of them raise, those that tidy up too. Clients of one `Bucket`
see one store. Run as a program, the module is a writer that the tests stop and kill.
"""

from __future__ import annotations

import base64
import io
import os
import random
import sys
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import fsspec
import google_crc32c
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem


class StoreError(Exception):
    """Be what the libraries of stores raise: no OSError."""


class Killed(BaseException):
    """Be a kill: no handler of errors catches it."""


class Bucket:
    """Hold the objects, and the listings of some moments ago.

    Args:
        delay: how many changes late a listing may be.
        keeps_checksums: whether its listings tell a checksum, as those of Google's stores do.
    """

    def __init__(self, delay: int = 0, keeps_checksums: bool = False) -> None:
        self.inner = MemoryFileSystem(skip_instance_cache=True)
        self.inner.store, self.inner.pseudo_dirs = {}, [""]  # not those that all others share
        self.root = f"bucket-{uuid.uuid4().hex}"
        self.mutex = threading.RLock()
        self.past: deque[dict[str, bytes]] = deque([{}], maxlen=delay + 1)
        self.keeps_checksums = keeps_checksums

    def put(self, name: str, data: bytes) -> None:
        """Write an object past all clients."""
        self.change(self.inner.pipe_file, f"{self.root}/{name}", data)

    def change(self, function: Callable[..., Any], path: str, *more: Any, **options: Any) -> None:
        """Change an object, and remember how the store looked."""
        with self.mutex:
            function(path, *more, **options)
            now = dict(self.past[-1])
            if self.inner.exists(path):
                now[f"/{path}"] = self.inner.cat_file(path)
            else:
                now.pop(f"/{path}", None)
            self.past.append(now)


class Client:
    """Say which calls of one process fail.

    Args:
        bucket: the store.
        seed: of the plan.
        rate: the part of all calls that fails.
        kill_at: the call before which, or in which, the process dies.
    """

    def __init__(
        self, bucket: Bucket, seed: int = 0, rate: float = 0.0, kill_at: int | None = None
    ) -> None:
        self.bucket = bucket
        self.random = random.Random(seed)
        self.rate = rate
        self.kill_at = kill_at
        self.num_calls = 0
        self.faults: Counter[str] = Counter()
        self.is_dead = False
        self.num_discarded = 0
        """Uploads that were called off, so that the store keeps no parts of them."""
        self.always: dict[str, str] = {}
        """Calls that fail at every time: "pipe MANIFEST.json" -> "lost answer"."""
        self.hooks: dict[str, Callable[[], None]] = {}
        """What happens once before or after a call: "after pipe MANIFEST.json"."""

    @property
    def url(self) -> str:
        """Return the URL of the root."""
        return f"faulty://{self.bucket.root}"

    @property
    def options(self) -> dict[str, Any]:
        """Return the storage options that make fsspec use this client."""
        return {"client": self}

    def die_if_dead(self) -> None:
        """Raise for ever after the kill; a thread that refreshes a lease hears of an error."""
        if self.is_dead:
            main = threading.current_thread() is threading.main_thread()
            raise Killed if main else StoreError("its process is dead")

    def fault(self, call: str, path: str, *kinds: str) -> str | None:
        """Count a call; return the fault that happens in it, or None."""
        self.die_if_dead()
        name = f"{call} {path.rpartition('/')[2]}"
        if hook := self.hooks.pop(f"before {name}", None):
            hook()
        self.num_calls += 1
        if self.num_calls == self.kill_at:
            self.is_dead = True
            if len(kinds) < 2 or self.random.random() < 0.5:
                self.die_if_dead()
            return "lost answer"
        kind = self.always.get(name) or self.always.get(call)
        if kind is None and self.random.random() < self.rate:
            kind = self.random.choice(kinds)
        if kind is not None:
            self.faults[f"{call}: {kind}"] += 1
        return kind

    def done(self, call: str, path: str, fault: str | None) -> None:
        """End a call that did what it should: its answer may be lost, or its process die."""
        self.die_if_dead()
        if fault == "lost answer":
            raise self.random.choice([StoreError("reset by peer"), TimeoutError(), OSError(5, "")])
        if hook := self.hooks.pop(f"after {call} {path.rpartition('/')[2]}", None):
            hook()


class FaultyStore(fsspec.AbstractFileSystem):
    """Be the file system of one client."""

    protocol = "faulty"
    cachable = False

    def __init__(self, client: Client, **options: Any) -> None:
        super().__init__(**options)
        self.client = client
        self.bucket = client.bucket
        self.inner = client.bucket.inner
        self.cached: dict[str, Any] = {}

    def invalidate_cache(self, path: str | None = None) -> None:
        self.cached.clear()

    def _change(self, call: str, path: str, kinds: list[str], change: Callable[[], None]) -> None:
        fault = self.client.fault(call, path, "refused", "lost answer", *kinds)
        if fault == "refused":
            raise StoreError("503 slow down")
        if fault == "said to exist":
            raise FileExistsError(path)
        change()
        if fault == "lost, then said to exist":
            raise FileExistsError(path)
        self.client.done(call, path, fault)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        exclusive = ["said to exist", "lost, then said to exist"] if mode == "create" else []
        self._change(
            "pipe",
            path,
            exclusive,
            lambda: self.bucket.change(self.inner.pipe_file, path, value, mode=mode),
        )

    def rm_file(self, path: str) -> None:
        self._change("rm", path, [], lambda: self.bucket.change(self.inner.rm_file, path))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        if self.client.fault("cat", path, "refused"):
            raise StoreError("500 try again")
        return self.inner.cat_file(path, start=start, end=end)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if self.client.fault("info", path, "refused"):
            raise StoreError("500 try again")
        try:
            return self._told(path, self.inner.cat_file(path))
        except FileNotFoundError:
            return self._told(path, None if self.inner.info(path) else b"")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if self.client.fault("ls", path, "refused"):
            raise StoreError("500 try again")
        if path not in self.cached:
            self.cached[path] = self._list(path)
        return self.cached[path]

    def _list(self, path: str) -> list[dict[str, Any]]:
        start = f"/{path}/"
        past = self.bucket.past[self.client.random.randrange(len(self.bucket.past))]
        below = {name: data for name, data in past.items() if name.startswith(start)}
        if not below:
            raise FileNotFoundError(path)
        found = {}
        for name, data in below.items():
            inside, _, rest = name.removeprefix(start).partition("/")
            found[inside] = self._told(f"{path}/{inside}", None if rest else data)
        return list(found.values())

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        assert mode == "wb", "reading goes by ranges"
        return _Upload(self, path)

    def _told(self, path: str, data: bytes | None) -> dict[str, Any]:
        """Return what the store tells of an object, or of a folder."""
        if data is None:
            return {"name": path, "type": "directory", "size": 0}
        told = {"name": path, "type": "file", "size": len(data)}
        if self.bucket.keeps_checksums:
            crc = google_crc32c.value(data)
            told["crc32c"] = base64.b64encode(crc.to_bytes(4, "big")).decode()
        return told


class _Upload(io.BytesIO):
    """Be an upload: the object is there when it is closed, if at all."""

    def __init__(self, store: FaultyStore, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def write(self, data: Any) -> int:
        if self._store.client.fault("write", self._path, "refused"):
            raise StoreError("connection reset in the middle of an upload")
        return super().write(data)

    def discard(self) -> None:
        self._store.client.num_discarded += 1
        super().close()

    def close(self) -> None:
        if self.closed:
            return
        store, path, data = self._store, self._path, self.getvalue()
        super().close()
        fault = store.client.fault("close", path, "refused", "lost answer", "cut short", "one bit")
        if fault == "refused":
            raise StoreError("503 slow down")
        if fault == "cut short":
            data = data[: len(data) // 2]
        if fault == "one bit":
            data = bytes([data[0] ^ 1]) + data[1:] if store.bucket.keeps_checksums else data[:-1]
        store.bucket.change(store.inner.pipe_file, path, data)
        store.client.done("close", path, fault)

    def __del__(self) -> None:
        super().close()


class FilesAsObjects(LocalFileSystem):
    """Be a store that several processes share: files, put at once and created exclusively."""

    protocol = "objects"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("objects://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = f"{path}.{uuid.uuid4().hex}"
        with open(part, "wb") as file:
            file.write(value)
        if mode != "create":
            os.replace(part, path)
            return
        try:
            os.link(part, path)
        finally:
            os.unlink(part)


fsspec.register_implementation("faulty", FaultyStore, clobber=True)
fsspec.register_implementation("objects", FilesAsObjects, clobber=True)


def write_on_demand(url: str, lease_seconds: str) -> None:
    """Hold the lock; save a step for each line of the input, and say how it went."""
    from rowstep.components.checkpoints.array_files import CheckpointError
    from rowstep.components.checkpoints.object_store import ObjectStore

    store = ObjectStore(url, lease_seconds=float(lease_seconds))
    with store.lock(0.0):
        draft = store.begin(f"step-000000000001.{store.next_revision([])}")
        print("locked", flush=True)
        for _ in sys.stdin:
            try:
                with draft.create("MANIFEST.json") as file:
                    file.write(b"{}")
                draft.commit()
                print("saved", flush=True)
            except CheckpointError as error:
                print(error, flush=True)


if __name__ == "__main__":
    write_on_demand(*sys.argv[1:])
