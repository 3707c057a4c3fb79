"""Exercises of notebook 03, third part: what a reward is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu import advantages
from grpo_edu.checks.advantages import plain, some_rewards
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- rloo_advantages ----


def _rloo_by_loop(rewards: Tensor, num_generations: int) -> Tensor:
    out = []
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations].tolist()
        for place, reward in enumerate(group):
            others = group[:place] + group[place + 1 :]
            out.append(reward - sum(others) / len(others))
    return torch.tensor(out)


def _rloo_by_sum(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (num_generations - 1)
    return (groups - others).flatten()


def _rloo_by_matrix(rewards: Tensor, num_generations: int) -> Tensor:
    weights = (torch.ones(num_generations, num_generations) - torch.eye(num_generations)) / (num_generations - 1)
    groups = rewards.view(-1, num_generations)
    return (groups - groups @ weights).flatten()


def _with_oneself(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


def _others_by_g(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return (groups - (groups.sum(dim=1, keepdim=True) - groups) / num_generations).flatten()


def _rloo_scaled(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    left_out = advantages.rloo_advantages(rewards, num_generations).view(-1, num_generations)
    return (left_out / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def _rloo_over_batch(rewards: Tensor, num_generations: int) -> Tensor:
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def _rloo_turned(rewards: Tensor, num_generations: int) -> Tensor:
    return -advantages.rloo_advantages(rewards, num_generations)


check_rloo_advantages = Exercise(
    "rloo_advantages",
    advantages.rloo_advantages,
    parts=(
        Part("two groups and three", 2, plain),
        Part("groups of two", 1, lambda rng: call(some_rewards(rng, 2, 2), 2)),
    ),
    mistakes=(
        Mistake("a completion is part of its own baseline", "Leave one out: the mean of the others.", _with_oneself),
        Mistake("the sum of the others is divided by G", "How many others are there?", _others_by_g),
        Mistake("a completion is taken for one of the others", "Take its own reward out of the sum: G − 1 others.",
                lambda rewards, g: rewards - rewards.view(-1, g).sum(dim=1).repeat_interleave(g) / (g - 1)),
        Mistake("the sum of the others is not divided", "Compare with their *mean*.",
                lambda rewards, g: rewards - (rewards - advantages.rloo_advantages(rewards, g)) * (g - 1)),
        Mistake("this is the baseline alone", "The reward, minus the mean of the others.",
                lambda rewards, g: rewards - advantages.rloo_advantages(rewards, g)),
        Mistake("the result is scaled by the standard deviation", "RLOO subtracts a baseline and stops there.",
                _rloo_scaled),
        Mistake("the others are those of the whole batch", "Only siblings answer the same prompt.", _rloo_over_batch),
        Mistake("the sign is turned", "A completion that is better than the others has a positive advantage.",
                _rloo_turned),
    ),
    right=(_rloo_by_loop, _rloo_by_sum, _rloo_by_matrix),
)  # fmt: skip


# ---- best_baseline ----


def best_baseline(probabilities: Tensor, rewards: Tensor) -> Tensor:
    """E[|g|² R] / E[|g|²], with g the gradient of log π(a) for the scores of a softmax: one at a, minus π."""
    grad_logp = torch.eye(len(probabilities)) - probabilities
    weights = probabilities * grad_logp.square().sum(dim=1)
    return weights @ rewards / weights.sum()


def _some_policy(answers: int, shift: float) -> Callable[[random.Random], Call]:
    """A policy of twentieths, and rewards that differ, all larger by `shift`."""

    def draw(rng: random.Random) -> Call:
        while True:
            cuts = [0, *sorted(rng.sample(range(1, 20), answers - 1)), 20]
            shares = [high - low for low, high in zip(cuts, cuts[1:], strict=False)]
            rewards = [rng.randrange(-2, 5) / 2 for _ in shares]
            if len(set(shares)) > 1 and len(set(rewards)) > 1:
                return call(torch.tensor(shares) / 20, torch.tensor(rewards) + shift)

    return draw


def _baseline_by_formula(probabilities, rewards):
    p, r = probabilities.tolist(), rewards.tolist()
    squares = sum(one * one for one in p)
    lengths = [1 - 2 * one + squares for one in p]
    top = sum(one * length * reward for one, length, reward in zip(p, lengths, r, strict=True))
    return top / sum(one * length for one, length in zip(p, lengths, strict=True))


def _baseline_by_autograd(probabilities, rewards):
    scores = probabilities.log().requires_grad_()
    lengths = []
    for answer in range(len(scores)):
        (gradient,) = torch.autograd.grad(scores.log_softmax(dim=0)[answer], scores)
        lengths.append(gradient.norm() ** 2)
    weights = probabilities * torch.stack(lengths)
    return ((weights * rewards).sum() / weights.sum()).item()


def _baseline_by_parabola(probabilities, rewards):
    p, r = probabilities.double(), rewards.double()
    lengths = (torch.eye(len(p)).double() - p).square().sum(dim=1)

    def spread(b):
        return (p * (r - b).square() * lengths).sum().item()

    low, middle, high = spread(-1.0), spread(0.0), spread(1.0)
    return (low - high) / (2 * (low - 2 * middle + high))


def _weighted_by(weights_of: Callable[[Tensor], Tensor]) -> Callable:
    """A mean of the rewards with other weights."""

    def wrong(probabilities, rewards):
        weights = weights_of(probabilities)
        return weights @ rewards / weights.sum()

    return wrong


def _lengths(probabilities: Tensor) -> Tensor:
    return (torch.eye(len(probabilities)) - probabilities).norm(dim=1)


check_best_baseline = Exercise(
    "best_baseline",
    best_baseline,
    parts=(
        Part("policies of three answers and of four", 3, lambda rng: _some_policy(rng.choice([3, 4]), 0.0)(rng)),
        Part("a teacher who adds 10 to each reward", 1, _some_policy(3, 10.0)),
    ),
    mistakes=(
        Mistake("it is the expected reward", "A good baseline, but not the best: an answer with a long gradient counts "
                "for more.", _weighted_by(lambda p: p)),
        Mistake("the probabilities are missing", "Both means are over answers as the policy draws them.",
                _weighted_by(lambda p: _lengths(p) ** 2)),
        Mistake("the length of the gradient is not squared", "|g|² is the sum of the squares of its entries.",
                _weighted_by(lambda p: p * _lengths(p))),
        Mistake("only one entry of the gradient is taken", "The other answers' scores have a gradient as well: −π for "
                "each of them.", _weighted_by(lambda p: p * (1 - p) ** 2)),
        Mistake("columns are added up, not rows", "Row a of eye − probabilities is answer a's gradient: sum(dim=1).",
                _weighted_by(lambda p: p * (torch.eye(len(p)) - p).square().sum(dim=0))),
        Mistake("below, the probabilities are missing", "E[|g|²] is a mean as well: weigh |g|² with the probabilities.",
                lambda p, rewards: (p * _lengths(p) ** 2) @ rewards / (_lengths(p) ** 2).sum()),
        Mistake("it is not divided by the mean of |g|²", "Were all rewards 1, what would the baseline have to be?",
                lambda p, rewards: (p * _lengths(p) ** 2) @ rewards),
        Mistake("it is the plain mean of the rewards", "The policy does not draw all answers equally often.",
                lambda p, rewards: rewards.mean()),
    ),
    right=(_baseline_by_formula, _baseline_by_autograd, _baseline_by_parabola),
)  # fmt: skip
