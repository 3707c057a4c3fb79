"""Exercises on continual learning: forgetting, the Fisher information and elastic weight consolidation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Part, call
from grpo_edu.checks.inputs import Diagonal, Training, Weights, gradient_of, numbers

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


# ---- backward_transfer ----
def backward_transfer(matrix: Matrix) -> float:
    """Return the mean change of a task since its own stage, of all tasks but the last."""
    tasks = len(matrix[0]) - 1
    changes = [matrix[-1][task] - matrix[task + 1][task] for task in range(tasks)]
    return sum(changes) / len(changes)


check_backward_transfer = Exercise(
    backward_transfer,
    parts=(Part("three tasks or four", 2, _late_best), Part("two tasks", 1, lambda rng: call(_matrix(rng, 2)))),
    changes="""
        the row is one too early: matrix[task + 1][task] -> matrix[task][task]
            Row 0 is the model before any stage, so task 0 has been taught only in row 1.
        the last task counts as well: range(tasks) -> range(tasks + 1)
            No stage came after it: divide by T − 1.
        the sign is wrong: -backward_transfer(matrix)
            Subtract the accuracy after the task's own stage from the final one, so that a loss is negative.
        the changes are added up, not averaged: sum(changes) / len(changes) -> sum(changes)
            Take the mean over the T − 1 tasks.
        the last row is compared with the task's best accuracy: -forgetting(matrix, range(len(matrix[0])))
            That is minus the forgetting. Here, compare with the accuracy after the task's own stage.
        the last row is compared with the model before any stage: matrix[task + 1][task] -> matrix[0][task]
            What a task's own stage has taught is not transfer. Compare with the accuracy after that stage.
    """,
)


# ---- forgetting ----
def forgetting(matrix: Matrix, order: Sequence[int]) -> float:
    """Return the mean loss since a task's best moment from its own stage on, of all tasks but the last one taught."""
    lost = []
    for stage, task in enumerate(order[:-1], 1):
        before = matrix[stage:-1]
        lost.append(max(row[task] for row in before) - matrix[-1][task])
    return sum(lost) / len(lost)


ORDERS = ([1, 2, 0], [2, 0, 1], [1, 2, 3, 0], [3, 0, 1, 2], [2, 3, 1, 0], [1, 3, 0, 2])  # none is its own inverse


def _late_best_in_order(rng: random.Random) -> Call:
    order = rng.choice(ORDERS)
    matrix = _matrix(rng, len(order))
    matrix[2][order[0]] = round(rng.uniform(0.7, 0.9), 2)  # the first task was best after the second stage
    return call(matrix, order)


def _gained_and_known(rng: random.Random) -> Call:
    order = rng.choice(ORDERS)
    matrix = _matrix(rng, len(order))
    matrix[-1][order[0]] = round(rng.uniform(0.7, 0.9), 2)  # the first task is best in the end
    matrix[0][order[1]] = round(rng.uniform(0.7, 0.9), 2)  # the second was known before any stage
    return call(matrix, order)


check_forgetting = Exercise(
    forgetting,
    parts=(
        Part("a task that was best after a later stage", 2, _late_best_in_order),
        Part(
            "a task that went on getting better, and one that was known before",
            1,
            _gained_and_known,
            always=(call([[0.1, 0.5, 0.2], [0.2, 0.3, 0.6], [0.7, 0.4, 0.3], [0.8, 0.2, 0.4]], [1, 2, 0]),),
        ),
    ),
    changes="""
        `order` is not used: enumerate(order[:-1], 1) -> enumerate(range(len(order) - 1), 1)
            A column is a task, and `order` says which stage taught it. Here they differ.
        the order is read the other way round:
            enumerate(order[:-1], 1) -> [(s + 1, task) for task, s in enumerate(order) if matrix[s + 1 : -1]]
            `order[0]` is the task that the first stage taught. It is not the stage that taught task 0.
        only the row after the task's own stage is used: max(row[task] for row in before) -> before[0][task]
            That is minus the backward transfer. A task may have been at its best after a later stage.
        the last task counts as well: sum(lost) / len(lost) -> sum(lost) / len(order)
            Nothing came after it, so nothing can be lost: divide by T − 1.
        the last row counts as a best moment: matrix[stage:-1] -> matrix[stage:]
            If a task is best in the end, it was not forgotten at all, and its loss is negative, not 0.
        rows before the task's own stage count: matrix[stage:-1] -> matrix[:-1]
            Start at the row after the task's own stage.
        the first row is one too early: matrix[stage:-1] -> matrix[stage - 1 : -1]
            Row 0 is the model before any stage: the first stage ends in row 1.
        all rows count: matrix[stage:-1] -> matrix
            Leave out the rows before the end of the task's own stage, and the last row.
            or: matrix[stage:-1] -> matrix[stage - 1 :]
        the losses are added up, not averaged: sum(lost) / len(lost) -> sum(lost)
            Take the mean over the tasks.
    """,
)


