"""What an evaluation can show: coverage of intervals, power of tests, problems needed, and an audit of claims.

The statistics are pure functions of counts and shares. Binomial sums are taken in full, so nothing here is simulated.
The claims that notebook 08 audits are in ``data/claims.json``: documents about training with GRPO on a CPU or a small
GPU, quoted as they were printed and cut only at "…". The notebook computes whether a claim holds.
"""

import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from grpo_edu.config import check_numbers, require
from grpo_edu.problems.templates import data_dir


def normal_interval(successes: int, trials: int) -> tuple[float, float]:
    r"""Return the textbook 95% interval of a success rate (Wald), to compare it with Wilson's, not to use it.

    .. math:: \hat p \pm z \sqrt{\hat p (1 - \hat p) / n}

    Args:
        successes: k, how many trials succeeded.
        trials: n ≥ 1.

    Returns:
        (low, high), shares; they may leave [0, 1].

    Raises ValueError: no trials, or successes outside 0..trials.

    >>> normal_interval(10, 10)  # ten of ten, and no doubt left: this cannot be right
    (1.0, 1.0)
    """
    _check_count("successes", successes, trials)
    share = successes / trials
    half_width = NormalDist().inv_cdf(0.975) * math.sqrt(share * (1 - share) / trials)
    return share - half_width, share + half_width


def coverage(interval: Callable[[int, int], tuple[float, float]], share: float, trials: int) -> float:
    r"""Return how often an interval holds the true share: the exact sum over all counts (Brown, Cai & DasGupta 2001).

    .. math:: \sum_{k=0}^{n} \binom{n}{k} p^k (1-p)^{n-k} \; [\, low(k, n) \le p \le high(k, n) \,]

    Args:
        interval: a function of (successes, trials) that returns (low, high), such as `wilson_interval`.
        share: p, the true success rate, strictly between 0 and 1.
        trials: n ≥ 1.

    Raises ValueError: share outside (0, 1) or no trials.

    >>> round(coverage(normal_interval, 0.98, 20), 2)  # two runs in three say "100%, no doubt", and are wrong
    0.33
    """
    from scipy.stats import binom

    check_numbers(share=share, trials=trials)
    require("share", share, share > 0, "must lie strictly between 0 and 1")
    bounds = [interval(successes, trials) for successes in range(trials + 1)]
    held = [low <= share <= high for low, high in bounds]
    return float(binom.pmf(np.arange(trials + 1), trials, share)[held].sum())


def mcnemar_p_values(only_before: Sequence[int] | np.ndarray, only_after: Sequence[int] | np.ndarray) -> np.ndarray:
    r"""Exact two-sided McNemar p-values of many comparisons at once; one of them is `mcnemar` (McNemar 1947).

    .. math:: p = \min\Big(1,\; 2 \sum_{i=0}^{\min(b, c)} \binom{b + c}{i} 2^{-(b + c)}\Big)

    Args:
        only_before, only_after: b and c, problems that only one of the runs solved; counts ≥ 0 that broadcast.

    Raises ValueError: a negative count.

    >>> mcnemar_p_values([2, 0], [10, 0]).round(4)
    array([0.0386, 1.    ])
    """
    from scipy.stats import binom

    b, c = np.broadcast_arrays(np.asarray(only_before), np.asarray(only_after))
    if (b < 0).any() or (c < 0).any():
        raise ValueError("only_before and only_after must be counts of at least 0, found a negative one")
    return np.minimum(1.0, 2 * binom.cdf(np.minimum(b, c), b + c, 0.5))


