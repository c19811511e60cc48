"""Optimizer state of other systems, and back: Adam and LAMB, as lists, dicts and files.

A state is what `named_state` of a rowstep optimizer returns and `load_named_state` takes:
iterations, perhaps learning_rate, and `<variable path>/<slot>`. The others hold it so:

    legacy_keras  [iterations, all momentum, all velocity (, all velocity_hat)]
                  tf_keras.optimizers.legacy, tf.keras before 2.11, Keras before 2.3, TensorFlow
                  Addons, the Model Garden's LAMB, Merlin's LazyAdam
    tf_keras      [iterations (, all average), momentum and velocity by variable
                  (, all velocity_hat)]
                  tf_keras.optimizers, tf.keras from 2.11 to 2.15
    keras3        the same with learning_rate after iterations, unless a schedule makes it
                  keras.optimizers Adam, AdamW, Lamb
    tf1           a dict: `<variable>/Adam`, `<variable>/Adam_1`, `beta1_power`, `beta2_power`
                  tf.compat.v1.train.AdamOptimizer, tf.contrib.opt.LazyAdamOptimizer

There is no more in a list than an order. `variables` are therefore the variables that the state is
for, in the order in which the other optimizer was given its variables. A list in another order is
noticed where shapes differ, or where a negative number lands in a second moment.

All converters check everything before they return anything, return copies, and take and make no
learning rate where the other system keeps none: a rowstep optimizer with a plain learning rate
needs one in its state, so give it as `learning_rate`.

Options of rowstep that count by row (use_ema, idle_decay, ...) need their counters in the state:
`with_row_counters` adds them. A state goes back as long as all rows are at the last step; where
some are behind, the other system has no place for that, and the error names the counter.

    state = converters.from_tf_keras(old.get_weights(), variables, learning_rate=0.001)
    optimizer.build(variables)
    optimizer.load_named_state(state)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rowstep.optimizers.converters.checks import ROW_COUNTERS, Array, targets
from rowstep.optimizers.converters.lists import (
    from_keras3,
    from_legacy_keras,
    from_tf_keras,
    to_keras3,
    to_legacy_keras,
    to_tf_keras,
)
from rowstep.optimizers.converters.readers import (
    from_tf1_checkpoint,
    from_tf_checkpoint,
    read_keras_file,
)
from rowstep.optimizers.converters.tf1 import from_tf1, to_tf1
from rowstep.optimizers.errors import OptimizerArgumentError
from rowstep.optimizers.state import listing

__all__ = [
    "from_keras3",
    "from_legacy_keras",
    "from_tf1",
    "from_tf1_checkpoint",
    "from_tf_checkpoint",
    "from_tf_keras",
    "read_keras_file",
    "to_keras3",
    "to_legacy_keras",
    "to_tf1",
    "to_tf_keras",
    "with_row_counters",
]


def with_row_counters(
    state: Mapping[str, Any], variables: Iterable[Any], counters: Sequence[str]
) -> dict[str, Array]:
    """Return a state with row counters added, each at the state's iterations.

    Some options of lazy optimizers count by row: average_step (use_ema), last_step (idle_decay),
    num_visits (bias_correction by visits). An optimizer that moved every row at every step has all
    of them at its iterations.

    Args:
        state: What a converter returned.
        variables: Those that get counters: variables, or (path, shape).
        counters: Which of "average_step", "last_step" and "num_visits".

    Raises:
        OptimizerArgumentError: there is no such counter, or there are no variables.
    """
    where = "with_row_counters"
    unknown = [counter for counter in counters if counter not in ROW_COUNTERS]
    if unknown:
        raise OptimizerArgumentError(
            f"{where}: counters must be of {', '.join(ROW_COUNTERS)}. Got {listing(unknown)}. "
            "Correct the name."
        )
    result = dict(state)
    for path, shape, _ in targets(where, variables):
        for counter in counters:
            by_row = shape[:1] + (1,) * len(shape[1:])
            result[f"{path}/{counter}"] = np.full(by_row, state["iterations"], np.int64)
    return result
