"""The shape of a rowstep config file.

Every model is strict (no silent conversion), frozen and closed to unknown keys, so a typo is an
error and two equal configs have the same canonical JSON. The docstring under each field is what
`rowstep schema` exports and what editors show. A validator words its problems as
`<key>: <what must hold>. Got <value>. ... <what to do>.`, one a line, the key below its model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rowstep.configs.uris import credentials_in

Rate = Annotated[float, Field(gt=0)]
Percent = Annotated[int, Field(ge=1, le=50)]
Count = Annotated[int, Field(ge=1)]
NonNegativeCount = Annotated[int, Field(ge=0)]
# abs: -0.0 is equal to 0.0 but prints otherwise, and equal configs must have equal JSON.
Decay = Annotated[float, Field(ge=0, lt=1), AfterValidator(abs)]
NonNegative = Annotated[float, Field(ge=0), AfterValidator(abs)]
Share = Annotated[float, Field(ge=0, le=1), AfterValidator(abs)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Text = Annotated[str, Field(min_length=1)]
DottedPath = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$", examples=["my_package.callbacks.StopEarly"]),
]


class Strict(BaseModel):
    """Refuse unknown keys, wrong types, NaN and infinities."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


# --- data -----------------------------------------------------------------------------------


class HashSplit(Strict):
    """Send a (user, item) pair to one side for ever, by the hash of its ids."""

    kind: Literal["hash"]
    eval_percent: Percent = 10
    """Share of interactions held out for evaluation."""


class TimeSplit(Strict):
    """Train on the past, evaluate on the latest interactions."""

    kind: Literal["time"]
    eval_percent: Percent = 10
    """Share of interactions, the latest ones, held out for evaluation."""


class OfficialSplit(Strict):
    """Use the split that the publisher of the data ships."""

    kind: Literal["official"]


AnySplit = Annotated[HashSplit | TimeSplit, Field(discriminator="kind")]
AnySplitOrOfficial = Annotated[OfficialSplit | HashSplit | TimeSplit, Field(discriminator="kind")]


class SyntheticData(Strict):
    """Generate interactions whose ground truth, and so the best reachable error, is known."""

    kind: Literal["synthetic"]
    num_users: Count = 2000
    num_items: Count = 1000
    num_interactions: Count = 160_000
    rank: Count = 4
    """Number of latent factors of a user and of an item."""
    noise: Rate = 0.6
    """Standard deviation of the Gaussian noise on the score, in stars."""
    zipf: NonNegative = 0.9
    """Exponent of the popularity law of items; 0 makes all items equally popular."""
    cold_item_percent: Annotated[int, Field(ge=0, le=50)] = 5
    """Share of items that appear only in the last tenth of the period."""
    seed: Seed = 20_261_121
    split: AnySplit = TimeSplit(kind="time")


class MovieLens100K(Strict):
    """Read the MovieLens 100K files from a folder that you supply; they may not be shipped."""

    kind: Literal["movielens_100k"]
    path: Text
    """Folder with `u.data`, `u.user`, `u.item`, `u1.base`, ...; relative to the config file."""
    fold: Literal["u1", "u2", "u3", "u4", "u5", "ua", "ub"] = "u1"
    """With an official split: train on `<fold>.base`, evaluate on `<fold>.test`. With another split
    only `<fold>.base` is read and divided, so settings can be chosen without the test fold."""
    split: AnySplitOrOfficial = OfficialSplit(kind="official")


_SPAN = re.compile(r"\{SPAN(?::[1-9]\d*)?\}")
_DATE = ("{YYYY}", "{MM}", "{DD}")


def _without_spans(path: str) -> str:
    if _SPAN.search(path) or any(part in path for part in _DATE):
        raise ValueError(
            f"must be a file or a folder. Got {path!r}, a pattern of partitions. "
            "Write 'kind: csv_spans'."
        )
    return path


