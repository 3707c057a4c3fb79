"""Intervals and paired tests for shares of solved problems, and pass@k.

All functions raise ValueError for arguments that are empty or out of range.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from grpo_edu.config import check_numbers


@dataclass(frozen=True)
class McNemar:
    """The result of McNemar's paired test: problems that only one of two runs solved, and the two-sided p-value."""

    only_before: int
    only_after: int
    p_value: float


@dataclass(frozen=True)
class PairedDifference:
    """The mean of after − before over pairs (as a fraction: 0.25 is 25 percentage points), and its interval."""

    difference: float
    low: float
    high: float


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    r"""The Wilson confidence interval of a success rate, which is reliable for few trials too (Wilson 1927).

    .. math:: \frac{\hat p + z^2/2n \pm z \sqrt{\hat p (1 - \hat p)/n + z^2/4n^2}}{1 + z^2/n}

    Args:
        successes: number of successful trials, from 0 to `trials`.
        trials: n ≥ 1.
        confidence: coverage, between 0 and 1.

    Returns:
        (low, high), between 0 and 1.

    >>> [round(bound, 3) for bound in wilson_interval(8, 10)]
    [0.49, 0.943]
    """
    check_numbers(confidence=confidence, trials=trials)
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must be between 0 and trials = {trials}, got {successes}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / trials
    center = share + z**2 / (2 * trials)
    half_width = z * (share * (1 - share) / trials + z**2 / (4 * trials**2)) ** 0.5
    scale = 1 + z**2 / trials
    low = 0.0 if successes == 0 else (center - half_width) / scale
    high = 1.0 if successes == trials else (center + half_width) / scale
    return low, high


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> McNemar:
    r"""The exact McNemar test of whether two runs on the same problems have the same accuracy (McNemar 1947).

    Problems that both runs solve, or that neither solves, do not matter. If there is no difference, each of the other
    problems is solved by either run with probability 1/2. With b problems solved only before and c only after,

    .. math:: p = \min\Big(1,\; 2 \sum_{i=0}^{\min(b, c)} \binom{b + c}{i} 2^{-(b + c)}\Big)

    Args:
        before, after: one bool per problem, for the same problems in the same order.

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
    """The percentile bootstrap interval of the mean of after − before, from resampled pairs (Efron 1979).

    Args:
        before, after: one finite number per problem (bools count as 0 and 1), for the same problems in the same order.
        num_resamples: number of samples of n pairs, drawn with replacement; at least 1.
        seed: random seed; the same seed gives the same interval.
        confidence: coverage, between 0 and 1.

    >>> paired_bootstrap([0, 0, 1, 0], [1, 1, 1, 0], seed=0)
    PairedDifference(difference=0.5, low=0.0, high=1.0)
    """
    check_numbers(confidence=confidence, num_resamples=num_resamples)
    _check_pairs(before, after)
    differences = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    if not np.isfinite(differences).all():
        raise ValueError("before and after must contain finite numbers only, got NaN or infinity")
    n = len(differences)
    # Drawing n pairs with replacement is the same as drawing how often each distinct difference occurs.
    values, counts = np.unique(differences, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(n, counts / n, size=num_resamples)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(draws @ values / n, [tail, 100 - tail])
    return PairedDifference(float(differences.mean()), float(low), float(high))


def crossed_bootstrap(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    num_resamples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> PairedDifference:
    r"""The interval of the mean of after − before that varies over training seeds *and* problems (Owen 2007).

    With the differences :math:`d_{sp}` of S seeds on the same P problems, each resample draws S seeds and P problems
    with replacement, independently of each other, and takes the mean

    .. math:: \frac{1}{S P} \sum_{s, p} v_s w_p d_{sp}

    where :math:`v_s` and :math:`w_p` count how often a seed and a problem were drawn. With three to five seeds the
    resampled ones scatter too little: intervals from them alone contain the true mean in about 75 to 83% of all
    studies instead of 95%. So the interval is never narrower than Student's over the means of the seeds: it reaches
    from the lower of both low ends to the higher of both high ends.

    An interval over seeds alone (`mean_estimate`) says what another training run would give on the *same* problems, and
    `paired_bootstrap` what the same run would give on other problems. This one says what another run would give on
    other problems of the kind.

    Args:
        before, after: S lists of P finite numbers (bools count as 0 and 1), one list per seed; the problems have the
            same order in all lists. If all runs start from one evaluated model, repeat its list S times.
        num_resamples, seed, confidence: as for `paired_bootstrap`.

    Raises ValueError for fewer than two seeds, lists of different lengths, or numbers that are not finite.

    >>> crossed_bootstrap([[0, 0, 1, 0]] * 3, [[1, 1, 1, 0]] * 3)  # problems vary, seeds do not
    PairedDifference(difference=0.5, low=0.0, high=1.0)
    """
    from scipy.stats import t

    check_numbers(confidence=confidence, num_resamples=num_resamples)
    _check_pairs(before, after)
    if len(before) < 2:
        raise ValueError("before and after have one list each, but an interval over seeds needs two; run more seeds")
    lengths = {len(row) for rows in (before, after) for row in rows}
    if len(lengths) > 1 or 0 in lengths:
        raise ValueError(f"before and after must have one number per problem in every list, got lengths {lengths}")
    differences = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    if not np.isfinite(differences).all():
        raise ValueError("before and after must contain finite numbers only, got NaN or infinity")
    seeds, problems = differences.shape
    drawn_seeds, drawn_problems = _crossed_draws(seeds, problems, num_resamples, seed)
    means = np.einsum("rs,sp,rp->r", drawn_seeds, differences, drawn_problems, optimize=True) / differences.size
    tail = 50 * (1 - confidence)
    low, high = np.percentile(means, [tail, 100 - tail])
    mean, of_seeds = float(differences.mean()), differences.mean(axis=1)
    half = float(t.ppf(0.5 + confidence / 2, seeds - 1) * of_seeds.std(ddof=1) / seeds**0.5)
    return PairedDifference(mean, min(float(low), mean - half), max(float(high), mean + half))


@functools.lru_cache(maxsize=1)
def _crossed_draws(seeds: int, problems: int, num_resamples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each resample draws each seed and each problem; a study asks for the same draws many times."""
    rng = np.random.default_rng(seed)
    drawn = [rng.multinomial(n, np.full(n, 1 / n), size=num_resamples).astype(float) for n in (seeds, problems)]
    return drawn[0], drawn[1]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    r"""The unbiased estimate, from n samples, that at least one of k samples is correct (Chen et al. 2021).

    .. math:: 1 - \binom{n - c}{k} \Big/ \binom{n}{k} = 1 - \prod_{i=n-c+1}^{n} \Big(1 - \frac{k}{i}\Big)

    Args:
        num_samples: n, number of samples for one problem.
        num_correct: c, number of correct samples, 0 ≤ c ≤ n.
        k: 1 ≤ k ≤ n.

    >>> round(pass_at_k(4, 2, 2), 4)  # one of the six pairs has no correct sample
    0.8333
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and num_samples = {num_samples}, got {k}; draw more samples")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct must be between 0 and num_samples = {num_samples}, got {num_correct}")
    # if fewer than k samples are wrong, one of the factors is 0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))


def _check_pairs(before: Sequence[Any], after: Sequence[Any]) -> None:
    if len(before) != len(after):
        raise ValueError(f"before and after must have the same length, got {len(before)} and {len(after)}")
    if len(before) == 0:
        raise ValueError("before and after are empty; evaluate on at least one problem")
