"""LAMB: what it computes, and the Keras 3 optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from rowstep.optimizers import arguments
from rowstep.optimizers.base import RowOptimizer
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.recipe import Recipe
from rowstep.optimizers.row_update import Plan
from rowstep.optimizers.rules import LambRule
from rowstep.optimizers.variables import matches

__all__ = ["LAMB", "LambRecipe"]


class LambRecipe(Recipe):
    """Adam's direction, scaled for each variable to the length of its weights.

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g^2
        u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay_rate * w
        ratio = ||w|| / ||u||, or 1 where either norm is 0
        w = w - learning_rate * ratio * u

    The norms are those of the whole variable, so LAMB is dense also for sparse gradients: their
    duplicated rows are summed, then all rows decay and move. With row_trust_ratio each row of a
    table has norms and a ratio of its own, and only the rows that are present move, as in LazyAdam.

    Exclusions are regular expressions, searched (re.search) in the variable's path, for example
    "item_embedding/embeddings"; there is no ":0" at the end, so "bias$" works.

    Args:
        learning_rate: A number, a scalar tensor or tf.Variable, a LearningRateSchedule or a
            callable without arguments.
        beta_1: Decay of the first moment, in [0, 1), or a callable without arguments.
        beta_2: Decay of the second moment, in [0, 1), or a callable without arguments.
        epsilon: Added to sqrt(v_hat), after the bias correction, or a callable.
        weight_decay_rate: Share of w added to u. Inside the ratio: with a zero gradient the
            weights shrink by learning_rate whatever its value.
        exclude_from_weight_decay: Patterns of variables that do not decay.
        exclude_from_layer_adaptation: Patterns of variables whose ratio is 1. None takes the list
            of exclude_from_weight_decay; [] excludes none.
        name: Name of the optimizer.
        trust_ratio_clip: Lowest and highest ratio, for example (0.0, 10.0) as in the paper's first
            version. None does not clamp.
        row_trust_ratio: Whether each row of a table has a ratio of its own.
        row_velocity: Whether tables have one second moment a row, v[r] = mean of g[r]^2.
        **options: lr (older name of learning_rate), and those that all optimizers have, except
            weight_decay: see `rowstep.optimizers.StepOptions`.

    Raises:
        OptimizerArgumentError: an argument does not fit.

    Cost: O(V * D) a step for a table [V, D]; O(N * D) for N looked-up rows with row_trust_ratio.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    2020, algorithm 2; a ratio for each row as in FBGEMM, with a guard for norms of zero.
    """

    weight_decay_rate: float
    trust_ratio_clip: tuple[float, float] | None
    row_trust_ratio: bool
    row_velocity: bool
    _no_decay_patterns: list[str] | None
    _no_adaptation_patterns: list[str] | None

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-6,
        weight_decay_rate: float = 0.0,
        exclude_from_weight_decay: Iterable[str] | None = None,
        exclude_from_layer_adaptation: Iterable[str] | None = None,
        name: str = "LAMB",
        *,
        trust_ratio_clip: Sequence[float] | None = None,
        row_trust_ratio: bool = False,
        row_velocity: bool = False,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        if options.get("weight_decay"):
            raise OptimizerArgumentError(
                f"{where}: weight_decay is not an argument. Got {options['weight_decay']!r}. "
                "LAMB decays inside its ratio. Use weight_decay_rate."
            )
        rate = arguments.non_negative(where, "weight_decay_rate", weight_decay_rate)
        no_decay, no_adaptation = (
            arguments.patterns(where, argument, patterns)
            for argument, patterns in (
                ("exclude_from_weight_decay", exclude_from_weight_decay),
                ("exclude_from_layer_adaptation", exclude_from_layer_adaptation),
            )
        )
        settings = {
            "weight_decay_rate": rate,
            "_no_decay_patterns": no_decay,
            "_no_adaptation_patterns": no_adaptation,
            "trust_ratio_clip": _checked_clip(where, trust_ratio_clip),
            "row_trust_ratio": arguments.boolean(where, "row_trust_ratio", row_trust_ratio),
            "row_velocity": arguments.boolean(where, "row_velocity", row_velocity),
        }
        hypers = self._checked_hypers(where, beta_1, beta_2, epsilon)
        super().__init__(learning_rate, options, name)
        self._set(**hypers, **settings)

    def decays(self, path: str) -> bool:
        """Return whether the variable of this path is subject to weight decay."""
        return self.weight_decay_rate > 0.0 and not matches(self._no_decay_patterns or (), path)

    def adapts(self, path: str) -> bool:
        """Return whether the variable of this path is scaled by its trust ratio."""
        excluded = self._no_adaptation_patterns
        return not matches((self._no_decay_patterns if excluded is None else excluded) or (), path)

    def _plan(self, path: str, is_table: bool, decays: bool) -> Plan:
        by_row = self.row_trust_ratio and is_table
        rule = LambRule(
            **self._hypers(),
            weight_decay_rate=self.weight_decay_rate if decays and self.decays(path) else 0.0,
            adapt=self.adapts(path),
            by_row=by_row,
            trust_ratio_clip=self.trust_ratio_clip,
            row_velocity=self.row_velocity and is_table,
        )
        return Plan(rule, lazy=by_row)

    def _table_options(self) -> list[str]:
        used = [name for name in ("row_trust_ratio", "row_velocity") if getattr(self, name)]
        return super()._table_options() + used

    def get_config(self) -> dict[str, Any]:
        """Return all constructor arguments, both exclusion lists among them."""
        clip = self.trust_ratio_clip
        config = super().get_config() | {
            "weight_decay_rate": self.weight_decay_rate,
            "exclude_from_weight_decay": _copied(self._no_decay_patterns),
            "exclude_from_layer_adaptation": _copied(self._no_adaptation_patterns),
            "trust_ratio_clip": None if clip is None else list(clip),
            "row_trust_ratio": self.row_trust_ratio,
            "row_velocity": self.row_velocity,
        }
        del config["weight_decay"]
        return config


@keras.saving.register_keras_serializable(package="rowstep")
class LAMB(LambRecipe, RowOptimizer):  # noqa: D101  # the recipe says it
    __doc__ = LambRecipe.__doc__


def _checked_clip(where: str, clip: Sequence[float] | None) -> tuple[float, float] | None:
    if clip is None:
        return None
    if np.shape(clip) != (2,):
        raise OptimizerArgumentError(
            f"{where}: trust_ratio_clip must be (lowest, highest). Got {clip!r}. "
            "Pass two numbers, for example (0.0, 10.0)."
        )
    low, high = (arguments.non_negative(where, "trust_ratio_clip", bound) for bound in clip)
    if low > high:
        raise OptimizerArgumentError(
            f"{where}: trust_ratio_clip must be (lowest, highest). Got {tuple(clip)}. "
            "Exchange the two."
        )
    return low, high


def _copied(patterns: Sequence[str] | None) -> list[str] | None:
    # Keras wraps lists that are set as attributes; a config holds plain ones.
    return None if patterns is None else list(patterns)