def _span_pattern(path: str) -> str:
    rest = _SPAN.sub("", path)
    found = (len(_SPAN.findall(path)), *(path.count(part) for part in _DATE))
    for part in _DATE:
        rest = rest.replace(part, "")
    if found not in ((1, 0, 0, 0), (0, 1, 1, 1)) or "{" in rest or "}" in rest:
        raise ValueError(
            f"must hold {{SPAN}} once, or {{YYYY}}, {{MM}} and {{DD}} once each, and no other "
            f"braces; {{SPAN:5}} is a span of five digits. Got {path!r}. "
            "Write, say, ratings/{YYYY}-{MM}-{DD}/*.csv."
        )
    return path


class _CsvColumns(Strict):
    """How rows are read from delimited text files."""

    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    user_column: Text = "user_id"
    item_column: Text = "item_id"
    rating_column: Text = "rating"
    time_column: Text = "timestamp"
    extra_columns: tuple[Text, ...] = ()
    """Further columns to carry along, for features beyond the two ids."""
    split: AnySplit = HashSplit(kind="hash")


class CsvData(_CsvColumns):
    """Read interactions from delimited text files with a header line."""

    kind: Literal["csv"]
    path: Annotated[Text, AfterValidator(_without_spans)]
    """A file, or a folder whose `*.csv` are read in name order; relative to the config file."""


class CsvSpans(_CsvColumns):
    """Read a window of partitions of delimited text files, such as one folder a day.

    A span is a partition's number, as in TFX: what `{SPAN}` stands for, or for dates the days since
    1970-01-01. `rowstep run` trains every span that came since the last finished run.
    """

    kind: Literal["csv_spans"]
    path: Annotated[Text, AfterValidator(_span_pattern)]
    """Files or folders of the partitions, with `{SPAN}` or `{YYYY}`, `{MM}`, `{DD}` in the place of
    their number or date; `*` and `?` stand for any text. Relative to the config file."""
    window: Count = 1
    """Spans to train on: the newest and so many minus one before it."""
    span: NonNegativeCount | None = None
    """Newest span of the window; left out, the command decides which are due."""


AnyData = Annotated[SyntheticData | MovieLens100K | CsvData | CsvSpans, Field(discriminator="kind")]


# --- features -------------------------------------------------------------------------------


class VocabularyFeature(Strict):
    """Give every value seen in training a row of its own."""

    kind: Literal["vocabulary"]
    oov_buckets: Count = 1
    """Rows shared by values that training never saw."""
    max_size: Count | None = None
    """Keep only the most frequent values."""


class HashFeature(Strict):
    """Hash values into a fixed number of rows; nothing to learn, nothing to grow."""

    kind: Literal["hash"]
    buckets: Annotated[int, Field(ge=2)]


class NumericFeature(Strict):
    """Standardise a number with the mean and the deviation of the training split."""

    kind: Literal["numeric"]


AnyFeature = Annotated[
    VocabularyFeature | HashFeature | NumericFeature, Field(discriminator="kind")
]


# --- models ---------------------------------------------------------------------------------


