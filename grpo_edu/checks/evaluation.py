"""Exercises of notebook 06: intervals, paired tests, habits that make noise look like progress, pass@k, an audit."""

from __future__ import annotations

import math
import random

from grpo_edu import power, significance
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

Z = 1.959964  # of a 95% interval

# ---- wilson_interval ----


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The package's, at 95%."""
    return significance.wilson_interval(successes, trials)


def _some_counts(rng: random.Random) -> Call:
    trials = rng.choice([10, 20, 60, 300])
    return call(rng.randrange(1, trials), trials)


def _extreme_counts(rng: random.Random) -> Call:
    trials = rng.choice([5, 10, 60])
    return call(rng.choice([0, trials]), trials)


def _wilson_by_roots(successes: int, trials: int) -> tuple[float, float]:
    # the shares p at which |successes/trials − p| = Z · sqrt(p (1 − p) / trials): a quadratic equation in p
    share = successes / trials
    a, b, c = 1 + Z**2 / trials, -(2 * share + Z**2 / trials), share**2
    root = math.sqrt(max(0.0, b * b - 4 * a * c))
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def _wilson_by_formula(successes: int, trials: int) -> list[float]:
    share, z2 = successes / trials, Z * Z
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    reach = Z / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return [middle - reach, middle + reach]


def _wilson_by_failures(successes: int, trials: int) -> tuple[float, float]:
    failures = trials - successes
    middle = (successes + Z**2 / 2) / (trials + Z**2)
    reach = Z / (trials + Z**2) * math.sqrt(successes * failures / trials + Z**2 / 4)
    return middle - reach, middle + reach


def _normal_interval(successes: int, trials: int) -> tuple[float, float]:
    share = successes / trials
    reach = Z * math.sqrt(share * (1 - share) / trials)
    return share - reach, share + reach


check_wilson_interval = Exercise(
    "wilson_interval",
    wilson_interval,
    parts=(
        Part("from 10 to 300 problems", 3, _some_counts),
        Part("none right, or all", 1, _extreme_counts),
    ),
    mistakes=(
        Mistake("that is the normal interval", "At 0 of 10 it has no width at all. Wilson's has a z² in three places.",
                _normal_interval),
        Mistake("the middle is not moved", "Wilson's middle lies nearer to one half than the share does.",
                lambda k, n: (k / n - _reach(k, n), k / n + _reach(k, n))),
        Mistake("nothing is divided by 1 + z²/n", "Both the middle and the reach are divided by it.",
                lambda k, n: tuple(bound * (1 + Z**2 / n) for bound in wilson_interval(k, n))),
        Mistake("z is that of 90%", "95% leaves 2.5% on either side: z = 1.96.",
                lambda k, n: significance.wilson_interval(k, n, 0.9)),
        Mistake("these are percent", "Shares between 0 and 1.",
                lambda k, n: tuple(100 * bound for bound in wilson_interval(k, n))),
    ),
    right=(_wilson_by_roots, _wilson_by_formula, _wilson_by_failures),
)  # fmt: skip


def _reach(successes: int, trials: int) -> float:
    low, high = wilson_interval(successes, trials)
    return (high - low) / 2


# ---- mcnemar_p ----


def mcnemar_p(only_before: int, only_after: int) -> float:
    """The p-value of the exact McNemar test: the package's, from its two counts."""
    before = [True] * only_before + [False] * only_after + [True]
    after = [False] * only_before + [True] * only_after + [True]
    return significance.mcnemar(before, after).p_value


def _unequal_counts(rng: random.Random) -> Call:
    less = rng.randrange(0, 8)
    pair = [less, less + rng.randrange(2, 9)]
    rng.shuffle(pair)
    return call(*pair)


def _equal_counts(rng: random.Random) -> Call:
    count = rng.choice([0, 1, 4])
    return call(count, count)


def _mcnemar_by_comb(only_before: int, only_after: int) -> float:
    n, k = only_before + only_after, min(only_before, only_after)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def _mcnemar_by_scipy(only_before: int, only_after: int) -> float:
    from scipy.stats import binom

    n = only_before + only_after
    return min(1.0, 2 * float(binom.cdf(min(only_before, only_after), n, 0.5)))


def _mcnemar_by_recursion(only_before: int, only_after: int) -> float:
    n, chance, total = only_before + only_after, 0.5 ** (only_before + only_after), 0.0
    for i in range(min(only_before, only_after) + 1):
        total += chance
        chance *= (n - i) / (i + 1)
    return min(1.0, 2 * total)


