"""LazyAdam: what it computes, and the Keras 3 optimizer."""

from __future__ import annotations

from typing import Any

import keras

from rowstep.optimizers import arguments
from rowstep.optimizers.base import RowOptimizer
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.recipe import Recipe
from rowstep.optimizers.row_update import Plan
from rowstep.optimizers.rules import AdamRule

__all__ = ["LazyAdam", "LazyAdamRecipe"]

_COUNTS = ("steps", "visits")


class LazyAdamRecipe(Recipe):
    """Adam that, for a sparse gradient, updates only the rows that the batch looked up.

        g[r] = sum of the gradients of row r in the batch
        m[r] = beta_1 * m[r] + (1 - beta_1) * g[r]
        v[r] = beta_2 * v[r] + (1 - beta_2) * g[r]^2
        w[r] = w[r] - A * m[r] / (sqrt(v[r]) + epsilon)
        A    = learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t)

    for the rows r that are present. All other rows of weights and state keep their bits: they do
    not decay and do not drift by their momentum, unlike in Adam. A row that is present with a
    gradient of zero is present: it moves by its momentum. t counts steps of the optimizer, not
    visits of a row, unless bias_correction says so. A dense gradient makes it plain Adam.

    State and coefficients are float32 (float64 for float64 variables), whatever the variable's
    dtype; weights in float16 or bfloat16 are rounded at random, so that small steps count.

    Args:
        learning_rate: A number, a scalar tensor or tf.Variable, a LearningRateSchedule or a
            callable without arguments.
        beta_1: Decay of the first moment, in [0, 1), or a callable without arguments.
        beta_2: Decay of the second moment, in [0, 1), or a callable without arguments.
        epsilon: Added to sqrt(v), outside the bias correction, or a callable without arguments.
        amsgrad: Must be False.
        name: Name of the optimizer.
        bias_correction: "steps": t counts steps of the optimizer. "visits": t counts the steps in
            which a row was present, so that a rare row's first step is as long as everyone's.
        idle_decay: Whether a row that comes back after k steps decays first by what Adam would
            have taken: m by beta_1^k, v by beta_2^k, and weights by k times the weight decay.
        row_velocity: Whether tables have one second moment a row, v[r] = mean of g[r]^2 over the
            width, which saves nearly a third of the memory.
        **options: lr (older name of learning_rate), and those that all optimizers have: see
            `rowstep.optimizers.StepOptions`.

    Raises:
        OptimizerArgumentError: an argument does not fit.

    Cost: O(N * D) a step for N looked-up rows of width D, whatever the number of rows of the
    table, provided that the table is read by gathering rows (`rowstep.optimizers.Embedding`).

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, end of section 2; the
    lazy form as in TensorFlow's contrib.opt.LazyAdamOptimizer.
    """

    bias_correction: str
    idle_decay: bool
    row_velocity: bool

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-7,
        amsgrad: bool = False,
        name: str = "LazyAdam",
        *,
        bias_correction: str = "steps",
        idle_decay: bool = False,
        row_velocity: bool = False,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        if amsgrad not in (False, None):
            raise OptimizerArgumentError(
                f"{where}: amsgrad must be False. Got {amsgrad!r}. A running maximum of the second "
                "moment is not part of LazyAdam. Use AdamMultilr(amsgrad=True, lazy=True)."
            )
        if bias_correction not in _COUNTS:
            raise OptimizerArgumentError(
                f"{where}: bias_correction must say what t counts. Got {bias_correction!r}. "
                f"Allowed are {', '.join(_COUNTS)}. Choose one of them."
            )
        settings = {
            "bias_correction": bias_correction,
            "idle_decay": arguments.boolean(where, "idle_decay", idle_decay),
            "row_velocity": arguments.boolean(where, "row_velocity", row_velocity),
        }
        hypers = self._checked_hypers(where, beta_1, beta_2, epsilon)
        super().__init__(learning_rate, options, name)
        self._set(**hypers, **settings)

    def _plan(self, path: str, is_table: bool, decays: bool) -> Plan:
        weight_decay = self._options.weight_decay or 0.0
        return Plan(
            AdamRule(**self._hypers(), row_velocity=self.row_velocity and is_table),
            weight_decay=weight_decay if decays else 0.0,
            counts_visits=self.bias_correction == "visits",
            idle_decay=self.idle_decay,
        )

    def _table_options(self) -> list[str]:
        return super()._table_options() + (["row_velocity"] if self.row_velocity else [])

    def get_config(self) -> dict[str, Any]:
        """Return all constructor arguments; `from_config` makes the same optimizer of them."""
        return super().get_config() | {
            "amsgrad": False,
            "bias_correction": self.bias_correction,
            "idle_decay": self.idle_decay,
            "row_velocity": self.row_velocity,
        }


@keras.saving.register_keras_serializable(package="rowstep")
class LazyAdam(LazyAdamRecipe, RowOptimizer):  # noqa: D101  # the recipe says it
    __doc__ = LazyAdamRecipe.__doc__
