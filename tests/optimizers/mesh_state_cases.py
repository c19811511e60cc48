"""State, config and methods of the DTensor Adam on a mesh. See mesh_worker.py."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from typing import Any

import mesh_inputs as inputs
import numpy as np
import tensorflow as tf
import tf_keras
from mesh_worker import Case, Mesh, main, message
from tf_keras.dtensor.experimental import LayoutMap

from rowstep.optimizers.dtensor import Adam, lookup
from rowstep.optimizers.state import assign_arrays

MESH = Mesh()
CASES: dict[str, Case] = {}
ARGUMENTS = {"learning_rate": 0.1, "amsgrad": True, "use_ema": True, "ema_momentum": 0.6}
LAYOUTS = [*Mesh.specs, "off"]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Trained:
    """Hold two variables in a layout, or off the mesh, and an optimizer built on them."""

    def __init__(self, layout: str, **arguments: Any) -> None:
        self.off = layout == "off"
        arguments = {**ARGUMENTS, **arguments, "mesh": None if self.off else MESH.mesh}
        make = (lambda x, _, name: tf.Variable(x, name=name)) if self.off else MESH.variable
        self.table = make(inputs.TABLE, layout, "table")
        self.kernel = make(inputs.KERNEL, "columns", "kernel")
        self.optimizer = Adam(**arguments)
        self.optimizer.build([self.table, self.kernel])

    def step(self, t: int) -> None:
        place = tf.constant if self.off else MESH.put
        g, h = inputs.DENSE[t]
        self.optimizer.apply_gradients([(place(g), self.table), (place(h), self.kernel)])

    def weights(self) -> list[np.ndarray]:
        read = (lambda x: x.numpy()) if self.off else MESH.read
        return [read(self.table), read(self.kernel)]

    def load_weights(self, weights: list[np.ndarray]) -> None:
        for variable, value in zip((self.table, self.kernel), weights, strict=True):
            array = value.astype(np.float32)
            layout = None if self.off else variable.layout
            variable.assign(array if self.off else MESH.dtensor.relayout(MESH.put(array), layout))


@case
def moved_state() -> dict[str, Any]:
    """Train two steps in one layout and the third in another; return the weights of each."""
    result: dict[str, Any] = {}
    for first in ("columns", "off"):
        start = Trained(first)
        start.step(0)
        start.step(1)
        start.optimizer.learning_rate = 0.05
        state, weights = start.optimizer.named_state(), start.weights()
        for second in LAYOUTS:
            end = Trained(second)
            end.load_weights(weights)
            end.optimizer.load_named_state(state)
            loaded = end.optimizer.named_state()
            same = all(np.array_equal(loaded[key], state[key]) for key in state)
            end.step(2)
            result[f"{first}-{second}"] = [end.weights()[0], same and set(loaded) == set(state)]
        start.step(2)
        result[f"{first}-stayed"] = [start.weights()[0], True]
    return result


@case
def listed_state() -> dict[str, Any]:
    one, two = Trained("columns"), Trained("both")
    one.step(0)
    weights = one.optimizer.get_weights()
    two.optimizer.set_weights(weights)  # before its first step
    refused = {
        "short": weights[:-1],
        "shape": [weights[0], weights[1].T, *weights[2:]],
        "dtype": [weights[0], weights[1].astype(np.float64), *weights[2:]],
    }
    before = two.optimizer.get_weights()
    messages = {
        name: message(ValueError, lambda bad=bad: two.optimizer.set_weights(bad))
        for name, bad in refused.items()
    }
    after = two.optimizer.get_weights()
    other = dict(one.optimizer.named_state())
    other["other/momentum"] = other.pop("table/momentum")
    messages["names"] = message(ValueError, lambda: two.optimizer.load_named_state(other))
    messages["unbuilt"] = message(ValueError, lambda: Adam(mesh=MESH.mesh).get_weights())
    return {
        "first": [int(weights[0]), str(weights[0].dtype), type(weights[0]).__name__],
        "shapes": [list(array.shape) for array in weights],
        "names": [variable.name for variable in one.optimizer.variables],
        "equal": all(map(np.array_equal, weights, before)),
        "unchanged": all(map(np.array_equal, before, after)),
        "messages": messages,
        "keys": list(one.optimizer.named_state()),
    }


@case
def checkpoints() -> dict[str, Any]:
    one = Trained("columns")
    one.step(0)
    result: dict[str, Any] = {"saved": one.weights()[0]}
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(w=one.table, optimizer=one.optimizer).write(f"{folder}/c")
        for layout in ("columns", "off"):
            two = Trained(layout)
            reader = tf.train.Checkpoint(w=two.table, optimizer=two.optimizer)
            reader.read(path).assert_existing_objects_matched()
            state, other = one.optimizer.named_state(), two.optimizer.named_state()
            result[layout] = [
                two.weights()[0],
                all(np.array_equal(other[key], state[key]) for key in state),
            ]
    return result


@case
def configs() -> dict[str, Any]:
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.5)
    arguments = {"clipnorm": 0.5, "weight_decay": 0.1, "lazy": True, "adaptive_epsilon": True}
    one = Adam(schedule, 0.8, 0.9, 1e-5, True, mesh=MESH.mesh, **arguments)
    one.exclude_from_weight_decay(var_list=[MESH.variable(inputs.KERNEL, "rows", "a.b")])
    config = json.loads(json.dumps(one.get_config()))
    two = Adam.from_config(config)
    absent = {**config, "mesh": {**config["mesh"], "devices": ["CPU:0", "CPU:1", "CPU:2", "CPU:9"]}}
    bare = {key: value for key, value in config["mesh"].items() if key != "devices"}
    serialized = tf_keras.optimizers.serialize(one)
    return {
        "config": config,
        "equal": two.get_config() == config,
        "same_mesh": two._mesh == MESH.mesh,
        "off": Adam.from_config(config, {"mesh": None}).get_config()["mesh"],
        "override": Adam.from_config(absent, {"mesh": MESH.mesh})._mesh == MESH.mesh,
        "absent": message(ValueError, lambda: Adam.from_config(absent)),
        "bare": message(ValueError, lambda: Adam.from_config({**config, "mesh": bare})),
        "serialized": tf_keras.optimizers.deserialize(serialized).get_config() == config,
        "untouched": config == json.loads(json.dumps(one.get_config())),
    }


@case
def add_variable_from_reference() -> dict[str, Any]:
    """The case of the same name in the tests of the original, and other initial values."""
    optimizer = Adam(mesh=MESH.mesh)
    reference = MESH.variable(np.ones([4, 4], np.float32), "both", "tmp")
    zeros = optimizer.add_variable_from_reference(reference, "test")
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    given = optimizer.add_variable_from_reference(reference, "given", values)
    other = optimizer.add_variable_from_reference(reference, "other", shape=[3])
    return {
        "names": [zeros.name, given.name],
        "values": [MESH.read(zeros), MESH.read(given)],
        "same_layout": [zeros.layout == reference.layout, given.layout == reference.layout],
        "other_layout": other.layout == MESH.layout("replicated", 1),
        "kept": [any(v is w for v in optimizer.variables) for w in (zeros, given, other)],
        "plain": MESH.read(optimizer.add_variable([2], name="plain")),
    }


@case
def build_index_dict() -> int:
    """The case of the same name in the tests of the original."""
    optimizer = Adam(mesh=MESH.mesh)
    variables = [MESH.variable(np.float32(i), "replicated", f"v{i}") for i in range(10)]
    optimizer.build(variables)
    return optimizer._index_dict[optimizer._var_key(variables[7])]


@case
def apply_gradients() -> dict[str, Any]:
    """The case of the same name in the tests of the original, and aggregate_gradients."""
    optimizer = Adam(mesh=MESH.mesh, amsgrad=True)
    before = int(optimizer.iterations)
    variable = MESH.variable(np.ones([4, 4], np.float32), "both", "Variable")
    pairs = [(MESH.put(np.ones([4, 4], np.float32)), variable)]
    aggregated = optimizer.aggregate_gradients(pairs) is pairs
    optimizer.apply_gradients(pairs)
    return {
        "iterations": [before, int(optimizer.iterations)],
        "replicated": [
            v.layout == MESH.layout("replicated", 0)
            for v in (optimizer.iterations, optimizer.learning_rate)
        ],
        "names": [v.name for v in optimizer.variables],
        "aggregated": aggregated,
    }


@case
def embedding_lookup_backward_path() -> list[float]:
    """The case of the same name in the tests of the original: batches of other distinct ids."""
    tf_keras.backend.experimental.enable_tf_random_generator()
    tf_keras.utils.set_random_seed(1)
    layouts = LayoutMap(mesh=MESH.mesh)
    layouts["embedding.*embeddings"] = MESH.layout("columns")
    with layouts.scope():
        ids = tf_keras.Input(batch_size=16, shape=(10,), dtype="int32")
        x = tf_keras.layers.Embedding(100, 64)(ids)
        x = tf_keras.layers.GlobalAveragePooling1D()(x)
        model = tf_keras.Model(ids, tf_keras.layers.Dense(10, activation="softmax")(x))
    optimizer = Adam(mesh=MESH.mesh)
    optimizer.build(model.trainable_variables)

    @tf.function
    def train(ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf_keras.losses.sparse_categorical_crossentropy(labels, model(ids))
            loss = tf.reduce_mean(losses)
        optimizer.minimize(loss, model.trainable_variables, tape)
        return loss

    random = np.random.RandomState(0)
    batches = [
        MESH.put(random.randint(100, size=[16, 10], dtype=np.int32), "rows") for _ in range(2)
    ]
    labels = MESH.put(random.randint(10, size=[16], dtype=np.int32), "rows")
    return [float(train(ids, labels)) for ids in [*batches, *batches]]


@case
def methods() -> dict[str, Any]:
    one = Trained("columns", weight_decay=0.1)
    optimizer, w, k = one.optimizer, one.table, one.kernel
    ids = MESH.put(inputs.BATCHES[0], "rows")
    pairs = optimizer.compute_gradients(lambda: tf.reduce_sum(lookup(w, ids)), [w, k])
    with MESH.dtensor.default_mesh(MESH.mesh), tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(k))
    optimizer.minimize(loss, [k], tape)
    moved = MESH.read(k) - inputs.KERNEL
    optimizer.lr = 0.5
    plain = tf.Variable(inputs.KERNEL, name="plain")
    stranger = MESH.variable(inputs.KERNEL, "rows", "stranger")
    g = MESH.put(inputs.DENSE[0][1])
    average = MESH.read(optimizer.get_slot(k, "average"))
    optimizer.finalize_variable_values([k])
    finalized = MESH.read(k)
    refused = {
        "plain": lambda: Adam(mesh=MESH.mesh).build([plain]),
        "on_mesh": lambda: Adam().build([k]),
        "stranger": lambda: optimizer.apply_gradients([(g, stranger)]),
        "all_none": lambda: optimizer.apply_gradients([(None, k)]),
        "late": lambda: optimizer.exclude_from_weight_decay(var_names=["bias"]),
        "slot": lambda: optimizer.get_slot(k, "momentums"),
        "no_tape": lambda: optimizer.compute_gradients(loss, [k]),
    }
    optimizer.apply_gradients([(None, w), (g, k)])
    return {
        "sparse": type(pairs[0][0]).__name__,
        "none": pairs[1][0] is None,
        "moved": moved,
        "rates": [float(optimizer.learning_rate), float(optimizer.lr)],
        "slots": optimizer.get_slot_names(),
        "alias": optimizer.get_slot(k, "v") is optimizer.get_slot(k, "velocity"),
        "average": average,
        "finalized": finalized,
        "iterations": int(optimizer.iterations),
        "untouched": MESH.read(w),
        "messages": {name: message(ValueError, call) for name, call in refused.items()},
    }


@case
def lookups() -> dict[str, Any]:
    ids = MESH.put(inputs.BATCHES[0], "rows")
    tables = {name: MESH.variable(inputs.TABLE, name, "table") for name in Mesh.specs}
    plain = tf.Variable(inputs.TABLE)
    return {
        "rows": {n: MESH.read(lookup(t, ids, small_table=True)) for n, t in tables.items()},
        "plain": lookup(plain, tf.constant(inputs.BATCHES[0])).numpy(),
        "refused": [
            message(ValueError, lambda n=n: lookup(tables[n], ids)) for n in ("rows", "both")
        ],
        "floats": message(ValueError, lambda: lookup(plain, tf.constant([1.0]))),
        "rank": message(ValueError, lambda: lookup(tf.Variable([1.0]), tf.constant([0]))),
    }


@case
def replicas() -> dict[str, Any]:
    """Train with two replicas off the mesh, and with one on the joined batch."""
    result: dict[str, Any] = {}
    for lazy in (False, True):
        for devices in (["CPU:0"], ["CPU:0", "CPU:1"]):
            # Collectives of the strategy and of the mesh do not go together in one process.
            reduction = tf.distribute.ReductionToOneDevice()
            strategy = tf.distribute.MirroredStrategy(devices, reduction)
            with strategy.scope():
                table = tf.Variable(inputs.TABLE, name="table")
                optimizer = Adam(
                    0.1, lazy=lazy, clipnorm=2.0, ema_option={"momentum": 0.6}, weight_decay=0.1
                )
                optimizer.build([table])

            @tf.function
            def step(
                ids: Any, strategy: Any = strategy, t: Any = table, o: Any = optimizer
            ) -> None:
                def replica(ids: Any) -> None:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(tf.square(tf.gather(t, ids)))
                    o.minimize(loss, [t], tape)

                strategy.run(replica, args=(ids,))

            for ids in inputs.BATCHES:
                parts = np.split(ids, len(devices))
                step(
                    strategy.experimental_distribute_values_from_function(
                        lambda context, parts=parts: tf.constant(
                            parts[context.replica_id_in_sync_group]
                        )
                    )
                )
            copies = [v.numpy() for v in strategy.experimental_local_results(table)]
            state = {k: v.tolist() for k, v in optimizer.named_state().items()}
            result[f"lazy={lazy}-{len(devices)}"] = {"copies": copies, "state": state}
    return result


class Stored:
    """An array that lies elsewhere."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        yield 0, self.array[:3]
        yield 3, self.array[3:]

    def read_into(self, out: np.ndarray) -> None:
        out[...] = self.array


@case
def stored_state() -> list[Any]:
    """Assign an array that lies elsewhere to a variable of two replicas; return the copies."""
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        table = tf.Variable(tf.zeros_like(inputs.TABLE), name="table")
    assign_arrays("test", {"table": table}, {"table": Stored(inputs.TABLE)})
    return [copy.numpy() for copy in strategy.experimental_local_results(table)]


if __name__ == "__main__":
    main(CASES)
