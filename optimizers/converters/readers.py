"""Adam and LAMB state from files of other systems: checkpoints of TensorFlow, files of Keras."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf

from rowstep.optimizers.converters.beta_powers import steps_of_powers
from rowstep.optimizers.converters.checks import Array, Target, checked_state, refuse, targets
from rowstep.optimizers.converters.lists import interleaved_state
from rowstep.optimizers.converters.tf1 import from_tf1
from rowstep.optimizers.state import listing

__all__ = ["from_tf1_checkpoint", "from_tf_checkpoint", "read_keras_file"]

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_COUNTERS = ("_iterations", "iter", "beta1_power")


class _Checkpoint(Mapping[str, Any]):
    """Read arrays of a checkpoint by name, each when it is asked for."""

    def __init__(self, prefix: str | Path) -> None:
        self._reader = tf.train.load_checkpoint(str(prefix))
        self.shapes = {
            name.removesuffix(_VALUE): tuple(shape)
            for name, shape in self._reader.get_variable_to_shape_map().items()
        }

    def __getitem__(self, name: str) -> Array:
        stored = name if self._reader.has_tensor(name) else name + _VALUE
        return np.asarray(self._reader.get_tensor(stored))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes


def from_tf1_checkpoint(
    prefix: str | Path, variables: Iterable[Any], **options: Any
) -> dict[str, Array]:
    """Return the Adam state in a checkpoint that a TensorFlow 1 Saver wrote.

    Args:
        prefix: The checkpoint without ".index", or its directory for the latest one.
        variables: Whose state it is: variables, or (path, shape).
        **options: The keyword arguments of `from_tf1`. A scalar integer `global_step` in the
            checkpoint is taken when they do not give one.

    Returns:
        The state by key.

    Raises:
        StateMismatchError: something is not there, is there more than once, or does not fit.
        OptimizerArgumentError: variables or betas are not such.

    Cost: reads the moments of the variables and no other large array.
    """
    checkpoint = _Checkpoint(prefix)
    if options.get("global_step") is None and checkpoint.shapes.get("global_step") == ():
        options["global_step"] = int(checkpoint["global_step"])
    return from_tf1(checkpoint, variables, **options)


def from_tf_checkpoint(
    prefix: str | Path,
    variables: Iterable[Any],
    *,
    optimizer: str | None = None,
    amsgrad: bool = False,
    use_ema: bool = False,
    names: Mapping[str, str] | None = None,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    learning_rate: float | None = None,
) -> dict[str, Array]:
    """Return the optimizer state in a checkpoint that tf.train.Checkpoint wrote.

    Optimizers of Keras 3 and tf_keras number their variables there, so `variables` count by their
    order. Legacy Keras and tf.compat.v1 optimizers put their slots beside the variable, under the
    path of Python attributes that leads to it; the variables are then told apart by their shapes,
    and by `names` where two have the same shape.

    Args:
        prefix: The checkpoint without ".index", or its directory for the latest one.
        variables: Whose state it is: variables, or (path, shape).
        optimizer: The object path of the optimizer, such as "optimizer" or "model/optimizer";
            found when left out, if there is one.
        amsgrad: Whether the optimizer had amsgrad; its velocity_hat is then in the state.
        use_ema: Whether the optimizer had use_ema; its average is then in the state.
        names: Object paths of variables by path, such as "model/layer_with_weights-0/kernel".
        beta_1: Only for tf.compat.v1: the decay that beta1_power is a power of.
        beta_2: Only for tf.compat.v1: the decay that beta2_power is a power of.
        learning_rate: To be put into the state instead of the checkpoint's, if it has one.

    Returns:
        The state by key, with the learning rate that the checkpoint holds.

    Raises:
        StateMismatchError: something is not there, is there more than once, or does not fit.
        OptimizerArgumentError: variables or betas are not such.
    """
    where, checkpoint = "from_tf_checkpoint", _Checkpoint(prefix)
    order = targets(where, variables)
    home = _found_optimizer(where, checkpoint) if optimizer is None else optimizer.strip("/")
    if _below(home, "_iterations") in checkpoint:
        weights = _numbered(where, checkpoint, home)
        return interleaved_state(where, weights, order, amsgrad, use_ema, learning_rate)
    raw = _slots_beside(where, checkpoint, home, order, names or {}, amsgrad)
    if _below(home, "iter") in checkpoint:
        raw["iterations"] = checkpoint[_below(home, "iter")]
    else:
        powers = [_found(where, checkpoint, _below(home, f"beta{i}_power")) for i in (1, 2)]
        raw["iterations"] = steps_of_powers(where, powers, (beta_1, beta_2), None)
    if _below(home, "learning_rate") in checkpoint:
        raw["learning_rate"] = checkpoint[_below(home, "learning_rate")]
    return checked_state(where, raw, order, learning_rate)


def read_keras_file(path: str | Path) -> list[Array]:
    """Return the optimizer's variables in a .keras, .weights.h5 or .h5 file, in their order.

    Give the list to `from_keras3`, `from_tf_keras` or `from_legacy_keras`, by what wrote the file.

    Raises:
        StateMismatchError: the file holds no optimizer variables.

    Cost: one copy of the optimizer's variables; a .keras file is first unpacked in memory.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            source: Any = io.BytesIO(archive.read("model.weights.h5"))
    else:
        source = path
    with h5py.File(source, "r") as file:
        datasets: list[Any] = []
        if "optimizer/vars" in file:
            group = file["optimizer/vars"]
            datasets = [group[name] for name in sorted(group, key=int)]
        elif "optimizer_weights" in file:
            group = file["optimizer_weights"]
            datasets = [group[name] for name in _h5_names(group.attrs)]
        if not datasets:
            refuse(
                "read_keras_file",
                "the file must hold the variables of an optimizer",
                [f"{path} with {listing(sorted(file))}"],
                "Save the compiled and trained model; tf_keras writes legacy optimizers to .h5.",
            )
        return [_h5_array(dataset) for dataset in datasets]


