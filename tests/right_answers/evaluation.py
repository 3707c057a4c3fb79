"""Right answers to the exercises of `grpo_edu.checks.evaluation`, written in other ways than the reference."""

from __future__ import annotations

import math
from statistics import NormalDist

from grpo_edu import evaluation as significance
from grpo_edu.studies import power


def wilson_by_roots(successes: int, trials: int, level: float) -> tuple[float, float]:
    # the shares p at which |successes/trials − p| = z · sqrt(p (1 − p) / trials): a quadratic equation in p
    share, z2 = successes / trials, NormalDist().inv_cdf((1 - level) / 2) ** 2
    a, b, c = 1 + z2 / trials, -(2 * share + z2 / trials), share**2
    root = math.sqrt(max(0.0, b * b - 4 * a * c))
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def wilson_by_table(successes: int, trials: int, level: float) -> tuple[float, float]:
    z = {0.8: 1.2816, 0.9: 1.6449, 0.95: 1.96, 0.99: 2.5758}[level]
    failures = trials - successes
    middle = (successes + z**2 / 2) / (trials + z**2)
    reach = z / (trials + z**2) * math.sqrt(successes * failures / trials + z**2 / 4)
    return middle - reach, middle + reach


def mcnemar_by_scipy(only_before: int, only_after: int) -> float:
    from scipy.stats import binom

    n = only_before + only_after
    return min(1.0, 2 * float(binom.cdf(min(only_before, only_after), n, 0.5)))


def mcnemar_by_recursion(only_before: int, only_after: int) -> float:
    n, chance, total = only_before + only_after, 0.5 ** (only_before + only_after), 0.0
    for i in range(min(only_before, only_after) + 1):
        total += chance
        chance *= (n - i) / (i + 1)
    return min(1.0, 2 * total)


def false_alarm_by_loop(looks: int, alpha: float) -> float:
    quiet = 1.0
    for _ in range(looks):
        quiet *= 1 - alpha
    return 1 - quiet


def false_alarm_by_first(looks: int, alpha: float) -> float:
    return sum(alpha * (1 - alpha) ** earlier for earlier in range(looks))


def false_alarm_by_log(looks: int, alpha: float) -> float:
    return -math.expm1(looks * math.log1p(-alpha))


def pass_by_draws(rewards: list[float], k: int) -> float:
    best, below, left = 0.0, 1.0, sorted(rewards)  # below: the chance that nothing above was drawn
    while len(left) >= k:
        drawn = k / len(left)
        best += below * drawn * left.pop()
        below *= 1 - drawn
    return best


def pass_by_listing(rewards: list[float], k: int) -> float:
    from itertools import combinations

    picks = list(combinations(rewards, k))
    return sum(max(pick) for pick in picks) / len(picks)


def counts_by_string(percent: float, trials: int, decimals: int) -> list[int]:
    slack = 0.5 * 10**-decimals + 1e-9
    return [count for count in range(trials + 1) if -slack <= 100 * count / trials - percent <= slack]


def counts_by_range(percent: float, trials: int, decimals: int) -> list[int]:
    slack = 0.5 * 10**-decimals
    low = math.ceil((percent - slack) * trials / 100 - 1e-9)
    high = math.floor((percent + slack) * trials / 100 + 1e-9)
    return list(range(max(0, low), min(trials, high) + 1))


def pass_by_levels(rewards: list[float], k: int) -> float:
    """Each step from one level to the next is gained where at least one of k is above it: pass@k per level."""
    levels, total = sorted({*rewards}), min(rewards)
    for low, high in zip(levels, levels[1:], strict=False):
        below = sum(one <= low for one in rewards)
        total += (high - low) * (1 - math.comb(below, k) / math.comb(len(rewards), k))
    return total


def mcnemar_of_the_package(only_before: int, only_after: int) -> float:
    before = [True] * only_before + [False] * only_after + [True]
    after = [False] * only_before + [True] * only_after + [True]
    return significance.mcnemar(before, after).p_value


def counts_of_the_package(percent: float, trials: int, decimals: int) -> list[int]:
    return power.possible_counts(percent, trials, decimals=decimals)


RIGHT_ANSWERS = {
    "wilson_interval": (significance.wilson_interval, wilson_by_roots, wilson_by_table),
    "mcnemar_p": (mcnemar_of_the_package, mcnemar_by_scipy, mcnemar_by_recursion),
    "false_alarm": (false_alarm_by_loop, false_alarm_by_first, false_alarm_by_log),
    "pass_at_k": (pass_by_levels, pass_by_draws, pass_by_listing),
    "possible_counts": (counts_of_the_package, counts_by_string, counts_by_range),
}
