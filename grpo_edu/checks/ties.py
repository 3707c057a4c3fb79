"""Exercises of notebook 03, second part: how often a group ties, and which groups do."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_edu import advantages
from grpo_edu.checks.advantages import tied
from grpo_edu.checks.core import Exercise, Mistake, Part, call

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
        Part("p = 0, ½ and 1", 1, lambda rng: call(rng.choice([0.0, 0.5, 1.0]), rng.choice([2, 8])), draws=24),
    ),
    mistakes=(
        Mistake("only groups that are all right count", "A group that is wrong throughout teaches nothing either.",
                lambda p, num_generations: p**num_generations),
        Mistake("only groups that are all wrong count", "A group that is right throughout teaches nothing either.",
                lambda p, num_generations: (1 - p) ** num_generations),
        Mistake("that is the probability of no tie", "Is it more likely to tie with G = 2 or with G = 16?",
                lambda p, num_generations: 1 - p**num_generations - (1 - p) ** num_generations),
        Mistake("the two chances are multiplied", "The group is all right *or* all wrong, never both at once.",
                lambda p, num_generations: p**num_generations * (1 - p) ** num_generations),
        Mistake("all wrong is taken to be as likely as all right", "Who is right with chance p is wrong with 1 − p.",
                lambda p, num_generations: 2 * p**num_generations),
        Mistake("every group is taken for a pair", "G completions have to agree, not two.",
                lambda p, num_generations: p**2 + (1 - p) ** 2),
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


check_degenerate_groups = Exercise(
    "degenerate_groups",
    advantages.degenerate_groups,
    parts=(
        Part("right or wrong, 1 or 0", 2, lambda rng: call(
            torch.tensor([float(rng.random() < 0.7) for _ in range(12)] + [1.0] * 3 + [0.0] * 3), 3)),
        Part("equal, nearly equal, unequal", 2, tied(1.0), draws=16),
    ),
    mistakes=(
        Mistake("a small standard deviation counts as a tie", "Two rewards that differ by a millionth differ.",
                lambda rewards, num_generations: rewards.view(-1, num_generations).std(dim=1) < 1e-4),
        Mistake("a standard deviation of 0 is asked for", "With a single group, torch's std of equal rewards need not "
                "be 0. Compare the rewards with each other.",
                lambda rewards, num_generations: rewards.view(-1, num_generations).std(dim=1) == 0),
        Mistake("rewards must equal their mean", "The mean of sixteen times 1.69 is not 1.69. Compare the rewards with "
                "each other.", _equal_to_mean),
        Mistake("only groups of ones or of zeros tie", "Rewards of 1.69 tie as well, where all are equal.",
                lambda rewards, num_generations: torch.stack([
                    (rewards.view(-1, num_generations) == value).all(dim=1) for value in (0, 1)]).any(dim=0)),
        Mistake("a group that is right throughout is no tie", "All right is a tie as well.",
                lambda rewards, num_generations: (rewards.view(-1, num_generations) == 0).all(dim=1)),
        Mistake("any stands where all should", "A reward always equals itself. *All* of a group must equal the first.",
                lambda rewards, num_generations: torch.ones(len(rewards) // num_generations, dtype=torch.bool)),
        Mistake("these are the groups that do not tie", "True where a group ties.",
                lambda rewards, num_generations: ~_equal_by_first(rewards, num_generations)),
        Mistake("one answer a completion", "One truth value a group, shape (N,): do *all* of its rewards agree?",
                lambda rewards, num_generations: rewards == rewards.view(-1, num_generations)[:, :1].repeat(
                    1, num_generations).flatten()),
        Mistake("the groups are mixed", "A group's rows are adjacent.",
                lambda rewards, num_generations: _equal_by_range(
                    rewards.view(num_generations, -1).T.flatten(), num_generations)),
    ),
    right=(_equal_by_loop, _equal_by_range, _equal_by_first),
)  # fmt: skip
