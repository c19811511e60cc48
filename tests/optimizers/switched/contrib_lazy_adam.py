"""A program of TensorFlow 1.4 days; only the import of its optimizer has changed."""

import tensorflow.compat.v1 as tf

from rowstep.optimizers import LazyAdamOptimizer

tf.disable_v2_behavior()
ids = tf.placeholder(tf.int64, [None])
table = tf.get_variable("table", [1000, 8], initializer=tf.ones_initializer())
loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, ids)))
global_step = tf.train.get_or_create_global_step()
train_op = LazyAdamOptimizer(learning_rate=0.1).minimize(loss, global_step=global_step)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    losses = [session.run([loss, train_op], {ids: [3, 5, 3]})[0] for _ in range(20)]
    print(f"step {session.run(global_step)}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
