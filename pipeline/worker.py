"""The process that runs a pipeline for a command: `python -m rowstep.pipeline.worker RUN PID`.

TFX and TensorFlow write hundreds of lines to both output streams, some of them from C++. In a
process of their own these go to the run's log file, and the command shows only what it is told in
events.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

from rowstep import RowstepError
from rowstep.components.job import TrainingInterruptedError
from rowstep.components.progress import emit
from rowstep.components.sources import SourceData, materialise
from rowstep.configs import RunConfig
from rowstep.configs.errors import one_problem
from rowstep.pipeline.runs import Run

EXIT_FAILED, EXIT_INTERRUPTED = 1, 75  # 75 is EX_TEMPFAIL: run the same again
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the pipeline of the run folder given first, for the command whose process id follows."""
    _die_with_the_command(int(sys.argv[2]))
    run = Run.open(Path(sys.argv[1]))
    try:
        # Free a moment ago, when the command asked; whoever came since is to finish first.
        with run.workspace.occupied():
            warnings.simplefilter("ignore", FutureWarning)
            logging.getLogger("apache_beam").setLevel(logging.ERROR)
            # Bad data is found in a second, so it is looked at before TensorFlow is loaded.
            source = _materialise(run)
            emit("node", id="TensorFlow and TFX", running=True)
            from rowstep.pipeline.local import run_locally

            emit("node", id="TensorFlow and TFX", running=False)
            is_variant = run.variant is not None
            emit("result", **run_locally(run.config, run.workspace, source, is_variant=is_variant))
            return 0
    except TrainingInterruptedError as error:
        emit("interrupted", text=str(error))
        return EXIT_INTERRUPTED
    except RowstepError as error:
        traceback.print_exc()
        emit("error", text=str(error))
    except Exception as error:  # the boundary of the process: whatever it is must reach the screen
        traceback.print_exc()
        emit("error", text=f"{type(error).__name__}: {error}", unexpected=True)
    return EXIT_FAILED


def _materialise(run: Run) -> SourceData:
    emit("node", id="Data", running=True)
    source = materialise(run.config.data, run.workspace.data)
    check_columns(run.config, source)
    emit("node", id="Data", running=False, examples=source.num_examples)
    return source


def check_columns(config: RunConfig, source: SourceData) -> None:
    """Compare what a config asks for with what the data has.

    Raises:
        ConfigError: columns are missing.
    """
    asked = {*config.features, config.label, *config.evaluation.slices}
    missing = sorted(asked - set(source.columns))
    if missing:
        raise one_problem(
            "",
            "features",
            "every feature, slice and the label must be a column of the data. "
            f"Got {', '.join(missing)}. Columns: {', '.join(source.columns)}. "
            "Correct 'features', or add the column.",
        )


def _die_with_the_command(command: int) -> None:
    """Ask Linux for a SIGTERM when the command dies, so that no training goes on unseen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != command:  # it died before the request was made, seconds after the start
            sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
