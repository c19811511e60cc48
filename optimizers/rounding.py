"""Random rounding to narrow dtypes, without a generator that would have to be saved.

The noise of an element is a hash of where it is and of the step: the same on every device and
replica, compiled or not, in a resumed run, and whatever other rows are in the batch.
"""

from __future__ import annotations

import tensorflow as tf

__all__ = ["noise", "stochastic_round"]

_FRACTION_BITS = {tf.bfloat16: 7, tf.float16: 10}
_SMALLEST_SPACING = {tf.bfloat16: 2.0**-126, tf.float16: 2.0**-24}
"""Of bfloat16 it would be 2^-133, but TensorFlow takes float32 numbers below 2^-126 for zero."""

_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
"""Odd multipliers of the splitmix64 generator, as signed numbers."""


def stochastic_round(x: tf.Tensor, uniform: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Round to float16 or bfloat16, up or down at random, so that the mean is x.

        floor(y) * spacing, plus spacing where uniform < y - floor(y), for y = x / spacing

    spacing is the distance of the numbers of the dtype around x. A number that the dtype has stays.
    Rounding to nearest loses every change smaller than half a spacing, however often it comes.
    Infinities and NaN stay what they are.

    Args:
        x: float32 tensor.
        uniform: float32 tensor of x's shape, uniform in [0, 1).
        dtype: tf.float16 or tf.bfloat16.
    """
    bits = tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), tf.constant(0x7F800000, tf.int32))
    power_of_two = tf.bitcast(bits, tf.float32)
    spacing = tf.maximum(power_of_two * 2.0 ** -_FRACTION_BITS[dtype], _SMALLEST_SPACING[dtype])
    # Noise added before rounding to nearest would be wrong at powers of two: below them the numbers
    # lie twice as close, so 1.0 would drift to zero.
    scaled = x / spacing
    below = tf.floor(scaled)
    rounded = (below + tf.cast(uniform < scaled - below, x.dtype)) * spacing
    return tf.cast(tf.where(tf.math.is_finite(x), rounded, x), dtype)


def noise(row_ids: tf.Tensor, shape: tf.TensorShape, seed: int, step: tf.Tensor) -> tf.Tensor:
    """Return numbers that look uniform in [0, 1), by row id, position in the row, seed and step.

    Args:
        row_ids: int64 tensor [R], or a scalar for a variable without rows.
        shape: Static shape of a row, [D] or any other.
        seed: Of the variable; any int64.
        step: int64 scalar.

    Returns:
        float32 tensor [R, *shape], multiples of 2^-16.

    Source: the mixing function of splitmix64 (Steele, Lea and Flood, 2014).
    """
    size = shape.num_elements()
    # Rounding to bfloat16 drops 16 bits, so one hash of 64 bits serves four numbers.
    num_hashes = -(-size // 4)
    rows = tf.expand_dims(row_ids, -1)
    # The mixed key, not a sum: neighbouring steps must not see neighbouring elements' noise.
    key = _mixed(step * _GOLDEN + seed)
    hashes = rows * num_hashes + tf.range(num_hashes, dtype=tf.int64)
    mixed, mask = _mixed(hashes * _GOLDEN + key), tf.constant(0xFFFF, tf.int64)
    # Not tf.bitcast to int16: XLA has none for a number of rows that is known only at run time.
    shifts = [tf.bitwise.right_shift(mixed, tf.constant(16 * i, tf.int64)) for i in range(4)]
    quarters = [tf.cast(tf.bitwise.bitwise_and(x, mask), tf.float32) for x in shifts]
    lead = tf.shape(row_ids)
    uniform = tf.reshape(tf.stack(quarters, axis=-1), tf.concat([lead, [4 * num_hashes]], axis=0))
    return tf.reshape(uniform[..., :size] * 2.0**-16, tf.concat([lead, shape.as_list()], axis=0))


def _mixed(x: tf.Tensor) -> tf.Tensor:
    x = tf.bitwise.bitwise_xor(x, _shifted(x, 30)) * _MIX_1
    x = tf.bitwise.bitwise_xor(x, _shifted(x, 27)) * _MIX_2
    return tf.bitwise.bitwise_xor(x, _shifted(x, 31))


def _shifted(x: tf.Tensor, num_bits: int) -> tf.Tensor:
    """Return x >> num_bits with zeros coming in; TensorFlow brings in the sign."""
    mask = tf.constant((1 << (64 - num_bits)) - 1, tf.int64)
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(x, tf.constant(num_bits, tf.int64)), mask)
