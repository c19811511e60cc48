"""The same trainer for pipelines that keep TFX's stock Trainer.

    Trainer(
        run_fn="rowstep.components.run_fn.run_fn",
        examples=transform.outputs["transformed_examples"],
        transform_graph=transform.outputs["transform_graph"],
        schema=schema_gen.outputs["schema"],
        train_args=TrainArgs(), eval_args=EvalArgs(),
        custom_config=custom_config(config, state_dir="/data/rowstep/state"),
    )

The stock Trainer has no Checkpoint artifact, so what survives is what lives in `state_dir`; and its
cache key is the import path alone, which is why `custom_config` carries the code fingerprint.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rowstep.components.fingerprint import code_fingerprint
from rowstep.components.job import TrainJob
from rowstep.components.tracking import check_uri
from rowstep.configs import RunConfig, canonical_json, config_from_json
from rowstep.configs.errors import one_problem


def custom_config(
    config: RunConfig,
    *,
    state_dir: str | Path,
    tracking_uri: str | None = None,
    tracking_artifacts: str | Path | None = None,
) -> dict[str, Any]:
    """Build the `custom_config` that `run_fn` expects; the arguments are RecTrainer's.

    Raises:
        TrackingError: a tracking URI holds credentials, which would end up in ML Metadata.
    """
    check_uri(tracking_uri)
    check_uri(config.tracking.uri)  # a config made in Python may have passed by the schema
    return {
        "rowstep_config": canonical_json(config),
        "code_fingerprint": code_fingerprint(),
        "state_dir": str(state_dir),
        "tracking_uri": tracking_uri,
        "tracking_artifacts": str(tracking_artifacts) if tracking_artifacts else None,
    }


def run_fn(fn_args: Any) -> None:
    """Train as RecTrainer does; called by TFX's stock Trainer.

    `train_args.num_steps` and `eval_args.num_steps` must be left out: the config says how long.

    Raises:
        ConfigError: `custom_config` lacks what `custom_config()` puts in, or steps were given.
    """
    from rowstep.components.train import train

    given = fn_args.custom_config or {}
    for name in ("rowstep_config", "state_dir"):
        if not given.get(name):
            raise one_problem(
                "run_fn",
                f"custom_config.{name}",
                f"must be given. Got {sorted(given) or 'nothing'}. "
                "Build it with rowstep.components.run_fn.custom_config(config, state_dir=...).",
            )
    if fn_args.train_steps or fn_args.eval_steps:
        raise one_problem(
            "run_fn",
            "train_args.num_steps",
            f"must be left out. Got train {fn_args.train_steps}, eval {fn_args.eval_steps}. "
            "The length of a training is train.epochs in the config. "
            "Pass TrainArgs() and EvalArgs().",
        )
    artifacts = given.get("tracking_artifacts")
    train(
        TrainJob(
            config=config_from_json(given["rowstep_config"]),
            train_files=_matching(fn_args.train_files),
            eval_files=_matching(fn_args.eval_files),
            transform_graph=fn_args.transform_graph_path,
            serving_dir=fn_args.serving_model_dir,
            state_dir=Path(given["state_dir"]),
            tracking_uri=given.get("tracking_uri"),
            tracking_artifacts=Path(artifacts) if artifacts else None,
            tags={"tfx.model_run_uri": fn_args.model_run_dir},
        )
    )


def _matching(patterns: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(path for pattern in patterns for path in glob.glob(pattern)))
