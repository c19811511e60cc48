"""Optimizers that touch only the rows a batch touches, their state, and a layer to look rows up.

    LazyAdam, LAMB, AdamMultilr   Keras 3 optimizers; StepOptions are the options of all of them
    LazyAdamOptimizer             LazyAdam for tf.compat.v1
    tf_keras.LazyAdam, ...        the same for tf_keras, in a module of that name
    dtensor.Adam                  Adam for DTensor meshes, on tf_keras
    OPTIMIZERS                    the optimizers by the name that configs use
    ADAPTERS, optimizer_class     all optimizers by adapter and name
    Embedding                     a Keras 3 layer that gathers rows without reading the table
    doctor, Finding               what makes the training of a model dense or wrong
    converters                    state of other systems' optimizers, and back
    slot_stats, collect           statistics of optimizer state, as tensors or as numbers
    StepObserver                  statistics of a step, computed beside it; more in `statistics`
    StateMismatchError            state that does not fit
    OptimizerArgumentError        an argument that does not fit

`rowstep.optimizers.state` holds state access by name for any Keras 3 optimizer. The formulas are in
`update_rules`, what they must compute is in `reference`.
"""

from __future__ import annotations

if __name__ == "optimizers":
    raise ImportError(
        "optimizers: import it as 'rowstep.optimizers'. Got 'import optimizers' from inside the "
        "checkout, which would load every class twice. Install rowstep (make setup) and use the "
        "full name."
    )

from rowstep.optimizers.adam_multilr import AdamMultilr
from rowstep.optimizers.diagnosis import Finding, doctor
from rowstep.optimizers.embedding import Embedding
from rowstep.optimizers.errors import OptimizerArgumentError, StateMismatchError
from rowstep.optimizers.lamb import LAMB
from rowstep.optimizers.lazy_adam import LazyAdam
from rowstep.optimizers.options import StepOptions
from rowstep.optimizers.registry import ADAPTERS, optimizer_class
from rowstep.optimizers.statistics import StepObserver, collect, slot_stats
from rowstep.optimizers.v1 import LazyAdamOptimizer

__all__ = [
    "ADAPTERS",
    "LAMB",
    "OPTIMIZERS",
    "AdamMultilr",
    "Embedding",
    "Finding",
    "LazyAdam",
    "LazyAdamOptimizer",
    "OptimizerArgumentError",
    "StateMismatchError",
    "StepObserver",
    "StepOptions",
    "collect",
    "doctor",
    "optimizer_class",
    "slot_stats",
]

OPTIMIZERS: dict[str, type[LAMB] | type[AdamMultilr] | type[LazyAdam]] = {
    "adam_multilr": AdamMultilr,
    "lamb": LAMB,
    "lazy_adam": LazyAdam,
}
"""The optimizers by the name that configs use."""
