"""The doctor's half for optimizers: cost and meaning of the class, precision, and the options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rowstep.optimizers.diagnosis.findings import Finding
from rowstep.optimizers.diagnosis.model_probe import TableUse
from rowstep.optimizers.diagnosis.optimizer_probe import (
    REFUSALS,
    copied,
    is_of_rowstep,
    movement,
    num_whole_tables,
    sums_duplicates,
)
from rowstep.optimizers.diagnosis.option_advice import lazy_adam_for, option_findings, refused
from rowstep.optimizers.variables import native_variable, variables_by_path

__all__ = ["optimizer_findings"]


def optimizer_findings(
    optimizer: Any, keras3: bool, variables: Sequence[Any], tables: Sequence[TableUse]
) -> list[Finding]:
    """Return what an optimizer does to the tables and to half-precision variables of a model."""
    findings: list[Finding] = []
    wrapper, optimizer = optimizer, getattr(optimizer, "inner_optimizer", optimizer)
    copied(optimizer)  # the error of one that cannot be copied is no finding
    if tables:
        paths = [table.path for table in tables]
        if getattr(optimizer, "_mesh", None) is not None:  # tf_keras has no public name for it
            return [_mesh(optimizer)]
        if wrapper is not optimizer:
            findings += _wrapper(wrapper, paths)
        findings += _class(optimizer, paths)
        findings += option_findings(optimizer, tables)
        if getattr(optimizer, "jit_compile", False) is True and not keras3:
            findings += _compiled(optimizer)
    return findings + list(_half_precision(optimizer, variables))


# --- the class ------------------------------------------------------------------------------


def _class(optimizer: Any, paths: Sequence[str]) -> Iterator[Finding]:
    name = type(optimizer).__name__
    try:
        counts = num_whole_tables(copied(optimizer), paths)
        sums = sums_duplicates(lambda: copied(optimizer), paths[0])
        steps = movement(copied(optimizer), paths[0])
    except REFUSALS as error:
        yield refused(name, error, optimizer)
        return
    dense = [path for path, count in counts.items() if count]
    if dense:
        moves = bool(np.any(steps[0][1] != steps[1][1]))
        effect = ", and rows absent from the batch move" if moves else ""
        whole = "" if len(dense) == len(paths) else f" ({', '.join(dense)})"
        yield Finding(
            "not_lazy",
            "dense",
            name,
            "a step must touch the rows of the batch only. "
            f"Got operations on all V rows of the tables{whole}{effect}.",
            _lazy_remedy(optimizer),
        )
    if not sums:
        yield Finding(
            "duplicates",
            "wrong",
            name,
            "gradients of an id that comes twice in a batch must be summed before they are used. "
            "Got another step than with the sum, such as a sum of squares in the second moment.",
            f"Use {lazy_adam_for(optimizer)}.",
        )


def _lazy_remedy(optimizer: Any) -> str:
    if is_of_rowstep(optimizer):
        config = optimizer.get_config()
        for argument in ("row_trust_ratio", "lazy"):
            if config.get(argument) is False:
                return f"Set {argument}=True, or use {lazy_adam_for(optimizer)}."
        if config.get("row_trust_ratio"):
            return "Let one of the patterns in `tables` match their paths."
    return f"Use {lazy_adam_for(optimizer)}."


def _mesh(optimizer: Any) -> Finding:
    return Finding(
        "mesh",
        "dense",
        f"{type(optimizer).__name__}(mesh)",
        "a step must touch the rows of the batch only. Got a mesh: DTensor cannot scatter rows, so "
        "all V rows are computed under a mask.",
        "Leave the mesh out as long as the tables fit one device, and set lazy=True.",
    )


def _compiled(optimizer: Any) -> Iterator[Finding]:
    if not is_of_rowstep(optimizer):
        yield Finding(
            "jit_compile",
            "dense",
            f"{type(optimizer).__name__}(jit_compile)",
            "shapes must be static where XLA compiles. Got jit_compile=True: tf_keras sums rows "
            "before the compiled part, which is compiled anew for each number of distinct rows.",
            f"Set jit_compile=False, or use {lazy_adam_for(optimizer)}.",
        )


def _wrapper(wrapper: Any, paths: Sequence[str]) -> Iterator[Finding]:
    name = type(wrapper).__name__
    try:
        counts = num_whole_tables(type(wrapper).from_config(wrapper.get_config()), paths)
    except REFUSALS as error:
        yield refused(name, error, wrapper)
        return
    if any(counts.values()):
        yield Finding(
            "loss_scale",
            "dense",
            name,
            "a check for finite gradients must look at the rows of the batch. "
            "Got a tensor of all V rows in each step.",
            "Use mixed_bfloat16, which needs no scale, or loss_scale_factor of LazyAdam.",
        )


# --- half precision -------------------------------------------------------------------------


def _half_precision(optimizer: Any, variables: Sequence[Any]) -> Iterator[Finding]:
    by_path = variables_by_path(variables)
    dtypes = {path: native_variable(variable).dtype.name for path, variable in by_path.items()}
    name = type(optimizer).__name__
    for dtype in ("float16", "bfloat16"):
        paths = [path for path, of_variable in dtypes.items() if of_variable == dtype]
        if not paths:
            continue
        try:
            # So small that squares vanish in float16; in bfloat16 beta_2 becomes 1 at any size.
            exact, rounded = (
                movement(copied(optimizer), paths[0], 1e-3, dtype=d) for d in ("float32", dtype)
            )
        except REFUSALS as error:
            yield refused(f"{name}, {paths[0]}", error, optimizer)
            continue
        if not np.allclose(rounded, exact, rtol=0.0, atol=0.1 * float(np.max(np.abs(exact)))):
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            yield Finding(
                "half_precision",
                "wrong",
                name,
                f"state and arithmetic must be float32. Got those of {dtype} for {paths[0]}{more}: "
                "weights stand still or run away.",
                "Keep variables in float32 (mixed precision does), or use rowstep's optimizers.",
            )
