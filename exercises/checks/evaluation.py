"""Exercises on evaluation: confidence intervals, paired tests, false alarms, pass@k and reported percentages."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from grpo_edu.checks.core import Call, Exercise, Part, call


# ---- wilson_interval ----
def wilson_interval(successes: int, trials: int, level: float) -> tuple[float, float]:
    """Wilson's interval of a share, at any confidence level."""
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share, divisor = successes / trials, 1 + z**2 / trials
    variance = share * (1 - share) / trials
    middle = (share + z**2 / (2 * trials)) / divisor
    reach = z * math.sqrt(variance + z**2 / (4 * trials**2)) / divisor
    low, high = middle - reach, middle + reach
    return round(low, 12), round(high, 12)  # a rounding error could be below 0


LEVELS = (0.8, 0.9, 0.99)


def _some_counts(rng: random.Random, *levels: float) -> Call:
    trials = rng.choice([10, 20, 60, 300])
    return call(rng.randrange(1, trials), trials, rng.choice(levels))


def _extreme_counts(rng: random.Random) -> Call:
    trials = rng.choice([5, 10, 60])
    return call(rng.choice([0, trials]), trials, rng.choice(LEVELS))


def _normal_interval(share: float, variance: float, z: float) -> tuple[float, float]:
    reach = z * math.sqrt(variance)
    return share - reach, share + reach


check_wilson_interval = Exercise(
    wilson_interval,
    parts=(
        Part("at 95%", 1, lambda rng: _some_counts(rng, 0.95)),
        Part("at other levels", 2, lambda rng: _some_counts(rng, *LEVELS)),
        Part("none right, or all", 1, _extreme_counts),
    ),
    tolerance=1e-4,  # z = 1.96 will do
    changes="""
        the normal interval is returned: middle - reach, middle + reach -> _normal_interval(share, variance, z)
            For 0 of 10, the normal interval has no width at all. Wilson's formula contains z² three times.
            or: middle - reach, middle + reach -> tuple(min(1, max(0, x)) for x in _normal_interval(share, variance, z))
        the middle of the interval is the share itself: middle - reach, middle + reach -> share - reach, share + reach
            Wilson's middle lies nearer to one half than the share does.
        nothing is divided by 1 + z²/n: 1 + z**2 / trials -> 1
            Both the middle and the reach are divided by it.
        the middle is not divided by 1 + z²/n: (share + z**2 / (2 * trials)) / divisor -> share + z**2 / (2 * trials)
            Check the parentheses: both the middle and the reach are divided by it.
        the reach is not divided by 1 + z²/n: (4 * trials**2)) / divisor -> (4 * trials**2))
            Check the parentheses: both the middle and the reach are divided by it.
        the z before the root is missing: z * math.sqrt -> math.sqrt
            The root is a standard error, and the reach is z times as long.
        the root contains z²/(4n), not z²/(4n²): 4 * trials**2 -> 4 * trials
            In the formula, the second term under the root is divided by n twice.
        the whole error probability lies on one side: 0.5 + level / 2 -> level
            A 95% interval leaves out 2.5% on each side. How probable is it, then, that a number lies below z?
        the level is used as z: NormalDist().inv_cdf(0.5 + level / 2) -> level
            z is a number of standard errors, while the level is a probability. Compute z from the level.
        `level` is not used: NormalDist().inv_cdf(0.5 + level / 2) -> 1.959964
            A 99% interval is wider than an 80% interval, so z must depend on the level.
        percentages are returned, not shares:
            middle - reach, middle + reach -> 100 * (middle - reach), 100 * (middle + reach)
            Return shares between 0 and 1.
    """,
)


# ---- mcnemar_p ----
def mcnemar_p(only_before: int, only_after: int) -> float:
    """Return the p-value of the exact McNemar test, from its two counts."""
    smaller, pairs = min(only_before, only_after), only_before + only_after
    return min(1.0, 2 * _tail(smaller, pairs))


def _tail(last: int, n: int) -> float:
    """Return the chance of at most `last` heads among n tosses of a fair coin."""
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
            A change for the worse would count as well: take twice the tail.
        only the probability of this exact count is returned:
            _tail(smaller, pairs) -> math.comb(pairs, smaller) / 2**pairs
            Counts that are even more unequal belong to the p-value, too: add up the tail.
        the last term of the tail, at the smaller count, is missing: _tail(smaller, pairs) -> _tail(smaller - 1, pairs)
            The tail goes from 0 to the smaller count, inclusive.
        the tail does not end at the smaller count: _tail(smaller, pairs) -> _tail(only_before, pairs)
            The tail ends at min(b, c), whichever of the two counts that is.
            or: _tail(smaller, pairs) -> _tail(only_after, pairs)
            or: _tail(smaller, pairs) -> _tail(max(only_before, only_after), pairs)
        the chi-square approximation is used:
            math.erfc(abs(only_before - only_after) / math.sqrt(2 * max(1, only_before + only_after)))
            With so few pairs, use the exact distribution: how often does a fair coin do this?
        the p-value is above 1: min(1.0, 2 * _tail(smaller, pairs)) -> 2 * _tail(smaller, pairs)
            A probability is never larger than 1.
    """,
)


# ---- false_alarm ----
def false_alarm(looks: int, alpha: float) -> float:
    """Return the chance of at least one false alarm in several independent looks at nothing: 1 − (1 − α)^looks."""
    return 1 - (1 - alpha) ** looks


def _some_looks(rng: random.Random) -> Call:
    return call(rng.choice([1, 2, 5, 10, 20, 40]), rng.choice([0.01, 0.05, 0.1]))


check_false_alarm = Exercise(
    false_alarm,
    parts=(Part("1 to 40 looks", 2, _some_looks, draws=8),),
    changes="""
        the chances of the looks are added up: looks * alpha
            With 40 looks at 5%, the result would be 200%.
        the chance that all looks are false alarms is returned: alpha**looks
            A single false alarm is enough.
        the chance of no alarm is returned: (1 - alpha) ** looks
            "At least one" is the opposite of "none".
        `looks` is not used: alpha
            The more often you look, the more likely a false alarm becomes.
        one look is left out: false_alarm(looks - 1, alpha)
            With one look, the chance is alpha.
    """,
)


# ---- pass_at_k ----
def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the mean, over all choices of k of these rewards, of the best one; pass@k where rewards are 0 and 1."""
    choices = math.comb(len(rewards), k)
    best_of = [math.comb(rank, k - 1) for rank in range(len(rewards))]  # choices; `rank` rewards are smaller
    return sum(count * reward for count, reward in zip(best_of, sorted(rewards), strict=True)) / choices


