"""Small checkpoints on an object store that tests write, and read back to the last byte."""

from __future__ import annotations

import hashlib
import json
from typing import BinaryIO

from faulty_store import Bucket, Client

from rowstep.components.checkpoints.medium import Medium
from rowstep.components.checkpoints.object_store import ObjectStore

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
