"""Bring Keras callbacks over a kill: what they hold is saved, and a fresh set takes it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from rowstep.components.callback_attributes import Attributes, OwnState, has_own_state
from rowstep.components.checkpoints import CheckpointError
from rowstep.components.tagged_values import Decoder, Encoder
from rowstep.configs.errors import one_problem


class CallbackStates:
    """Save and load what the callbacks of a training hold.

    A callback with `get_state()` and `set_state(state)` of its own is asked; the state may be any
    value that `tagged_values` knows. Of any other callback all attributes travel that are plain
    values, arrays, variables, metrics or random generators. Functions without a name to find them
    by, modules, loggers, other callbacks and the model stay: they are what a callback was built
    with. Anything else is a gap. Values at class level, and what a closure holds, are out of reach.

    A loaded callback has the settings of the checkpoint, not those of its `__init__` of today.

    The file of a CSVLogger travels too: a resume finds it as it was, and rows of epochs that are
    run again are cut off first. A ModelCheckpoint's files do not: it writes them again. TensorBoard
    gets the events since the last checkpoint twice, under the same steps.

    Args:
        callbacks: freshly built, in the order in which they are called.

    Raises:
        ConfigError: one of them is a BackupAndRestore, which would load weights of its own.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self._callbacks = {f"{i}.{type(c).__name__}": c for i, c in enumerate(callbacks)}
        for name, callback in self._callbacks.items():
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                raise one_problem(
                    "",
                    "train.callbacks",
                    "must not load weights of their own into a training that goes on. Got "
                    f"{name}. rowstep saves and resumes by itself. Remove it.",
                )
        self._parts: dict[str, OwnState | Attributes] = {
            name: OwnState(name, c) if has_own_state(c) else Attributes(name, c, callbacks)
            for name, c in self._callbacks.items()
        }
        self._begun = False

    def gaps(self) -> list[str]:
        """Return one text for each attribute that does not travel though it may matter.

        Call it once, after `on_train_begin` or after the first `on_epoch_begin`. What cannot travel
        then may stay behind; what cannot travel and comes later makes a save fail.
        """
        self._begun = True
        return [text for part in self._parts.values() for text in part.gaps()]

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Return the arrays to save, such as `0.EarlyStopping/best_weights/3`.

        They are the callbacks' own. Copy those that a callback writes into, if they are saved while
        the training goes on; EarlyStopping replaces its arrays and never writes into them.

        Raises:
            CheckpointError: as `meta` does.
        """
        return iter(self._capture()[1].items())

    def meta(self) -> dict[str, Any]:
        """Return everything else to save, as JSON.

        Raises:
            CheckpointError: an attribute, or the state that a callback gave, cannot be saved.
        """
        return {"callbacks": self._capture()[0]}

    def check(self, meta: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of other callbacks, before anything is loaded.

        Raises:
            CheckpointError: the callbacks differ in class or position, or one of them in the
                attributes that its `__init__` sets.
        """
        if _is_of_format_1(meta):
            asked = [name for name, c in self._callbacks.items() if has_own_state(c)]
            _require_same(sorted(asked), sorted(meta))
            return
        entries = meta["callbacks"]
        _require_same(list(self._callbacks), [entry["name"] for entry in entries])
        for entry in entries:
            if differ := self._parts[entry["name"]].differences(entry):
                raise CheckpointError(
                    f"train.callbacks: {entry['name']} must be of the class that was saved. Got a "
                    f"difference in {', '.join(differ)}. Use the code of the checkpoint, or start "
                    "a new training"
                )

    def load(self, meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[str]:
        """Give every callback what it held when `meta` and `arrays` were taken.

        Call it after `on_train_begin`, which resets callbacks, and in the middle of an epoch after
        the `on_epoch_begin` that is called again.

        Returns:
            One text for each setting that is built otherwise now; the checkpoint's is used.

        Raises:
            CheckpointError: names what does not fit; no callback was changed.
        """
        self.check(meta)
        if _is_of_format_1(meta):
            for name, said in meta.items():
                self._callbacks[name].set_state(said)  # check saw that it can
            return []
        if not self._begun:
            self.gaps()
        decoder = Decoder(arrays)
        entries = [(self._parts[entry["name"]], entry) for entry in meta["callbacks"]]
        decoded = [part.decode(entry, decoder) for part, entry in entries]
        decoder.apply()
        notices = []
        for (part, entry), value in zip(entries, decoded, strict=True):
            notices += part.take(entry, value, arrays)
        return notices

    def _capture(self) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
        if not self._begun:
            self.gaps()
        encoder = Encoder()
        entries = [{"name": n, **part.entry(encoder)} for n, part in self._parts.items()]
        return entries, encoder.arrays


def _is_of_format_1(meta: Mapping[str, Any]) -> bool:
    """Return whether this is what rowstep 0.1 kept: `{name: own state}`, and nothing else."""
    return not isinstance(meta.get("callbacks"), list)


def _require_same(here: Sequence[str], saved: Sequence[str]) -> None:
    if list(here) != list(saved):
        raise CheckpointError(
            "train.callbacks: a resume needs the same callbacks in the same order. Got "
            f"{', '.join(here) or 'none'}. The checkpoint has {', '.join(saved) or 'none'}. "
            "Restore them in the config, or start a new training"
        )
