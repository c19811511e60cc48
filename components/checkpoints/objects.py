"""Talk to one object store through fsspec: every listing fresh, every error an OSError."""

from __future__ import annotations

import base64
import errno
import io
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import fsspec
import google_crc32c
import numpy as np
from fsspec.registry import known_implementations

from rowstep.components.checkpoints.array_files import CheckpointError

UPLOAD_BLOCK_BYTES = 32 * 2**20
"""What one part of an upload holds; stores allow 10,000 parts, so an array may have 312 GiB."""
_READ_AHEAD_BYTES = 2**20
_SETTLE_SECONDS = 2.0
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "az": "adlfs"}
_PACKAGES |= {"abfs": "adlfs", "abfss": "adlfs"}


class Entry(NamedTuple):
    """Say what a listing knows of one name."""

    is_folder: bool
    num_bytes: int
    crc32c: str | None
    """The store's own checksum in base64, where it keeps one (Google Cloud Storage does)."""


class Objects:
    """Read and write the objects below one URL.

    Every method raises OSError when the store refuses, also where its library has errors of its
    own; FileNotFoundError means that the object is not there, and never that the store is ill.

    Args:
        url: the root, `protocol://bucket/path`.
        storage_options: what the fsspec file system of that protocol takes, credentials and such.

    Raises:
        CheckpointError: fsspec does not know the protocol, its package is not installed, or it
            refuses the options.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.where = url.rstrip("/")
        _refuse_unknown_protocol(url)
        # An instance of our own: nobody else fills its cache of listings.
        options = {**(storage_options or {}), "skip_instance_cache": True}
        try:
            with _os_errors(url):
                self._system, self._root = fsspec.core.url_to_fs(url, **options)
        except OSError as error:
            raise CheckpointError(
                f"{url}: the storage must take its options and credentials. Got {error}. "
                "Check the URL, the credentials of this machine, and the storage options."
            ) from error
        self._root = self._root.rstrip("/")
        plain = getattr(self._system.pipe_file, "__func__", None)
        self.creates_exclusively = plain is not fsspec.AbstractFileSystem.pipe_file

    def probe(self) -> None:
        """Write and delete an object, and find out whether the store can create exclusively.

        The object lies in a folder that was never made: places with real folders refuse here.
        """
        name = f".probe-{uuid.uuid4().hex}/probe"
        try:
            if not self.create(name, b"first"):
                raise OSError(f"{self.where}/{name}: a new object was said to exist already")
            if self.creates_exclusively and self.create(name, b"second"):
                self.creates_exclusively = False  # it ignores the condition, as old servers do
        finally:
            self.remove(name)

    def listing(self, folder: str = "") -> dict[str, Entry]:
        """Return what lies in a folder, by name; a store may be late with it."""
        path = self._path(folder)
        with _os_errors(path):
            self._system.invalidate_cache()
            try:
                found = self._system.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        named = ((info["name"].rstrip("/"), info) for info in found)
        return {name.rpartition("/")[2]: _entry(info) for name, info in named if name != path}

    def entry(self, name: str) -> Entry | None:
        """Return what the store knows of one object now, or None where there is none."""
        path = self._path(name)
        with _os_errors(path):
            self._system.invalidate_cache()
            try:
                entry = _entry(self._system.info(path))
            except FileNotFoundError:
                return None
        return None if entry.is_folder else entry

    def size(self, name: str) -> int:
        """Return the length of an object in bytes. Raises FileNotFoundError."""
        entry = self.entry(name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object or bucket", self._path(name))
        return entry.num_bytes

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of an object, or those from `start` to before `end`."""
        path = self._path(name)
        with _os_errors(path):
            return self._system.cat_file(path, start=start, end=end)

    def put(self, name: str, data: bytes) -> None:
        """Write a small object at once, over an older one."""
        path = self._path(name)
        with _os_errors(path):
            self._system.pipe_file(path, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object unless there is one; return whether the object is now ours.

        An answer may get lost, and a second try then finds the first one's object: whatever the
        store says, the bytes that lie there decide. So no two writers may write the same bytes.

        Raises:
            OSError: it is not known whether it was written; it was not when we looked.
        """
        if not self.creates_exclusively:
            return self._create_by_asking(name, data)
        path = self._path(name)
        try:
            with _os_errors(path):
                self._system.pipe_file(path, data, mode="create")
            return True
        except OSError as error:
            try:
                return self.read(name) == data
            except FileNotFoundError:
                raise OSError(f"{path}: the object could not be created ({error})") from error

    def remove(self, name: str) -> None:
        """Delete an object; one that is not there is no error."""
        path = self._path(name)
        with suppress(FileNotFoundError), _os_errors(path):
            self._system.rm_file(path)

    @contextmanager
    def upload(self, name: str) -> Iterator[Upload]:
        """Write an object of any size; it is on the store when the `with` block ends well.

        Cost: memory for a few blocks of 32 MiB.
        """
        path = self._path(name)
        with _os_errors(path):
            file = self._system.open(path, "wb", block_size=UPLOAD_BLOCK_BYTES)
        try:
            yield Upload(file, path)
            with _os_errors(path):
                file.close()
        except BaseException:
            # Parts that were sent would stay on the bill. Closing may fail in any way by now.
            for finish in (getattr(file, "discard", file.close), file.close):
                with suppress(Exception):
                    finish()
            raise

    def open(self, name: str) -> io.BufferedReader:
        """Open an object for reading in large pieces, one request each."""
        return io.BufferedReader(_Reader(self, name, self.size(name)), _READ_AHEAD_BYTES)

    def _create_by_asking(self, name: str, data: bytes) -> bool:
        # The last of several writers wins: after a while all of them read the same bytes.
        if self.entry(name) is not None:
            return False
        self.put(name, data)
        time.sleep(_SETTLE_SECONDS)
        return self.read(name) == data

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


class Upload(io.RawIOBase):
    """Count the bytes on their way to an object, and their checksum."""

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path
        self.num_bytes = 0
        self._crc = 0

    @property
    def crc32c(self) -> str:
        """Return the checksum of the bytes so far, in the form that stores use."""
        return base64.b64encode(self._crc.to_bytes(4, "big")).decode()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Pass all bytes on; return their number."""
        if memoryview(data).nbytes == 0:
            return 0
        piece = np.frombuffer(data, np.uint8)
        with _os_errors(self._path):
            self._file.write(piece.data)
        self._crc = google_crc32c.extend(self._crc, piece)
        self.num_bytes += piece.nbytes
        return piece.nbytes


class _Reader(io.RawIOBase):
    """Read one object from front to back; each request is a range of its own."""

    def __init__(self, objects: Objects, name: str, num_bytes: int) -> None:
        self._objects, self._name, self._num_bytes = objects, name, num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._position + view.nbytes, self._num_bytes)
        if end <= self._position:
            return 0
        data = self._objects.read(self._name, self._position, end)
        if len(data) != end - self._position:
            raise OSError(f"{self._name}: the store sent {len(data)} bytes of a longer range")
        view[: len(data)] = data
        self._position = end
        return len(data)


def _entry(info: Mapping[str, Any]) -> Entry:
    return Entry(info["type"] == "directory", info.get("size") or 0, info.get("crc32c"))


def _refuse_unknown_protocol(url: str) -> None:
    protocol = url.partition("://")[0].rpartition("::")[2]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        raise CheckpointError(
            f"{url}: the storage needs a package of its own. Got protocol {protocol!r} without it "
            f"({known_implementations[protocol].get('err', error)}). "
            f"Run 'pip install {package or 'the package that is named here'}'."
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{url}: the storage must be one that fsspec knows. Got protocol {protocol!r}. "
            "Use gs://, s3:// or abfs://, or a path of the local disk."
        ) from error


@contextmanager
def _os_errors(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such object or bucket", path) from error
    except (FileExistsError, PermissionError):
        raise
    except Exception as error:  # the libraries of stores raise errors of their own, without end
        # No errno: EIO and the like would tell of damaged bytes, and this is a store that is ill.
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
