"""Python values as JSON and named arrays, and back to the same types and the same bits.

JSON alone turns tuples into lists, keys into text and infinities into nothing. Here whatever JSON
cannot say is an object `{"$": <kind>, ...}`, and arrays are kept by name beside it:

    None, bool, int, str, finite float, list    as JSON has them
    {"$": "float", "is": "-inf"}                also inf and nan
    {"$": "tuple", "items": [...]}              also set, frozenset, deque (with "maxlen")
    {"$": "dict", "items": [[key, value], ...]} also OrderedDict, Counter, defaultdict; in order
    {"$": "array", "name": ...}                 the array of that name
    {"$": "number", "dtype": ..., "hex": ...}   a NumPy number, its bytes in little-endian order
    {"$": "same", "as": <path>}                 the object that was met at that path already
    {"$": "code", "name": "module:name"}        a function or class that a module holds
    {"$": "held", "type": ..., "value": ...}    what an object holds: variables, random generators
"""

from __future__ import annotations

import collections
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
import tensorflow as tf

from rowstep import RowstepError
from rowstep.components.state_holders import (
    ABSENT,
    HOLDERS,
    SHARED,
    Holder,
    find_code,
    public_name,
    shapes,
)

_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    collections.Counter: "Counter",
}


class NotPlainError(RowstepError, TypeError):
    """Say that a value has no tagged form, or that a tagged form does not fit where it goes.

    Its text is what was found, such as `a Lock`, without a place: the caller knows that.
    """


