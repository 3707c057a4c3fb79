"""Exercises on evaluation: confidence intervals, paired tests, false alarms, pass@k and reported percentages."""

from __future__ import annotations

import math
import random

from grpo_edu.checks.core import Call, Exercise, Part, call

Z = 1.959964  # of a 95% interval


# ---- wilson_interval ----
def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's interval of a share, at 95%."""
    z = Z
    share, divisor = successes / trials, 1 + z**2 / trials
    variance = share * (1 - share) / trials
    middle = (share + z**2 / (2 * trials)) / divisor
    reach = z * math.sqrt(variance + z**2 / (4 * trials**2)) / divisor
    return middle - reach, middle + reach


def _some_counts(rng: random.Random) -> Call:
    trials = rng.choice([10, 20, 60, 300])
    return call(rng.randrange(1, trials), trials)


def _extreme_counts(rng: random.Random) -> Call:
    trials = rng.choice([5, 10, 60])
    return call(rng.choice([0, trials]), trials)


def _normal_interval(share: float, variance: float) -> tuple[float, float]:
    reach = Z * math.sqrt(variance)
    return share - reach, share + reach


check_wilson_interval = Exercise(
    wilson_interval,
    parts=(Part("from 10 to 300 problems", 3, _some_counts), Part("none right, or all", 1, _extreme_counts)),
    tolerance=1e-4,  # z = 1.96 will do
    changes="""
        that is the normal interval: middle - reach, middle + reach -> _normal_interval(share, variance)
            At 0 of 10 it has no width at all. Wilson's has a z² in three places.
            or: middle - reach, middle + reach -> tuple(min(1, max(0, x)) for x in _normal_interval(share, variance))
        the middle is not moved: middle - reach, middle + reach -> share - reach, share + reach
            Wilson's middle lies nearer to one half than the share does.
        nothing is divided by 1 + z²/n: 1 + z**2 / trials -> 1
            Both the middle and the reach are divided by it.
        the middle is not divided by 1 + z²/n: (share + z**2 / (2 * trials)) / divisor -> share + z**2 / (2 * trials)
            Brackets: both the middle and the reach are divided by it.
        the reach is not divided by 1 + z²/n: (4 * trials**2)) / divisor -> (4 * trials**2))
            Brackets: both the middle and the reach are divided by it.
        the z before the root is missing: z * math.sqrt -> math.sqrt
            The root is a standard error; the reach is z of them.
        the root holds z²/(4n), not z²/(4n²): 4 * trials**2 -> 4 * trials
            Under the root both terms shrink with n, the second twice.
        z is that of 90%: z = Z -> z = 1.644854
            95% leaves 2.5% on either side: z = 1.96.
        these are percent: middle - reach, middle + reach -> 100 * (middle - reach), 100 * (middle + reach)
            Shares between 0 and 1.
    """,
)


# ---- mcnemar_p ----
def mcnemar_p(only_before: int, only_after: int) -> float:
    """The p-value of the exact McNemar test, from its two counts."""
    smaller, pairs = min(only_before, only_after), only_before + only_after
    return min(1.0, 2 * _tail(smaller, pairs))


def _tail(last: int, n: int) -> float:
    """The chance of at most `last` heads among n tosses of a fair coin."""
    return sum(math.comb(n, heads) for heads in range(last + 1)) / 2**n


def _unequal_counts(rng: random.Random) -> Call:
    less = rng.randrange(0, 8)
    pair = [less, less + rng.randrange(2, 9)]
    rng.shuffle(pair)
    return call(*pair)


def _equal_counts(rng: random.Random) -> Call:
    count = rng.choice([0, 1, 4])
    return call(count, count)


check_mcnemar_p = Exercise(
    mcnemar_p,
    parts=(
        Part("more on one side", 3, _unequal_counts, always=(call(9, 2), call(2, 9))),
        Part("as many on either side, and none at all", 1, _equal_counts, draws=6),
    ),
    changes="""
        the test is one-sided: min(1.0, 2 * _tail(smaller, pairs)) -> _tail(smaller, pairs)
            A change for the worse would have been a change as well: twice the tail.
        that is the probability of this very count: _tail(smaller, pairs) -> math.comb(pairs, smaller) / 2**pairs
            At least as unequal: add up the tail.
        the smallest count is left out of the tail: _tail(smaller, pairs) -> _tail(smaller - 1, pairs)
            From 0 to the smaller count, inclusive.
        the tail does not end at the smaller count: _tail(smaller, pairs) -> _tail(only_before, pairs)
            To min(b, c), whichever of the two it is.
            or: _tail(smaller, pairs) -> _tail(only_after, pairs)
            or: _tail(smaller, pairs) -> _tail(max(only_before, only_after), pairs)
        that is the chi-square approximation:
            math.erfc(abs(only_before - only_after) / math.sqrt(2 * max(1, only_before + only_after)))
            With so few pairs, count: the coin's distribution is exact.
        the p-value is above 1: min(1.0, 2 * _tail(smaller, pairs)) -> 2 * _tail(smaller, pairs)
            A probability ends at 1.
    """,
)


