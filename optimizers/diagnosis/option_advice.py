"""The doctor's words on the options of an optimizer, each tried on and off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rowstep.optimizers.diagnosis.findings import Finding
from rowstep.optimizers.diagnosis.model_probe import TableUse
from rowstep.optimizers.diagnosis.optimizer_probe import (
    OPTIONS_OFF,
    REFUSALS,
    copied,
    is_keras3,
    is_of_rowstep,
    num_whole_tables,
    sgd,
    sums_duplicates,
)

__all__ = ["lazy_adam_for", "option_findings", "refused"]

_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
_TOUCHES_ALL = {
    "global_clipnorm": "the gradient is made dense to measure its norm",
    "weight_decay": "all V rows decay in each step",
    "use_ema": "the average of all V rows is taken in each step",
    "gradient_accumulation_steps": "gradients are added up in a dense tensor of all V rows",
    "loss_scale_factor": "the gradient is made dense to be scaled",
    "amsgrad": "the largest second moment of all V rows is kept in each step",
    "clipnorm": "the gradient is made dense to measure its norm",
    "clipvalue": "the gradient is made dense to be clipped",
}


def option_findings(optimizer: Any, tables: Sequence[TableUse]) -> Iterator[Finding]:
    """Yield what the options that are on do to the tables."""
    name, paths = type(optimizer).__name__, [table.path for table in tables]
    config = optimizer.get_config()
    for option, off in OPTIONS_OFF.items():
        value = config.get(option, off)
        if value is off or (option == "weight_decay" and not _any_decays(optimizer, tables)):
            continue
        where = f"{name}({option}={value})"
        if option == "ema_overwrite_frequency":
            if config.get("use_ema"):
                yield _overwrites(where)
            continue
        try:
            yield from _option(optimizer, option, value, where, paths)
        except REFUSALS as error:
            yield refused(where, error, optimizer)


def _option(
    optimizer: Any, option: str, value: Any, where: str, paths: Sequence[str]
) -> Iterator[Finding]:
    def stand_in(with_option: bool) -> Any:
        # In a dense optimizer an option hardly shows. All but amsgrad are options of the base
        # class, so Keras' own optimizers are looked at through its SGD.
        if option == "amsgrad" or is_of_rowstep(optimizer):
            return copied(optimizer, keep=[option] if with_option else [])
        return sgd(optimizer, **({option: value} if with_option else {}))

    with_it, without = (num_whole_tables(stand_in(on), paths) for on in (True, False))
    remedy = (
        f"Set {option} in {lazy_adam_for(optimizer)}, where it costs what the rows of the batch do."
    )
    if any(with_it[path] > without[path] for path in paths):
        yield Finding(
            option,
            "dense",
            where,
            f"an option must not cost O(V). Got {option}: {_TOUCHES_ALL[option]}.",
            "Leave it out." if option == "amsgrad" else remedy,
        )
    if option in _CLIPS and not sums_duplicates(lambda: stand_in(True), paths[0], scale=value):
        # In rowstep's optimizers nothing else does it.
        remedy = f"Set {option} in {lazy_adam_for(optimizer)}."
        yield Finding(
            f"{option}_duplicates",
            "wrong",
            where,
            "a gradient must be clipped after the parts of a repeated id are summed. "
            "Got a clip of the parts, which is another one.",
            "Set clip_before_sum=False." if is_of_rowstep(optimizer) else remedy,
        )


def _overwrites(where: str) -> Finding:
    return Finding(
        "ema_overwrite_frequency",
        "dense",
        where,
        "averages must not be copied while training goes on. "
        "Got a copy of all V rows each time that the weights become their average.",
        "Set it to None, and call finalize_variable_values after the training.",
    )


def _any_decays(optimizer: Any, tables: Sequence[TableUse]) -> bool:
    decays = getattr(optimizer, "_use_weight_decay", None)
    return decays is None or any(decays(table.variable) for table in tables)


def lazy_adam_for(optimizer: Any) -> str:
    """Return the full name of the LazyAdam that trains what an optimizer trains."""
    return f"rowstep.optimizers{'' if is_keras3(optimizer) else '.tf_keras'}.LazyAdam"


def refused(where: str, error: Exception, optimizer: Any) -> Finding:
    """Return the finding that an optimizer cannot make a step."""
    text = str(error).strip().splitlines()
    return Finding(
        "refusal",
        "wrong",
        where,
        "a step must be possible with a sparse gradient. "
        f"Got {type(error).__name__}: {text[-1] if text else 'no words'}.",
        f"Use {lazy_adam_for(optimizer)}.",
    )
