"""The training loop: step, log, checkpoint, evaluate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from rowstep.components.checkpoints.background import Saver
from rowstep.components.data import ExampleSet
from rowstep.components.export import clip_scores
from rowstep.components.interrupts import Interrupts
from rowstep.components.job import DivergedError, TrainingInterruptedError
from rowstep.components.random_state import random_state
from rowstep.components.run_log import RunLog
from rowstep.components.training_state import TrainingState
from rowstep.configs import RunConfig
from rowstep.optimizers.gradients import NOT_FINITE


@dataclass
class TrainingLoop:
    """Run the epochs that `state` has not done yet.

    Hooks of `keras.callbacks.Callback` are called as `fit` calls them: train and epoch begin and
    end, train batch begin and end, with `loss` of the batch and the evaluation metrics as logs.
    """

    config: RunConfig
    state: TrainingState
    examples: ExampleSet
    held_out: ExampleSet
    callbacks: Sequence[keras.callbacks.Callback]
    saver: Saver
    log: RunLog
    interrupts: Interrupts
    identity: Mapping[str, Any]
    _saved_at: tuple[int, float] = field(default=(0, 0.0), init=False)
    _told_gaps: bool = field(default=False, init=False)

    def run(self) -> None:
        """Train to the end and commit the final checkpoint."""
        state, train = self.state, self.config.train
        hooks = keras.callbacks.CallbackList(
            list(self.callbacks),
            model=state.model,
            verbose=0,
            epochs=train.epochs,
            steps=self.examples.num_steps(train.batch_size),
        )
        # Two graphs of one step: what nobody asked for is not measured.
        step = self._compile_step(self._apply)
        observed = self._compile_step(self._observe)
        evaluate = self._compile_evaluation()
        self._saved_at = (state.step, time.monotonic())
        random_state()  # makes the generators that are missing, before the first draw and not after
        hooks.on_train_begin()
        # A checkpoint between two epochs was taken before the hook of the next one ran.
        if state.batch == 0:
            self._settle()
        while state.epoch < train.epochs and not (state.model.stop_training and state.batch == 0):
            hooks.on_epoch_begin(state.epoch)
            self._tell_gaps()
            self._settle()
            if state.batch == 0:
                state.metrics.reset()
            self._epoch(step, observed, hooks)
            self._end_epoch(evaluate(), hooks)
            self.stop_if_asked()
        hooks.on_train_end()
        state.finished = True
        self._save(wait=True)

    def _tell_gaps(self) -> None:
        # Not before the first epoch begins: callbacks make what they need as late as that.
        if not self._told_gaps:
            for gap in self.state.callbacks.gaps():
                self.log.notice(gap)
        self._told_gaps = True

    def _settle(self) -> None:
        for notice in self.state.settle():
            self.log.notice(notice)

    def _end_epoch(self, errors: Mapping[str, float], hooks: keras.callbacks.CallbackList) -> None:
        state = self.state
        metrics = {f"val_{name}": value for name, value in errors.items()}
        metrics |= state.metrics.results()
        state.history.append(metrics)
        state.epoch, state.batch = state.epoch + 1, 0
        self.log.epoch(metrics)
        hooks.on_epoch_end(state.epoch - 1, metrics)
        going_on = state.epoch < self.config.train.epochs and not state.model.stop_training
        if going_on and self.config.checkpoint.keep_best is not None:
            self._save()

    def _epoch(self, step: Any, observed: Any, hooks: keras.callbacks.CallbackList) -> None:
        state, train = self.state, self.config.train
        if state.model.stop_training and state.batch > 0:
            return  # asked for before the resume; what is left of this epoch is its evaluation
        batches = self.examples.epoch(
            train.batch_size,
            shuffle_buffer=train.shuffle_buffer,
            seed=train.seed,
            epoch=state.epoch,
            skip=state.batch,
        )
        for features, labels in batches:
            hooks.on_train_batch_begin(state.batch)
            chosen = observed if self.log.observes(state.step + 1) else step
            loss, measured = self._run(chosen, features, labels)
            state.step += 1
            state.batch += 1
            state.window_steps += 1
            hooks.on_train_batch_end(state.batch - 1, {"loss": loss})
            self.log.step(None if measured is None else measured.numpy())
            self.stop_if_asked()
            # While one is being written the next one waits; the training does for memory only.
            self.saver.spare_memory()
            if not self.saver.busy and self._checkpoint_is_due():
                self._save()
            if state.model.stop_training:
                break

    def _run(self, step: Any, features: Any, labels: Any) -> Any:
        try:
            return step(features, labels)
        except tf.errors.InvalidArgumentError as error:
            if NOT_FINITE not in str(error):
                raise
            raise DivergedError(
                f"train: gradients must stay finite numbers. Got NaN or infinity after step "
                f"{self.state.step}. Weights and state are those of that step. "
                "Lower optimizer.learning_rate, or clip gradients with optimizer.clipnorm."
            ) from error

    def stop_if_asked(self) -> None:
        """Commit a checkpoint and end, if a SIGTERM or SIGINT has arrived.

        Raises:
            TrainingInterruptedError: one has; nothing is lost.
        """
        state = self.state
        if not self.interrupts.received:
            return
        if not state.finished:
            self._save(wait=True)
        raise TrainingInterruptedError(
            f"train: the training must not be stopped to finish. Got {self.interrupts.received} "
            f"at step {state.step}. A checkpoint of that step was written. "
            "Run the same command again to go on."
        )

    def _apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        self.state.optimizer.apply(gradients, variables)

    def _observe(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
        return self.log.optimizer.observer.apply(gradients, variables)

    def _compile_step(self, apply: Callable[[Sequence[Any], Sequence[Any]], Any]) -> Any:
        """Return one step: features and labels in, (loss, what is measured) out."""
        state = self.state
        for schedule in state.schedules:
            schedule.first_step = state.first_iteration
        features, labels = self.examples.in_order(1).element_spec

        @tf.function(input_signature=[features, labels])
        def step(features: dict[str, tf.Tensor], labels: tf.Tensor) -> tuple[tf.Tensor, Any]:
            with tf.GradientTape() as tape:
                scores = state.model(features, training=True)
                error = tf.reduce_mean(tf.square(scores - labels))
                loss = tf.add_n([error, *state.model.losses])
            variables = state.model.trainable_variables
            gradients = tape.gradient(loss, [v.value for v in variables])
            statistics = apply(gradients, variables)
            state.loss_sum.assign_add(tf.cast(loss, tf.float64))
            state.metrics.update(labels, scores)
            return loss, None if statistics is None else state.measured(statistics)

        return step

    def _compile_evaluation(self) -> Any:
        model, config = self.state.model, self.config
        batches = self.held_out.in_order(4096)

        @tf.function(input_signature=list(batches.element_spec))
        def errors(features: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
            error = clip_scores(model(features, training=False), config) - labels
            error = tf.cast(error, tf.float64)
            return tf.stack([tf.reduce_sum(tf.square(error)), tf.reduce_sum(tf.abs(error))])

        def evaluate() -> dict[str, float]:
            total = tf.zeros([2], tf.float64)
            for features, labels in batches:
                total += errors(features, labels)
                self.stop_if_asked()
            square, absolute = (total / self.held_out.num_examples).numpy()
            return {"rmse": float(square) ** 0.5, "mae": float(absolute)}

        return evaluate

    def _checkpoint_is_due(self) -> bool:
        step, moment = self._saved_at
        every = self.config.checkpoint
        return (every.every_steps is not None and self.state.step - step >= every.every_steps) or (
            every.every_seconds is not None and time.monotonic() - moment >= every.every_seconds
        )

    def _save(self, *, wait: bool = False) -> None:
        state = self.state
        groups, meta = state.snapshot()
        meta |= {**self.log.meta(), "identity": dict(self.identity)}
        # Between two epochs the last evaluation speaks of these very weights.
        evaluated = state.history[-1] if state.history and state.batch == 0 else {}
        self.saver.save(state.step, groups, meta, evaluated, wait=wait)
        self._saved_at = (state.step, time.monotonic())
