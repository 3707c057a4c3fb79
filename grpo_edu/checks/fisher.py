"""Exercises of notebook 08, second part: the Fisher information of a softmax, and one that squares a mean."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers
from grpo_edu.fisher import fisher_diagonal

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


def _fisher_by_definition(weight: Tensor, inputs: Tensor) -> Tensor:
    total = torch.zeros_like(weight)
    for x in inputs:
        p = (weight @ x).softmax(dim=0)
        for label in range(len(p)):
            score = torch.outer(nn.functional.one_hot(torch.tensor(label), len(p)) - p, x)
            total += p[label] * score**2
    return total / len(inputs)


def _fisher_by_package(weight: Tensor, inputs: Tensor) -> Tensor:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    examples = [(x[None], torch.zeros(1, dtype=torch.long)) for x in inputs]
    return fisher_diagonal(layer, examples, kind="true", forward=lambda model, x, y: (model(x), y))["weight"]


def _fisher_by_einsum(weight: Tensor, inputs: Tensor) -> Tensor:
    p = torch.softmax(torch.einsum("kd,nd->nk", weight, inputs), dim=-1)
    return torch.einsum("nk,nd->nkd", p - p * p, inputs * inputs).mean(dim=0)


def _likeliest_label(weight: Tensor, inputs: Tensor) -> Tensor:
    p = (inputs @ weight.T).softmax(dim=1)
    label = nn.functional.one_hot(p.argmax(dim=1), p.shape[1])
    return (label - p).square().T @ inputs.square() / len(inputs)


def _unweighted_labels(weight: Tensor, inputs: Tensor) -> Tensor:
    p = (inputs @ weight.T).softmax(dim=1)
    return ((1 - p).square() + (p.shape[1] - 1) * p.square()).T @ inputs.square() / len(inputs)


def _with_p(make: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A wrong answer that begins as the right one does."""
    return lambda weight, inputs: make((inputs @ weight.T).softmax(dim=1), inputs)


check_softmax_fisher = Exercise(
    "softmax_fisher",
    softmax_fisher,
    parts=(
        Part("three classes or four", 3, _classes((3, 4))),
        Part("two classes", 1, _classes((2,))),
    ),
    mistakes=(
        Mistake("only the likeliest label counts", "The mean goes over all labels, each with its probability.",
                _likeliest_label),
        Mistake("labels are not weighted with their probability", "An unlikely label counts little.",
                _unweighted_labels),
        Mistake("the factor 1 − p is missing", "A model that is sure, p = 1, has no Fisher information.",
                _with_p(lambda p, x: p.T @ x.square() / len(x)),
                also=(_with_p(lambda p, x: p.square().T @ x.square() / len(x)),)),
        Mistake("x is not squared", "The score holds x once; the Fisher is the mean of its square.",
                _with_p(lambda p, x: (p * (1 - p)).T @ x / len(x))),
        Mistake("examples are added up", "A mean over the examples.",
                _with_p(lambda p, x: (p * (1 - p)).T @ x.square())),
        Mistake("means are taken before the product", "The mean of a product is not the product of means.",
                _with_p(lambda p, x: torch.outer((p * (1 - p)).mean(dim=0), x.square().mean(dim=0)))),
        Mistake("softmax runs over the examples", "The probabilities of the classes of one example add up to 1.",
                lambda weight, x: (lambda p: (p * (1 - p)).T @ x.square() / len(x))((x @ weight.T).softmax(dim=0))),
    ),
    right=(_fisher_by_definition, _fisher_by_package, _fisher_by_einsum),
)  # fmt: skip


# ---- squares_a_mean ----


@dataclass(frozen=True)
class Diagonal:
    """One way to make a diagonal (D,) of scores (n, D). way: 0 to 2 are right, 3 and 4 square a mean."""

    way: int

    def __call__(self, scores: Tensor) -> Tensor:
        mean = scores.mean(dim=0)
        ways: tuple[Callable[[], Tensor], ...] = (
            lambda: scores.square().mean(dim=0),
            lambda: torch.einsum("nd,nd->d", scores, scores) / len(scores),
            lambda: (scores - mean).square().mean(dim=0) + mean**2,
            lambda: mean**2,
            lambda: len(scores) * mean**2,
        )
        return ways[self.way]()

    def __repr__(self) -> str:
        return "<a function of scores>"


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


def _found_by_zero(fishers: list[Callable[[Tensor], Tensor]]) -> int:
    values = [fisher(torch.tensor([[3.0, 1.0], [-3.0, -1.0]])).sum().item() for fisher in fishers]
    return values.index(0.0)


def _found_by_truth(fishers: list[Callable[[Tensor], Tensor]]) -> int:
    scores = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    truth = scores.square().mean(dim=0)
    (place,) = (place for place, fisher in enumerate(fishers) if not torch.allclose(fisher(scores), truth))
    return place


def _found_by_sign(fishers: list[Callable[[Tensor], Tensor]]) -> int:
    same, turned = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [-2.0]])
    return next(place for place, fisher in enumerate(fishers) if not torch.allclose(fisher(same), fisher(turned)))


def _smallest(fishers: list[Callable[[Tensor], Tensor]], scores: list[list[float]]) -> int:
    values = [round(fisher(torch.tensor(scores)).item(), 4) for fisher in fishers]
    return values.index(min(values))


check_squares_a_mean = Exercise(
    "squares_a_mean",
    squares_a_mean,
    parts=(
        Part("a squared mean", 2, _implementations(3), draws=16),
        Part("a squared mean that was multiplied by n, to make up for it", 1, _implementations(4), draws=16),
    ),
    mistakes=(
        Mistake("nothing cancels in your scores", "With one example, or with equal ones, all four agree.",
                lambda fishers: _smallest(fishers, [[2.0]])),
        Mistake("it is known by its size alone", "Someone may have multiplied it by n. Give scores whose mean is 0.",
                lambda fishers: _smallest(fishers, [[1.0], [3.0]])),
        Mistake("the largest is taken", "What cancels gets smaller.",
                lambda fishers: max(range(len(fishers)),
                                    key=lambda place: round(fishers[place](torch.tensor([[1.0], [-2.0]])).item(), 4))),
        Mistake("places are counted from 1", "The first of the list has place 0.",
                lambda fishers: squares_a_mean(fishers) + 1),
        Mistake("this is the function itself, not its place", "Return where it stands in the list, a whole number.",
                lambda fishers: fishers[squares_a_mean(fishers)]),
    ),
    right=(_found_by_zero, _found_by_truth, _found_by_sign),
)  # fmt: skip
