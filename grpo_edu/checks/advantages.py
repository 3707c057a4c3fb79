"""Exercises of notebook 03, first part: group advantages, and groups that tie."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from grpo_edu import advantages
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

# ---- inputs ----


def some_rewards(rng: random.Random, groups: int = 2, size: int = 3) -> Tensor:
    """Rewards in quarters, no group of which ties."""
    rows: list[list[float]] = []
    while len(rows) < groups:
        row = [rng.randrange(-4, 9) / 4 for _ in range(size)]
        if len(set(row)) > 1:
            rows.append(row)
    return torch.tensor(rows).flatten()


def plain(rng: random.Random) -> Call:
    """Two groups or three, none of which ties."""
    size = rng.choice([3, 4])
    return call(some_rewards(rng, rng.choice([2, 3]), size), size)


def tied(rng: random.Random) -> Call:
    """A group whose rewards look equal only on paper, and one that does not tie."""
    value = rng.choice([1.69, 0.1, 0.7, 1.3, 2.3])
    return call(torch.cat([torch.full((16,), value), some_rewards(rng, 1, 16)]), 16)


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
    return group_advantages(rewards.view(num_generations, -1).T.flatten(), num_generations)


def _batch_std(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return _untied(groups, (groups - groups.mean(dim=1, keepdim=True)) / (rewards.std() + 1e-4))


def _batch_mean(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return _untied(groups, (groups - rewards.mean()) / (groups.std(dim=1, keepdim=True) + 1e-4))


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


def _untied(groups: Tensor, values: Tensor) -> Tensor:
    tie = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return values.masked_fill(tie, 0.0).flatten()


check_group_advantages = Exercise(
    "group_advantages",
    group_advantages,
    parts=(
        Part("two groups and three", 3, plain),
        Part("groups of two", 1, lambda rng: call(some_rewards(rng, 2, 2), 2)),
        Part("a group that ties", 1, tied, draws=8),
    ),
    mistakes=(
        Mistake("the standard deviation divides by G", "Sample or population? See what `unbiased` does in `std`.",
                _population_std),
        Mistake("the groups are mixed", "A group's rows are adjacent. Which shape makes a row of each group?",
                _mixed_groups),
        Mistake("the standard deviation is that of the batch", "Whose spread should a group be measured with?",
                _batch_std),
        Mistake("the mean is that of the batch", "A completion competes with its siblings only.", _batch_mean),
        Mistake("nothing is divided by the standard deviation", "That is Dr. GRPO. The paper's formula has two parts.",
                _not_scaled),
        Mistake("eps is missing", "What keeps a nearly tied group from being blown up?", _no_eps),
        Mistake("the result has two dimensions", "One number a completion, in the order of the rewards.",
                _two_dimensions),
        Mistake("a tie is worth a rounding error", "Sixteen times 1.69, divided by sixteen: is it 1.69? Ask whether "
                "the rewards are exactly equal.", _float_trap),
    ),
    right=(_by_loop, _by_numpy, _by_variance),
    tolerance=1e-5,
)  # fmt: skip


# ---- tie_probability ----


def _ties_by_outcomes(p: float, num_generations: int) -> float:
    all_right = all_wrong = 1.0
    for _ in range(num_generations):
        all_right *= p
        all_wrong *= 1 - p
    return all_right + all_wrong


def _ties_by_tensor(p: float, num_generations: int) -> float:
    return torch.tensor([p, 1 - p], dtype=torch.float64).pow(num_generations).sum().item()


def _ties_by_complement(p: float, num_generations: int) -> float:
    from math import comb

    mixed = sum(comb(num_generations, k) * p**k * (1 - p) ** (num_generations - k) for k in range(1, num_generations))
    return 1 - mixed


check_tie_probability = Exercise(
    "tie_probability",
    advantages.tie_probability,
    parts=(
        Part("from G = 2 to 16", 2, lambda rng: call(rng.randrange(5, 100, 10) / 100, rng.choice([2, 3, 4, 8, 16]))),
        Part("certain cases", 1, lambda rng: call(rng.choice([0.0, 1.0]), rng.choice([2, 8])), draws=6),
    ),
    mistakes=(
        Mistake("only groups that are all right count", "A group that is wrong throughout teaches nothing either.",
                lambda p, num_generations: p**num_generations),
        Mistake("only groups that are all wrong count", "A group that is right throughout teaches nothing either.",
                lambda p, num_generations: (1 - p) ** num_generations),
        Mistake("that is the probability of no tie", "Is it more likely to tie with G = 2 or with G = 16?",
                lambda p, num_generations: 1 - p**num_generations - (1 - p) ** num_generations),
        Mistake("the exponent is G − 1", "The first completion has to be right as well.",
                lambda p, num_generations: p ** (num_generations - 1) + (1 - p) ** (num_generations - 1)),
        Mistake("chances are multiplied by G", "All G must agree: are chances of independent things added?",
                lambda p, num_generations: num_generations * p + num_generations * (1 - p)),
    ),
    right=(_ties_by_outcomes, _ties_by_tensor, _ties_by_complement),
)  # fmt: skip


# ---- degenerate_groups ----


def _equal_by_loop(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations).tolist()
    return torch.tensor([len(set(group)) == 1 for group in groups])


def _equal_by_range(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return groups.amax(dim=1) == groups.amin(dim=1)


def _equal_by_first(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return (groups == groups[:, :1]).all(dim=1)


def _equal_to_mean(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return (groups == groups.mean(dim=1, keepdim=True)).all(dim=1)


def nearly_tied(rng: random.Random) -> Call:
    """A group that ties, one that nearly does, and one that does not."""
    value = rng.choice([1.69, 0.1, 0.7, 1.3, 2.3])
    nearly = torch.full((16,), 1.0)
    nearly[rng.randrange(16)] += 1e-6
    groups = [torch.full((16,), value), nearly, some_rewards(rng, 1, 16)]
    rng.shuffle(groups)
    return call(torch.cat(groups), 16)


check_degenerate_groups = Exercise(
    "degenerate_groups",
    advantages.degenerate_groups,
    parts=(
        Part("right or wrong, 1 or 0", 2, lambda rng: call(
            torch.tensor([float(rng.random() < 0.7) for _ in range(12)] + [1.0] * 3 + [0.0] * 3), 3)),
        Part("equal, nearly equal, unequal", 2, nearly_tied, draws=8),
    ),
    mistakes=(
        Mistake("a small standard deviation counts as a tie", "Two rewards that differ by a millionth differ.",
                lambda rewards, num_generations: rewards.view(-1, num_generations).std(dim=1) < 1e-4),
        Mistake("rewards must equal their mean", "The mean of sixteen times 1.69 is not 1.69. Compare the rewards with "
                "each other.", _equal_to_mean),
        Mistake("a group that is right throughout is no tie", "All right is a tie as well.",
                lambda rewards, num_generations: (rewards.view(-1, num_generations) == 0).all(dim=1)),
        Mistake("one answer a completion", "One truth value a group: shape (N,).",
                lambda rewards, num_generations: _equal_by_range(rewards, num_generations).repeat_interleave(
                    num_generations)),
        Mistake("the groups are mixed", "A group's rows are adjacent.",
                lambda rewards, num_generations: _equal_by_range(
                    rewards.view(num_generations, -1).T.flatten(), num_generations)),
    ),
    right=(_equal_by_loop, _equal_by_range, _equal_by_first),
)  # fmt: skip
