"""People who keep TFX's stock Trainer get the same training by `run_fn`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rowstep.configs import load_config


@pytest.fixture(scope="module")
def stock_model(tiny_home: Any) -> Path:
    """Run stock components with the stock Trainer; everything before it comes from the cache."""
    from tfx.components import CsvExampleGen, SchemaGen, StatisticsGen, Trainer, Transform
    from tfx.orchestration import metadata
    from tfx.orchestration.local.local_dag_runner import LocalDagRunner
    from tfx.orchestration.pipeline import Pipeline
    from tfx.proto import example_gen_pb2, trainer_pb2

    from rowstep.components.preprocessing import transform_config
    from rowstep.components.run_fn import custom_config

    config = load_config(tiny_home.config_file, ["tracking.enabled=false"])
    folder = tiny_home.home / "tiny"
    [data] = (folder / "data").glob("synthetic-*")
    splits = [
        example_gen_pb2.Input.Split(name=name, pattern=f"{name}/*") for name in ("train", "eval")
    ]
    examples = CsvExampleGen(
        input_base=str(data), input_config=example_gen_pb2.Input(splits=splits)
    )
    statistics = StatisticsGen(examples=examples.outputs["examples"])
    schema = SchemaGen(statistics=statistics.outputs["statistics"], infer_feature_shape=True)
    transform = Transform(
        examples=examples.outputs["examples"],
        schema=schema.outputs["schema"],
        preprocessing_fn="rowstep.components.preprocessing.preprocessing_fn",
        custom_config=transform_config(config),
    )
    trainer = Trainer(
        run_fn="rowstep.components.run_fn.run_fn",
        examples=transform.outputs["transformed_examples"],
        transform_graph=transform.outputs["transform_graph"],
        schema=schema.outputs["schema"],
        train_args=trainer_pb2.TrainArgs(),
        eval_args=trainer_pb2.EvalArgs(),
        custom_config=custom_config(config, state_dir=folder / "stock-state"),
    )
    LocalDagRunner().run(
        Pipeline(
            pipeline_name="tiny",
            pipeline_root=str(folder / "artifacts"),
            components=[examples, statistics, schema, transform, trainer],
            enable_cache=True,
            metadata_connection_config=metadata.sqlite_metadata_connection_config(
                str(folder / "metadata.db")
            ),
            beam_pipeline_args=["--direct_running_mode=in_memory", "--direct_num_workers=1"],
        )
    )
    return tiny_home.outputs("Trainer", "model")[-1] / "Format-Serving"


def test_stock_trainer_serves_the_scores_that_rectrainer_serves(
    tiny_home: Any, stock_model: Path
) -> None:
    import tensorflow as tf

    records = tiny_home.outputs("CsvExampleGen", "examples")[0] / "Split-eval"
    files = [str(path) for path in records.glob("*.gz")]
    rows = list(tf.data.TFRecordDataset(files, compression_type="GZIP").take(50))
    ours = tiny_home.outputs("RecTrainer", "model")[0] / "Format-Serving"

    def scores(folder: Path) -> Any:
        signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
        return signature(examples=tf.stack(rows))["outputs"].numpy()

    # Same config, data and code: the same bits, whoever called the trainer.
    assert scores(stock_model).tobytes() == scores(ours).tobytes()


def test_steps_given_to_the_stock_trainer_are_refused(tiny_home: Any) -> None:
    from tfx.components.trainer.fn_args_utils import FnArgs

    from rowstep.components.run_fn import custom_config, run_fn
    from rowstep.configs import ConfigError

    config = load_config(tiny_home.config_file)
    arguments = FnArgs(
        custom_config=custom_config(config, state_dir="/nowhere"), train_steps=5, eval_steps=None
    )
    with pytest.raises(ConfigError, match=r"train_args\.num_steps: must be left out\. Got train 5"):
        run_fn(arguments)
