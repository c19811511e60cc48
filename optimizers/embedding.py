"""An embedding layer that reads the rows it needs and no others."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from rowstep.optimizers import embedding_arguments, embedding_lookup

__all__ = ["Embedding"]


@keras.saving.register_keras_serializable(package="rowstep")
class Embedding(keras.layers.Layer):
    """Look up rows of a table by integer ids, one row an id or one row a bag of ids.

        output[..., :]    = table[ids[...], :]                                  combiner None
        output[..., :]    = sum_i w_i * table[ids[..., i], :]                   combiner "sum"
                            the same / sum_i w_i, / sqrt(sum_i w_i^2)           "mean", "sqrtn"
        loss = row_l2 * (sum of squares of the looked-up rows) / B              where row_l2 > 0

    Keras' own layer reads the whole table and then takes rows of it; after a sparse update that
    read is a copy, so a step costs O(V). This layer gathers on the variable itself, forward and
    backward cost O(number of ids), and the gradient is tf.IndexedSlices. Arguments have the names
    and the order of keras.layers.Embedding, and weights files of the two are exchangeable.

    Ids are dense or ragged of any rank, or sparse [B, n] with a combiner. With a combiner the
    last axis is the bag; a bag without ids, or whose divisor is 0, gives zeros. Half precision is
    summed in float32. Rows come out in the compute dtype, the table stays in the variable dtype.
    One layer takes all kinds: Keras exports a model of ragged ids with a dense signature, and with
    padding_id what learned from ragged ids serves padded ones.

    mask_zero is a mask for the layers that follow; row 0 is looked up and trained like any row.
    With a combiner there is no axis left to mask: there it means padding_id=0.

    padding_id gives zeros, counts in no bag, and has no gradient: the rows that the gradient names
    are those of real ids. Shapes stay static, for XLA's sake: a padded position costs what an id
    costs, which ragged ids do not. A batch of nothing but padding names one row, with gradient
    zero: that of padding_id, or row 0 where the table has no such row.

    row_l2 decays the rows of the batch through the loss, once for each time that they are looked
    up; rows that are absent do not decay. embeddings_regularizer has Keras' meaning, the whole
    table in every step: O(V), and every row is then touched. `dense_arguments` says so.

    embeddings_constraint must treat each row by itself: MaxNorm(1.0, axis=-1), not axis=0, which
    is Keras' default. Keras' optimizers apply it to the whole table after each step. An optimizer
    that knows `embeddings.row_constraint` applies it to the rows [R, D] that it wrote; then a row
    that no batch has touched is as it was initialised, until `constrain_table` is called.

    Ids outside [0, input_dim) raise tf.errors.InvalidArgumentError on a CPU; on a GPU TensorFlow
    returns zeros for them, and XLA takes the nearest row.

    Args:
        input_dim: Number of rows V of the table.
        output_dim: Width D of a row.
        embeddings_initializer: A keras initializer, or its name or config.
        embeddings_regularizer: A keras regularizer of the whole table; costs O(V) a step.
        embeddings_constraint: A keras constraint that treats each row by itself.
        mask_zero: Whether id 0 is masked for the layers that follow.
        weights: Table [V, D] to start from. It is not part of the config.
        lora_rank: None; here for the order of arguments, as are the next two.
        lora_alpha: None.
        quantization_config: None.
        row_l2: Weight of the sum of squares of the looked-up rows, averaged over the batch.
        combiner: None, "sum", "mean" or "sqrtn".
        padding_id: The id that means "no id", in the table or not, or None.
        **kwargs: name, dtype, trainable and what else keras.layers.Layer takes. input_length is
            ignored with a warning.

    Raises:
        OptimizerArgumentError: an argument, or the dtype, kind or rank of the ids, does not fit.

    Cost: O(B * n * D) a call for ids [B, n], whatever V is, without embeddings_regularizer.

    Source: combiners as in tf.nn.embedding_lookup_sparse, but zeros instead of 0 / 0.
    """

    built: bool

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        lora_rank: None = None,
        lora_alpha: None = None,
        quantization_config: None = None,
        *,
        row_l2: float = 0.0,
        combiner: str | None = None,
        padding_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        check = embedding_arguments
        check.refuse(
            "Embedding",
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            quantization_config=quantization_config,
        )
        check.legacy("Embedding", kwargs)
        settings = check.checked(
            "Embedding",
            input_dim,
            output_dim,
            embeddings_initializer,
            embeddings_regularizer,
            embeddings_constraint,
            mask_zero,
            row_l2,
            combiner,
            padding_id,
        )
        if weights is not None:
            shape = (settings["input_dim"], settings["output_dim"])
            weights = check.initial_table("Embedding", weights, shape)
        super().__init__(**kwargs)
        check.float_policy("Embedding", self.dtype_policy)
        for name, value in settings.items():
            setattr(self, name, value)
        # Keras would round the weights of the ids to half precision on their way in.
        self.autocast = False
        self.supports_masking = self.mask_zero and self.combiner is None
        if weights is not None:
            self.build()
            self.embeddings.assign(weights)

    @property
    def dense_arguments(self) -> tuple[str, ...]:
        """Return the names of the arguments in use that cost O(V) in every training step."""
        return () if self.embeddings_regularizer is None else ("embeddings_regularizer",)

    def build(self, input_shape: Any = None) -> None:
        """Create the table [input_dim, output_dim]."""
        if self.built:
            return
        self.embeddings = self.add_weight(
            shape=(self.input_dim, self.output_dim),
            initializer=self.embeddings_initializer,
            regularizer=self.embeddings_regularizer,
            constraint=self.embeddings_constraint,
            name="embeddings",
            # Under mixed precision Keras would cast the whole table before rows are taken.
            autocast=False,
        )
        self.embeddings.row_constraint = self.embeddings_constraint
        self.built = True

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Return rows [..., D] of integer ids [...], or of bags of ids [..., n] with a combiner.

        Args:
            inputs: Ids: a dense or ragged integer tensor, or with a combiner a sparse one [B, n].
            weights: A weight for each id, of the kind and shape of the ids; needs a combiner.
        """
        ids = embedding_lookup.integer_ids(self.name, inputs, self.combiner, self.input_dim)
        if weights is not None:
            weights = embedding_lookup.check_weights(
                self.name, ids, weights, self.combiner, self.input_dim
            )
        rows, is_real = embedding_lookup.gather_rows(
            self.embeddings.value, embedding_lookup.flat(ids), self._absent_id(), self.input_dim
        )
        if self.row_l2 > 0.0:
            self.add_loss(self._row_penalty(rows, embedding_lookup.num_examples(ids)))
        if self.combiner is None:
            return embedding_lookup.with_rows(ids, tf.cast(rows, self.compute_dtype))
        pooled = embedding_lookup.pool(ids, rows, weights, is_real, self.combiner)
        return tf.cast(pooled, self.compute_dtype)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Return which ids are not 0, where mask_zero is set and there is no combiner."""
        return keras.ops.not_equal(inputs, 0) if self.supports_masking else None

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return the shape of the ids, without the last axis if pooled, with the width appended."""
        kept = tuple(input_shape) if self.combiner is None else tuple(input_shape)[:-1]
        return (*kept, self.output_dim)

    def compute_output_spec(self, inputs: keras.KerasTensor, weights: Any = None) -> Any:
        """Return what `call` returns, without running it."""
        embedding_lookup.check_spec(self.name, inputs, weights, self.combiner, self.input_dim)
        shape = self.compute_output_shape(inputs.shape)
        # Pooling a ragged [B, (n)] leaves a dense [B, D].
        is_ragged = getattr(inputs, "ragged", False) and (self.combiner is None or len(shape) > 2)
        ragged = {"ragged": True} if is_ragged else {}  # Keras before 3.12 does not know the word
        return keras.KerasTensor(shape, dtype=self.compute_dtype, **ragged)

    def constrain_table(self) -> None:
        """Apply embeddings_constraint to every row once, also to those that no batch has touched.

        Cost: O(V * D).
        """
        if self.embeddings_constraint is not None:
            self.build()
            self.embeddings.assign(self.embeddings_constraint(self.embeddings))

    def get_config(self) -> dict[str, Any]:
        """Return all constructor arguments but `weights`."""
        return super().get_config() | {
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            "mask_zero": self.mask_zero,
            "row_l2": self.row_l2,
            "combiner": self.combiner,
            "padding_id": self.padding_id,
        }

    def _absent_id(self) -> int | None:
        is_pooled_mask = self.mask_zero and self.combiner is not None
        return 0 if is_pooled_mask else self.padding_id

    def _row_penalty(self, rows: tf.Tensor, num_examples: tf.Tensor) -> tf.Tensor:
        squares = tf.reduce_sum(tf.square(tf.cast(rows, tf.float32)))
        # An empty batch must give 0 and not 0 / 0.
        return self.row_l2 * squares / tf.cast(tf.maximum(num_examples, 1), tf.float32)
