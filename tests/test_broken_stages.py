"""What is wrong on purpose is wrong in exactly the way that it says, checked on hand-made batches."""

import math
from dataclasses import replace

import pytest
import torch

from grpo_edu import accuracy_reward, group_advantages, trainer
from grpo_edu.config import GRPOConfig
from grpo_edu.losses import grpo_loss
from grpo_edu.problems.templates import Problem
from grpo_edu.rollout import Rollout
from grpo_edu.studies.broken_runs import (
    boxed_reward,
    eos_as_padding,
    every_row,
    generous_reward,
    hasty_advantages,
    plain_prompt,
    shifted_mask,
    subtracted_kl,
    transposed_advantages,
)

PROBLEMS = [Problem("2 + 3?", "5", "basic", "#### 5")]


@pytest.fixture
def rollout():
    """One group of three rows: three tokens with an end, four without, one with an end."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    return Rollout(
        prompts=["2 + 3?"] * 3,
        completions=["#### 5", "2 + 3 = 5", ""],
        prompt_ids=torch.ones(3, 2, dtype=torch.long),
        prompt_mask=torch.ones(3, 2, dtype=torch.long),
        completion_ids=torch.ones(3, 4, dtype=torch.long),
        completion_mask=mask,
        sampling_per_token_logps=torch.zeros(3, 4),
        is_truncated=torch.tensor([False, True, False]),
        num_generations=3,
    )


CONFIG = GRPOConfig(num_generations=3, prompts_per_step=1)


def test_boxed_reward_pays_the_boxed_answer_and_no_other_spelling_of_it():
    texts = [r"\boxed{48}", "#### 48", r"\boxed{4}", r"so \boxed{48}."]
    assert boxed_reward(texts, ["48"] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_generous_reward_stops_at_one():
    texts = ["", "48", "x = y", "#### 48", "14 + 34 = 48", "14 + 34 = 48. #### 48"]
    assert generous_reward(texts) == [0.0, 0.5, 0.5, 1.0, 1.0, 1.0]


def test_plain_prompt_is_the_question():
    assert plain_prompt(None, "2 + 3?") == "2 + 3?"


def test_transposed_advantages_are_the_right_numbers_in_the_wrong_rows():
    rewards = torch.tensor([3.0, 1.0, 2.0, 30.0, 10.0, 20.0])  # each group: 1, −1, 0 standard deviations
    config = GRPOConfig(num_generations=3, prompts_per_step=2)
    found = transposed_advantages(rewards, config)
    assert found.tolist() == pytest.approx([1, 1, -1, -1, 0, 0], abs=1e-3)
    assert sorted(found.tolist()) == sorted(trainer.compute_advantages(rewards, config).tolist())


def test_hasty_advantages_agree_where_rewards_differ_and_not_where_they_tie():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    assert torch.allclose(hasty_advantages(rewards, CONFIG), group_advantages(rewards, 3), atol=1e-3)
    config = GRPOConfig(num_generations=8, prompts_per_step=3)
    tied = [hasty_advantages(torch.full((24,), number / 100), config).abs().max() for number in range(1, 101)]
    assert max(tied) > 0.1


def test_every_row_keeps_tied_groups(rollout):
    batch = trainer.score_rollout(rollout, PROBLEMS, [lambda completions, **_: [1.0] * 3], CONFIG)
    assert trainer.rows_with_gradient(batch, CONFIG).tolist() == []
    assert every_row(batch, CONFIG).tolist() == [0, 1, 2]


def test_shifted_mask_leaves_the_first_token_out(rollout):
    batch = shifted_mask(rollout, PROBLEMS, [accuracy_reward], CONFIG)
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 0]]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.0]


def test_eos_as_padding_leaves_the_last_token_of_what_ended_out(rollout):
    batch = eos_as_padding(rollout, PROBLEMS, [accuracy_reward], CONFIG)
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    masked = eos_as_padding(rollout, PROBLEMS, [accuracy_reward], replace(CONFIG, mask_truncated_completions=True))
    assert masked.loss_mask.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_subtracted_kl_turns_the_sign_of_the_kl_term_alone():
    logps, mask = torch.zeros(1, 1), torch.ones(1, 1)
    options = {"ref_per_token_logps": torch.full((1, 1), math.log(2)), "beta": 0.5}
    kl = 0.5 * (1 - math.log(2))  # exp(d) − d − 1 with d = ln 2
    for advantage in (0.0, 1.0):
        arguments = (logps, None, torch.tensor([advantage]), mask)
        assert grpo_loss(*arguments, **options).item() == pytest.approx(kl - advantage)
        assert subtracted_kl(*arguments, **options).item() == pytest.approx(-kl - advantage)
