"""Intervals and paired tests, against numbers worked by hand, enumeration, scipy and simulated coverage."""

import math
from dataclasses import FrozenInstanceError
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from grpo_edu.evaluation import crossed_bootstrap, mcnemar, mean_estimate, paired_bootstrap, pass_at_k, wilson_interval

COUNTS = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # by hand, z² = 3.8415: (0.8 + 0.19207 ± 1.95996 · √(0.016 + 0.0096036)) / 1.38415
        (8, 10, 0.4902, 0.9433),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_interval_against_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@given(COUNTS, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_wilson_interval_agrees_with_scipy_and_holds_the_share(counts, confidence):
    successes, trials = counts
    low, high = wilson_interval(successes, trials, confidence)
    expected = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= low <= successes / trials <= high <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "trials must be at least 1"),
        ((11, 10), "successes .*got 11"),
        ((-1, 10), "successes .*got -1"),
        ((1, 10, 95), "confidence .*got 95"),
        ((1, 10, 0), "confidence .*got 0"),
    ],
)
def test_wilson_interval_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        wilson_interval(*arguments)


def paired(both, only_before, only_after, neither):
    before = [True] * (both + only_before) + [False] * (only_after + neither)
    after = [True] * both + [False] * only_before + [True] * only_after + [False] * neither
    return before, after


def test_mcnemar_ten_against_two():
    # 2 · (C(12,0) + C(12,1) + C(12,2)) / 2¹² = 2 · 79 / 4096; what both or neither solve has no say
    for both, neither in ((0, 0), (50, 3)):
        result = mcnemar(*paired(both, 2, 10, neither))
        assert (result.only_before, result.only_after, result.p_value) == pytest.approx((2, 10, 158 / 4096))


def test_mcnemar_without_any_change_or_with_an_even_one():
    assert mcnemar([True, False], [True, False]).p_value == pytest.approx(1)
    assert mcnemar(*paired(4, 3, 3, 4)).p_value == pytest.approx(1)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_sum_and_symmetric(b, c):
    before, after = paired(1, b, c, 1)
    tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1)) / 2 ** (b + c)
    assert mcnemar(before, after).p_value == pytest.approx(min(1.0, 2 * tail), rel=1e-9)
    assert mcnemar(after, before).p_value == pytest.approx(mcnemar(before, after).p_value, rel=1e-9)


@pytest.mark.parametrize("test", [mcnemar, paired_bootstrap])
def test_paired_tests_refuse_what_is_not_paired(test):
    with pytest.raises(ValueError, match="before and after .*got 1 and 2"):
        test([True], [True, False])
    with pytest.raises(ValueError, match="are empty"):
        test([], [])


def test_bootstrap_of_pairs_that_all_differ_alike_has_no_width():
    result = paired_bootstrap([0.25, 1.0, 3.0], [0.75, 1.5, 3.5])
    assert (result.difference, result.low, result.high) == pytest.approx((0.5, 0.5, 0.5))


def test_bootstrap_matches_the_normal_interval_for_many_pairs():
    before, after = paired(100, 20, 120, 60)  # 300 pairs: mean 1/3, variance 140/300 − 1/9
    result = paired_bootstrap(before, after, num_resamples=50_000)
    half_width = 1.96 * math.sqrt((140 / 300 - 1 / 9) / 300)
    assert result.difference == pytest.approx(1 / 3)
    assert (result.low, result.high) == pytest.approx((1 / 3 - half_width, 1 / 3 + half_width), abs=0.004)


def test_bootstrap_draws_what_resampling_row_by_row_draws():
    rng = np.random.default_rng(3)
    before, after = rng.normal(size=40), rng.normal(loc=0.3, size=40)
    rows = rng.integers(40, size=(50_000, 40))
    expected = np.percentile((after - before)[rows].mean(axis=1), [5, 95])
    result = paired_bootstrap(before, after, num_resamples=50_000, confidence=0.9)
    assert (result.low, result.high) == pytest.approx(expected, abs=0.01)


def test_bootstrap_is_seeded():
    pairs = paired(5, 3, 9, 4)
    assert paired_bootstrap(*pairs, seed=1) == paired_bootstrap(*pairs, seed=1)
    draws = {paired_bootstrap(*pairs, seed=seed, num_resamples=15).low for seed in range(8)}
    assert len(draws) > 1
    numbers = np.random.default_rng(5).normal(size=(2, 30))  # no two resamples have one mean
    assert paired_bootstrap(*numbers) == paired_bootstrap(*numbers, seed=0, num_resamples=10_000)
    assert paired_bootstrap(*numbers) != paired_bootstrap(*numbers, seed=1)


