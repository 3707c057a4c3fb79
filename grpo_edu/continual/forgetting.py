"""Forgetting and transfer, computed from the accuracy on every task after every stage of a curriculum.

The accuracies form a matrix. Row 0 is the model before any stage, row i is the model after stage i, and column j is
task j; stage i teaches task i. Transfer is defined by Lopez-Paz and Ranzato 2017 (arXiv 1706.08840), forgetting by
Chaudhry et al. 2018 (arXiv 1801.10112). Every number comes with an interval: over problems for one run, or over seeds
for several runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from grpo_edu.evaluation import Estimate, Evaluation

MEASURES = ("average_accuracy", "forgetting", "backward_transfer", "forward_transfer")


def average_accuracy(matrix: Sequence[Sequence[float]]) -> float:
    r"""Mean accuracy over the T tasks after the last stage: :math:`\frac1T \sum_j a_{T,j}`.

    >>> average_accuracy([[0.0, 0.0], [0.8, 0.2], [0.4, 1.0]])
    0.7
    """
    return float(np.mean(_checked(matrix)[-1]))


def forgetting(matrix: Sequence[Sequence[float]]) -> float:
    r"""Mean loss of accuracy since the best stage, over all tasks except the last one.

    .. math:: \frac{1}{T-1} \sum_{j<T} \big(\max_{j \le i < T} a_{i,j} - a_{T,j}\big)

    Chaudhry et al. 2018, where the best stage is sought from the task's own stage on. It is negative where later
    stages improved the task.

    >>> forgetting([[0.0, 0.0], [0.8, 0.2], [0.5, 1.0]])
    0.3
    """
    rows = _checked(matrix)
    last = len(rows) - 1
    losses = [rows[task + 1 : last, task].max() - rows[last, task] for task in range(last - 1)]
    return _clean(np.mean(losses))


def backward_transfer(matrix: Sequence[Sequence[float]]) -> float:
    r"""Mean effect of later stages on earlier tasks: :math:`\frac{1}{T-1} \sum_{j<T} (a_{T,j} - a_{j,j})`.

    Lopez-Paz and Ranzato 2017. For two tasks it equals minus the forgetting.

    >>> backward_transfer([[0.0, 0.0], [0.8, 0.2], [0.5, 1.0]])
    -0.3
    """
    rows = _checked(matrix)
    last = len(rows) - 1
    return _clean(np.mean([rows[last, task] - rows[task + 1, task] for task in range(last - 1)]))


def forward_transfer(matrix: Sequence[Sequence[float]]) -> float:
    r"""Mean effect of earlier stages on later tasks: :math:`\frac{1}{T-1} \sum_{j>1} (a_{j-1,j} - a_{0,j})`.

    Lopez-Paz and Ranzato 2017, against the model before any stage.

    >>> forward_transfer([[0.0, 0.1], [0.8, 0.3], [0.5, 1.0]])
    0.2
    """
    rows = _checked(matrix)
    return _clean(np.mean([rows[task, task] - rows[0, task] for task in range(1, rows.shape[1])]))


def _clean(value: float) -> float:
    """Remove the rounding error of the last digits, so that 0.8 − 0.5 prints as 0.3."""
    return round(float(value), 12)


_FUNCTIONS: dict[str, Callable[[Any], float]] = {
    "average_accuracy": average_accuracy,
    "forgetting": forgetting,
    "backward_transfer": backward_transfer,
    "forward_transfer": forward_transfer,
}


@dataclass(frozen=True)
class AccuracyMatrix:
    """The held-out problems solved after each stage.

    tasks: T names. correct: T + 1 rows (before any stage, then after each) of T lists of bools, one per problem; a
    task's problems are the same in every row.
    """

    tasks: tuple[str, ...]
    correct: tuple[tuple[tuple[bool, ...], ...], ...]

    @classmethod
    def from_evaluations(cls, tasks: Sequence[str], rows: Sequence[Sequence[Evaluation]]) -> AccuracyMatrix:
        """Build the matrix from one `Evaluation` per task and row; raises ValueError if the problems differ."""
        for row in rows:
            for task, first, other in zip(tasks, rows[0], row, strict=True):
                if first.prompts != other.prompts:
                    raise ValueError(f"rows: {task} was evaluated on other problems in other rows; use one list")
        return cls(tuple(tasks), tuple(tuple(tuple(part.correct) for part in row) for row in rows))

    def accuracies(self) -> list[list[float]]:
        """Shares of problems solved, (T + 1) × T."""
        return [[sum(part) / len(part) for part in row] for row in self.correct]

    def measures(self, *, num_resamples: int = 2000, seed: int = 0) -> dict[str, Estimate]:
        """Return the four measures with 95% percentile bootstrap intervals (Efron 1979) over problems.

        A problem keeps its outcomes after all stages, so that the comparison of stages stays paired. The interval shows
        how much the choice of problems matters. How much the random seed of the training matters can be seen only from
        several runs (`grpo_edu.evaluation.mean_estimate`).
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
            "measures": {name: asdict(estimate) for name, estimate in self.measures().items()},
        }


def _checked(matrix: Sequence[Sequence[float]]) -> np.ndarray:
    rows = np.asarray(matrix, dtype=float)
    if rows.ndim != 2 or rows.shape[0] != rows.shape[1] + 1 or rows.shape[1] < 2:
        raise ValueError(
            "matrix: must have a row before any stage and one after each of T >= 2 stages, shape (T + 1, T), "
            f"got shape {rows.shape}"
        )
    return rows
