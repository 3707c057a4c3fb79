"""Exercises of notebook 06, second part: pass@k, and whether a reported number can be true."""

from __future__ import annotations

import math
import random

from grpo_edu import power, significance
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call

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


def _by_round(percent: float, trials: int, decimals: int) -> list[int]:
    return [count for count in range(trials + 1) if round(100 * count / trials, decimals) == percent]


def _halves_up(percent: float, trials: int, decimals: int) -> list[int]:
    low, high = percent - 0.5 * 10.0**-decimals - 1e-9, percent + 0.5 * 10.0**-decimals - 1e-9
    return [count for count in range(trials + 1) if low <= 100 * count / trials < high]


def _halves_nowhere(percent: float, trials: int, decimals: int) -> list[int]:
    slack = 0.5 * 10.0**-decimals - 1e-9
    return [count for count in range(trials + 1) if abs(100 * count / trials - percent) < slack]


def _cut_off(percent: float, trials: int, decimals: int) -> list[int]:
    unit = 10**decimals
    return [count for count in range(trials + 1) if int(100 * count / trials * unit) / unit == percent]


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
        Part("reports that can be true", 2, _reported, draws=24,
             always=(call(95.0, 1000, 0), call(94.0, 1000, 0), call(0.0, 60, 1), call(100.0, 60, 1))),
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
        Mistake("a report half a unit away is left out", "Halves may be rounded either way: 94.5% is possible for 94 "
                "and for 95. Python's `round(94.5)` is 94, `round(95.5)` is 96.", _by_round,
                also=(_halves_up, _halves_nowhere)),
        Mistake("the percentage is cut off, not rounded", "71.67% is reported as 71.7%: half a unit to either side.",
                _cut_off),
        Mistake("all right is never tried", "`range(trials)` ends one before `trials`: 100% may be true.",
                lambda percent, trials, decimals: [
                    k for k in possible_counts(percent, trials, decimals) if k < trials]),
        Mistake("none right is never tried", "Counts begin at 0.",
                lambda percent, trials, decimals: [k for k in possible_counts(percent, trials, decimals) if k]),
    ),
    right=(_counts_by_string, _counts_by_range, _counts_by_filter),
)  # fmt: skip
