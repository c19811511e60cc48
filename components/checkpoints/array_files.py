"""Write and read the arrays of a checkpoint: streamed `.npy` files with a checksum each."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import ml_dtypes
import numpy as np

from rowstep import RowstepError
from rowstep.components.checkpoints.medium import Medium

# A piece stays in the processor's cache between reading, summing up and writing. One that goes to
# TensorFlow is larger, because each call costs as much as copying a good part of it.
_PIECE_BYTES = 2 * 2**20
_ASSIGNED_BYTES = 4 * 2**20
_ALIGNMENT = 64  # of memory that TensorFlow takes without a copy
# NumPy's .npy header cannot name these types: the bits are stored as integers of the same width.
_STORED_AS = {"bfloat16": "<u2", "float8_e4m3fn": "|u1", "float8_e5m2": "|u1"}
_PLAIN_TYPE = re.compile(r"[<>|][biufc]\d{1,2}")


class CheckpointError(RowstepError, RuntimeError):
    """Say that a checkpoint cannot be written, read or trusted."""


class DamageError(Exception):
    """Say what is wrong with the bytes of one checkpoint; the store falls back on an older one."""


class ReadError(DamageError):
    """Say that the device failed to read; once more it may succeed, which real damage does not."""


@dataclass(frozen=True)
class ArrayRecord:
    """Describe one saved array; the manifest holds one of these per array, in saved order.

    Args:
        group: the list the array belongs to.
        index: its position in that list.
        name: its name, distinct within the group.
        shape: its shape.
        dtype: its type, as NumPy's `dtype.str`, or `bfloat16`, `float8_e4m3fn`, `float8_e5m2`.
        file: name of its file.
        num_bytes: length of the file.
        crc32c: CRC-32C (Castagnoli) of the whole file.
    """

    group: str
    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    num_bytes: int
    crc32c: int

    @property
    def data_bytes(self) -> int:
        """Return the length of the numbers alone, without the header of the file."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


# --- writing --------------------------------------------------------------------------------


def as_storable(value: Any, where: str) -> np.ndarray:
    """Return the array whose bytes represent a value on disk; a view, never a copy.

    Raises:
        CheckpointError: the value is no array, or of a type that cannot be stored.
    """
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


def write_array(
    file: BinaryIO, array: np.ndarray, on_written: Callable[[np.ndarray], object] | None = None
) -> tuple[int, int]:
    """Stream an array into a file in `.npy` form; return the length and checksum of the file.

    Arrays that are not C-contiguous are written in C order, copied piece by piece.

    Args:
        file: open for writing.
        array: what to write.
        on_written: is given each piece after it was written.

    Raises:
        OSError: the disk refuses.

    Cost: no copy of a C-contiguous array; else one piece of 2 MiB, whatever the array's size.
    """
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    )
    text = header.getvalue()
    num_bytes, crc = len(text), google_crc32c.value(text)
    file.write(text)
    for piece in _pieces(array):
        crc = google_crc32c.extend(crc, piece)  # first: then the write finds the piece in the cache
        file.write(piece.data)
        num_bytes += piece.nbytes
        if on_written is not None:
            on_written(piece)
    return num_bytes, crc


def type_name(dtype: np.dtype) -> str:
    """Return the name of a NumPy type in the manifest."""
    return dtype.name if dtype.name in _STORED_AS else dtype.str


def is_type_name(name: object) -> bool:
    """Return whether a name in a manifest is one that `type_name` gives."""
    if not isinstance(name, str):
        return False
    return name in _STORED_AS or (
        _PLAIN_TYPE.fullmatch(name) is not None and np.dtype(name).str == name
    )


def dtype_of(name: str) -> np.dtype:
    """Return the NumPy type of a name in the manifest."""
    return np.dtype(getattr(ml_dtypes, name) if name in _STORED_AS else name)


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


# --- reading --------------------------------------------------------------------------------


def read_array(medium: Medium, folder: str, record: ArrayRecord) -> np.ndarray:
    """Return one saved array after checking its bytes against the manifest.

    Raises:
        DamageError: size, header or checksum differ from the manifest.
        OSError: the file cannot be read.

    Cost: memory for the array itself.
    """
    out = np.empty(record.shape, dtype_of(record.dtype))
    read_into(medium, folder, record, out)
    return out


