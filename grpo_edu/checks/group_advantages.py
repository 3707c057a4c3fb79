"""Exercises on group advantages, tied groups, dynamic sampling and leave-one-out."""

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


def _all_equal(groups: Tensor) -> Tensor:
    return groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)


def _never(groups: Tensor) -> Tensor:
    return torch.zeros(len(groups), 1, dtype=torch.bool)


def _centered(groups: Tensor) -> Tensor:
    return groups - groups.mean(dim=1, keepdim=True)


def _standardized(groups: Tensor) -> Tensor:
    return _centered(groups) / (groups.std(dim=1, keepdim=True) + 1e-4)


def _in_groups(
    formula: Callable[[Tensor], Tensor], tie: Callable[[Tensor], Tensor] = _all_equal
) -> Callable[[Tensor, int], Tensor]:
    """A wrong answer that computes another formula of the (N, G) rewards, or tests for ties in another way."""

    def wrong(rewards: Tensor, num_generations: int) -> Tensor:
        groups = rewards.view(-1, num_generations)
        return formula(groups).masked_fill(tie(groups), 0.0).flatten()

    return wrong


def _down_the_columns(groups: Tensor) -> Tensor:
    centered = groups - groups.mean(dim=0)
    std = (centered.square().sum(dim=0) / (len(groups) - 1)).sqrt()  # std() would warn for 1 group
    return centered / (std + 1e-4)


def _swapped_sizes(rewards: Tensor, num_generations: int) -> Tensor:
    centered = _centered(rewards.view(num_generations, -1))
    std = (centered.square().sum(dim=1, keepdim=True) / (centered.shape[1] - 1)).sqrt()  # std() would warn for 1 column
    return (centered / (std + 1e-4)).flatten()


