"""One training, from transformed examples to a served model; read `train` top to bottom.

It is a loop of our own and not `model.fit`: `fit` runs a phantom step at the end of a finite data
set, cannot enter an epoch in its middle, and hides where state changes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import tensorflow as tf
import tensorflow_transform as tft

from rowstep.components import progress
from rowstep.components.build import build_optimizer
from rowstep.components.callback_state import CallbackStates
from rowstep.components.checkpoints import CheckpointStore
from rowstep.components.checkpoints.background import Saver
from rowstep.components.data import feature_spec, scan_examples
from rowstep.components.export import export_model
from rowstep.components.identity import identity, run_key
from rowstep.components.interrupts import Interrupts
from rowstep.components.job import TrainingInterruptedError, TrainJob, TrainResult
from rowstep.components.loop import TrainingLoop
from rowstep.components.models import build_model, model_columns
from rowstep.components.offset_schedule import OffsetSchedule
from rowstep.components.preprocessing import num_rows
from rowstep.components.restore import newest, publish, restore
from rowstep.components.run_log import RunLog
from rowstep.components.training_metrics import TrainingMetrics
from rowstep.components.training_state import TrainingState
from rowstep.components.trainings import (
    checkpoint_root,
    forget_old,
    mark_finished,
    record,
    retention,
)
from rowstep.components.user_code import load_callbacks
from rowstep.components.vocabularies import read_vocabularies
from rowstep.configs import RunConfig

_LOCK_SECONDS = 60.0
"""How long to wait for a writer that goes on after its training was killed."""


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
    metrics = TrainingMetrics(config.train.metrics)
    callbacks = load_callbacks(config.train.callbacks)
    transform_output = tft.TFTransformOutput(job.transform_graph)
    spec = feature_spec(transform_output, [*model_columns(config), config.label])
    examples = scan_examples(job.train_files, spec, config.label)
    held_out = scan_examples(job.eval_files, spec, config.label)
    num_steps = config.train.epochs * examples.num_steps(config.train.batch_size)

    parts = identity(config, examples.fingerprint, held_out.fingerprint)
    if job.from_scratch:
        # A key of its own: one of the same settings may have gone on with something else.
        parts["start"] = "scratch"
    key = run_key(parts)
    root = checkpoint_root(config, job.state_dir, key)
    store = CheckpointStore(root, retention=retention(config))
    with store.lock(wait_seconds=_LOCK_SECONDS), Interrupts() as interrupts:
        with ThreadPoolExecutor(1) as reader:  # the disk is read while the model is built
            own = reader.submit(store.latest, or_refuse=True)
            state = _new_state(config, transform_output, examples.label_mean, num_steps)
        state.metrics, state.callbacks = metrics, CallbackStates(callbacks)
        started_from, saved = restore(state, own.result(), job, parts, key)
        problems = list(store.problems)
        training = record(job.state_dir, key, parts, root)
        progress.emit("training", run_key=key)
        first_step = state.step
        log = RunLog(job, state, key, job.state_dir / key, num_steps)
        memory_mib = config.checkpoint.background_memory_mib
        saver = Saver(
            store,
            background=config.checkpoint.background,
            copied_bytes=None if memory_mib is None else memory_mib * 2**20,
            max_failed=config.checkpoint.max_failed_saves,
            on_problem=log.notice,
            on_commit=log.checkpoint,
        )
        loop = TrainingLoop(
            config, state, examples, held_out, callbacks, saver, log, interrupts, parts
        )
        try:
            # A finished training is opened too: its run gets the tags of this execution.
            log.start(started_from, parts, problems)
            if saved is not None and state.finished:
                state.settle()
            else:
                loop.run()
                saved = newest(store)
            export_model(state.model, transform_output, config, job.serving_dir)
            if job.publish_dir is not None:
                publish(saved, job.publish_dir)
            # Asked to stop while it exported: whoever asked does not want what comes after.
            loop.stop_if_asked()
            log.exported(saved.where)
            mark_finished(job.state_dir, training)
            for problem in forget_old(job.state_dir, config.checkpoint.keep_trainings, key):
                log.notice(problem)
            _close(log, key, "FINISHED")
        except TrainingInterruptedError:
            _close(log, key, "KILLED")
            raise
        except BaseException:
            saver.close()
            _close(log, key, "FAILED")
            raise
    return TrainResult(
        step=state.step,
        num_steps_run=state.step - first_step,
        started_from=started_from,
        metrics=state.history[-1] if state.history else {},
        run_key=key,
        data_fingerprint=examples.fingerprint,
        checkpoint=saved.where,
        mlflow_run_id=log.mlflow_run_id,
        mlflow_link=log.mlflow_link,
    )


def _close(log: RunLog, key: str, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
    log.close(status)
    progress.emit("training", run_key=key, mlflow_run_id=log.mlflow_run_id)


def _new_state(
    config: RunConfig, transform_output: Any, label_mean: float, num_steps: int
) -> TrainingState:
    model = build_model(config, num_rows(config, transform_output), label_mean)
    # `build_model` has seeded all other generators; TensorFlow seeds this one by chance.
    tf.random.set_global_generator(tf.random.Generator.from_seed(config.train.seed))
    schedules: list[OffsetSchedule] = []
    optimizer = build_optimizer(config.optimizer, num_steps, schedules)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer=optimizer)  # only so that users' callbacks find `model.optimizer`
    vocabularies = read_vocabularies(config, transform_output)
    return TrainingState(model, optimizer, vocabularies, schedules=schedules)