def read_into(medium: Medium, folder: str, record: ArrayRecord, out: np.ndarray) -> None:
    """Fill an array with a saved one, and check its bytes against the manifest.

    Args:
        medium: where the checkpoint is.
        folder: the checkpoint.
        record: the array.
        out: C-contiguous, of the same shape and dtype.

    Raises:
        DamageError: size, header or checksum differ from the manifest.
        OSError: the file cannot be read.

    Cost: no memory.
    """
    data = out.reshape(-1).view(np.uint8)
    with medium.open(folder, record.file) as file:
        crc = _read_header(file, record)
        for start in range(0, data.nbytes, _PIECE_BYTES):
            crc = _read_piece(file, data[start : start + _PIECE_BYTES], crc, record)
    _compare(crc, record)


def read_pieces(
    medium: Medium, folder: str, record: ArrayRecord
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, rows) of one saved array in order; the rows are overwritten by the next.

    Raises:
        DamageError: the file is cut short, or (after the last piece) its checksum differs.
        OSError: the file cannot be read.

    Cost: memory for one piece, or for one row where a row is longer.
    """
    stored = _stored_type(record)
    shape = record.shape or (1,)
    row_bytes = stored.itemsize * math.prod(shape[1:])
    num_rows = max(min(shape[0], _ASSIGNED_BYTES // max(row_bytes, 1)), 1)
    with medium.open(folder, record.file) as file:
        crc = _read_header(file, record)
        data = _aligned(num_rows * row_bytes if shape[0] else 0)
        buffer = data.view(stored).reshape(num_rows if shape[0] else 0, *shape[1:])
        for first in range(0, shape[0], num_rows):
            count = min(num_rows, shape[0] - first)
            crc = _read_piece(file, data[: count * row_bytes], crc, record)
            yield first, buffer[:count].view(dtype_of(record.dtype))
    _compare(crc, record)


def check_file(medium: Medium, folder: str, record: ArrayRecord) -> None:
    """Read a file once and compare its size, header and checksum with the manifest.

    Raises:
        DamageError: they differ.
        OSError: the file cannot be read.

    Cost: one read of the file, 2 MiB of memory.
    """
    size = medium.size(folder, record.file)
    if size != record.num_bytes:
        raise DamageError(f"{record.file}: {size} bytes, the manifest {record.num_bytes}")
    left = record.data_bytes
    buffer = np.empty(min(_PIECE_BYTES, left), dtype=np.uint8)
    with medium.open(folder, record.file) as file:
        crc = _read_header(file, record)
        while left:
            piece = buffer[: min(left, buffer.nbytes)]
            crc = _read_piece(file, piece, crc, record)
            left -= piece.nbytes
    _compare(crc, record)


def _stored_type(record: ArrayRecord) -> np.dtype:
    return np.dtype(_STORED_AS.get(record.dtype, record.dtype))


def _read_header(file: BinaryIO, record: ArrayRecord) -> int:
    """Read the header of a file and return its checksum."""
    num_bytes = record.num_bytes - record.data_bytes
    header = file.read(num_bytes)
    descr = _stored_type(record).str
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {record.shape!r}, }}"
    start = b"\x93NUMPY\x01\x00" + (num_bytes - 10).to_bytes(2, "little") + text.encode()
    # How much padding follows depends on NumPy's version; the checksum covers it. NumPy's own
    # parser is not asked: it can fail in many ways on what is no header.
    if len(header) != num_bytes or header.rstrip(b" \n") != start:
        raise DamageError(f"{record.file}: its header does not say what the manifest says")
    return google_crc32c.value(header)


def _aligned(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]


def _read_piece(file: BinaryIO, piece: np.ndarray, crc: int, record: ArrayRecord) -> int:
    """Fill a piece from a file and return the checksum that it brings."""
    if (file.readinto(piece.data) or 0) != piece.nbytes:  # type: ignore[attr-defined]
        raise DamageError(f"{record.file}: cut short")
    return google_crc32c.extend(crc, piece)


def _compare(crc: int, record: ArrayRecord) -> None:
    if crc != record.crc32c:
        raise DamageError(f"{record.file}: checksum {crc:08x}, the manifest {record.crc32c:08x}")


# --- disk -----------------------------------------------------------------------------------


def flush_folder(folder: Path) -> None:
    """Make created and renamed entries of a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
