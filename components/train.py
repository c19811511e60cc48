"""One training, from transformed examples to a served model; read `train` top to bottom.

It is a loop of our own and not `model.fit`: `fit` runs a phantom step at the end of a finite data
set, cannot enter an epoch in its middle, and hides where state changes.
"""

from __future__ import annotations

from pathlib import Path

import tensorflow_transform as tft

from rowstep.components.build import build_optimizer
from rowstep.components.checkpoints import CheckpointStore
from rowstep.components.data import feature_spec, scan_examples
from rowstep.components.export import export_model
from rowstep.components.interrupts import Interrupts
from rowstep.components.job import TrainingInterruptedError, TrainJob, TrainResult
from rowstep.components.loop import TrainingLoop
from rowstep.components.models import build_model, model_columns
from rowstep.components.preprocessing import num_rows
from rowstep.components.restore import newest, publish, restore
from rowstep.components.run_log import RunLog
from rowstep.components.training_state import TrainingState, identity, run_key, stateful
from rowstep.components.user_code import load_callbacks


def train(job: TrainJob) -> TrainResult:
    """Train, or go on training, until the configured number of epochs is done.

    Order: data, model, optimizer, restore, then the loop (step, log, checkpoint), and at the end
    export and publication. A finished checkpoint of the same config and data trains zero steps
    and only exports, so repeating a run is harmless.

    Raises:
        TrainingInterruptedError: SIGTERM or SIGINT arrived; a checkpoint was committed.
        DataError, StateMismatchError, CheckpointError: before the first step, nothing lost.
    """
    config = job.config
    transform_output = tft.TFTransformOutput(job.transform_graph)
    spec = feature_spec(transform_output, [*model_columns(config), config.label])
    examples = scan_examples(job.train_files, spec, config.label)
    held_out = scan_examples(job.eval_files, spec, config.label)
    num_steps = config.train.epochs * examples.num_steps(config.train.batch_size)

    model = build_model(config, num_rows(config, transform_output), examples.label_mean)
    optimizer = build_optimizer(config.optimizer, num_steps)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer=optimizer)  # only so that users' callbacks find `model.optimizer`
    callbacks = load_callbacks(config.train.callbacks)
    state = TrainingState(model, optimizer, callbacks=stateful(callbacks))

    parts = identity(config, examples.fingerprint, held_out.fingerprint)
    key = run_key(parts)
    folder = job.state_dir / key
    store = CheckpointStore(folder / "checkpoints", keep_last=config.checkpoint.keep_last)
    with store.lock(wait_seconds=10), Interrupts() as interrupts:
        started_from = restore(state, store, job, parts)
        first_step = state.step
        log = RunLog(job, state, key, folder, num_steps)
        loop = TrainingLoop(
            config, state, examples, held_out, callbacks, store, log, interrupts, parts
        )
        try:
            # A finished training is opened too: its run gets the tags of this execution.
            log.start(started_from, parts)
            if not state.finished:
                loop.run()
            checkpoint = newest(store)
            export_model(model, transform_output, config, job.serving_dir)
            if job.publish_dir is not None:
                publish(checkpoint.path, job.publish_dir)
            # Asked to stop while it exported: whoever asked does not want what comes after.
            loop.stop_if_asked()
            log.close("FINISHED")
        except TrainingInterruptedError:
            log.close("KILLED")
            raise
        except BaseException:
            log.close("FAILED")
            raise
    return TrainResult(
        step=state.step,
        num_steps_run=state.step - first_step,
        started_from=started_from,
        metrics=state.history[-1] if state.history else {},
        run_key=key,
        data_fingerprint=examples.fingerprint,
        checkpoint=Path(checkpoint.path),
        mlflow_run_id=log.mlflow_run_id,
        mlflow_link=log.mlflow_link,
    )