class Encoder:
    """Turn values into JSON; what is no JSON goes into `arrays`, by the path of the value.

    An object met a second time, under another path, becomes a reference to the first.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._met: dict[int, tuple[str, Any]] = {}  # the object too: so that its id stays its own

    def encode(self, value: Any, path: str) -> Any:
        """Return the tagged form.

        Raises:
            NotPlainError: the value, or one in it, has none. Nothing of it was kept.
        """
        met, arrays = dict(self._met), dict(self.arrays)
        try:
            return self._encode(value, path)
        except NotPlainError:
            self._met, self.arrays = met, arrays
            raise

    def _encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "is": repr(value)}
        if id(value) in self._met:
            return {"$": "same", "as": self._met[id(value)][0]}
        if isinstance(value, SHARED):
            self._met[id(value)] = path, value
        if kind is list:
            return self._items(value, path)
        if kind in _SEQUENCES:
            return {"$": _SEQUENCES[kind], "items": self._items(value, path)}
        if kind is collections.deque:
            return {"$": "deque", "maxlen": value.maxlen, "items": self._items(value, path)}
        if kind in _MAPPINGS:
            return {"$": _MAPPINGS[kind], "items": self._pairs(value, path)}
        if kind is collections.defaultdict:
            factory = self._encode(value.default_factory, f"{path}/#default")
            return {"$": "defaultdict", "default": factory, "items": self._pairs(value, path)}
        return self._leaf(value, path)

    def _leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            little = value.astype(value.dtype.newbyteorder("<"))
            return {"$": "number", "dtype": value.dtype.str[1:], "hex": little.tobytes().hex()}
        if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
            return {"$": "tensor", "value": self._array(np.asarray(value.numpy()), path)}
        if type(value) in (bytes, bytearray):
            return {"$": type(value).__name__, "hex": value.hex()}
        if isinstance(value, pathlib.PurePath):
            return {"$": "path", "is": str(value)}
        for holder in HOLDERS:
            if isinstance(value, holder.types):
                inner = self._encode(holder.read(value), f"{path}/#held")
                return {"$": "held", "type": type(value).__name__, "value": inner}
        if callable(value) and (name := public_name(value)):
            return {"$": "code", "name": name}
        raise NotPlainError(f"a {type(value).__name__}")

    def _array(self, value: np.ndarray, path: str) -> Any:
        stored = value.dtype.kind in "biufc" or value.dtype.name.startswith(("bfloat16", "float8"))
        if type(value) is not np.ndarray or not stored:
            raise NotPlainError(f"a {type(value).__name__} of {value.dtype}")
        self.arrays[path] = value
        return {"$": "array", "name": path}

    def _items(self, values: Any, path: str) -> list[Any]:
        return [self._encode(value, f"{path}/{i}") for i, value in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], path: str) -> list[Any]:
        pairs = []
        for i, (key, value) in enumerate(values.items()):
            step = quote(key, safe=" .:-") if type(key) is str else f"#{i}"
            pairs.append(
                [self._encode(key, f"{path}/#{i}key"), self._encode(value, f"{path}/{step}")]
            )
        return pairs


class Decoder:
    """Turn tagged forms back into values.

    Objects that hold state (variables, random generators) are not made anew: `decode` finds them in
    the value that is there now, and `apply` sets them, so that all can be checked before.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self._made: dict[str, Any] = {}
        self._waiting: list[tuple[Holder, Any, Any]] = []

    def apply(self) -> None:
        """Set what the objects found by `decode` held."""
        for holder, target, state in self._waiting:
            holder.write(target, state)

    def decode(self, form: Any, path: str, current: Any = ABSENT) -> Any:
        """Return the value of a tagged form.

        Args:
            form: what `Encoder.encode` returned for this path, perhaps by way of a JSON file.
            path: the same path as there.
            current: what is at that place now.

        Raises:
            NotPlainError: an array, an object or a function that it needs is not there.
        """
        if isinstance(form, list):
            made: list[Any] = []
            self._made[path] = made  # before its items, which may refer to it
            made += self._items(form, path, current)
            return made
        if not isinstance(form, dict):
            return form
        kind = form["$"]
        if kind == "same":
            return self._made[form["as"]]  # an earlier value, or one around this one
        if kind in ("deque", "defaultdict", *_MAPPINGS.values()):
            return self._container(kind, form, path, current)
        made_one = self._single(kind, form, path, current)
        self._made[path] = made_one
        return made_one

    def _container(self, kind: str, form: dict[str, Any], path: str, current: Any) -> Any:
        made: Any
        if kind == "deque":
            made = collections.deque(maxlen=form["maxlen"])
        elif kind == "defaultdict":
            made = collections.defaultdict(self.decode(form["default"], f"{path}/#default"))
        else:
            made = next(type_ for type_, name in _MAPPINGS.items() if name == kind)()
        self._made[path] = made
        if kind == "deque":
            made.extend(self._items(form["items"], path, current))
            return made
        for i, (key_form, value) in enumerate(form["items"]):
            key = self.decode(key_form, f"{path}/#{i}key")
            step = quote(key, safe=" .:-") if type(key) is str else f"#{i}"
            now = current.get(key, ABSENT) if isinstance(current, Mapping) else ABSENT
            made[key] = self.decode(value, f"{path}/{step}", now)
        return made

    def _single(self, kind: str, form: dict[str, Any], path: str, current: Any) -> Any:
        if kind == "held":
            return self._held(form, path, current)
        if kind == "array":
            if form["name"] not in self._arrays:
                raise NotPlainError(f"no array {form['name']}")
            # A copy: arrays that were read may be read-only, or not our own.
            return np.array(self._arrays[form["name"]])
        if kind == "tensor":
            return tf.constant(self.decode(form["value"], path))
        if kind == "number":
            return np.frombuffer(bytes.fromhex(form["hex"]), "<" + form["dtype"])[0]
        if kind == "code":
            if (code := find_code(form["name"])) is ABSENT:
                raise NotPlainError(f"no {form['name']} in the modules that are imported")
            return code
        items = self._items(form.get("items", ()), path, current)
        makers: dict[str, Callable[[], Any]] = {
            "float": lambda: float(form["is"]),
            "path": lambda: pathlib.Path(form["is"]),
            "bytes": lambda: bytes.fromhex(form["hex"]),
            "bytearray": lambda: bytearray.fromhex(form["hex"]),
            "tuple": lambda: tuple(items),
            "set": lambda: set(items),
            "frozenset": lambda: frozenset(items),
        }
        return makers[kind]()

    def _held(self, form: dict[str, Any], path: str, current: Any) -> Any:
        if type(current).__name__ != form["type"]:
            found = "nothing" if current is ABSENT else f"a {type(current).__name__}"
            raise NotPlainError(f"{found} where a {form['type']} must be to take its state back")
        holder = next(h for h in HOLDERS if isinstance(current, h.types))
        state = self.decode(form["value"], f"{path}/#held")
        if shapes(holder.read(current)) != shapes(state):
            raise NotPlainError(
                f"a {form['type']} of {shapes(holder.read(current))} "
                f"where the state has {shapes(state)}"
            )
        self._waiting.append((holder, current, state))
        return current

    def _items(self, forms: Any, path: str, current: Any) -> list[Any]:
        now = current if isinstance(current, (list, tuple)) else ()
        return [
            self.decode(form, f"{path}/{i}", now[i] if i < len(now) else ABSENT)
            for i, form in enumerate(forms)
        ]
