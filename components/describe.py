"""How a run and its optimizer look in MLflow: short params, and the whole config as an artifact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import rowstep
from rowstep.components.offset_schedule import OffsetSchedule
from rowstep.configs import RunConfig
from rowstep.optimizers import OPTIMIZERS, Embedding
from rowstep.optimizers.state import state_variables
from rowstep.optimizers.statistics import innermost, slot_names

SCHEMA_VERSION = "1"
# The same keys for every optimizer, absent ones as None, so that MLflow's compare page can show
# differences only.
_OPTIMIZER_KEYS = (
    "beta_1",
    "beta_2",
    "epsilon",
    "momentum",
    "rho",
    "amsgrad",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "gradient_accumulation_steps",
    "bias_correction",
    "idle_decay",
    "row_velocity",
    "row_trust_ratio",
    "trust_ratio_clip",
    "pattern_lrs",
    "exclude_from_weight_decay",
    "exclude_from_layer_adaptation",
)
_SCHEDULE_KEYS = ("initial_learning_rate", "decay_steps", "decay_rate", "alpha", "warmup_steps")


def optimizer_params(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Describe any Keras 3 optimizer by the same flat params, None where it lacks one.

    Numbers are those that were meant: 0.001, and not what float32 makes of it. A schedule shows as
    `opt.learning_rate` = schedule, `opt.schedule` = its class, `opt.schedule.<argument>`. Of a
    LossScaleOptimizer, which Keras adds under mixed_float16, it is the optimizer inside.
    """
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    optimizer = innermost(optimizer)
    config = optimizer.get_config()
    schedule = _schedule_of(optimizer)
    arguments = schedule.get_config() if schedule is not None else {}
    if config.get("weight_decay") is None:
        config["weight_decay"] = config.get("weight_decay_rate")
    return {
        "opt.class": type(optimizer).__name__,
        "opt.name": optimizer.name,
        "opt.sparse_mode": _sparse_mode(optimizer, config),
        "opt.learning_rate": "schedule" if schedule is not None else config.get("learning_rate"),
        "opt.schedule": type(schedule).__name__ if schedule is not None else None,
        **{f"opt.schedule.{key}": arguments.get(key) for key in _SCHEDULE_KEYS},
        "opt.loss_scale": "dynamic" if is_scaled else config.get("loss_scale_factor"),
        **{f"opt.{key}": config.get(key) for key in _OPTIMIZER_KEYS},
    }


def model_params(model: keras.Model) -> dict[str, Any]:
    """Return the size of a model as params."""
    return {
        "model.n_params": int(model.count_params()),
        "model.n_embedding_rows": _num_table_rows(model),
    }


def run_params(config: RunConfig, model: keras.Model, num_steps: int) -> dict[str, Any]:
    """Collect the params of an MLflow run: at most a few dozen, flat, the same for every run."""
    params = optimizer_params(model.optimizer) | {
        "train.batch_size": config.train.batch_size,
        "train.epochs": config.train.epochs,
        "train.steps": num_steps,
        "train.seed": config.train.seed,
        "train.precision": keras.mixed_precision.global_policy().name,
        "model.kind": config.model.kind,
        "model.dim": config.model.dim,
        **model_params(model),
        "data.kind": config.data.kind,
    }
    if config.optimizer.schedule is not None:
        # The schedule's own argument is this very number; here it can be compared.
        params["opt.learning_rate"] = config.optimizer.learning_rate
    return as_meant(params)


