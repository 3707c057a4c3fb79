"""Exercises of notebook 05, third part: groups that tie, the distance from the reference, and a claim of progress."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.objective import numbers
from grpo_edu.checks.reduction import mask_of
from grpo_edu.losses import per_token_kl
from grpo_edu.metrics import masked_mean
from grpo_edu.significance import mcnemar

# ---- tied_groups ----


def tied_groups(rewards: Tensor, num_generations: int) -> tuple[float, float]:
    """The shares of groups in which all completions are right, and in which none is."""
    groups = rewards.view(-1, num_generations)
    return (groups == 1).all(dim=1).float().mean().item(), (groups == 0).all(dim=1).float().mean().item()


def _outcomes(rng: random.Random) -> Call:
    size = rng.choice([3, 4])
    groups = [[1.0] * size] * rng.randrange(2, 4) + [[0.0] * size]
    for _ in range(rng.randrange(1, 4)):
        right = rng.randrange(1, size)
        groups.append(rng.sample([1.0] * right + [0.0] * (size - right), size))
    rng.shuffle(groups)
    return call(torch.tensor(sum(groups, [])), size)


def _all_mixed(rng: random.Random) -> Call:
    size = rng.choice([2, 4])
    groups = [rng.sample([1.0, 0.0] * (size // 2), size) for _ in range(3)]
    return call(torch.tensor(sum(groups, [])), size)


def _tied_by_means(rewards: Tensor, num_generations: int) -> tuple[float, float]:
    means = rewards.view(-1, num_generations).mean(dim=1).tolist()
    return means.count(1.0) / len(means), means.count(0.0) / len(means)


def _tied_by_loop(rewards: Tensor, num_generations: int) -> list[float]:
    values = rewards.tolist()
    groups = [values[start : start + num_generations] for start in range(0, len(values), num_generations)]
    return [sum(set(group) == {kind} for group in groups) / len(groups) for kind in (1.0, 0.0)]


def _tied_by_extremes(rewards: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    groups = rewards.reshape(len(rewards) // num_generations, num_generations)
    return groups.amin(dim=1).mean(), 1 - groups.amax(dim=1).mean()


def _strided(rewards: Tensor, num_generations: int) -> tuple[float, float]:
    return tied_groups(rewards.view(num_generations, -1).T.flatten(), num_generations)


def _of_the_tied(rewards: Tensor, num_generations: int) -> tuple[float, float]:
    right, wrong = tied_groups(rewards, num_generations)
    return (right / (right + wrong), wrong / (right + wrong)) if right + wrong else (0.0, 0.0)


check_tied_groups = Exercise(
    "tied_groups",
    tied_groups,
    parts=(
        Part("some groups tie", 2, _outcomes),
        Part("no group ties", 1, _all_mixed),
    ),
    mistakes=(
        Mistake("completions are counted, not groups", "A group counts where *all* of its completions agree.",
                lambda rewards, g: ((rewards == 1).float().mean().item(), (rewards == 0).float().mean().item())),
        Mistake("any stands where all should", "One right completion makes no group of right ones.",
                lambda rewards, g: ((rewards.view(-1, g) == 1).any(dim=1).float().mean().item(),
                                    (rewards.view(-1, g) == 0).any(dim=1).float().mean().item())),
        Mistake("the two shares have changed places", "All right first, none right second.",
                lambda rewards, g: tied_groups(rewards, g)[::-1]),
        Mistake("these are counts", "Divide by the number of groups.",
                lambda rewards, g: tuple(share * (len(rewards) // g) for share in tied_groups(rewards, g))),
        Mistake("it is divided by the number of groups that tie", "A share of *all* groups.", _of_the_tied),
        Mistake("all groups are asked at once", "Ask each row: all(dim=1).",
                lambda rewards, g: (float((rewards == 1).all()), float((rewards == 0).all()))),
        Mistake("groups are taken by stride", "A group's rewards are neighbors: view(-1, G).", _strided),
    ),
    right=(_tied_by_means, _tied_by_loop, _tied_by_extremes),
)  # fmt: skip


# ---- batch_kl ----


def batch_kl(per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> float:
    """The mean of k3 over the real tokens of a batch, as the trainer's metric "kl"."""
    return masked_mean(per_token_kl(per_token_logps, ref_per_token_logps), completion_mask)


