"""Coverage, power, problems needed and what a reported number allows, against hand sums, enumeration and simulation."""

import math
import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_edu.evaluation import mcnemar, wilson_interval
from grpo_edu.studies.power import (
    CLAIMS,
    SOURCES,
    VERDICTS,
    coverage,
    judge,
    mcnemar_p_values,
    mcnemar_power,
    mcnemar_range,
    normal_interval,
    possible_counts,
    problems_needed_paired,
    problems_needed_unpaired,
)


def test_normal_interval_by_hand_and_where_it_fails():
    # √(0.8 · 0.2 / 100) = 0.04, times 1.95996
    assert normal_interval(80, 100) == pytest.approx((0.8 - 0.0783986, 0.8 + 0.0783986), abs=1e-6)
    assert normal_interval(0, 7) == (0.0, 0.0)
    assert normal_interval(19, 20)[1] > 1


def test_coverage_by_hand():
    # two trials, p = 1/2: the counts 0, 1, 2 have chances 1/4, 1/2, 1/4; only the middle one's interval holds 1/2
    assert coverage(normal_interval, 0.5, 2) == pytest.approx(0.5)
    assert coverage(lambda k, n: (0.0, 1.0), 0.3, 7) == pytest.approx(1.0)
    assert coverage(lambda k, n: (k / n, k / n), 0.3, 10) == pytest.approx(math.comb(10, 3) * 0.3**3 * 0.7**7)


def test_coverage_agrees_with_simulation_and_published_failures():
    draws = np.random.default_rng(1).binomial(20, 0.9, size=100_000)
    bounds = {int(k): wilson_interval(int(k), 20) for k in np.unique(draws)}
    held = np.mean([bounds[int(k)][0] <= 0.9 <= bounds[int(k)][1] for k in draws])
    assert coverage(wilson_interval, 0.9, 20) == pytest.approx(held, abs=0.004)
    # Brown, Cai & DasGupta (2001), section 2: the standard interval at p = 0.2 covers 0.946 for n = 30, 0.928 for 98
    assert coverage(normal_interval, 0.2, 30) == pytest.approx(0.946, abs=5e-4)
    assert coverage(normal_interval, 0.2, 98) == pytest.approx(0.928, abs=5e-4)


@given(st.integers(0, 50), st.integers(0, 50))
def test_p_values_are_those_of_one_comparison_at_a_time(b, c):
    one = mcnemar([True] * b + [False] * c + [True], [False] * b + [True] * c + [True])
    assert mcnemar_p_values([b, 1], [c, 1])[0] == pytest.approx(one.p_value, rel=1e-9)


def test_power_is_the_sum_over_every_outcome_of_six_problems():
    b, c, n, alpha = 0.1, 0.5, 6, 0.07
    chances = {"won": c, "lost": b, "same": 1 - b - c}
    total = 0.0
    for outcome in product(chances, repeat=n):
        lost, won = outcome.count("lost"), outcome.count("won")
        p_value = min(1.0, 2 * sum(math.comb(lost + won, i) for i in range(min(lost, won) + 1)) / 2 ** (lost + won))
        total += math.prod(chances[what] for what in outcome) * (p_value <= alpha)
    assert mcnemar_power(b, c, n, alpha=alpha) == pytest.approx(total, rel=1e-9)


def test_power_without_a_gain_is_the_error_rate_and_at_most_alpha():
    for differing in (0.1, 0.5, 1.0):
        for trials in (5, 60, 300, 3000):
            assert mcnemar_power(differing / 2, differing / 2, trials) <= 0.05
    assert mcnemar_power(0.2, 0.2, 20_000) == pytest.approx(0.05, abs=0.002)  # many problems leave little unused


def test_power_knows_neither_direction_nor_shares_that_are_no_shares():
    assert mcnemar_power(0.1, 0.2, 80) == pytest.approx(mcnemar_power(0.2, 0.1, 80))
    assert mcnemar_power(0.0, 1.0, 6) == pytest.approx(1.0)  # six of six won: p = 2/64
    assert mcnemar_power(0.0, 1.0, 5) == 0.0  # five of five: p = 2/32 is too large


