"""Exercises on evaluation: confidence intervals, paired tests, false alarms, pass@k and reported percentages."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from grpo_edu import evaluation as significance
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.studies import power

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
    wilson_interval,
    parts=(Part("from 10 to 300 problems", 3, _some_counts), Part("none right, or all", 1, _extreme_counts)),
    mistakes={
        "that is the normal interval": Mistake(
            "At 0 of 10 it has no width at all. Wilson's has a z² in three places.",
            _normal_interval,
            also=(_normal_within,),
        ),
        "the middle is not moved": Mistake(
            "Wilson's middle lies nearer to one half than the share does.",
            lambda k, n: (k / n - _reach(k, n), k / n + _reach(k, n)),
        ),
        "nothing is divided by 1 + z²/n": Mistake(
            "Both the middle and the reach are divided by it.",
            lambda k, n: tuple(bound * (1 + Z**2 / n) for bound in wilson_interval(k, n)),
        ),
        "the middle is not divided by 1 + z²/n": Mistake(
            "Brackets: both the middle and the reach are divided by it.", _wilson_with(middle=lambda n: 1 + Z**2 / n)
        ),
        "the reach is not divided by 1 + z²/n": Mistake(
            "Brackets: both the middle and the reach are divided by it.", _wilson_with(reach=lambda n: 1 + Z**2 / n)
        ),
        "the z before the root is missing": Mistake(
            "The root is a standard error; the reach is z of them.", _wilson_with(reach=lambda n: 1 / Z)
        ),
        "the root holds z²/(4n), not z²/(4n²)": Mistake(
            "Under the root both terms shrink with n, the second twice.", _wilson_with(inside=lambda n: Z**2 / (4 * n))
        ),
        "z is that of 90%": Mistake(
            "95% leaves 2.5% on either side: z = 1.96.", lambda k, n: significance.wilson_interval(k, n, 0.9)
        ),
        "these are percent": Mistake(
            "Shares between 0 and 1.", lambda k, n: tuple(100 * bound for bound in wilson_interval(k, n))
        ),
    },
    tolerance=1e-4,  # z = 1.96 will do
)


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


def _tail(last: int, n: int) -> float:
    """The chance of at most `last` heads among n tosses of a fair coin."""
    return sum(math.comb(n, heads) for heads in range(last + 1)) / 2**n


def _chi_square(only_before: int, only_after: int) -> float:
    if only_before + only_after == 0:
        return 1.0
    return math.erfc(math.sqrt((only_before - only_after) ** 2 / (only_before + only_after) / 2))


check_mcnemar_p = Exercise(
    mcnemar_p,
    parts=(
        Part("more on one side", 3, _unequal_counts, always=(call(9, 2), call(2, 9))),
        Part("as many on either side, and none at all", 1, _equal_counts, draws=6),
    ),
    mistakes={
        "the test is one-sided": Mistake(
            "A change for the worse would have been a change as well: twice the tail.",
            lambda b, c: _tail(min(b, c), b + c),
        ),
        "that is the probability of this very count": Mistake(
            "At least as unequal: add up the tail.",
            lambda b, c: min(1.0, 2 * math.comb(b + c, min(b, c)) / 2 ** (b + c)),
        ),
        "the smallest count is left out of the tail": Mistake(
            "From 0 to the smaller count, inclusive.", lambda b, c: min(1.0, 2 * _tail(min(b, c) - 1, b + c))
        ),
        "the tail does not end at the smaller count": Mistake(
            "To min(b, c), whichever of the two it is.",
            lambda b, c: min(1.0, 2 * _tail(b, b + c)),
            also=(lambda b, c: min(1.0, 2 * _tail(c, b + c)), lambda b, c: min(1.0, 2 * _tail(max(b, c), b + c))),
        ),
        "that is the chi-square approximation": Mistake(
            "With so few pairs, count: the coin's distribution is exact.", _chi_square
        ),
        "the p-value is above 1": Mistake("A probability ends at 1.", lambda b, c: 2 * _tail(min(b, c), b + c)),
    },
)


# ---- false_alarm ----


def false_alarm(looks: int, alpha: float) -> float:
    """The chance of at least one false alarm in several independent looks at nothing: 1 − (1 − α)^looks."""
    return 1 - (1 - alpha) ** looks


check_false_alarm = Exercise(
    false_alarm,
    parts=(
        Part(
            "1 to 40 looks",
            2,
            lambda rng: call(rng.choice([1, 2, 5, 10, 20, 40]), rng.choice([0.01, 0.05, 0.1])),
            draws=8,
        ),
    ),
    mistakes={
        "chances are added": Mistake("With 40 looks at 5% that would be 200%.", lambda looks, alpha: looks * alpha),
        "that is the chance that all looks are false alarms": Mistake(
            "At least one is enough.", lambda looks, alpha: alpha**looks
        ),
        "that is the chance of no alarm": Mistake("One minus it.", lambda looks, alpha: (1 - alpha) ** looks),
        "looks do not matter in your formula": Mistake("More looks, more chances.", lambda looks, alpha: alpha),
        "one look is forgotten": Mistake(
            "With one look the chance is alpha.", lambda looks, alpha: 1 - (1 - alpha) ** (looks - 1)
        ),
    },
)


# ---- pass_at_k ----


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """The mean, over all choices of k of these rewards, of the best one; pass@k where rewards are 0 and 1."""
    ranks = enumerate(
        sorted(rewards)
    )  # with `rank` rewards below it, a reward is the best of comb(rank, k - 1) choices
    return sum(math.comb(rank, k - 1) * reward for rank, reward in ranks) / math.comb(len(rewards), k)


def _graded(rng: random.Random) -> Call:
    size = rng.randrange(5, 9)
    rewards = [1.0, *(rng.randrange(0, 4) / 4 for _ in range(size - 2)), 0.5]
    return call(rewards if rng.random() < 0.5 else rewards[::-1], rng.randrange(2, size - 1))


def _right_or_wrong(rng: random.Random) -> Call:
    size = rng.randrange(4, 9)
    right = rng.randrange(1, size - 1)
    rewards = rng.sample([1.0] * right + [0.0] * (size - right), size)
    return call(rewards, rng.choice([1, 2, 3, size]))


def _best_with(weight: Callable[[int, int, int], float]) -> Callable[[Sequence[float], int], float]:
    """A wrong answer with another weight(rank, n, k) for the reward with `rank` rewards below it."""
    return lambda rewards, k: sum(weight(rank, len(rewards), k) * reward for rank, reward in enumerate(sorted(rewards)))


check_pass_at_k = Exercise(
    pass_at_k,
    parts=(
        Part("graded rewards", 3, _graded, draws=8, always=(call([0.25, 1.0, 0.0, 0.5], 2),)),
        Part("rewards of 0 and 1, k from 1 to n", 1, _right_or_wrong, draws=12, always=(call([0.0, 1.0, 0.0], 1),)),
    ),
    mistakes={
        "that estimate is biased": Mistake(
            "(rank / n)^k draws with replacement: the same answer may come twice.",
            _best_with(lambda rank, n, k: ((rank + 1) / n) ** k - (rank / n) ** k),
        ),
        "only rewards of 0 and 1 are counted": Mistake(
            "A reward of 0.5 is better than 0: it counts where nothing better was drawn.",
            lambda rewards, k: significance.pass_at_k(len(rewards), sum(one == 1 for one in rewards), k),
            also=(lambda rewards, k: significance.pass_at_k(len(rewards), sum(one > 0 for one in rewards), k),),
        ),
        "that is the mean of the worst": Mistake(
            "Of which side of the sorted list does a choice keep one?",
            lambda rewards, k: -pass_at_k([-one for one in rewards], k),
        ),
        "that is pass@1": Mistake("k answers may be looked at.", lambda rewards, k: sum(rewards) / len(rewards)),
        "the best of all is taken": Mistake(
            "Often it is not among the k that are drawn.", lambda rewards, k: max(rewards)
        ),
        "only the first k are looked at": Mistake(
            "All choices of k count alike, not only one.", lambda rewards, k: max(rewards[:k])
        ),
        "the rewards are not sorted": Mistake(
            "How many of the others are *smaller* is what decides.",
            lambda rewards, k: (
                sum(math.comb(place, k - 1) * one for place, one in enumerate(rewards)) / math.comb(len(rewards), k)
            ),
        ),
        "k is one too small": Mistake(
            "k answers are drawn, the best one among them.", lambda rewards, k: pass_at_k(rewards, max(1, k - 1))
        ),
        "it is not divided by the number of choices": Mistake(
            "A mean over all choices: how many are there?",
            lambda rewards, k: pass_at_k(rewards, k) * math.comb(len(rewards), k),
        ),
    },
)


# ---- possible_counts ----


def possible_counts(percent: float, trials: int, decimals: int) -> list[int]:
    """The package's."""
    return power.possible_counts(percent, trials, decimals=decimals)


