"""What travels of one callback: its attributes, or the state that it says it has."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from rowstep.components.checkpoints import CheckpointError
from rowstep.components.csv_log import is_remote, put_back, saved_rows
from rowstep.components.tagged_values import Decoder, Encoder, NotPlainError

_PLUMBING = frozenset({"model", "_model", "params", "_params", "validation_data"})
# What callbacks of Keras make again by themselves; none of it decides how a training goes on.
_MADE_AGAIN: dict[type, frozenset[str]] = {
    keras.callbacks.CSVLogger: frozenset({"writer", "csv_file", "append_header"}),
    keras.callbacks.ProgbarLogger: frozenset({"progbar"}),
    keras.callbacks.TensorBoard: frozenset(
        {
            "_writers",
            "_prev_summary_state",
            "_summary_module",
            "_batch_trace_context",
            "_is_tracing",
            "_profiler_started",
        }
    ),
}
_CONFIGURATION = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
    functools.partial,
    np.ufunc,
    logging.Logger,
    keras.optimizers.schedules.LearningRateSchedule,
)
_STAYS = {"$": "stays"}


class OwnState:
    """Ask a callback that offers `get_state()` and `set_state(state)`."""

    def __init__(self, name: str, callback: Any) -> None:
        self._name, self._callback = name, callback

    def gaps(self) -> list[str]:
        """Return nothing: the callback answers for itself."""
        return []

    def entry(self, encoder: Encoder) -> dict[str, Any]:
        """Return what to save, as JSON."""
        try:
            state = encoder.encode(self._callback.get_state(), f"{self._name}/state")
        except NotPlainError as error:
            raise _cannot_be_saved(f"{self._name}.get_state()", error) from error
        return {"state": state}

    def differences(self, entry: Mapping[str, Any]) -> list[str]:
        """Name what makes this another callback than the one that `entry` is of."""
        return [] if "state" in entry else ["get_state", "set_state"]

    def decode(self, entry: Mapping[str, Any], decoder: Decoder) -> Any:
        """Return what `take` needs; nothing is changed."""
        return _decode(decoder, entry["state"], f"{self._name}/state", None)

    def take(self, entry: Mapping[str, Any], value: Any, arrays: Mapping[str, Any]) -> list[str]:
        """Give the callback its state."""
        self._callback.set_state(value)
        return []


class Attributes:
    """Carry the attributes of a callback that says nothing about its state."""

    def __init__(self, name: str, callback: Any, callbacks: Sequence[Any]) -> None:
        self._name, self._callback, self._callbacks = name, callback, callbacks
        forms, stays = self._split(Encoder())
        self._built = forms | dict.fromkeys(stays, _STAYS)
        self._staying: dict[str, Any] = {}

    def gaps(self) -> list[str]:
        """Return a text for each attribute that stays behind, and let it stay from now on."""
        _, stays = self._split(Encoder())
        now, texts = _attributes(self._callback), []
        for attribute, found in stays.items():
            self._staying[attribute] = now[attribute]
            if not self._is_configuration(now[attribute]):
                texts.append(
                    f"train.callbacks: {self._name}.{attribute} must be a plain value to be saved. "
                    f"Got {found}. A resumed training begins with a new one. Give "
                    f"{type(self._callback).__name__} get_state() and set_state(state) to keep it."
                )
        if isinstance(self._callback, keras.callbacks.CSVLogger) and is_remote(self._callback):
            texts.append(
                f"train.callbacks: {self._name}.filename must be on a local disk to be put back. "
                f"Got {self._callback.filename}. A resumed training writes the rows since its last "
                "checkpoint again, and without append begins the file anew. Log to a local file."
            )
        return texts

    def entry(self, encoder: Encoder) -> dict[str, Any]:
        """Return what to save, as JSON.

        Raises:
            CheckpointError: an attribute stays behind that `gaps` did not see.
        """
        forms, stays = self._split(encoder)
        for attribute, found in stays.items():
            self._require_known(attribute, found)
        if isinstance(self._callback, keras.callbacks.CSVLogger):
            rows = saved_rows(self._callback)
            if rows is not None:
                encoder.arrays[f"{self._name}/csv_file"] = rows
        # Pairs, because JSON objects may be sorted on the way, and references point backwards.
        pairs = [[attribute, form] for attribute, form in forms.items()]
        return {"attributes": pairs, "stays": sorted(stays), "built": self._built}

    def differences(self, entry: Mapping[str, Any]) -> list[str]:
        """Name what makes this another callback than the one that `entry` is of."""
        if "built" not in entry:
            return ["get_state", "set_state"]
        return sorted(set(entry["built"]) ^ set(self._built))

    def decode(self, entry: Mapping[str, Any], decoder: Decoder) -> Any:
        """Return what `take` needs; nothing is changed."""
        now = _attributes(self._callback)
        return {
            attribute: _decode(decoder, form, f"{self._name}/{attribute}", now.get(attribute))
            for attribute, form in entry["attributes"]
        }

    def take(self, entry: Mapping[str, Any], value: Any, arrays: Mapping[str, Any]) -> list[str]:
        """Set the attributes; return a text for each setting that is built otherwise now."""
        for attribute, held in value.items():
            setattr(self._callback, attribute, held)
        for attribute in set(entry["built"]) - set(value) - set(entry["stays"]):
            delattr(self._callback, attribute)  # as the training had done
        if isinstance(self._callback, keras.callbacks.CSVLogger):
            put_back(self._callback, arrays.get(f"{self._name}/csv_file"))
        return [
            f"train.callbacks: {self._name}.{attribute} must stay while a training goes on. "
            f"Got {_setting(self._built[attribute])}, and {_setting(then)} when it began. "
            "The checkpoint's value is used. Start a new training to change it."
            for attribute, then in entry["built"].items()
            if self._built[attribute] != then
            and _is_setting(self._built[attribute])
            and _is_setting(then)
        ]

    def _split(self, encoder: Encoder) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the form of each attribute that travels, and what the others were found to be."""
        forms, stays = {}, {}
        for attribute, value in _attributes(self._callback).items():
            if self._is_of_the_training(value):
                stays[attribute] = "a part of the training"
                continue
            try:
                forms[attribute] = encoder.encode(value, f"{self._name}/{attribute}")
            except NotPlainError as error:
                stays[attribute] = str(error)
        return forms, stays

    def _is_of_the_training(self, value: Any) -> bool:
        """Return whether a value is saved elsewhere: another callback, the model or a part of it.

        A big table that a callback only looks at must not be saved a second time.
        """
        parts: list[Any] = list(self._callbacks)
        model = self._callback.model
        if model is not None:
            parts += [model, *model.layers, *model.variables]
            if (optimizer := getattr(model, "optimizer", None)) is not None:
                parts += [optimizer, *optimizer.variables]
        return any(value is part for part in parts)

    def _is_configuration(self, value: Any) -> bool:
        return isinstance(value, _CONFIGURATION) or self._is_of_the_training(value)

    def _require_known(self, attribute: str, found: str) -> None:
        value = _attributes(self._callback)[attribute]
        known = attribute in self._staying
        if known and self._is_configuration(self._staying[attribute]):
            # It was no gap because it is what the callback was built with: then it must remain so.
            known = value is self._staying[attribute]
        if not known and not self._is_of_the_training(value):
            raise _cannot_be_saved(f"{self._name}.{attribute}", found)


