"""Exercises of notebook 10, third part: a check of one batch, which must catch mixed groups and the float trap."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_edu.advantages import group_advantages
from grpo_edu.broken_stages import hasty_advantages, transposed_advantages
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.config import GRPOConfig

# ---- signs_are_right ----


def signs_are_right(rewards: Tensor, advantages: Tensor, num_generations: int) -> bool:
    """Whether each advantage has the sign of reward minus group mean, and those of a tied group are exactly 0."""
    groups = rewards.view(-1, num_generations)
    expected = (groups - groups.mean(dim=1, keepdim=True)).sign()
    expected[(groups == groups[:, :1]).all(dim=1)] = 0
    return torch.equal(advantages.sign(), expected.flatten())


def _rewards_of(rng: random.Random, tied: bool) -> Tensor:
    """An easy group, a hard one, and where asked one that ties, or that one alone. Paid in parts, easy is above."""
    (wrong, right), (poor, good) = rng.choice([((0.0, 1.0), (0.0, 1.0)), ((0.5, 0.9), (0.1, 0.3))])
    easy = rng.sample([right] * rng.choice([6, 7]) + [wrong] * 2, 8)
    hard = rng.sample([poor] * 7 + [good] * 2, 8)
    tie = [[rng.randrange(1, 101) / 100] * 8] if tied else []
    alone = tied and rng.random() < 0.3  # then torch's std of equal rewards need not be 0
    return torch.tensor(tie if alone else rng.sample([easy, hard, *tie], 2 + len(tie)))


def _faint_trap(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """The float trap as an eps of 1e-4 leaves it: a tie is worth 0 or at most 0.0006."""
    tied = (rewards.view(-1, 8) == rewards.view(-1, 8)[:, :1]).all(dim=1).repeat_interleave(8)
    return hasty_advantages(rewards, config) * torch.where(tied, 1e-4, 1.0)


def _advantages_from(stages: Sequence[Callable], tied: bool) -> Callable[[random.Random], Call]:
    """Half of the batches are healthy; the others come from a broken stage, or have their signs turned."""

    def draw(rng: random.Random) -> Call:
        kind = rng.randrange(6)
        while True:
            rewards = _rewards_of(rng, tied).flatten()
            healthy = group_advantages(rewards, 8)
            if kind < 3:
                return call(rewards, healthy, 8)
            config = GRPOConfig(num_generations=8, prompts_per_step=len(rewards) // 8)
            advantages = -healthy if kind == 3 else rng.choice(stages)(rewards, config)
            if not signs_are_right(rewards, advantages, 8):
                return call(rewards, advantages, 8)

    return draw


def _signs_by_loop(rewards, advantages, num_generations):
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations].tolist()
        mean = sum(group) / len(group)
        for reward, advantage in zip(group, advantages[start : start + num_generations].tolist(), strict=True):
            want = 0 if len(set(group)) == 1 else (reward > mean) - (reward < mean)
            if (advantage > 0) - (advantage < 0) != want:
                return False
    return True


def _signs_by_package(rewards, advantages, num_generations):
    own = group_advantages(rewards, num_generations)
    return bool((torch.sign(own) == torch.sign(advantages)).all())


def _signs_by_product(rewards, advantages, num_generations):
    groups, pushes = rewards.view(-1, num_generations), advantages.view(-1, num_generations)
    tied = groups.amax(dim=1) == groups.amin(dim=1)
    apart = groups[~tied] - groups[~tied].mean(dim=1, keepdim=True)
    return bool((apart * pushes[~tied] > 0).all()) and not pushes[tied].any()


def _batch_mean(rewards, advantages, num_generations):
    groups = rewards.view(-1, num_generations)
    tied = (groups == groups[:, :1]).all(dim=1).repeat_interleave(num_generations)
    return torch.equal((rewards - rewards.mean()).sign().masked_fill(tied, 0.0), advantages.sign())


def _down_the_columns(rewards, advantages, num_generations):
    columns = [one.view(num_generations, -1).T.flatten() for one in (rewards, advantages)]
    return signs_are_right(*columns, num_generations)


def _almost_zero(rewards, advantages, num_generations):
    return signs_are_right(rewards, advantages.masked_fill(advantages.abs() < 1e-3, 0.0), num_generations)


def _ties_left_out(rewards, advantages, num_generations):
    groups = rewards.view(-1, num_generations)
    tied = (groups == groups[:, :1]).all(dim=1).repeat_interleave(num_generations)
    return signs_are_right(rewards, advantages.masked_fill(tied, 0.0), num_generations)


def _sums_only(rewards, advantages, num_generations):
    return bool(advantages.view(-1, num_generations).sum().abs() < 1e-3)


def _group_sums_only(rewards, advantages, num_generations):
    return bool((advantages.view(-1, num_generations).sum(dim=1).abs() < 1e-3).all())


def _mean_of_ties(rewards, advantages, num_generations):
    groups = rewards.view(-1, num_generations)
    return torch.equal((groups - groups.mean(dim=1, keepdim=True)).sign().flatten(), advantages.sign())


def _no_deviation(rewards, advantages, num_generations):
    groups = rewards.view(-1, num_generations)
    expected = (groups - groups.mean(dim=1, keepdim=True)).sign()
    expected[groups.std(dim=1) == 0] = 0
    return torch.equal(expected.flatten(), advantages.sign())


def _one_is_enough(rewards, advantages, num_generations):
    groups = rewards.view(-1, num_generations)
    expected = (groups - groups.mean(dim=1, keepdim=True)).sign().flatten()
    return bool((expected == advantages.sign()).any())


check_signs_are_right = Exercise(
    "signs_are_right",
    signs_are_right,
    parts=(
        Part("healthy batches, some with mixed groups", 2, _advantages_from([transposed_advantages], False), draws=30),
        Part("healthy batches, some in the float trap", 2, _advantages_from([hasty_advantages, _faint_trap], True),
             draws=40),
    ),
    mistakes=(
        Mistake("the mean is not that of the own group", "A completion competes with its siblings, not with the batch: "
                "one row of `view(-1, num_generations)`.", _batch_mean),
        Mistake("groups are read down the columns", "A group's rows are adjacent: `view(-1, num_generations)`, a group "
                "a row.", _down_the_columns),
        Mistake("tied groups are left out", "A tied group has to have advantages of exactly 0.", _ties_left_out),
        Mistake("almost 0 is taken for 0", "A tie is worth *exactly* 0. The float trap may be small in one batch and "
                "large in the next.", _almost_zero),
        Mistake("the mean of equal rewards is trusted", "Eight times 1.3 does not have the mean 1.3 exactly. Ask first "
                "whether the rewards are equal.", _mean_of_ties),
        Mistake("a standard deviation of 0 is asked for", "In a batch of one group, torch's std of equal rewards may "
                "not be 0. Compare the rewards with each other.", _no_deviation),
        Mistake("only the sum of the advantages is looked at", "In the wrong rows they still add up to 0.", _sums_only),
        Mistake("only the sums of the groups are looked at", "Turned signs add up to 0 as well.", _group_sums_only),
        Mistake("one right sign is enough", "*All* of them: some are right by accident.", _one_is_enough),
    ),
    right=(_signs_by_loop, _signs_by_package, _signs_by_product),
)  # fmt: skip
