"""Exercises on group advantages, tied groups, dynamic sampling and leave-one-out."""

from __future__ import annotations

import math  # noqa: F401  a mistake needs it
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_edu.advantages import rloo_advantages as rloo  # noqa: F401  mistakes need it
from grpo_edu.checks.compare import number_kind, shown, shown_apart
from grpo_edu.checks.core import Call, Exercise, Part, call

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
    """Return one group of equal rewards; where this processor has such a value, torch's std of them is not 0."""
    telling = [value for value in UNEVEN if torch.full((1, size), value).std(dim=1) > 0]
    return torch.full((size,), rng.choice(telling or UNEVEN))


def tied(base: float) -> Callable[[random.Random], Call]:
    """Return a function that draws a tied group, alone or next to a nearly tied one around `base` and a mixed one."""

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


def one_group(given: Call, expected: Tensor, got: Any) -> tuple[str, str, str] | None:
    """Of more than 16 rewards the first group with a wrong result: its rewards, what is expected, and what came."""
    rewards, size = given.args
    comparable = isinstance(got, Tensor) and got.shape == expected.shape and number_kind(got) == number_kind(expected)
    if len(rewards) <= 16 or not comparable or got.layout != torch.strided or got.is_meta:
        return None
    groups = len(rewards) // size
    right, ours = expected.view(groups, -1), got.detach().reshape(groups, -1)
    same = torch.isclose(ours.double(), right.double(), rtol=1e-5, atol=1e-5, equal_nan=True).all(dim=1)
    number = int(same.int().argmin())
    rows = slice(number * size, (number + 1) * size)
    return (
        f"one of {groups} groups, rewards[{rows.start}:{rows.stop}]:\n{shown(rewards[rows], digits=12)}",
        *shown_apart(right[number], ours[number]),
    )


# ---- group_advantages ----


def group_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """Reward minus the mean of its group, divided by the group's standard deviation + 1e-4; 0 if a group ties."""
    groups = rewards.view(-1, num_generations)
    mean, std = groups.mean(dim=1, keepdim=True), groups.std(dim=1, keepdim=True)
    tied = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return ((groups - mean) / (std + 1e-4)).masked_fill(tied, 0.0).flatten()


def _std(groups: Tensor, dim: int) -> Tensor:
    """Return the sample standard deviation; of a single number NaN, without torch's warning."""
    centered = groups - groups.mean(dim=dim, keepdim=True)
    return (centered.square().sum(dim=dim, keepdim=True) / (groups.shape[dim] - 1)).sqrt()


def _mixed(rewards: Tensor, num_generations: int) -> Tensor:
    """Advantages within groups whose completions are not adjacent."""
    order = torch.arange(len(rewards)).view(num_generations, -1).T.flatten()
    return group_advantages(rewards[order], num_generations)[order.argsort()]


def _as_it_came(rewards: Tensor, num_generations: int) -> Tensor:
    """Compute advantages as the colleague's function does, with its three faults."""
    groups = rewards.view(num_generations, -1)
    mean, std = groups.mean(dim=1, keepdim=True), groups.std(dim=1, keepdim=True, unbiased=False)
    return ((groups - mean) / (std + 1e-4)).flatten()


