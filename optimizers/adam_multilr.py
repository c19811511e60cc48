"""AdamMultilr: what it computes, and the Keras 3 optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from rowstep.optimizers import arguments
from rowstep.optimizers.base import RowOptimizer
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.recipe import Recipe
from rowstep.optimizers.row_update import Plan
from rowstep.optimizers.rules import AdamRule
from rowstep.optimizers.variables import matches

__all__ = ["AdamMultilr", "AdamMultilrRecipe"]


@dataclass(frozen=True)
class _Group:
    patterns: tuple[str, ...]
    rate: Any
    """A variable, a schedule or a callable."""


class AdamMultilrRecipe(Recipe):
    """Adam with a learning rate of its own for each group of variables.

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g^2
        w = w - A * m / (sqrt(v) + epsilon)
        A = lr * sqrt(1 - beta_2^t) / (1 - beta_1^t)

    where lr is that of the first entry of pattern_lrs of which a pattern is found (re.search) in
    the variable's path, and learning_rate where none is. Dense and sparse gradients are corrected
    alike. A sparse gradient makes all rows decay and move as in Adam, unless lazy is set.

    Paths have no ":0" at the end, so "kernel$" works; patterns written for names with ":0" match
    too.

    Args:
        learning_rate: For variables that no pattern matches: a number, a scalar tensor or
            tf.Variable, a LearningRateSchedule or a callable without arguments.
        beta_1: Decay of the first moment, in [0, 1), or a callable without arguments.
        beta_2: Decay of the second moment, in [0, 1), or a callable without arguments.
        epsilon: Added to sqrt(v), outside the bias correction, or a callable.
        amsgrad: Whether to divide by the largest v so far instead of v.
        name: Name of the optimizer.
        pattern_lrs: Entries {"patterns": [regular expressions], "lr": rate}; a rate is what
            learning_rate may be. None and [] mean no groups.
        lazy: Whether a sparse gradient moves only the rows that it has, as in LazyAdam.
        **options: lr (older name of learning_rate), and those that all optimizers have: see
            `rowstep.optimizers.StepOptions`. decay concerns the groups' rates too.

    Raises:
        OptimizerArgumentError: an argument does not fit.

    Cost: O(V * D) a step for a table [V, D]; O(N * D) for N looked-up rows with lazy.

    Source: capreolus' AdamMultilr for the groups; Kingma & Ba, "Adam: A Method for Stochastic
    Optimization", 2015; Reddi et al., "On the Convergence of Adam and Beyond", 2018, for amsgrad.
    """

    amsgrad: bool
    lazy: bool
    _groups: tuple[_Group, ...]

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        amsgrad: bool = False,
        name: str = "AdamMultilr",
        pattern_lrs: Iterable[Mapping[str, Any]] | None = None,
        *,
        lazy: bool = False,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        if not isinstance(pattern_lrs, list | tuple | None):
            raise OptimizerArgumentError(
                f"{where}: pattern_lrs must be a list. Got {pattern_lrs!r}. "
                'Write [{"patterns": [...], "lr": ...}].'
            )
        groups = [self._checked_group(where, *entry) for entry in enumerate(pattern_lrs or ())]
        settings = {
            "amsgrad": arguments.boolean(where, "amsgrad", amsgrad),
            "lazy": arguments.boolean(where, "lazy", lazy),
        }
        hypers = self._checked_hypers(where, beta_1, beta_2, epsilon)
        super().__init__(learning_rate, options, name)
        self._set(**hypers, **settings)
        self._groups = tuple(
            _Group(patterns, self._new_rate(f"learning_rate_{index}", rate))
            for index, (patterns, rate) in enumerate(groups)
        )

    def _checked_group(
        self, where: str, index: int, entry: Mapping[str, Any]
    ) -> tuple[tuple[str, ...], Any]:
        where = f"{where}, pattern_lrs[{index}]"
        if not isinstance(entry, Mapping) or set(entry) != {"patterns", "lr"}:
            got = sorted(entry) if isinstance(entry, Mapping) else entry
            raise OptimizerArgumentError(
                f"{where}: an entry must have the keys 'patterns' and 'lr'. Got {got!r}. "
                'Write {"patterns": [...], "lr": ...}.'
            )
        patterns = arguments.patterns(where, "patterns", entry["patterns"])
        if not patterns:
            raise OptimizerArgumentError(
                f"{where}: patterns must not be empty. Got {entry['patterns']!r}. "
                "Name what the group is for, or remove the entry."
            )
        return tuple(patterns), arguments.learning_rate(where, entry["lr"], self.schedule_type)

    def group_of(self, path: str) -> int | None:
        """Return the index in pattern_lrs of the entry for the variable of this path, or None."""
        for index, group in enumerate(self._groups):
            # Patterns written for the names of TensorFlow's variables end in ":0".
            if matches(group.patterns, path) or matches(group.patterns, f"{path}:0"):
                return index
        return None

    @property
    def group_learning_rates(self) -> list[Any]:
        """The learning rate of each entry of pattern_lrs, as of now."""
        return [self._rate_now(group.rate) for group in self._groups]

    def set_group_learning_rate(self, index: int, value: Any) -> None:
        """Set the learning rate of an entry of pattern_lrs, also while training.

        Args:
            index: Index of the entry.
            value: The new rate.

        Raises:
            OptimizerArgumentError: the entry's rate is a schedule or a callable.
        """
        if not 0 <= index < len(self._groups):
            raise OptimizerArgumentError(
                f"{self.name}.set_group_learning_rate: index must be that of an entry of "
                f"pattern_lrs. Got {index}. There are {len(self._groups)}. Choose one of them."
            )
        rate = self._groups[index].rate
        if not hasattr(rate, "assign"):
            raise OptimizerArgumentError(
                f"{self.name}.set_group_learning_rate: the rate of the entry must be a number. "
                f"Got entry {index}, whose rate is a {type(rate).__name__}. "
                "Give the entry a number as lr to be able to set it."
            )
        where = f"{self.name}.set_group_learning_rate"
        rate.assign(arguments.non_negative(where, "value", value))

    def _group_rates(self) -> list[Any]:
        return self.group_learning_rates

    def _rate_variables(self) -> dict[str, Any]:
        rates = {f"learning_rate/{index}": g.rate for index, g in enumerate(self._groups)}
        own = {key: rate for key, rate in rates.items() if hasattr(rate, "assign")}
        return super()._rate_variables() | own

    def _plan(self, path: str, is_table: bool, decays: bool) -> Plan:
        group = self.group_of(path)
        weight_decay = self._options.weight_decay or 0.0
        return Plan(
            AdamRule(**self._hypers(), amsgrad=self.amsgrad),
            lazy=self.lazy,
            weight_decay=weight_decay if decays else 0.0,
            rate_group=0 if group is None else group + 1,
        )

    def get_config(self) -> dict[str, Any]:
        """Return all constructor arguments; `from_config` makes the same optimizer of them."""
        groups: Sequence[_Group] = self._groups
        return super().get_config() | {
            "amsgrad": self.amsgrad,
            "pattern_lrs": [
                {"patterns": list(group.patterns), "lr": self._config_of(group.rate)}
                for group in groups
            ],
            "lazy": self.lazy,
        }


@keras.saving.register_keras_serializable(package="rowstep")
class AdamMultilr(AdamMultilrRecipe, RowOptimizer):  # noqa: D101  # the recipe says it
    __doc__ = AdamMultilrRecipe.__doc__
