"""Several replicas train like one device with the joined batch, clipping included."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

# Logical devices and clusters are set before TensorFlow starts, so each gets processes of its own.
SCRIPT = """
import json, os, sys
import keras, numpy as np, tensorflow as tf
from rowstep.optimizers import OPTIMIZERS, Embedding

case = json.loads(sys.argv[1])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
if case["kind"] == "workers":
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
else:
    num_devices = 2 if case["kind"] == "mirrored" else 1
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_devices)])
# Rows 1 and 2 repeat within a replica and between replicas; rows 0 and 5 are never there.
batches = [
    [[1, 2, 2], [2, 4, 4]], [[3, 3, 1], [1, 1, 1]], [[2, 3, 4], [4, 3, 2]], [[4, 4, 4], [1, 2, 3]]
]
results = []
for name, options in case["optimizers"]:
    with strategy.scope():
        layer = Embedding(6, 2, keras.initializers.RandomNormal(seed=1), name="items")
        layer.build()
        dense = keras.Variable(np.ones((2,), "float32"), name="scale")
        variables = [*layer.trainable_variables, dense]
        optimizer = OPTIMIZERS[name](0.1, **options)
        optimizer.build(variables)

    @tf.function
    def step(ids):
        def replica(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((layer(ids) * dense.value - 0.5) ** 2)
            optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        strategy.run(replica, args=(ids,))

    for halves in batches:
        parts = [halves[0] + halves[1]] if case["kind"] == "one" else halves
        step(strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[context.replica_id_in_sync_group])))
    if options.get("use_ema"):
        with strategy.scope():
            optimizer.finalize_variable_values(variables)
    copies = strategy.experimental_local_results(layer.embeddings.value)
    results.append({
        "copies": [copy.numpy().tolist() for copy in copies],
        "state": {key: np.array(value).tolist() for key, value in optimizer.named_state().items()},
    })
print("RESULT" + json.dumps(results), flush=True)
os._exit(0)  # the workers' servers would wait for each other
"""
OPTIMIZERS = [
    ("lazy_adam", {"clipnorm": 0.5}),
    ("lazy_adam", {"global_clipnorm": 0.5, "weight_decay": 0.1, "bias_correction": "visits"}),
    ("lazy_adam", {"use_ema": True, "ema_momentum": 0.5, "idle_decay": True}),
    ("lazy_adam", {"gradient_accumulation_steps": 2, "loss_scale_factor": 4.0}),
    ("lazy_adam", {"row_velocity": True}),
    ("lamb", {"clipnorm": 0.5}),
    ("lamb", {"row_trust_ratio": True}),
    # TensorFlow broadcasts no bfloat16 between workers, so this one is for one machine only.
    ("lazy_adam", {"state_dtype": "bfloat16"}),
    ("adam_multilr", {"pattern_lrs": [{"patterns": ["scale"], "lr": 0.01}], "amsgrad": True}),
]


def trained_by(kind: str) -> list[tuple[str, dict[str, Any]]]:
    return [case for case in OPTIMIZERS if kind != "workers" or "state_dtype" not in case[1]]


def started(kind: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    case = {"kind": kind, "optimizers": trained_by(kind)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(case)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def result(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    try:
        output, errors = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.split("RESULT")[-1])


@pytest.fixture(scope="module")
def on_one_device() -> list[dict[str, Any]]:
    return result(started("one", {}))


def assert_equal_training(
    kind: str, one: list[dict[str, Any]], other: list[dict[str, Any]]
) -> None:
    cases = trained_by(kind)
    one = [single for single, case in zip(one, OPTIMIZERS, strict=True) if case in cases]
    for single, many, case in zip(one, other, cases, strict=True):
        for copy in many["copies"]:
            np.testing.assert_allclose(copy, single["copies"][0], rtol=1e-5, err_msg=str(case))
        for key, value in single["state"].items():
            np.testing.assert_allclose(
                many["state"][key], value, rtol=1e-5, atol=1e-8, err_msg=f"{case}, {key}"
            )


@pytest.mark.slow
def test_two_replicas_equal_one_device_with_both_batches(
    on_one_device: list[dict[str, Any]],
) -> None:
    mirrored = result(started("mirrored", {}))
    assert_equal_training("mirrored", on_one_device, mirrored)
    for training in mirrored:
        assert len(training["copies"]) == 2
        np.testing.assert_array_equal(*training["copies"])


@pytest.mark.slow
def test_two_workers_equal_one_device_with_both_batches(
    on_one_device: list[dict[str, Any]],
) -> None:
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    workers = [
        started(
            "workers",
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}})},
        )
        for i in range(2)
    ]
    for worker in workers:
        assert_equal_training("workers", on_one_device, result(worker))