check_group_advantages = Exercise(
    group_advantages,
    parts=(
        Part("two groups and three", 3, plain),
        Part("groups of two", 1, lambda rng: call(some_rewards(rng, 2, 2), 2)),
        Part("a group that ties", 1, tied(0.0), draws=16),
    ),
    changes="""
        the standard deviation divides by G:
            groups.std(dim=1, keepdim=True) -> groups.std(dim=1, keepdim=True, unbiased=False)
            `unbiased=False` divides by G. The formula uses the sample standard deviation.
        the groups are mixed: _mixed(rewards, num_generations)
            The rewards of a group are adjacent. Which shape has one group in each row?
            or: view(-1, num_generations) -> view(num_generations, -1).T
        the rewards are split into G groups of N:
            view(-1, num_generations) -> view(num_generations, -1); groups.std(dim=1, keepdim=True) -> _std(groups, 1)
            There are N groups of G. In `view`, the *last* number is the length of a row.
        the standard deviation is that of the batch: groups.std(dim=1, keepdim=True) -> groups.std()
            The rewards of a group are compared with each other only, so use the standard deviation of each group.
        the mean is that of the batch: groups.mean(dim=1, keepdim=True) -> groups.mean()
            A completion is compared with its own group only.
        the whole batch is treated as one group:
            groups.mean(dim=1, keepdim=True), groups.std(dim=1, keepdim=True) -> groups.mean(), groups.std()
            A completion is compared with its own group only.
        the mean is taken across the groups: groups.mean(dim=1, keepdim=True) -> groups.mean(dim=0)
            In shape (N, G) a row is a group: take its mean along dim=1, with keepdim=True.
            or: groups.mean(dim=1, keepdim=True), groups.std(dim=1, keepdim=True) -> groups.mean(0), _std(groups, 0)
        the difference is divided by the variance: groups.std( -> groups.var(
            The standard deviation is the square root of the variance.
        the sign is wrong: groups - mean -> mean - groups
            A completion that is better than its group has a positive advantage.
        the difference is not divided by the standard deviation: (groups - mean) / (std + 1e-4) -> groups - mean
            That is Dr. GRPO. In GRPO, each difference is also divided by a measure of the group's spread.
        eps is missing: std + 1e-4 -> std
            Where a group's standard deviation is close to 0, eps keeps the advantages small.
        the result has two dimensions: .flatten() -> .clone()
            Return one number per completion, in the order of the rewards.
        a tied group gets tiny advantages instead of 0: .masked_fill(tied, 0.0) -> .clone()
            Because of rounding, the computed mean of sixteen rewards of 1.69 need not be exactly 1.69. Check whether
            the rewards are equal.
        the whole batch is checked for ties, not each group:
            amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True) -> amax() == groups.amin()
            One group may tie while the others do not, so check each row.
        ties are detected by a standard deviation of 0: masked_fill(tied -> masked_fill(std == 0
            With a single group, torch's std of equal rewards need not be 0. Compare the rewards with each other.
        a small standard deviation counts as a tie: masked_fill(tied -> masked_fill(std <= 1e-6
            A group ties only if its rewards are exactly equal.
        at least two faults are left, in the layout and in the standard deviation:
            view(-1, num_generations) -> view(num_generations, -1);
            std(dim=1, keepdim=True) -> std(dim=1, keepdim=True, unbiased=False)
            Which shape has one group in each row? By which number does the standard deviation divide?
            or: _as_it_came(rewards, num_generations)
        two faults are left, in the standard deviation and in groups that tie:
            std(dim=1, keepdim=True) -> std(dim=1, keepdim=True, unbiased=False); masked_fill(tied, 0.0) -> clone()
            By which number does the standard deviation divide? And what does a group of equal rewards get?
        two faults are left, in the layout and in groups that tie:
            view(-1, num_generations) -> view(num_generations, -1);
            groups.std(dim=1, keepdim=True) -> _std(groups, 1); masked_fill(tied, 0.0) -> clone()
            Which shape has one group in each row? And what does a group of equal rewards get?
    """,
    excerpt=one_group,
)


# ---- tie_probability ----


def tie_probability(chances: list[float], num_generations: int) -> float:
    """Σ chance^G: the probability that all completions get the same reward, whichever it is."""
    return sum(chance**num_generations for chance in chances)


def _some_chances(rng: random.Random) -> Call:
    """Draw the chances, in twentieths, of two, three or four rewards."""
    cuts = sorted(rng.sample(range(1, 20), rng.choice([1, 2, 3])))
    shares = [high - low for low, high in zip([0, *cuts], [*cuts, 20], strict=True)]
    return call([share / 20 for share in shares], rng.choice([2, 3, 4, 8]))


def _plain_chances(rng: random.Random) -> Call:
    return call(rng.choice([[0.0, 1.0], [1.0, 0.0, 0.0], [0.5, 0.5], [0.25] * 4]), rng.choice([2, 4]))


