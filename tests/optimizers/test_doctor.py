"""The doctor finds what is dense or wrong in real models, says true things, and is then content."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.experimental import dtensor

from rowstep.optimizers import LAMB, AdamMultilr, Embedding, LazyAdam, OptimizerArgumentError
from rowstep.optimizers import dtensor as dtensor_optimizers
from rowstep.optimizers import tf_keras as tf_keras_optimizers
from rowstep.optimizers.diagnosis.doctor import Finding, doctor, report

NUM_ROWS, WIDTH = 7, 2
IDS = np.array([[1, 2], [2, 1]], np.int64)


def functional(embedding: Any, dtype: str | None = None) -> keras.Model:
    """Return a model of a layer that looks up two ids an example."""
    ids = keras.Input((2,), dtype="int64")
    rows = keras.layers.Flatten()(embedding(ids))
    return keras.Model(ids, keras.layers.Dense(1, dtype=dtype)(rows))


def table(**arguments: Any) -> Embedding:
    return Embedding(NUM_ROWS, WIDTH, name="item", **arguments)


def stock(**arguments: Any) -> keras.layers.Embedding:
    return keras.layers.Embedding(NUM_ROWS, WIDTH, name="item", **arguments)


def functional_tf_keras(**arguments: Any) -> Any:
    ids = tf_keras.Input((2,), dtype="int64")
    rows = tf_keras.layers.Embedding(NUM_ROWS, WIDTH, name="item", **arguments)(ids)
    return tf_keras.Model(ids, tf_keras.layers.Dense(1)(tf_keras.layers.Flatten()(rows)))


def codes(model: Any, optimizer: Any, **arguments: Any) -> list[str]:
    return [finding.code for finding in doctor(model, optimizer, **arguments)]


def slices(ids: list[int], values: list[float], num_rows: int = NUM_ROWS) -> tf.IndexedSlices:
    rows = tf.constant([[value] * WIDTH for value in values])
    return tf.IndexedSlices(rows, tf.constant(ids), tf.constant([num_rows, WIDTH]))


def ones() -> keras.Variable:
    return keras.Variable(np.ones([NUM_ROWS, WIDTH], np.float32), name="item")


def gradient_of_table(model: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(IDS))) + sum(model.losses)
    return tape.gradient(loss, [model.trainable_variables[0]])[0]


# --- healthy --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipnorm": 1.0, "weight_decay": 0.1, "loss_scale_factor": 8.0},
        {"clipvalue": 1.0, "use_ema": True, "state_dtype": "bfloat16"},
        {"global_clipnorm": 1.0, "gradient_accumulation_steps": 2},
    ],
)
def test_lazy_adam_with_rowsteps_embedding_is_healthy(options: dict[str, Any]) -> None:
    assert doctor(functional(table()), LazyAdam(**options)) == []


def test_optimizer_does_not_matter_without_tables() -> None:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    assert doctor(model, keras.optimizers.Adam(use_ema=True, global_clipnorm=1.0)) == []


def test_frozen_tables_are_fine() -> None:
    assert doctor(functional(stock(trainable=False)), keras.optimizers.Adam()) == []


def test_embedding_of_tf_keras_gathers_rows() -> None:
    assert doctor(functional_tf_keras(), tf_keras.optimizers.Adagrad()) == []


def test_model_and_optimizer_stay_as_they_are() -> None:
    ids = keras.Input((2,), dtype="int64")
    dropped = keras.layers.Dropout(0.5, seed=3)(keras.layers.Flatten()(stock()(ids)))
    model = keras.Model(ids, keras.layers.BatchNormalization()(dropped))
    optimizer = keras.optimizers.Adam(0.5)
    before = [np.array(v) for v in model.variables]
    random_state = model.layers[3].seed_generator.state
    drawn = np.array(random_state)
    doctor(model, optimizer)
    assert not optimizer.built and float(optimizer.learning_rate) == 0.5
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, np.array(new))
    np.testing.assert_array_equal(drawn, np.array(random_state))


# --- the model ------------------------------------------------------------------------------


class Tower(keras.layers.Layer):
    """A layer of a user, with an embedding layer inside."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding

    def call(self, ids: Any) -> Any:
        return 2.0 * self.embedding(ids)


