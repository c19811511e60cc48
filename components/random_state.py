"""The random generators of a process, brought over a kill.

    Python's `random`                  travels, with the second half of a pair of Gaussians
    NumPy's global generator           travels, whatever bit generator it uses
    TensorFlow's global Generator      travels (`tf.random.get_global_generator`)
    Keras' global seed                 travels: what `keras.random` and layers draw without a seed
    SeedGenerators of layers           are variables of the model, and travel with it
    NumPy or Python generators         travel where a callback holds them

What cannot travel: the operations of TensorFlow that keep a counter of their own, such as
`tf.random.uniform`, `tf.random.shuffle` or `tf.nn.dropout`. TensorFlow shows that counter nowhere.
A resumed process draws from them what a fresh process draws first after the same
`tf.random.set_seed`. Draw with `keras.random`, a `tf.random.Generator` or `tf.random.stateless_*`
of the step instead. The same holds for `shuffle` of a `tf.data.Dataset` without a seed, and for
what other threads drew from Keras' global seed, of which every thread has its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rowstep.components.checkpoints import CheckpointError
from rowstep.components.tagged_values import Decoder, Encoder, NotPlainError


def random_state() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the state of the process' random generators as JSON and arrays.

    Call it once before the first step, too. TensorFlow and Keras make their global generators when
    they are first asked for, and asking is the only public way to see them, so this makes those
    that are missing: TensorFlow's from the system's entropy, which is what any first use does, and
    Keras' from Python's `random`, whose own state is put back. Made before the first step, they are
    the same whenever checkpoints are taken. Where operations must be deterministic
    (`tf.config.experimental.enable_op_determinism`) TensorFlow makes none, and none travels unless
    the program set one.

    Cost: the trace of one small function, some milliseconds.
    """
    encoder = Encoder()
    keras_state = _keras_global_seed()
    version, words, gauss = random.getstate()
    states = {
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(legacy=False),
        "keras": np.asarray(keras_state.numpy()),
    }
    generator = _tensorflow_generator()
    if generator is not None:
        states["tensorflow"] = (int(generator.algorithm), np.asarray(generator.state.numpy()))
    return {kind: encoder.encode(state, kind) for kind, state in states.items()}, encoder.arrays


def load_random_state(meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Put every generator where `random_state` found it; the next draws are those that came next.

    Raises:
        CheckpointError: the state is not whole, or of other generators. Nothing was set.
    """
    decoder = Decoder(arrays)
    try:
        states = {kind: decoder.decode(meta[kind], kind) for kind in meta}
        version, words, gauss = states["python"]
        python_state = (version, tuple(int(word) for word in words), gauss)
        # Tried on generators made for it, so that nothing is set if one does not fit.
        random.Random().setstate(python_state)
        bits = type(np.random.get_bit_generator())()
        np.random.RandomState(bits).set_state(states["numpy"])
        keras_seed, keras_state = _keras_global_seed(), states["keras"]
        if (keras_state.shape, keras_state.dtype) != (tuple(keras_seed.shape), keras_seed.dtype):
            raise ValueError(f"a Keras seed of {keras_state.shape}, {keras_state.dtype}")
        generator = _from_state(*states["tensorflow"]) if "tensorflow" in states else None
    except (NotPlainError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            "resume: the checkpoint must hold the state of the random generators in use. Got "
            f"{type(error).__name__}: {error}. No generator was set. Resume with the versions of "
            "Python, NumPy, TensorFlow and Keras that saved it, or start a new training"
        ) from error
    random.setstate(python_state)
    np.random.set_state(states["numpy"])
    keras_seed.assign(keras_state)
    if generator is not None:
        _set_tensorflow_generator(generator)


def _keras_global_seed() -> tf.Variable:
    """Return the variable behind draws without a seed; what a draw's trace captures is public."""
    before = random.getstate()
    draw = tf.function(lambda: keras.random.uniform((1,)), autograph=False)
    (variable,) = draw.get_concrete_function().variables
    random.setstate(before)
    return variable


def _tensorflow_generator() -> tf.random.Generator | None:
    try:
        return tf.random.get_global_generator()
    except RuntimeError:  # under op determinism one must have been set first
        return None


def _from_state(algorithm: int, state: np.ndarray) -> tf.random.Generator:
    return tf.random.Generator.from_state(state, algorithm)


def _set_tensorflow_generator(wanted: tf.random.Generator) -> None:
    now = _tensorflow_generator()
    if now is None or (now.algorithm, now.state.shape) != (wanted.algorithm, wanted.state.shape):
        tf.random.set_global_generator(wanted)
    else:
        now.state.assign(wanted.state)  # compiled functions have captured this very variable
