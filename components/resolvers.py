"""What ML Metadata is asked before a training: from which checkpoint a warm start begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ml_metadata import errors, proto
from tfx.dsl.components.common.resolver import ResolverStrategy
from tfx.types import Artifact

__all__ = ["LatestPushedStrategy"]

_INPUTS = (proto.Event.INPUT, proto.Event.DECLARED_INPUT)
# Not INTERNAL_OUTPUT: with it a resolver passes on what others made.
_OUTPUTS = (proto.Event.OUTPUT, proto.Event.DECLARED_OUTPUT)

_Origins = dict[int, set[int]]
"""Artifact id to the ids of the checkpoints that it comes from."""


class LatestPushedStrategy(ResolverStrategy):
    """Resolve the checkpoint whose model was pushed last.

    A training that was not blessed leaves a checkpoint too; a warm start from it would carry the
    fault on, so what counts is what serves. Where nothing was pushed yet the result is empty, and
    an optional input such as RecTrainer's `base_checkpoint` stays without an artifact.

    Example:
        last = Resolver(
            strategy_class=LatestPushedStrategy,
            base_checkpoint=Channel(type=Checkpoint),
        ).with_id("last_checkpoint")
        trainer = RecTrainer(..., base_checkpoint=last.outputs["base_checkpoint"])

    Every channel given must be of checkpoints; each is resolved by itself. With two trainers in one
    pipeline, give `producer_component_id` to the channel. A checkpoint leads to its model by the
    execution that made both, and the model to what a Pusher made of it (also by way of an
    InfraValidator). Pushed means that the Pusher set `pushed` to 1 on its live artifact; an
    artifact that TFX took from its cache counts as of the day when it was made. TFX's local runner
    and others that resolve in Python run this; Kubeflow Pipelines and Vertex know two strategies of
    TFX's own only, so there use LatestArtifactStrategy, which does not look at pushes.

    Cost:
        Seven queries of ML Metadata, over all checkpoints of the pipeline.
    """

    def resolve_artifacts(
        self, store: Any, input_dict: dict[str, list[Artifact]]
    ) -> dict[str, list[Artifact]]:
        """Return for each key the one checkpoint to start from, or none."""
        return {key: self._resolve(store, candidates) for key, candidates in input_dict.items()}

    def _resolve(self, store: Any, checkpoints: list[Artifact]) -> list[Artifact]:
        by_id = {artifact.id: artifact for artifact in checkpoints}
        siblings = _made_with(store, by_id)
        made = _made_from(store, _of_type(store, "Model", siblings))
        through = _made_from(store, _of_type(store, "InfraBlessing", made))
        pushed = _pushed(store, [made, through])
        if not pushed:
            return []
        # Ids rise with time. A push decides, not a training: going back to an older model counts.
        newest = max(pushed)
        return [by_id[max(pushed[newest])]]


def _made_with(store: Any, ids: Iterable[int]) -> _Origins:
    """Return what the executions that made some artifacts made besides."""
    events = store.get_events_by_artifact_ids(list(ids)) if ids else []
    makers: _Origins = {}
    for event in events:
        if event.type in _OUTPUTS:
            makers.setdefault(event.execution_id, set()).add(event.artifact_id)
    return _outputs(store, makers)


def _made_from(store: Any, origins: Mapping[int, set[int]]) -> _Origins:
    """Return what the executions that took some artifacts made of them."""
    events = store.get_events_by_artifact_ids(list(origins)) if origins else []
    takers: _Origins = {}
    for event in events:
        if event.type in _INPUTS:
            takers.setdefault(event.execution_id, set()).update(origins[event.artifact_id])
    return _outputs(store, takers)


def _outputs(store: Any, executions: Mapping[int, set[int]]) -> _Origins:
    events = store.get_events_by_execution_ids(list(executions)) if executions else []
    made: _Origins = {}
    for event in events:
        if event.type in _OUTPUTS:
            made.setdefault(event.artifact_id, set()).update(executions[event.execution_id])
    return made


def _of_type(store: Any, name: str, origins: _Origins) -> _Origins:
    return {a.id: origins[a.id] for a in _artifacts(store, name, origins)}


def _pushed(store: Any, found: Iterable[_Origins]) -> _Origins:
    pushed: _Origins = {}
    for origins in found:
        for artifact in _artifacts(store, "PushedModel", origins):
            is_pushed = artifact.custom_properties["pushed"].int_value == 1
            if is_pushed and artifact.state == proto.Artifact.LIVE:
                pushed.setdefault(artifact.id, set()).update(origins[artifact.id])
    return pushed


def _artifacts(store: Any, type_name: str, ids: Iterable[int]) -> list[proto.Artifact]:
    try:
        type_id = store.get_artifact_type(type_name).id
    except errors.NotFoundError:  # no artifact of that type was ever made
        return []
    artifacts = store.get_artifacts_by_id(list(ids)) if ids else []
    return [artifact for artifact in artifacts if artifact.type_id == type_id]