class Inner(keras.layers.Layer):
    """A table of a user, with a gather in a function of its own, behind a condition."""

    def __init__(self, reads_first: bool) -> None:
        super().__init__()
        self.reads_first = reads_first

    def build(self, input_shape: Any) -> None:
        self.rows = self.add_weight(shape=(NUM_ROWS, WIDTH), name="rows")

    def call(self, ids: Any) -> Any:
        take = tf.function(lambda rows, ids: tf.gather(rows, ids))
        read = tf.convert_to_tensor(self.rows.value) if self.reads_first else self.rows.value
        return tf.cond(tf.reduce_max(ids) > 3, lambda: take(read, ids), lambda: take(read, ids + 1))

    def compute_output_spec(self, ids: Any) -> Any:
        return keras.KerasTensor((*ids.shape, WIDTH))


def sequential(embedding: Any) -> keras.Model:
    return keras.Sequential([keras.Input((2,), dtype="int64"), embedding])


def time_distributed(embedding: Any) -> keras.Model:
    ids = keras.Input((2, 3), dtype="int64")
    return keras.Model(ids, keras.layers.TimeDistributed(embedding)(ids))


WRAPPERS = [lambda layer: layer, sequential, Tower]


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=["plain", "nested", "subclassed"])
def test_layers_are_looked_at_wherever_they_are(wrapper: Any) -> None:
    model = functional(wrapper(stock()))
    [finding] = doctor(model, LazyAdam())
    assert (finding.code, finding.severity) == ("embedding", "dense")
    assert finding.where == model.trainable_variables[0].path
    assert doctor(functional(wrapper(table())), LazyAdam()) == []


def test_layers_are_looked_at_inside_wrappers_of_keras() -> None:
    assert codes(time_distributed(stock()), LazyAdam()) == ["embedding"]
    assert doctor(time_distributed(table()), LazyAdam()) == []


def test_tables_are_followed_into_functions_and_conditions() -> None:
    assert codes(functional(Inner(reads_first=True)), LazyAdam()) == ["embedding"]
    assert doctor(functional(Inner(reads_first=False)), LazyAdam()) == []


def test_stock_layer_reads_the_table_and_rowsteps_does_not() -> None:
    kinds = {}
    for layer in (stock(), table()):
        layer.build()
        call = tf.function(layer).get_concrete_function(tf.TensorSpec([None], tf.int64))
        kinds[type(layer)] = {op.type for op in call.graph.get_operations()}
    assert {"ReadVariableOp", "GatherV2"} <= kinds[keras.layers.Embedding]
    assert "ResourceGather" in kinds[Embedding] and "ReadVariableOp" not in kinds[Embedding]


def test_what_a_layer_does_counts_and_not_its_class() -> None:
    class Gathering(keras.layers.Embedding):
        def call(self, inputs: Any) -> Any:
            return tf.gather(self._embeddings.value, inputs)

    assert doctor(functional(Gathering(NUM_ROWS, WIDTH)), LazyAdam()) == []


@pytest.mark.parametrize("options", [{"combiner": "mean", "padding_id": 0}, {"mask_zero": True}])
def test_bags_and_masks_of_rowsteps_embedding_are_healthy(options: dict[str, Any]) -> None:
    ids = keras.Input((2, 3), dtype="int64")
    assert doctor(keras.Model(ids, table(**options)(ids)), LazyAdam()) == []


@pytest.mark.parametrize("make", [stock, table])
def test_regularizer_makes_the_gradient_dense(make: Any) -> None:
    model = functional(make(embeddings_regularizer="l2"))
    gradient = gradient_of_table(model)
    assert isinstance(gradient, tf.Tensor)  # and row 5, which no example has, is in it:
    assert np.all(gradient[5] != 0.0)
    assert "embeddings_regularizer" in codes(model, LazyAdam())
    assert "dense_gradient" not in codes(model, LazyAdam())
    assert doctor(functional(table(row_l2=0.01)), LazyAdam()) == []