def _h5_names(attributes: Mapping[str, Any]) -> list[Any]:
    # An attribute of HDF5 ends at 64 KiB: Keras cuts a longer list into weight_names0, 1, ...
    whole = ["weight_names"] if "weight_names" in attributes else []
    parts = [f"weight_names{number}" for number in range(len(attributes))]
    return [name for part in whole or parts for name in attributes.get(part, ())]


def _h5_array(dataset: Any) -> Array:
    array = np.asarray(dataset[()])
    # HDF5 has no bfloat16: Keras writes the two bytes, and says so beside them.
    return array.view("bfloat16") if dataset.attrs.get("dtype") == "bfloat16" else array


def _below(home: str, name: str) -> str:
    return f"{home}/{name}" if home else name


def _found(where: str, checkpoint: _Checkpoint, name: str) -> Array:
    if name not in checkpoint:
        beside = [key for key in checkpoint if key.startswith(name.rpartition("/")[0])]
        refuse(where, f"the checkpoint must hold {name}", [listing(sorted(beside)) or "none"])
    return checkpoint[name]


def _found_optimizer(where: str, checkpoint: _Checkpoint) -> str:
    homes = {key.rpartition("/")[0] for key in checkpoint if key.rpartition("/")[2] in _COUNTERS}
    if len(homes) != 1:
        refuse(
            where,
            "the checkpoint must hold one optimizer, or the argument optimizer say which",
            [listing(sorted(map(repr, homes))) or "none"],
            "Pass one of them. A checkpoint of a tf.compat.v1 Saver: call from_tf1_checkpoint.",
        )
    return homes.pop()


def _numbered(where: str, checkpoint: _Checkpoint, home: str) -> list[Array]:
    pattern = re.compile(re.escape(_below(home, "_variables/")) + r"(\d+)")
    matches = [match for key in checkpoint if (match := pattern.fullmatch(key))]
    numbers = sorted(int(match[1]) for match in matches)
    # iterations, and in Keras 3 learning_rate, are variables 0 and 1, held under their own names.
    if not numbers or numbers[0] > 2 or numbers != list(range(numbers[0], numbers[-1] + 1)):
        refuse(where, "optimizer variables must be numbered without a gap", [f"{numbers}"])
    heads = [_below(home, name) for name in ("_iterations", "_learning_rate")]
    slots = [_below(home, f"_variables/{number}") for number in numbers]
    return [checkpoint[key] for key in [*heads, *slots] if key in checkpoint]


def _slots_beside(
    where: str,
    checkpoint: _Checkpoint,
    home: str,
    order: Sequence[Target],
    names: Mapping[str, str],
    amsgrad: bool,
) -> dict[str, Any]:
    suffix = f"/.OPTIMIZER_SLOT/{_below(home, 'm')}"
    slotted = {key: shape for key, shape in checkpoint.shapes.items() if key.endswith(suffix)}
    owners = {key.removesuffix(suffix): shape for key, shape in slotted.items()}
    slots = {"momentum": "m", "velocity": "v"} | ({"velocity_hat": "vhat"} if amsgrad else {})
    raw: dict[str, Any] = {}
    faults = []
    for target in order:
        fitting = [owner for owner, shape in owners.items() if shape == target.shape]
        alike = sum(other.shape == target.shape for other in order)
        name = names.get(target.path)
        if name is None and len(fitting) == alike == 1:
            name = fitting[0]
        if name not in owners:
            faults.append(f"{target.path} of shape {target.shape}")
            continue
        for slot, letter in slots.items():
            key = f"{name}/.OPTIMIZER_SLOT/{_below(home, letter)}"
            raw[f"{target.path}/{slot}"] = _found(where, checkpoint, key)
    if faults:
        held = listing([f"{owner} {shape}" for owner, shape in sorted(owners.items())])
        refuse(
            where,
            "each variable must be found in the checkpoint by its shape or by names",
            [*faults, f"where the checkpoint has slots of {held}"],
            "Pass names: the object path of each variable by its path.",
        )
    return raw