def has_own_state(callback: Any) -> bool:
    """Return whether a callback says itself what its state is."""
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _attributes(callback: Any) -> dict[str, Any]:
    """Return what an instance holds, also in `__slots__`, but for Keras' plumbing."""
    left_out = set(_PLUMBING)
    for type_, names in _MADE_AGAIN.items():
        if isinstance(callback, type_):
            left_out |= names
    slots: list[str] = []
    for type_ in type(callback).__mro__:
        listed = vars(type_).get("__slots__", ())
        slots += [listed] if isinstance(listed, str) else listed
    found = {n: getattr(callback, n) for n in slots if hasattr(callback, n)} | vars(callback)
    return {name: value for name, value in found.items() if name not in left_out}


def _decode(decoder: Decoder, form: Any, path: str, now: Any) -> Any:
    try:
        return decoder.decode(form, path, now)
    except NotPlainError as error:
        raise CheckpointError(
            f"train.callbacks: {path.replace('/', '.')} must find its place in the callback. "
            f"Got {error}. No callback was changed. Use the code of the checkpoint, and make in "
            "__init__ what takes its state back"
        ) from error


def _cannot_be_saved(what: str, found: object) -> CheckpointError:
    return CheckpointError(
        f"train.callbacks: {what} must hold a plain value to be saved. Got {found} in the middle "
        "of a training. Make it in on_train_begin if it may stay behind, or give the callback "
        "get_state() and set_state(state)"
    )


def _is_setting(form: Any) -> bool:
    if isinstance(form, dict):
        return form["$"] in ("float", "path", "code")
    return not isinstance(form, list)


def _setting(form: Any) -> str:
    return repr(form.get("is", form.get("name")) if isinstance(form, dict) else form)
