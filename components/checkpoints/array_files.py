"""Write and read the arrays of a checkpoint: streamed `.npy` files with a checksum each."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from rowstep import RowstepError

_PIECE_BYTES = 16 * 2**20
FILE_NAME = re.compile(r"array-\d{5,}\.npy")
# NumPy's .npy header cannot name these types: the bits are stored as integers of the same width.
_STORED_AS = {"bfloat16": "<u2", "float8_e4m3fn": "|u1", "float8_e5m2": "|u1"}


class CheckpointError(RowstepError, RuntimeError):
    """Say that a checkpoint cannot be written, read or trusted."""


class DamageError(Exception):
    """Say what is wrong with the bytes of one checkpoint; the store falls back on an older one."""


@dataclass(frozen=True)
class ArrayRecord:
    """Describe one saved array; the manifest holds one of these per array, in saved order."""

    group: str
    name: str
    index: int
    shape: tuple[int, ...]
    dtype: str
    file: str
    num_bytes: int
    crc32c: int


# --- arrays ---------------------------------------------------------------------------------


def write_array(folder: Path, number: int, group: str, name: str, value: Any) -> ArrayRecord:
    """Stream one array into a `.npy` file of its own and flush it to the disk.

    The file is called by a number of ours, since variable names may hold anything. Arrays that are
    not C-contiguous are written in C order, copied piece by piece.

    Args:
        folder: the unfinished checkpoint.
        number: position among all arrays of this checkpoint.
        group: name of the list the array belongs to.
        name: name of the array within its group.
        value: a NumPy array or scalar of booleans, numbers, bfloat16 or float8.

    Raises:
        CheckpointError: the value is no array, or of a type that cannot be stored.
        OSError: the disk refuses.

    Cost: memory for one piece of 16 MiB at most, whatever the size of the array.
    """
    array = _as_plain_array(value, f"save: array {group}/{name}")
    file_name = f"array-{number:05d}.npy"
    header = _npy_header(array)
    num_bytes, crc = len(header), google_crc32c.value(header)
    with open(folder / file_name, "xb") as file:
        file.write(header)
        for piece in _pieces(array):
            file.write(piece.data)
            crc = google_crc32c.extend(crc, piece)
            num_bytes += piece.nbytes
        flush_to_disk(file)
    return ArrayRecord(
        group, name, number, tuple(array.shape), _type_name(value.dtype), file_name, num_bytes, crc
    )


def read_array(folder: Path, record: ArrayRecord) -> np.ndarray:
    """Return one saved array after checking its bytes against the manifest.

    Raises:
        DamageError: size, header or checksum differ from the manifest.
        OSError: the file cannot be read.

    Cost: memory for the array itself.
    """
    dtype = dtype_of(record.dtype)
    stored = np.dtype(_STORED_AS.get(record.dtype, dtype))
    flat = np.empty(int(np.prod(record.shape, dtype=np.int64)), dtype=stored)
    header = _npy_header(np.broadcast_to(np.empty((), stored), record.shape))
    data = flat.view(np.uint8)
    crc = google_crc32c.value(header)
    with open(folder / record.file, "rb") as file:
        if file.read(len(header)) != header or len(header) + data.nbytes != record.num_bytes:
            raise DamageError(f"{record.file}: its header does not say what the manifest says")
        for start in range(0, data.nbytes, _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            if _read_into(file, piece) != piece.nbytes:
                raise DamageError(f"{record.file}: cut short")
            crc = google_crc32c.extend(crc, piece)
    if crc != record.crc32c:
        raise DamageError(f"{record.file}: checksum {crc:08x}, the manifest {record.crc32c:08x}")
    return flat.view(dtype).reshape(record.shape)


def read_pieces(folder: Path, record: ArrayRecord) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, rows) of one saved array in order; the rows are overwritten by the next.

    Raises:
        DamageError: the file is cut short, or (after the last piece) its checksum differs.
        OSError: the file cannot be read.

    Cost: memory for one piece.
    """
    dtype = dtype_of(record.dtype)
    stored = np.dtype(_STORED_AS.get(record.dtype, dtype))
    shape = record.shape or (1,)
    header = _npy_header(np.broadcast_to(np.empty((), stored), record.shape))
    row_bytes = stored.itemsize * math.prod(shape[1:])
    num_rows = min(shape[0], max(_PIECE_BYTES // max(row_bytes, 1), 1))
    buffer = np.empty((num_rows, *shape[1:]), dtype=stored)
    data = buffer.reshape(-1).view(np.uint8)
    crc = google_crc32c.value(header)
    with open(folder / record.file, "rb") as file:
        if file.read(len(header)) != header:
            raise DamageError(f"{record.file}: its header does not say what the manifest says")
        for first in range(0, shape[0], max(num_rows, 1)):
            count = min(num_rows, shape[0] - first)
            piece = data[: count * row_bytes]
            if _read_into(file, piece) != piece.nbytes:
                raise DamageError(f"{record.file}: cut short")
            crc = google_crc32c.extend(crc, piece)
            yield first, buffer[:count].view(dtype)
    if crc != record.crc32c:
        raise DamageError(f"{record.file}: checksum {crc:08x}, the manifest {record.crc32c:08x}")


def check_file(folder: Path, record: ArrayRecord) -> None:
    """Read a file once and compare its size and checksum with the manifest.

    Raises:
        DamageError: they differ.
        OSError: the file cannot be read.
    """
    crc, num_bytes = 0, 0
    buffer = np.empty(min(_PIECE_BYTES, record.num_bytes + 1), dtype=np.uint8)
    with open(folder / record.file, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != record.num_bytes:
            raise DamageError(f"{record.file}: {size} bytes, the manifest {record.num_bytes}")
        while num_read := _read_into(file, buffer):
            crc = google_crc32c.extend(crc, buffer[:num_read])
            num_bytes += num_read
    if num_bytes != record.num_bytes or crc != record.crc32c:
        raise DamageError(f"{record.file}: checksum {crc:08x}, the manifest {record.crc32c:08x}")


def _read_into(file: io.BufferedReader, piece: np.ndarray) -> int:
    return file.readinto(piece.data) or 0


def _as_plain_array(value: Any, where: str) -> np.ndarray:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise CheckpointError(
            f"{where}: the value must be a NumPy array. Got {type(value).__name__}. "
            "Convert it with numpy.asarray."
        )
    array = np.asarray(value)
    if array.dtype.name in _STORED_AS:
        return array.view(_STORED_AS[array.dtype.name])
    if array.dtype.kind not in "biufc":
        raise CheckpointError(
            f"{where}: the type must have a fixed meaning on disk. Got {array.dtype}. "
            f"Allowed: booleans, numbers, {', '.join(_STORED_AS)}. Put anything else into 'meta'."
        )
    return array


def _type_name(dtype: np.dtype) -> str:
    return dtype.name if dtype.name in _STORED_AS else dtype.str


def dtype_of(name: str) -> np.dtype:
    """Return the NumPy type of a name in the manifest."""
    if name not in _STORED_AS:
        return np.dtype(name)
    import ml_dtypes  # only for the few types that NumPy lacks

    return np.dtype(getattr(ml_dtypes, name))


def _npy_header(array: np.ndarray) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    )
    return header.getvalue()


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the array's bytes in C order, without a copy where it is C-contiguous."""
    if array.flags.c_contiguous:
        data = array.reshape(-1).view(np.uint8)
        for start in range(0, data.nbytes, _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES]
        return
    size = max(_PIECE_BYTES // array.itemsize, 1)
    for piece in np.nditer(
        array, flags=["external_loop", "buffered", "zerosize_ok"], buffersize=size, order="C"
    ):
        yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8)


# --- disk -----------------------------------------------------------------------------------


def flush_to_disk(file: BinaryIO) -> None:
    """Make what was written survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make created and renamed entries of a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