def test_the_narrowest_interval_is_around_the_median_resample():
    """At 1% it lies between the percentiles 49.5 and 50.5; of a single resample all percentiles are one."""
    numbers = np.random.default_rng(5).normal(size=(2, 30))
    narrow, wide = (paired_bootstrap(*numbers, confidence=confidence) for confidence in (0.01, 0.05))
    assert wide.low < narrow.low < narrow.high < wide.high
    one = paired_bootstrap(*numbers, num_resamples=1)
    assert one.low == one.high != one.difference


def test_the_crossed_bootstrap_draws_seeds_and_problems_independently():
    differences = np.array([[0.0, 1.0, 8.0], [1.0, 8.0, 0.0], [8.0, 0.0, 1.0]])  # all seeds have the mean 3
    means = [
        differences[np.ix_(seeds, problems)].mean()
        for seeds in product(range(3), repeat=3)
        for problems in product(range(3), repeat=3)
    ]  # all 27 × 27 resamples, each equally likely
    found = crossed_bootstrap(np.zeros((3, 3)).tolist(), differences.tolist(), confidence=0.8, num_resamples=50_000)
    assert found.difference == pytest.approx(3.0)
    assert (found.low, found.high) == pytest.approx(np.percentile(means, [10, 90]))  # far from a jump


def test_a_narrow_crossed_bootstrap_has_the_width_of_its_confidence():
    """The mean of 100 draws of 0 to 99 is nearly normal with sd 28.87 / 10; its middle 2% are 2 × 0.02507 sd wide."""
    found = crossed_bootstrap([[0] * 100] * 2, [list(range(100))] * 2, confidence=0.02, num_resamples=50_000)
    assert found.high - found.low == pytest.approx(0.1447, rel=0.25)


def test_the_crossed_bootstrap_is_wider_than_what_varies_over_problems_or_seeds_only():
    rng = np.random.default_rng(0)
    after = (rng.random((5, 300)) < 0.3 + 0.1 * rng.standard_normal((5, 1)) + 0.3 * rng.random(300)).astype(float)
    before = np.zeros_like(after)

    def width(*pairs):
        found = crossed_bootstrap(*pairs)
        return found.high - found.low

    problems_only = width(before, np.tile(after.mean(axis=0), (5, 1)))
    seeds_only = width(before, np.tile(after.mean(axis=1, keepdims=True), (1, 300)))
    student = mean_estimate(after.mean(axis=1))
    assert seeds_only == pytest.approx(student.high - student.low)
    assert width(before, after) >= max(problems_only, seeds_only)
    of_pairs = paired_bootstrap(before[0], after.mean(axis=0))
    assert problems_only == pytest.approx(of_pairs.high - of_pairs.low, rel=0.05)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([[0, 1]], [[1, 1]], "two"),
        ([[0], [1]], [[1]], "same length"),
        ([[0], [1, 0]], [[1], [1, 0]], "lengths"),
        ([[], []], [[], []], "lengths"),
        ([[0], [math.inf]], [[1], [1]], "finite"),
    ],
)
def test_the_crossed_bootstrap_refuses(before, after, message):
    with pytest.raises(ValueError, match=message):
        crossed_bootstrap(before, after)


@pytest.mark.parametrize("result", [mcnemar([True], [False]), paired_bootstrap([0], [1])])
def test_results_cannot_be_changed_afterwards(result):
    with pytest.raises(FrozenInstanceError):
        result.low = result.p_value = 0.0


def test_bootstrap_refuses():
    with pytest.raises(ValueError, match="num_resamples must be at least 1"):
        paired_bootstrap([0], [1], num_resamples=0)
    with pytest.raises(ValueError, match="num_resamples must be at least 1"):
        crossed_bootstrap([[0]] * 2, [[1]] * 2, num_resamples=0)
    with pytest.raises(ValueError, match="confidence"):
        paired_bootstrap([0], [1], confidence=1.0)
    with pytest.raises(ValueError, match="finite"):
        paired_bootstrap([0.0], [math.nan])


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case):
    num_samples, num_correct, k = case
    subsets = list(combinations(range(num_samples), k))
    hits = sum(any(sample < num_correct for sample in subset) for subset in subsets)
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(hits / len(subsets), abs=1e-12)


def test_pass_at_k_of_one_is_the_accuracy_and_large_numbers_do_not_overflow():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    exact = 1 - math.comb(9_900, 1000) / math.comb(10_000, 1000)
    assert pass_at_k(10_000, 100, 1000) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 2, 5), "k must .*got 5"),
        ((4, 2, 0), "k must .*got 0"),
        ((4, 5, 1), "num_correct .*got 5"),
        ((4, -1, 1), "num_correct .*got -1"),
    ],
)
def test_pass_at_k_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(*arguments)