# ---- false_alarm ----
def false_alarm(looks: int, alpha: float) -> float:
    """The chance of at least one false alarm in several independent looks at nothing: 1 − (1 − α)^looks."""
    return 1 - (1 - alpha) ** looks


def _some_looks(rng: random.Random) -> Call:
    return call(rng.choice([1, 2, 5, 10, 20, 40]), rng.choice([0.01, 0.05, 0.1]))


check_false_alarm = Exercise(
    false_alarm,
    parts=(Part("1 to 40 looks", 2, _some_looks, draws=8),),
    changes="""
        chances are added: looks * alpha
            With 40 looks at 5% that would be 200%.
        that is the chance that all looks are false alarms: alpha**looks
            At least one is enough.
        that is the chance of no alarm: (1 - alpha) ** looks
            One minus it.
        looks do not matter in your formula: alpha
            More looks, more chances.
        one look is forgotten: false_alarm(looks - 1, alpha)
            With one look the chance is alpha.
    """,
)


# ---- pass_at_k ----
def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate that at least one of k samples is correct, from n samples of which c are."""
    all_wrong = math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
    return 1 - all_wrong


def _pass_counts(rng: random.Random) -> Call:
    samples = rng.randrange(4, 12)
    return call(samples, rng.randrange(1, samples - 1), rng.randrange(2, min(5, samples)))


def _pass_edges(rng: random.Random) -> Call:
    samples = rng.randrange(4, 9)
    return call(*rng.choice([(samples, 0, 2), (samples, samples, 2), (samples, 2, 1), (samples, samples - 1, 3)]))


check_pass_at_k = Exercise(
    pass_at_k,
    parts=(
        Part("some right, some wrong", 3, _pass_counts),
        Part("none, all, k = 1, too few wrong ones", 1, _pass_edges, draws=12),
    ),
    changes="""
        that estimate is biased: 1 - (1 - num_correct / num_samples) ** k
            1 − (1 − c/n)^k draws with replacement: the same sample may come twice.
        that is the chance that all k are right: math.comb(num_correct, k) / math.comb(num_samples, k)
            At least one.
        that is the chance that all k are wrong: 1 - all_wrong -> all_wrong
            One minus it.
        that is pass@1: num_correct / num_samples
            k samples may be looked at.
        k is one too small: pass_at_k(num_samples, num_correct, k - 1)
            The product has k factors.
    """,
)


# ---- possible_counts ----
def possible_counts(percent: float, trials: int, decimals: int) -> list[int]:
    """The numbers of right answers that a reported percentage may stand for."""
    slack = 0.5 * 10.0**-decimals + 1e-9
    exact = [100 * count / trials for count in range(trials + 1)]
    return [count for count, share in enumerate(exact) if abs(share - percent) <= slack]


def _reported(rng: random.Random) -> Call:
    trials, decimals = rng.choice([(60, 1), (60, 0), (300, 0), (300, 1), (1000, 0), (24, 1)])
    return call(round(100 * rng.randrange(trials + 1) / trials, decimals), trials, decimals)


def _invented(rng: random.Random) -> Call:
    return call(*rng.choice([(89.0, 60, 0), (71.0, 24, 1), (50.5, 60, 1), (33.0, 20, 0)]))


HALVES = (call(0.7, 400, 1), call(0.2, 2000, 1))  # in floating point 0.75 − 0.7 is a little more than 0.05

check_possible_counts = Exercise(
    possible_counts,
    parts=(
        Part(
            "reports that can be true",
            2,
            _reported,
            draws=24,
            always=(call(95.0, 1000, 0), call(94.0, 1000, 0), call(0.0, 60, 1), call(100.0, 60, 1), *HALVES),
        ),
        Part("reports that cannot", 1, _invented),
    ),
    changes="""
        only the nearest count is given: [round(percent * trials / 100)]
            All that round to the report; there may be several, or none.
        the report must be met exactly: abs(share - percent) <= slack -> share == percent
            A report is rounded: 71.7% may be 71.67%.
        decimals do not matter in your formula: possible_counts(percent, trials, 0)
            89% leaves half a point on either side, 89.0% a twentieth.
        a whole unit of slack is too much: 0.5 * 10.0**-decimals -> 10.0**-decimals
            Rounding moves a number by half a unit at most.
        shares and percent are mixed up: abs(share - percent) -> abs(share / 100 - percent)
            The report is in percent.
        a report half a unit away is left out: abs(share - percent) <= slack -> round(share, decimals) == percent
            Halves may be rounded either way: 94.5% is possible for 94 and for 95. Python's `round(94.5)` is 94,
            `round(95.5)` is 96.
            or: abs(share - percent) <= slack -> percent - slack <= share < percent + slack - 2e-9
            or: abs(share - percent) <= slack -> abs(share - percent) < slack - 2e-9
        the percentage is cut off, not rounded:
            abs(share - percent) <= slack -> int(share * 10**decimals) / 10**decimals == percent
            71.67% is reported as 71.7%: half a unit to either side.
        all right is never tried: range(trials + 1) -> range(trials)
            `range(trials)` ends one before `trials`: 100% may be true.
        none right is never tried: if abs -> if count and abs
            Counts begin at 0.
    """,
)
