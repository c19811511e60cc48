"""What is tortured: ways to keep the state of a training in a folder; no TensorFlow here.

All of them keep the same arrays, so that every harness can compare what comes back with what must.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rowstep.components.checkpoints import CheckpointStore

Arrays = Mapping[str, np.ndarray]


def arrays_of(step: int, num_rows: int) -> dict[str, np.ndarray]:
    """Return what a save of this step holds: weights and slots, no two steps with a common number.

    Weights and slots of a table [rows, 16] and of a layer, with the iterations first.
    """
    rng = np.random.default_rng(step)
    table = rng.random((3, num_rows, 16), dtype=np.float32) + 2.0 * step
    bias = rng.random((3, 7), dtype=np.float32) + 2.0 * step
    names = ("", "/momentum", "/velocity")
    found: dict[str, np.ndarray] = {"iterations": np.array(step, dtype=np.int64)}
    for name, rows, few in zip(names, table, bias, strict=True):
        found |= {f"table{name}": rows, f"bias{name}": few}
    return found


def same(left: Arrays, right: Arrays) -> bool:
    """Compare names, types, shapes and bits."""
    return left.keys() == right.keys() and all(
        (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        for a, b in ((np.asarray(left[name]), np.asarray(right[name])) for name in left)
    )


class Found(NamedTuple):
    """What a start finds in a folder; a damaged one may also raise whatever its reader raises."""

    step: int
    """0 where there is nothing."""
    arrays: Arrays | None
    problems: list[str]
    """What the system said about it."""


class Writer(Protocol):
    """Save one state after the other; when `save` returns, the step is acknowledged."""

    def save(self, step: int, arrays: Arrays) -> None: ...


class System(Protocol):
    """One way to keep state."""

    name: str
    crash_points: bool
    """Whether Python sees its calls to the file system, in folders that name their state."""

    def version(self) -> str: ...

    def read(self, root: Path, num_rows: int) -> Found:
        """Find the newest state as a start of a training would."""

    def writing(self, root: Path, num_rows: int) -> Any:
        """Return a context manager that gives a Writer."""


class Rowstep:
    """The store of this package."""

    name = "rowstep"
    crash_points = True

    def version(self) -> str:
        import rowstep

        return f"rowstep {rowstep.__version__}"

    def read(self, root: Path, num_rows: int) -> Found:
        store = CheckpointStore(root)
        saved = store.latest()
        if saved is None:
            return Found(0, None, store.problems)
        parts = [pair for group in saved.groups for pair in saved.arrays(group)]
        return Found(saved.step, dict(parts), store.problems)

    @contextmanager
    def writing(self, root: Path, num_rows: int) -> Iterator[Writer]:
        store = CheckpointStore(root)

        class Saver:
            def save(self, step: int, arrays: Arrays) -> None:
                slots = [name for name in arrays if "/" in name or name == "iterations"]
                groups = {
                    "model": [(name, arrays[name]) for name in arrays if name not in slots],
                    "optimizer": [(name, arrays[name]) for name in slots],
                }
                store.save(step, groups, {"step": step})

        with store.lock(wait_seconds=10):
            yield Saver()


class Savez:
    """`numpy.savez` of the list that get_weights gives, over the file of the last save."""

    name = "np.savez, in place"
    crash_points = False

    def version(self) -> str:
        return f"NumPy {np.__version__}"

    def read(self, root: Path, num_rows: int) -> Found:
        if not (root / "state.npz").exists():
            return Found(0, None, [])
        names = list(arrays_of(0, 1))
        with np.load(root / "state.npz") as file:
            arrays = {name: file[f"arr_{index}"] for index, name in enumerate(names)}
        return Found(int(arrays["iterations"]), arrays, [])

    @contextmanager
    def writing(self, root: Path, num_rows: int) -> Iterator[Writer]:
        class Saver:
            def save(self, step: int, arrays: Arrays) -> None:
                np.savez(root / "state.npz", *arrays.values())

        yield Saver()
