"""Four logical CPU devices and a 2x2 mesh, which only a fresh process can have.

Scripts named mesh_*_cases.py import this, fill CASES and print their results as one line of JSON;
the tests that compare them run in pytest. One process runs many cases: TensorFlow takes long to
start.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Array = np.ndarray
Case = Callable[[], Any]
HERE = Path(__file__).parent


@functools.lru_cache
def results_of(script: str) -> dict[str, Any]:
    """Run a script of cases in a process of its own, once, and return its results by case."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / script)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(HERE)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


class Mesh:
    """Hold a 2x2 mesh of dimensions "batch" and "model", and put values on it."""

    specs = {
        "replicated": ("unsharded", "unsharded"),
        "rows": ("batch", "unsharded"),
        "columns": ("unsharded", "model"),
        "both": ("batch", "model"),
    }

    def __init__(self) -> None:
        import tensorflow as tf
        from tensorflow.experimental import dtensor

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 4
        )
        self.devices = [f"CPU:{i}" for i in range(4)]
        self.mesh = dtensor.create_mesh([("batch", 2), ("model", 2)], devices=self.devices)
        self.tf, self.dtensor = tf, dtensor

    def layout(self, name: str, rank: int = 2) -> Any:
        return self.dtensor.Layout(list(self.specs[name][:rank]), self.mesh)

    def put(self, value: Any, layout: str = "replicated", dtype: str | None = None) -> Any:
        value = self.tf.constant(value, dtype)
        rank = value.shape.rank
        value = self.dtensor.copy_to_mesh(value, self.dtensor.Layout.replicated(self.mesh, rank))
        return self.dtensor.relayout(value, self.layout(layout, rank))

    def variable(self, value: Any, layout: str, name: str, dtype: str | None = None) -> Any:
        return self.dtensor.DVariable(self.put(value, layout, dtype), name=name)

    def read(self, value: Any) -> Array:
        value = self.tf.convert_to_tensor(value)
        replicated = self.dtensor.Layout.replicated(self.mesh, value.shape.rank)
        whole = self.dtensor.relayout(value, replicated).numpy()
        return np.asarray(whole, np.float64 if whole.dtype.kind not in "iu" else whole.dtype)


def message(kind: type[Exception] | tuple[type[Exception], ...], call: Case) -> str:
    """Return the text of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def main(cases: dict[str, Case]) -> None:
    """Run cases and print their results as one line of JSON."""

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)

    print(json.dumps({name: case() for name, case in cases.items()}, default=plain))
