"""A training loop in the style of the Model Garden; only the import has changed."""

import tensorflow as tf
import tf_keras

from rowstep.optimizers.tf_keras import LAMB

model = tf_keras.Sequential([tf_keras.layers.Dense(8), tf_keras.layers.LayerNormalization()])
schedule = tf_keras.optimizers.schedules.PolynomialDecay(0.05, 30, 0.0)
no_decay = ["layer_normalization", "bias"]
optimizer = LAMB(schedule, weight_decay_rate=0.01, exclude_from_weight_decay=no_decay)
features, losses = tf.random.stateless_normal((32, 4), seed=(1, 2)), []
for _ in range(20):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(features) - 1.0) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    losses.append(float(loss))
print(f"step {optimizer.get_weights()[0]}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
