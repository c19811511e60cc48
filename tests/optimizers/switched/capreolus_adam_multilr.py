"""A script of a user of capreolus' AdamMultilr; only the import has changed."""

import tensorflow as tf

from rowstep.optimizers import AdamMultilr

bert, rank = tf.Variable(10.0, name="bert/kernel"), tf.Variable(10.0, name="rank/kernel")
pattern_lrs = [{"patterns": ["bert/"], "lr": 0.01}]
opt, losses = AdamMultilr(learning_rate=0.1, pattern_lrs=pattern_lrs), []
loss = lambda: (bert**2) / 2.0 + (rank**2) / 2.0  # noqa: E731
for _ in range(3):
    losses.append(float(loss()))
    step_count = opt.minimize(loss, [bert, rank]).numpy()
moved = f"bert at {bert.numpy():.2f}, rank at {rank.numpy():.2f}"
print(f"step {step_count}, {moved}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
