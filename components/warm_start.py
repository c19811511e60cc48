"""Start a training from the state of another one, whose tables may have had other rows.

Rows of a vocabulary feature move with their keys: weights, moments and counters of a key go to the
row that it has today, keys that are gone are left behind, and new keys start as in a new model.
Everything else must fit by name, shape and dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import tensorflow as tf

from rowstep.components.checkpoints import SavedState
from rowstep.components.checkpoints.saved_state import SavedArray
from rowstep.components.models import model_columns
from rowstep.components.vocabularies import RowCounts, RowMap, Vocabulary, row_map
from rowstep.configs import RunConfig
from rowstep.configs.schema import Dcn
from rowstep.optimizers import Embedding, StateMismatchError
from rowstep.optimizers.state import state_variables
from rowstep.optimizers.variable_memory import fill_variable, scatter_pieces
from rowstep.optimizers.variables import native_variable, variables_by_path

__all__ = ["WarmStart", "column_faults", "tables_of_features", "warm_start"]

_TODAYS = re.compile(r"learning_rate(/\d+)?|(.*/)?seed_generator_state(#\d+)?")
_STEP_COUNTERS = ("average_step", "last_step")


@dataclass(frozen=True)
class WarmStart:
    """Report what a warm start took."""

    step: int
    """The step that the checkpoint was saved at."""
    iterations: int
    """The optimizer's iterations now: those of the checkpoint, or 0 where they were not taken."""
    rows: Mapping[str, RowCounts]
    """What became of the rows of each vocabulary feature."""

    def __str__(self) -> str:
        """Return one line for people."""
        what = "weights and optimizer state" if self.iterations else "weights"
        changes = [
            f"{feature}: {c.kept} rows kept, {c.dropped} dropped, {c.new} new"
            for feature, c in self.rows.items()
        ]
        return "; ".join([f"warm start from the {what} of step {self.step}", *changes])


@dataclass(frozen=True)
class _Load:
    """Pair a variable with the array that goes into it."""

    key: str
    variable: Any
    source: SavedArray
    rows: RowMap | None
    """Where its rows go; None for an array that goes in as it is."""


class _Tables:
    """Know which variables have the rows of a vocabulary, and how those rows moved."""

    def __init__(
        self,
        features: Mapping[str, str],
        old: Mapping[str, Vocabulary],
        new: Mapping[str, Vocabulary],
    ) -> None:
        self._features, self._old, self._new = features, old, new
        used = [f for f in dict.fromkeys(features.values()) if f in old and f in new]
        self.maps = {feature: row_map(old[feature], new[feature]) for feature in used}

    def load(self, key: str, table: str | None, variable: Any, source: SavedArray) -> _Load | str:
        """Return how to fill a variable that has the rows of a table, or of none, or why not."""
        feature = self._features.get(table or "", "")
        if feature in self._old and feature not in self._new:
            return f"{key} with rows by a vocabulary, where {feature} has none today"
        if feature in self._new and feature not in self._old:
            return f"{key} without the vocabulary of {feature} that tells whose its rows are"
        shape = wanted = tuple(variable.shape)
        rows = self.maps.get(feature)
        if rows is not None:
            wanted = (self._old[feature].num_rows, *shape[1:])
            if shape[0] != self._new[feature].num_rows:
                num_rows = self._new[feature].num_rows
                return f"{key} for {shape[0]} rows, where {feature} has {num_rows} today"
        if source.shape != wanted:
            return f"{key} of shape {source.shape} instead of {wanted}"
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if source.dtype.name != dtype:
            return f"{key} of dtype {source.dtype} instead of {dtype}"
        return _Load(key, variable, source, rows)


def warm_start(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    saved: SavedState,
    features_of_tables: Mapping[str, str],
    old_vocabularies: Mapping[str, Vocabulary],
    new_vocabularies: Mapping[str, Vocabulary],
    *,
    take_optimizer: bool,
    other_faults: Sequence[str] = (),
) -> WarmStart:
    """Take the weights of a checkpoint, and the optimizer's state if asked, row by row of a key.

    Whether all of it fits is decided by the manifest, before anything is assigned. Not taken are
    the learning rate and the state of random generators: today's config and seed decide on those.
    Without the optimizer's state the optimizer must be new, and stays so.

    A key that is new has the row that `model` was built with, and slots as new ones are: zeros,
    apart from counters that hold a step, which say "now", so that the row does not make up for
    steps before it was there. By the default `bias_correction: steps` its moments are then taken
    for those of a row that was there from the first step, and its first step is up to
    (1 - beta_1) / sqrt(1 - beta_2) = 3.16 times the learning rate long; so it always was for a row
    first seen late in a training. `bias_correction: visits` of LazyAdam counts each row's own
    steps, and makes it once the learning rate.

    Optimizers of rowstep keep the same moments under the same names, so their state is exchanged
    where the slots are the same ones: from lazy_adam to lamb, say.

    Args:
        model: the model as `build_model` returns it.
        optimizer: the optimizer, built on the model's variables.
        saved: a verified checkpoint.
        features_of_tables: path of a table to the feature of its rows; see `tables_of_features`.
        old_vocabularies: those of the checkpoint; see `load_vocabularies`.
        new_vocabularies: those of the model; see `read_vocabularies`.
        take_optimizer: whether to take iterations and slots.
        other_faults: what the caller found that does not fit either; see `column_faults`.

    Raises:
        StateMismatchError: names every variable that does not fit. Nothing was assigned.
        CheckpointError: the files changed since they were verified. Something may be assigned.

    Cost: one read of the arrays, the memory of a piece, and `row_map` for each feature.
    """
    tables = _Tables(features_of_tables, old_vocabularies, new_vocabularies)
    weights = variables_by_path(model.variables)
    loads, faults = _matched(saved.sources("model"), weights, weights, tables)
    state = state_variables(optimizer) if take_optimizer else {}
    sources = saved.sources("optimizer") if take_optimizer else {}
    slots, slot_faults = _matched(sources, state, weights, tables)
    if other_faults or faults or slot_faults:
        _refuse(saved, [*other_faults, *faults], slot_faults)
    for load in [*loads, *slots]:  # iterations come before the slots
        if load.rows is not None and load.key.endswith(_STEP_COUNTERS):
            native = native_variable(load.variable)
            native.assign(tf.zeros_like(native) + native_variable(optimizer.iterations))
        if load.rows is None:
            fill_variable(load.variable, load.source)
        else:
            scatter_pieces(native_variable(load.variable), load.source, load.rows.new_rows)
    counts = {feature: rows.counts for feature, rows in tables.maps.items()}
    return WarmStart(saved.step, int(optimizer.iterations.numpy()), counts)