def _graded(rng: random.Random) -> Call:
    size = rng.randrange(5, 9)
    rewards = [1.0, *(rng.randrange(0, 4) / 4 for _ in range(size - 2)), 0.5]
    return call(rewards if rng.random() < 0.5 else rewards[::-1], rng.randrange(2, size - 1))


def _right_or_wrong(rng: random.Random) -> Call:
    size = rng.randrange(4, 9)
    right = rng.randrange(1, size - 1)
    rewards = rng.sample([1.0] * right + [0.0] * (size - right), size)
    return call(rewards, rng.choice([1, 2, 3, size]))


check_pass_at_k = Exercise(
    pass_at_k,
    parts=(
        Part("graded rewards", 3, _graded, draws=8, always=(call([0.25, 1.0, 0.0, 0.5], 2),)),
        Part("rewards of 0 and 1, k from 1 to n", 1, _right_or_wrong, draws=12, always=(call([0.0, 1.0, 0.0], 1),)),
    ),
    changes="""
        a biased estimate is returned:
            math.comb(rank, k - 1) -> (rank + 1) ** k - rank**k; math.comb(len(rewards), k) -> len(rewards) ** k
            (rank / n)^k and 1 − (1 − mean)^k describe drawing with replacement, where the same answer may be drawn
            twice.
            or: 1 - (1 - sum(rewards) / len(rewards)) ** k
        graded rewards are counted as 0 or 1: pass_at_k([float(one == 1) for one in rewards], k)
            A reward of 0.5 is better than 0 and worse than 1. It counts if nothing better is drawn.
            or: pass_at_k([float(one > 0) for one in rewards], k)
        the mean of the worst rewards is returned: -pass_at_k([-one for one in rewards], k)
            Each choice of k counts with its *best* reward.
        pass@1 is returned: sum(rewards) / len(rewards)
            pass@k takes the best of k answers.
        the best of all rewards is returned: max(rewards)
            The best one is often not among the k that are drawn.
        only the first k rewards are used: max(rewards[:k])
            All choices of k rewards count equally, not only the first k.
        the rewards are not sorted: sorted(rewards) -> rewards
            A reward is the best of k if all others that are drawn are *smaller*. How many smaller ones are there?
        k is one too small: pass_at_k(rewards, max(1, k - 1))
            k answers are drawn in all, including the best one.
        the sum is not divided by the number of choices: math.comb(len(rewards), k) -> 1
            The result is a mean over all choices of k rewards. How many choices are there?
    """,
)


# ---- possible_counts ----
def possible_counts(percent: float, trials: int, decimals: int) -> list[int]:
    """Return the numbers of right answers that a reported percentage may stand for."""
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
        only the nearest count is returned: [round(percent * trials / 100)]
            Return all counts that round to the report. There may be several, or none.
        the share must equal the report exactly: abs(share - percent) <= slack -> share == percent
            A report is rounded: 71.7% may be 71.67%.
        `decimals` is not used: possible_counts(percent, trials, 0)
            89% allows half a point on either side, but 89.0% allows only a twentieth of a point.
        a whole unit of the last digit is allowed, not half: 0.5 * 10.0**-decimals -> 10.0**-decimals
            Rounding moves a number by half a unit of the last digit at most.
            or: abs(share - percent) <= slack -> abs(share - percent) < 10.0**-decimals
        floating point hides a count: 0.5 * 10.0**-decimals + 1e-9 -> 0.5 * 10.0**-decimals
            In floating point 0.75 − 0.7 is a little more than 0.05. Leave a little room, such as 1e-9.
        shares and percentages are mixed up: abs(share - percent) -> abs(share / 100 - percent)
            The report is in percent.
        a report half a unit away is left out: abs(share - percent) <= slack -> round(share, decimals) == percent
            Halves may be rounded either way: 94.5% is possible for 94 and for 95. Python's `round(94.5)` is 94,
            `round(95.5)` is 96.
            or: abs(share - percent) <= slack -> percent - slack <= share < percent + slack - 2e-9
            or: abs(share - percent) <= slack -> abs(share - percent) < slack - 2e-9
        the percentage is truncated, not rounded:
            abs(share - percent) <= slack -> int(share * 10**decimals) / 10**decimals == percent
            71.67% is reported as 71.7%. Allow half a unit on either side.
        100% is never tried: range(trials + 1) -> range(trials)
            `range(trials)` ends one before `trials`, but all answers may be right.
        0% is never tried: if abs -> if count and abs
            Counts begin at 0, because all answers may be wrong.
        0% and 100% are never tried: if abs -> if 0 < count < trials and abs
            All answers may be wrong, or all may be right.
    """,
)
