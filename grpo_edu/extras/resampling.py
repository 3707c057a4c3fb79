"""Dynamic sampling: replace the problems whose groups tie by further problems (DAPO, arXiv 2503.14476)."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_edu.advantages import degenerate_groups
from grpo_edu.batch import Batch
from grpo_edu.config import GRPOConfig
from grpo_edu.problems.templates import ProblemOrder
from grpo_edu.rollout import Rollout

Advantages = Callable[[Tensor, GRPOConfig], Tensor]


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
        order: of the problems. sample: indices of problems → batch.
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
    """The batch of some groups of several batches, counted through all of them, with the advantages of this batch."""
    size = config.num_generations
    rows = (groups[:, None] * size + torch.arange(size, device=groups.device)).flatten()
    rollout = join_rollouts([batch.rollout for batch in batches], rows.tolist(), pad_token_id)
    rewards = torch.cat([batch.rewards for batch in batches])[rows]
    rewards_per_func = torch.cat([batch.rewards_per_func for batch in batches])[rows]
    masks = [mask for batch in batches for mask in batch.loss_mask]
    loss_mask = pad_sequence([masks[row] for row in rows], batch_first=True)
    return Batch(rollout, rewards_per_func, rewards, advantages(rewards, config), loss_mask)


def join_rollouts(rollouts: Sequence[Rollout], rows: Sequence[int], pad_token_id: int) -> Rollout:
    """The rollout of some rows of several rollouts, counted through all of them; whole groups."""

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