def _rising(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if low >= high:
        raise ValueError(f"must rise. Got [{low:g}, {high:g}]. Write [low, high].")
    return low + 0.0, high + 0.0  # + 0.0 turns -0.0 into 0.0


ScoreRange = Annotated[tuple[float, float], AfterValidator(_rising)]


class MatrixFactorization(Strict):
    """score = mean + b_user + b_item + <p_user, q_item>."""

    kind: Literal["matrix_factorization"]
    user: str = "user_id"
    item: str = "item_id"
    dim: Count = 16
    """Width of the two factor tables."""
    row_l2: NonNegative = 0.0
    """Weight of the mean squared norm of the rows that a batch looks up."""
    init_stddev: Rate = 0.05
    score_range: ScoreRange | None = None
    """Clip served scores into this range; training sees the raw score."""


class Dcn(Strict):
    """DCN-v2: low-rank cross layers and a tower beside them, over one embedding a feature."""

    kind: Literal["dcn"]
    dim: Count = 16
    """Width of every embedding."""
    cross_layers: Count = 2
    cross_rank: Count = 16
    deep_units: tuple[Count, ...] = (64, 32)
    dropout: Decay = 0.0
    row_l2: NonNegative = 0.0
    init_stddev: Rate = 0.05
    score_range: ScoreRange | None = None
    """Clip served scores into this range; training sees the raw score."""


AnyModel = Annotated[MatrixFactorization | Dcn, Field(discriminator="kind")]


# --- optimizers -----------------------------------------------------------------------------


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(
            f"must be a regular expression. Got {text!r} ({error}). Escape its special characters."
        ) from None
    return text


Pattern = Annotated[Text, AfterValidator(_regular_expression)]


class CosineSchedule(Strict):
    """learning_rate * (alpha + (1 - alpha) * (1 + cos(pi * step / decay_steps)) / 2)."""

    kind: Literal["cosine"]
    decay_steps: Count | None = None
    """Steps until the floor is reached; the length of the training when left out."""
    alpha: Share = 0.0


class ExponentialSchedule(Strict):
    """learning_rate * decay_rate ** (step / decay_steps)."""

    kind: Literal["exponential"]
    decay_steps: Count
    decay_rate: Rate = 0.9


AnySchedule = Annotated[CosineSchedule | ExponentialSchedule, Field(discriminator="kind")]


class OptimizerBase(Strict):
    """What every optimizer of the Adam family takes."""

    learning_rate: Rate = 0.001
    schedule: AnySchedule | None = None
    """How the learning rate falls; constant when left out."""
    beta_1: Decay = 0.9
    beta_2: Decay = 0.999
    clipnorm: Rate | None = None
    clipvalue: Rate | None = None
    global_clipnorm: Rate | None = None

    @model_validator(mode="after")
    def _one_clip(self) -> OptimizerBase:
        given = [
            n for n in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(self, n) is not None
        ]
        if len(given) > 1:
            raise ValueError(
                f"{given[1]}: at most one way to clip may be set. Got {', '.join(given)}. "
                "Keep one of them."
            )
        return self


class LazyAdamConfig(OptimizerBase):
    """rowstep's LazyAdam: Adam that moves only the rows a batch touched."""

    kind: Literal["lazy_adam"]
    epsilon: Rate = 1e-7
    weight_decay: NonNegative | None = None
    """Share of the weights that an update takes away, times the learning rate; rows not in the
    batch do not decay."""
    bias_correction: Literal["steps", "visits"] = "steps"
    """What the bias correction counts: steps of the optimizer, or visits of each row."""
    idle_decay: bool = False
    """Whether a row that comes back first decays for the steps in which it was absent."""
    row_velocity: bool = False
    """Whether tables have one second moment a row, which saves nearly a third of the memory."""


class RateGroup(Strict):
    """A learning rate for the variables whose path one of the patterns is found in."""

    patterns: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Regular expressions of variable paths."""
    lr: Rate


class AdamMultilrConfig(OptimizerBase):
    """rowstep's AdamMultilr: Adam with a learning rate for each group of variables."""

    kind: Literal["adam_multilr"]
    epsilon: Rate = 1e-7
    amsgrad: bool = False
    weight_decay: NonNegative | None = None
    """Share of the weights that an update takes away, times the learning rate."""
    pattern_lrs: tuple[RateGroup, ...] = ()
    """The first group that matches counts; variables in no group take `learning_rate`."""
    lazy: bool = False
    """Whether only the rows that a batch touched move."""


class LambConfig(OptimizerBase):
    """rowstep's LAMB: Adam's direction, scaled layer by layer."""

    kind: Literal["lamb"]
    epsilon: Rate = 1e-6
    weight_decay_rate: NonNegative = 0.0
    exclude_from_weight_decay: tuple[Pattern, ...] | None = None
    """Regular expressions of variable paths."""
    exclude_from_layer_adaptation: tuple[Pattern, ...] | None = None
    """Regular expressions of variable paths; falls back to `exclude_from_weight_decay`."""
    trust_ratio_clip: Annotated[tuple[NonNegative, NonNegative], AfterValidator(_rising)] | None = (
        None
    )
    """Lowest and highest trust ratio."""
    row_trust_ratio: bool = False
    """Whether each row of a table has a trust ratio of its own: then only touched rows move."""
    row_velocity: bool = False
    """Whether tables have one second moment a row."""


class AdamConfig(OptimizerBase):
    """Keras 3's own Adam, to compare with; it is dense and sums squares of repeated ids."""

    kind: Literal["adam"]
    epsilon: Rate = 1e-7


AnyOptimizer = Annotated[
    LazyAdamConfig | LambConfig | AdamMultilrConfig | AdamConfig, Field(discriminator="kind")
]


# --- the run --------------------------------------------------------------------------------


class TrainConfig(Strict):
    """How long, in what order and from where to train."""

    batch_size: Count = 512
    epochs: Count = 5
    seed: Seed = 7
    """Seeds the weights and the order of the examples."""
    shuffle_buffer: Count = 100_000
    """Examples held in memory to shuffle from."""
    metrics: tuple[Annotated[str, Field(pattern=r"^[A-Z]\w*$")], ...] = ()
    """Keras metrics of the training examples, such as `RootMeanSquaredError`, over each epoch."""
    warm_start: bool = False
    """When the data or the settings changed, start from the checkpoint of the last pushed model.
    Vocabularies may have grown, shrunk or been reordered: rows are matched by their keys."""
    warm_start_optimizer: bool = True
    """Whether a warm start also takes the optimizer's state; a schedule begins anew all the
    same."""
    callbacks: tuple[DottedPath, ...] = ()
    """Dotted paths of Keras callbacks, or of functions without arguments that return one."""


class KeepBest(Strict):
    """Keep the checkpoints with the best value of an evaluation metric."""

    metric: Literal["val_rmse", "val_mae"] = "val_rmse"
    count: Count = 1


class CheckpointConfig(Strict):
    """When to commit a checkpoint, where, and which to keep."""

    every_steps: Count | None = 500
    """Steps between two checkpoints; `null` leaves it to the clock."""
    every_seconds: Rate | None = 300.0
    """Seconds between two checkpoints; `null` leaves it to the steps. Whichever is due first."""
    keep_last: Annotated[int, Field(ge=2)] = 3
    """Committed checkpoints kept; two at least, so that a damaged one has a predecessor."""
    keep_best: KeepBest | None = None
    """Keep the best ones besides; a checkpoint is then committed after every evaluation."""
    keep_every_hours: Rate | None = None
    """Keep one for every so many hours of training besides."""
    keep_trainings: Annotated[int, Field(ge=2)] | None = 10
    """Trainings of a pipeline whose checkpoints are kept; `null` keeps them all."""
    root: Text | None = None
    """Folder or object store (`gs://...`, `s3://...`) for checkpoints; below the workspace when
    left out. Relative to the config file."""
    background: bool = True
    """Whether checkpoints are written while training goes on; the last one never is."""
    background_memory_mib: Count | None = None
    """Memory that may be copied while one is written in the background; then training waits for it.
    When left out 128, or a twentieth of what is saved if that is more. Not on object stores."""
    max_failed_saves: NonNegativeCount = 0
    """Saves that may fail in a row, on a full disk, say, before the training stops. The last one
    may not."""


def _without_credentials(uri: str) -> str:
    found = credentials_in(uri)
    if found is not None:
        raise ValueError(
            f"must not hold credentials. Got {found} in the address. "
            "Pass it in the environment, as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        )
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        raise ValueError(
            f"must hold an absolute path. Got {uri!r}, which another folder would read as another "
            "file. Write sqlite:////full/path/mlflow.db."
        )
    return uri


class TrackingConfig(Strict):
    """What is reported to MLflow, how often, and where it is."""

    enabled: bool = True
    uri: Annotated[Text, AfterValidator(_without_credentials)] | None = None
    """MLflow tracking URI without credentials; an SQLite file of rowstep's own when left out."""
    experiment: Text | None = None
    """MLflow experiment; the name of the pipeline when left out."""
    run_name: Text | None = None
    """Name of a new MLflow run; the name of the pipeline when left out. In a comparison each
    variant has its own name here."""
    every_steps: Count = 100
    """Steps between two reports of loss, learning rate, norms and touched rows."""
    slots_every_steps: Count | None = None
    """Steps between two scans of all weights and slots, which cost what they weigh. When left out:
    1000, as long as scans and histograms take no more than a hundredth of the time."""
    per_variable: bool | None = None
    """Whether single variables have metrics of their own; up to 16 variables do when left out."""
    histograms: bool = True
    """Whether epochs end with pictures of the slots' histograms; the last one always does."""
    max_spool_mib: Count = 256
    """Mebibytes of reports that may wait on the disk for a server; what comes then is dropped."""


class EvaluationConfig(Strict):
    """What a model must reach to be blessed and pushed."""

    max_rmse: Rate | None = None
    """Do not bless a model whose error on the evaluation split is larger."""
    max_mse_increase: NonNegative = 0.0
    """Do not bless a model whose mean squared error exceeds the last blessed one's by more."""
    min_explained_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Generated data only: do not bless a model that explains less of what can be explained."""
    slices: tuple[Text, ...] = ()
    """Columns by whose values the evaluation is also reported."""


class RunConfig(Strict):
    """One pipeline: from interactions to a pushed model."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$", examples=["daily_ratings"])]
    """Name of the pipeline; runs of one name share metadata, checkpoints and the blessed model."""
    workspace: Text | None = None
    """Folder for everything that runs write; `$ROWSTEP_HOME` or `~/.rowstep` when left out."""
    data: AnyData
    features: dict[str, AnyFeature]
    """Columns that the model may look at, and how each becomes a number."""
    label: Text = "rating"
    model: AnyModel
    optimizer: AnyOptimizer
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        problems = []
        if not self.features:
            problems.append("features: at least one is needed. Got none. Add, say, user_id.")
        if self.label in self.features:
            problems.append(
                f"features.{self.label}: must not be the label. Got the column named by 'label'. "
                "Remove it, or rename the label."
            )
        if isinstance(self.model, MatrixFactorization):
            rows = [name for name, feature in self.features.items() if feature.kind != "numeric"]
            problems += [
                f"model.{key}: must name a vocabulary or hash feature. Got {name!r}. "
                f"Allowed: {', '.join(sorted(rows)) or 'none'}. Add it under 'features'."
                for key, name in (("user", self.model.user), ("item", self.model.item))
                if name not in rows
            ]
        if problems:
            raise ValueError("\n".join(problems))
        return self