check_tie_probability = Exercise(
    tie_probability,
    parts=(
        Part("two rewards to four", 2, _some_chances, draws=10),
        Part("one reward is certain, or all are equally likely", 1, _plain_chances, draws=24),
    ),
    changes="""
        only one of the rewards is counted: chances[0] ** num_generations
            A group can tie with *any* of the rewards, not only with this one.
            or: chances[-1] ** num_generations
        only the most probable reward is counted: max(chances) ** num_generations
            A group can tie with *any* of the rewards, even with a rare one.
        only two different rewards are assumed: chances[0] ** num_generations + (1 - chances[0]) ** num_generations
            1 − p is the chance of all other rewards together. Those rewards may differ from each other.
        the probability of no tie is returned: 1 - tie_probability(chances, num_generations)
            The larger the group is, the less likely a tie should be.
        the chances of the rewards are multiplied: math.prod(chances) ** num_generations
            All completions get the first reward *or* all get the second. What do you do with the probabilities of
            events that exclude each other?
        all rewards are assumed to be equally likely: len(chances) ** (1 - num_generations)
            The first argument gives the chance of each reward.
        the group size is assumed to be 2: chance**num_generations -> chance**2
            All G completions have to agree, not just two.
        the exponent is G − 1: chance**num_generations -> chance ** (num_generations - 1)
            The first completion has to get this reward as well.
        the chances are multiplied by G: chance**num_generations -> chance * num_generations
            All G completions must agree. What is the probability that several independent events all happen?
    """,
)


# ---- degenerate_groups ----


def degenerate_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """(N,) bool, whether all rewards of a group are equal."""
    groups = rewards.view(-1, num_generations)
    return (groups == groups[:, :1]).all(dim=1)


check_degenerate_groups = Exercise(
    degenerate_groups,
    parts=(
        Part(
            "right or wrong, 1 or 0",
            2,
            lambda rng: call(torch.tensor([float(rng.random() < 0.7) for _ in range(12)] + [1.0] * 3 + [0.0] * 3), 3),
            always=(call(torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]), 3),),  # each pair is equal once
        ),
        Part(
            "equal, nearly equal, unequal",
            2,
            tied(1.0),
            draws=16,
            always=(call(torch.tensor([0.5, 0.5, 0.5, 0.5, 0.25, 0.5, 0.5, 0.5]), 4),),  # halves equal their mean
        ),
    ),
    changes="""
        nearly equal rewards count as a tie: (groups == groups[:, :1]).all(dim=1) -> groups.std(dim=1) < 1e-4
            A group ties only if its rewards are exactly equal, and a difference of a millionth is a difference.
        ties are detected by a standard deviation of 0: (groups == groups[:, :1]).all(dim=1) -> groups.std(dim=1) == 0
            With a single group, torch's std of equal rewards need not be 0. Compare the rewards with each other.
        rewards must equal their mean: groups[:, :1] -> groups.mean(dim=1, keepdim=True)
            The computed mean of sixteen rewards of 1.69 need not be exactly 1.69. Compare the rewards with each other.
        only groups of ones or of zeros count as tied:
            (groups == groups[:, :1]).all(dim=1) -> (groups == 0).all(dim=1) | (groups == 1).all(dim=1)
            A group in which all rewards are 1.69 ties as well.
        a group in which all are right does not count as tied: groups[:, :1] -> 0
            If all completions are right, their rewards are equal, too.
        only the first and the last reward are compared:
            (groups == groups[:, :1]).all(dim=1) -> groups[:, 0] == groups[:, -1]
            A group of 1, 0, 1 does not tie.
        `any` is used where `all` is needed: .all( -> .any(
            The first reward always equals itself. *All* rewards of the group must equal the first.
        the result is True for the groups that do not tie: return ( -> return ~(
            Return True for a group that ties.
        there is one value per completion, not per group: .all(dim=1) -> .flatten()
            Return one bool per group, shape (N,): are *all* of its rewards equal?
        the groups are mixed: degenerate_groups(rewards.view(num_generations, -1).T.flatten(), num_generations)
            A group's rows are adjacent.
    """,
    excerpt=one_group,
)


# ---- rloo_advantages ----


def rloo_advantages(rewards: Tensor, num_generations: int, truncated: Tensor) -> Tensor:
    """Reward minus the mean of the others that are complete; 0 for a truncated one, or if nobody is left."""
    result = torch.zeros_like(rewards)
    for start in range(0, len(rewards), num_generations):
        complete = [row for row in range(start, start + num_generations) if not truncated[row]]
        for row in complete if len(complete) > 1 else []:
            others = [other for other in complete if other != row]
            result[row] = rewards[row] - rewards[others].mean()
    return result


