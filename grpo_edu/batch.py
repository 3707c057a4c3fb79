"""Score a rollout: rewards, advantages, and the mask of the tokens that the loss acts on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_edu.advantages import ESTIMATORS, degenerate_groups, estimate_advantages, turn_advantages
from grpo_edu.config import GRPOConfig
from grpo_edu.problems.templates import Problem, columns_of
from grpo_edu.rewards import RewardFunction, combine_rewards, compute_rewards
from grpo_edu.rollout import Rollout


@dataclass
class Batch:
    """A scored rollout: B = N·G completions of at most C tokens.

    rollout: the completions. rewards_per_func: (B, K). rewards: (B,). advantages: (B,), or (B, C) from a stage.
    loss_mask: (B, C), the rollout's `policy_mask`; rows of truncated completions are 0 if `mask_truncated_completions`.
    """

    rollout: Rollout
    rewards_per_func: Tensor
    rewards: Tensor
    advantages: Tensor
    loss_mask: Tensor


def compute_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """The advantages (B,), computed with the estimator of the config."""
    return estimate_advantages(rewards, config.num_generations, config.advantage_estimator, config.scale_rewards)


def score_rollout(
    rollout: Rollout,
    problems: Sequence[Problem],
    reward_funcs: Sequence[RewardFunction],
    config: GRPOConfig,
    advantages: Callable[[Tensor, GRPOConfig], Tensor] = compute_advantages,
) -> Batch:
    """Compute rewards, advantages and loss mask of a rollout; each of the N problems belongs to one group of G rows."""
    rows = [problem for problem in problems for _ in range(rollout.num_generations)]
    lengths = rollout.completion_mask.sum(dim=1).tolist()
    completion_ids = [ids[:length] for ids, length in zip(rollout.completion_ids.tolist(), lengths, strict=True)]
    extra = {} if rollout.environments is None else {"environments": tuple(rollout.environments)}
    rewards_per_func = compute_rewards(
        reward_funcs,
        prompts=[problem.prompt for problem in rows],
        completions=rollout.completions,
        completion_ids=completion_ids,
        **columns_of(rows),
        **extra,  # as in TRL; a tuple, because a list would be copied for each function
    ).to(rollout.completion_ids.device)
    rewards = combine_rewards(rewards_per_func, config.reward_weights)
    loss_mask = rollout.policy_mask
    if config.mask_truncated_completions:
        loss_mask = loss_mask * ~rollout.is_truncated[:, None]
    return Batch(rollout, rewards_per_func, rewards, advantages(rewards, config), loss_mask)


def score_by_turn(rollout: Rollout, *arguments: Any) -> Batch:
    """As `score_rollout`, but each turn of a conversation has an advantage of its own: `train(stages=Stages(score=…))`.

    The environment must reward its turns, and `rewards` are still those of the reward functions. A turn that was cut
    off has no reward, so its advantage is 0.

    Raises ValueError for a rollout without an environment, and with `max_resamples`, which compares conversations.
    """
    if rollout.turn_rewards is None:
        raise ValueError("rollout has no turn_rewards; set state.sampler.environment to a class such as WordGame")
    config: GRPOConfig = arguments[2]
    if config.max_resamples:
        raise ValueError(f"max_resamples must be 0 for credit by turn, got {config.max_resamples}")
    batch = score_rollout(rollout, *arguments)
    by_turn = turn_advantages(rollout.turn_rewards, config.num_generations, scale_rewards=config.scale_rewards)
    by_turn = torch.nn.functional.pad(by_turn, (0, 1))  # the turn that was cut off
    turns = rollout.turn_ids.clamp(max=by_turn.shape[1] - 1)
    return replace(batch, advantages=by_turn.gather(1, turns))


def rows_with_gradient(batch: Batch, config: GRPOConfig) -> Tensor:
    """The indices of the rows that have a gradient, in whole groups.

    A group whose rewards are all equal has zero advantages. It has no gradient and is left out, unless the loss has a
    KL term or an entropy bonus, or has advantages that are not 0 for equal rewards.
    """
    groups = torch.arange(len(batch.rewards), device=batch.rewards.device).view(-1, config.num_generations)
    if batch.rollout.turn_rewards is not None and batch.advantages.ndim == 2:  # see `score_by_turn`
        differs = (batch.advantages != 0).any(dim=1).view(groups.shape).any(dim=1)
        return (groups if config.beta else groups[differs]).flatten()
    if not (config.beta or config.entropy_coef or not ESTIMATORS[config.advantage_estimator].centers):
        groups = groups[~degenerate_groups(batch.rewards, config.num_generations)]
    return groups.flatten()
