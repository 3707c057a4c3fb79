"""What a curriculum did to each task: the matrix of accuracies after each stage, and the numbers read off it.

Row 0 is the model before any stage, row i the model after stage i; stage i teaches task i, and column j is task j.
Lopez-Paz and Ranzato 2017 (arXiv 1706.08840) read transfer off such a matrix, Chaudhry et al. 2018 (arXiv 1801.10112)
forgetting. Every number comes with an interval: over problems for one run, over seeds for several runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from grpo_edu.evaluation import Evaluation

MEASURES = ("average_accuracy", "forgetting", "backward_transfer", "forward_transfer")


@dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval, as shares: 0.25 stands for 25 points."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """The fields, ready for JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{100 * self.value:+.0f} points [{100 * self.low:+.0f}, {100 * self.high:+.0f}]"


def average_accuracy(matrix: Sequence[Sequence[float]]) -> float:
    r"""Mean accuracy over the T tasks after the last stage: :math:`\frac1T \sum_j a_{T,j}`.

    >>> average_accuracy([[0.0, 0.0], [0.8, 0.2], [0.4, 1.0]])
    0.7
    """
    return float(np.mean(_checked(matrix)[-1]))


def forgetting(matrix: Sequence[Sequence[float]]) -> float:
    r"""Mean over all tasks but the last of what was lost since the task's best moment.

    .. math:: \frac{1}{T-1} \sum_{j<T} \big(\max_{j \le i < T} a_{i,j} - a_{T,j}\big)

    Chaudhry et al. 2018, with the best moment counted from the task's own stage on. Negative where it still got
    better.

    >>> forgetting([[0.0, 0.0], [0.8, 0.2], [0.5, 1.0]])
    0.3
    """
    rows = _checked(matrix)
    last = len(rows) - 1
    losses = [rows[task + 1 : last, task].max() - rows[last, task] for task in range(last - 1)]
    return _clean(np.mean(losses))


def backward_transfer(matrix: Sequence[Sequence[float]]) -> float:
    r"""What later stages did to earlier tasks: :math:`\frac{1}{T-1} \sum_{j<T} (a_{T,j} - a_{j,j})`.

    Lopez-Paz and Ranzato 2017. For two tasks it is minus the forgetting.

    >>> backward_transfer([[0.0, 0.0], [0.8, 0.2], [0.5, 1.0]])
    -0.3
    """
    rows = _checked(matrix)
    last = len(rows) - 1
    return _clean(np.mean([rows[last, task] - rows[task + 1, task] for task in range(last - 1)]))


def forward_transfer(matrix: Sequence[Sequence[float]]) -> float:
    r"""What earlier stages did for later tasks: :math:`\frac{1}{T-1} \sum_{j>1} (a_{j-1,j} - a_{0,j})`.

    Lopez-Paz and Ranzato 2017, against the model before any stage.

    >>> forward_transfer([[0.0, 0.1], [0.8, 0.3], [0.5, 1.0]])
    0.2
    """
    rows = _checked(matrix)
    return _clean(np.mean([rows[task, task] - rows[0, task] for task in range(1, rows.shape[1])]))


def _clean(value: float) -> float:
    """Free of the last digit's rounding, so that a difference of two decimals prints as one."""
    return round(float(value), 12)


_FUNCTIONS: dict[str, Callable[[Any], float]] = {
    "average_accuracy": average_accuracy,
    "forgetting": forgetting,
    "backward_transfer": backward_transfer,
    "forward_transfer": forward_transfer,
}


@dataclass(frozen=True)
class AccuracyMatrix:
    """Which held-out problems were solved after each stage.

    tasks: T names. correct: T + 1 rows (before any stage, then after each) of T lists of bools, one a problem; a
    task's problems are the same in every row.
    """

    tasks: tuple[str, ...]
    correct: tuple[tuple[tuple[bool, ...], ...], ...]

    @classmethod
    def from_evaluations(cls, tasks: Sequence[str], rows: Sequence[Sequence[Evaluation]]) -> AccuracyMatrix:
        """From an `Evaluation` of each task for each row; raises ValueError where they are not of the same problems."""
        for row in rows:
            for task, first, other in zip(tasks, rows[0], row, strict=True):
                if first.prompts != other.prompts:
                    raise ValueError(f"rows: {task} was evaluated on other problems than before; use one list")
        return cls(tuple(tasks), tuple(tuple(tuple(part.correct) for part in row) for row in rows))

    def accuracies(self) -> list[list[float]]:
        """(T + 1) × T shares of problems solved."""
        return [[sum(part) / len(part) for part in row] for row in self.correct]

    def measures(self, *, num_resamples: int = 2000, seed: int = 0) -> dict[str, Estimate]:
        """The four measures with percentile bootstrap intervals (Efron 1979): problems are drawn with replacement.

        A problem keeps its row of outcomes, so that the comparison of stages stays paired. This interval is about the
        problems; what another seed of the training would give needs other runs (`mean_estimate`).
        """
        rng = np.random.default_rng(seed)
        columns = [np.array([row[task] for row in self.correct], dtype=float) for task in range(len(self.tasks))]
        draws: dict[str, list[float]] = {name: [] for name in MEASURES}
        for _ in range(num_resamples):
            picked = [column[:, rng.integers(column.shape[1], size=column.shape[1])] for column in columns]
            drawn = np.stack([column.mean(axis=1) for column in picked], axis=1)
            for name, values in draws.items():
                values.append(_FUNCTIONS[name](drawn))
        matrix = self.accuracies()
        return {
            name: Estimate(_FUNCTIONS[name](matrix), *(float(end) for end in np.percentile(values, [2.5, 97.5])))
            for name, values in draws.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Tasks, counts and measures, ready for JSON."""
        return {
            "tasks": list(self.tasks),
            "num_problems": [len(part) for part in self.correct[0]],
            "solved": [[sum(part) for part in row] for row in self.correct],
            "measures": {name: estimate.to_dict() for name, estimate in self.measures().items()},
        }


def mean_estimate(values: Sequence[float]) -> Estimate:
    r"""Mean over seeds with Student's interval: :math:`\bar x \pm t_{n-1} s / \sqrt n`, 95%.

    Raises ValueError for fewer than two values, which say nothing about how much they vary.

    >>> estimate = mean_estimate([0.2, 0.4])
    >>> round(estimate.value, 2), round(estimate.high - estimate.value, 2)  # t_1 = 12.7, s/√2 = 0.1
    (0.3, 1.27)
    """
    from scipy.stats import t

    if len(values) < 2:
        raise ValueError(f"values: {len(values)} say nothing about how much they vary; give at least two seeds")
    mean = float(np.mean(values))
    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Estimate(mean, mean - half, mean + half)


def _checked(matrix: Sequence[Sequence[float]]) -> np.ndarray:
    rows = np.asarray(matrix, dtype=float)
    if rows.ndim != 2 or rows.shape[0] != rows.shape[1] + 1 or rows.shape[1] < 2:
        raise ValueError(
            f"matrix: must have a row before any stage and one after each of T >= 2 stages, (T + 1) x T; "
            f"got shape {rows.shape}"
        )
    return rows