def fit_params(model: keras.Model, fit: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the same params of any Keras training, None where Keras does not tell.

    Args:
        model: compiled and built.
        fit: what Keras tells callbacks of `fit`: `epochs`, and `steps` of an epoch.
    """
    epochs, steps = fit.get("epochs"), fit.get("steps")
    return optimizer_params(model.optimizer) | {
        "train.batch_size": None,
        "train.epochs": epochs,
        "train.steps": epochs * steps if epochs and steps else None,
        "train.seed": None,
        "train.precision": keras.mixed_precision.global_policy().name,
        "model.kind": type(model).__name__,
        "model.dim": None,
        **model_params(model),
        "data.kind": None,
    }


def as_meant(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return params with the shortest decimal that is the same float32, where there is one."""
    return {key: _shortest(value) for key, value in params.items()}


def describe_optimizer(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> dict[str, Any]:
    """Describe an optimizer in full: class, config with schedule, iterations, its variables."""
    serialized = keras.saving.serialize_keras_object(optimizer)
    slots = slot_names(optimizer)
    return {
        "schema": 1,
        "class_name": type(optimizer).__name__,
        "registered_name": serialized.get("registered_name"),
        "module": serialized.get("module"),
        "config": serialized["config"],
        "config_sha256": _digest(serialized),
        "iterations": int(optimizer.iterations.numpy()),
        "variables": [
            {
                "path": v.path,
                "shape": list(v.shape),
                "dtype": str(v.dtype),
                "slots": slots.get(v.path, []),
            }
            for v in model.trainable_variables
        ],
        "state_bytes": sum(_num_bytes(v) for v in state_variables(optimizer).values()),
        "versions": versions(),
    }


def config_sha256(optimizer: keras.optimizers.Optimizer) -> str:
    """Return a digest of the optimizer's config: equal for runs that differ in the seed only."""
    return _digest(keras.saving.serialize_keras_object(optimizer))


def summarise_optimizer(
    optimizer: keras.optimizers.Optimizer, description: Mapping[str, Any]
) -> str:
    """Return one page about the optimizer and what it trains, in Markdown.

    Args:
        optimizer: built.
        description: what `describe_optimizer` returned of it.
    """
    params = as_meant(optimizer_params(optimizer))
    lines = [f"# {description['class_name']}", "", "| setting | value |", "|---|---|"]
    lines += [f"| {k.removeprefix('opt.')} | {v} |" for k, v in params.items() if v is not None]
    lines += [
        "",
        f"State: {description['state_bytes'] / 2**20:.1f} MiB.",
        "",
        "| variable | shape | type | slots |",
        "|---|---|---|---|",
    ]
    for variable in description["variables"]:
        shape = " x ".join(map(str, variable["shape"]))
        slots = ", ".join(variable["slots"])
        lines.append(f"| {variable['path']} | {shape} | {variable['dtype']} | {slots} |")
    return "\n".join([*lines, ""])


def versions() -> dict[str, str]:
    """Return the versions that decide what an optimizer computes."""
    return {
        "rowstep": rowstep.__version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
    }


def optimizer_tags(optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """Return the tags of a run that say what its metrics are of."""
    return {
        "opt.schema_version": SCHEMA_VERSION,
        "opt.class": type(innermost(optimizer)).__name__,
        "opt.config_sha256": config_sha256(optimizer),
        "keras.backend": keras.backend.backend(),
        "keras.version": keras.__version__,
        "tf.version": tf.__version__,
        "rowstep.version": rowstep.__version__,
    }


def _digest(serialized: Mapping[str, Any]) -> str:
    text = json.dumps(serialized, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _num_table_rows(layer: Any) -> int:
    if isinstance(layer, (Embedding, keras.layers.Embedding)):
        return int(layer.input_dim)
    return sum(map(_num_table_rows, getattr(layer, "layers", ())))


def _schedule_of(optimizer: keras.optimizers.Optimizer) -> Any:
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, OffsetSchedule):
        rate = rate.schedule
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def _sparse_mode(optimizer: keras.optimizers.Optimizer, config: Mapping[str, Any]) -> str:
    if not isinstance(optimizer, tuple(OPTIMIZERS.values())):
        return "dense"
    # Those that can do both say which; LazyAdam can do nothing else.
    return "lazy" if config.get("lazy", config.get("row_trust_ratio", True)) else "dense"


def _shortest(value: Any) -> Any:
    if isinstance(value, (float, np.floating)):
        return float(np.format_float_positional(np.float32(value), unique=True))
    return value


def _num_bytes(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64)) * tf.as_dtype(variable.dtype).size