def test_regularizer_of_tf_keras_is_found_by_name_too() -> None:
    model = functional_tf_keras(embeddings_regularizer="l2")
    assert codes(model, tf_keras.optimizers.Adagrad()) == ["embeddings_regularizer"]


def test_constraint_of_keras_changes_rows_that_are_absent() -> None:
    minus = keras.initializers.Constant(-1.0)
    constrained = {"embeddings_initializer": minus, "embeddings_constraint": "non_neg"}
    model = functional(stock(**constrained))
    model.compile("sgd", "mse")
    model.train_on_batch(IDS, np.ones(2))
    assert np.all(model.trainable_variables[0][5] == 0.0)
    assert codes(functional(stock(**constrained)), LazyAdam()) == [
        "embedding",
        "embeddings_constraint",
    ]
    assert codes(functional(table(**constrained)), keras.optimizers.SGD()) == [
        "embeddings_constraint"
    ]
    assert doctor(functional(table(**constrained)), LazyAdam()) == []


class Tied(keras.Model):
    """Score all items with the table that their ids are looked up in."""

    def __init__(self, tied: bool, item: Any = None) -> None:
        super().__init__()
        self.item, self.tied = item or table(), tied
        self.scores = keras.layers.Dense(NUM_ROWS, use_bias=False)

    def build(self, input_shape: Any) -> None:
        self.item.build()
        self.scores.build((None, WIDTH))

    def call(self, ids: Any, training: bool = False) -> Any:
        mean = tf.reduce_mean(self.item(ids), axis=1)
        if self.tied:
            return tf.matmul(mean, self.item.embeddings.value, transpose_b=True)
        return self.scores(mean)


def test_weights_shared_with_an_output_layer_make_the_gradient_dense() -> None:
    tied, free = Tied(tied=True), Tied(tied=False)
    for model in (tied, free):
        model(IDS)
    assert isinstance(gradient_of_table(tied), tf.Tensor)
    [finding] = doctor(tied, LazyAdam(), batch=IDS)
    assert finding.code == "dense_gradient"
    assert "the whole table also goes into MatMul" in str(finding)
    assert doctor(free, LazyAdam(), batch=IDS) == []


def test_without_a_batch_a_subclassed_model_is_looked_at_layer_by_layer() -> None:
    tied = Tied(tied=True)
    tied(IDS)
    assert doctor(tied, LazyAdam()) == []  # as documented: not seen
    reading = Tied(tied=False, item=stock())
    reading(IDS)
    assert codes(reading, LazyAdam()) == ["embedding"]


def test_loss_is_looked_at_with_targets() -> None:
    model = functional(table())
    whole = model.trainable_variables[0]

    def loss(y: Any, outputs: Any) -> Any:
        return tf.reduce_mean(tf.square(outputs - y)) + tf.reduce_sum(tf.abs(whole.value))

    batch = (IDS, np.ones([2, 1], np.float32))
    assert codes(model, LazyAdam(), batch=batch, loss=loss) == ["dense_gradient"]
    assert doctor(model, LazyAdam(), batch=batch, loss=keras.losses.MeanSquaredError()) == []
    with pytest.raises(OptimizerArgumentError, match=r"loss needs targets .* Pass batch=\(x, y\)"):
        doctor(model, LazyAdam(), batch=IDS, loss=loss)


def test_whole_table_that_is_read_for_a_number_is_found() -> None:
    class Measured(Tower):
        def build(self, input_shape: Any) -> None:
            self.embedding.build()

        def call(self, ids: Any) -> Any:
            rows = super().call(ids)
            size = tf.stop_gradient(tf.reduce_sum(self.embedding.embeddings.value))
            return rows + 0.0 * size

    [finding] = doctor(functional(Measured(table())), LazyAdam())
    assert finding.code == "whole_read" and "Got Sum of the whole table" in finding.problem


def test_inputs_may_be_a_dict_and_a_table_may_have_two_of_them() -> None:
    layer = table()
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("b", "a")}
    rows = [layer(ids) for ids in inputs.values()]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    assert doctor(model, LazyAdam()) == []


