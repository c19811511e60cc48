"""What would make the training of a model dense or wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rowstep.optimizers.diagnosis.findings import Finding, report
from rowstep.optimizers.diagnosis.model_probe import TableUse, embedding_settings, table_uses
from rowstep.optimizers.diagnosis.optimizer_advice import optimizer_findings
from rowstep.optimizers.diagnosis.optimizer_probe import is_keras3, is_of_rowstep

__all__ = ["Finding", "doctor", "report"]

_USE_EMBEDDING = "Look rows up with rowstep.optimizers.Embedding, or tf.gather on the tf.Variable."


def doctor(
    model: Any, optimizer: Any, batch: Any = None, loss: Callable[..., Any] | None = None
) -> list[Finding]:
    """Return each thing that makes training this model with this optimizer dense or wrong.

    V is the number of rows of a table, R the number of rows in a batch. Nothing is guessed from
    class names where it can be tried: a step of the model is traced (and never run) to see what is
    read and which gradients arrive, and copies of the optimizer train tables of a few rows. Model
    and optimizer are left as they are. Tables that are not trainable are fine.

    A subclassed model has no inputs that Keras knows. Without a batch its embedding layers are
    traced one by one, so that other uses of their tables (weights shared with an output layer, say)
    stay unseen.

    Args:
        model: A built model of Keras 3 or tf_keras.
        optimizer: The optimizer of Keras 3 or tf_keras that is to train it, built or not.
        batch: x, or (x, y), as `fit` takes them from a data set, to trace the step with. The
            model's inputs when left out.
        loss: A function of (y, outputs). The sum of squares of the outputs when left out, to
            which the losses that layers add are added.

    Returns:
        Findings, those of the model first. An empty list is a clean bill of health.

    Raises:
        OptimizerArgumentError: model or optimizer are not what they must be.

    Cost: about a second for a trace of the model, and as much for the copies of the optimizer.
    """
    keras3 = is_keras3(optimizer)
    tables = table_uses(model, batch, loss)
    by_rowstep = is_of_rowstep(getattr(optimizer, "inner_optimizer", optimizer))
    findings = [f for table in tables for f in _table_findings(table, model, by_rowstep)]
    findings += optimizer_findings(optimizer, keras3, model.trainable_variables, tables)
    return findings


def _table_findings(table: TableUse, model: Any, by_rowstep: bool) -> Iterator[Finding]:
    settings = embedding_settings(model, table.variable)
    if table.is_read_to_gather:
        yield Finding(
            "embedding",
            "dense",
            table.path,
            "a forward pass must gather the rows that it needs. Got a read of the whole table "
            "before rows of it are taken, which is a copy once an optimizer has scattered into it.",
            _USE_EMBEDDING,
        )
    if settings.regularizer is not None:
        yield Finding(
            "embeddings_regularizer",
            "dense",
            table.path,
            "only the rows of the batch must be regularized. "
            f"Got {_kind(settings.regularizer)} on all V rows, so that the gradient is dense too.",
            "Use row_l2 of rowstep.optimizers.Embedding, or weight_decay of rowstep's optimizers.",
        )
    elif table.gradient_is_dense:
        others = ", ".join(table.whole_reads) or "an operation inside a function"
        yield Finding(
            "dense_gradient",
            "dense",
            table.path,
            "the gradient of a table must be tf.IndexedSlices. "
            f"Got a tensor of all V rows, because the whole table also goes into {others}.",
            "Give that use weights of its own, or let it gather the rows that it needs.",
        )
    elif table.whole_reads:
        yield Finding(
            "whole_read",
            "dense",
            table.path,
            "a step must read only the rows that it needs. "
            f"Got {', '.join(table.whole_reads)} of the whole table.",
            _USE_EMBEDDING,
        )
    # rowstep's optimizers apply a row constraint to the rows that they move.
    by_row = by_rowstep and getattr(table.variable, "row_constraint", None) is not None
    if settings.constraint is not None and not by_row:
        yield Finding(
            "embeddings_constraint",
            "dense",
            table.path,
            "only the rows of the batch must be constrained. "
            f"Got {_kind(settings.constraint)} on all V rows after each step.",
            "Use embeddings_constraint of rowstep.optimizers.Embedding with rowstep's optimizers.",
        )


def _kind(thing: Any) -> str:
    return thing.__name__ if hasattr(thing, "__name__") else type(thing).__name__
