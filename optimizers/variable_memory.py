"""The memory of variables as NumPy arrays: read without a copy, filled without a second array."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers.variables import native_variable

__all__ = [
    "Array",
    "PiecedArray",
    "fill_variable",
    "is_pieced",
    "read_only_array",
    "scatter_pieces",
    "whole_array",
]

Array: TypeAlias = "np.ndarray[Any, Any]"

# On a GPU, under a strategy, or of a dtype without a buffer format such as bfloat16.
_HIDDEN = (AttributeError, BufferError, NotImplementedError, TypeError, ValueError)


class PiecedArray(Protocol):
    """An array that lies elsewhere, such as one in a checkpoint, and need not fit into memory.

    `load_named_state` and `load_named_variables` take it wherever they take an array.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of the numbers."""

    def pieces(self) -> Iterator[tuple[int, Array]]:
        """Yield (first row, rows) from the first row to the last; no axes count as one row."""

    def read_into(self, out: Array) -> None:
        """Fill a C-contiguous array of this shape and dtype."""


def read_only_array(variable: Any) -> Array:
    """Return a variable of any Keras as a read-only array, without copying on a CPU."""
    native = native_variable(variable)
    try:
        # An ordinary read copies the variable once rows have been scattered into it.
        array = np.asarray(memoryview(native.read_value_no_copy()))
    except _HIDDEN:
        array = np.asarray(keras.ops.convert_to_numpy(native))
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def is_pieced(value: Any) -> bool:
    """Return whether a value is a PiecedArray."""
    return hasattr(value, "read_into")


def whole_array(array: Array | PiecedArray) -> Array:
    """Return an array whole; one that lies elsewhere is read."""
    if isinstance(array, np.ndarray):
        return array
    out = np.empty(array.shape, array.dtype)
    array.read_into(out)
    return out


def fill_variable(variable: Any, array: PiecedArray) -> None:
    """Assign an array that lies elsewhere to a variable of its shape and dtype.

    Cost: on a CPU no memory, unless somebody holds the old value; on a GPU, and for
        bfloat16, the memory of one piece; under a strategy or on a mesh that of the whole array.
    """
    native = native_variable(variable)
    # One of a strategy shows the handle of its first copy alone; one of a mesh has another kind.
    is_split = isinstance(native, tf.distribute.DistributedValues)
    if is_split or not isinstance(getattr(native, "handle", None), tf.Tensor):
        variable.assign(whole_array(array))
        return
    if native.shape.rank == 0 or native.shape[0] < 2:
        native.assign(whole_array(array))
        return
    memory = _own_memory(native)
    if memory is not None:
        array.read_into(memory)
    else:
        scatter_pieces(native, array)


def scatter_pieces(native: tf.Variable, array: PiecedArray, new_rows: Array | None = None) -> None:
    """Write rows of an array that lies elsewhere into a variable; other rows keep their bits.

    Args:
        native: of rows of the array's shape and dtype.
        array: the rows.
        new_rows: the place of each row in the variable, -1 to leave it out; its own when left out.

    Cost: the memory of one piece.
    """
    for first, rows in array.pieces():
        end = first + len(rows)
        row_ids = np.arange(first, end) if new_rows is None else new_rows[first:end]
        is_kept = row_ids >= 0
        if not is_kept.all():
            row_ids, rows = row_ids[is_kept], rows[is_kept]
        elif "CPU" not in native.device:
            # On a CPU the op takes aligned NumPy memory as it is. The next piece comes in the same
            # memory, which a transfer may still be reading.
            rows = np.array(rows)
        tf.raw_ops.ResourceScatterUpdate(resource=native.handle, indices=row_ids, updates=rows)
    # Otherwise every plain read copies the variable from now on: dense optimizers read all of it.
    tf.raw_ops.DisableCopyOnRead(resource=native.handle)


class _Memory:
    """Let NumPy write where a tensor lies; TensorFlow itself shows tensors read-only.

    The array that NumPy makes of this keeps it, and so the tensor, alive.
    """

    def __init__(self, tensor: tf.Tensor, shown: Array) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": shown.shape,
            "typestr": shown.dtype.str,
            "data": (shown.ctypes.data, False),
        }


def _own_memory(native: tf.Variable) -> Array | None:
    """Return the memory of a variable, to be overwritten, or None where it cannot be had."""
    if "CPU" not in native.device:
        return None
    # Another tensor may share the memory, such as a value that somebody read and still holds. A
    # scatter, here of a row onto itself, makes TensorFlow give the variable a copy of its own then.
    tf.raw_ops.ResourceScatterUpdate(
        resource=native.handle, indices=[0], updates=native.sparse_read([0])
    )
    tensors = [native.read_value_no_copy() for _ in range(2)]
    try:
        shown = [np.asarray(memoryview(tensor)) for tensor in tensors]
    except _HIDDEN:
        return None
    if shown[0].ctypes.data != shown[1].ctypes.data or not shown[0].flags.c_contiguous:
        return None  # these are copies of the variable
    return np.asarray(_Memory(tensors[0], shown[0]))
