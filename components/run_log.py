"""What a training tells the outside: MLflow, and the events that show its progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rowstep.components import progress
from rowstep.components.describe import optimizer_tags, run_params
from rowstep.components.job import TrainJob
from rowstep.components.optimizer_log import OptimizerLog
from rowstep.components.tracking import DatasetLink, ModelLink, open_tracker
from rowstep.components.training_state import TrainingState
from rowstep.configs import canonical_json

_EVENT_SECONDS = 0.5
_DIGEST_CHARACTERS = 36  # as many as MLflow takes


class RunLog:
    """Report steps, epochs and checkpoints; trouble in reporting never stops a training."""

    def __init__(
        self, job: TrainJob, state: TrainingState, key: str, folder: Path, num_steps: int
    ) -> None:
        self.job, self.state, self.num_steps = job, state, num_steps
        self._reports = job.config.tracking.enabled and job.tracking_uri is not None
        self._every_steps = job.config.tracking.every_steps
        self.mlflow_run_id: str | None = None
        self.mlflow_link: str | None = None
        self._shown_at, self._shown_step = time.monotonic(), state.step
        self._window_at, self._window_step = time.monotonic(), state.step
        tracking = job.config.tracking
        self._tracker = open_tracker(
            job.tracking_uri,
            tracking.experiment or job.config.name,
            tracking.run_name or job.config.name,
            key,
            folder / "tracking",
            enabled=tracking.enabled,
            on_problem=lambda text: progress.emit("notice", text=text),
            artifact_root=job.tracking_artifacts,
            max_spool_bytes=tracking.max_spool_mib * 2**20,
        )
        self.optimizer = OptimizerLog(
            self._tracker,
            state.optimizer,
            state.model,
            per_variable=tracking.per_variable,
            scan_every_steps=tracking.slots_every_steps,
            histograms=tracking.histograms,
            on_notice=self.notice,
        )

    def start(
        self, started_from: str, identity: Mapping[str, Any], problems: Sequence[str]
    ) -> None:
        """Open, or go on with, the MLflow run and write down how the optimizer is configured.

        Args:
            started_from: what the training goes on with.
            identity: what is trained.
            problems: what was wrong with checkpoints; they become a tag.
        """
        config, state = self.job.config, self.state
        for problem in problems:
            self.notice(problem)
        self._tracker.start(
            run_params(config, state.model, self.num_steps),
            {
                **self.job.tags,
                **optimizer_tags(state.optimizer),
                "rowstep.started_from": started_from,
                "rowstep.attempt": str(state.attempt),
                **({"rowstep.checkpoint_problems": "\n".join(problems)} if problems else {}),
                "rowstep.train_data": identity["train_data"][:16],
            },
            from_step=state.step,
        )
        self.optimizer.start()
        self._tracker.log_text("config.json", canonical_json(config))
        self._tracker.log_inputs([*self._datasets(identity)])
        progress.emit("train_start", step=state.step, total=self.num_steps, origin=started_from)

    def _datasets(self, identity: Mapping[str, Any]) -> Iterator[DatasetLink]:
        for split in ("train", "eval"):
            source = {"type": "tfx_artifact", "uri": self.job.tags.get("tfx.examples_uri", "")}
            digest = identity[f"{split}_data"][:_DIGEST_CHARACTERS]
            yield DatasetLink(f"Examples:{split}", digest, {**source, "split": split}, split)

    def observes(self, step: int) -> bool:
        """Return whether the statistics of this step will be reported."""
        return self._reports and step % self._every_steps == 0

    def step(self, measured: np.ndarray | None = None) -> None:
        """Note one finished step; values leave the device only when a report is due.

        Args:
            measured: what `state.measured` returned of it, if it was observed.
        """
        state = self.state
        if measured is not None:
            self._report(float(measured[0]), float(measured[1]), measured[2:])
        elif state.step % self._every_steps == 0:
            state.check_finite()
            state.loss_sum.assign(0.0)
            state.window_steps = 0
        is_scan = self._reports and state.step % self.optimizer.steps_between_scans == 0
        if is_scan and self.optimizer.affords_scan():
            self.optimizer.scan(state.step)
        if time.monotonic() - self._shown_at >= _EVENT_SECONDS:
            self._show()

    def _report(self, loss_sum: float, rate: float, statistics: np.ndarray) -> None:
        state, now = self.state, time.monotonic()
        state.check_finite(loss_sum)
        metrics = {
            "batch/loss": loss_sum / max(state.window_steps, 1),
            "opt/iterations": float(state.first_iteration + state.step),
            "opt/learning_rate": rate,
            **self.optimizer.named(statistics),
        }
        if now > self._window_at:
            # Not of `window_steps`: a resumed window began in another process.
            num_examples = (state.step - self._window_step) * self.job.config.train.batch_size
            metrics["batch/examples_per_second"] = num_examples / (now - self._window_at)
        self._tracker.log_metrics(state.step, metrics)
        self._window_at, self._window_step = now, state.step
        state.window_steps = 0

    def _show(self) -> None:
        now, state = time.monotonic(), self.state
        rate = (state.step - self._shown_step) / (now - self._shown_at)
        shown = {"step": state.step, "total": self.num_steps, "epoch": state.epoch, "rate": rate}
        if state.window_steps:
            shown["loss"] = float(state.loss_sum.numpy()) / state.window_steps
        progress.emit("step", **shown)
        self._shown_at, self._shown_step = now, state.step

    def epoch(self, metrics: Mapping[str, float]) -> None:
        """Report the evaluation at the end of an epoch."""
        named = {f"epoch/{name}": value for name, value in metrics.items()}
        self._tracker.log_metrics(self.state.step, {**named, "opt/epoch": float(self.state.epoch)})
        if self._reports:
            self.optimizer.epoch(self.state.step)
        progress.emit("epoch", epoch=self.state.epoch, step=self.state.step, **metrics)

    def meta(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the tracking: enough to find the run again."""
        return {"mlflow_run_id": self._tracker.run_id or self.mlflow_run_id}

    def checkpoint(self, step: int) -> None:
        """Say that the checkpoint of a step is committed."""
        progress.emit("checkpoint", step=step)

    def notice(self, text: str) -> None:
        """Say something that people should know."""
        progress.emit("notice", text=text)

    def exported(self, checkpoint: str) -> None:
        """Report the state at the end, and where the model and its checkpoint are."""
        if not self._reports:
            return
        self.optimizer.end(self.state.step)
        params = {"opt.class": type(self.state.optimizer).__name__}
        tags = {"tfx.artifact_uri": self.job.serving_dir, "rowstep.checkpoint": checkpoint}
        name = self.job.config.name
        link = ModelLink(name, self.job.serving_dir, tags, params, self.state.step)
        self._tracker.log_model_link(link)

    def close(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """End the MLflow run within a bounded time and keep what could not be sent.

        Where nothing was left to train, and so nothing was started, this sends what an earlier
        attempt could not, and finds that attempt's run.
        """
        report = self._tracker.close(status)
        self.mlflow_run_id, self.mlflow_link = report.run_id, report.link
        if report.problem:
            progress.emit("notice", text=report.problem)
