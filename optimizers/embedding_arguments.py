"""Checks of what Embedding is constructed with, all before there is a table."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rowstep.optimizers import arguments
from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = ["COMBINERS", "checked", "float_policy", "initial_table", "legacy", "refuse"]

COMBINERS = ("sum", "mean", "sqrtn")
"""The ways to make one row of the rows of a bag."""

_REFUSED: Mapping[str, str] = {
    "lora_rank": "Its delta is a product as large as the table, in every step. Leave it out; to "
    "fine-tune cheaply, train the rows of the batch with LazyAdam",
    "lora_alpha": "It needs lora_rank. Leave it out",
    "quantization_config": "Optimizers cannot train an integer table. Train in float, then load "
    "the weights into a keras.layers.Embedding and quantize that",
}


def checked(
    where: str,
    input_dim: Any,
    output_dim: Any,
    embeddings_initializer: Any,
    embeddings_regularizer: Any,
    embeddings_constraint: Any,
    mask_zero: Any,
    row_l2: Any,
    combiner: Any,
    padding_id: Any,
) -> dict[str, Any]:
    """Return the settings of a layer by name, in the form in which the layer keeps them.

    Raises:
        OptimizerArgumentError: one of them does not fit, or two do not fit together.
    """
    width = _size(where, "output_dim", output_dim)
    return {
        "input_dim": _size(where, "input_dim", input_dim),
        "output_dim": width,
        "embeddings_initializer": keras.initializers.get(embeddings_initializer),
        "embeddings_regularizer": _regularizer(where, embeddings_regularizer),
        "embeddings_constraint": _row_constraint(where, embeddings_constraint, width),
        "mask_zero": bool(mask_zero),
        "row_l2": arguments.non_negative(where, "row_l2", row_l2),
        "combiner": _combiner(where, combiner),
        "padding_id": _padding_id(where, padding_id, bool(mask_zero)),
    }


def _size(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise OptimizerArgumentError(
            f"{where}: {name} must be an integer from 1 up. Got {value!r}. "
            "Set it to the number of rows or the width of the table."
        )
    return int(value)


def refuse(where: str, **given: Any) -> None:
    """Raise OptimizerArgumentError for what Keras' layer offers and a table of rows cannot."""
    for name, value in given.items():
        if value is not None:
            raise OptimizerArgumentError(
                f"{where}: {name} is not supported. Got {value!r}. "
                f"Allowed is None. {_REFUSED[name]}."
            )


def legacy(where: str, kwargs: dict[str, Any]) -> None:
    """Take the arguments of older Keras layers out of a dictionary; warn where one was set."""
    if kwargs.pop("input_length", None) is not None:
        warnings.warn(
            f"{where}: input_length is ignored, as in Keras 3. Remove it.", UserWarning, 3
        )
    if kwargs.pop("sparse", False):
        raise OptimizerArgumentError(
            f"{where}: sparse is not supported. Got True. Allowed is False. The gradient is sparse "
            "without it; for sparse ids set a combiner. Leave it out."
        )


def float_policy(where: str, policy: Any) -> None:
    """Raise OptimizerArgumentError for a dtype policy that makes the table one of integers."""
    if getattr(policy, "quantization_mode", None) is not None:
        raise OptimizerArgumentError(
            f"{where}: dtype must not be quantized. Got {policy.name}. float32, bfloat16, float16 "
            "and the mixed policies are allowed. Train in float, then load the weights into a "
            "keras.layers.Embedding and quantize that."
        )


def _combiner(where: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or value not in COMBINERS):
        raise OptimizerArgumentError(
            f"{where}: combiner must be None or one of {', '.join(COMBINERS)}. Got {value!r}. "
            "Choose one of them; None keeps one row for each id."
        )
    return value


def _padding_id(where: str, value: Any, mask_zero: bool) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer | None):
        raise OptimizerArgumentError(
            f"{where}: padding_id must be an integer or None. Got {value!r}. "
            "Usual is 0 or -1. Correct the value."
        )
    if mask_zero and value not in (None, 0):
        raise OptimizerArgumentError(
            f"{where}: padding_id must be 0 or None with mask_zero=True. Got {value!r}. "
            "Leave out one of the two."
        )
    return None if value is None else int(value)


def _regularizer(where: str, value: Any) -> Any:
    if isinstance(value, int | float):
        raise OptimizerArgumentError(
            f"{where}: embeddings_regularizer must be a Keras regularizer. Got {value!r}. "
            f"To decay the rows of the batch write row_l2={value!r}."
        )
    return keras.regularizers.get(value)


def _row_constraint(where: str, value: Any, width: int) -> Any:
    # It is tried on a small table: the result for a row must not change when the row is alone. The
    # rows differ by powers of ten, so that some are within any usual bound and some are not.
    constraint = keras.constraints.get(value)
    if constraint is None:
        return None
    if not isinstance(constraint, keras.constraints.Constraint):
        raise OptimizerArgumentError(
            f"{where}: embeddings_constraint must be a keras.constraints.Constraint. "
            f"Got {value!r}. Write a class with __call__ that derives from it."
        )
    scales = np.array([1e-4, 1.0, -1e2, 1e6, -1e-2], np.float32)
    trial = scales[:, None] * np.linspace(0.5, 1.5, width, dtype=np.float32)
    with tf.init_scope():  # the layer may be made inside a tf.function
        together = keras.ops.convert_to_numpy(constraint(tf.constant(trial)))
        alone = [
            keras.ops.convert_to_numpy(constraint(tf.constant(trial[i : i + 1]))) for i in range(5)
        ]
    if not np.allclose(together, np.concatenate(alone), rtol=1e-4, atol=0.0, equal_nan=True):
        raise OptimizerArgumentError(
            f"{where}: embeddings_constraint must treat each row by itself. Got {value!r}, whose "
            "result for a row depends on the other rows. The constraints of Keras have axis=0 "
            "unless told otherwise, which is a norm over all rows of the table. Write for example "
            "keras.constraints.MaxNorm(1.0, axis=-1)."
        )
    return constraint


def initial_table(where: str, value: Any, shape: tuple[int, int]) -> np.ndarray:
    """Return a table to start from; a list of one table is what Keras' `weights` also takes."""
    if isinstance(value, list | tuple) and len(value) == 1 and np.ndim(value[0]) == 2:
        value = value[0]
    table = np.asarray(value)
    if table.shape != shape or table.dtype.kind not in "fiuV":  # bfloat16 is of kind V to NumPy
        raise OptimizerArgumentError(
            f"{where}: weights must be a table of numbers of shape {shape}. Got shape "
            f"{table.shape} of {table.dtype}. Give one row for each of input_dim ids."
        )
    return table
