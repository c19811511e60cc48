"""How a run and its optimizer look in MLflow: short params, and the whole config as an artifact."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import keras
import tensorflow as tf

import rowstep
from rowstep.configs import RunConfig
from rowstep.optimizers import Embedding

# The same keys for every optimizer, absent ones as None, so that MLflow's compare page can show
# differences only.
_OPTIMIZER_KEYS = (
    "beta_1",
    "beta_2",
    "epsilon",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "exclude_from_weight_decay",
    "exclude_from_layer_adaptation",
)


def run_params(config: RunConfig, model: keras.Model, num_steps: int) -> dict[str, Any]:
    """Collect the params of an MLflow run: at most a few dozen, flat, the same for every run."""
    optimizer = config.optimizer.model_dump()
    optimizer["weight_decay"] = optimizer.get("weight_decay_rate")
    schedule = optimizer["schedule"] or {}
    tables = [layer for layer in model.layers if isinstance(layer, Embedding)]
    return {
        "opt.class": type(model.optimizer).__name__,
        "opt.learning_rate": optimizer["learning_rate"],
        "opt.schedule": schedule.get("kind"),
        "opt.sparse_mode": "dense" if optimizer["kind"] in ("adam", "lamb") else "lazy",
        **{f"opt.{key}": optimizer.get(key) for key in _OPTIMIZER_KEYS},
        "train.batch_size": config.train.batch_size,
        "train.epochs": config.train.epochs,
        "train.steps": num_steps,
        "train.seed": config.train.seed,
        "model.kind": config.model.kind,
        "model.dim": config.model.dim,
        "model.n_params": int(model.count_params()),
        "model.n_embedding_rows": sum(layer.input_dim for layer in tables),
        "data.kind": config.data.kind,
    }


def describe_optimizer(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> dict[str, Any]:
    """Describe an optimizer in full: class, config with schedule, iterations, its variables."""
    serialized = keras.saving.serialize_keras_object(optimizer)
    text = json.dumps(serialized, sort_keys=True, default=str)
    return {
        "schema": 1,
        "class_name": type(optimizer).__name__,
        "registered_name": serialized.get("registered_name"),
        "module": serialized.get("module"),
        "config": serialized["config"],
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "iterations": int(optimizer.iterations.numpy()),
        "variables": [
            {"path": v.path, "shape": list(v.shape), "dtype": str(v.dtype)}
            for v in model.trainable_variables
        ],
        "versions": {
            "rowstep": rowstep.__version__,
            "keras": keras.__version__,
            "tensorflow": tf.__version__,
        },
    }
