"""Exercises of notebook 06, first part: intervals, paired tests, habits that make noise look like progress."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from grpo_edu import significance
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


def _normal_within(successes: int, trials: int) -> tuple[float, float]:
    low, high = _normal_interval(successes, trials)
    return max(0.0, low), min(1.0, high)


def _wilson_with(
    *,
    inside: Callable[[int], float] = lambda n: Z**2 / (4 * n**2),
    middle: Callable[[int], float] = lambda n: 1.0,
    reach: Callable[[int], float] = lambda n: 1.0,
) -> Callable[[int, int], tuple[float, float]]:
    """A wrong answer with another term under the root, or a factor of n too many before the middle or the reach."""

    def wrong(successes: int, trials: int) -> tuple[float, float]:
        share, divisor = successes / trials, 1 + Z**2 / trials
        center = (share + Z**2 / (2 * trials)) / divisor * middle(trials)
        width = Z * math.sqrt(share * (1 - share) / trials + inside(trials)) / divisor * reach(trials)
        return center - width, center + width

    return wrong


check_wilson_interval = Exercise(
    "wilson_interval",
    wilson_interval,
    parts=(
        Part("from 10 to 300 problems", 3, _some_counts),
        Part("none right, or all", 1, _extreme_counts),
    ),
    mistakes=(
        Mistake("that is the normal interval", "At 0 of 10 it has no width at all. Wilson's has a z² in three places.",
                _normal_interval, also=(_normal_within,)),
        Mistake("the middle is not moved", "Wilson's middle lies nearer to one half than the share does.",
                lambda k, n: (k / n - _reach(k, n), k / n + _reach(k, n))),
        Mistake("nothing is divided by 1 + z²/n", "Both the middle and the reach are divided by it.",
                lambda k, n: tuple(bound * (1 + Z**2 / n) for bound in wilson_interval(k, n))),
        Mistake("the middle is not divided by 1 + z²/n", "Brackets: both the middle and the reach are divided by it.",
                _wilson_with(middle=lambda n: 1 + Z**2 / n)),
        Mistake("the reach is not divided by 1 + z²/n", "Brackets: both the middle and the reach are divided by it.",
                _wilson_with(reach=lambda n: 1 + Z**2 / n)),
        Mistake("the z before the root is missing", "The root is a standard error; the reach is z of them.",
                _wilson_with(reach=lambda n: 1 / Z)),
        Mistake("the root holds z²/(4n), not z²/(4n²)", "Under the root both terms shrink with n, the second twice.",
                _wilson_with(inside=lambda n: Z**2 / (4 * n))),
        Mistake("z is that of 90%", "95% leaves 2.5% on either side: z = 1.96.",
                lambda k, n: significance.wilson_interval(k, n, 0.9)),
        Mistake("these are percent", "Shares between 0 and 1.",
                lambda k, n: tuple(100 * bound for bound in wilson_interval(k, n))),
    ),
    right=(_wilson_by_roots, _wilson_by_formula, _wilson_by_failures),
    tolerance=1e-4,  # z = 1.96 will do
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


def _tail_to(last: int, n: int) -> float:
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(last + 1)) / 2**n)


def _chi_square(only_before: int, only_after: int) -> float:
    if only_before + only_after == 0:
        return 1.0
    return math.erfc(math.sqrt((only_before - only_after) ** 2 / (only_before + only_after) / 2))


check_mcnemar_p = Exercise(
    "mcnemar_p",
    mcnemar_p,
    parts=(
        Part("more on one side", 3, _unequal_counts, always=(call(9, 2), call(2, 9))),
        Part("as many on either side, and none at all", 1, _equal_counts, draws=6),
    ),
    mistakes=(
        Mistake("the test is one-sided", "A change for the worse would have been a change as well: twice the tail.",
                lambda b, c: min(1.0, _mcnemar_by_comb(b, c) / 2) if b != c else _one_tail(b, c)),
        Mistake("that is the probability of this very count", "At least as unequal: add up the tail.",
                lambda b, c: min(1.0, 2 * math.comb(b + c, min(b, c)) / 2 ** (b + c))),
        Mistake("the smallest count is left out of the tail", "From 0 to the smaller count, inclusive.",
                lambda b, c: min(1.0, 2 * sum(math.comb(b + c, i) for i in range(min(b, c))) / 2 ** (b + c))),
        Mistake("the tail does not end at the smaller count", "To min(b, c), whichever of the two it is.",
                lambda b, c: _tail_to(b, b + c),
                also=(lambda b, c: _tail_to(c, b + c), lambda b, c: _tail_to(max(b, c), b + c))),
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
