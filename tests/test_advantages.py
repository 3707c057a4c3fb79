"""Advantages by hand-worked numbers and by their properties."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_edu.advantages import degenerate_groups, group_advantages, nanstd, rloo_advantages, tie_probability
from grpo_edu.metrics import reward_metrics
from grpo_edu.rewards import combine_rewards

SCALES = ("group", "batch", "none")
NAN = float("nan")


QUARTERS = st.integers(-20, 20).map(lambda number: number / 4)


@st.composite
def groups(draw):
    """A pair of rewards (B,) and num_generations."""
    generations = draw(st.integers(2, 6))
    count = draw(st.integers(1, 4))
    size = generations * count
    return torch.tensor(draw(st.lists(QUARTERS, min_size=size, max_size=size))), generations


def test_hand_worked_group_of_four():
    """Rewards 1 2 3 6: mean 3, squares 4 1 0 9, sample variance 14/3, standard deviation 2.160247."""
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert_close(group_advantages(rewards, 4, eps=0.0), torch.tensor([-0.925820, -0.462910, 0.0, 1.388730]))
    assert_close(group_advantages(rewards, 4, scale_rewards="none"), torch.tensor([-2.0, -1.0, 0.0, 3.0]))
    # leave-one-out: 1 - 11/3, 2 - 10/3, 3 - 9/3, 6 - 6/3
    assert_close(rloo_advantages(rewards, 4), torch.tensor([-8 / 3, -4 / 3, 0.0, 4.0]))


def test_hand_worked_batch_scale():
    """Rewards 0 2 | 4 4: mean of the batch 2.5, squares 6.25 .25 2.25 2.25, variance 11/3, deviation 1.914854.

    The means stay the groups' own, so the unanimous group gets 0.
    """
    rewards = torch.tensor([0.0, 2.0, 4.0, 4.0])
    expected = torch.tensor([-0.522233, 0.522233, 0.0, 0.0])
    assert_close(group_advantages(rewards, 2, scale_rewards="batch", eps=0.0), expected, atol=1e-6, rtol=0)
    # eps fills the deviation up to 2, so ±1 becomes ±1/2
    filled = group_advantages(rewards, 2, scale_rewards="batch", eps=2 - (11 / 3) ** 0.5)
    assert_close(filled, torch.tensor([-0.5, 0.5, 0.0, 0.0]))


@pytest.mark.parametrize("scale_rewards", SCALES)
@pytest.mark.parametrize("eps", [1e-4, 1e-6, 1e-8])
def test_sixteen_rewards_of_1_69_get_exactly_zero(scale_rewards, eps):
    rewards = torch.full((16,), 1.69)
    assert rewards.std() > 0  # the trap: in float32 this standard deviation is not 0
    assert group_advantages(rewards, 16, scale_rewards=scale_rewards, eps=eps).eq(0).all()
    assert rloo_advantages(rewards, 16).eq(0).all()
    assert degenerate_groups(rewards, 16).tolist() == [True]


def test_nearly_equal_rewards_are_not_degenerate():
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0 + 2**-23])
    assert degenerate_groups(rewards, 4).tolist() == [False]
    assert group_advantages(rewards, 4, scale_rewards="none")[3] > 0


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 16), st.sampled_from(SCALES))
def test_equal_rewards_give_exactly_zero(reward, generations, scale_rewards):
    rewards = torch.full((2 * generations,), reward)
    assert group_advantages(rewards, generations, scale_rewards=scale_rewards).eq(0).all()
    assert rloo_advantages(rewards, generations).eq(0).all()


@given(groups(), st.sampled_from(SCALES))
def test_a_group_sums_to_zero(batch, scale_rewards):
    rewards, generations = batch
    for result in (
        group_advantages(rewards, generations, scale_rewards=scale_rewards),
        rloo_advantages(rewards, generations),
    ):
        assert_close(result.view(-1, generations).sum(1), torch.zeros(len(rewards) // generations))


@given(groups(), st.sampled_from(SCALES), st.randoms(use_true_random=False))
def test_advantages_follow_their_rewards_through_any_reordering(batch, scale_rewards, random):
    """Groups may come in any order, and rows in any order within their group."""
    rewards, generations = batch
    order = torch.arange(len(rewards)).view(-1, generations).tolist()
    random.shuffle(order)
    for rows in order:
        random.shuffle(rows)
    order = torch.tensor(order).flatten()
    expected = group_advantages(rewards, generations, scale_rewards=scale_rewards)[order]
    result = group_advantages(rewards[order], generations, scale_rewards=scale_rewards)
    assert_close(result, expected)
    assert_close(rloo_advantages(rewards[order], generations), rloo_advantages(rewards, generations)[order])


@given(groups(), st.floats(0.5, 4), st.floats(-8, 8))
def test_group_scale_ignores_shift_and_scale_of_the_reward(batch, factor, shift):
    rewards, generations = batch
    rewards = rewards.double()
    expected = group_advantages(rewards, generations, eps=0.0)
    result = group_advantages(rewards * factor + shift, generations, eps=0.0)
    assert_close(result, expected, atol=1e-6, rtol=0)


@given(groups())
def test_group_scale_has_unit_sample_deviation(batch):
    rewards, generations = batch
    scaled = group_advantages(rewards, generations, eps=0.0).view(-1, generations)
    expected = 1.0 - degenerate_groups(rewards, generations).float()
    assert_close(scaled.std(dim=1), expected)


@given(groups())
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(batch):
    rewards, generations = batch
    result = rloo_advantages(rewards, generations)
    for row in range(len(rewards)):
        first = row - row % generations
        others = [float(rewards[i]) for i in range(first, first + generations) if i != row]
        assert float(result[row]) == pytest.approx(float(rewards[row]) - sum(others) / len(others), abs=1e-5)


def test_whole_numbers_and_booleans_are_rewards_too():
    expected = group_advantages(torch.tensor([1.0, 0.0]), 2)
    assert_close(group_advantages(torch.tensor([1, 0]), 2), expected)
    assert_close(group_advantages(torch.tensor([True, False]), 2), expected)
    assert group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), 2).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rewards_in_half_precision_are_compared_in_float32(dtype):
    """In float16, an eps of 1e-4 is lost next to a deviation of 0.5, and 1/3 has an error of 1e-4."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.25, 0.5], dtype=dtype)
    per_func = torch.stack([rewards, 100 * rewards], dim=1)
    for function in (
        lambda given, table: group_advantages(given, 3),
        lambda given, table: group_advantages(given, 3, scale_rewards="mean"),
        lambda given, table: rloo_advantages(given, 3),
        lambda given, table: combine_rewards(table, [1.0, 0.1]),
        lambda given, table: torch.tensor([*reward_metrics(table, given, 3, ["a", "b"]).values()]),
    ):
        assert_close(function(rewards, per_func), function(rewards.float(), per_func.float()))


