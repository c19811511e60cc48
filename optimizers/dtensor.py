"""The DTensor optimizer under the name that code for `tf.keras.dtensor` looks for.

from rowstep.optimizers.dtensor import Adam      was tf.keras.dtensor.experimental.optimizers
"""

from __future__ import annotations

from rowstep.optimizers.mesh_adam import Adam
from rowstep.optimizers.mesh_lookup import lookup
from rowstep.optimizers.mesh_options import EmaOption, GradientsClipOption

__all__ = ["Adam", "EmaOption", "GradientsClipOption", "lookup"]
