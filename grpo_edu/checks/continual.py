"""Exercises on continual learning: forgetting, the Fisher information and elastic weight consolidation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from operator import le, lt
from typing import Any

import torch
from torch import Tensor, nn

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.inputs import Diagonal, Training, Weights, gradient_of, numbers
from grpo_edu.continual import forgetting as measures

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


def _gained_and_known(rng: random.Random) -> Call:
    matrix = _matrix(rng, rng.choice([3, 4]))
    matrix[-1][0] = round(rng.uniform(0.7, 0.9), 2)  # the first task is best in the end
    matrix[0][1] = round(rng.uniform(0.7, 0.9), 2)  # the second was known before any stage
    return call(matrix)


# ---- backward_transfer ----


def backward_transfer(matrix: Matrix) -> float:
    """The package's."""
    return measures.backward_transfer(matrix)


def _mean_change(matrix: Matrix, before: Callable[[int], float], count: int) -> float:
    return sum(matrix[-1][task] - before(task) for task in range(count)) / count


check_backward_transfer = Exercise(
    backward_transfer,
    parts=(Part("three tasks or four", 2, _late_best), Part("two tasks", 1, lambda rng: call(_matrix(rng, 2)))),
    mistakes={
        "the row is one too early": Mistake(
            "Row 0 is the model before any stage; task 0 is taught before row 1.",
            lambda matrix: _mean_change(matrix, lambda task: matrix[task][task], len(matrix[0]) - 1),
        ),
        "the last task counts as well": Mistake(
            "No stage came after it: divide by T − 1.",
            lambda matrix: _mean_change(matrix, lambda task: matrix[task + 1][task], len(matrix[0])),
        ),
        "the sign is turned around": Mistake(
            "In the end minus after its own stage: a loss is negative.", lambda matrix: -backward_transfer(matrix)
        ),
        "the changes are added up": Mistake(
            "A mean over the tasks, of which there are T − 1.",
            lambda matrix: backward_transfer(matrix) * (len(matrix[0]) - 1),
        ),
        "it is compared with the task's best moment": Mistake(
            "That would be minus the forgetting. Here: after the task's own stage.",
            lambda matrix: -measures.forgetting(matrix),
        ),
        "it is compared with the model before any stage": Mistake(
            "What the task's own stage taught is no transfer.",
            lambda matrix: _mean_change(matrix, lambda task: matrix[0][task], len(matrix[0]) - 1),
        ),
    },
)


# ---- forgetting ----


def forgetting(matrix: Matrix) -> float:
    """The package's."""
    return measures.forgetting(matrix)


def _mean_loss(matrix: Matrix, first: Callable[[int], int], last: int) -> float:
    """Best of the rows from `first(task)` up to `last`, minus the last row; a mean over all tasks but the last."""
    lost = [
        max(row[task] for row in matrix[first(task) : last]) - matrix[-1][task] for task in range(len(matrix[0]) - 1)
    ]
    return sum(lost) / len(lost)


check_forgetting = Exercise(
    forgetting,
    parts=(
        Part("a task that was best after a later stage", 2, _late_best),
        Part(
            "a task that went on getting better, and one that was known before",
            1,
            _gained_and_known,
            always=(call([[0.5, 0.2, 0.1], [0.3, 0.6, 0.2], [0.4, 0.3, 0.7], [0.2, 0.4, 0.8]]),),
        ),
    ),
    mistakes={
        "it is compared with the task's own stage only": Mistake(
            "That is minus the backward transfer. A task may have been at its best later.",
            lambda matrix: -measures.backward_transfer(matrix),
        ),
        "the last task counts as well": Mistake(
            "Nothing came after it, so nothing can be lost: divide by T − 1.",
            lambda matrix: measures.forgetting(matrix) * (len(matrix[0]) - 1) / len(matrix[0]),
        ),
        "the last row is among the best moments": Mistake(
            "A task that is best in the end was not forgotten at all: its loss is negative, not 0.",
            lambda matrix: _mean_loss(matrix, lambda task: task + 1, len(matrix)),
        ),
        "rows before the task's own stage count": Mistake(
            "Only from the row after its own stage on was it taught.",
            lambda matrix: _mean_loss(matrix, lambda task: 0, len(matrix) - 1),
        ),
        "the first row is one too early": Mistake(
            "Row 0 is the model before any stage: task j is taught by the stage that ends in row j + 1.",
            lambda matrix: _mean_loss(matrix, lambda task: task, len(matrix) - 1),
        ),
        "all rows count": Mistake(
            "Neither the rows before the task's own stage, nor the last one.",
            lambda matrix: _mean_loss(matrix, lambda task: 0, len(matrix)),
            also=(lambda matrix: _mean_loss(matrix, lambda task: task, len(matrix)),),
        ),
        "the losses are added up": Mistake(
            "A mean over the tasks.", lambda matrix: measures.forgetting(matrix) * (len(matrix[0]) - 1)
        ),
    },
)