def test_weights_of_whole_number_rewards_are_not_cut_to_whole_numbers():
    assert_close(combine_rewards(torch.tensor([[2, 1]]), [0.5, 0.25]), torch.tensor([1.25]))


@pytest.mark.parametrize(
    ("rewards", "generations", "message"),
    [
        ([1.0, 0.0], 1, "num_generations must be at least 2"),
        ([1.0, 0.0, 1.0], 2, "3 rows.*num_generations = 2"),
        ([float("inf"), 0.0], 2, r"rewards\[0\] .*got inf"),
        ([0.0, -3e38], 2, r"rewards\[1\] .*at most 1e\+15.*got -3e\+38.*reward_weights"),
        ([[1.0, 0.0]], 2, r"shape \(B,\)"),
        ([], 2, r"B > 0"),
    ],
)
@pytest.mark.parametrize("function", [group_advantages, rloo_advantages, degenerate_groups])
def test_bad_rewards_are_refused_with_a_word(function, rewards, generations, message):
    with pytest.raises(ValueError, match=message):
        function(torch.tensor(rewards), generations)


def test_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="scale_rewards must be one of group, batch, none, mean; got 'std'"):
        group_advantages(torch.tensor([1.0, 0.0]), 2, scale_rewards="std")


def test_hand_worked_division_by_the_mean():
    """Rewards 1 0 0 0: mean 1/4, so 3 and -1 three times; a group of zeros stays at 0 (MaxRL)."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, *[0.0] * 4])
    expected = torch.tensor([3.0, -1.0, -1.0, -1.0, *[0.0] * 4])
    assert_close(group_advantages(rewards, 4, scale_rewards="mean", eps=0.0), expected)
    halved = group_advantages(rewards, 4, scale_rewards="mean", eps=0.25)  # fills the mean up to 1/2
    assert_close(halved, expected / 2)
    with pytest.raises(ValueError, match="rewards must not be negative .*'mean'.*got -0.5"):
        group_advantages(torch.tensor([1.0, -0.5]), 2, scale_rewards="mean")


def test_dividing_by_the_mean_gives_the_gradient_of_the_log_probability():
    """At p = 0.3, in expectation over all groups of 0 and 1: d log p / dp = 1/p, less what groups without success lose.

    A group with k > 0 successes contributes (1 − k/G) / (p (1 − p)); their expectation is (1 − (1 − p)^(G − 1)) / p.
    """
    p, size, slope = 0.3, 5, 0.0
    for successes in range(1, size + 1):
        chance = math.comb(size, successes) * p**successes * (1 - p) ** (size - successes)
        group = torch.tensor([1.0] * successes + [0.0] * (size - successes), dtype=torch.float64)
        advantages = group_advantages(group, size, scale_rewards="mean", eps=0.0)
        scores = torch.where(group == 1, 1 / p, -1 / (1 - p))  # d log π / dp of a success and of a failure
        slope += chance * float((advantages * scores).mean())
    assert slope == pytest.approx((1 - (1 - p) ** (size - 1)) / p)


def test_a_completion_without_a_reward_has_advantage_zero_and_the_others_are_compared_without_it():
    rewards = torch.tensor([1.0, NAN, 3.0, 5.0, 7.0, NAN, NAN, NAN, NAN, NAN, NAN, NAN])
    assert_close(group_advantages(rewards, 4, scale_rewards="none"), torch.tensor([-2.0, 0.0, 0.0, 2.0, *[0.0] * 8]))
    # three of them: 1 - 4, 3 - 3, 5 - 2; row 5 is alone in its group
    assert_close(rloo_advantages(rewards, 4), torch.tensor([-3.0, 0.0, 0.0, 3.0, *[0.0] * 8]))
    assert_close(group_advantages(rewards, 4, eps=0.0), torch.tensor([-1.0, 0.0, 0.0, 1.0, *[0.0] * 8]))
    # of the batch: 1 3 5 7 around 4, squares 9 1 1 9, variance 20 / 3
    expected = 2 / (20 / 3) ** 0.5
    batch = group_advantages(rewards, 4, scale_rewards="batch", eps=0.0)
    assert_close(batch, torch.tensor([-expected, 0.0, 0.0, expected, *[0.0] * 8]))
    assert degenerate_groups(rewards, 4).tolist() == [False, True, True]
    assert degenerate_groups(torch.tensor([2.0, NAN, 2.0]), 3).tolist() == [True]


@pytest.mark.filterwarnings("error")  # torch warns of a single number
@given(st.lists(st.one_of(st.just(NAN), QUARTERS), min_size=1, max_size=12))
def test_the_deviation_without_nan_is_that_of_the_numbers(values):
    found = nanstd(torch.tensor([values], dtype=torch.float64))
    numbers = [value for value in values if value == value]
    assert found.shape == (1, 1)
    if len(numbers) < 2:
        assert found.isnan()
    else:
        assert float(found) == pytest.approx(statistics.stdev(numbers))


def test_each_row_has_a_deviation_of_its_own():
    rows = torch.tensor([[1, 3, NAN], [10, 10, 16], [NAN, NAN, 5]], dtype=torch.float64)
    assert nanstd(rows).squeeze(1).tolist() == pytest.approx([2**0.5, 12**0.5, NAN], nan_ok=True)


@pytest.mark.parametrize("generations", [2, 3, 4])
def test_tie_probability_is_the_weight_of_the_groups_that_tie(generations):
    """Every group of rewards 0 and 1 written out, each weighed with its probability at p = 0.3."""
    total = 0.0
    for rewards in itertools.product([0.0, 1.0], repeat=generations):
        if degenerate_groups(torch.tensor(rewards), generations).item():
            total += 0.3 ** sum(rewards) * 0.7 ** (generations - sum(rewards))
    assert tie_probability(0.3, generations) == pytest.approx(total)


def test_a_sure_question_always_ties():
    assert tie_probability(0, 8) == tie_probability(1, 8) == 1


@pytest.mark.parametrize(
    ("p", "generations", "message"),
    [(1.2, 4, "p must be a probability"), (float("nan"), 4, "p must be"), (0.5, 1, "num_generations must be at least")],
)
def test_tie_probability_refuses(p, generations, message):
    with pytest.raises(ValueError, match=message):
        tie_probability(p, generations)


def test_leave_one_out_keeps_double_precision():
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    assert (rloo_advantages(rewards, 8) - torch.tensor([1.0] + [-1 / 7] * 7, dtype=torch.float64)).abs().max() < 1e-15
