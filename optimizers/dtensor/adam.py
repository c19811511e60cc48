"""Adam for variables on a DTensor mesh, and off it, as an optimizer of tf_keras."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras
from tensorflow.experimental import dtensor

from rowstep.optimizers import arguments
from rowstep.optimizers.dtensor.hyper import checked_rate, renamed_rate
from rowstep.optimizers.dtensor.layout import check_variables, is_on_mesh, place, rebuild_mesh
from rowstep.optimizers.dtensor.options import (
    EmaOption,
    GradientsClipOption,
    resolved_clips,
    resolved_ema,
)
from rowstep.optimizers.dtensor.step import MeshStep
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.gradients import compute_dtype
from rowstep.optimizers.variables import variable_path, variables_by_path

__all__ = ["Adam"]


@tf_keras.saving.register_keras_serializable(package="rowstep", name="DTensorAdam")
class Adam(MeshStep):
    """Train variables on a DTensor mesh with Adam, with the numbers of a run without a mesh.

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g^2
        w = w - learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t) * m / (sqrt(v) + epsilon)

    With amsgrad the largest v so far stands in its place. With adaptive_epsilon epsilon is
    multiplied by sqrt(1 - beta_2^t), which makes this algorithm 1 of the paper.

    Slots have the layout of their variable; iterations and learning_rate are replicated. State and
    arithmetic are float32, for float64 variables float64. Averages and clipping mean the whole
    logical tensor, not a shard.

    Sparse gradients are summed by row first. By default the rows that a batch does not name still
    move by their momentum, as in dense Adam. With lazy=True they keep their bits: weights, moments
    and weight decay. On a mesh this is a promise about numbers, not about speed: TensorFlow cannot
    scatter there, so every step touches the whole table behind a mask of rows. Off the mesh a lazy
    step touches the named rows only. An average or a constraint always sees the whole table.

    Args:
        learning_rate: Number, scalar tensor, schedule of tf_keras, or callable without arguments
            that is asked at every step (inside a tf.function: when it is traced).
        beta_1: Decay of the first moment, in [0, 1); or a callable that returns it.
        beta_2: Decay of the second moment, in [0, 1); or a callable that returns it.
        epsilon: Added to the root of the second moment.
        amsgrad: Divide by the root of the largest second moment so far.
        gradients_clip_option: GradientsClipOption, or a mapping of its fields.
        ema_option: EmaOption, or a mapping of its fields; switches averaging on.
        name: Name of the optimizer and prefix of its variables.
        mesh: tf.experimental.dtensor.Mesh of the variables, its description as `get_config`
            writes it, or None for plain variables.
        clipnorm: Largest norm of the gradient of one variable.
        clipvalue: Largest absolute value of an element of a gradient.
        global_clipnorm: Largest joint norm of all gradients. At most one way to clip may be set.
        use_ema: Average the weights over the steps.
        ema_momentum: How much of the average stays at each step.
        ema_overwrite_frequency: Steps between two times that the weights are set to their average.
        weight_decay: Taken from the weights apart from the gradient: learning_rate *
            weight_decay * w at each step.
        jit_compile: Compile dense updates with XLA where there is a GPU and no mesh.
        adaptive_epsilon: Whether epsilon is scaled as in algorithm 1 of the paper.
        lazy: Leave rows alone that a sparse gradient does not name.
        **kwargs: lr, the older name of learning_rate.

    Raises:
        OptimizerArgumentError: an argument is unknown or out of range, two contradict each other,
            or the devices of a mesh description are not there.

    Cost: O(V * D) a step and variable, divided by its shards; two slots of the variable's size,
    one more for amsgrad and for the average.

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015; Reddi et al., "On the
    Convergence of Adam and Beyond", 2018 (amsgrad). The signature is that of
    tf.keras.dtensor.experimental.optimizers.Adam.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: float = 1e-07,
        amsgrad: bool = False,
        gradients_clip_option: GradientsClipOption | Mapping[str, Any] | None = None,
        ema_option: EmaOption | Mapping[str, Any] | None = None,
        name: str = "Adam",
        mesh: dtensor.Mesh | Mapping[str, Any] | None = None,
        *,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        weight_decay: float | None = None,
        jit_compile: bool = True,
        adaptive_epsilon: bool = False,
        lazy: bool = False,
        **kwargs: Any,
    ) -> None:
        rate = checked_rate(name, renamed_rate(name, learning_rate, kwargs))
        clips = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        clip = resolved_clips(name, gradients_clip_option, clips)
        ema = resolved_ema(name, ema_option, use_ema, ema_momentum, ema_overwrite_frequency)
        if weight_decay is not None:
            weight_decay = arguments.non_negative(name, "weight_decay", weight_decay)
        self.beta_1 = beta_1 if callable(beta_1) else arguments.beta(name, "beta_1", beta_1)
        self.beta_2 = beta_2 if callable(beta_2) else arguments.beta(name, "beta_2", beta_2)
        self.epsilon = arguments.non_negative(name, "epsilon", epsilon)
        self.amsgrad = bool(amsgrad)
        self.adaptive_epsilon = bool(adaptive_epsilon)
        self.lazy = bool(lazy)
        self._excluded: tuple[str, ...] = ()
        super().__init__(
            name=name,
            weight_decay=weight_decay,
            use_ema=ema is not None,
            ema_momentum=(ema or EmaOption(ema_momentum)).momentum,
            ema_overwrite_frequency=ema.overwrite_frequency if ema else ema_overwrite_frequency,
            jit_compile=jit_compile,
            mesh=rebuild_mesh(name, mesh) if isinstance(mesh, Mapping) else mesh,
            **vars(clip),
        )
        self._start_rate(rate)

    def build(self, var_list: Sequence[Any]) -> None:
        """Create the slots of variables, once; later calls do nothing.

        Args:
            var_list: All variables that will be trained, on the optimizer's mesh.

        Raises:
            OptimizerArgumentError: a variable lives on another mesh, or on one where the optimizer
                has none, or the other way round.
        """
        if getattr(self, "_built", False):
            return
        variables = list(var_list)
        check_variables(f"{self.name}.build", variables, self._mesh)
        self._build_index_dict(variables)
        self._keys = tuple(variables_by_path(variables))
        # The order and the names of tf_keras, on which lists and checkpoints depend.
        if self.use_ema:
            self._model_variables_moving_average = [
                self._add_slot(v, "average", v.read_value()) for v in variables
            ]
        self._momentums, self._velocities = [], []
        for variable in variables:
            self._momentums.append(self._add_slot(variable, "m"))
            self._velocities.append(self._add_slot(variable, "v"))
        if self.amsgrad:
            self._velocity_hats = [self._add_slot(v, "vhat") for v in variables]
        self._built = True

    def add_variable_from_reference(
        self,
        model_variable: Any,
        variable_name: str,
        initial_value: Any = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
    ) -> Any:
        """Create a variable of the optimizer that goes with a variable of the model.

        Args:
            model_variable: Gives shape, dtype and, on a mesh, the layout.
            variable_name: First part of the name, before "/" and the name of model_variable.
            initial_value: What it starts with; zeros when left out. Arrays, tensors of any
                layout, and variables are allowed.
            shape: Another shape. On a mesh such a variable is replicated.
            dtype: Another dtype.

        Returns:
            A DVariable on a mesh, a tf.Variable off it. It is in `variables` too.
        """
        dtype = tf.as_dtype(dtype or model_variable.dtype)
        if not is_on_mesh(model_variable) and dtype == model_variable.dtype:
            return super().add_variable_from_reference(
                model_variable, variable_name, shape, initial_value
            )
        if initial_value is None and shape is None:
            # Zeros like a sharded value are sharded; zeros of a shape would lie whole on a device.
            initial_value = tf.zeros_like(model_variable.read_value(), dtype)
        elif initial_value is None:
            initial_value = tf.zeros(shape, dtype)
        value = tf.cast(initial_value, dtype)
        name = f"{variable_name}/{variable_path(model_variable)}"
        if is_on_mesh(model_variable):
            layout = model_variable.layout
            if value.shape != model_variable.shape:
                layout = dtensor.Layout.replicated(layout.mesh, rank=value.shape.rank)
            variable = dtensor.DVariable(place(value, layout), name=name, trainable=False)
        else:
            with tf.distribute.get_strategy().extended.colocate_vars_with(model_variable):
                variable = tf.Variable(value, name=name, trainable=False)
        self._variables.append(variable)
        return variable

    def _add_slot(self, variable: Any, name: str, initial_value: Any = None) -> Any:
        dtype = compute_dtype(variable.dtype)
        if initial_value is not None:
            initial_value = tf.cast(initial_value, dtype)
        return self.add_variable_from_reference(variable, name, initial_value, dtype=dtype)

    def compute_gradients(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Any,
        tape: tf.GradientTape | None = None,
    ) -> list[tuple[Any, Any]]:
        """Return (gradient, variable) pairs; the gradient of a gather is tf.IndexedSlices.

        Args:
            loss: A callable without arguments, or a scalar computed under `tape`.
            var_list: The variables, or a callable that returns them.
            tape: The tape that recorded `loss`; needed unless `loss` is a callable.

        Raises:
            OptimizerArgumentError: `loss` is a tensor and there is no `tape`.
        """
        if tape is None and not callable(loss):
            raise OptimizerArgumentError(
                f"{self.name}.compute_gradients: a loss that is not callable needs the tape that "
                f"recorded it. Got {type(loss).__name__} and tape=None. "
                "Pass tape=..., or a function that computes the loss."
            )
        # The gradient of a sum starts with a constant. Without the scope it would be off the mesh,
        # and outside of a tf.function TensorFlow does not bring the two together.
        scope = dtensor.default_mesh(self._mesh) if self._mesh else contextlib.nullcontext()
        with scope:
            return super().compute_gradients(loss, var_list, tape)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Set the weights to their averages where weights are averaged; do nothing otherwise."""
        if not self.use_ema:
            return
        self._require_built()
        self._refuse_unknown("finalize_variable_values", var_list)
        for variable in var_list:
            average = self.get_slot(variable, "average").read_value()
            variable.assign(tf.cast(average, variable.dtype))
