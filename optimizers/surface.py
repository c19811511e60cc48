"""The methods around the step that training code of several generations calls, free of Keras."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from rowstep.optimizers import arguments
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.options import StepOptions
from rowstep.optimizers.state_surface import StateSurface
from rowstep.optimizers.variables import matches, native_variable, variable_path

__all__ = ["Exclusions", "OptimizerSurface"]


@dataclass(frozen=True)
class Exclusions:
    """Hold what is kept out of weight decay: by name, by path from a config, or as it is."""

    names: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    variables: tuple[Any, ...] = ()


class OptimizerSurface(StateSurface):
    """Give state, slots and minimize to an optimizer that a `RowStep` drives."""

    learning_rate: Any
    _options: StepOptions
    _no_decay: Exclusions

    # Weight decay ------------------------------------------------------------------------------

    def exclude_from_weight_decay(
        self, var_list: Iterable[Any] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Keep variables out of weight decay; call it before the optimizer is built.

        Args:
            var_list: Variables.
            var_names: Regular expressions, searched in the paths of variables.

        Raises:
            OptimizerArgumentError: the optimizer is built, so that it is too late.
        """
        if self.built:
            raise OptimizerArgumentError(
                f"{self.name}.exclude_from_weight_decay: the optimizer must not be built yet. "
                "Got one that is. Call it right after making the optimizer."
            )
        where = f"{self.name}.exclude_from_weight_decay"
        names = arguments.patterns(where, "var_names", var_names) or ()
        if var_list is not None and not isinstance(var_list, list | tuple):
            raise OptimizerArgumentError(
                f"{where}: var_list must be a list of variables. Got {var_list!r}. "
                "Put it into a list."
            )
        variables = [native_variable(variable) for variable in var_list or ()]
        paths = tuple(variable_path(variable) for variable in var_list or ())
        self._no_decay = Exclusions(tuple(names), paths, tuple(variables))

    def _decays(self, path: str, variable: Any) -> bool:
        excluded = self._no_decay
        if excluded.variables:
            # Names of variables repeat; those that were given are known as they are.
            if any(native_variable(variable) is known for known in excluded.variables):
                return False
        elif variable_path(variable) in excluded.paths:
            return False
        return not matches(excluded.names, path)

    def _warn_of_lost_exclusions(self, variables: Sequence[Any]) -> None:
        lost = set(self._no_decay.paths) - {variable_path(variable) for variable in variables}
        if lost:
            warnings.warn(
                f"{self.name}: excluded from weight decay were {', '.join(sorted(lost))}, which "
                "are not among the variables; a saved model may name them otherwise. Exclude by "
                "var_names.",
                stacklevel=4,
            )

    def _is_table(self, path: str) -> bool:
        return matches(self._options.tables, path)

    # Training ----------------------------------------------------------------------------------

    @property
    def lr(self) -> Any:
        """The learning rate, under its older name."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    def minimize(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Iterable[Any] | Callable[[], Iterable[Any]],
        grad_loss: tf.Tensor | None = None,
        name: str | None = None,
        tape: tf.GradientTape | None = None,
    ) -> Any:
        """Compute gradients of a loss, apply them, and return the step counter.

        Args:
            loss: A callable without arguments, or a scalar computed under `tape`. With
                loss_scale_factor it is scaled here: do not pass what `scale_loss` returned.
            var_list: The variables, or a callable that returns them.
            grad_loss: The gradient of what is minimized with respect to the loss; ones when left
                out. A tape in its place is taken as the tape: newer Keras has it there.
            name: Ignored; older code passes it.
            tape: The tape that recorded `loss`; needed unless `loss` is a callable.
        """
        if isinstance(grad_loss, tf.GradientTape):
            grad_loss, tape = None, grad_loss
        pairs = self.compute_gradients(loss, var_list, tape, grad_loss)
        return self.apply_gradients(pairs, name=name)

    def compute_gradients(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Iterable[Any] | Callable[[], Iterable[Any]],
        tape: tf.GradientTape | None = None,
        grad_loss: tf.Tensor | None = None,
    ) -> list[tuple[Any, Any]]:
        """Return (gradient, variable) pairs; gradients of gathered tables are tf.IndexedSlices.

        Raises:
            OptimizerArgumentError: `loss` is a tensor and there is no `tape`.
        """
        if callable(loss):
            with tape or tf.GradientTape() as tape:
                if not callable(var_list):
                    var_list = list(var_list)
                    tape.watch([native_variable(variable) for variable in var_list])
                loss = loss()
        elif tape is None:
            raise OptimizerArgumentError(
                f"{self.name}.compute_gradients: a loss that is not callable needs the tape that "
                f"recorded it. Got {type(loss).__name__} and tape=None. "
                "Pass tape=..., or a function that computes the loss."
            )
        variables = list(var_list() if callable(var_list) else var_list)
        natives = [native_variable(variable) for variable in variables]
        scale = self._options.loss_scale_factor
        if scale is not None:
            # The step divides by it. To scale what comes in is to scale the loss.
            grad_loss = scale * (tf.ones_like(loss) if grad_loss is None else grad_loss)
        gradients = tape.gradient(loss, natives, output_gradients=grad_loss)
        return list(zip(gradients, variables, strict=True))

    def get_gradients(self, loss: tf.Tensor, params: Sequence[Any]) -> list[Any]:
        """Return the gradients of a loss tensor, inside of a graph only.

        Raises:
            OptimizerArgumentError: called eagerly, or a gradient cannot be computed.
        """
        self._require_graph("get_gradients", "compute_gradients(loss, var_list, tape)")
        gradients = tf.gradients(loss, [native_variable(param) for param in params])
        missing = [p for g, p in zip(gradients, params, strict=True) if g is None]
        if missing:
            raise OptimizerArgumentError(
                f"{self.name}.get_gradients: every variable must have a gradient. "
                f"Got None for {', '.join(map(variable_path, missing))}. "
                "Compute the loss from the variables."
            )
        return list(gradients)

    def get_updates(self, loss: tf.Tensor, params: Sequence[Any]) -> list[Any]:
        """Apply the gradients of a loss tensor, inside of a graph only; return the step counter.

        Raises:
            OptimizerArgumentError: called eagerly, or a gradient cannot be computed.
        """
        self._require_graph("get_updates", "minimize(loss, var_list, tape=tape)")
        gradients = self.get_gradients(loss, params)
        return [self.apply_gradients(zip(gradients, params, strict=True))]

    def _require_graph(self, method: str, instead: str) -> None:
        if tf.executing_eagerly():
            raise OptimizerArgumentError(
                f"{self.name}.{method}: it works in graphs, where a loss knows what it was "
                f"computed from. Got an eager call. Call {instead}, or use a tf.function."
            )

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], name: Any = None) -> Any:
        """Update variables by (gradient, variable) pairs."""
        raise NotImplementedError
