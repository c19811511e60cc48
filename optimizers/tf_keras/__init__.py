"""The optimizers of `rowstep.optimizers` for models of tf_keras.

LazyAdam, LAMB and AdamMultilr take the same arguments and have the same methods, and their
`named_state` has the same keys: what one Keras saved, the other one loads.
"""

from __future__ import annotations

from rowstep.optimizers.tf_keras.row_optimizers import LAMB, AdamMultilr, LazyAdam

__all__ = ["LAMB", "AdamMultilr", "LazyAdam"]
