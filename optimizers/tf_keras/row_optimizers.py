"""The optimizers of rowstep for tf_keras: each is a recipe on tf_keras' base."""

from __future__ import annotations

import tf_keras

from rowstep.optimizers.adam_multilr import AdamMultilrRecipe
from rowstep.optimizers.lamb import LambRecipe
from rowstep.optimizers.lazy_adam import LazyAdamRecipe
from rowstep.optimizers.tf_keras.base import TfKerasRowOptimizer

__all__ = ["LAMB", "AdamMultilr", "LazyAdam"]


@tf_keras.saving.register_keras_serializable(package="rowstep")
class LazyAdam(LazyAdamRecipe, TfKerasRowOptimizer):  # noqa: D101  # the recipe says it
    __doc__ = LazyAdamRecipe.__doc__


@tf_keras.saving.register_keras_serializable(package="rowstep")
class LAMB(LambRecipe, TfKerasRowOptimizer):  # noqa: D101  # the recipe says it
    __doc__ = LambRecipe.__doc__


@tf_keras.saving.register_keras_serializable(package="rowstep")
class AdamMultilr(AdamMultilrRecipe, TfKerasRowOptimizer):  # noqa: D101  # the recipe says it
    __doc__ = AdamMultilrRecipe.__doc__
