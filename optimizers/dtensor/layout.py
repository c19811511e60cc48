"""Values on a DTensor mesh: put there, brought back, and the mesh itself written down.

A mesh cannot be saved, its description can: names and sizes of its dimensions, and the devices in
its order. Where the same devices exist the description gives an equal mesh back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = [
    "assign_array",
    "broadcast_rows",
    "check_variables",
    "describe_mesh",
    "is_on_mesh",
    "place",
    "read_array",
    "rebuild_mesh",
]

Array: TypeAlias = "np.ndarray[Any, Any]"
_KEYS = ("name", "dim_names", "dim_sizes", "device_type", "devices")


def is_on_mesh(variable: Any) -> bool:
    """Return whether a variable lives on a mesh."""
    return isinstance(variable, dtensor.DVariable)


def place(value: Any, layout: dtensor.Layout) -> tf.Tensor:
    """Return a value in a layout: a DTensor moved there, anything else copied to the mesh first.

    Cost: the value once on every device, while it is being moved.
    """
    if is_on_mesh(value):
        value = value.read_value()
    # Inside a tf.function every tensor belongs to the mesh that the function runs on.
    if tf.executing_eagerly() and not dtensor.is_dtensor(value):
        value = tf.convert_to_tensor(value)
        replicated = dtensor.Layout.replicated(layout.mesh, rank=value.shape.rank)
        value = dtensor.copy_to_mesh(value, replicated)
    return dtensor.relayout(value, layout)


def read_array(value: Any) -> Array:
    """Return the whole logical value of a variable or tensor, on a mesh or off it.

    Cost: the value once on every device; a table that fits the mesh only in parts cannot be read.
    """
    # To ask for a tensor's mesh starts TensorFlow's mesh device, and its presence changes how XLA
    # compiles everything else in the process. Plain variables are not asked.
    may_be_on_mesh = is_on_mesh(value) or not isinstance(value, tf.Variable)
    if isinstance(value, tf.Variable):
        value = value.read_value()
    if may_be_on_mesh and dtensor.is_dtensor(value):
        mesh = dtensor.fetch_layout(value).mesh
        value = dtensor.relayout(value, dtensor.Layout.replicated(mesh, rank=value.shape.rank))
    return np.asarray(value.numpy())


def assign_array(variable: Any, array: Array) -> None:
    """Assign an array to a variable, on a mesh or off it."""
    # A DVariable refuses plain arrays of any rank but 0, and values in another layout.
    variable.assign(place(array, variable.layout) if is_on_mesh(variable) else array)


def broadcast_rows(rows: tf.Tensor, shape: tf.TensorShape, layout: dtensor.Layout) -> tf.Tensor:
    """Return a value a row [V], spread over the columns to [V, ...], in a layout."""
    column = tf.reshape(rows, [shape[0]] + [1] * (shape.rank - 1))
    # Spread before it is moved: an operation that broadcasts two layouts together may end the
    # whole process in TensorFlow 2.16.
    return dtensor.relayout(tf.broadcast_to(column, shape), layout)


def check_variables(where: str, variables: list[Any], mesh: dtensor.Mesh | None) -> None:
    """Raise OptimizerArgumentError unless all variables live on the mesh, or off any for None."""
    for variable in variables:
        its = variable.layout.mesh if is_on_mesh(variable) else None
        # A mesh cannot be compared with None.
        if (its is None) != (mesh is None) or (mesh is not None and its != mesh):
            raise OptimizerArgumentError(
                f"{where}: variables must live on the mesh of the optimizer. Got {variable.name} "
                f"on {_named(its)} instead of {_named(mesh)}. "
                "Make the variables as tf.experimental.dtensor.DVariable on the mesh, and pass the "
                "same mesh to the optimizer; leave mesh out for plain variables."
            )


def describe_mesh(mesh: dtensor.Mesh) -> dict[str, Any]:
    """Return what a mesh is, in strings and integers only.

    Returns:
        name, dim_names, dim_sizes, device_type, and devices such as "CPU:0" in mesh order.
    """
    return {
        "name": mesh.name,
        "dim_names": list(mesh.dim_names),
        "dim_sizes": [int(mesh.dim_size(name)) for name in mesh.dim_names],
        "device_type": mesh.device_type(),
        "devices": [_short(device) for device in mesh.local_devices()],
    }


def rebuild_mesh(where: str, description: Mapping[str, Any]) -> dtensor.Mesh:
    """Return the mesh of a description as `describe_mesh` gives it.

    Raises:
        OptimizerArgumentError: the description is not complete, it is the part of one process in a
            mesh over several, or this process has not the devices.
    """
    advice = (
        "Pass custom_objects={'mesh': mesh} with a mesh of this machine, or with None to train "
        "off the mesh."
    )
    missing = [key for key in _KEYS if key not in description]
    if missing:
        raise OptimizerArgumentError(
            f"{where}: a mesh description must have {', '.join(_KEYS)}. "
            f"Got none for {', '.join(missing)}. {advice}"
        )
    devices, sizes = list(description["devices"]), list(description["dim_sizes"])
    here = [_short(d.name) for d in tf.config.list_logical_devices(description["device_type"])]
    absent = [device for device in devices if device not in here]
    if absent or len(devices) != math.prod(sizes):
        raise OptimizerArgumentError(
            f"{where}: the devices of the saved mesh must exist in this process. "
            f"Got {math.prod(sizes)} devices, of which {', '.join(devices)} were local, where "
            f"this process has {', '.join(here) or 'none'}. Configure logical devices before "
            f"TensorFlow starts. {advice}"
        )
    dimensions = list(zip(description["dim_names"], sizes, strict=True))
    return dtensor.create_mesh(dimensions, mesh_name=description["name"], devices=devices)


def _named(mesh: dtensor.Mesh | None) -> str:
    return "no mesh" if mesh is None else f"the mesh {mesh.to_string()}"


def _short(device: str) -> str:
    return device.rpartition("device:")[2]
