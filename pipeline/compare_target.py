"""The file that a comparison's picture is written to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rowstep.pipeline.compare_read import CompareError

SUFFIXES = (".png", ".svg", ".pdf")


def check_target(path: Path) -> None:
    """Refuse a place that the picture cannot be written to, before anything is read.

    Raises:
        CompareError: the folder is missing or takes no file, or the suffix is not one of a picture.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise CompareError(
            f"compare: --output must name a picture. Got {str(path)!r}. "
            f"Allowed: names that end in {', '.join(SUFFIXES)}. Change the name."
        )
    if not path.parent.is_dir() or path.is_dir():
        raise CompareError(
            f"compare: --output must name a file in a folder that is there. Got {str(path)!r}. "
            "Make the folder, or name another."
        )
    with writing(path) as fresh:
        fresh.touch()


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Name a file beside a path, to write to and to put in its place; none is left behind.

    Raises:
        CompareError: in the place of what the file system raises.
    """
    fresh = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield fresh
    except OSError as error:
        raise CompareError(
            f"compare: --output must be a file that can be written. Got {str(path)!r}: "
            f"{error.strerror or error}. Make room or mend its folder's permissions, or name "
            "another place."
        ) from None
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
