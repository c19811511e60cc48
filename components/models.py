"""The two recommender models, built on rowstep's row-gather Embedding.

B is the batch, D the width of an embedding, F the width of all features side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from rowstep.configs import RunConfig
from rowstep.configs.schema import Dcn, MatrixFactorization
from rowstep.optimizers import Embedding


@keras.saving.register_keras_serializable(package="rowstep")
class GlobalBias(keras.layers.Layer):
    """Add one trainable number to every score: score + bias, [B] -> [B]."""

    def __init__(self, initial: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial = initial

    def build(self, input_shape: Any) -> None:  # noqa: D102
        self.bias = self.add_weight(
            shape=(1,), initializer=keras.initializers.Constant(self.initial), name="bias"
        )

    def call(self, scores: Any) -> Any:  # noqa: D102
        return scores + self.bias

    def get_config(self) -> dict[str, Any]:  # noqa: D102
        return {**super().get_config(), "initial": self.initial}


@keras.saving.register_keras_serializable(package="rowstep")
class FeatureCross(keras.layers.Layer):
    """Cross the input with itself through a low-rank matrix, as one DCN-v2 layer does.

        x_{l+1} = x_0 * (U (V x_l) + b) + x_l

    Called with (x_0, x_l), both [B, F]; V is [F, rank], U is [rank, F].
    Source: Wang et al. 2021, DCN V2, section 3.1 and its low-rank form in section 3.3.
    """

    def __init__(self, rank: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rank = rank

    def build(self, first_shape: Any, current_shape: Any = None) -> None:  # noqa: D102
        width = int(first_shape[-1])
        self.down = self.add_weight(shape=(width, self.rank), name="down")
        self.up = self.add_weight(shape=(self.rank, width), name="up")
        self.bias = self.add_weight(shape=(width,), initializer="zeros", name="bias")

    def call(self, first: Any, current: Any) -> Any:  # noqa: D102
        projected = keras.ops.matmul(keras.ops.matmul(current, self.down), self.up)
        return first * (projected + self.bias) + current

    def get_config(self) -> dict[str, Any]:  # noqa: D102
        return {**super().get_config(), "rank": self.rank}


@keras.saving.register_keras_serializable(package="rowstep")
class Dropout(keras.layers.Layer):
    """Drop a share of the inputs in training, from a random state with a name of its own.

    Keras numbers the unnamed state of its own Dropout by how many were made in the process, so a
    resumed process could not find it again by name.
    """

    def __init__(self, rate: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator(name=f"{self.name}_seed")

    def call(self, inputs: Any, training: bool = False) -> Any:  # noqa: D102
        if not training:
            return inputs
        return keras.random.dropout(inputs, self.rate, seed=self.seed_generator)

    def get_config(self) -> dict[str, Any]:  # noqa: D102
        return {**super().get_config(), "rate": self.rate}


def model_columns(config: RunConfig) -> list[str]:
    """Name the features that the configured model reads, which may be fewer than there are.

    Callers must pass exactly these: Keras pairs the values of a dict with its inputs by position
    once a key is added, so one column too many silently becomes another column.
    """
    if isinstance(config.model, MatrixFactorization):
        return [config.model.user, config.model.item]
    return sorted(config.features)  # the order in a file must not change the model


def build_model(config: RunConfig, num_rows: Mapping[str, int], label_mean: float) -> keras.Model:
    """Build the configured model from scratch with the configured seed.

    Args:
        config: the run; `model` and `features` are read, `train.seed` seeds the weights.
        num_rows: rows of the table of each categorical feature.
        label_mean: where the global bias starts, so that training starts at the mean.

    Returns:
        A functional model from `{feature: [B]}` to scores [B].
    """
    keras.utils.set_random_seed(config.train.seed)
    if isinstance(config.model, MatrixFactorization):
        return _matrix_factorization(config.model, num_rows, label_mean)
    return _dcn(config.model, model_columns(config), num_rows, label_mean)


def _lookup(ids: Any, name: str, rows: int, dim: int, model: MatrixFactorization | Dcn) -> Any:
    return Embedding(
        rows,
        dim,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=model.init_stddev),
        row_l2=model.row_l2,
        name=name,
    )(ids)


def _bias(ids: Any, name: str, rows: int, row_l2: float) -> Any:
    table = Embedding(rows, 1, embeddings_initializer="zeros", row_l2=row_l2, name=name)
    return keras.ops.squeeze(table(ids), -1)


def _matrix_factorization(
    model: MatrixFactorization, num_rows: Mapping[str, int], label_mean: float
) -> keras.Model:
    inputs, factors, biases = {}, [], []
    for name in (model.user, model.item):
        inputs[name] = keras.Input(shape=(), dtype="int64", name=name)
        factors.append(_lookup(inputs[name], f"{name}_factors", num_rows[name], model.dim, model))
        biases.append(_bias(inputs[name], f"{name}_bias", num_rows[name], model.row_l2))
    affinity = keras.ops.sum(factors[0] * factors[1], axis=-1)
    scores = GlobalBias(label_mean, name="mean")(affinity + biases[0] + biases[1])
    return keras.Model(inputs, scores, name="matrix_factorization")


def _dcn(
    model: Dcn, names: Sequence[str], num_rows: Mapping[str, int], label_mean: float
) -> keras.Model:
    inputs, columns = {}, []
    for name in names:
        if name in num_rows:
            inputs[name] = keras.Input(shape=(), dtype="int64", name=name)
            columns.append(_lookup(inputs[name], f"{name}_rows", num_rows[name], model.dim, model))
        else:
            inputs[name] = keras.Input(shape=(), dtype="float32", name=name)
            columns.append(keras.ops.expand_dims(inputs[name], -1))
    first = keras.layers.Concatenate()(columns) if len(columns) > 1 else columns[0]
    crossed, deep = first, first
    for layer in range(model.cross_layers):
        crossed = FeatureCross(model.cross_rank, name=f"cross_{layer}")(first, crossed)
    for layer, units in enumerate(model.deep_units):
        deep = keras.layers.Dense(units, activation="relu", name=f"deep_{layer}")(deep)
        if model.dropout:
            deep = Dropout(model.dropout, name=f"dropout_{layer}")(deep)
    joined = keras.layers.Concatenate()([crossed, deep])
    scores = keras.layers.Dense(
        1, bias_initializer=keras.initializers.Constant(label_mean), name="score"
    )(joined)
    return keras.Model(inputs, keras.ops.squeeze(scores, -1), name="dcn")