def _mixed_groups(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(num_generations, -1).T
    return group_advantages(groups.flatten(), num_generations).view_as(groups).T.flatten()


check_group_advantages = Exercise(
    group_advantages,
    parts=(
        Part("two groups and three", 3, plain),
        Part("groups of two", 1, lambda rng: call(some_rewards(rng, 2, 2), 2)),
        Part("a group that ties", 1, tied(0.0), draws=16),
    ),
    mistakes={
        "the standard deviation divides by G": Mistake(
            "Sample or population? See what `correction` does in `std`.",
            _in_groups(lambda groups: _centered(groups) / (groups.std(dim=1, keepdim=True, unbiased=False) + 1e-4)),
        ),
        "the groups are mixed": Mistake(
            "A group's rows are adjacent. Which shape makes a row of each group?", _mixed_groups
        ),
        "there are G groups of N": Mistake(
            "N groups of G: the *last* number of a view is how long its rows are.", _swapped_sizes
        ),
        "the standard deviation is that of the batch": Mistake(
            "Whose spread should a group be measured with?",
            _in_groups(lambda groups: _centered(groups) / (groups.std() + 1e-4)),
        ),
        "the mean is that of the batch": Mistake(
            "A completion is compared with its own group only.",
            _in_groups(lambda groups: (groups - groups.mean()) / (groups.std(dim=1, keepdim=True) + 1e-4)),
        ),
        "the whole batch is one group": Mistake(
            "A completion is compared with its own group only.",
            _in_groups(lambda groups: (groups - groups.mean()) / (groups.std() + 1e-4)),
        ),
        "the mean runs over the groups": Mistake(
            "In (N, G) a group is a row: its mean goes along dim=1, with keepdim=True.",
            _in_groups(lambda groups: (groups - groups.mean(dim=0)) / (groups.std(dim=1, keepdim=True) + 1e-4)),
            also=(_in_groups(_down_the_columns),),
        ),
        "it is divided by the variance": Mistake(
            "The standard deviation is the root of the variance.",
            _in_groups(lambda groups: _centered(groups) / (groups.var(dim=1, keepdim=True) + 1e-4)),
        ),
        "the sign is turned": Mistake(
            "A completion that is better than its group has a positive advantage.",
            lambda rewards, g: -group_advantages(rewards, g),
        ),
        "nothing is divided by the standard deviation": Mistake(
            "That is Dr. GRPO. The paper's formula has two parts.",
            lambda rewards, g: advantages.group_advantages(rewards, g, scale_rewards="none"),
        ),
        "eps is missing": Mistake(
            "What keeps a nearly tied group from being blown up?",
            _in_groups(lambda groups: _centered(groups) / groups.std(dim=1, keepdim=True)),
        ),
        "the result has two dimensions": Mistake(
            "One number a completion, in the order of the rewards.",
            lambda rewards, g: group_advantages(rewards, g).view(-1, g),
        ),
        "a tie is worth a rounding error": Mistake(
            "Sixteen times 1.69, divided by sixteen: is it 1.69? Ask whether the rewards are exactly equal.",
            _in_groups(_standardized, _never),
        ),
        "a tie is looked for in the standard deviation": Mistake(
            "With a single group, torch's std of equal rewards need not be 0. Compare the rewards with each other.",
            _in_groups(_standardized, lambda groups: groups.std(dim=1, keepdim=True) == 0),
        ),
        "a small standard deviation counts as a tie": Mistake(
            "Only rewards that are exactly equal tie.",
            _in_groups(_standardized, lambda groups: groups.std(dim=1, keepdim=True) <= 1e-6),
        ),
    },
    tolerance=1e-5,
)


# ---- tie_probability ----


check_tie_probability = Exercise(
    advantages.tie_probability,
    parts=(
        Part("from G = 2 to 16", 2, lambda rng: call(rng.randrange(5, 100, 10) / 100, rng.choice([2, 3, 4, 8, 16]))),
        Part("p = 0, ½ and 1", 1, lambda rng: call(rng.choice([0.0, 0.5, 1.0]), rng.choice([2, 8])), draws=24),
    ),
    mistakes={
        "only groups that are all right count": Mistake(
            "A group that is wrong throughout teaches nothing either.", lambda p, g: p**g
        ),
        "only groups that are all wrong count": Mistake(
            "A group that is right throughout teaches nothing either.", lambda p, g: (1 - p) ** g
        ),
        "that is the probability of no tie": Mistake(
            "Is it more likely to tie with G = 2 or with G = 16?", lambda p, g: 1 - p**g - (1 - p) ** g
        ),
        "the two chances are multiplied": Mistake(
            "The group is all right *or* all wrong, never both at once.", lambda p, g: p**g * (1 - p) ** g
        ),
        "all wrong is taken to be as likely as all right": Mistake(
            "Who is right with chance p is wrong with 1 − p.", lambda p, g: 2 * p**g
        ),
        "every group is taken for a pair": Mistake(
            "G completions have to agree, not two.", lambda p, g: p**2 + (1 - p) ** 2
        ),
        "the exponent is G − 1": Mistake(
            "The first completion has to be right as well.", lambda p, g: p ** (g - 1) + (1 - p) ** (g - 1)
        ),
        "chances are multiplied by G": Mistake(
            "All G must agree: are chances of independent things added?", lambda p, g: g * p + g * (1 - p)
        ),
    },
)


# ---- degenerate_groups ----


def _tie_where(agree: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """A wrong answer that asks each row of the (N, G) rewards in another way."""
    return lambda rewards, num_generations: agree(rewards.view(-1, num_generations))


check_degenerate_groups = Exercise(
    advantages.degenerate_groups,
    parts=(
        Part(
            "right or wrong, 1 or 0",
            2,
            lambda rng: call(torch.tensor([float(rng.random() < 0.7) for _ in range(12)] + [1.0] * 3 + [0.0] * 3), 3),
        ),
        Part(
            "equal, nearly equal, unequal",
            2,
            tied(1.0),
            draws=16,
            always=(call(torch.tensor([0.5, 0.5, 0.5, 0.5, 0.25, 0.5, 0.5, 0.5]), 4),),  # halves equal their mean
        ),
    ),
    mistakes={
        "a small standard deviation counts as a tie": Mistake(
            "Two rewards that differ by a millionth differ.", _tie_where(lambda groups: groups.std(dim=1) < 1e-4)
        ),
        "a standard deviation of 0 is asked for": Mistake(
            "With a single group, torch's std of equal rewards need not be 0. Compare the rewards with each other.",
            _tie_where(lambda groups: groups.std(dim=1) == 0),
        ),
        "rewards must equal their mean": Mistake(
            "The mean of sixteen times 1.69 is not 1.69. Compare the rewards with each other.",
            _tie_where(lambda groups: (_centered(groups) == 0).all(dim=1)),
        ),
        "only groups of ones or of zeros tie": Mistake(
            "Rewards of 1.69 tie as well, where all are equal.",
            _tie_where(lambda groups: (groups == 0).all(dim=1) | (groups == 1).all(dim=1)),
        ),
        "a group that is right throughout is no tie": Mistake(
            "All right is a tie as well.", _tie_where(lambda groups: (groups == 0).all(dim=1))
        ),
        "any stands where all should": Mistake(
            "A reward always equals itself. *All* of a group must equal the first.",
            _tie_where(lambda groups: torch.ones(len(groups), dtype=torch.bool)),
        ),
        "these are the groups that do not tie": Mistake(
            "True where a group ties.", _tie_where(lambda groups: ~_all_equal(groups)[:, 0])
        ),
        "one answer a completion": Mistake(
            "One truth value a group, shape (N,): do *all* of its rewards agree?",
            _tie_where(lambda groups: (groups == groups[:, :1]).flatten()),
        ),
        "the groups are mixed": Mistake(
            "A group's rows are adjacent.",
            lambda rewards, g: advantages.degenerate_groups(rewards.view(g, -1).T.flatten(), g),
        ),
    },
)


# ---- rloo_advantages ----


def rloo_advantages(rewards: Tensor, num_generations: int, truncated: Tensor) -> Tensor:
    """Reward minus the mean of the others that are complete; 0 for a truncated one, and where nobody is left."""
    return _left_out(rewards, num_generations, truncated)


def _left_out(
    rewards: Tensor,
    num_generations: int,
    truncated: Tensor,
    *,
    baseline: Callable[[Tensor], float] = lambda others: others.mean().item(),
    own: bool = False,
) -> Tensor:
    """RLOO with another number made of the others; `own`: a completion is one of the others."""
    advantages = torch.zeros_like(rewards)
    for start in range(0, len(rewards), num_generations):
        rows = [row for row in range(start, start + num_generations) if not truncated[row]]
        for row in rows if len(rows) > 1 else []:
            others = rewards[[other for other in rows if own or other != row]]
            advantages[row] = rewards[row] - baseline(others)
    return advantages


def _cut_short(rng: random.Random, left: int) -> Call:
    """Three groups of four; in one of them `left` completions are complete, and in the others three and all."""
    rewards = some_rewards(rng, 3, 4)
    groups = [rng.sample([False] * count + [True] * (4 - count), 4) for count in (left, 3, 4)]
    rng.shuffle(groups)
    truncated = torch.tensor(groups).flatten()
    return call(rewards + 0.25 * truncated, 4, truncated)


def _whole_sum(rewards: Tensor, num_generations: int, truncated: Tensor) -> Tensor:
    """The others are added up with the truncated ones, and divided by the number of complete ones."""
    groups = rewards.view(-1, num_generations)
    complete = ~truncated.view(-1, num_generations)
    others = (complete.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    return ((groups - (groups.sum(dim=1, keepdim=True) - groups) / others) * complete).flatten()


def _alone_keeps_its_reward(rewards: Tensor, num_generations: int, truncated: Tensor) -> Tensor:
    alone = (~truncated).view(-1, num_generations).sum(dim=1).repeat_interleave(num_generations) == 1
    return torch.where(alone & ~truncated, rewards, rloo_advantages(rewards, num_generations, truncated))


check_rloo_advantages = Exercise(
    rloo_advantages,
    parts=(
        Part("two or more completions of each group are complete", 2, lambda rng: _cut_short(rng, 2), draws=8),
        Part("one is complete, or none", 1, lambda rng: _cut_short(rng, rng.choice([0, 1])), draws=12),
    ),
    mistakes={
        "truncated completions are not left out": Mistake(
            "What is the last argument for?", lambda rewards, g, truncated: advantages.rloo_advantages(rewards, g)
        ),
        "truncated completions are among the others": Mistake(
            "They do not get an advantage, and nobody is compared with them either.",
            lambda rewards, g, truncated: advantages.rloo_advantages(rewards, g).masked_fill(truncated, 0.0),
        ),
        "truncated completions are compared with the others": Mistake(
            "Nothing is to be learned from them: 0.",
            lambda rewards, g, truncated: torch.where(
                truncated, advantages.rloo_advantages(rewards, g), rloo_advantages(rewards, g, truncated)
            ),
        ),
        "truncated completions count as a reward of 0": Mistake(
            "Left out is not the same as wrong: the number of the others gets smaller.",
            lambda rewards, g, truncated: advantages.rloo_advantages(rewards * ~truncated, g).masked_fill(
                truncated, 0.0
            ),
        ),
        "the sum holds truncated completions, but the number does not": Mistake(
            "Sum and number must be of the same completions.", _whole_sum
        ),
        "a completion is part of its own baseline": Mistake(
            "Leave one out: the mean of the others.",
            lambda rewards, g, truncated: _left_out(rewards, g, truncated, own=True),
        ),
        "the sum of the others is not divided": Mistake(
            "Compare with their *mean*.",
            lambda rewards, g, truncated: _left_out(rewards, g, truncated, baseline=lambda others: others.sum().item()),
        ),
        "the only complete one keeps its reward": Mistake(
            "It has nobody to be compared with: 0.", _alone_keeps_its_reward
        ),
        "the sign is turned": Mistake(
            "A completion that is better than the others has a positive advantage.",
            lambda *args: -rloo_advantages(*args),
        ),
    },
)


# ---- dynamic_sampling ----


def dynamic_sampling(rewards: Tensor, num_generations: int, groups_needed: int) -> tuple[Tensor, int]:
    """The numbers (K,) of the first groups that do not tie, at most `groups_needed`, and the completions written."""
    tied = advantages.degenerate_groups(rewards, num_generations)
    kept = (~tied).nonzero().flatten()[:groups_needed]
    full = len(kept) == groups_needed
    return kept, (int(kept[-1]) + 1) * num_generations if full else len(rewards)


def _many_groups(few: bool) -> Callable[[random.Random], Call]:
    """Ten groups of four or eleven, two or three of them all wrong, two or more all right, one tied at 0.7."""

    def draw(rng: random.Random) -> Call:
        all_right, all_wrong = rng.choice([2, 3]), rng.choice([2, 3])
        groups = [torch.ones(4)] * all_right + [torch.zeros(4)] * all_wrong + [torch.full((4,), 0.7)]
        informative = 10 - len(groups)
        for _ in range(informative):
            row = [0.0, 1.0, rng.choice([0.0, 1.0]), rng.choice([0.0, 1.0])]
            groups.append(torch.tensor(rng.sample(row, 4)))
        rng.shuffle(groups)
        groups += [torch.ones(4)] * few  # the search goes on behind the last useful group
        needed = informative + rng.choice([1, 2]) if few else informative - 1
        return call(torch.cat(groups), 4, needed)

    return draw


def _groups_where(keep: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int, int], tuple[Tensor, int]]:
    """A wrong answer that keeps other rows of the (N, G) rewards."""

    def wrong(rewards: Tensor, g: int, needed: int) -> tuple[Tensor, int]:
        kept = keep(rewards.view(-1, g)).nonzero().flatten()[:needed]
        return kept, (int(kept[-1]) + 1) * g if len(kept) == needed else len(rewards)

    return wrong


def _with_price(price: Callable[[Tensor, Tensor, int, int], int]) -> Callable[[Tensor, int, int], tuple[Tensor, int]]:
    """A wrong answer with another number of completions: price(kept, rewards, G, needed)."""

    def wrong(rewards: Tensor, g: int, needed: int) -> tuple[Tensor, int]:
        kept, _ = dynamic_sampling(rewards, g, needed)
        return kept, price(kept, rewards, g, needed)

    return wrong


def _with_groups(change: Callable[[Tensor, Tensor, int, int], Tensor]) -> Callable[[Tensor, int, int], tuple]:
    """A wrong answer with other numbers of groups: change(kept, rewards, G, needed)."""

    def wrong(rewards: Tensor, g: int, needed: int) -> tuple[Tensor, int]:
        kept, price = dynamic_sampling(rewards, g, needed)
        return change(kept, rewards, g, needed), price

    return wrong


def _all_kept(rewards: Tensor, g: int) -> Tensor:
    return dynamic_sampling(rewards, g, len(rewards))[0]


check_dynamic_sampling = Exercise(
    dynamic_sampling,
    parts=(
        Part("more groups than are needed", 3, _many_groups(few=False), draws=8),
        Part("fewer groups than are needed", 1, _many_groups(few=True)),
    ),
    mistakes={
        "groups that are all right are kept": Mistake(
            "Groups that are all right have no gradient either.",
            _groups_where(lambda groups: (groups > 0).any(dim=1) & (groups != 0.7).any(dim=1)),
            also=(_groups_where(lambda groups: (groups != 0).any(dim=1)),),
        ),
        "groups that are all wrong are kept": Mistake(
            "Groups that are all wrong have no gradient either.",
            _groups_where(lambda groups: (groups < 1).any(dim=1)),
            also=(_groups_where(lambda groups: (groups < 1).any(dim=1) & (groups != 0.7).any(dim=1)),),
        ),
        "only ties at 0 and at 1 are dropped": Mistake(
            "Four rewards of 0.7 tie as well: are all rewards of the group equal?",
            _groups_where(lambda groups: ~((groups == 0).all(dim=1) | (groups == 1).all(dim=1))),
        ),
        "the tied groups are kept": Mistake(
            "Keep the groups that do *not* tie.", _groups_where(lambda groups: _all_equal(groups)[:, 0])
        ),
        "more groups are returned than are needed": Mistake(
            "The update needs `groups_needed` groups; cut the list there.",
            _with_groups(lambda kept, rewards, g, needed: _all_kept(rewards, g)),
        ),
        "the last groups are taken": Mistake(
            "Sampling stops as soon as there are enough groups: take the first ones.",
            _with_groups(lambda kept, rewards, g, needed: _all_kept(rewards, g)[-needed:]),
        ),
        "these are rows, not groups": Mistake(
            "One number per group: row 0 to G − 1 are group 0.",
            _with_groups(lambda kept, rewards, g, needed: (kept[:, None] * g + torch.arange(g)).flatten()),
            also=(_with_groups(lambda kept, rewards, g, needed: kept * g),),
        ),
        "counting begins at 1": Mistake(
            "The first group is number 0.", _with_groups(lambda kept, rewards, g, needed: kept + 1)
        ),
        "only the kept completions are paid for": Mistake(
            "The completions of tied groups were written as well.",
            _with_price(lambda kept, rewards, g, needed: len(kept) * g),
        ),
        "all groups are paid for": Mistake(
            "Sampling stops when there are enough: nothing after that group is written.",
            _with_price(lambda kept, rewards, g, needed: len(rewards)),
        ),
        "the last group is not paid for": Mistake(
            "Groups are counted from 0: how many are there up to number 3?",
            _with_price(lambda kept, rewards, g, needed: int(kept[-1]) * g if len(kept) == needed else len(rewards)),
        ),
        "where groups are missing, sampling ends with the last useful one": Mistake(
            "A search that does not find enough goes on to the end.",
            _with_price(lambda kept, rewards, g, needed: (int(kept[-1]) + 1) * g),
        ),
        "groups are paid for, not completions": Mistake(
            "Each group has G completions.",
            lambda rewards, g, needed: (
                dynamic_sampling(rewards, g, needed)[0],
                dynamic_sampling(rewards, g, needed)[1] // g,
            ),
        ),
    },
)
