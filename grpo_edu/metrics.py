"""Compute the metrics of a GRPO step, as numbers under TRL's metric keys.

The definitions are those of TRL's `GRPOTrainer`, with two deliberate differences. `frac_reward_zero_std` is the
fraction of groups whose rewards are exactly equal, whereas TRL checks whether a standard deviation is close to 0.
`entropy` is the mean of −log π of the sampled tokens, an unbiased estimate at no cost, whereas TRL adds up the whole
distribution of each token. All functions raise ValueError for shapes that do not match.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_edu.advantages import degenerate_groups, nanstd
from grpo_edu.tensors import at_least_float32

if TYPE_CHECKING:
    from grpo_edu.rollout import Rollout


def reward_metrics(
    rewards_per_func: Tensor, rewards: Tensor, num_generations: int, names: Sequence[str]
) -> dict[str, float]:
    """Return means and sample standard deviations (ddof 1) of the rewards over the whole batch, without NaN.

    `reward_std` is the standard deviation over all B rows, not the mean over the groups. The standard deviation of
    fewer than two values is NaN.

    Args:
        rewards_per_func: (B, K), NaN if a function does not apply.
        rewards: (B,), the total rewards from which advantages are computed.
        num_generations: G, completions per prompt.
        names: K different names of the reward functions.

    >>> rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    >>> metrics = reward_metrics(rewards[:, None], rewards, 2, ["accuracy_reward"])
    >>> metrics["reward"], metrics["reward_std"], metrics["frac_reward_zero_std"]
    (0.75, 0.5, 0.5)
    """
    if rewards_per_func.dim() != 2 or rewards_per_func.shape[1] != len(names):
        shape = tuple(rewards_per_func.shape)
        raise ValueError(f"rewards_per_func must have shape (B, {len(names)}), one column per name, got {shape}")
    if rewards.shape != rewards_per_func.shape[:1]:
        raise ValueError(f"rewards must have shape ({len(rewards_per_func)},), got {tuple(rewards.shape)}")
    if len(set(names)) != len(names):
        raise ValueError(f"names must be different, got {list(names)}; give each reward function its own __name__")
    rewards_per_func, rewards = at_least_float32(rewards_per_func), at_least_float32(rewards)
    metrics = {}
    for name, column in zip(names, rewards_per_func.T, strict=True):
        metrics[f"rewards/{name}/mean"] = column.nanmean().item()
        metrics[f"rewards/{name}/std"] = nanstd(column[None]).item()
    metrics["reward"] = rewards.nanmean().item()
    metrics["reward_std"] = nanstd(rewards[None]).item()
    metrics["frac_reward_zero_std"] = degenerate_groups(rewards, num_generations).float().mean().item()
    return metrics


def completion_metrics(completion_mask: Tensor, is_truncated: Tensor) -> dict[str, float]:
    """Completion lengths in tokens, including the EOS, and the fraction of truncated completions.

    The `terminated` lengths are those of completions that ended with EOS; they are 0 if there are none.

    Args:
        completion_mask: (B, C), 1 up to and including the first EOS.
        is_truncated: (B,) bool, True for completions without EOS.

    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> metrics = completion_metrics(mask, torch.tensor([False, True]))
    >>> metrics["completions/mean_length"], metrics["completions/mean_terminated_length"]
    (2.5, 2.0)
    """
    if completion_mask.dim() != 2 or completion_mask.shape[0] == 0:
        raise ValueError(f"completion_mask must have shape (B, C) with B ≥ 1, got {tuple(completion_mask.shape)}")
    if is_truncated.shape != completion_mask.shape[:1]:
        raise ValueError(f"is_truncated must have shape ({len(completion_mask)},), got {tuple(is_truncated.shape)}")
    lengths = completion_mask.sum(dim=1).float()
    terminated = lengths[~is_truncated.bool()]
    if terminated.numel() == 0:
        terminated = lengths.new_zeros(1)
    metrics = {}
    for suffix, values in (("length", lengths), ("terminated_length", terminated)):
        metrics[f"completions/mean_{suffix}"] = values.mean().item()
        metrics[f"completions/min_{suffix}"] = values.min().item()
        metrics[f"completions/max_{suffix}"] = values.max().item()
    metrics["completions/clipped_ratio"] = is_truncated.float().mean().item()
    return metrics


def rollout_metrics(
    rollout: "Rollout", rewards_per_func: Tensor, rewards: Tensor, names: Sequence[str]
) -> dict[str, float]:
    """Return the `reward_metrics` and `completion_metrics` of one rollout, whose arguments they describe."""
    return {
        **reward_metrics(rewards_per_func, rewards, rollout.num_generations, names),
        **completion_metrics(rollout.completion_mask, rollout.is_truncated),
    }


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Return the mean over the tokens of all completions, which TRL uses for `entropy`, `kl` and `clip_ratio/*`.

    It is 0 if no token counts, as in TRL; CS336's `masked_mean`, which also takes an axis, is NaN there.

    Args:
        values: (B, C), one number per token; or (B, 1), one number per completion, averaged without the mask.
        mask: (B, C), 1 for tokens that count.

    >>> masked_mean(torch.tensor([[1.0, 9.0], [2.0, 3.0]]), torch.tensor([[1, 0], [1, 1]]))
    2.0
    """
    if values.shape != mask.shape:
        if values.shape == (mask.shape[0], 1):
            return at_least_float32(values).mean().item()
        raise ValueError(f"values must have the shape of mask, {tuple(mask.shape)}, got {tuple(values.shape)}")
    # torch.where instead of a product, because padding may contain inf or NaN
    kept = torch.where(mask.bool(), at_least_float32(values), 0.0)
    return (kept.sum() / mask.sum().clamp(min=1)).item()
