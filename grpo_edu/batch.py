"""Score a rollout (rewards, advantages, mask of the loss), and replace the groups that tie with further ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_edu.advantages import ESTIMATORS, degenerate_groups, estimate_advantages, turn_advantages
from grpo_edu.config import GRPOConfig
from grpo_edu.problems.templates import Problem, ProblemOrder
from grpo_edu.rewards import RewardFunction, combine_rewards, score_completions
from grpo_edu.rollout import Rollout

Advantages = Callable[[Tensor, GRPOConfig], Tensor]


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

    def __post_init__(self) -> None:
        if self.advantages.shape[:1] != self.rewards.shape:
            rows, shape = len(self.rewards), tuple(self.advantages.shape)
            raise ValueError(f"advantages must have one row for each of the {rows} completions, got the shape {shape}")


def compute_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """Return the advantages (B,), computed with the estimator of the config."""
    return estimate_advantages(rewards, config.num_generations, config.advantage_estimator, config.scale_rewards)


def score_rollout(
    rollout: Rollout,
    problems: Sequence[Problem],
    reward_funcs: Sequence[RewardFunction],
    config: GRPOConfig,
    advantages: Advantages = compute_advantages,
) -> Batch:
    """Compute rewards, advantages and loss mask of a rollout; each of the N problems belongs to one group of G rows."""
    rows = [problem for problem in problems for _ in range(rollout.num_generations)]
    lengths = rollout.completion_mask.sum(dim=1).tolist()
    completion_ids = [ids[:length] for ids, length in zip(rollout.completion_ids.tolist(), lengths, strict=True)]
    rewards_per_func = score_completions(reward_funcs, rows, rollout.completions, completion_ids, rollout.environments)
    rewards_per_func = rewards_per_func.to(rollout.completion_ids.device)
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
    """Return the indices of the rows that have a gradient, in whole groups.

    A group whose rewards are all equal has zero advantages. It has no gradient and is left out, unless the loss has a
    KL term or an entropy bonus, or has advantages that are not 0 for equal rewards.
    """
    groups = torch.arange(len(batch.rewards), device=batch.rewards.device).view(-1, config.num_generations)
    if config.beta or config.entropy_coef:
        return groups.flatten()
    if batch.rollout.turn_rewards is not None and batch.advantages.ndim == 2:  # see `score_by_turn`
        differs = (batch.advantages != 0).any(dim=1).view(groups.shape).any(dim=1)
        return groups[differs].flatten()
    if ESTIMATORS[config.advantage_estimator].has_baseline:
        groups = groups[~degenerate_groups(batch.rewards, config.num_generations)]
    return groups.flatten()


# Dynamic sampling: replace the problems whose groups tie with further problems (DAPO, arXiv 2503.14476).


def replace_tied_groups(
    batch: Batch,
    indices: Sequence[int],
    order: ProblemOrder,
    sample: Callable[[Sequence[int]], Batch],
    config: GRPOConfig,
    advantages: Advantages,
    pad_token_id: int,
) -> tuple[Batch, Batch]:
    """Sample further problems in place of those whose groups tie; returns the batch to learn from, and all batches.

    It ends when no group ties, after `max_resamples` rounds, or when no problem is left. If groups still tie, they
    fill the batch.

    Args:
        batch: the batch of the problems with these indices.
        order: the order of the problems. sample: indices of problems → batch.
        advantages: rewards (B,) → advantages (B,), for the batch to learn from.
    """
    rounds, used = [batch], list(indices)
    while len(rounds) <= config.max_resamples and len(used) < order.count:
        missing = int(degenerate_groups(rounds[-1].rewards, config.num_generations).sum())
        if not missing:
            break
        further = order.draw(missing, used)
        used += further
        rounds.append(sample(further))
    if len(rounds) == 1:
        return batch, batch
    everything = torch.arange(len(used), device=batch.rewards.device)
    sampled = join_batches(rounds, everything, config, advantages, pad_token_id)
    tied = degenerate_groups(sampled.rewards, config.num_generations)
    groups = tied.long().argsort(stable=True)[: config.prompts_per_step]  # those that do not tie come first
    return join_batches([sampled], groups, config, advantages, pad_token_id), sampled


def join_batches(
    batches: Sequence[Batch], groups: Tensor, config: GRPOConfig, advantages: Advantages, pad_token_id: int
) -> Batch:
    """Return the batch of some groups of several batches, counted through all of them, with advantages of its own."""
    size = config.num_generations
    rows = (groups[:, None] * size + torch.arange(size, device=groups.device)).flatten()
    rollout = join_rollouts([batch.rollout for batch in batches], rows.tolist(), pad_token_id)
    rewards = torch.cat([batch.rewards for batch in batches])[rows]
    rewards_per_func = torch.cat([batch.rewards_per_func for batch in batches])[rows]
    masks = [mask for batch in batches for mask in batch.loss_mask]
    loss_mask = pad_sequence([masks[row] for row in rows], batch_first=True)
    return Batch(rollout, rewards_per_func, rewards, advantages(rewards, config), loss_mask)


def join_rollouts(rollouts: Sequence[Rollout], rows: Sequence[int], pad_token_id: int) -> Rollout:
    """Return the rollout of some rows of several rollouts, counted through all of them; whole groups."""

    def column(name: str) -> list:
        values = [value for rollout in rollouts for value in getattr(rollout, name)]
        return [values[row] for row in rows]

    left = partial(pad_sequence, batch_first=True, padding_side="left")
    right = partial(pad_sequence, batch_first=True)
    turn_rewards = environments = None
    if rollouts[0].turn_rewards is not None:
        turn_rewards = right(column("turn_rewards"), padding_value=math.nan)
        environments = column("environments")
    return Rollout(
        prompts=column("prompts"),
        completions=column("completions"),
        prompt_ids=left(column("prompt_ids"), padding_value=pad_token_id),
        prompt_mask=left(column("prompt_mask")),
        completion_ids=right(column("completion_ids"), padding_value=pad_token_id),
        completion_mask=right(column("completion_mask")),
        sampling_per_token_logps=right(column("sampling_per_token_logps")),
        is_truncated=torch.stack(column("is_truncated")),
        num_generations=rollouts[0].num_generations,
        tool_mask=None if rollouts[0].tool_mask is None else right(column("tool_mask"), padding_value=1),
        turn_rewards=turn_rewards,
        environments=environments,
    )


def resampling_metrics(batch: Batch, sampled: Batch, config: GRPOConfig) -> dict[str, float]:
    """With `max_resamples`: the number of groups that were sampled, and the fraction of the batch that still ties."""
    if not config.max_resamples:
        return {}
    tied = degenerate_groups(batch.rewards, config.num_generations)
    return {
        "resampling/num_groups": len(sampled.rewards) // config.num_generations,
        "resampling/frac_reward_zero_std": tied.float().mean().item(),
    }
