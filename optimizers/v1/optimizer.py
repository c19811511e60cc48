"""LazyAdam with the surface of TensorFlow 1: `tf.compat.v1.train.Optimizer`, sessions and all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from rowstep.optimizers import arguments
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.v1 import gradients
from rowstep.optimizers.v1.gradients import hyperparameter, refuse_non_variable
from rowstep.optimizers.v1.state import SessionState
from rowstep.optimizers.v1.update import LazyUpdate

__all__ = ["LazyAdamOptimizer"]


class LazyAdamOptimizer(SessionState, LazyUpdate):
    """Train only the rows of a batch with Adam, behind the interface of TensorFlow 1.

    For the distinct rows r that a sparse gradient names, g the sum of the gradients of r:

        t = t + 1, once for all variables
        m[r] = beta1 * m[r] + (1 - beta1) * g
        v[r] = beta2 * v[r] + (1 - beta2) * g^2
        w[r] = w[r] - A * m[r] / (sqrt(v[r]) + epsilon)
        A    = learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t)

    Rows that are not named keep their weights and their state to the bit; a row named with a zero
    gradient is updated. A dense gradient is applied by TensorFlow's own Adam. Ref variables and
    resource variables, graphs with sessions, eager calls and tf.function give the same numbers.

    Where this is not what TensorFlow 1 did:

    - Resource variables are lazy as well. The optimizer of release 1.4 was plain Adam on them.
    - All gradients are checked before anything is updated: shapes, and row ids in a graph too.
    - For float16 and bfloat16 variables, sums, arithmetic and both slots are float32. In their own
      type beta2 = 0.999 can be 1 and the square of a small gradient 0. A checkpoint of such a
      variable therefore has float32 slots, and `tf.compat.v1.train.Saver` will not load the half
      slots of an old one: set `slots_in_variable_dtype` for that. A change too small for the
      weight's own type is still lost.

    As in TensorFlow 1, beta1 and beta2 given as numbers are float32 for float64 variables too,
    a NaN gradient makes its row NaN, and checkpoints hold `<variable>/Adam` (m),
    `<variable>/Adam_1` (v), `beta1_power` and `beta2_power`, so that checkpoints of
    `tf.compat.v1.train.AdamOptimizer` and of the original load, and those of this class there.

    Args:
        learning_rate: A number of 0 or more, a scalar tensor (a placeholder, for instance), or a
            callable without arguments that returns one; called at every step eagerly, once while
            a graph is built. Values of tensors and callables are not checked.
        beta1: Decay of m in [0, 1), in the same forms. The first step starts `beta1_power` at it.
        beta2: Decay of v in [0, 1), in the same forms. The first step starts `beta2_power` at it.
        epsilon: A number of 0 or more in the same forms, added to sqrt(v) outside the bias
            correction ("epsilon hat" in the paper).
        use_locking: Whether updates of ref variables take their lock. Updates of rows of resource
            variables have no such choice.
        name: Name of the operations, and part of the names of the slots.

    Attributes:
        slots_in_variable_dtype: Whether slots of half-precision variables have the variable's
            type, as in TensorFlow 1; False unless set before the first step. Arithmetic stays
            float32, but squares of small gradients become 0 in a float16 slot. Weights in half
            precision are rounded up or down at random, so that small steps are not lost.

    Raises:
        OptimizerArgumentError: a number is out of range.
        TypeError: an argument is not a number, a tensor or a callable without arguments; it is an
            OptimizerArgumentError too.

    Cost: O(R * D) for R distinct rows of width D, whatever the number of rows of the table.

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, end of section 2; the
        interface is tf.contrib.opt.LazyAdamOptimizer of TensorFlow 1.4.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: Any = 1e-08,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        super().__init__(
            hyperparameter(name, "learning_rate", learning_rate, arguments.non_negative),
            hyperparameter(name, "beta1", beta1, arguments.beta),
            hyperparameter(name, "beta2", beta2, arguments.beta),
            hyperparameter(name, "epsilon", epsilon, arguments.non_negative),
            use_locking,
            name,
        )

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        gate_gradients: int = tf.compat.v1.train.Optimizer.GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Any, tf.Variable]]:
        """Return (gradient, variable) pairs; gradients of gathered tables are tf.IndexedSlices.

        Eagerly and in a tf.function a callable loss is recorded on a tape, and gate_gradients,
        aggregation_method and colocate_gradients_with_ops are without effect.

        Args:
            loss: A scalar tensor of a graph, or a callable that returns the loss; eagerly it must
                be a callable.
            var_list: A variable or several; all trainable variables of the graph, or all that the
                callable reads, when left out.
            gate_gradients: GATE_NONE, GATE_OP or GATE_GRAPH: which gradients wait for which.
            aggregation_method: A value of tf.AggregationMethod.
            colocate_gradients_with_ops: Whether a gradient is computed where its operation is.
            grad_loss: Gradient of something further with respect to the loss; ones when left out.

        Returns:
            A list of pairs. The gradient is None where the loss does not depend on the variable.

        Raises:
            ValueError: there is no variable, or gate_gradients is none of the three.
            TypeError: var_list holds something that is no variable.
            RuntimeError: the loss is not callable and there is no graph.
        """
        if callable(loss) and not tf.compat.v1.executing_eagerly_outside_functions():
            loss = loss()  # a tape cannot watch ref variables, and it knows no gates
        gates = (self.GATE_NONE, self.GATE_OP, self.GATE_GRAPH)
        if gate_gradients not in gates:
            raise OptimizerArgumentError(
                f"{self._name}.compute_gradients: gate_gradients must be GATE_NONE, GATE_OP or "
                f"GATE_GRAPH. Got {gate_gradients!r}. Allowed are {gates}. Pass one of them."
            )
        if var_list is not None:
            # Taken apart here: an iterator would be used up before gradients are paired.
            var_list = [var_list] if tf.is_tensor(var_list) else tf.nest.flatten(list(var_list))
            for variable in var_list:
                refuse_non_variable(f"{self._name}.compute_gradients", variable)
        return super().compute_gradients(
            loss,
            var_list=var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=grad_loss,
        )

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, tf.Variable]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
    ) -> tf.Operation | None:
        """Update the variables, and return the operation that does it.

        Args:
            grads_and_vars: Pairs as `compute_gradients` returns them; pairs with None are skipped.
            global_step: Variable to increase by one after all variables have been updated.
            name: Name of the operation; the optimizer's name when left out.
            skip_gradients_aggregation: Whether gradients of replicas have been summed already.

        Returns:
            The operation in a graph. Do not rely on what is returned eagerly.

        Raises:
            OptimizerArgumentError: no pair has a gradient, or a gradient's shape is not that of
                its variable.
            TypeError: what was given are not pairs of a gradient and a variable.
            tf.errors.InvalidArgumentError: a row id is out of range; in a graph when the operation
                is run. Nothing has been updated.
        """
        where = f"{self._name}.apply_gradients"
        pairs = gradients.checked_pairs(where, grads_and_vars)
        return super().apply_gradients(
            pairs, global_step, name, skip_gradients_aggregation=skip_gradients_aggregation
        )

    def build(self, var_list: Iterable[tf.Variable]) -> None:
        """Create the state of variables now, so that it can be assigned before the first step.

        Raises:
            TypeError: var_list holds something that is no variable.
        """
        var_list = list(var_list)
        for variable in var_list:
            refuse_non_variable(f"{self._name}.build", variable)
        if var_list:
            with tf.init_scope():
                self._create_slots(var_list)
