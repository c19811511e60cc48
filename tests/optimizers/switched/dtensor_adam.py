"""A program for `tf.keras.dtensor`; only the import of its optimizer has changed."""

import tensorflow as tf
from tensorflow.experimental import dtensor

from rowstep.optimizers.dtensor import Adam

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
mesh = dtensor.create_mesh([("batch", 2), ("model", 2)], devices=[f"CPU:{i}" for i in range(4)])
by_columns = dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)
table = dtensor.DVariable(dtensor.call_with_layout(tf.ones, by_columns, [1000, 8]), name="table")
optimizer = Adam(learning_rate=0.1, mesh=mesh)
ids = dtensor.copy_to_mesh(tf.constant([3, 5, 3]), dtensor.Layout.replicated(mesh, rank=1))


@tf.function
def train_step() -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(tf.gather(table, ids)))
    optimizer.minimize(loss, [table], tape=tape)
    return loss


losses = [train_step().numpy() for _ in range(20)]
print(f"step {optimizer.iterations.numpy()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
