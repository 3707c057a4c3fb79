"""What the checks hand to a student's function: random tensors, a clock, a layer that refuses large batches.

They live apart from the exercises because a grader sends them into the process that runs a student's code. That process
can read this module but no other module of exercises, so nothing in here may give an answer away.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from grpo_edu.checks.slips import GRADIENT
from grpo_edu.problems.templates import data_dir

Weights = dict[str, Tensor]
FIRST = "the first argument"  # its name in a result of `gradient_of`, because a student may rename it


def numbers(rng: random.Random, *shape: int, low: float = -2.0, high: float = 2.0) -> Tensor:
    """Return a tensor of this shape with random numbers of two decimals."""
    values = [round(rng.uniform(low, high), 2) for _ in range(math.prod(shape))]
    return torch.tensor(values).view(*shape)


def mask_of(lengths: list[int], width: int) -> Tensor:
    """Return a (B, width) mask with lengths[b] leading ones in row b."""
    return (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()


@dataclass
class Computer:
    """A computer with a clock of its own: each run of `task` takes as long as the next of `seconds` says."""

    seconds: list[float]
    now: float = field(default=0.0, repr=False)
    runs: int = field(default=0, repr=False)

    def task(self) -> None:
        """Work; the last of `seconds` counts again and again."""
        self.now += self.seconds[min(self.runs, len(self.seconds) - 1)]
        self.runs += 1

    def clock(self) -> float:
        """Return the fake clock's time in seconds."""
        return self.now


@dataclass
class Loading:
    """Reads a model of a few weights; whoever calls it a second time has waited twice."""

    weights: list[float]
    done: bool = False

    def __call__(self) -> nn.Module:
        if self.done:
            raise RuntimeError("the model was loaded a second time")
        self.done = True
        model = nn.Linear(len(self.weights), 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([self.weights]))
        return model


@dataclass
class Shift:
    """Changes the model that it is given: adds `step` to each weight."""

    step: float

    def __call__(self, model: nn.Linear) -> None:
        with torch.no_grad():
            model.weight.add_(self.step)


def sum_of_weights(model: nn.Linear) -> float:
    """Return the sum of the weights, which stands in for an accuracy."""
    return model.weight.sum().item()


@dataclass(frozen=True)
class Training:
    """Gradient descent on ½ Σ (θ − target)² and a penalty, in place. It is handed to the student's function."""

    target: float
    learning_rate: float
    steps: int

    def __call__(self, weights: Weights, penalty: Callable[[Weights], Tensor]) -> dict[str, Any]:
        """Return the penalty before each step, whether it had a gradient, and the weights in the end."""
        penalties, with_gradient = [], True
        for _ in range(self.steps):
            extra = penalty(weights)
            loss = sum(0.5 * ((weight - self.target) ** 2).sum() for weight in weights.values()) + extra
            slopes = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for weight, slope in zip(weights.values(), slopes, strict=True):
                    weight -= self.learning_rate * slope
            penalties.append(round(torch.as_tensor(extra).item(), 6))
            with_gradient = with_gradient and torch.as_tensor(extra).requires_grad
        learned = [weight.detach().clone() for weight in weights.values()]
        return {"penalties": penalties, "they have a gradient": with_gradient, "weights": learned}

    def __repr__(self) -> str:
        return f"<a training run of {self.steps} steps towards {self.target}>"


def gradient_of(function: Callable[..., Any], first: Any, *rest: Any) -> dict[str, Any] | None:
    """Return the gradient of the sum of what a function returns for its first argument, a tensor or a dict of them.

    A gradient is None if the result is not a tensor, or autograd finds no way back from it. If the function returns
    nothing, so does this one.
    """
    given = first if isinstance(first, dict) else {FIRST: first}
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
    result = function(leaves if isinstance(first, dict) else next(iter(leaves.values())), *rest)
    if result is None:
        return None
    if not isinstance(result, Tensor) or not result.requires_grad:
        return {GRADIENT + name: None for name in leaves}
    slopes = torch.autograd.grad(result.sum(), list(leaves.values()), materialize_grads=True)
    return {GRADIENT + name: slope for name, slope in zip(leaves, slopes, strict=True)}


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


@dataclass(frozen=True)
class MeanGradient:
    """The gradient of a mean squared error over some rows; the last column is the target. `room`: rows at once."""

    weights: tuple[float, ...]
    room: int

    def __call__(self, rows: Tensor) -> Tensor:
        if len(rows) > self.room:
            raise MemoryError(f"{len(rows)} rows at once: only {self.room} fit")
        inputs, targets = rows[:, :-1], rows[:, -1]
        return inputs.T @ (inputs @ torch.tensor(self.weights) - targets) / len(rows)

    def __repr__(self) -> str:
        return f"<mean gradient of at most {self.room} rows>"


