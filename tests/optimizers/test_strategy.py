"""Several replicas train like one device with the joined batch, clipping included."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

# Logical devices must be set before TensorFlow starts, so each strategy gets a process of its own.
SCRIPT = """
import json, sys
import keras, numpy as np, tensorflow as tf
from rowstep.optimizers import OPTIMIZERS, Embedding

name, num_replicas = sys.argv[1], int(sys.argv[2])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
# Rows 1 and 2 repeat within a replica and between replicas; rows 0 and 5 are never there.
batches = [[[1, 2, 2], [2, 4, 4]], [[3, 3, 1], [1, 1, 1]], [[2, 3, 4], [4, 3, 2]]]
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
with strategy.scope():
    layer = Embedding(6, 2, keras.initializers.RandomNormal(seed=1), name="items")
    layer.build()
    optimizer = OPTIMIZERS[name](0.1, clipnorm=0.5)
    optimizer.build(layer.trainable_variables)

@tf.function
def step(ids):
    def replica(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((layer(ids) - 0.5) ** 2)
        variables = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    strategy.run(replica, args=(ids,))

for halves in batches:
    parts = halves if num_replicas == 2 else [halves[0] + halves[1]]
    step(strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])))
copies = [c.numpy().tolist() for c in strategy.experimental_local_results(layer.embeddings.value)]
state = {key: np.array(value).tolist() for key, value in optimizer.named_state().items()}
print(json.dumps({"copies": copies, "state": state}))
"""


def run(name: str, num_replicas: int) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, name, str(num_replicas)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lazy_adam", "lamb"])
def test_two_replicas_equal_one_device_with_both_batches(name: str) -> None:
    one, two = run(name, 1), run(name, 2)
    assert len(two["copies"]) == 2
    np.testing.assert_array_equal(two["copies"][0], two["copies"][1])
    np.testing.assert_allclose(two["copies"][0], one["copies"][0], rtol=1e-5)
    assert two["state"]["iterations"] == one["state"]["iterations"] == 3
    for key, value in one["state"].items():
        np.testing.assert_allclose(two["state"][key], value, rtol=1e-5, err_msg=key)
