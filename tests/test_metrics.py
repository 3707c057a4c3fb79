"""Step metrics under TRL's keys: by hand, and against TRL's own standard deviation."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_edu.metrics import completion_metrics, masked_mean, reward_metrics, rollout_metrics

NAN = math.nan


def test_reward_metrics_by_hand():
    per_func = torch.tensor([[1.0, 0.5], [0.0, NAN], [1.0, 1.0], [1.0, 0.0]])
    metrics = reward_metrics(per_func, torch.tensor([1.5, 0.0, 2.0, 2.0]), 2, ["accuracy", "steps"])
    assert metrics["rewards/accuracy/mean"] == 0.75
    assert metrics["rewards/accuracy/std"] == pytest.approx(0.5)  # √((3 · 1/16 + 9/16) / 3)
    assert metrics["rewards/steps/mean"] == pytest.approx(0.5)  # of the three that apply
    assert metrics["rewards/steps/std"] == pytest.approx(0.5)
    assert metrics["reward"] == 1.375
    # over all four rows: deviations 1/8, −11/8, 5/8, 5/8, squares 172/64, over 3
    assert metrics["reward_std"] == pytest.approx(math.sqrt(172 / 64 / 3))
    assert metrics["frac_reward_zero_std"] == 0.5


@given(st.lists(st.one_of(st.floats(-10, 10, width=32), st.just(NAN)), min_size=2, max_size=12))
def test_a_functions_std_is_trls(column):
    rewards = torch.tensor(column)
    ours = reward_metrics(rewards[:, None], torch.zeros(len(column)), len(column), ["f"])["rewards/f/std"]
    from trl.trainer.utils import nanstd

    assert ours == pytest.approx(nanstd(rewards).item(), rel=1e-4, abs=1e-4, nan_ok=True)


def test_sixteen_equal_rewards_are_one_group_without_a_signal():
    rewards = torch.full((16,), 1.69)
    assert reward_metrics(rewards[:, None], rewards, 16, ["f"])["frac_reward_zero_std"] == 1.0
    # close to equal is not equal, though a float32 comparison with tolerance takes it for zero
    rewards[0] += 1e-6
    assert reward_metrics(rewards[:, None], rewards, 16, ["f"])["frac_reward_zero_std"] == 0.0


@pytest.mark.parametrize(
    ("per_func", "rewards", "names", "message"),
    [
        (torch.zeros(4), torch.zeros(4), ["f"], r"rewards_per_func .*got \(4,\)"),
        (torch.zeros(4, 2), torch.zeros(4), ["f"], r"rewards_per_func .*got \(4, 2\)"),
        (torch.zeros(4, 1), torch.zeros(3), ["f"], r"rewards .*\(4,\), got \(3,\)"),
        (torch.zeros(4, 2), torch.zeros(4), ["f", "f"], "names .*__name__"),
    ],
)
def test_reward_metrics_refuse(per_func, rewards, names, message):
    with pytest.raises(ValueError, match=message):
        reward_metrics(per_func, rewards, 2, names)


def test_completion_metrics_by_hand():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]])
    assert completion_metrics(mask, torch.tensor([False, True, False, False])) == {
        "completions/mean_length": 2.75,
        "completions/min_length": 1.0,
        "completions/max_length": 4.0,
        "completions/mean_terminated_length": pytest.approx(7 / 3),  # the cut one left out
        "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 4.0,
        "completions/clipped_ratio": 0.25,
    }


def test_terminated_lengths_are_zero_where_all_were_cut():
    metrics = completion_metrics(torch.ones(2, 3), torch.tensor([True, True]))
    assert metrics["completions/mean_terminated_length"] == 0.0
    assert metrics["completions/clipped_ratio"] == 1.0


def test_completion_metrics_refuse():
    with pytest.raises(ValueError, match="B ≥ 1"):
        completion_metrics(torch.ones(0, 3), torch.ones(0))
    with pytest.raises(ValueError, match=r"is_truncated .*\(2,\), got \(3,\)"):
        completion_metrics(torch.ones(2, 3), torch.ones(3))


def test_rollout_metrics_hold_both():
    rollout = SimpleNamespace(
        num_generations=2, completion_mask=torch.ones(2, 3), is_truncated=torch.tensor([False, True])
    )
    rewards = torch.tensor([1.0, 0.0])
    metrics = rollout_metrics(rollout, rewards[:, None], rewards, ["accuracy_reward"])
    assert metrics["reward"] == 0.5 and metrics["completions/clipped_ratio"] == 0.5
    assert all(type(value) is float for value in metrics.values())


def test_masked_mean_weighs_tokens_not_rows_and_ignores_padding():
    values = torch.tensor([[1.0, NAN, math.inf], [2.0, 3.0, 6.0]])
    assert masked_mean(values, torch.tensor([[1, 0, 0], [1, 1, 1]])) == 3.0
    assert masked_mean(torch.tensor([[1.0], [4.0]]), torch.ones(2, 3)) == 2.5  # one value a sequence
    assert masked_mean(values, torch.zeros(2, 3)) == 0.0
    with pytest.raises(ValueError, match="shape of mask"):
        masked_mean(torch.ones(2, 2), torch.ones(2, 3))