@dataclass(frozen=True)
class OutputLayer:
    """Logits (n, last - first) of states (n, H), for the tokens first, ..., last - 1. `room`: tokens at once."""

    weight: tuple[tuple[float, ...], ...]
    room: int

    def __call__(self, states: Tensor, first: int, last: int) -> Tensor:
        if last - first > self.room:
            raise MemoryError(f"{last - first} tokens of the vocabulary at once: only {self.room} fit")
        if not 0 <= first < last <= len(self.weight):
            raise IndexError(f"tokens {first} to {last}: the vocabulary has only {len(self.weight)}")
        return states @ torch.tensor(self.weight[first:last]).T

    def __repr__(self) -> str:
        return f"<logits of at most {self.room} of {len(self.weight)} tokens>"


def pays_for_length(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Pay for a right answer, and for every character of any answer."""
    return [float(right in text) + len(text) / 100 for text, right in zip(completions, answer, strict=True)]


def pays_for_marker(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Pay for the form alone."""
    return [float("####" in text) for text in completions]


class Curve(list):
    """One number per step; shown by its first and its last four."""

    def __repr__(self) -> str:
        first, last = ([f"{value:.2f}" for value in part] for part in (self[:4], self[4:][-4:]))
        return f"[{', '.join(first)} … {', '.join(last)}]"


@functools.cache
def _stored(file: str) -> dict[str, list[dict[str, Curve]]]:
    text = (data_dir() / "curves" / file).read_text(encoding="utf-8")
    return {
        arm: [{sign: Curve(values) for sign, values in run.items()} for run in runs]
        for arm, runs in json.loads(text).items()
    }


def stored_curves(arm: str, file: str = "broken_runs.json") -> list[dict[str, Curve]]:
    """Return the curves of the five stored runs of a case of `grpo_edu.studies.broken_runs`, or of "healthy".

    >>> runs = stored_curves("healthy")
    >>> len(runs), len(runs[0]["reward"])
    (5, 32)
    """
    return _stored(file)[arm]


@dataclass(frozen=True)
class Polynomial:
    """a Σ x³ + b x₀ xₙ, a scalar function of x (n,)."""

    a: int
    b: int

    def __call__(self, x: Tensor) -> Tensor:
        return (self.a * x**3).sum() + self.b * x[0] * x[-1]

    def __repr__(self) -> str:
        return "function"


def train_tiny(answer: Callable[..., Any], role: str, seed: int) -> dict[str, int]:
    """Train `tiny` with a student's function for a few seconds; how many of 60 held-out problems it won and lost.

    role: what the function is: "reward", "reinforce" (a loss of whole completions), "token loss" or "aggregate" (of a
    micro-batch).
    """
    import grpo_edu

    model, tokenizer = grpo_edu.load_policy("tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    problems = grpo_edu.load_problems("basic", "train")
    length, size = 48, 8
    before = _solved(seed)
    for _ in range(8):
        chosen = [problems[int(place)] for place in torch.randint(len(problems), (4,), generator=generator)]
        rollout = grpo_edu.generate(
            model,
            tokenizer,
            [grpo_edu.render_prompt(tokenizer, problem.prompt) for problem in chosen],
            num_generations=size,
            max_completion_length=length,
            generator=generator,
        )
        truth = [problem.answer for problem in chosen for _ in range(size)]
        reward = answer if role == "reward" else grpo_edu.accuracy_reward
        rewards = torch.tensor(reward(completions=rollout.completions, answer=truth), dtype=torch.float32)
        advantages, mask = grpo_edu.group_advantages(rewards, size), rollout.completion_mask
        sampled = (rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, mask)
        old = None
        for _ in range(2 if role == "token loss" else 1):  # with two updates the ratio leaves 1
            logps = grpo_edu.per_token_logps(model, *sampled)
            old = logps.detach() if old is None else old
            losses = -(logps - old).exp() * advantages[:, None]
            if role == "reinforce":
                loss = answer(logps, mask, rewards, rewards.mean().item())
            elif role == "token loss":
                loss = (answer(logps, old, advantages, 0.2, 0.28) * mask).sum() / mask.sum()
            elif role == "aggregate":
                halves = [*zip(losses.chunk(2), mask.chunk(2), strict=True)]  # two micro-batches
                loss = sum(answer(*half, "grpo", length, len(mask), int(mask.sum())) for half in halves)
            else:
                loss = (losses * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    pairs = [*zip(before, _solved(seed, model), strict=True)]
    return {"before": sum(before), "won": pairs.count((False, True)), "lost": pairs.count((True, False))}


def _solved(seed: int, model: nn.Module | None = None) -> list[bool]:
    """Return which of 60 held-out problems a policy solves, by default `tiny` as it is shipped."""
    import grpo_edu

    policy, tokenizer = grpo_edu.load_policy("tiny")
    heldout = grpo_edu.load_problems("basic", "heldout", n=60)
    return grpo_edu.evaluate(model or policy, tokenizer, heldout, seed=seed, max_completion_length=48).correct