def _two_policies(rng: random.Random, *, infinite: bool) -> Call:
    logps = numbers(rng, 3, 4, low=-3.0, high=-1.2)
    ref = logps + numbers(rng, 3, 4, low=-1.0, high=1.0)
    mask = mask_of([rng.randrange(1, 3), rng.randrange(1, 4), 4], 4)
    if infinite:
        logps, ref = logps.masked_fill(mask == 0, -torch.inf), ref.masked_fill(mask == 0, -torch.inf)
    return call(logps, ref, mask)


def _kl_by_selection(per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> Tensor:
    apart = (ref_per_token_logps - per_token_logps)[completion_mask == 1]
    return (apart.exp() - apart - 1).mean()


def _kl_by_where(per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> Tensor:
    apart = torch.where(completion_mask.bool(), ref_per_token_logps - per_token_logps, 0.0)
    return (torch.expm1(apart) - apart).sum() / completion_mask.sum()


def _kl_by_loop(per_token_logps: Tensor, ref_per_token_logps: Tensor, completion_mask: Tensor) -> float:
    total = count = 0.0
    for logps, refs, mask in zip(per_token_logps, ref_per_token_logps, completion_mask, strict=True):
        for place in mask.nonzero().flatten().tolist():
            ratio = math.exp(refs[place].item() - logps[place].item())
            total, count = total + ratio - math.log(ratio) - 1, count + 1
    return total / count


def _mean_with(
    estimate: Callable[[Tensor, Tensor], Tensor],
    mean: Callable[[Tensor, Tensor], Tensor] = lambda values, mask: values[mask == 1].mean(),
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A wrong answer with another estimator, or another mean."""
    return lambda logps, ref, mask: mean(estimate(logps, ref), mask)


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(mask == 0, 0.0)


check_batch_kl = Exercise(
    "batch_kl",
    batch_kl,
    parts=(
        Part("completions of different lengths", 2, lambda rng: _two_policies(rng, infinite=False)),
        Part("padding of minus infinity", 1, lambda rng: _two_policies(rng, infinite=True)),
    ),
    mistakes=(
        Mistake("the two policies have changed places", "k3's ratio is reference over policy.",
                _mean_with(lambda logps, ref: per_token_kl(ref, logps))),
        Mistake("that is k1", "k1 is negative where the reference is the likelier one. k3 never is.",
                _mean_with(lambda logps, ref: logps - ref)),
        Mistake("that is k2", "k2 is half the square. k3 has an exponential.",
                _mean_with(lambda logps, ref: (logps - ref).square() / 2)),
        Mistake("padding is multiplied away", "0 times infinity, or NaN, is NaN. Pick the real tokens instead.",
                _mean_with(per_token_kl, lambda values, mask: (values * mask).sum() / mask.sum())),
        Mistake("the mask picks rows", "An index of whole numbers 0 and 1 picks rows 0 and 1. Ask where it is 1.",
                _mean_with(per_token_kl, lambda values, mask: values[mask].mean())),
        Mistake("padding counts", "A mean over the tokens of the mask.",
                _mean_with(per_token_kl, lambda values, mask: values.mean())),
        Mistake("padding is counted in the number of tokens", "Divide by the number of real tokens, mask.sum().",
                _mean_with(per_token_kl, lambda values, mask: _kept(values, mask).mean())),
        Mistake("completions weigh alike, not tokens", "The metric is a mean over all tokens of the batch.",
                _mean_with(per_token_kl, lambda values, mask: (_kept(values, mask).sum(1) / mask.sum(1)).mean())),
        Mistake("the sum is not divided", "A mean over the tokens.",
                _mean_with(per_token_kl, lambda values, mask: _kept(values, mask).sum())),
    ),
    right=(_kl_by_selection, _kl_by_where, _kl_by_loop),
)  # fmt: skip


# ---- claim ----

Solved = Sequence[bool]  # 1 or 0, a problem


def claim(before: Solved, after: Solved) -> tuple[float, str]:
    """The gain, and "better", "worse" or "not shown" by the exact McNemar test at 5%."""
    return _claimed(before, after, mcnemar(before, after).p_value)


def _claimed(before: Solved, after: Solved, p_value: float) -> tuple[float, str]:
    gain = (sum(after) - sum(before)) / len(before)
    if p_value >= 0.05:
        return gain, "not shown"
    return gain, "better" if gain > 0 else "worse"


def _runs(rng: random.Random, pairs: Sequence[tuple[int, int]]) -> Call:
    lost, won = rng.choice(pairs)
    both, neither = rng.randrange(12, 15), rng.randrange(12, 15)
    rows = [(1, 1)] * both + [(0, 0)] * neither + [(1, 0)] * lost + [(0, 1)] * won
    rng.shuffle(rows)
    return call([before for before, _ in rows], [after for _, after in rows])


def _many_pairs(rng: random.Random) -> Call:
    return _runs(rng, [(1, 9), (0, 7), (0, 14), (9, 1), (8, 0), (14, 0)])


def _few_pairs(rng: random.Random) -> Call:
    return _runs(rng, [(1, 7), (0, 5), (2, 9), (7, 1), (1, 4), (5, 2), (3, 3)])


def _claim_by_binomial(before: Solved, after: Solved) -> tuple[float, str]:
    won = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1)) / 2 ** (won + lost)
    verdict = "not shown" if 2 * tail >= 0.05 else ("better" if won > lost else "worse")
    return (won - lost) / len(before), verdict


def _claim_by_scipy(before: Solved, after: Solved) -> tuple[float, str]:
    from scipy.stats import binomtest

    changes = [int(new) - int(old) for old, new in zip(before, after, strict=True) if new != old]
    p_value = binomtest(changes.count(1), len(changes)).pvalue if changes else 1.0
    return _claimed(before, after, p_value)


def _claim_by_tensors(before: Solved, after: Solved) -> list:
    change = torch.tensor(after).float() - torch.tensor(before).float()
    p_value = mcnemar(list(before), list(after)).p_value
    verdict = {1: "better", -1: "worse", 0: "not shown"}[int(change.sum().sign()) if p_value < 0.05 else 0]
    return [change.mean(), verdict]


def _unpaired(before: Solved, after: Solved) -> tuple[float, str]:
    n, shares = len(before), (sum(before) / len(before), sum(after) / len(after))
    pooled = sum(shares) / 2
    z = (shares[1] - shares[0]) / math.sqrt(2 * pooled * (1 - pooled) / n)
    return _claimed(before, after, math.erfc(abs(z) / math.sqrt(2)))


def _upside_down(before: Solved, after: Solved) -> tuple[float, str]:
    gain = (sum(after) - sum(before)) / len(before)
    if mcnemar(before, after).p_value < 0.05:
        return gain, "not shown"
    return gain, "better" if gain > 0 else "worse"


check_claim = Exercise(
    "claim",
    claim,
    parts=(
        Part("many problems fell to one side", 2, _many_pairs, draws=24),
        Part("few did", 2, _few_pairs, draws=20),
    ),
    mistakes=(
        Mistake("any gain is called better", "Noise gains as well: ask for a test first.",
                lambda before, after: _claimed(before, after, 0.0 if sum(before) != sum(after) else 1.0)),
        Mistake("p is read the wrong way round", "A *small* p means that chance alone would hardly do this.",
                _upside_down),
        Mistake("before and after have changed places", "After, minus before.",
                lambda before, after: claim(after, before)),
        Mistake("the gain has lost its sign", "What got worse has a negative gain.",
                lambda before, after: (abs(claim(before, after)[0]), claim(before, after)[1])),
        Mistake("the gain is left out where nothing is shown", "The gain is what was measured, whatever the verdict.",
                lambda before, after: (claim(before, after)[0] * (claim(before, after)[1] != "not shown"),
                                       claim(before, after)[1])),
        Mistake("the test is not paired", "The same problems were asked twice. Only those count that changed sides.",
                _unpaired),
        Mistake("the test is one-sided", "A change for the worse would have been a change as well.",
                lambda before, after: _claimed(before, after, mcnemar(before, after).p_value / 2)),
        Mistake("the direction is not looked at", "A change that is surely there may be one for the worse.",
                lambda before, after: (claim(before, after)[0], claim(before, after)[1].replace("worse", "better"))),
        Mistake("the gain is relative", "The share solved after, minus the share solved before.",
                lambda before, after: (sum(after) / sum(before) - 1, claim(before, after)[1])),
        Mistake("the gain is a count", "Divide by the number of problems.",
                lambda before, after: (sum(after) - sum(before), claim(before, after)[1])),
    ),
    right=(_claim_by_binomial, _claim_by_scipy, _claim_by_tensors),
)  # fmt: skip