@pytest.mark.parametrize(("b", "c"), [(0.05, 0.15), (0.01, 0.03), (0.19, 0.21), (0.0, 0.02)])
def test_paired_number_of_problems_reaches_the_power_that_was_asked_for(b, c):
    # the formula is a normal approximation, the test is exact and a little stricter
    assert mcnemar_power(b, c, problems_needed_paired(b, c)) == pytest.approx(0.8, abs=0.08)
    assert mcnemar_power(b, c, problems_needed_paired(b, c) // 2) < 0.65


def test_paired_number_by_hand():
    # ψ = 0.2, d = 0.1: (1.95996 · 0.447214 + 0.841621 · √0.19)² / 0.01 = (0.876522 + 0.366853)² / 0.01 = 154.6
    assert problems_needed_paired(0.05, 0.15) == 155
    assert problems_needed_paired(0.15, 0.05) == 155


def test_unpaired_number_by_hand_and_by_simulation():
    # p̄ = 0.88: (1.95996 · √0.2112 + 0.841621 · √0.211)² / 0.0004 = (0.900731 + 0.386594)² / 0.0004 = 4143.0…
    assert problems_needed_unpaired(0.87, 0.89) == 4144
    n = problems_needed_unpaired(0.4, 0.5)
    rng = np.random.default_rng(5)
    first, second = rng.binomial(n, 0.4, 20_000) / n, rng.binomial(n, 0.5, 20_000) / n
    mean = (first + second) / 2
    found = np.abs(second - first) > 1.95996 * np.sqrt(2 * mean * (1 - mean) / n)
    assert found.mean() == pytest.approx(0.8, abs=0.02)


def test_pairs_help_by_as_much_as_the_runs_agree():
    # runs that agree no more than by chance differ on p₁q₂ + p₂q₁ of the problems: pairing then gains next to nothing
    b, c = 0.4 * 0.5, 0.5 * 0.6
    assert problems_needed_paired(b, c) == pytest.approx(problems_needed_unpaired(0.4, 0.5), rel=0.02)
    assert problems_needed_paired(0.05, 0.15) < problems_needed_unpaired(0.4, 0.5) / 2


def test_more_power_and_smaller_gains_need_more_problems():
    assert problems_needed_paired(0.05, 0.15, power=0.9) > problems_needed_paired(0.05, 0.15)
    assert problems_needed_unpaired(0.4, 0.5, alpha=0.01) > problems_needed_unpaired(0.4, 0.5)
    quarter = problems_needed_unpaired(0.475, 0.525) / problems_needed_unpaired(0.45, 0.55)
    assert quarter == pytest.approx(4, rel=0.03)


@pytest.mark.parametrize(
    ("percent", "trials", "decimals", "counts"),
    [
        (71.7, 60, 1, [43]),
        (80.0, 60, 1, [48]),
        (87, 60, 0, [52]),
        (89, 60, 0, []),  # 53 is 88.3%, 54 is 90%
        (93, 20, 0, []),
        (50, 1000, 0, list(range(495, 506))),  # 49.5 and 50.5 round either way
        (100, 3, 0, [3]),
    ],
)
def test_possible_counts(percent, trials, decimals, counts):
    assert possible_counts(percent, trials, decimals=decimals) == counts


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.integers(0, 2))
def test_every_true_share_is_possible_as_it_is_printed(case, decimals):
    count, trials = case
    assert count in possible_counts(float(f"{100 * count / trials:.{decimals}f}"), trials, decimals=decimals)


def test_range_of_p_values_is_that_of_all_tables_with_these_totals():
    for before, after, trials in product(range(6), range(6), (5, 8)):
        p_values = []
        for lost in range(trials + 1):
            won, both = lost + after - before, before - lost
            neither = trials - lost - won - both
            if min(won, both, neither) >= 0:
                table = [True] * (both + lost) + [False] * (won + neither)
                p_values.append(
                    mcnemar(table, [True] * both + [False] * lost + [True] * won + [False] * neither).p_value
                )
        assert mcnemar_range(before, after, trials) == pytest.approx((min(p_values), max(p_values)))


def test_five_more_of_sixty_is_not_significant_even_if_none_was_lost():
    assert mcnemar_range(43, 48, 60)[0] == 2 / 2**5


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (normal_interval, {"successes": 3, "trials": 2}, "successes.*3"),
        (coverage, {"interval": wilson_interval, "share": 1.0, "trials": 20}, "share.*1.0"),
        (coverage, {"interval": wilson_interval, "share": 0.5, "trials": 0}, "trials.*0"),
        (mcnemar_p_values, {"only_before": [1, -1], "only_after": [2, 2]}, "only_before.*negative"),
        (mcnemar_power, {"only_before": 0.7, "only_after": 0.7, "trials": 10}, "at most 1.*0.7"),
        (mcnemar_power, {"only_before": 0.0, "only_after": 0.0, "trials": 10}, "above 0"),
        (mcnemar_power, {"only_before": 0.1, "only_after": 0.2, "trials": 0}, "trials.*0"),
        (problems_needed_paired, {"only_before": 0.1, "only_after": 0.1}, "equal"),
        (problems_needed_paired, {"only_before": -0.1, "only_after": 0.2}, "at least 0.*-0.1"),
        (problems_needed_paired, {"only_before": 0.1, "only_after": 0.2, "alpha": 0.0}, "alpha.*0.0"),
        (problems_needed_paired, {"only_before": 0.1, "only_after": 0.2, "power": 1.0}, "power.*1.0"),
        (problems_needed_unpaired, {"before": 0.5, "after": 0.5}, "equal"),
        (problems_needed_unpaired, {"before": 0.5, "after": 50}, "after.*50"),
        (possible_counts, {"percent": 50, "trials": 0}, "trials.*0"),
        (possible_counts, {"percent": 50, "trials": 10, "decimals": -1}, "decimals.*-1"),
        (mcnemar_range, {"before": 5, "after": 9, "trials": 8}, "after.*9"),
    ],
)
def test_refusals_name_the_argument_and_its_value(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**arguments)


# ---- the audited claims ----


def test_each_claim_names_its_source_and_holds_a_number_or_a_direction():
    assert {claim.source for claim in CLAIMS.values()} == set(SOURCES)
    for key, claim in CLAIMS.items():
        assert re.search(r"\d|degradation", claim.quote), key
        assert claim.quote == " ".join(claim.quote.split()), f"{key}: one line, single spaces"
    assert len({claim.quote for claim in CLAIMS.values()}) == len(CLAIMS) == 34


@pytest.mark.parametrize("holds", [True, np.bool_(False), None])
def test_a_judgment_prints_quote_source_verdict_and_reason(holds):
    judgment = judge("ducks", holds, "Because " + "of the eggs " * 20)
    assert judgment.verdict == VERDICTS[None if holds is None else bool(holds)]
    text = str(judgment)
    assert text.startswith("“Janet's ducks") and f"→ {judgment.verdict.upper()}: Because" in text
    assert "(tutorial)" in text and max(map(len, text.splitlines())) <= 92


@pytest.mark.parametrize(("key", "because", "message"), [("moon", "seen", "key.*moon"), ("memory", " ", "because")])
def test_a_judgment_needs_a_known_claim_and_a_reason(key, because, message):
    with pytest.raises(ValueError, match=message):
        judge(key, True, because)