def _chi_square(only_before: int, only_after: int) -> float:
    if only_before + only_after == 0:
        return 1.0
    return math.erfc(math.sqrt((only_before - only_after) ** 2 / (only_before + only_after) / 2))


check_mcnemar_p = Exercise(
    "mcnemar_p",
    mcnemar_p,
    parts=(
        Part("more on one side", 3, _unequal_counts),
        Part("as many on either side, and none at all", 1, _equal_counts, draws=6),
    ),
    mistakes=(
        Mistake("the test is one-sided", "A change for the worse would have been a change as well: twice the tail.",
                lambda b, c: min(1.0, _mcnemar_by_comb(b, c) / 2) if b != c else _one_tail(b, c)),
        Mistake("that is the probability of this very count", "At least as unequal: add up the tail.",
                lambda b, c: min(1.0, 2 * math.comb(b + c, min(b, c)) / 2 ** (b + c))),
        Mistake("the smallest count is left out of the tail", "From 0 to the smaller count, inclusive.",
                lambda b, c: min(1.0, 2 * sum(math.comb(b + c, i) for i in range(min(b, c))) / 2 ** (b + c))),
        Mistake("that is the chi-square approximation", "With so few pairs, count: the coin's distribution is exact.",
                _chi_square),
        Mistake("the p-value is above 1", "A probability ends at 1.",
                lambda b, c: 2 * sum(math.comb(b + c, i) for i in range(min(b, c) + 1)) / 2 ** (b + c)),
    ),
    right=(_mcnemar_by_comb, _mcnemar_by_scipy, _mcnemar_by_recursion),
)  # fmt: skip


def _one_tail(only_before: int, only_after: int) -> float:
    n = only_before + only_after
    return sum(math.comb(n, i) for i in range(min(only_before, only_after) + 1)) / 2**n


# ---- false_alarm ----


def false_alarm(looks: int, alpha: float) -> float:
    """The chance of at least one false alarm in several independent looks at nothing: 1 − (1 − α)^looks."""
    return 1 - (1 - alpha) ** looks


def _false_alarm_by_loop(looks: int, alpha: float) -> float:
    quiet = 1.0
    for _ in range(looks):
        quiet *= 1 - alpha
    return 1 - quiet


def _false_alarm_by_first(looks: int, alpha: float) -> float:
    return sum(alpha * (1 - alpha) ** earlier for earlier in range(looks))


def _false_alarm_by_log(looks: int, alpha: float) -> float:
    return -math.expm1(looks * math.log1p(-alpha))


check_false_alarm = Exercise(
    "false_alarm",
    false_alarm,
    parts=(Part("1 to 40 looks", 2, lambda rng: call(rng.choice([1, 2, 5, 10, 20, 40]), rng.choice([0.01, 0.05, 0.1])),
                draws=8),),
    mistakes=(
        Mistake("chances are added", "With 40 looks at 5% that would be 200%.", lambda looks, alpha: looks * alpha),
        Mistake("that is the chance that all looks are false alarms", "At least one is enough.",
                lambda looks, alpha: alpha**looks),
        Mistake("that is the chance of no alarm", "One minus it.", lambda looks, alpha: (1 - alpha) ** looks),
        Mistake("looks do not matter in your formula", "More looks, more chances.", lambda looks, alpha: alpha),
        Mistake("one look is forgotten", "With one look the chance is alpha.",
                lambda looks, alpha: 1 - (1 - alpha) ** (looks - 1)),
    ),
    right=(_false_alarm_by_loop, _false_alarm_by_first, _false_alarm_by_log),
)  # fmt: skip


# ---- pass_at_k ----


def _pass_counts(rng: random.Random) -> Call:
    samples = rng.randrange(4, 12)
    return call(samples, rng.randrange(1, samples - 1), rng.randrange(2, min(5, samples)))


def _pass_edges(rng: random.Random) -> Call:
    samples = rng.randrange(4, 9)
    return call(*rng.choice([(samples, 0, 2), (samples, samples, 2), (samples, 2, 1), (samples, samples - 1, 3)]))


def _pass_by_comb(num_samples: int, num_correct: int, k: int) -> float:
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def _pass_by_draws(num_samples: int, num_correct: int, k: int) -> float:
    all_wrong = 1.0
    for drawn in range(k):
        all_wrong *= max(0, num_samples - num_correct - drawn) / (num_samples - drawn)
    return 1 - all_wrong


