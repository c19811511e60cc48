"""tf_keras models under tf.distribute train like one device, also with tables in parts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

# Logical devices and servers are set up before TensorFlow starts, in processes of their own.
COMMON = """
import json, os, socket, sys
import numpy as np, tensorflow as tf, tf_keras
from rowstep.optimizers import tf_keras as ours

# A batch of four; with two replicas rows repeat within and between them. Row 0 is never there.
ids = np.array([[1, 2], [2, 2], [2, 4], [4, 4], [3, 3], [1, 1], [1, 1], [1, 5], [2, 3], [4, 4]])
ids = np.concatenate([ids, [[3, 2], [2, 2]]])
labels = np.random.default_rng(1).normal(size=(12, 1)).astype("float32")

def make_model(name, settings, **table):
    tf_keras.utils.set_random_seed(1)
    inputs = tf_keras.Input((2,), dtype="int64", name="ids")
    ones = tf_keras.initializers.Ones()
    rows = tf_keras.layers.Embedding(6, 3, ones, name="items", **table)(inputs)
    rows = tf_keras.layers.Flatten(name="flat")(rows)
    scores = tf_keras.layers.Dense(1, kernel_initializer=ones, name="score", dtype="float32")(rows)
    model = tf_keras.Model(inputs, scores)
    model.compile(getattr(ours, name)(0.1, **settings), "mse")
    return model

def report(model):
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    state = {key: np.array(value).tolist() for key, value in optimizer.named_state().items()}
    tables = [v.numpy() for v in model.trainable_variables if "items" in v.name]
    return {"table": np.concatenate(tables).tolist(), "state": state}
"""
MIRRORED = """
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
results = []
for name, settings, policy, table in json.loads(sys.argv[1]):
    pair = []
    for num_replicas in (1, 2):
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
        tf_keras.mixed_precision.set_global_policy(policy)
        with strategy.scope():
            model = make_model(name, settings, **table)
        model.fit(ids, labels, batch_size=4, epochs=2, shuffle=False, verbose=0)
        pair.append(report(model))
    results.append(pair)
print(json.dumps(results))
"""
CASES = [
    ("LazyAdam", {"clipnorm": 0.05}, "float32", {}),
    ("LazyAdam", {"gradient_accumulation_steps": 2}, "float32", {}),
    (
        "LazyAdam",
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        "float32",
        {},
    ),
    ("LazyAdam", {}, "mixed_float16", {}),
    ("LazyAdam", {}, "float32", {"embeddings_constraint": "non_neg"}),
    ("LAMB", {"global_clipnorm": 0.05, "weight_decay_rate": 0.1}, "float32", {}),
    ("AdamMultilr", {"pattern_lrs": [{"patterns": ["^items"], "lr": 0.3}]}, "float32", {}),
]
PARAMETER_SERVERS = """
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

addresses = {"worker": [f"127.0.0.1:{port()}"], "ps": [f"127.0.0.1:{port()}" for _ in range(2)]}
cluster = tf.train.ClusterSpec(addresses)
servers = [
    tf.distribute.Server(cluster, job_name=job, task_index=index, protocol="grpc")
    for job in addresses for index in range(len(addresses[job]))
]
strategy = tf.distribute.ParameterServerStrategy(
    tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc"),
    variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(24, 2),
)

def batches(context=None):
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(4).repeat()

results = []
for name, settings in json.loads(sys.argv[1]):
    with strategy.scope():
        model = make_model(name, settings)
    data = tf_keras.utils.experimental.DatasetCreator(batches)
    model.fit(data, steps_per_epoch=6, verbose=0)
    single = make_model(name, settings)
    single.fit(batches(), steps_per_epoch=6, verbose=0)
    results.append([report(single), report(model)])
print(json.dumps(results), flush=True)
os._exit(0)  # the servers would wait for each other
"""


def results(script: str, cases: list[Any]) -> list[list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMMON + script, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_replicas_equal_one_device_with_the_joined_batch() -> None:
    for case, (one, two) in zip(CASES, results(MIRRORED, CASES), strict=True):
        assert np.ptp(one["table"]) > 0.01
        np.testing.assert_allclose(two["table"], one["table"], rtol=1e-5, err_msg=str(case))
        assert two["state"]["iterations"] == one["state"]["iterations"] == 6
        # Half precision rounds what each replica adds up.
        atol = 1e-7 if case[2] == "float32" else 1e-4
        for key, value in one["state"].items():
            np.testing.assert_allclose(
                two["state"][key], value, rtol=1e-5, atol=atol, err_msg=f"{case}, {key}"
            )


@pytest.mark.slow
def test_a_table_in_parts_on_parameter_servers_trains_as_on_one_device() -> None:
    cases = [
        ("LazyAdam", {"global_clipnorm": 0.5, "row_velocity": True, "idle_decay": True}),
        ("AdamMultilr", {"pattern_lrs": [{"patterns": ["embeddings$"], "lr": 0.3}], "lazy": True}),
    ]
    for single, sharded in results(PARAMETER_SERVERS, cases):
        assert "items/embeddings/part_1/velocity" in sharded["state"]
        assert sharded["state"]["iterations"] == 6
        np.testing.assert_allclose(sharded["table"], single["table"], rtol=1e-5)
        assert sharded["table"][0] == [1.0, 1.0, 1.0] != sharded["table"][5]