# --- a comparison ---------------------------------------------------------------------------

SHARED_KEYS = ("name", "workspace", "data", "label", "tracking", "compare")
"""Keys that no variant of a comparison may change: else it would compare other things."""

_VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,62}")


def _variants(compare: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    problems = []
    if len(compare) < 2:
        problems.append(
            f"must name at least two variants. Got {len(compare)}. Add one, or remove 'compare'."
        )
    problems += [
        f"names of variants must be letters, digits, '_', '+' and '-', at most 63. Got {name!r}. "
        "Rename it."
        for name in compare
        if not _VARIANT_NAME.fullmatch(name)
    ]
    problems += [
        f"{name}.{key}: must be the same for all variants. Got {_shown(tree[key])}. "
        f"Set {key!r} for the whole file."
        for name, tree in compare.items()
        for key in SHARED_KEYS
        if key in tree
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return compare


def _shown(value: object) -> str:
    return "a mapping" if isinstance(value, Mapping) else repr(value)


class ConfigFile(RunConfig):
    """One pipeline, or with `compare` one for each variant: what a config file may hold."""

    compare: Annotated[dict[str, dict[str, Any]], AfterValidator(_variants)] | None = None
    """Variants to train one after the other on the same data: a name, and what differs from the
    rest of the file. All but `name`, `workspace`, `data`, `label` and `tracking` may differ."""