# --- optimizers -----------------------------------------------------------------------------

LINEAR = ["SGD", "Lion"]
NOT_LINEAR = ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb"]
NOT_LINEAR += ["Nadam", "RMSprop"]


def after_two_steps(optimizer: Any, ids: list[int], values: list[float]) -> np.ndarray:
    variable = ones()
    optimizer.apply([slices(ids, values)], [variable])
    optimizer.apply([slices([1], [0.1])], [variable])  # shows a first step that scale hides
    return np.array(variable)


@pytest.mark.parametrize("name", LINEAR + NOT_LINEAR)
def test_optimizers_of_keras_3_that_do_not_sum_duplicates_are_named(name: str) -> None:
    kind = getattr(keras.optimizers, name)
    repeated = after_two_steps(kind(0.1), [1, 1, 3], [0.5, -0.25, 0.5])
    summed = after_two_steps(kind(0.1), [1, 3], [0.25, 0.5])
    wrong = "duplicates" in codes(functional(table()), kind())
    assert wrong == (name in NOT_LINEAR)
    assert wrong != np.allclose(repeated, summed, rtol=1e-6)


def test_second_moment_of_keras_adam_holds_the_sum_of_squares() -> None:
    adam, lazy = keras.optimizers.Adam(), LazyAdam()
    for optimizer in (adam, lazy):
        optimizer.apply([slices([1, 1], [4.0, -3.0])], [ones()])
    velocity = next(v for v in adam.variables if v.path.endswith("velocity"))
    np.testing.assert_allclose(velocity[1], 0.001 * (4.0**2 + 3.0**2), rtol=1e-5)
    ours = next(a for key, a in lazy.named_state().items() if key.endswith("/velocity"))
    np.testing.assert_allclose(ours[1], 0.001 * (4.0 - 3.0) ** 2, rtol=1e-5)


@pytest.mark.parametrize("library", ["keras", "tf_keras", "legacy"])
def test_adam_moves_rows_of_earlier_batches_and_is_named(library: str) -> None:
    optimizers = {
        "keras": keras.optimizers,
        "tf_keras": tf_keras.optimizers,
        "legacy": tf_keras.optimizers.legacy,
    }
    model = functional(table()) if library == "keras" else functional_tf_keras()
    finding = doctor(model, optimizers[library].Adam())[0]
    assert (finding.code, finding.where) == ("not_lazy", "Adam")
    assert "rows absent from the batch move" in finding.problem
    home = "rowstep.optimizers" if library == "keras" else "rowstep.optimizers.tf_keras"
    assert finding.remedy == f"Use {home}.LazyAdam."

    variable = ones() if library == "keras" else tf.Variable(np.ones([NUM_ROWS, WIDTH], "float32"))
    optimizer = optimizers[library].Adam()
    optimizer.apply_gradients([(slices([1], [1.0]), variable)])
    before = np.array(variable[1])
    optimizer.apply_gradients([(slices([3], [1.0]), variable)])
    assert np.all(np.array(variable[1]) != before)


def test_lazy_optimizer_of_a_user_is_healthy_whatever_its_name() -> None:
    class Adam(keras.optimizers.Optimizer):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            step = tf.IndexedSlices(-0.1 * gradient.values, gradient.indices)
            variable.scatter_add(step)

    model = functional(table())
    trainable = model.trainable_variables
    model.layers[-1].trainable = False
    assert len(model.trainable_variables) < len(trainable)
    assert doctor(model, Adam(0.1)) == []


def test_lamb_is_dense_unless_rows_have_ratios_of_their_own() -> None:
    model = functional(table())
    [finding] = doctor(model, LAMB())
    assert (finding.code, finding.severity) == ("not_lazy", "dense")
    assert "row_trust_ratio=True" in finding.remedy
    assert doctor(model, LAMB(row_trust_ratio=True)) == []


def test_adam_multilr_is_dense_unless_lazy() -> None:
    model = functional(table())
    groups = [{"patterns": ["item"], "lr": 0.1}]
    [finding] = doctor(model, AdamMultilr(pattern_lrs=groups))
    assert finding.code == "not_lazy" and "lazy=True" in finding.remedy
    assert doctor(model, AdamMultilr(pattern_lrs=groups, lazy=True)) == []