def mcnemar_power(only_before: float, only_after: float, trials: int, *, alpha: float = 0.05) -> float:
    r"""Return the chance that the exact McNemar test finds a true gain: the exact sum over all outcomes.

    With D ~ Binomial(n, b + c) problems that differ, of which Binomial(D, c / (b + c)) are won,

    .. math:: power = \sum_{d} P(D = d) \; P(p \le \alpha \mid d)

    Args:
        only_before: b, share of the problems that only the run before solves.
        only_after: c, share that only the run after solves; the true gain is c − b.
        trials: n ≥ 1, problems that both runs answer.
        alpha: p-values up to this one count as found.

    Raises ValueError: a negative share, shares that sum to nothing or to more than 1, no trials, alpha outside (0, 1).

    >>> round(mcnemar_power(0.05, 0.15, 100), 2)  # a gain of ten points on a hundred problems is found every other time
    0.54
    """
    from scipy.stats import binom

    _check_discordant(only_before, only_after)
    check_numbers(trials=trials, alpha=alpha)
    differing = only_before + only_after
    counts = np.arange(1, trials + 1)
    # The largest number on the smaller side that is still significant; −1 if there is none.
    edge = binom.ppf(alpha / 2, counts, 0.5)
    edge = np.where(binom.cdf(edge, counts, 0.5) <= alpha / 2, edge, edge - 1)
    won = only_after / differing
    found = binom.cdf(edge, counts, won) + binom.sf(counts - edge - 1, counts, won)
    return float((binom.pmf(counts, trials, differing) * found).sum())


def problems_needed_paired(only_before: float, only_after: float, *, power: float = 0.8, alpha: float = 0.05) -> int:
    r"""Return how many problems, answered by both runs, show a gain by McNemar's test (Connor 1987, approximate).

    The exact test (`mcnemar`) is a little stricter than its approximation: with this number its power is one to four
    points below the requested one, as `mcnemar_power` computes. About 2 / |d| problems more make up for it.

    With ψ = b + c the share of problems that differ, and d = c − b the gain,

    .. math:: n = \big( z_{1-\alpha/2} \sqrt{\psi} + z_{power} \sqrt{\psi - d^2} \big)^2 / d^2

    Args:
        only_before, only_after: b and c, shares of the problems that only one of the runs solves.
        power: chance to find the gain, strictly between 0 and 1.
        alpha: two-sided error rate, strictly between 0 and 1.

    Raises:
        ValueError: a negative share, shares that sum to nothing or to more than 1, b = c, power or alpha
            outside (0, 1).

    >>> problems_needed_paired(0.05, 0.15), round(mcnemar_power(0.05, 0.15, 155), 2)
    (155, 0.76)
    """
    _check_discordant(only_before, only_after)
    differing, gain = only_before + only_after, only_after - only_before
    z_error, z_power = _z_values(gain, power, alpha)
    root = z_error * math.sqrt(differing) + z_power * math.sqrt(differing - gain**2)
    return math.ceil(root**2 / gain**2)


def problems_needed_unpaired(before: float, after: float, *, power: float = 0.8, alpha: float = 0.05) -> int:
    r"""Return how many problems *each* of two runs needs if they answer different ones (Fleiss 1981, approximate).

    .. math:: n = \big( z_{1-\alpha/2} \sqrt{2 \bar p \bar q} + z_{power} \sqrt{p_1 q_1 + p_2 q_2} \big)^2 / (p_2-p_1)^2

    Args:
        before, after: p₁ and p₂, the true accuracies, shares between 0 and 1.
        power: chance to find the difference, strictly between 0 and 1.
        alpha: two-sided error rate, strictly between 0 and 1.

    Raises ValueError: an accuracy outside [0, 1], two equal ones, power or alpha outside (0, 1).

    >>> problems_needed_unpaired(0.87, 0.89)
    4144
    """
    for name, share in (("before", before), ("after", after)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be an accuracy between 0 and 1, got {share}")
    z_error, z_power = _z_values(after - before, power, alpha)
    mean = (before + after) / 2
    spread = before * (1 - before) + after * (1 - after)
    root = z_error * math.sqrt(2 * mean * (1 - mean)) + z_power * math.sqrt(spread)
    return math.ceil(root**2 / (after - before) ** 2)


def possible_counts(percent: float, trials: int, *, decimals: int = 0) -> list[int]:
    r"""Return which counts k of n round to a reported percentage: if none does, it is not a share of n (GRIM test).

    .. math:: \{\, k : | 100\,k/n - percent | \le 10^{-decimals} / 2 \,\}

    After Brown & Heathers (2017), "The GRIM test". A half counts as rounded either way.

    Args:
        percent: the reported percentage, such as 71.7.
        trials: n ≥ 1, the problems that it is said to be of.
        decimals: digits after the point in the report.

    Raises ValueError: no trials or a negative number of decimals.

    >>> possible_counts(71.7, 60, decimals=1), possible_counts(89, 60)
    ([43], [])
    """
    check_numbers(trials=trials)
    if decimals < 0:
        raise ValueError(f"decimals must be at least 0, got {decimals}")
    slack = 0.5 * 10.0**-decimals + 1e-9
    return [count for count in range(trials + 1) if abs(100 * count / trials - percent) <= slack]


def mcnemar_range(before: int, after: int, trials: int) -> tuple[float, float]:
    """Return the smallest and the largest p-value that McNemar's test can give when only the two totals are reported.

    The totals fix the gain, not how many problems were lost on the way. The more of them, the weaker the evidence.

    Args:
        before, after: problems solved by either run, of the same `trials` problems.
        trials: n ≥ 1.

    Raises ValueError: no trials, or a count outside 0..trials.

    >>> [round(p, 2) for p in mcnemar_range(43, 48, 60)]  # 71.7% to 80.0% of 60 problems
    [0.06, 0.46]
    """
    _check_count("before", before, trials)
    _check_count("after", after, trials)
    lost = np.arange(max(0, before - after), min(before, trials - after) + 1)
    p_values = mcnemar_p_values(lost, lost + after - before)
    return float(p_values.min()), float(p_values.max())


def _z_values(gain: float, power: float, alpha: float) -> tuple[float, float]:
    """Return the normal quantiles of error rate and power, the arguments checked."""
    check_numbers(power=power, alpha=alpha)
    if gain == 0:
        raise ValueError("before and after are equal: no number of problems shows a difference that is not there")
    return NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)


