"""What an optimizer does to tables, found by letting a copy of it train small ones.

The optimizer itself is left alone: copies are made of its config. Cost is read off a traced step
(operations that put out a whole table), meaning off two steps of a table of five rows.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers.diagnosis.model_probe import functions_of, loaded
from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = [
    "OPTIONS_OFF",
    "REFUSALS",
    "copied",
    "is_keras3",
    "is_of_rowstep",
    "movement",
    "num_whole_tables",
    "sgd",
    "sums_duplicates",
]

OPTIONS_OFF: dict[str, Any] = {
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "weight_decay": None,
    "use_ema": False,
    "ema_overwrite_frequency": None,
    "gradient_accumulation_steps": None,
    "loss_scale_factor": None,
    "amsgrad": False,
}
"""The arguments whose cost or meaning is looked at one by one, with the value that means off."""

REFUSALS = (
    AttributeError,
    NotImplementedError,
    TypeError,
    ValueError,
    tf.errors.InvalidArgumentError,
)
"""What optimizers raise when they cannot make a step, or cannot be made."""

_FIRST_SIZE = 4093  # no other dimension of a step is as large, so a table shows by its shape
_WIDTH = 2
_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})


def is_keras3(optimizer: Any) -> bool:
    """Return whether an optimizer is one of Keras 3.

    Raises:
        OptimizerArgumentError: it is neither that nor one of tf_keras.
    """
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return True
    tf_keras = loaded("tf_keras")
    if tf_keras is not None and isinstance(
        optimizer, (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
    ):
        return False
    raise OptimizerArgumentError(
        "doctor: optimizer must be an optimizer of Keras 3 or tf_keras. "
        f"Got {type(optimizer).__name__}. Pass the object that the training uses."
    )


def is_of_rowstep(optimizer: Any) -> bool:
    """Return whether an optimizer is one of rowstep's, or of a class derived from one."""
    return any(kind.__module__.startswith("rowstep.") for kind in type(optimizer).__mro__)


def copied(optimizer: Any, keep: Sequence[str] = ()) -> Any:
    """Return a fresh optimizer of the same config and a rate of 0.1, its options off but for keep.

    Raises:
        OptimizerArgumentError: from_config cannot make one.
    """
    try:
        config = optimizer.get_config()
        off = {n: value for n, value in OPTIONS_OFF.items() if n in config and n not in keep}
        if "learning_rate" in config:
            config["learning_rate"] = 0.1
        if is_of_rowstep(optimizer):
            return type(optimizer).from_config(config | off)
        copy = type(optimizer).from_config(config)
    except REFUSALS as error:
        raise OptimizerArgumentError(
            "doctor: optimizer must be one that from_config makes again from get_config, because "
            f"a copy of it is tried out. Got {type(optimizer).__name__} ({error}). "
            "Give it a get_config that returns all its arguments."
        ) from error
    for name, value in off.items():
        # Set and not configured: AdamW, for one, has no weight_decay that means off.
        setattr(copy, name, value)
    return _uncompiled(copy)


def sgd(optimizer: Any, **options: Any) -> Any:
    """Return plain SGD of the same Keras with some of the options.

    Keras has the options in the base class of all optimizers. SGD adds nothing to a gradient, so
    that what an option does to it shows.
    """
    if is_keras3(optimizer):
        return keras.optimizers.SGD(0.1, **options)
    optimizers = loaded("tf_keras").optimizers
    if isinstance(optimizer, optimizers.legacy.Optimizer):
        optimizers = optimizers.legacy
    return _uncompiled(optimizers.SGD(0.1, **options))


def _uncompiled(optimizer: Any) -> Any:
    if getattr(optimizer, "jit_compile", None) is True:
        optimizer.jit_compile = False  # found by its attribute; compiling copies takes minutes
    return optimizer


# --- meaning --------------------------------------------------------------------------------


