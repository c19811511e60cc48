"""Random generators over a kill: the draws after a load are those that came after the save."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from rowstep.components.checkpoints import CheckpointError
from rowstep.components.random_state import load_random_state, random_state

State = tuple[dict[str, Any], dict[str, np.ndarray]]


@pytest.fixture(autouse=True)
def _leave_the_generators_as_they_were() -> Iterator[None]:
    before = random_state()
    yield
    load_random_state(*before)


def draw() -> list[str]:
    """Draw from every generator; an odd number of Gaussians leaves half a pair behind."""
    numbers: list[Any] = [random.random(), random.gauss(0, 1), np.random.normal(size=3)]
    numbers += [np.random.randint(0, 2**31, 2), tf.random.get_global_generator().normal([3])]
    numbers += [keras.random.normal((3,)), keras.random.uniform((2,))]
    return [np.asarray(number).tobytes().hex() for number in numbers]


def saved() -> State:
    """Return the state as a checkpoint would give it back."""
    meta, arrays = random_state()
    meta = json.loads(json.dumps(meta, allow_nan=False, sort_keys=True))
    return meta, {name: np.array(array) for name, array in arrays.items()}


def test_a_load_gives_the_same_draws_again():
    draw()
    state = saved()
    wanted = [draw(), draw()]
    assert wanted[0] != wanted[1]
    load_random_state(*state)
    assert [draw(), draw()] == wanted


def test_to_look_at_the_state_draws_nothing():
    state = saved()
    for _ in range(3):
        random_state()
    wanted = draw()
    load_random_state(*state)
    assert draw() == wanted


def test_the_first_look_makes_keras_global_seed_and_leaves_python_random_alone():
    states = []

    def look() -> None:  # each thread has a global seed of its own, made when it is first seen
        for _ in range(2):
            before = random.getstate()
            states.append(random_state()[1]["keras"].tobytes())
            states.append(random.getstate() == before)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert states == [states[0], True, states[0], True]


def test_half_a_pair_of_gaussians_travels():
    random.gauss(0, 1), np.random.normal()
    state = saved()
    wanted = random.gauss(0, 1), np.random.normal()
    random.seed(1), np.random.seed(1)
    load_random_state(*state)
    assert (random.gauss(0, 1), np.random.normal()) == wanted


def test_compiled_functions_go_on_with_the_loaded_state():
    generator = tf.random.get_global_generator()

    @tf.function
    def drawn() -> tuple[tf.Tensor, tf.Tensor]:
        return generator.normal([2]), keras.random.uniform((2,))

    drawn()
    state = saved()
    wanted = [part.numpy().tobytes() for part in drawn()]
    drawn()
    load_random_state(*state)
    assert [part.numpy().tobytes() for part in drawn()] == wanted


def test_a_generator_of_another_algorithm_is_put_in_place():
    before = tf.random.get_global_generator()
    try:
        tf.random.set_global_generator(tf.random.Generator.from_seed(3, alg="threefry"))
        state = saved()
        tf.random.set_global_generator(before)
        load_random_state(*state)
        now = tf.random.get_global_generator()
        assert now.algorithm == 2 and same(saved(), state)
    finally:
        tf.random.set_global_generator(before)


FRESH = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import test_random_state as here
with np.load(sys.argv[2]) as file:
    arrays = dict(file)
here.load_random_state(json.loads(open(sys.argv[3]).read()), arrays)
print(json.dumps([here.draw(), here.draw(), here.legacy_draw()]))
"""


def legacy_draw() -> list[str]:
    """Draw from operations of TensorFlow that count for themselves."""
    tf.random.set_seed(11)
    return [tf.random.uniform([2]).numpy().tobytes().hex() for _ in range(2)]


def test_a_fresh_process_goes_on_with_the_same_draws(tmp_path: Path):
    draw()
    legacy = legacy_draw()
    later = tf.random.uniform([2]).numpy().tobytes().hex()
    meta, arrays = saved()
    np.savez(tmp_path / "arrays.npz", **arrays)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    wanted = [draw(), draw()]
    files = [str(tmp_path / "arrays.npz"), str(tmp_path / "meta.json")]
    command = [sys.executable, "-c", FRESH, str(Path(__file__).parent), *files]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    *drawn, fresh_legacy = json.loads(printed.splitlines()[-1])
    assert drawn == wanted
    # The known limit: they start again with the seed, and their third draw is not to be had.
    assert fresh_legacy == legacy and later not in fresh_legacy


@pytest.mark.parametrize("kind", ["python", "numpy", "keras", "tensorflow"])
def test_a_state_that_is_not_whole_is_refused_and_nothing_is_set(kind: str):
    state = saved()
    meta, arrays = saved()
    name = next(name for name in arrays if name.startswith(kind))
    draw()
    before = saved()
    for broken in (
        (meta, {n: a for n, a in arrays.items() if n != name}),
        (meta, {**arrays, name: arrays[name][:1]}),
        ({k: v for k, v in meta.items() if k != kind or kind == "tensorflow"}, {**arrays, name: 3}),
    ):
        with pytest.raises(CheckpointError, match="resume: the checkpoint must hold the state of"):
            load_random_state(*broken)
        assert same(saved(), before)
    load_random_state(*state)
    assert same(saved(), state)


def same(left: State, right: State) -> bool:
    texts = [{name: a.tobytes() for name, a in state[1].items()} for state in (left, right)]
    return left[0] == right[0] and texts[0] == texts[1]