def _rloo_of_mixed_groups(rewards: Tensor, num_generations: int, truncated: Tensor) -> Tensor:
    """Return the same within groups whose completions are not adjacent."""
    order = torch.arange(len(rewards)).view(num_generations, -1).T.flatten()
    return rloo_advantages(rewards[order], num_generations, truncated[order])[order.argsort()]


def _cut_short(rng: random.Random, left: int) -> Call:
    """Three groups of four; in one of them `left` completions are complete, and in the others three and all."""
    rewards = some_rewards(rng, 3, 4)
    groups = [rng.sample([False] * count + [True] * (4 - count), 4) for count in (left, 3, 4)]
    rng.shuffle(groups)
    truncated = torch.tensor(groups).flatten()
    return call(rewards + 0.25 * truncated, 4, truncated)


check_rloo_advantages = Exercise(
    rloo_advantages,
    parts=(
        Part("two or more completions of each group are complete", 2, lambda rng: _cut_short(rng, 2), draws=8),
        Part(
            "one completion of a group is complete, or none",
            1,
            lambda rng: _cut_short(rng, rng.choice([0, 1])),
            draws=12,
        ),
    ),
    changes="""
        truncated completions are not left out: rloo(rewards, num_generations)
            The last argument says which completions are truncated. Leave them out.
        truncated completions count in the baselines of the others:
            rloo(rewards, num_generations).masked_fill(truncated, 0.0)
            They get no advantage, and no other completion is compared with them.
        truncated completions get an advantage:
            torch.where(truncated, rloo(rewards, num_generations), rloo_advantages(rewards, num_generations, truncated))
            Nothing should be learned from them: their advantage is 0.
        truncated completions count as a reward of 0:
            rloo(rewards * ~truncated, num_generations).masked_fill(truncated, 0.0)
            Leaving a completion out is different from giving it 0: the mean is then over fewer completions.
        truncated completions count in the sum, but not in the number:
            rewards[others].mean() -> (rewards[start : start + num_generations].sum() - rewards[row]) / len(others)
            The sum and the number must be of the same completions.
        the groups are mixed: _rloo_of_mixed_groups(rewards, num_generations, truncated)
            A group's rows are adjacent: the first group is rows 0 to G − 1.
        a completion is part of its own baseline: [other for other in complete if other != row] -> complete
            The baseline is the mean of the *other* completions.
        the sum of the others is not divided: .mean() -> .sum()
            The baseline is the *mean* of the others.
        the only complete completion keeps its reward:
            len(complete) > 1 -> complete; rewards[others].mean() -> rewards[others].mean().nan_to_num()
            There is no other completion to compare it with, so its advantage is 0.
        the sign is wrong: rewards[row] - rewards[others].mean() -> rewards[others].mean() - rewards[row]
            A completion that is better than the others has a positive advantage.
    """,
)


# ---- dynamic_sampling ----


def dynamic_sampling(rewards: Tensor, num_generations: int, groups_needed: int) -> tuple[Tensor, int]:
    """Return the indices (K,) of the first groups without a tie, at most `groups_needed`, and the completions taken."""
    groups = rewards.view(-1, num_generations)
    useful = groups.amax(dim=1) > groups.amin(dim=1)
    kept = useful.nonzero().flatten()[:groups_needed]
    sampled = int(kept[-1]) + 1 if len(kept) == groups_needed else len(groups)
    return kept, sampled * num_generations


def _many_groups(few: bool) -> Callable[[random.Random], Call]:
    """Ten groups of six or eleven: some all wrong, some all right, one tied at 0.5, one where rounding shows."""

    def draw(rng: random.Random) -> Call:
        all_right, all_wrong = rng.choice([2, 3]), rng.choice([2, 3])
        groups = [torch.ones(6)] * all_right + [torch.zeros(6)] * all_wrong
        groups += [torch.full((6,), 0.5), tied_alone(rng, 6)]
        informative = 10 - len(groups)
        for _ in range(informative):
            row = [0.0, 1.0, *(rng.choice([0.0, 1.0]) for _ in range(4))]
            groups.append(torch.tensor(rng.sample(row, 6)))
        rng.shuffle(groups)
        groups += [torch.ones(6)] * few  # the search continues behind the last useful group
        needed = informative + rng.choice([1, 2]) if few else informative - 1
        return call(torch.cat(groups), 6, needed)

    return draw


