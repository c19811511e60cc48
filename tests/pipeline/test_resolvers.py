"""Which checkpoint a warm start begins from, asked of a real ML Metadata store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ml_metadata import proto
from ml_metadata.metadata_store import MetadataStore
from tfx.components import Pusher
from tfx.dsl.components.common.resolver import Resolver
from tfx.dsl.input_resolution.strategies.latest_artifact_strategy import LatestArtifactStrategy
from tfx.types import artifact_utils, standard_artifacts
from tfx.types.channel import Channel

from rowstep.components.artifacts import Checkpoint
from rowstep.components.resolvers import LatestPushedStrategy

LIVE, COMPLETE = proto.Artifact.LIVE, proto.Execution.COMPLETE
CACHED = proto.Execution.CACHED


class Lineage:
    """Write into a store what TFX's launcher writes when nodes run."""

    def __init__(self, database: Path) -> None:
        connection = proto.ConnectionConfig()
        connection.sqlite.filename_uri = str(database)
        self.store = MetadataStore(connection)

    def run(
        self,
        node: str,
        inputs: dict[str, int],
        outputs: dict[str, proto.Artifact],
        *,
        state: Any = COMPLETE,
        event: Any = proto.Event.OUTPUT,
    ) -> list[int]:
        """Record an execution and return the ids of its outputs."""
        type_id = self.store.put_execution_type(proto.ExecutionType(name=node))
        execution = proto.Execution(type_id=type_id, last_known_state=state)
        pairs = []
        for key, artifact_id in inputs.items():
            [given] = self.store.get_artifacts_by_id([artifact_id])
            pairs.append((given, _event(proto.Event.INPUT, key)))
        pairs += [(artifact, _event(event, key)) for key, artifact in outputs.items()]
        _, ids, _ = self.store.put_execution(execution, pairs, [])
        return list(ids[len(inputs) :])

    def artifact(self, kind: str, *, state: Any = LIVE, **properties: int) -> proto.Artifact:
        """Return a new artifact that is not in the store yet."""
        type_id = self.store.put_artifact_type(proto.ArtifactType(name=kind))
        made = proto.Artifact(type_id=type_id, uri=f"/{kind}", state=state)
        for name, value in properties.items():
            made.custom_properties[name].int_value = value
        return made

    def train(self, base: int | None = None) -> tuple[int, int]:
        """Record a training; return the ids of its checkpoint and its model."""
        outputs = {
            "checkpoint": self.artifact("rowstep.Checkpoint"),
            "model": self.artifact("Model"),
            "model_run": self.artifact("ModelRun"),
        }
        ids = self.run("RecTrainer", {} if base is None else {"base_checkpoint": base}, outputs)
        return ids[0], ids[1]

    def push(self, model: int, *, pushed: int = 1, state: Any = LIVE) -> int:
        """Record a Pusher of a model, with an Evaluator in front of it."""
        evaluated = self.run("Evaluator", {"model": model}, {"b": self.artifact("ModelBlessing")})
        outputs = {"pushed_model": self.artifact("PushedModel", state=state, pushed=pushed)}
        [made] = self.run("Pusher", {"model": model, "model_blessing": evaluated[0]}, outputs)
        return made

    def cached(self, node: str, inputs: dict[str, int], **outputs: int) -> None:
        """Record an execution that TFX took from its cache."""
        found = {key: self.store.get_artifacts_by_id([i])[0] for key, i in outputs.items()}
        self.run(node, inputs, found, state=CACHED)

    def resolve(self) -> list[int]:
        """Return the ids that the strategy resolves among all checkpoints, in any order given."""
        kind = self.store.get_artifact_type("rowstep.Checkpoint")
        given = self.store.get_artifacts_by_type("rowstep.Checkpoint")
        artifacts = artifact_utils.deserialize_artifacts(kind, given)
        found = LatestPushedStrategy().resolve_artifacts(self.store, {"base": artifacts})
        again = LatestPushedStrategy().resolve_artifacts(self.store, {"base": artifacts[::-1]})
        assert [a.id for a in found["base"]] == [a.id for a in again["base"]]
        return [artifact.id for artifact in found["base"]]


def _event(kind: Any, key: str) -> proto.Event:
    event = proto.Event(type=kind)
    event.path.steps.add().key = key
    event.path.steps.add().index = 0
    return event


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    return Lineage(tmp_path / "metadata.db")


def test_nothing_at_all_resolves_to_nothing(lineage: Lineage) -> None:
    found = LatestPushedStrategy().resolve_artifacts(lineage.store, {"base": []})
    assert found == {"base": []}


def test_a_model_that_was_never_pushed_resolves_to_nothing(lineage: Lineage) -> None:
    _, model = lineage.train()
    assert lineage.resolve() == []
    lineage.push(model, pushed=0)
    assert lineage.resolve() == []


def test_the_last_pushed_counts_and_not_the_last_trained(lineage: Lineage) -> None:
    first, first_model = lineage.train()
    lineage.push(first_model)
    second, second_model = lineage.train(base=first)
    assert lineage.resolve() == [first]
    lineage.push(second_model)
    assert lineage.resolve() == [second]
    _, third_model = lineage.train(base=second)
    lineage.push(third_model, pushed=0)
    assert lineage.resolve() == [second]


def test_a_baseline_of_an_evaluation_is_not_taken_for_what_was_pushed(lineage: Lineage) -> None:
    first, first_model = lineage.train()
    lineage.push(first_model)
    _, second_model = lineage.train(base=first)
    outputs = {"blessing": lineage.artifact("ModelBlessing")}
    lineage.run("Evaluator", {"model": second_model, "baseline_model": first_model}, outputs)
    assert lineage.resolve() == [first]