# ---- choose_protection ----


def choose_protection(low: float, high: float, tolerated: float, rate_can_fall: bool, old_data_kept: bool) -> str:
    """What to do about forgetting with the interval (low, high): the rules of the exercise, in their order."""
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


def _first_rules(small: Callable[[float, float], bool], open_: Callable[[float, float], bool]) -> Callable[..., str]:
    """A wrong answer that decides otherwise whether a loss is small (high, tolerated) or open (low, tolerated)."""

    def wrong(low: float, high: float, tolerated: float, *situation: bool) -> str:
        if small(high, tolerated):
            return "nothing"
        return "more seeds" if open_(low, tolerated) else choose_protection(1.0, 1.0, tolerated, *situation)

    return wrong


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
    mistakes={
        "the middle of the interval decides": Mistake(
            "An interval that reaches to both sides of the tolerated loss leaves the question open.",
            lambda low, high, *rest: choose_protection((low + high) / 2, (low + high) / 2, *rest),
        ),
        "it is compared with 0, not with the tolerated loss": Mistake(
            "A loss that nobody minds needs no protection.",
            lambda low, high, tolerated, *situation: choose_protection(low, high, 0.0, *situation),
        ),
        "it protects without looking at the interval": Mistake(
            "First measure whether anything is lost.",
            lambda low, high, tolerated, *situation: choose_protection(1.0, 1.0, tolerated, *situation),
        ),
        "more seeds are never asked for": Mistake(
            "With the tolerated loss within the interval, nothing is shown yet.",
            _first_rules(le, lambda low, tolerated: False),
            also=(lambda low, high, *rest: choose_protection(low, low, *rest),),
        ),
        "a loss counts as shown as soon as it is above 0": Mistake(
            "It is shown where even `low` is above what is tolerated.",
            _first_rules(le, lambda low, tolerated: low <= 0),
        ),
        "the tolerated loss itself is not tolerated": Mistake(
            "At or below it: `<=`, at both ends of the interval.",
            _first_rules(lt, lt),
            also=(_first_rules(le, lt), _first_rules(lt, le)),
        ),
        "replay comes before a lower rate": Mistake(
            "The first rule that applies counts. A lower rate needs no data.",
            lambda low, high, tolerated, falls, kept: choose_protection(low, high, tolerated, falls and not kept, kept),
        ),
        "the learning rate is not tried first": Mistake(
            "A lower rate costs nothing, no data and no memory.",
            lambda low, high, tolerated, falls, kept: choose_protection(low, high, tolerated, False, kept),
        ),
        "EWC is taken although the old data are there": Mistake(
            "EWC is for when the data are gone.", lambda *given: choose_protection(*given).replace("replay", "ewc")
        ),
    },
)


# ---- softmax_fisher ----


def softmax_fisher(weight: Tensor, inputs: Tensor) -> Tensor:
    """(K, D), the mean over examples of p_k (1 − p_k) x_i², with p = softmax(W x)."""
    p = (inputs @ weight.T).softmax(dim=1)
    return (p * (1 - p)).T @ inputs.square() / len(inputs)


def _classes(num_classes: tuple[int, ...]) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        features = rng.choice([2, 3])
        return call(numbers(rng, rng.choice(num_classes), features), numbers(rng, 5, features))

    return draw


