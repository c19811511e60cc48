"""A model as a user of Merlin or TensorFlow Addons wrote it; only the import has changed."""

import keras
import numpy as np

from rowstep.optimizers import LazyAdam

users, items = (keras.Input((1,), dtype="int64", name=name) for name in ("user", "item"))
tables = keras.layers.Embedding(10_000, 16)(users), keras.layers.Embedding(5_000, 16)(items)
scores = keras.layers.Flatten()(keras.layers.Dot(axes=2)(tables))
model = keras.Model([users, items], scores)
model.compile(optimizer=LazyAdam(learning_rate=0.01, clipnorm=1.0), loss="mse")
ids = np.random.default_rng(0).integers(0, 100, (2, 256, 1))
losses = model.fit(list(ids), np.ones(256), epochs=5, verbose=0).history["loss"]
print(f"step {int(model.optimizer.iterations)}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
