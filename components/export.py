"""The served model: raw examples in, scores out."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from rowstep.components.models import model_columns
from rowstep.configs import RunConfig


def clip_scores(scores: Any, config: RunConfig) -> Any:
    """Keep scores inside `model.score_range`, where one is set; used by evaluation and serving."""
    score_range = config.model.score_range
    return scores if score_range is None else tf.clip_by_value(scores, *score_range)


def export_model(model: keras.Model, transform_output: Any, config: RunConfig, folder: str) -> None:
    """Write a SavedModel that TFMA, TF Serving and `tf.saved_model.load` can call.

    Everything hangs on one tracked root: a transform layer that only lives in a closure loses its
    vocabularies, and `model.export` would ask clients for transformed columns.

    Signatures, both from a batch of serialized `tf.train.Example` [B] of raw columns:
        `serving_default` -> `{"outputs": float32 [B, 1]}`, the label is not needed;
        `transform_features` -> the columns as the model sees them.
    """
    raw = transform_output.raw_feature_spec()
    names = model_columns(config)
    read = {name: raw[name] for name in names}
    root = tf.Module()
    root.transform = transform_output.transform_features_layer()
    # The variables and not the model: a compiled model would drag its optimizer's state along.
    root.model_variables = [variable.value for variable in model.variables]
    signature = [tf.TensorSpec([None], tf.string, name="examples")]

    def transformed(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        columns = root.transform(tf.io.parse_example(examples, read))
        return {name: columns[name] for name in names}

    @tf.function(input_signature=signature)
    def serve(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        columns = {n: tf.reshape(c, [-1]) for n, c in transformed(examples).items()}
        scores = clip_scores(model(columns, training=False), config)
        return {"outputs": tf.reshape(scores, [-1, 1])}

    @tf.function(input_signature=signature)
    def transform(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        return transformed(examples)

    tf.saved_model.save(
        root, folder, signatures={"serving_default": serve, "transform_features": transform}
    )