def test_lamb_is_dense_for_tables_that_no_pattern_names() -> None:
    class Named(keras.layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.rows = self.add_weight(shape=(NUM_ROWS, WIDTH), name="rows")

        def call(self, ids: Any) -> Any:
            return tf.gather(self.rows.value, ids)

    ids = keras.Input((2,), dtype="int64")
    both = keras.layers.Concatenate()([table()(ids), Named(name="tower")(ids)])
    model = keras.Model(ids, both)
    [finding] = doctor(model, LAMB(row_trust_ratio=True))
    assert "tables (tower/rows)" in finding.problem and "`tables`" in finding.remedy
    named = LAMB(row_trust_ratio=True, tables=["embeddings$", "rows$"])
    assert doctor(model, named) == []


def test_dtensor_adam_is_judged_by_what_it_does() -> None:
    model = functional_tf_keras()
    [finding] = doctor(model, dtensor_optimizers.Adam())
    assert finding.code == "not_lazy" and "lazy=True" in finding.remedy
    assert doctor(model, dtensor_optimizers.Adam(lazy=True, clipnorm=1.0)) == []
    assert codes(model, dtensor_optimizers.Adam(lazy=True, use_ema=True)) == ["use_ema"]
    mesh = dtensor.create_mesh([("model", 1)], devices=["CPU:0"])
    try:
        assert codes(model, dtensor_optimizers.Adam(lazy=True, mesh=mesh)) == ["mesh"]
    finally:
        # A mesh turns it on for the process, and with it XLA compiles no sparse step.
        tf.config.experimental.disable_mlir_bridge()


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "use_ema": True, "clipnorm": 1.0}])
def test_lazy_adam_for_tf_keras_is_healthy(options: dict[str, Any]) -> None:
    lazy = tf_keras_optimizers.LazyAdam(**options)
    assert doctor(functional_tf_keras(), lazy) == []


# --- options --------------------------------------------------------------------------------


