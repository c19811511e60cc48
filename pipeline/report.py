"""The short summary that ends a run."""

from __future__ import annotations

import math
from typing import Any

from rowstep.components.truth import Truth
from rowstep.pipeline.runs import Run


def summary_lines(run: Run, command: str, result: dict[str, Any]) -> tuple[list[str], bool]:
    """Word the result of a run.

    Returns:
        The lines, and whether the error lies below what is possible, which means that the
        evaluation split leaked into the training.
    """
    training, metrics = result["training"], result["metrics"]
    rmse = math.sqrt(metrics["mean_squared_error"])
    truth = Truth.from_json(result["truth"]) if result["truth"] else None
    lines = ["", f"{run.title} finished in {_duration(result['seconds'])}"]
    lines.append(_row("rmse", f"{rmse:.4f}  {_against(rmse, truth)}".rstrip()))
    lines.append(
        _row("training", f"{training['num_steps_run']} steps from {training['started_from']}")
    )
    lines.append(_row("model", _model(result)))
    lines += [_row("", failure) for failure in result["failures"]]
    if training["mlflow_run_id"]:
        lines.append(_row("mlflow", training["mlflow_link"] or f"run {training['mlflow_run_id']}"))
    lines.append(_row("checkpoint", training["checkpoint"]))
    lines.append(_row("log", str(run.log)))
    lines.append(_row("next", _next(command, result)))
    is_leak = truth is not None and truth.is_leak(rmse)
    if is_leak:
        lines.append(
            "leak: the error lies below what any honest model can reach on this data. "
            "The evaluation split was seen in training."
        )
    return lines, is_leak


def _row(name: str, text: str) -> str:
    return f"  {name:<11}{text}"


def _against(rmse: float, truth: Truth | None) -> str:
    if truth is None:
        return ""
    share = 100 * truth.explained_share(rmse)
    return (
        f"(best reachable {truth.floor_rmse:.4f}, always the mean {truth.baseline_rmse:.4f}: "
        f"{share:.0f} % of what can be explained)"
    )


def _model(result: dict[str, Any]) -> str:
    if not result.get("judged", True):
        return "of a comparison: neither blessed nor pushed"
    if result["blessed"]:
        return result["pushed_model"] or "blessed, not pushed"
    return "not blessed and not pushed:"


def _next(command: str, result: dict[str, Any]) -> str:
    uri = result["tracking_uri"]
    if uri and uri.startswith("sqlite:"):
        return f"mlflow ui --backend-store-uri {uri}"
    return f"{command} --set optimizer.learning_rate=0.01"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
