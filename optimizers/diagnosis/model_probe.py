"""How a model uses its tables: what its traced step reads, and which gradients arrive.

A table is a trainable variable that rows are gathered from, or whose gradient is sparse. The step
is traced and never run, so looking changes no weight, no random state and no metric.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.variables import native_variable, variables_by_path

__all__ = ["TableUse", "functions_of", "loaded", "table_uses"]

_GATHERS = frozenset({"ResourceGather", "ResourceGatherNd", "Gather", "GatherV2", "GatherNd"})
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "VariableShape"})
_PASSED_THROUGH = frozenset({"Identity", "IdentityN", "Cast", "StopGradient"})
_FIRST_ARGUMENT = {"If": 1, "StatelessIf": 1, "Case": 1, "StatelessCase": 1}
"""Inputs that an operation keeps to itself before it hands the others to its functions."""


@dataclass(frozen=True)
class TableUse:
    """Say how one table is used in a training step."""

    path: str
    variable: Any
    """As the model lists it."""
    gradient_is_dense: bool
    is_read_to_gather: bool
    """Whether the whole table is read before rows of it are taken."""
    whole_reads: tuple[str, ...]
    """Types of the other operations that take the whole table as an input."""


def loaded(module: str) -> Any:
    """Return a module if someone has imported it, or None; never import it."""
    # An object of tf_keras cannot be there otherwise, and importing it takes seconds.
    return sys.modules.get(module)


def table_uses(model: Any, batch: Any, loss: Callable[..., Any] | None) -> list[TableUse]:
    """Trace one training step of a built model and return how it uses each table.

    Without a batch the step is traced on the model's own inputs. A subclassed model has none that
    Keras knows: then each embedding layer is traced by itself.

    Args:
        model: A built model of Keras 3 or tf_keras.
        batch: x, or (x, y), as `fit` takes them from a data set; or None.
        loss: A function of (y, outputs), or None for the sum of squares of the outputs.

    Raises:
        OptimizerArgumentError: the model is not built, a loss comes without targets, or a
            strategy's scope is open.
    """
    _refuse_unfit(model)
    tuple_given = isinstance(batch, tuple)
    inputs, targets = (*batch, None, None)[:2] if tuple_given else (batch, None)
    if loss is not None and targets is None:
        raise OptimizerArgumentError(
            "doctor: a loss needs targets to be computed from. Got loss without them in batch. "
            "Pass batch=(x, y)."
        )
    forward: Callable[[Any], Any] = lambda x: model(x, training=True)  # noqa: E731
    if inputs is not None:
        specs = tf.nest.map_structure(_spec_of_value, inputs)
    elif getattr(model, "inputs", None):
        specs = tf.nest.map_structure(_spec_of_input, model.input)
    else:
        layers = [layer for layer in model._flatten_layers() if hasattr(layer, "embeddings")]
        forward = lambda ids: [layer(ids) for layer in layers]  # noqa: E731
        specs = tf.TensorSpec([None], tf.int64)
    target_specs = tf.nest.map_structure(_spec_of_value, targets)
    variables = variables_by_path(model.trainable_variables)
    traced, gradients = _trace(model, forward, loss, specs, target_specs, variables)
    return list(_tables(traced, variables, gradients))


def _refuse_unfit(model: Any) -> None:
    if tf.distribute.in_cross_replica_context():
        raise OptimizerArgumentError(
            "doctor: the strategy's scope must be left first, since no gradients can be taken in "
            f"it. Got {type(tf.distribute.get_strategy()).__name__}. Call doctor after the scope."
        )
    tf_keras = loaded("tf_keras")
    families = (keras.Model,) if tf_keras is None else (keras.Model, tf_keras.Model)
    if isinstance(model, families) and model.built:
        return
    why = "not built" if isinstance(model, families) else "no model"
    raise OptimizerArgumentError(
        "doctor: model must be a built model of Keras 3 or tf_keras. "
        f"Got {type(model).__name__}, which is {why}. Call the model on a batch once before."
    )


def _spec_of_value(value: Any) -> Any:
    if value is None:
        return None
    is_composite = isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
    return tf.type_spec_from_value(value if is_composite else tf.convert_to_tensor(value))


def _spec_of_input(symbol: Any) -> Any:
    if hasattr(symbol, "type_spec"):  # tf_keras
        return symbol.type_spec
    kind = tf.SparseTensorSpec if getattr(symbol, "sparse", False) else tf.TensorSpec
    return kind(symbol.shape, symbol.dtype)


def _trace(
    model: Any,
    forward: Callable[[Any], Any],
    loss: Callable[..., Any] | None,
    specs: Any,
    target_specs: Any,
    variables: Mapping[str, Any],
) -> tuple[Any, list[Any]]:
    seen: list[Any] = []

    def step(inputs: Any, targets: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            outputs = forward(inputs)
            parts = [loss(targets, outputs)] if loss else [tf.square(o) for o in _floats(outputs)]
            parts = [tf.reduce_sum(tf.cast(part, tf.float32)) for part in [*parts, *model.losses]]
            total = tf.add_n(parts) if parts else tf.constant(0.0)
        natives = [native_variable(variable) for variable in variables.values()]
        seen[:] = tape.gradient(total, natives)
        return [gradient for gradient in seen if gradient is not None]

    return tf.function(step).get_concrete_function(specs, target_specs), seen


def _floats(outputs: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(outputs, expand_composites=True)
    return [tf.cast(part, tf.float32) for part in flat if part.dtype.is_floating]


# --- the graph ------------------------------------------------------------------------------


def _tables(traced: Any, variables: Mapping[str, Any], gradients: list[Any]) -> Iterator[TableUse]:
    graph = traced.graph.as_graph_def()
    library = {function.signature.name: function for function in graph.library.function}
    captured = traced.captured_inputs
    placeholders = [
        tensor.op.name for tensor in traced.inputs[len(traced.inputs) - len(captured) :]
    ]
    for (path, variable), gradient in zip(variables.items(), gradients, strict=True):
        handle = native_variable(variable).handle
        uses = [
            use
            for outside, inside in zip(captured, placeholders, strict=True)
            if outside is handle
            for use in _uses(graph.node, inside, library, is_read=False)
        ]
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        if is_sparse or any(op in _GATHERS for op, _ in uses):
            whole = {op for op, is_read in uses if is_read}
            yield TableUse(
                path=path,
                variable=variable,
                gradient_is_dense=gradient is not None and not is_sparse,
                is_read_to_gather=bool(whole & _GATHERS),
                whole_reads=tuple(sorted(whole - _GATHERS)),
            )


def _uses(
    nodes: Sequence[Any], name: str, library: Mapping[str, Any], is_read: bool
) -> Iterator[tuple[str, bool]]:
    """Yield (operation, whether it takes the read value) for all that use a resource or a value."""
    for node in nodes:
        for position, text in enumerate(node.input):
            # "name", "name:0", "name:output:0", or "^name" for one that is only waited for.
            if text.split(":")[0] != name:
                continue
            bodies = list(functions_of(node, library))
            if bodies:
                for body in bodies:
                    argument = position - _FIRST_ARGUMENT.get(node.op, 0)
                    inner = body.signature.input_arg[argument].name
                    yield from _uses(body.node_def, inner, library, is_read)
            elif node.op == "ReadVariableOp":
                yield from _uses(nodes, node.name, library, is_read=True)
            elif node.op in _PASSED_THROUGH:
                yield from _uses(nodes, node.name, library, is_read)
            elif node.op not in _SHAPES:
                yield node.op, is_read


def functions_of(node: Any, library: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the functions that a node of a graph calls."""
    for value in node.attr.values():
        for function in [value.func, *value.list.func]:
            if function.name in library:
                yield library[function.name]


@dataclass(frozen=True)
class EmbeddingSettings:
    """Hold what Keras does to a table besides looking rows up."""

    regularizer: Any
    constraint: Any


def embedding_settings(model: Any, variable: Any) -> EmbeddingSettings:
    """Return the regularizer and the constraint of a variable of a model."""
    regularizer = getattr(variable, "regularizer", None)
    for layer in model._flatten_layers():
        # tf_keras keeps the regularizer in the layer only.
        if getattr(layer, "embeddings", None) is variable:
            regularizer = regularizer or getattr(layer, "embeddings_regularizer", None)
    return EmbeddingSettings(regularizer, getattr(variable, "constraint", None))