def _with_p(make: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A wrong answer that begins as the right one does."""
    return lambda weight, inputs: make((inputs @ weight.T).softmax(dim=1), inputs)


check_softmax_fisher = Exercise(
    softmax_fisher,
    parts=(Part("three classes or four", 3, _classes((3, 4))), Part("two classes", 1, _classes((2,)))),
    mistakes={
        "only the likeliest label counts": Mistake(
            "The mean goes over all labels, each with its probability.",
            _with_p(
                lambda p, x: (nn.functional.one_hot(p.argmax(dim=1), p.shape[1]) - p).square().T @ x.square() / len(x)
            ),
        ),
        "labels are not weighted with their probability": Mistake(
            "An unlikely label counts little.",
            _with_p(lambda p, x: ((1 - p).square() + (p.shape[1] - 1) * p.square()).T @ x.square() / len(x)),
        ),
        "the factor 1 − p is missing": Mistake(
            "A model that is sure, p = 1, has no Fisher information.",
            _with_p(lambda p, x: p.T @ x.square() / len(x)),
            also=(_with_p(lambda p, x: p.square().T @ x.square() / len(x)),),
        ),
        "x is not squared": Mistake(
            "The score holds x once; the Fisher is the mean of its square.",
            _with_p(lambda p, x: (p * (1 - p)).T @ x / len(x)),
        ),
        "examples are added up": Mistake(
            "A mean over the examples.", _with_p(lambda p, x: (p * (1 - p)).T @ x.square())
        ),
        "means are taken before the product": Mistake(
            "The mean of a product is not the product of means.",
            _with_p(lambda p, x: torch.outer((p * (1 - p)).mean(dim=0), x.square().mean(dim=0))),
        ),
        "softmax runs over the examples": Mistake(
            "The probabilities of the classes of one example add up to 1.",
            lambda weight, x: (lambda p: (p * (1 - p)).T @ x.square() / len(x))((x @ weight.T).softmax(dim=0)),
        ),
    },
)


# ---- squares_a_mean ----


def squares_a_mean(fishers: list[Diagonal]) -> int:
    """The place of the implementation that squares a mean: with scores 1 and −1 it sees nothing."""
    scores = torch.tensor([[1.0], [-1.0]])
    return min(range(len(fishers)), key=lambda place: fishers[place](scores).item())


def _implementations(wrong: int) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        fishers = rng.sample([Diagonal(0), Diagonal(1), Diagonal(2)], 3)
        fishers.insert(rng.choice([0, 0, 1, 2, 3]), Diagonal(wrong))  # often where a guess falls
        return call(fishers)

    return draw


def _smallest(fishers: list[Callable[[Tensor], Tensor]], scores: list[list[float]]) -> int:
    values = [round(fisher(torch.tensor(scores)).item(), 4) for fisher in fishers]
    return values.index(min(values))


check_squares_a_mean = Exercise(
    squares_a_mean,
    parts=(
        Part("a squared mean", 2, _implementations(3), draws=16),
        Part("a squared mean that was multiplied by n, to make up for it", 1, _implementations(4), draws=16),
    ),
    mistakes={
        "nothing cancels in your scores": Mistake(
            "With one example, or with equal ones, all four agree.", lambda fishers: _smallest(fishers, [[2.0]])
        ),
        "it is known by its size alone": Mistake(
            "Someone may have multiplied it by n. Give scores whose mean is 0.",
            lambda fishers: _smallest(fishers, [[1.0], [3.0]]),
        ),
        "the largest is taken": Mistake(
            "What cancels gets smaller.",
            lambda fishers: max(
                range(len(fishers)), key=lambda place: round(fishers[place](torch.tensor([[1.0], [-2.0]])).item(), 4)
            ),
        ),
        "places are counted from 1": Mistake(
            "The first of the list has place 0.", lambda fishers: squares_a_mean(fishers) + 1
        ),
        "this is the function itself, not its place": Mistake(
            "Return where it stands in the list, a whole number.", lambda fishers: fishers[squares_a_mean(fishers)]
        ),
    },
)


# ---- ewc_penalty ----


def ewc_penalty(weights: Weights, fisher: Weights, anchor_params: Weights, ewc_lambda: float) -> Tensor:
    """λ/2 Σ F (θ − θ*)² over the weights that the Fisher names."""
    terms = [(fisher[name] * (weights[name] - anchor_params[name]) ** 2).sum() for name in fisher]
    return ewc_lambda / 2 * torch.stack(terms).sum()


def _all_named(rng: random.Random) -> Call:
    shapes = {"layer": (2, 3), "bias": (2,)}
    weights, anchor = ({name: numbers(rng, *shape) for name, shape in shapes.items()} for _ in range(2))
    fisher = {name: numbers(rng, *shape, low=0.0, high=3.0) for name, shape in shapes.items()}
    return call(weights, fisher, anchor, rng.choice([3.0, 10.0, 50.0]))


def _one_free(rng: random.Random) -> Call:
    made = _all_named(rng)
    made.args[1].pop("bias")
    return made


def _term(make: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A wrong answer that adds up another term of F, θ and θ*."""

    def wrong(weights: Weights, fisher: Weights, anchor_params: Weights, ewc_lambda: float) -> Tensor:
        terms = [make(fisher[name], weights[name], anchor_params[name]).sum() for name in fisher]
        return ewc_lambda / 2 * torch.stack(terms).sum()

    return wrong


check_ewc_penalty = Exercise(
    ewc_penalty,
    parts=(
        Part("every weight has a Fisher", 1, _all_named),
        Part("a weight that the Fisher does not name", 1, _one_free),
        Part("its gradient", 1, lambda rng: replace(_all_named(rng), ask=gradient_of)),
    ),
    mistakes={
        "the half is missing": Mistake(
            "λ/2: its derivative is λ F (θ − θ*).",
            lambda weights, fisher, anchor, ewc_lambda: 2 * ewc_penalty(weights, fisher, anchor, ewc_lambda),
        ),
        "λ is missing": Mistake(
            "ewc_lambda says how much the old task is worth.",
            lambda weights, fisher, anchor, ewc_lambda: ewc_penalty(weights, fisher, anchor, 1.0),
        ),
        "the Fisher is squared too": Mistake(
            "Only the distance is squared: F (θ − θ*)².", _term(lambda f, now, then: (f * (now - then)) ** 2)
        ),
        "the distance is not squared": Mistake("F (θ − θ*)².", _term(lambda f, now, then: f * (now - then).abs())),
        "the Fisher plays no part": Mistake(
            "That is plain L2. Each weight's distance has its own price.", _term(lambda f, now, then: (now - then) ** 2)
        ),
        "the anchor plays no part": Mistake("It pulls back to θ*, not to 0.", _term(lambda f, now, then: f * now**2)),
        "a mean stands where a sum should": Mistake(
            "Add up over all weights.",
            lambda weights, fisher, anchor, ewc_lambda: sum(
                ewc_lambda / 2 * (fisher[name] * (weights[name] - anchor[name]) ** 2).mean() for name in fisher
            ),
        ),
        "the Fisher is asked for a weight that it does not name": Mistake(
            "Go through the names of `fisher`: the other weights are free.",
            lambda weights, fisher, *rest: ewc_penalty(weights, {name: fisher[name] for name in weights}, *rest),
        ),
    },
)


# ---- protected ----


def protected(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
    """What `train` returns, with the EWC penalty around the weights as they are at the call."""
    anchor = {name: weight.detach().clone() for name, weight in weights.items()}
    return train(weights, lambda now: ewc_penalty(now, fisher, anchor, ewc_lambda))


def _some_training(rng: random.Random) -> Call:
    shapes = {"layer": (2, 2), "bias": (2,)}
    weights = {name: numbers(rng, *shape).requires_grad_() for name, shape in shapes.items()}
    fisher = {name: numbers(rng, *shape, low=0.5, high=2.0) for name, shape in shapes.items()}
    train = Training(rng.choice([3.0, -4.0]), rng.choice([0.1, 0.2]), rng.choice([3, 4]))
    return call(weights, fisher, rng.choice([0.8, 1.5]), train)


def _anchored_at(
    anchor_of: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor] = lambda penalty: penalty
) -> Callable[..., dict[str, Any]]:
    """A wrong answer that makes its anchor, or what pulls at the weights, in another way."""

    def wrong(weights: Weights, fisher: Weights, ewc_lambda: float, train: Training) -> dict[str, Any]:
        anchor = {name: anchor_of(weight) for name, weight in weights.items()}
        return train(weights, lambda now: pull(ewc_penalty(now, fisher, anchor, ewc_lambda)))

    return wrong


check_protected = Exercise(
    protected,
    parts=(Part("a short training in place", 3, _some_training),),
    mistakes={
        "the anchor is no copy": Mistake(
            "The training changes the weights in place, and your anchor with them: the "
            "penalty stays 0. `clone()`, once, before the training.",
            _anchored_at(lambda weight: weight.detach()),
        ),
        "the anchor is part of the graph": Mistake(
            "The penalty is there, but its gradient is 0: what pulls at the "
            "weights pulls at the anchor as well. `detach()`.",
            _anchored_at(lambda weight: weight.clone()),
        ),
        "the penalty has no gradient": Mistake(
            "It pulls at nothing: a number, of `.item()` or `float()`, or made of "
            "weights that were detached. Leave it a tensor, of the weights themselves.",
            _anchored_at(lambda weight: weight.detach().clone(), lambda penalty: penalty.detach()),
        ),
        "the half is missing": Mistake(
            "λ/2, as in `ewc_penalty`.",
            lambda weights, fisher, ewc_lambda, train: protected(weights, fisher, 2 * ewc_lambda, train),
        ),
        "the Fisher plays no part": Mistake(
            "That is plain L2. Each weight's distance has its own price.",
            lambda weights, fisher, ewc_lambda, train: protected(
                weights, {name: torch.ones_like(values) for name, values in fisher.items()}, ewc_lambda, train
            ),
        ),
        "a copy is trained": Mistake(
            "The weights that were handed in are to learn; the copy is the anchor.",
            lambda weights, *rest: protected(
                {name: w.detach().clone().requires_grad_() for name, w in weights.items()}, *rest
            ),
        ),
        "the weights are returned": Mistake(
            "`train` returns what is asked for; hand it on.",
            lambda weights, *rest: protected(weights, *rest) and weights,
        ),
        "it pulls to 0, not to the old weights": Mistake(
            "The anchor holds the weights as they are at the call.", _anchored_at(torch.zeros_like)
        ),
    },
)