def movement(
    optimizer: Any,
    path: str,
    scale: float = 1.0,
    *,
    repeat_ids: bool = False,
    dtype: str = "float32",
) -> np.ndarray:
    """Return a table [5, D] of zeros after each of two steps, as an array [2, 5, D].

    The batch of the first step holds rows 1 and 3, the second only row 3. With repeat_ids row 1
    comes twice, with gradients of opposite sign and the same sum.
    """
    variable = _table(optimizer, path, 5, dtype)
    _build(optimizer, [variable])
    first = ([1, 1, 3], [4.0, -3.0, 2.0]) if repeat_ids else ([1, 3], [1.0, 2.0])
    after = []
    for ids, factors in (first, ([3], [1.5])):
        values = tf.constant([[scale * factor] * _WIDTH for factor in factors], dtype)
        optimizer.apply_gradients([(_slices(tf.constant(ids, tf.int64), values, 5), variable)])
        after.append(np.array(tf.cast(tf.convert_to_tensor(variable), tf.float32)))
    return np.stack(after)


def sums_duplicates(make: Callable[[], Any], path: str, scale: float = 1.0) -> bool:
    """Return whether an id that comes twice counts as once with the summed gradient.

    Args:
        make: Returns a fresh optimizer.
        path: Path of the table, because some optimizers go by it.
        scale: Size of the gradients: that of a clip, for the clip to act.
    """
    summed = movement(make(), path, scale)
    repeated = movement(make(), path, scale, repeat_ids=True)
    tolerance = 1e-4 * float(np.max(np.abs(summed)))
    return bool(np.allclose(summed, repeated, rtol=0.0, atol=tolerance))


# --- cost -----------------------------------------------------------------------------------


def num_whole_tables(optimizer: Any, paths: Sequence[str]) -> dict[str, int]:
    """Count, for each path, the operations of every step that put out a whole table [V, D].

    Behind a condition only those count that each of its branches has: a step that copies averages
    now and then is not a dense step.
    """
    sizes = {path: _FIRST_SIZE + number for number, path in enumerate(paths)}
    variables = {path: _table(optimizer, path, size, "float32") for path, size in sizes.items()}
    _build(optimizer, list(variables.values()))

    def step(ids: tf.Tensor, values: tf.Tensor) -> None:
        optimizer.apply_gradients(
            [(_slices(ids, values, sizes[path]), variables[path]) for path in paths]
        )

    specs = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, _WIDTH], tf.float32))
    traced = tf.function(step, autograph=False).get_concrete_function(*specs)
    graph = traced.graph.as_graph_def(add_shapes=True)
    library = {function.signature.name: function for function in graph.library.function}
    heights = _heights(graph.node, library)
    return {path: heights[size] for path, size in sizes.items()}


def _heights(nodes: Sequence[Any], library: Mapping[str, Any]) -> Counter[int]:
    """Count the first dimensions of all matrices that the nodes put out in any case."""
    counts: Counter[int] = Counter()
    for node in nodes:
        shapes = node.attr["_output_shapes"].list.shape
        counts.update(shape.dim[0].size for shape in shapes if len(shape.dim) > 1)
        bodies = [_heights(body.node_def, library) for body in functions_of(node, library)]
        if bodies and node.op in _BRANCHES:
            bodies = [functools.reduce(operator.and_, bodies)]  # the smaller count of each
        for body in bodies:
            counts.update(body)
    return counts


def _table(optimizer: Any, path: str, num_rows: int, dtype: str) -> Any:
    zeros = np.zeros([num_rows, _WIDTH], np.float32)
    if not is_keras3(optimizer):
        return tf.Variable(tf.cast(zeros, dtype), name=path)
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(zeros, dtype=dtype, name=name)


def _build(optimizer: Any, variables: list[Any]) -> None:
    if hasattr(optimizer, "build"):
        optimizer.build(variables)


def _slices(ids: Any, values: Any, num_rows: int) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, ids, tf.constant([num_rows, _WIDTH], tf.int64))
