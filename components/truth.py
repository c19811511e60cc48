"""What is known about the best reachable error on generated data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rowstep.components.data_errors import DataError

__all__ = ["Truth", "TruthTally", "expected_star"]

LEAK_STANDARD_ERRORS = 3.0
# A star is the score rounded into 1..5; it exceeds k exactly where the score exceeds k + 1/2.
STAR_THRESHOLDS = (1.5, 2.5, 3.5, 4.5)

_erf = np.frompyfunc(math.erf, 1, 1)  # NumPy has none, and SciPy would be a dependency for this


def expected_star(scores: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """Return the best prediction there is, in the squared error, for each true score.

        E[star | score] = 1 + sum over t in {1.5, 2.5, 3.5, 4.5} of Phi((score - t) / noise)

    No model can expect to do better, since the noise of a row is independent of all other rows.

    Args:
        scores: True scores in stars, before noise and rounding, shape [N].
        noise: Standard deviation of the Gaussian noise, in stars.
    """
    stars = np.ones(len(scores))
    for threshold in STAR_THRESHOLDS:
        exceeds = (scores - threshold) / (noise * math.sqrt(2.0))
        stars += 0.5 * (1.0 + _erf(exceeds).astype(np.float64))
    return stars


@dataclass(frozen=True)
class Truth:
    """Hold the errors between which every honest model lies, on the evaluation split.

    `baseline_rmse` is the error of always predicting the mean of the training split;
    `floor_rmse` that of `expected_star`, both realised on the rows of the split;
    `floor_stderr` is the standard error of the floor's mean SQUARED error.
    """

    baseline_rmse: float
    floor_rmse: float
    floor_stderr: float
    num_eval: int

    def explained_share(self, rmse: float) -> float:
        """Return the part of the explainable variance that a model explains.

            share = (baseline_rmse^2 - rmse^2) / (baseline_rmse^2 - floor_rmse^2)

        1 is perfect, 0 is no better than the mean, below 0 is worse than the mean. NaN when the
        split has nothing to explain, which happens only on a handful of rows.
        """
        explainable = self.baseline_rmse**2 - self.floor_rmse**2
        if explainable <= 0.0:
            return math.nan
        return (self.baseline_rmse**2 - rmse**2) / explainable

    def is_leak(self, rmse: float) -> bool:
        """Say whether an error is too small to be honest: the model saw what it must not see."""
        return rmse**2 < self.floor_rmse**2 - LEAK_STANDARD_ERRORS * self.floor_stderr

    def to_json(self) -> dict[str, float | int]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, float | int]) -> Truth:
        """Rebuild what `to_json` returned.

        Raises:
            DataError: A field is missing or unknown.
        """
        names = [f.name for f in fields(cls)]
        if sorted(values) != sorted(names):
            raise DataError(
                f"truth: its fields must be {', '.join(names)}. Got {', '.join(sorted(values))}. "
                "It was written by another version. Remove the folder to have it made again."
            )
        return cls(
            baseline_rmse=float(values["baseline_rmse"]),
            floor_rmse=float(values["floor_rmse"]),
            floor_stderr=float(values["floor_stderr"]),
            num_eval=int(values["num_eval"]),
        )


class TruthTally:
    """Gather the truth chunk by chunk, in a few numbers, whatever the number of rows."""

    def __init__(self) -> None:
        self._num_train = 0
        self._train_sum = 0.0
        self._num_eval = 0
        self._eval_sum = 0.0
        self._eval_squares = 0.0
        self._floor_errors = 0.0
        self._floor_errors_squared = 0.0

    def add_train(self, stars: NDArray[np.float64]) -> None:
        """Count training rows, whose mean is the baseline's prediction."""
        self._num_train += len(stars)
        self._train_sum += float(stars.sum())

    def add_eval(self, stars: NDArray[np.float64], best: NDArray[np.float64]) -> None:
        """Count evaluation rows with the best prediction for each."""
        errors = (stars - best) ** 2
        self._num_eval += len(stars)
        self._eval_sum += float(stars.sum())
        self._eval_squares += float((stars**2).sum())
        self._floor_errors += float(errors.sum())
        self._floor_errors_squared += float((errors**2).sum())

    def result(self) -> Truth | None:
        """Return the truth about all rows seen; None while one of the splits is empty."""
        if not (self._num_train and self._num_eval):
            return None
        mean = self._train_sum / self._num_train
        # Stars are small integers, so these sums are exact and the expansion loses nothing.
        baseline = (self._eval_squares - 2 * mean * self._eval_sum) / self._num_eval + mean**2
        floor = self._floor_errors / self._num_eval
        variance = max(self._floor_errors_squared / self._num_eval - floor**2, 0.0)
        return Truth(
            baseline_rmse=math.sqrt(max(baseline, 0.0)),
            floor_rmse=math.sqrt(floor),
            floor_stderr=math.sqrt(variance / self._num_eval),
            num_eval=self._num_eval,
        )
