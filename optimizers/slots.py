"""The slots of each variable, by the plan that a recipe makes for it."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from rowstep.optimizers.accumulation import accumulator_specs
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.options import StepOptions
from rowstep.optimizers.row_update import Plan, SlotSpec
from rowstep.optimizers.variables import native_variable, variable_path, variables_by_path

__all__ = ["SlotMaker"]


class SlotMaker:
    """Make a plan and the slots for each variable that an optimizer is built on."""

    name: str
    average_starts_at_first_step: ClassVar[bool] = True
    _options: StepOptions
    _plans: tuple[Plan, ...]
    _slots: Sequence[Mapping[str, Any]]
    _accumulators: Sequence[Mapping[str, Any]]
    _keys: tuple[str, ...]

    # What recipes and adapters provide ---------------------------------------------------------

    def _plan(self, path: str, is_table: bool, decays: bool) -> Plan:
        """Return how the variable of this path is updated."""
        raise NotImplementedError

    def _new_slot(
        self, variable: Any, path: str, slot: str, spec: SlotSpec, values: Any = None
    ) -> Any:
        raise NotImplementedError

    def _is_table(self, path: str) -> bool:
        raise NotImplementedError

    def _decays(self, path: str, variable: Any) -> bool:
        raise NotImplementedError

    # What they are made of ---------------------------------------------------------------------

    def _make_slots(self, variables: Sequence[Any]) -> None:
        by_path = variables_by_path(variables)
        self._refuse_unusual(by_path)
        self._require_tables(variables)
        plans = [self._planned(key, variable) for key, variable in by_path.items()]
        slots, accumulators = [], []
        for plan, (path, variable) in zip(plans, by_path.items(), strict=True):
            native = native_variable(variable)
            shape = tuple(native.shape)
            make = functools.partial(self._new_slot, variable, path)
            with tf.distribute.get_strategy().extended.colocate_vars_with(native):
                specs = plan.slot_specs(shape, native.dtype)
                slots.append({slot: make(slot, spec) for slot, spec in specs.items()})
                specs = {}
                if self._options.gradient_accumulation_steps is not None:
                    specs = accumulator_specs(shape, native.dtype)
                accumulators.append({slot: make(slot, spec) for slot, spec in specs.items()})
        self._plans, self._keys = tuple(plans), tuple(by_path)
        self._slots, self._accumulators = slots, accumulators

    def _planned(self, key: str, variable: Any) -> Plan:
        # Patterns see the path as it is; the key of a second variable of the same path ends in #2.
        path = self._pattern_path(variable)
        is_table = self._is_table(path)
        plan = self._plan(path, is_table, self._decays(path, variable))
        options = self._options
        return dataclasses.replace(
            plan,
            average_momentum=options.ema_momentum if options.use_ema else None,
            average_starts_at_first_step=self.average_starts_at_first_step,
            state_dtype=options.slot_dtype if is_table else None,
            stochastic_rounding=options.stochastic_rounding,
            # Of the key, so that a variable's rounding does not depend on its neighbours.
            seed=zlib.crc32(f"{options.seed}:{key}".encode()),
            row_constraint=getattr(variable, "row_constraint", None),
        )

    def _table_options(self) -> list[str]:
        """Return the names of the options in use that concern tables only."""
        return [] if self._options.state_dtype is None else ["state_dtype"]

    def _pattern_path(self, variable: Any) -> str:
        """Return what the user's patterns are searched in."""
        return variable_path(variable)

    def _require_tables(self, variables: Sequence[Any]) -> None:
        paths = [self._pattern_path(variable) for variable in variables]
        if self._table_options() and not any(self._is_table(path) for path in paths):
            raise OptimizerArgumentError(
                f"{self.name}: {', '.join(self._table_options())} concerns tables, so there must "
                f"be one. Got {', '.join(paths)}, of which none matches "
                f"tables={list(self._options.tables)}. Set tables to patterns of your tables."
            )

    def _refuse_unusual(self, by_path: Mapping[str, Any]) -> None:
        for path, variable in by_path.items():
            if not native_variable(variable).dtype.is_floating:
                raise OptimizerArgumentError(
                    f"{self.name}: variables must be of a floating dtype. "
                    f"Got {path} of {variable.dtype}. Leave it out of the trainable variables."
                )
            if getattr(variable, "overwrite_with_gradient", False):
                raise OptimizerArgumentError(
                    f"{self.name}: variables must not be overwritten by their gradient, as float8 "
                    f"scales are. Got {path}. Train it with a Keras optimizer."
                )
