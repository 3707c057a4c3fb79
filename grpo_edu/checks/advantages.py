"""Exercises of notebook 03, first part: group advantages."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu import advantages
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- inputs ----

UNEVEN = (0.3, 0.6, 0.7, 0.9, 1.1, 1.3, 1.69, 2.3)  # twelve times each, divided by twelve, is often another number


def some_rewards(rng: random.Random, groups: int = 2, size: int = 3) -> Tensor:
    """Rewards in quarters, no group of which ties."""
    rows: list[list[float]] = []
    while len(rows) < groups:
        row = [rng.randrange(-4, 9) / 4 for _ in range(size)]
        if len(set(row)) > 1:
            rows.append(row)
    return torch.tensor(rows).flatten()


def plain(rng: random.Random) -> Call:
    """Two groups or three, none of which ties, and never as many as a group has completions."""
    groups, size = rng.choice([(2, 3), (2, 4), (3, 4)])
    return call(some_rewards(rng, groups, size), size)


def tied_alone(rng: random.Random, size: int) -> Tensor:
    """One group of equal rewards; where this processor has such a value, torch's std of them is not 0."""
    telling = [value for value in UNEVEN if torch.full((1, size), value).std(dim=1) > 0]
    return torch.full((size,), rng.choice(telling or UNEVEN))


def tied(base: float) -> Callable[[random.Random], Call]:
    """A tied group alone, or beside one that differs from `base` by a millionth in one place, and one that differs."""

    def draw(rng: random.Random) -> Call:
        if rng.random() < 0.5:
            size = rng.choice([12, 16])
            return call(tied_alone(rng, size), size)
        nearly = torch.full((16,), base)
        nearly[rng.randrange(16)] += 1e-6
        groups = [torch.full((16,), rng.choice([*UNEVEN, 0.5])), nearly, some_rewards(rng, 1, 16)]
        rng.shuffle(groups)
        return call(torch.cat(groups), 16)

    return draw


# ---- group_advantages ----


def group_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """The package's, with the standard deviation of the group."""
    return advantages.group_advantages(rewards, num_generations)


def _by_loop(rewards: Tensor, num_generations: int) -> Tensor:
    out = []
    for group in rewards.split(num_generations):
        centered = group - group.mean()
        scaled = centered / (group.std() + 1e-4)
        out.append(torch.zeros_like(group) if bool((group == group[0]).all()) else scaled)
    return torch.cat(out)


def _by_numpy(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.double().numpy().reshape(-1, num_generations)
    std = groups.std(axis=1, ddof=1, keepdims=True)
    out = (groups - groups.mean(axis=1, keepdims=True)) / (std + 1e-4)
    out[groups.max(axis=1) == groups.min(axis=1)] = 0
    return torch.tensor(out.ravel(), dtype=torch.float32)


def _by_variance(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    centered = groups - groups.mean(dim=1, keepdim=True)
    std = (centered.square().sum(dim=1, keepdim=True) / (num_generations - 1)).sqrt()
    tie = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return torch.where(tie, torch.zeros(()), centered / (std + 1e-4)).flatten()


def _population_std(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    centered = groups - groups.mean(dim=1, keepdim=True)
    return _untied(groups, centered / (groups.std(dim=1, keepdim=True, unbiased=False) + 1e-4))


def _mixed_groups(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(num_generations, -1).T
    return group_advantages(groups.flatten(), num_generations).view_as(groups).T.flatten()


def _swapped_sizes(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(num_generations, -1)
    centered = groups - groups.mean(dim=1, keepdim=True)
    std = (centered.square().sum(dim=1, keepdim=True) / (groups.shape[1] - 1)).sqrt()
    return (centered / (std + 1e-4)).flatten()


def _batch_std(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return _untied(groups, (groups - groups.mean(dim=1, keepdim=True)) / (rewards.std() + 1e-4))


def _batch_mean(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return _untied(groups, (groups - rewards.mean()) / (groups.std(dim=1, keepdim=True) + 1e-4))


def _one_group(rewards: Tensor, num_generations: int) -> Tensor:
    return _untied(rewards.view(-1, num_generations), (rewards - rewards.mean()) / (rewards.std() + 1e-4))


def _by_the_variance(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return _untied(groups, (groups - groups.mean(dim=1, keepdim=True)) / (groups.var(dim=1, keepdim=True) + 1e-4))


def _not_scaled(rewards: Tensor, num_generations: int) -> Tensor:
    return advantages.group_advantages(rewards, num_generations, scale_rewards="none")


def _no_eps(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return _untied(groups, (groups - groups.mean(dim=1, keepdim=True)) / groups.std(dim=1, keepdim=True))


def _two_dimensions(rewards: Tensor, num_generations: int) -> Tensor:
    return group_advantages(rewards, num_generations).view(-1, num_generations)


def _float_trap(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    centered = groups - groups.mean(dim=1, keepdim=True)
    return (centered / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def _tied_by_std(limit: float) -> Callable[[Tensor, int], Tensor]:
    def wrong(rewards: Tensor, num_generations: int) -> Tensor:
        tie = rewards.view(-1, num_generations).std(dim=1, keepdim=True) <= limit
        return _float_trap(rewards, num_generations).view(-1, num_generations).masked_fill(tie, 0.0).flatten()

    return wrong


def _untied(groups: Tensor, values: Tensor) -> Tensor:
    tie = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return values.view_as(groups).masked_fill(tie, 0.0).flatten()


check_group_advantages = Exercise(
    "group_advantages",
    group_advantages,
    parts=(
        Part("two groups and three", 3, plain),
        Part("groups of two", 1, lambda rng: call(some_rewards(rng, 2, 2), 2)),
        Part("a group that ties", 1, tied(0.0), draws=16),
    ),
    mistakes=(
        Mistake("the standard deviation divides by G", "Sample or population? See what `correction` does in `std`.",
                _population_std),
        Mistake("the groups are mixed", "A group's rows are adjacent. Which shape makes a row of each group?",
                _mixed_groups),
        Mistake("there are G groups of N", "N groups of G: the *last* number of a view is how long its rows are.",
                _swapped_sizes),
        Mistake("the standard deviation is that of the batch", "Whose spread should a group be measured with?",
                _batch_std),
        Mistake("the mean is that of the batch", "A completion competes with its siblings only.", _batch_mean),
        Mistake("the whole batch is one group", "A completion competes with its siblings only.", _one_group),
        Mistake("it is divided by the variance", "The standard deviation is the root of the variance.",
                _by_the_variance),
        Mistake("the sign is turned", "A completion that is better than its siblings has a positive advantage.",
                lambda rewards, num_generations: -group_advantages(rewards, num_generations)),
        Mistake("nothing is divided by the standard deviation", "That is Dr. GRPO. The paper's formula has two parts.",
                _not_scaled),
        Mistake("eps is missing", "What keeps a nearly tied group from being blown up?", _no_eps),
        Mistake("the result has two dimensions", "One number a completion, in the order of the rewards.",
                _two_dimensions),
        Mistake("a tie is worth a rounding error", "Sixteen times 1.69, divided by sixteen: is it 1.69? Ask whether "
                "the rewards are exactly equal.", _float_trap),
        Mistake("a tie is looked for in the standard deviation", "With a single group, torch's std of equal rewards "
                "need not be 0. Compare the rewards with each other.", _tied_by_std(0.0)),
        Mistake("a small standard deviation counts as a tie", "Only rewards that are exactly equal tie.",
                _tied_by_std(1e-6)),
    ),
    right=(_by_loop, _by_numpy, _by_variance),
    tolerance=1e-5,
)  # fmt: skip
