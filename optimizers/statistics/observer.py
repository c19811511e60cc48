"""The statistics of one step, computed beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.sparse_rows import check_row_ids
from rowstep.optimizers.statistics.observed import (
    PerVariable,
    innermost,
    is_shown,
    largest_name,
    observed_variables,
    short_name,
)
from rowstep.optimizers.statistics.touched import (
    Touched,
    flat,
    grouped,
    joint_norm,
    norm,
    touched_by,
)
from rowstep.optimizers.statistics.trust_ratios import Ratios, median, ratio_summary, watched
from rowstep.optimizers.variables import native_variable, variable_path

__all__ = ["StepObserver"]


class StepObserver:
    """Apply gradients as the optimizer does, and say what the step did.

    Over what the step touches, which is the rows that a sparse gradient names and the whole of a
    variable with a dense one:

        grad_norm = ||g||                   repeated rows summed, before clipping
        param_norm = ||w||                  before the step
        update_norm = ||w' - w||            w' the weights after it
        update_ratio = update_norm / param_norm, 0 where param_norm is 0

    A step that only accumulates gradients updates nothing. An optimizer that moves every row of a
    table, such as Keras' Adam, moves more than is measured here: of a sparse gradient only the rows
    that it names are looked at, whatever the optimizer is. Where gradients accumulate, an update
    touches the rows of all its calls; of Keras' own optimizers only the last call is seen.

    Weights and slots are, to the bit, what `optimizer.apply` alone makes of them; not so within a
    function compiled by XLA, which rounds otherwise wherever it joins other operations. Works for
    every Keras 3 optimizer, on one replica.

    Args:
        optimizer: A built optimizer.
        per_variable: Whether to go into single variables, or the names of those to go into.

    Raises:
        StateMismatchError: the optimizer is not built.

    Cost: O(R * D) for the R rows of sparse gradients. A variable with a dense gradient is held
    twice for the time of the step. Where gradients accumulate, a scan of V numbers for each table.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, *, per_variable: PerVariable = False
    ) -> None:
        self.optimizer = optimizer
        self.per_variable = per_variable
        variables = observed_variables(optimizer)
        self._by_id = {id(variable.weights): variable for variable in variables}
        self._index = {variable.path: index for index, variable in enumerate(variables)}
        self._names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the statistics; none before `apply` has been traced."""
        return self._names

    def apply(self, grads: Iterable[Any], variables: Iterable[Any]) -> tf.Tensor:
        """Apply gradients by `optimizer.apply`, and return the statistics of this step.

        Args:
            grads: One gradient for each variable: a tensor, tf.IndexedSlices or None.
            variables: The variables, all of which the optimizer was built on.

        Returns:
            float32 [len(names)].

        Raises:
            OptimizerArgumentError: a variable is not the optimizer's, or there are replicas.
            Exception: whatever `optimizer.apply` raises.
        """
        grads, variables = list(grads), list(variables)
        self._refuse_replicas()
        touched = self._touched(grads, variables)
        before = [entry.read(entry.variable.weights) for entry in touched]
        num_updates = self._num_updates()
        with watched(self.optimizer) as ratios:
            self.optimizer.apply(grads, variables)
        moves = tf.not_equal(self._num_updates(), num_updates)
        after = [entry.read(entry.variable.weights) for entry in touched]
        values = self._norms(touched, before, after)
        values |= _of_rows([entry for entry in touched if entry.row_ids is not None])
        values |= self._of_ratios(ratios, moves)
        values |= self._of_rows_by_variable(touched)
        self._names = tuple(values)
        return tf.stack([tf.cast(value, tf.float32) for value in values.values()])

    def _refuse_replicas(self) -> None:
        num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if num_replicas > 1:
            raise OptimizerArgumentError(
                f"{self.optimizer.name}, StepObserver: there must be one replica. "
                f"Got {num_replicas}. A replica sees only its share of the gradients. "
                "Apply without observing, and use scan."
            )

    def _touched(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Touched]:
        scale = _loss_scale(self.optimizer)
        touched = []
        for gradient, variable in zip(grads, variables, strict=True):
            known = self._by_id.get(id(native_variable(variable)))
            if known is None:
                raise OptimizerArgumentError(
                    f"{self.optimizer.name}, StepObserver: variables must be those that the "
                    f"optimizer was built on. Got {variable_path(variable)}. "
                    "Make the observer after the optimizer is built on all of them."
                )
            if isinstance(gradient, tf.IndexedSlices) and tf.executing_eagerly():
                # The rows are read before the optimizer could refuse them.
                where = f"{self.optimizer.name}, {known.path}"
                check_row_ids(gradient.indices, known.weights.shape[0], where)
            if gradient is not None or known.pending is not None:
                touched.append(touched_by(gradient, known, scale))
        return touched

    def _num_updates(self) -> tf.Tensor:
        # Where gradients accumulate, Keras counts updates here and not calls.
        return tf.identity(native_variable(innermost(self.optimizer).iterations))

    def _norms(
        self, touched: list[Touched], before: list[tf.Tensor], after: list[tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        shown = {v.name for v, *_ in touched if is_shown(v.name, self.per_variable)}
        groups = grouped(touched, shown)
        gradients = [flat([entry.gradient for entry in touched], group) for group in groups]
        old, new = ([flat(weights, group) for group in groups] for weights in (before, after))
        weights = [norm(w) for w in old]
        updates = [norm(b - a) for a, b in zip(old, new, strict=True)]
        nonfinite = [tf.math.count_nonzero(tf.logical_not(tf.math.is_finite(g))) for g in gradients]
        param_norm, update_norm = joint_norm(weights), joint_norm(updates)
        values = {
            "opt/global/grad_norm": joint_norm([norm(g) for g in gradients]),
            "opt/global/param_norm": param_norm,
            "opt/global/update_norm": update_norm,
            "opt/global/update_ratio": tf.math.divide_no_nan(update_norm, param_norm),
            "opt/global/nonfinite": tf.add_n(nonfinite),
        }
        for group, weight, update in zip(groups, weights, updates, strict=True):
            name = touched[group[0]].variable.name
            if name in shown:
                values[f"opt/update_ratio/{name}"] = tf.math.divide_no_nan(update, weight)
        return values

    def _of_ratios(
        self, ratios: Mapping[int, list[Ratios]], moves: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        if not any(ratios.values()):
            return {}
        # Between two updates the step computes a ratio and does not use it.
        seen = {index: _where_moving(entries, moves) for index, entries in ratios.items()}
        everything = [entry for entries in seen.values() for entry in entries]
        values = {
            f"opt/trust_ratio_summary/{name}": value
            for name, value in ratio_summary(everything).items()
        }
        for variable in self._by_id.values():
            entries = seen.get(self._index[variable.path])
            if entries and is_shown(variable.name, self.per_variable):
                own = tf.concat([entry.ratios for entry in entries], axis=0)
                values[f"opt/trust_ratio/{variable.name}"] = median(own)
        return values

    def _of_rows_by_variable(self, touched: list[Touched]) -> dict[str, tf.Tensor]:
        return {
            f"opt/touched_frac/{entry.variable.name}": entry.num_rows()
            / int(entry.variable.weights.shape[0])
            for entry in touched
            if entry.row_ids is not None and is_shown(entry.variable.name, self.per_variable)
        }


def _of_rows(sparse: list[Touched]) -> dict[str, tf.Tensor]:
    if not sparse:
        return {}
    num_touched = tf.add_n([entry.num_rows() for entry in sparse])
    num_rows = sum(int(entry.variable.weights.shape[0]) for entry in sparse)
    values = {
        "opt/sparse/touched_rows": num_touched,
        "opt/sparse/touched_frac": num_touched / num_rows,
    }
    for slot in dict.fromkeys(slot for entry in sparse for slot in entry.variable.slots):
        rows = []
        for entry in sparse:
            source = entry.variable.slots.get(slot)
            if source is not None and source.shape[:1] == entry.variable.weights.shape[:1]:
                rows.append(entry.read(source))
        if rows:
            values |= _of_slot(slot, rows)
    return values


def _of_slot(slot: str, rows: list[tf.Tensor]) -> dict[str, tf.Tensor]:
    size = tf.cast(tf.add_n([tf.size(x, out_type=tf.int64) for x in rows]), tf.float64)
    rms = tf.math.divide_no_nan(joint_norm([norm(x) for x in rows]), tf.sqrt(size))
    # reduce_max of no rows is -inf.
    largest = [tf.maximum(tf.cast(tf.reduce_max(tf.abs(x)), tf.float64), 0.0) for x in rows]
    stem = f"opt/touched_{short_name(slot)}"
    return {f"{stem}/rms": rms, f"{stem}/{largest_name(slot)}": tf.reduce_max(tf.stack(largest))}


def _where_moving(entries: list[Ratios], moves: tf.Tensor) -> list[Ratios]:
    return [
        Ratios(
            tf.where(moves, entry.ratios, tf.ones_like(entry.ratios)),
            tf.logical_and(moves, entry.clipped),
        )
        for entry in entries
    ]


def _loss_scale(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return what gradients are divided by before the optimizer's step sees them."""
    scale = 1.0
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale *= tf.convert_to_tensor(native_variable(optimizer.dynamic_scale))
        optimizer = optimizer.inner_optimizer
    factor = getattr(optimizer, "loss_scale_factor", None)
    return scale if factor is None else scale * factor