def _reported(rng: random.Random) -> Call:
    trials, decimals = rng.choice([(60, 1), (60, 0), (300, 0), (300, 1), (1000, 0), (24, 1)])
    return call(round(100 * rng.randrange(trials + 1) / trials, decimals), trials, decimals)


def _invented(rng: random.Random) -> Call:
    return call(*rng.choice([(89.0, 60, 0), (71.0, 24, 1), (50.5, 60, 1), (33.0, 20, 0)]))


def _counts_where(rounds_to: Callable[[float, float, int], bool]) -> Callable[[float, int, int], list[int]]:
    """A wrong answer that asks otherwise whether an exact percentage is reported as `percent`."""
    return lambda percent, trials, decimals: [
        count for count in range(trials + 1) if rounds_to(100 * count / trials, percent, decimals)
    ]


def _halves_up(exact: float, percent: float, decimals: int) -> bool:
    slack = 0.5 * 10.0**-decimals
    return percent - slack - 1e-9 <= exact < percent + slack - 1e-9


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
    mistakes={
        "only the nearest count is given": Mistake(
            "All that round to the report; there may be several, or none.",
            lambda percent, trials, decimals: [round(percent * trials / 100)],
        ),
        "the report must be met exactly": Mistake(
            "A report is rounded: 71.7% may be 71.67%.",
            _counts_where(lambda exact, percent, decimals: exact == percent),
        ),
        "decimals do not matter in your formula": Mistake(
            "89% leaves half a point on either side, 89.0% a twentieth.",
            lambda percent, trials, decimals: power.possible_counts(percent, trials),
        ),
        "a whole unit of slack is too much": Mistake(
            "Rounding moves a number by half a unit at most.",
            _counts_where(lambda exact, percent, decimals: abs(exact - percent) <= 10.0**-decimals + 1e-9),
        ),
        "shares and percent are mixed up": Mistake(
            "The report is in percent.",
            _counts_where(lambda exact, percent, decimals: abs(exact / 100 - percent) <= 0.5 * 10.0**-decimals + 1e-9),
        ),
        "a report half a unit away is left out": Mistake(
            "Halves may be rounded either way: 94.5% is possible for 94 "
            "and for 95. Python's `round(94.5)` is 94, `round(95.5)` is 96.",
            _counts_where(lambda exact, percent, decimals: round(exact, decimals) == percent),
            also=(
                _counts_where(_halves_up),
                _counts_where(lambda exact, percent, decimals: abs(exact - percent) < 0.5 * 10.0**-decimals - 1e-9),
            ),
        ),
        "the percentage is cut off, not rounded": Mistake(
            "71.67% is reported as 71.7%: half a unit to either side.",
            _counts_where(lambda exact, percent, decimals: int(exact * 10**decimals) / 10**decimals == percent),
        ),
        "all right is never tried": Mistake(
            "`range(trials)` ends one before `trials`: 100% may be true.",
            lambda percent, trials, decimals: [k for k in possible_counts(percent, trials, decimals) if k < trials],
        ),
        "none right is never tried": Mistake(
            "Counts begin at 0.",
            lambda percent, trials, decimals: [k for k in possible_counts(percent, trials, decimals) if k],
        ),
    },
)
