"""The matrix and its four numbers by hand, and their intervals."""

import pytest
from scipy.stats import binom, t

from grpo_edu.continual.forgetting import (
    MEASURES,
    AccuracyMatrix,
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
)
from grpo_edu.evaluation import Estimate, Evaluation, mean_estimate

# before any stage, then after each of three
MATRIX = [[0.4, 0.2, 0.1], [0.9, 0.3, 0.0], [0.5, 0.8, 0.2], [0.6, 0.4, 1.0]]


def test_the_four_numbers_by_hand():
    assert average_accuracy(MATRIX) == pytest.approx((0.6 + 0.4 + 1.0) / 3)
    assert forgetting(MATRIX) == pytest.approx(((0.9 - 0.6) + (0.8 - 0.4)) / 2)
    assert backward_transfer(MATRIX) == pytest.approx(((0.6 - 0.9) + (0.4 - 0.8)) / 2)
    assert forward_transfer(MATRIX) == pytest.approx(((0.3 - 0.2) + (0.2 - 0.1)) / 2)


def test_forgetting_counts_from_the_best_moment_since_the_tasks_own_stage():
    """Task 1 was best (0.95) after stage 2; how good it was before its own stage does not count."""
    later = [[0.99, 0.2, 0.1], [0.9, 0.3, 0.0], [0.95, 0.8, 0.2], [0.6, 0.8, 1.0]]
    assert forgetting(later) == pytest.approx((0.35 + 0.0) / 2)
    assert backward_transfer(later) == pytest.approx((-0.3 + 0.0) / 2)


def test_what_gets_better_is_negative_forgetting():
    assert forgetting([[0.1, 0.1], [0.5, 0.2], [0.7, 0.9]]) == pytest.approx(-0.2)


@pytest.mark.parametrize("bad", [[], [[0.5, 0.5]], [[0.1], [0.2]], [[0.1, 0.2], [0.3, 0.4]], [0.1, 0.2]])
def test_a_matrix_of_another_shape_is_refused(bad):
    for measure in (average_accuracy, forgetting, backward_transfer, forward_transfer):
        with pytest.raises(ValueError, match="matrix.*shape"):
            measure(bad)


def evaluation(task, correct):
    n = len(correct)
    return Evaluation([f"{task} {i}" for i in range(n)], [task] * n, ["#### 1"] * n, ["1"] * n, list(correct))


def matrix_of(counts, n=100):
    """From solved counts, the first problems of each task being the solved ones."""
    rows = [[evaluation(task, [i < k for i in range(n)]) for task, k in zip("ab", row, strict=True)] for row in counts]
    return AccuracyMatrix.from_evaluations("ab", rows)


def test_matrix_from_evaluations():
    matrix = matrix_of([[40, 20], [90, 30], [60, 100]])
    assert matrix.tasks == ("a", "b")
    assert matrix.accuracies() == [[0.4, 0.2], [0.9, 0.3], [0.6, 1.0]]
    stored = matrix.to_dict()
    assert stored["solved"] == [[40, 20], [90, 30], [60, 100]] and stored["num_problems"] == [100, 100]
    assert stored["tasks"] == ["a", "b"] and set(stored["measures"]) == {*MEASURES}
    assert stored["measures"]["forgetting"]["value"] == pytest.approx(0.3)
    assert stored["measures"]["forgetting"] == vars(matrix.measures()["forgetting"])


def test_evaluations_of_other_problems_are_refused():
    rows = [[evaluation("a", [True] * 5), evaluation("b", [True] * 5)] for _ in range(3)]
    rows[2][1] = evaluation("c", [True] * 5)
    with pytest.raises(ValueError, match="b was evaluated"):
        AccuracyMatrix.from_evaluations("ab", rows)
    with pytest.raises(ValueError, match="shorter"):
        AccuracyMatrix.from_evaluations("ab", [*rows[:2], rows[2][:1]])


def test_a_level_prints_in_percent_and_a_change_in_points_with_its_sign():
    estimate = Estimate(0.25, -0.01, 1.0)
    assert str(estimate) == "25% [-1%, 100%]" and f"{estimate:+}" == "+25 points [-1, +100]"


def test_interval_over_problems_is_the_paired_one():
    """30 of 100 problems lost, none won: sd of the mean √(0.3 · 0.7 / 100) = 0.046, two of them are 0.09."""
    forgot = matrix_of([[40, 20], [90, 30], [60, 100]]).measures()["forgetting"]
    assert forgot.value == pytest.approx(0.3)
    assert forgot.low == pytest.approx(0.21, abs=0.015) and forgot.high == pytest.approx(0.39, abs=0.015)
    nothing = matrix_of([[40, 20], [90, 30], [90, 100]]).measures()["forgetting"]
    assert (nothing.value, nothing.low, nothing.high) == (0, 0, 0)


@pytest.mark.slow
def test_the_ends_are_the_percentiles_of_the_binomial_distribution():
    """Of 900 problems each is lost with chance 0.3: 243 to 297 are lost in 95% (245 in the wrong 3.5th percentile)."""
    matrix = matrix_of([[360, 180], [810, 270], [540, 900]], n=900)
    forgot = matrix.measures(num_resamples=4000)["forgetting"]
    assert (900 * forgot.low, 900 * forgot.high) == pytest.approx(binom.ppf([0.025, 0.975], 900, 0.3), abs=1.1)
    assert matrix.measures() == matrix.measures(num_resamples=2000, seed=0) != matrix.measures(seed=1)


@pytest.mark.slow
def test_interval_shrinks_with_more_problems_and_keeps_to_its_seed():
    few, many = (matrix_of([[40 * k, 20 * k], [90 * k, 30 * k], [60 * k, 100 * k]], n=100 * k) for k in (1, 9))
    narrow, wide = (m.measures()["forgetting"].high - m.measures()["forgetting"].low for m in (many, few))
    assert narrow == pytest.approx(wide / 3, rel=0.15)
    assert few.measures(seed=1) == few.measures(seed=1)


def test_mean_over_seeds_has_students_interval():
    values = [0.31, 0.28, 0.40, 0.35, 0.26]
    estimate = mean_estimate(values)
    low, high = t.interval(0.95, 4, loc=0.32, scale=0.05612486 / 5**0.5)  # the sample standard deviation, by hand
    assert estimate.value == pytest.approx(0.32)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=1e-6)
    with pytest.raises(ValueError, match="values: 1"):
        mean_estimate([0.3])
