"""The DTensor optimizer under the name that code for `tf.keras.dtensor` looks for.

from rowstep.optimizers.dtensor import Adam      was tf.keras.dtensor.experimental.optimizers
"""

from __future__ import annotations

from rowstep.optimizers.dtensor.adam import Adam
from rowstep.optimizers.dtensor.lookup import lookup
from rowstep.optimizers.dtensor.options import EmaOption, GradientsClipOption

__all__ = ["Adam", "EmaOption", "GradientsClipOption", "lookup"]