def _check_discordant(only_before: float, only_after: float) -> None:
    if not (only_before >= 0 and only_after >= 0 and 0 < only_before + only_after <= 1):
        raise ValueError(
            "only_before and only_after must be shares of at least 0 whose sum is above 0 and at most 1, "
            f"got {only_before} and {only_after}"
        )


def _check_count(name: str, count: int, trials: int) -> None:
    check_numbers(trials=trials)
    if not 0 <= count <= trials:
        raise ValueError(f"{name} must lie between 0 and trials ({trials}), got {count}")


@dataclass(frozen=True)
class Claim:
    """A claim of a document: a key of `SOURCES`, and its words."""

    source: str
    quote: str


@dataclass(frozen=True)
class Judgment:
    """A claim, its verdict (one of `VERDICTS`) and the reason; printed as three short paragraphs."""

    claim: Claim
    verdict: str
    because: str

    def __str__(self) -> str:
        quote = textwrap.fill(f"“{self.claim.quote}” ({self.claim.source})", 88)
        reason = textwrap.fill(f"{self.verdict.upper()}: {self.because}", 88, subsequent_indent="    ")
        return f"{quote}\n  → {reason}\n"


_SHIPPED = json.loads((data_dir() / "claims.json").read_text(encoding="utf-8"))
SOURCES: dict[str, str] = _SHIPPED["sources"]
CLAIMS = {key: Claim(**claim) for key, claim in _SHIPPED["claims"].items()}
VERDICTS = {True: "holds", False: "cannot hold", None: "not shown"}


def judge(key: str, holds: bool | None, because: str) -> Judgment:
    """Give a claim its verdict: True it holds, False it cannot hold, None it is not shown.

    Args:
        key: of `CLAIMS`.
        holds: what a computation has found.
        because: the reason, with the numbers recomputed.

    Raises ValueError: an unknown claim, or no reason.

    >>> print(judge("dataset", True, "GSM8K has 7,473 + 1,319 problems."))
    “Dataset: GSM8K (8K math reasoning samples)” (tutorial)
      → HOLDS: GSM8K has 7,473 + 1,319 problems.
    <BLANKLINE>
    """
    if key not in CLAIMS:
        raise ValueError(f"key must be one of the claims ({', '.join(CLAIMS)}), got {key!r}")
    if not because.strip():
        raise ValueError(f"because must say why the claim {key!r} was judged so, got a blank text")
    return Judgment(CLAIMS[key], VERDICTS[holds if holds is None else bool(holds)], because)