check_dynamic_sampling = Exercise(
    dynamic_sampling,
    parts=(
        Part(
            "more groups than are needed",
            3,
            _many_groups(few=False),
            draws=8,
            always=(call(torch.tensor([1.0, 1.0, 0.5, 0.500001, 1.0, 0.0]), 2, 1),),  # a millionth is a difference
        ),
        Part(
            "fewer groups than are needed",
            1,
            _many_groups(few=True),
            always=(call(tied_alone(random.Random(0), 16), 16, 1),),  # alone, where torch's std need not be 0
        ),
    ),
    changes="""
        groups that are all right are kept: groups.amax(dim=1) > groups.amin(dim=1) -> (groups != 0).any(dim=1)
            Groups that are all right have no gradient either.
            or: groups.amax(dim=1) > -> (groups == 1).all(dim=1) | (groups.amax(dim=1) >; amin(dim=1) -> amin(dim=1))
        groups that are all wrong are kept: groups.amax(dim=1) > groups.amin(dim=1) -> (groups < 1).any(dim=1)
            Groups that are all wrong have no gradient either.
            or: groups.amax(dim=1) > -> (groups == 0).all(dim=1) | (groups.amax(dim=1) >; amin(dim=1) -> amin(dim=1))
        only ties at 0 and at 1 are dropped:
            groups.amax(dim=1) > groups.amin(dim=1) -> ~((groups == 0).all(dim=1) | (groups == 1).all(dim=1))
            Six rewards of 0.5 tie as well. Check whether all rewards of the group are equal.
        a rounding error counts as a difference:
            groups.amax(dim=1) > groups.amin(dim=1) -> groups.std(dim=1) > 0
            The computed mean of sixteen rewards of 1.69 need not be exactly 1.69, and torch's std of them need not be
            0. Compare the rewards with each other, not with their mean.
            or: groups.amax(dim=1) > groups.amin(dim=1) -> torch.stack([group.std() > 0 for group in groups])
            or: groups.amax(dim=1) > groups.amin(dim=1) -> (groups != groups.mean(dim=1, keepdim=True)).any(dim=1)
        a small difference counts as a tie: groups.amax(dim=1) > groups.amin(dim=1) -> groups.std(dim=1) > 1e-4
            Groups whose rewards differ by a millionth are useful, too. Compare without a tolerance.
        the groups are mixed: rewards.view(-1, num_generations) -> rewards.view(num_generations, -1).T
            A group's rows are adjacent: the first group is rows 0 to G − 1.
        the tied groups are kept: groups.amax(dim=1) > -> groups.amax(dim=1) ==
            Keep the groups that do *not* tie.
        more groups are returned than are needed: return kept -> return useful.nonzero().flatten()
            The update needs `groups_needed` groups; cut the list there.
        the last groups are taken: return kept -> return useful.nonzero().flatten()[-groups_needed:]
            Sampling stops as soon as there are enough groups: take the first ones.
        row numbers are returned, not group numbers: return kept -> return kept * num_generations
            Return one number per group: rows 0 to G − 1 are group 0.
            or: return kept -> return torch.arange(len(rewards)).view_as(groups)[kept].flatten()
        the groups are counted from 1: return kept -> return kept + 1
            The first group is number 0.
        only the completions of the kept groups are counted: sampled * num_generations -> len(kept) * num_generations
            The completions of tied groups were sampled as well.
        groups that are never sampled are counted: sampled * num_generations -> len(rewards)
            Sampling stops as soon as there are enough groups, so nothing after the last of them is sampled.
        the completions of the last group are not counted: int(kept[-1]) + 1 -> int(kept[-1])
            Groups are counted from 0. How many groups are there up to and including group 3?
        if there are too few useful groups, counting stops at the last one:
            int(kept[-1]) + 1 if len(kept) == groups_needed else len(groups) -> int(kept[-1]) + 1
            If there are not enough useful groups, all groups are sampled in the search for more.
        groups are counted, not completions: sampled * num_generations -> sampled
            Each group has G completions.
    """,
)