def test_pushing_an_older_model_again_counts(lineage: Lineage) -> None:
    first, first_model = lineage.train()
    lineage.push(first_model)
    _, second_model = lineage.train(base=first)
    lineage.push(second_model)
    lineage.push(first_model)
    assert lineage.resolve() == [first]


def test_what_the_cache_gives_back_counts_as_of_when_it_was_made(lineage: Lineage) -> None:
    first, first_model = lineage.train()
    pushed = lineage.push(first_model)
    lineage.cached("RecTrainer", {}, checkpoint=first, model=first_model)
    lineage.cached("Pusher", {"model": first_model}, pushed_model=pushed)
    assert lineage.resolve() == [first]
    second, second_model = lineage.train(base=first)
    lineage.push(second_model)
    lineage.cached("RecTrainer", {}, checkpoint=first, model=first_model)
    lineage.cached("Pusher", {"model": first_model}, pushed_model=pushed)
    assert lineage.resolve() == [second]  # the cache pushed nothing: the second still serves


def test_what_resolvers_pass_on_is_not_what_they_made(lineage: Lineage) -> None:
    first, first_model = lineage.train()
    lineage.push(first_model)
    second, second_model = lineage.train(base=first)
    passed = {
        "base_checkpoint": lineage.store.get_artifacts_by_id([second])[0],
        "model": lineage.store.get_artifacts_by_id([first_model])[0],
    }
    lineage.run("Resolver", {}, passed, event=proto.Event.INTERNAL_OUTPUT, state=CACHED)
    assert lineage.resolve() == [first]
    lineage.push(second_model)
    assert lineage.resolve() == [second]


@pytest.mark.parametrize("state", ["PENDING", "ABANDONED", "DELETED"])
def test_a_push_that_failed_or_was_taken_back_does_not_count(lineage: Lineage, state: str) -> None:
    first, first_model = lineage.train()
    lineage.push(first_model)
    _, second_model = lineage.train(base=first)
    lineage.push(second_model, state=proto.Artifact.State.Value(state))
    assert lineage.resolve() == [first]


def test_a_push_by_way_of_an_infra_validator_counts(lineage: Lineage) -> None:
    first, model = lineage.train()
    blessing = {"blessing": lineage.artifact("InfraBlessing")}
    [blessed] = lineage.run("InfraValidator", {"model": model}, blessing)
    outputs = {"pushed_model": lineage.artifact("PushedModel", pushed=1)}
    lineage.run("Pusher", {"infra_blessing": blessed}, outputs)
    assert lineage.resolve() == [first]


def test_a_checkpoint_that_is_gone_gives_way_to_the_one_before(lineage: Lineage) -> None:
    first, first_model = lineage.train()
    lineage.push(first_model)
    second, second_model = lineage.train(base=first)
    lineage.push(second_model)
    kind = lineage.store.get_artifact_type("rowstep.Checkpoint")
    left = artifact_utils.deserialize_artifacts(kind, lineage.store.get_artifacts_by_id([first]))
    # TFX gives a strategy only what is live; the second was marked as deleted, say.
    found = LatestPushedStrategy().resolve_artifacts(lineage.store, {"base": left})
    assert [artifact.id for artifact in found["base"]] == [first] != [second]


def test_a_baseline_did_not_go_where_the_model_beside_it_went(lineage: Lineage) -> None:
    first, baseline = lineage.train()
    _, model = lineage.train(base=first)
    outputs = {"blessing": lineage.artifact("ModelBlessing")}
    inputs = {"model": model, "baseline_model": baseline}
    [blessing] = lineage.run("Evaluator", inputs, outputs)
    outputs = {"pushed_model": lineage.artifact("PushedModel", pushed=1)}
    lineage.run("Pusher", {"model": model, "model_blessing": blessing}, outputs)
    kind = lineage.store.get_artifact_type("rowstep.Checkpoint")
    left = artifact_utils.deserialize_artifacts(kind, lineage.store.get_artifacts_by_id([first]))
    assert LatestPushedStrategy().resolve_artifacts(lineage.store, {"b": left}) == {"b": []}


def test_the_names_that_tfx_writes_are_the_ones_that_are_read() -> None:
    from tfx.components.pusher.executor import Executor

    pushed = standard_artifacts.PushedModel()
    Executor()._MarkPushed(pushed, pushed_destination="/serving/1")
    assert pushed.mlmd_artifact.custom_properties["pushed"].int_value == 1
    assert standard_artifacts.PushedModel.TYPE_NAME == "PushedModel"
    assert standard_artifacts.Model.TYPE_NAME == "Model"
    assert standard_artifacts.InfraBlessing.TYPE_NAME == "InfraBlessing"
    assert Pusher.SPEC_CLASS.OUTPUTS["pushed_model"].type is standard_artifacts.PushedModel


def test_the_strategy_takes_the_place_of_tfx_own_in_a_compiled_pipeline(tmp_path: Path) -> None:
    from tfx.dsl.compiler.compiler import Compiler
    from tfx.dsl.input_resolution.ops import ops
    from tfx.orchestration.pipeline import Pipeline

    for strategy in (LatestArtifactStrategy, LatestPushedStrategy):
        node = Resolver(strategy_class=strategy, base=Channel(type=Checkpoint)).with_id("last")
        compiled = Compiler().compile(Pipeline("demo", str(tmp_path), components=[node]))
        assert strategy.__name__ in str(compiled)
        path = f"{strategy.__module__}.{strategy.__qualname__}"
        assert ops.get_by_class_path(path) is strategy
