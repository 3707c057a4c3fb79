"""How sure may we be? Intervals and paired tests on counts and lists of right and wrong answers.

Pure functions that know nothing of models; `grpo_edu.evaluation` applies them and exports them too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True)
class McNemar:
    """A paired test of two runs: the problems only one of them solved, and the two-sided p-value."""

    only_before: int
    only_after: int
    p_value: float


@dataclass(frozen=True)
class PairedDifference:
    """The mean of after − before over pairs (as a share, 0.25 = 25 points) and its interval."""

    difference: float
    low: float
    high: float


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    r"""Interval for a success rate that stays inside [0, 1] and holds its coverage for few trials (Wilson 1927).

    .. math:: \frac{\hat p + z^2/2n \pm z \sqrt{\hat p (1 - \hat p)/n + z^2/4n^2}}{1 + z^2/n}

    Args:
        successes: k, how many trials succeeded.
        trials: n ≥ 1.
        confidence: coverage, strictly between 0 and 1.

    Returns:
        (low, high), shares between 0 and 1.

    Raises:
        ValueError: no trials, successes outside 0..trials, or confidence outside (0, 1).

    >>> [round(bound, 3) for bound in wilson_interval(8, 10)]
    [0.49, 0.943]
    """
    _check_confidence(confidence)
    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}: evaluate on some problems first")
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must lie between 0 and trials ({trials}), got {successes}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / trials
    center = share + z**2 / (2 * trials)
    half_width = z * (share * (1 - share) / trials + z**2 / (4 * trials**2)) ** 0.5
    scale = 1 + z**2 / trials
    low = 0.0 if successes == 0 else (center - half_width) / scale
    high = 1.0 if successes == trials else (center + half_width) / scale
    return low, high


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> McNemar:
    r"""Exact McNemar test: did the policy change, judged on the same problems twice (McNemar 1947)?

    Problems that both runs solve, or that neither solves, say nothing. Under "no change" each remaining problem
    falls to either side like a fair coin, so with b solved only before and c only after

    .. math:: p = \min\Big(1,\; 2 \sum_{i=0}^{\min(b, c)} \binom{b + c}{i} 2^{-(b + c)}\Big)

    Args:
        before, after: one bool a problem, same problems in the same order.

    Raises:
        ValueError: the two differ in length or are empty.

    >>> mcnemar([True] * 2 + [False] * 10, [False] * 2 + [True] * 10)
    McNemar(only_before=2, only_after=10, p_value=0.03857421875)
    """
    from scipy.stats import binomtest

    _check_pairs(before, after)
    only_before = sum(bool(b) and not a for b, a in zip(before, after, strict=True))
    only_after = sum(bool(a) and not b for b, a in zip(before, after, strict=True))
    discordant = only_before + only_after
    p_value = float(binomtest(only_after, discordant, 0.5).pvalue) if discordant else 1.0
    return McNemar(only_before, only_after, p_value)


def paired_bootstrap(
    before: Sequence[float],
    after: Sequence[float],
    *,
    num_resamples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> PairedDifference:
    """Percentile bootstrap interval for the mean of after − before (Efron 1979), resampling whole pairs.

    Args:
        before, after: one number a problem (bools count as 0 and 1), same problems in the same order.
        num_resamples: how many times n pairs are drawn with replacement.
        seed: of numpy's generator; the same seed gives the same interval.
        confidence: coverage, strictly between 0 and 1.

    Raises:
        ValueError: the two differ in length, are empty or hold a non-finite number; num_resamples < 1;
            confidence outside (0, 1).

    >>> paired_bootstrap([0, 0, 1, 0], [1, 1, 1, 0], seed=0)
    PairedDifference(difference=0.5, low=0.0, high=1.0)
    """
    _check_confidence(confidence)
    _check_pairs(before, after)
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be at least 1, got {num_resamples}")
    differences = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    if not np.isfinite(differences).all():
        raise ValueError("before and after must hold finite numbers, found NaN or infinity")
    n = len(differences)
    # Drawing n pairs with replacement = drawing how often each distinct difference turns up.
    values, counts = np.unique(differences, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(n, counts / n, size=num_resamples)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(draws @ values / n, [tail, 100 - tail])
    return PairedDifference(float(differences.mean()), float(low), float(high))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    r"""Chance that at least one of k samples is right, estimated without bias from n samples (Chen et al. 2021).

    .. math:: 1 - \binom{n - c}{k} \Big/ \binom{n}{k} = 1 - \prod_{i=n-c+1}^{n} \Big(1 - \frac{k}{i}\Big)

    Args:
        num_samples: n, samples drawn for one problem.
        num_correct: c, how many of them are right.
        k: 1 ≤ k ≤ n.

    Raises:
        ValueError: k outside 1..num_samples or num_correct outside 0..num_samples.

    >>> round(pass_at_k(4, 2, 2), 4)  # of the six pairs, one holds no right sample
    0.8333
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must lie between 1 and num_samples ({num_samples}), got {k}: draw more samples")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct must lie between 0 and num_samples ({num_samples}), got {num_correct}")
    # where fewer than k samples are wrong, one of the factors is 0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))


def _check_pairs(before: Sequence[float], after: Sequence[float]) -> None:
    if len(before) != len(after):
        raise ValueError(f"before and after must be paired, got {len(before)} and {len(after)} values")
    if len(before) == 0:
        raise ValueError("before and after are empty: evaluate on some problems first")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1 (0.95 for 95%), got {confidence}")