# ---- choose_protection ----
def choose_protection(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    """Return what to do about forgetting with the interval (low, high): the rules of the exercise, in their order."""
    if high <= tolerated:
        return "nothing"
    if low <= tolerated:
        return "more seeds"
    if rate_can_fall:
        return "lower rate"
    return "replay" if old_data_kept else "ewc"


def _curriculum(rng: random.Random, low_from: float, low_to: float) -> Call:
    low = round(rng.uniform(low_from, low_to), 2)
    high = round(low + rng.uniform(0.05, 0.3), 2)
    return call(low, high, rng.choice([0.02, 0.05, 0.08]), rng.random() < 0.5, rng.random() < 0.5)


_BORDERS = (  # the tolerated loss at either end of the interval, and above 0 but within it
    call(-0.11, 0.05, 0.05, True, False),
    call(0.05, 0.21, 0.05, False, True),
    call(0.02, 0.24, 0.05, True, True),
)

_SITUATIONS = tuple(call(0.22, 0.41, 0.05, falls, kept) for falls in (True, False) for kept in (True, False))


check_choose_protection = Exercise(
    choose_protection,
    parts=(
        Part("is anything lost?", 2, lambda rng: _curriculum(rng, -0.3, 0.06), draws=24, always=_BORDERS),
        Part("what to do against it", 2, lambda rng: _curriculum(rng, 0.1, 0.4), draws=16, always=_SITUATIONS),
    ),
    changes="""
        the middle of the interval decides:
            choose_protection((low + high) / 2, (low + high) / 2, tolerated, rate_can_fall, old_data_kept)
            An interval that reaches to both sides of the tolerated loss leaves the question open.
        the interval is compared with 0, not with the tolerated loss:
            choose_protection(low, high, 0.0, rate_can_fall, old_data_kept)
            A loss that is tolerated needs no protection.
        the interval is ignored: choose_protection(1.0, 1.0, 0.0, rate_can_fall, old_data_kept)
            First measure whether anything is lost.
        the answer is never "more seeds": if low <= tolerated -> if False
            If the tolerated loss lies within the interval, nothing has been shown yet.
            or: if high <= tolerated -> if low <= tolerated
        a loss counts as shown as soon as it is above 0: if low <= tolerated -> if low <= 0
            A loss has been shown only if even `low` is above the tolerated loss.
        the tolerated loss itself is not tolerated:
            choose_protection(low, high, tolerated - 1e-6, rate_can_fall, old_data_kept)
            A loss of exactly `tolerated` is still accepted: use `<=` for both ends of the interval.
            or: if low <= tolerated -> if low < tolerated
            or: if high <= tolerated -> if high < tolerated
        replay comes before a lower rate: if rate_can_fall -> if rate_can_fall and not old_data_kept
            The first rule that applies counts. A lower rate needs no data.
        the learning rate is not tried first: if rate_can_fall -> if False
            A lower rate needs no old data and no memory.
        EWC is chosen although the old data are available: "replay" if old_data_kept else "ewc" -> "ewc"
            EWC is for tasks whose data are no longer available.
    """,
)


# ---- softmax_fisher ----
def softmax_fisher(weight: Tensor, inputs: Tensor) -> Tensor:
    """(K, D), the mean over examples of p_k (1 − p_k) x_i², with p = softmax(W x)."""
    p = (inputs @ weight.T).softmax(dim=1)
    scores, squares = p * (1 - p), inputs.square()
    return scores.T @ squares / len(inputs)


def _classes(rng: random.Random, *num_classes: int) -> Call:
    features = rng.choice([2, 3])
    return call(numbers(rng, rng.choice(num_classes), features), numbers(rng, 5, features))


check_softmax_fisher = Exercise(
    softmax_fisher,
    parts=(
        Part("three classes or four", 3, lambda rng: _classes(rng, 3, 4)),
        Part("two classes", 1, lambda rng: _classes(rng, 2)),
    ),
    changes="""
        only the most likely label counts: p * (1 - p) -> (torch.eye(len(weight))[p.argmax(dim=1)] - p).square()
            The mean goes over all labels, each with its probability.
        labels are not weighted by their probability: p * (1 - p) -> (1 - p).square() + (len(weight) - 1) * p.square()
            An unlikely label counts little.
        the factor 1 − p is missing: p * (1 - p) -> p
            A model that is sure, p = 1, has no Fisher information.
            or: p * (1 - p) -> p * p
        x is not squared: inputs.square() -> inputs
            The score contains x once, and the Fisher information is the mean of its square.
        the examples are added up, not averaged: squares / len(inputs) -> squares
            Take the mean over the examples.
        means are taken before the product:
            scores.T @ squares / len(inputs) -> torch.outer(scores.mean(dim=0), squares.mean(dim=0))
            The mean of a product is not the product of means.
        the softmax is taken over the examples: softmax(dim=1) -> softmax(dim=0)
            The probabilities of the classes of one example add up to 1.
    """,
)


# ---- squares_a_mean ----
def squares_a_mean(fishers: list[Diagonal]) -> int:
    """Return the place of the implementation that squares a mean: with scores 1 and −1 it sees nothing."""
    scores = torch.tensor([[1.0], [-1.0]])
    values = [fisher(scores).item() for fisher in fishers]
    return values.index(min(values))


def _implementations(rng: random.Random, wrong: int) -> Call:
    fishers = rng.sample([Diagonal(0), Diagonal(1), Diagonal(2)], 3)
    fishers.insert(rng.choice([0, 0, 1, 2, 3]), Diagonal(wrong))  # often where a guess falls
    return call(fishers)


check_squares_a_mean = Exercise(
    squares_a_mean,
    parts=(
        Part("a squared mean", 2, lambda rng: _implementations(rng, 3), draws=16),
        Part(
            "a squared mean that was multiplied by n, to make up for it",
            1,
            lambda rng: _implementations(rng, 4),
            draws=16,
        ),
    ),
    changes="""
        nothing cancels in your scores: [[1.0], [-1.0]] -> [[2.0]]
            With one example, or with equal ones, all four agree.
        the function is found by the size of its result alone: [[1.0], [-1.0]] -> [[1.0], [3.0]]
            The result may have been multiplied by n. Use scores whose mean is 0.
        the largest result is taken: min(values) -> max(values)
            Gradients that cancel give a smaller value.
        positions are counted from 1: squares_a_mean(fishers) + 1
            The first position of a list is 0.
        the function itself is returned, not its position: fishers[squares_a_mean(fishers)]
            Return its position in the list, an integer.
    """,
)


# ---- ewc_penalty ----
Anchors = list[tuple[Weights, Weights]]  # of each earlier task the Fisher and the weights


def ewc_penalty(weights: Weights, anchors: Anchors, ewc_lambda: float) -> Tensor:
    """λ/2 Σ F (θ − θ*)², over the weights that each task's Fisher names, and over the tasks."""
    terms = []
    for fisher, old_weights in anchors:
        for name, importance in fisher.items():
            distance = weights[name] - old_weights[name]
            terms.append((importance * distance**2).sum())
    return ewc_lambda / 2 * torch.stack(terms).sum()


SHAPES = {"layer": (1, 2), "bias": (2,)}


def _anchored(rng: random.Random, tasks: int) -> Call:
    def tensors(low: float = -2.0, high: float = 2.0) -> Weights:
        return {name: numbers(rng, *shape, low=low, high=high) for name, shape in SHAPES.items()}

    anchors = [(tensors(low=0.0, high=3.0), tensors()) for _ in range(tasks)]
    return call(tensors(), anchors, rng.choice([3.0, 10.0, 50.0]))


def _one_free(rng: random.Random) -> Call:
    made = _anchored(rng, 2)
    rng.choice(made.args[1])[0].pop("bias")
    return made


check_ewc_penalty = Exercise(
    ewc_penalty,
    parts=(
        Part("one earlier task", 1, lambda rng: _anchored(rng, 1)),
        Part("two, one of which leaves a weight free", 1, _one_free),
        Part("the gradient, with two", 1, lambda rng: _anchored(rng, 2), ask=gradient_of),
    ),
    changes="""
        the factor 1/2 is missing: ewc_lambda / 2 -> ewc_lambda
            The factor is λ/2, so that the derivative is λ F (θ − θ*).
        λ is missing: ewc_lambda / 2 -> 1 / 2
            `ewc_lambda` says how much the old task counts.
        the Fisher information is squared too: importance * distance**2 -> (importance * distance) ** 2
            Only the distance is squared: F (θ − θ*)².
        the distance is not squared: distance**2 -> distance.abs()
            The penalty is F (θ − θ*)².
        the Fisher information is not used: importance * distance**2 -> distance**2
            That is plain L2 regularization. Each weight needs its own importance.
        the anchor is not used: weights[name] - old_weights[name] -> weights[name]
            The penalty pulls back towards θ*, not towards 0.
        only the first task is protected: in anchors -> in anchors[:1]
            Every earlier task has springs of its own: go through the whole list.
        only the newest task is protected: in anchors -> in anchors[-1:]
            Every earlier task has springs of its own: go through the whole list.
        all tasks pull towards the newest weights: old_weights[name] -> anchors[-1][1][name]
            The springs of each task pull towards the weights at the end of that task.
        the penalty is divided by the number of tasks: ewc_lambda / 2 -> ewc_lambda / 2 / len(anchors)
            The springs of all tasks add up.
        the mean is taken instead of the sum: (importance * distance**2).sum() -> (importance * distance**2).mean()
            Add up over all weights.
        a weight without Fisher information is looked up in it:
            fisher.items() -> [(name, fisher[name]) for name in weights]
            Go through the names in `fisher`. All other weights are free to move.
    """,
)


# ---- protected ----
def protected(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    """Return what `train` returns, with the EWC penalty around the weights as they are at the call."""
    anchor = {name: weight.detach().clone() for name, weight in weights.items()}
    return train(weights, lambda now: ewc_penalty(now, [(fisher, anchor)], ewc_lambda))


def _some_training(rng: random.Random) -> Call:
    shapes = {"layer": (2, 2), "bias": (2,)}
    weights = {name: numbers(rng, *shape).requires_grad_() for name, shape in shapes.items()}
    fisher = {name: numbers(rng, *shape, low=0.5, high=2.0) for name, shape in shapes.items()}
    train = Training(rng.choice([3.0, -4.0]), rng.choice([0.1, 0.2]), rng.choice([3, 4]))
    return call(weights, fisher, rng.choice([0.8, 1.5]), train)


check_protected = Exercise(
    protected,
    parts=(Part("a short training in place", 3, _some_training),),
    changes="""
        the anchor is not a copy: weight.detach().clone() -> weight.detach()
            Training changes the weights in place. Does your anchor share memory with them?
        the anchor is part of the graph: weight.detach().clone() -> weight.clone()
            The gradient also flows through the anchor and cancels out, so the penalty has no effect. Use `detach()`.
        the penalty has no gradient: , ewc_lambda) -> , ewc_lambda).detach()
            Such a penalty does not hold the weights back. Compute it from the weights themselves and leave it a tensor,
            without `.item()`, `float()` or `.detach()`.
        the factor 1/2 is missing: , ewc_lambda) -> , 2 * ewc_lambda)
            The factor is λ/2, as in `ewc_penalty`.
        the Fisher information is not used: (fisher, -> ({name: torch.ones_like(f) for name, f in fisher.items()},
            That is plain L2 regularization. Each weight needs its own importance.
        a copy is trained:
            train(weights -> train({name: w.detach().clone().requires_grad_() for name, w in weights.items()}
            Train the weights that were passed in; the copy is the anchor.
        the weights are returned: protected(weights, fisher, ewc_lambda, train) and weights
            Return what `train` returns.
        the penalty pulls towards 0, not towards the old weights: weight.detach().clone() -> torch.zeros_like(weight)
            The anchor holds the weights as they are at the call.
    """,
)