def _pass_by_listing(num_samples: int, num_correct: int, k: int) -> float:
    from itertools import combinations

    answers = [True] * num_correct + [False] * (num_samples - num_correct)
    picks = list(combinations(answers, k))
    return sum(any(pick) for pick in picks) / len(picks)


check_pass_at_k = Exercise(
    "pass_at_k",
    significance.pass_at_k,
    parts=(
        Part("some right, some wrong", 3, _pass_counts),
        Part("none, all, k = 1, too few wrong ones", 1, _pass_edges, draws=12),
    ),
    mistakes=(
        Mistake("that estimate is biased", "1 − (1 − c/n)^k draws with replacement: the same sample may come twice.",
                lambda n, c, k: 1 - (1 - c / n) ** k),
        Mistake("that is the chance that all k are right", "At least one.",
                lambda n, c, k: math.comb(c, k) / math.comb(n, k)),
        Mistake("that is the chance that all k are wrong", "One minus it.",
                lambda n, c, k: math.comb(n - c, k) / math.comb(n, k)),
        Mistake("that is pass@1", "k samples may be looked at.", lambda n, c, k: c / n),
        Mistake("k is one too small", "The product has k factors.",
                lambda n, c, k: _pass_by_comb(n, c, k - 1) if k > 1 else 0.0),
    ),
    right=(_pass_by_comb, _pass_by_draws, _pass_by_listing),
)  # fmt: skip


# ---- possible_counts ----


def possible_counts(percent: float, trials: int, decimals: int) -> list[int]:
    """The package's."""
    return power.possible_counts(percent, trials, decimals=decimals)


def _reported(rng: random.Random) -> Call:
    trials, decimals = rng.choice([(60, 1), (60, 0), (300, 0), (300, 1), (1000, 0), (24, 1)])
    return call(round(100 * rng.randrange(trials + 1) / trials, decimals), trials, decimals)


def _invented(rng: random.Random) -> Call:
    return call(*rng.choice([(89.0, 60, 0), (71.0, 24, 1), (50.5, 60, 1), (33.0, 20, 0)]))


def _counts_by_string(percent: float, trials: int, decimals: int) -> list[int]:
    slack = 0.5 * 10**-decimals + 1e-9
    return [count for count in range(trials + 1) if -slack <= 100 * count / trials - percent <= slack]


def _counts_by_range(percent: float, trials: int, decimals: int) -> list[int]:
    slack = 0.5 * 10**-decimals
    low = math.ceil((percent - slack) * trials / 100 - 1e-9)
    high = math.floor((percent + slack) * trials / 100 + 1e-9)
    return list(range(max(0, low), min(trials, high) + 1))


def _counts_by_filter(percent: float, trials: int, decimals: int) -> list[int]:
    near = filter(lambda count: round(abs(count * 100 / trials - percent), 9) <= 0.5 / 10**decimals, range(trials + 1))
    return [*near]


check_possible_counts = Exercise(
    "possible_counts",
    possible_counts,
    parts=(
        Part("reports that can be true", 2, _reported, draws=24),
        Part("reports that cannot", 1, _invented),
    ),
    mistakes=(
        Mistake("only the nearest count is given", "All that round to the report; there may be several, or none.",
                lambda percent, trials, decimals: [round(percent * trials / 100)]),
        Mistake("the report must be met exactly", "A report is rounded: 71.7% may be 71.67%.",
                lambda percent, trials, decimals: [k for k in range(trials + 1) if 100 * k / trials == percent]),
        Mistake("decimals do not matter in your formula", "89% leaves half a point on either side, 89.0% a twentieth.",
                lambda percent, trials, decimals: power.possible_counts(percent, trials)),
        Mistake("a whole unit of slack is too much", "Rounding moves a number by half a unit at most.",
                lambda percent, trials, decimals: [
                    k for k in range(trials + 1) if abs(100 * k / trials - percent) <= 10.0**-decimals + 1e-9]),
        Mistake("shares and percent are mixed up", "The report is in percent.",
                lambda percent, trials, decimals: [
                    k for k in range(trials + 1) if abs(k / trials - percent) <= 0.5 * 10.0**-decimals + 1e-9]),
    ),
    right=(_counts_by_string, _counts_by_range, _counts_by_filter),
)  # fmt: skip
