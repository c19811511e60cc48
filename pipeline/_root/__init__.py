"""Train recommender models inside TFX with optimizers that touch only the rows a batch touches.

The rooms are `rowstep.optimizers`, `rowstep.components`, `rowstep.pipeline` and `rowstep.configs`.
Importing this package costs nothing: TensorFlow and TFX come in with the room that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Checkpoint", "RowstepError", "__version__"]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from rowstep.components.artifacts import Checkpoint


class RowstepError(Exception):
    """Be the base of every error that rowstep raises on purpose.

        RowstepError
        +-- ConfigError (ValueError)             a config file or an override does not fit
        +-- DataError (ValueError)               an input file is missing, doctored or malformed
        +-- StateMismatchError (ValueError)      optimizer or model state does not fit its variables
        +-- OptimizerArgumentError (ValueError)  an optimizer's argument or input does not fit
        +-- UnknownRunError (ValueError)         there is no such run to go on with
        +-- CheckpointError (RuntimeError)       a checkpoint cannot be written, read or trusted
        +-- TrackingError (RuntimeError)         a tracking URI or journal cannot be used
        +-- DivergedError (RuntimeError)         the loss stopped being a finite number
        +-- TrainingInterruptedError (RuntimeError)  a signal came; a checkpoint was written
        +-- WorkspaceInUseError (RuntimeError)   another run of the same pipeline is going on

    Every message has one form:
    `<where>: <what must hold>. Got <value>. <allowed or nearest>. <what to do>.`
    """


def __getattr__(name: str) -> Any:
    # Kubeflow's entry point resolves the artifact type `rowstep.Checkpoint` from the package root;
    # loading it lazily keeps `import rowstep` free of TFX.
    if name == "Checkpoint":
        from rowstep.components.artifacts import Checkpoint

        return Checkpoint
    raise AttributeError(f"module 'rowstep' has no attribute {name!r}")
