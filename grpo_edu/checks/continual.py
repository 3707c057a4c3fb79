"""Exercises of notebook 08, first part: what a curriculum lost, read off its matrix."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from grpo_edu import forgetting as measures
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

Matrix = list[list[float]]

# ---- inputs ----


def _matrix(rng: random.Random, tasks: int) -> Matrix:
    """(T + 1) x T accuracies below 0.6, all different."""
    values = [number / 100 for number in rng.sample(range(2, 60), (tasks + 1) * tasks)]
    return [values[row * tasks : (row + 1) * tasks] for row in range(tasks + 1)]


def _late_best(rng: random.Random) -> Call:
    matrix = _matrix(rng, rng.choice([3, 4]))
    matrix[2][0] = round(rng.uniform(0.7, 0.9), 2)  # the first task was best after the second stage
    return call(matrix)


def _two_tasks(rng: random.Random) -> Call:
    return call(_matrix(rng, 2))


def _gained_and_known(rng: random.Random) -> Call:
    matrix = _matrix(rng, rng.choice([3, 4]))
    matrix[-1][0] = round(rng.uniform(0.7, 0.9), 2)  # the first task is best in the end
    matrix[0][1] = round(rng.uniform(0.7, 0.9), 2)  # the second was known before any stage
    return call(matrix)


# ---- backward_transfer ----


def backward_transfer(matrix: Matrix) -> float:
    """The package's."""
    return measures.backward_transfer(matrix)


def _transfer_by_loop(matrix: Matrix) -> float:
    tasks, total = len(matrix[0]), 0.0
    for task in range(tasks - 1):
        total += matrix[tasks][task] - matrix[task + 1][task]
    return total / (tasks - 1)


def _transfer_by_diagonal(matrix: Matrix) -> float:
    table = np.array(matrix)
    return float((table[-1, :-1] - np.diag(table[1:])[:-1]).mean())


def _transfer_by_zip(matrix: Matrix) -> float:
    changes = [last - after[task] for task, (after, last) in enumerate(zip(matrix[1:-1], matrix[-1], strict=False))]
    return sum(changes) / len(changes)


def _mean_change(matrix: Matrix, before: Callable[[int], float], count: int) -> float:
    return sum(matrix[-1][task] - before(task) for task in range(count)) / count


check_backward_transfer = Exercise(
    "backward_transfer",
    backward_transfer,
    parts=(
        Part("three tasks or four", 2, _late_best),
        Part("two tasks", 1, _two_tasks),
    ),
    mistakes=(
        Mistake("the row is one too early", "Row 0 is the model before any stage; task 0 is taught before row 1.",
                lambda matrix: _mean_change(matrix, lambda task: matrix[task][task], len(matrix[0]) - 1)),
        Mistake("the last task counts as well", "No stage came after it: divide by T − 1.",
                lambda matrix: _mean_change(matrix, lambda task: matrix[task + 1][task], len(matrix[0]))),
        Mistake("the sign is turned around", "In the end minus after its own stage: a loss is negative.",
                lambda matrix: -backward_transfer(matrix)),
        Mistake("the changes are added up", "A mean over the tasks, of which there are T − 1.",
                lambda matrix: backward_transfer(matrix) * (len(matrix[0]) - 1)),
        Mistake("it is compared with the task's best moment", "That would be minus the forgetting. Here: after the "
                "task's own stage.", lambda matrix: -measures.forgetting(matrix)),
        Mistake("it is compared with the model before any stage", "What the task's own stage taught is no transfer.",
                lambda matrix: _mean_change(matrix, lambda task: matrix[0][task], len(matrix[0]) - 1)),
    ),
    right=(_transfer_by_loop, _transfer_by_diagonal, _transfer_by_zip),
)  # fmt: skip


# ---- forgetting ----


def forgetting(matrix: Matrix) -> float:
    """The package's."""
    return measures.forgetting(matrix)


def _forgetting_by_columns(matrix: Matrix) -> float:
    lost = []
    for task, column in enumerate(list(zip(*matrix, strict=True))[:-1]):
        *earlier, end = column[task + 1 :]
        lost.append(max(earlier) - end)
    return sum(lost) / len(lost)


def _forgetting_by_mask(matrix: Matrix) -> float:
    table = torch.tensor(matrix, dtype=torch.float64)
    taught = torch.ones_like(table).tril(-1).bool()  # rows from a task's own stage on
    best = table.masked_fill(~taught, -torch.inf)[:-1].amax(dim=0)
    return (best - table[-1])[:-1].mean().item()


def _forgetting_by_running(matrix: Matrix) -> float:
    best: list[float] = []
    for stage, row in enumerate(matrix[1:-1]):
        best = [max(old, new) for old, new in zip(best, row, strict=False)] + [row[stage]]
    return float(np.mean([old - new for old, new in zip(best, matrix[-1], strict=False)]))


def _mean_loss(matrix: Matrix, first: Callable[[int], int], last: int) -> float:
    """Best of the rows from `first(task)` up to `last`, minus the last row; a mean over all tasks but the last."""
    lost = [
        max(row[task] for row in matrix[first(task) : last]) - matrix[-1][task] for task in range(len(matrix[0]) - 1)
    ]
    return sum(lost) / len(lost)


check_forgetting = Exercise(
    "forgetting",
    forgetting,
    parts=(
        Part("a task that was best after a later stage", 2, _late_best),
        Part("a task that went on getting better, and one that was known before", 1, _gained_and_known,
             always=(call([[0.5, 0.2, 0.1], [0.3, 0.6, 0.2], [0.4, 0.3, 0.7], [0.2, 0.4, 0.8]]),)),
    ),
    mistakes=(
        Mistake("it is compared with the task's own stage only", "That is minus the backward transfer. A task may have "
                "been at its best later.", lambda matrix: -measures.backward_transfer(matrix)),
        Mistake("the last task counts as well", "Nothing came after it, so nothing can be lost: divide by T − 1.",
                lambda matrix: measures.forgetting(matrix) * (len(matrix[0]) - 1) / len(matrix[0])),
        Mistake("the last row is among the best moments", "A task that is best in the end was not forgotten at all: "
                "its loss is negative, not 0.", lambda matrix: _mean_loss(matrix, lambda task: task + 1, len(matrix))),
        Mistake("rows before the task's own stage count", "Only from the row after its own stage on was it taught.",
                lambda matrix: _mean_loss(matrix, lambda task: 0, len(matrix) - 1)),
        Mistake("the first row is one too early", "Row 0 is the model before any stage: task j is taught by the stage "
                "that ends in row j + 1.", lambda matrix: _mean_loss(matrix, lambda task: task, len(matrix) - 1)),
        Mistake("all rows count", "Neither the rows before the task's own stage, nor the last one.",
                lambda matrix: _mean_loss(matrix, lambda task: 0, len(matrix)),
                also=(lambda matrix: _mean_loss(matrix, lambda task: task, len(matrix)),)),
        Mistake("the losses are added up", "A mean over the tasks.",
                lambda matrix: measures.forgetting(matrix) * (len(matrix[0]) - 1)),
    ),
    right=(_forgetting_by_columns, _forgetting_by_mask, _forgetting_by_running),
)  # fmt: skip
