"""What a TensorFlow 1 optimizer is given, checked before it changes anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.gradients import compute_dtype
from rowstep.optimizers.sparse_rows import check_row_ids
from rowstep.optimizers.variables import variable_path

__all__ = ["checked_pairs", "hyperparameter", "refuse_non_variable"]


class _ArgumentTypeError(OptimizerArgumentError, TypeError):
    """Say that an argument is of a wrong type: TensorFlow 1 promises a TypeError for these."""


def hyperparameter(
    where: str, name: str, value: Any, check: Callable[[str, str, Any], float]
) -> Any:
    """Return a number after its check, or a scalar tensor or a callable as it is."""
    if callable(value):
        try:
            inspect.signature(value).bind()
        except TypeError:
            raise _ArgumentTypeError(
                f"{where}: a callable {name} must need no arguments. Got {value!r}. "
                "A schedule wants the step: pass `lambda: schedule(step)`."
            ) from None
        return value
    if not tf.is_tensor(value):
        return check(where, name, value)
    if value.shape.rank not in (0, None):
        raise OptimizerArgumentError(
            f"{where}: {name} must be a scalar. Got a tensor of shape {value.shape}. Pass one "
            "number for all variables."
        )
    return value


def refuse_non_variable(where: str, variable: Any) -> None:
    """Raise an error that is also a TypeError for what is no tf.Variable."""
    if not isinstance(variable, tf.Variable):
        raise _ArgumentTypeError(
            f"{where}: only a tf.Variable can be trained. Got {variable!r}. "
            "Pass tf.Variables; of a Keras 3 variable pass its value attribute."
        )


def checked_pairs(
    where: str, grads_and_vars: Iterable[tuple[Any, tf.Variable]]
) -> list[tuple[Any, tf.Variable]]:
    """Return (gradient, variable) pairs whose gradients fit, as tensors, tf.IndexedSlices or None.

    What can be known now raises at once. In a graph, every gradient that is returned waits for the
    run-time checks of all of them.

    Raises:
        OptimizerArgumentError: no pair has a gradient, or a shape does not fit.
        TypeError: something is not a pair, a gradient or a variable.
        tf.errors.InvalidArgumentError: eagerly, a row id is out of range.
    """
    pairs = [_pair(where, pair) for pair in grads_and_vars]
    if all(gradient is None for gradient, _ in pairs):
        # TensorFlow's wordings stay in, because programs look for them.
        known = "No gradients provided for any variable" if pairs else "No variables provided."
        raise OptimizerArgumentError(
            f"{where}: at least one variable must have a gradient. "
            f"Got none for {[variable_path(variable) for _, variable in pairs]} ({known}). "
            "Check that the loss depends on the variables."
        )
    checks: list[tf.Operation] = []
    for gradient, variable in pairs:
        if gradient is not None:
            checks += _checks(f"{where}: {variable_path(variable)}", gradient, variable)
    if not checks:
        return pairs
    # Through the data: control dependencies of the caller would not reach merged replica updates.
    with tf.control_dependencies(checks):
        return [(_copy(gradient), variable) for gradient, variable in pairs]


def _pair(where: str, pair: Any) -> tuple[Any, tf.Variable]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise _ArgumentTypeError(
            f"{where}: grads_and_vars must be pairs of a gradient and its variable. "
            f"Got {pair!r}. Pass what compute_gradients returned."
        )
    gradient, variable = pair
    refuse_non_variable(where, variable)
    if gradient is None:
        return None, variable
    try:
        gradient = tf.compat.v1.convert_to_tensor_or_indexed_slices(gradient)
    except (TypeError, ValueError):
        raise _ArgumentTypeError(
            f"{where}: a gradient must be a tensor, tf.IndexedSlices or None. "
            f"Got {gradient!r} for {variable_path(variable)}. Pass one of these."
        ) from None
    dtype = variable.dtype.base_dtype
    if not isinstance(gradient, tf.IndexedSlices) and compute_dtype(dtype) == dtype:
        gradient = tf.cast(gradient, dtype)  # the fused kernel takes no other
    return gradient, variable


def _checks(where: str, gradient: Any, variable: tf.Variable) -> list[tf.Operation]:
    """Raise for a gradient that cannot fit, and return what must still be checked at run time."""
    if not isinstance(gradient, tf.IndexedSlices):
        return _shape_checks(where, gradient, variable.shape, variable)
    if variable.constraint is not None:
        raise OptimizerArgumentError(
            f"{where}: a variable with a constraint must have a dense gradient. "
            "Got tf.IndexedSlices. Make the variable without its constraint."
        )
    row_ids, row_grads = gradient.indices, gradient.values
    if row_ids.shape.rank not in (1, None) or variable.shape.rank == 0:
        raise OptimizerArgumentError(
            f"{where}: the row ids of a sparse gradient must have rank 1, and the variable rows. "
            f"Got ids of shape {row_ids.shape} for a variable of shape {variable.shape}. "
            "Flatten the ids, and the leading dimensions of the values."
        )
    static_shape = row_ids.shape.concatenate(variable.shape[1:])
    checks = _shape_checks(where, row_grads, static_shape, variable, row_ids)
    num_rows = variable.shape[0] if variable.shape.rank is not None else None
    ids_check = check_row_ids(row_ids, _shape(variable)[0] if num_rows is None else num_rows, where)
    return checks if ids_check is None else [*checks, ids_check]


def _shape_checks(
    where: str,
    values: tf.Tensor,
    static_shape: tf.TensorShape,
    variable: tf.Variable,
    row_ids: tf.Tensor | None = None,
) -> list[tf.Operation]:
    must = f"{where}: a gradient must have the variable's shape, or its rows one for each row id."
    if not static_shape.is_compatible_with(values.shape):
        # A gradient that merely broadcasts would train something else without a word.
        raise OptimizerArgumentError(
            f"{must} Got {values.shape} instead of {static_shape}. "
            "Pair each gradient with the variable that it was taken of."
        )
    if static_shape.is_fully_defined() and values.shape.is_fully_defined():
        return []
    shape = _shape(variable)
    if row_ids is not None:
        shape = tf.concat([[tf.size(row_ids)], shape[1:]], axis=0)
    got = tf.shape(values)
    # Of different ranks the comparison of shapes is false or, for rank 1, broadcast.
    fits = tf.logical_and(
        tf.equal(tf.size(got), tf.size(shape)),
        tf.reduce_all(tf.raw_ops.Equal(x=got, y=shape, incompatible_shape_error=False)),
    )
    return [tf.debugging.Assert(fits, [f"{must} Got, and expected:", got, shape])]


def _shape(variable: tf.Variable) -> tf.Tensor:
    """Return the shape that a variable has at run time, without reading it."""
    if variable.shape.is_fully_defined():
        return tf.constant(variable.shape.as_list(), tf.int32)
    if variable.dtype.base_dtype == variable.dtype:
        return tf.raw_ops.VariableShape(input=variable.handle)
    return tf.shape(variable)


def _copy(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        row_grads, row_ids = tf.identity(gradient.values), tf.identity(gradient.indices)
        return tf.IndexedSlices(row_grads, row_ids, gradient.dense_shape)
    return None if gradient is None else tf.identity(gradient)