def _matched(
    saved: Mapping[str, SavedArray],
    variables: Mapping[str, Any],
    weights: Mapping[str, Any],
    tables: _Tables,
) -> tuple[list[_Load], list[str]]:
    """Return what goes where in a group, and everything that does not fit."""
    sources = {key: source for key, source in saved.items() if not _TODAYS.fullmatch(key)}
    wanted = {key: v for key, v in variables.items() if not _TODAYS.fullmatch(key)}
    faults = [f"no {key}" for key in wanted if key not in sources]
    faults += [f"unexpected {key}" for key in sources if key not in wanted]
    found = [
        tables.load(key, _owner(key, variable, weights), variable, sources[key])
        for key, variable in wanted.items()
        if key in sources
    ]
    faults += [load for load in found if isinstance(load, str)]
    return [load for load in found if isinstance(load, _Load)], faults


def _owner(key: str, variable: Any, weights: Mapping[str, Any]) -> str | None:
    """Return the path of the weights whose rows a variable has: of a slot, or the weights' own."""
    # Slots are "<path>/<slot>" of rowstep's optimizers, "<path with _ for />_<slot>" of Keras'. The
    # longest path, since one may be the beginning of another.
    starts = {p: (f"{p}/", f"{p.replace('/', '_')}_") for p in weights}
    paths = [p for p in weights if key == p or key.startswith(starts[p])]
    path = max(paths, key=len, default=None)
    if path is None or tuple(variable.shape[:1]) != tuple(weights[path].shape[:1]):
        return None  # a slot that is one number, say
    return path


def _refuse(saved: SavedState, faults: Sequence[str], slot_faults: Sequence[str]) -> NoReturn:
    remedy = "train.warm_start to false to train from scratch"
    if not faults:
        remedy = "train.warm_start_optimizer to false to take the weights alone"
    raise StateMismatchError(
        f"warm start from {saved.where}: the checkpoint must fit the model and its optimizer by "
        f"name, shape and dtype, tables by the keys of their rows. "
        f"Got {'; '.join([*faults, *slot_faults])}. Nothing was assigned. "
        f"Go back to the settings that it was saved with, or set {remedy}."
    )


def tables_of_features(config: RunConfig, model: keras.Model) -> dict[str, str]:
    """Return the path of each embedding table to the feature whose rows it has.

    The feature is the model's input that the table looks up, whatever the layers are called.

    Raises:
        StateMismatchError: a table looks up something else than one of the model's features.
    """
    paths = {id(variable): path for path, variable in variables_by_path(model.variables).items()}
    features = {}
    for layer in model.layers:
        if not isinstance(layer, Embedding):
            continue
        name = str(getattr(layer.input, "name", layer.input))
        if name not in model_columns(config):
            raise StateMismatchError(
                f"tables_of_features: {layer.name} must look up a feature of the model. Got an "
                f"input named {name!r}. Features are {', '.join(model_columns(config))}. "
                "Connect the table to the input of its feature."
            )
        features[paths[id(layer.embeddings)]] = name
    return features


def column_faults(saved: SavedState, config: RunConfig) -> list[str]:
    """Name the numeric columns that the model reads today or read then, and not both.

    They have no variables of their own: one in the place of another would fit by shape, and be
    multiplied by the weights of the other.
    """
    identity = saved.meta.get("identity", {})
    if not isinstance(config.model, Dcn) or "features" not in identity:
        return []
    old = {name for name, feature in identity["features"].items() if feature["kind"] == "numeric"}
    new = {name for name, feature in config.features.items() if feature.kind == "numeric"}
    return [f"no column {name}" for name in sorted(new - old)] + [
        f"unexpected column {name}" for name in sorted(old - new)
    ]
