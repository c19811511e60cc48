"""What a store says when it must refuse."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from rowstep.components.checkpoints.array_files import CheckpointError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)


def second_writer(where: str, holder: str) -> CheckpointError:
    """Say that another run holds the lock."""
    return CheckpointError(
        f"{where}: only one run may write checkpoints here. Got a second one; the first is "
        f"{holder}. Wait for it to end, stop it, or use another folder."
    )


def unwritable(where: str, error: OSError) -> CheckpointError:
    """Say that a root cannot be used."""
    if error.errno in _NO_ROOM:
        remedy = "Make room, or choose another folder."
    else:
        remedy = "Choose another folder, or give this user the right to write there."
    return CheckpointError(
        f"{where}: the checkpoint folder must be writable. Got {error}. {remedy}"
    )


def unreadable(where: str, error: OSError) -> CheckpointError:
    """Say that nobody knows what is there; which is not the same as that nothing is."""
    return CheckpointError(
        f"{where}: the checkpoint must be readable. Got {error}. Give this user the right to "
        "read it, or look at the disk or the connection."
    )


def not_locked(where: str) -> CheckpointError:
    """Say that a save was tried without the lock."""
    return CheckpointError(
        f"{where}: save: the writer must hold the lock. Got a save without it. "
        "Save inside 'with store.lock():'."
    )


def wrong_step(where: str, step: object, newest: int) -> CheckpointError:
    """Say that a step cannot be the next one."""
    return CheckpointError(
        f"{where}: save: the step must be an integer that is not below the newest saved one. "
        f"Got {step!r}. Allowed: {newest} or more. Resume from the latest checkpoint, or "
        "use another folder."
    )


def not_saved(where: str, step: int, error: OSError) -> CheckpointError:
    """Say that the disk did not take a checkpoint."""
    needs, remedy = "be written", "Check the disk"
    if error.errno in _NO_ROOM:
        needs, remedy = "fit on the disk", "Make room"
    elif error.errno in _NO_RIGHT:
        remedy = "Give this user the right to write there"
    return CheckpointError(
        f"{where}: the checkpoint of step {step} must {needs}. Got {error}. "
        f"Earlier checkpoints are untouched. {remedy}, then resume."
    )


def nothing_good(where: str, told: Sequence[str]) -> CheckpointError:
    """Say that there were checkpoints, and that none of them can be used."""
    return CheckpointError(
        f"{where}: one checkpoint at least must be good. Got none: {'; '.join(told)}. "
        "Bring back a copy of one; or delete or rename this folder to start afresh, on purpose."
    )