class Recorder(keras.optimizers.SGD):
    """Keep what arrives at the update."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.arrived = gradient


@pytest.mark.parametrize(
    "option", [{"global_clipnorm": 1.0}, {"gradient_accumulation_steps": 2}], ids=lambda o: str(o)
)
def test_option_that_makes_the_gradient_dense_is_found(option: dict[str, Any]) -> None:
    recorder = Recorder(**option)

    def step() -> None:
        recorder.apply([slices([1], [1.0])], [variable])

    variable = ones()
    recorder.build([variable])
    tf.function(step, autograph=False).get_concrete_function()
    assert isinstance(recorder.arrived, tf.Tensor)

    [name] = option
    model = functional(table())
    finding = doctor(model, keras.optimizers.SGD(**option))[0]
    assert (finding.code, finding.severity) == (name, "dense")
    assert name in codes(model, keras.optimizers.Adam(**option))


def test_weight_decay_of_keras_shrinks_rows_that_are_absent() -> None:
    variable = ones()
    decaying = keras.optimizers.SGD(0.1, weight_decay=0.1)
    decaying.apply([slices([1], [1.0])], [variable])
    assert np.all(variable[5] < 1.0)
    model = functional(table())
    assert codes(model, decaying) == ["weight_decay"]
    assert codes(functional_tf_keras(), tf_keras.optimizers.Adagrad(weight_decay=0.1)) == [
        "weight_decay"
    ]


def test_weight_decay_that_leaves_the_tables_out_is_fine() -> None:
    for excluded in ({"var_names": ["embeddings"]}, {"var_list": None}):
        model = functional(table())
        optimizer = keras.optimizers.SGD(weight_decay=0.1)
        if "var_list" in excluded:
            excluded = {"var_list": [model.trainable_variables[0]]}
        optimizer.exclude_from_weight_decay(**excluded)
        assert doctor(model, optimizer) == []


def test_average_of_keras_follows_rows_that_are_absent() -> None:
    variable = ones()
    averaging = keras.optimizers.SGD(use_ema=True, ema_momentum=0.5)
    averaging.apply([slices([1], [1.0])], [variable])
    variable.value.scatter_update(slices([5], [3.0]))
    averaging.apply([slices([1], [1.0])], [variable])
    averaging.finalize_variable_values([variable])
    np.testing.assert_allclose(variable[5], 2.0)
    assert codes(functional(table()), averaging) == ["use_ema"]


def test_averages_that_become_the_weights_now_and_then_are_found_in_rowstep_too() -> None:
    variable = ones()
    averaging = LazyAdam(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    averaging.apply([slices([1], [1.0])], [variable])
    variable.value.scatter_update(slices([5], [3.0]))
    averaging.apply([slices([1], [1.0])], [variable])
    assert np.all(variable[5] != 3.0)  # absent, and overwritten all the same
    assert codes(functional(table()), averaging) == ["ema_overwrite_frequency"]
    assert doctor(functional(table()), LazyAdam(use_ema=True)) == []


def test_loss_scale_factor_of_keras_fails_on_sparse_gradients() -> None:
    scaling = keras.optimizers.SGD(loss_scale_factor=8.0)
    with pytest.raises(TypeError, match="IndexedSlices"):
        scaling.apply([slices([1], [1.0])], [ones()])
    [finding] = doctor(functional(table()), scaling)
    assert (finding.severity, finding.where) == ("wrong", "SGD(loss_scale_factor=8.0)")
    assert "IndexedSlices" in finding.problem


def test_loss_scale_optimizer_makes_a_tensor_of_all_rows() -> None:
    variable = ones()
    scaling = keras.optimizers.LossScaleOptimizer(LazyAdam())
    scaling.build([variable])
    step = tf.function(lambda: scaling.apply([slices([1], [1.0])]), autograph=False)
    checks = [
        op.type
        for op in step.get_concrete_function().graph.get_operations()
        if [tuple(out.shape) for out in op.outputs] == [(NUM_ROWS, WIDTH)]
    ]
    assert "TensorScatterUpdate" in checks
    [finding] = doctor(functional(table()), scaling)
    assert (finding.code, finding.where) == ("loss_scale", "LossScaleOptimizer")
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    assert codes(functional(table()), inner) == ["loss_scale", "not_lazy", "duplicates"]


@pytest.mark.parametrize(
    ("clip", "moved"), [("clipnorm", 13.0**-0.5), ("global_clipnorm", 13.0**-0.5), ("clipvalue", 0)]
)
def test_keras_clips_the_parts_of_a_repeated_id(clip: str, moved: float) -> None:
    # The sum, 1, is short enough; its parts, 3 and -2, are not.
    gradient = tf.IndexedSlices(tf.constant([[3.0], [-2.0]]), tf.constant([1, 1]), [NUM_ROWS, 1])
    variable = keras.Variable(np.zeros([NUM_ROWS, 1], np.float32))
    keras.optimizers.SGD(1.0, **{clip: 1.0}).apply([gradient], [variable])
    np.testing.assert_allclose(-np.array(variable[1]), [moved], atol=1e-6)
    model = functional(table())
    for name in ("SGD", "Adam"):
        assert f"{clip}_duplicates" in codes(model, getattr(keras.optimizers, name)(**{clip: 1.0}))
    tf_keras_adam = tf_keras.optimizers.Adam(**{clip: 1.0})
    assert codes(functional_tf_keras(), tf_keras_adam) == ["not_lazy", f"{clip}_duplicates"]
    assert doctor(model, LazyAdam(**{clip: 1.0})) == []


def test_older_order_of_clipping_is_named() -> None:
    [finding] = doctor(functional(table()), LazyAdam(clipnorm=1.0, clip_before_sum=True))
    assert finding.code == "clipnorm_duplicates"
    assert finding.remedy == "Set clip_before_sum=False."


def test_amsgrad_is_named_beside_adam() -> None:
    assert codes(functional(table()), keras.optimizers.Adam(amsgrad=True)) == [
        "not_lazy",
        "duplicates",
        "amsgrad",
    ]


def test_tf_keras_gives_xla_shapes_that_change_with_the_batch() -> None:
    optimizer = tf_keras.optimizers.Adagrad()
    optimizer.jit_compile = True  # as it is where TensorFlow sees an accelerator
    variable = tf.Variable(np.ones([NUM_ROWS, WIDTH], np.float32))
    optimizer.build([variable])

    def step(ids: tf.Tensor, rows: tf.Tensor) -> None:
        optimizer.apply_gradients([(tf.IndexedSlices(rows, ids), variable)])

    # The batch has a fixed size, and what is compiled has not.
    specs = (tf.TensorSpec([4], tf.int64), tf.TensorSpec([4, WIDTH], tf.float32))
    graph = tf.function(step, autograph=False).get_concrete_function(*specs).graph
    compiled = [op for op in graph.get_operations() if "_XlaMustCompile" in op.node_def.attr]
    assert any(tuple(t.shape) == (None, WIDTH) for op in compiled for t in op.inputs)

    assert codes(functional_tf_keras(), optimizer) == ["jit_compile"]
    optimizer.jit_compile = False
    assert doctor(functional_tf_keras(), optimizer) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_variables_that_do_not_train_are_found(dtype: str) -> None:
    steps = {}
    for optimizer in (keras.optimizers.Adam(0.1), LazyAdam(0.1)):
        variable = keras.Variable(np.zeros([2], np.float32), dtype=dtype)
        for _ in range(2):
            optimizer.apply([tf.constant([1e-4, 1e-4], dtype)], [variable])
        steps[type(optimizer)] = -np.array(variable, np.float32)[0]
    assert 0.15 < steps[LazyAdam] < 0.25
    assert not 0.15 < steps[keras.optimizers.Adam] < 0.25

    model = functional(table(dtype=dtype), dtype=dtype)
    assert "half_precision" in codes(model, keras.optimizers.Adam())
    assert doctor(model, LazyAdam()) == []


def test_mixed_precision_keeps_variables_that_train() -> None:
    model = functional(table(dtype="mixed_bfloat16"), dtype="mixed_bfloat16")
    assert doctor(model, LazyAdam()) == []
    assert "half_precision" not in codes(model, keras.optimizers.Adam())


# --- manners --------------------------------------------------------------------------------


def test_findings_have_the_form_of_errors() -> None:
    findings = doctor(functional(stock()), keras.optimizers.Adam(use_ema=True))
    assert len(findings) == 4
    for finding in findings:
        assert str(finding).startswith(f"{finding.where}: ")
        assert " must " in finding.problem and " Got " in finding.problem
        assert str(finding).endswith(".")
    shown = report(findings)
    assert shown.startswith("4 findings.\n\n[dense] item/embeddings: a forward pass must gather")
    assert all(str(finding) in shown for finding in findings)


def test_report_of_nothing_says_so() -> None:
    assert report([]) == "Nothing found: steps cost O(R), the rows of the batch."
    one = Finding("code", "wrong", "here", "it must hold. Got nothing.", "Mend it.")
    assert report([one]) == "1 finding.\n\n[wrong] here: it must hold. Got nothing. Mend it."


def test_what_cannot_be_examined_is_refused() -> None:
    unbuilt = keras.Sequential([stock()])
    with pytest.raises(OptimizerArgumentError, match="Got Sequential, which is not built"):
        doctor(unbuilt, LazyAdam())
    with pytest.raises(OptimizerArgumentError, match="Got Embedding, which is no model"):
        doctor(stock(), LazyAdam())
    with pytest.raises(OptimizerArgumentError, match=r"optimizer must be .* Got str\."):
        doctor(functional(stock()), "adam")
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = functional(stock())
        with pytest.raises(OptimizerArgumentError, match=r"scope must be left .* MirroredStrategy"):
            doctor(model, LazyAdam())
    assert codes(model, LazyAdam()) == ["embedding"]

    class Closed(keras.optimizers.SGD):
        def __init__(self, secret: int) -> None:
            super().__init__()

    with pytest.raises(OptimizerArgumentError, match=r"from_config .* Got Closed .* get_config"):
        doctor(functional(stock()), Closed(3))
