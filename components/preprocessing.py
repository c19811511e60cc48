"""The preprocessing function that TFX Transform runs, named by its import path."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import tensorflow as tf
import tensorflow_transform as tft
from pydantic import TypeAdapter

from rowstep.configs import RunConfig
from rowstep.configs.schema import AnyFeature, HashFeature, VocabularyFeature

_FEATURES = TypeAdapter(dict[str, AnyFeature])


def transform_config(config: RunConfig) -> dict[str, Any]:
    """Build Transform's `custom_config`: only what changes its output.

    TFX's cache key holds this and the import path of `preprocessing_fn`, so another learning rate
    reuses the transformed examples, and an edit of this module does not.
    """
    source = Path(__file__).read_bytes()
    return {
        "features": _FEATURES.dump_json(config.features).decode(),
        "label": config.label,
        "code": hashlib.sha256(source).hexdigest()[:16],
    }


def preprocessing_fn(inputs: dict[str, Any], custom_config: dict[str, Any]) -> dict[str, Any]:
    """Turn raw columns into row ids and standardised numbers.

    A vocabulary feature becomes the value's rank by frequency in the training split, and a value
    that training never saw falls into one of `oov_buckets` rows behind the vocabulary. A hash
    feature becomes a bucket number. A numeric feature becomes a z-score of the training split.

    Args:
        inputs: the raw columns, [B, 1] each.
        custom_config: what `transform_config` returns.

    Returns:
        int64 [B, 1] for categorical features, float32 [B, 1] for numbers and for the label.
    """
    label = custom_config["label"]
    features = _FEATURES.validate_json(custom_config["features"])
    outputs = {label: tf.cast(inputs[label], tf.float32)}
    for name, feature in features.items():
        column = inputs[name]
        if isinstance(feature, VocabularyFeature):
            outputs[name] = tft.compute_and_apply_vocabulary(
                _as_text(column),
                num_oov_buckets=feature.oov_buckets,
                top_k=feature.max_size,
                vocab_filename=name,
            )
        elif isinstance(feature, HashFeature):
            outputs[name] = tft.hash_strings(_as_text(column), feature.buckets)
        else:
            outputs[name] = tft.scale_to_z_score(tf.cast(column, tf.float32))
    return outputs


def _as_text(column: Any) -> Any:
    # One spelling for an id, whether the source had it as a number or as a string.
    return column if column.dtype == tf.string else tf.strings.as_string(column)


def num_rows(config: RunConfig, transform_output: tft.TFTransformOutput) -> dict[str, int]:
    """Count the embedding rows of each categorical feature, unseen values included."""
    rows = {}
    for name, feature in config.features.items():
        if isinstance(feature, VocabularyFeature):
            rows[name] = transform_output.vocabulary_size_by_name(name) + feature.oov_buckets
        elif isinstance(feature, HashFeature):
            rows[name] = feature.buckets
    return rows
