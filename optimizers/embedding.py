"""An embedding layer that reads the rows it needs and no others."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from rowstep.optimizers import arguments
from rowstep.optimizers.errors import OptimizerArgumentError

__all__ = ["Embedding"]


@keras.saving.register_keras_serializable(package="rowstep")
class Embedding(keras.layers.Layer):
    """Look up rows of a table by integer ids.

        output[..., :] = table[ids[...], :]
        loss = row_l2 * (sum of squares of the looked-up rows) / B      where row_l2 > 0

    Keras' own layer reads the whole table and then takes rows of it; after a sparse update that
    read is a copy, so a step costs O(V). This layer gathers on the variable itself, forward and
    backward cost O(number of ids), and the gradient is tf.IndexedSlices.

    row_l2 decays the rows of the batch through the loss, once for each time that they are looked
    up; rows that are absent do not decay.

    Ids outside [0, input_dim) raise tf.errors.InvalidArgumentError on a CPU; on a GPU TensorFlow
    returns zeros for them.

    Args:
        input_dim: Number of rows V of the table.
        output_dim: Width D of a row.
        embeddings_initializer: A keras initializer, or its name or config.
        row_l2: Weight of the sum of squares of the looked-up rows, averaged over the batch.
        **kwargs: name, dtype, trainable and what else keras.layers.Layer takes.

    Raises:
        OptimizerArgumentError: a size, row_l2 or the dtype of the ids does not fit.

    Cost: O(B * n * D) a call for ids [B, n], whatever V is.
    """

    built: bool

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        row_l2: float = 0.0,
        **kwargs: Any,
    ) -> None:
        sizes = {"input_dim": input_dim, "output_dim": output_dim}
        for size_name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise OptimizerArgumentError(
                    f"Embedding: {size_name} must be an integer from 1 up. Got {size!r}. "
                    "Set it to the number of rows or the width of the table."
                )
        row_l2 = arguments.non_negative("Embedding", "row_l2", row_l2)
        super().__init__(**kwargs)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.row_l2 = row_l2

    def build(self, input_shape: Any = None) -> None:
        """Create the table [input_dim, output_dim]."""
        if self.built:
            return
        self.embeddings = self.add_weight(
            shape=(self.input_dim, self.output_dim),
            initializer=self.embeddings_initializer,
            name="embeddings",
            # Under mixed precision Keras would cast the whole table before rows are taken.
            autocast=False,
        )
        self.built = True

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the rows [..., D] of integer ids of any shape [...]."""
        if not ids.dtype.is_integer:
            raise OptimizerArgumentError(
                f"{self.name}: ids must be integers. Got {ids.dtype.name}. int32 and int64 are "
                'allowed. Declare the input with dtype="int64".'
            )
        # On the variable itself this is ResourceGather; on a tensor it is a whole read first.
        rows = tf.gather(self.embeddings.value, ids)
        if self.row_l2 > 0.0:
            self.add_loss(self._row_penalty(rows))
        return tf.cast(rows, self.compute_dtype)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return the shape of the ids with the width appended."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, ids: keras.KerasTensor) -> keras.KerasTensor:
        """Return what `call` returns, without running it."""
        return keras.KerasTensor(self.compute_output_shape(ids.shape), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return all constructor arguments."""
        return super().get_config() | {
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "row_l2": self.row_l2,
        }

    def _row_penalty(self, rows: tf.Tensor) -> tf.Tensor:
        squares = tf.reduce_sum(tf.square(tf.cast(rows, tf.float32)))
        # A scalar id is a batch of one; an empty batch must give 0 and not 0 / 0.
        num_examples = tf.shape(rows)[0] if rows.shape.rank > 1 else tf.constant(1)
        return self.row_l2 * squares / tf.cast(tf.maximum(num_examples, 1), tf.float32)
