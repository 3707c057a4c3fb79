"""What one GRPO step did, as plain numbers under TRL's metric keys.

Definitions follow TRL's `GRPOTrainer`, with one deliberate difference: `frac_reward_zero_std` counts the groups
whose rewards are exactly equal, where TRL asks whether a floating-point standard deviation is close to 0. The log
that keeps the numbers lives in `grpo_edu.run_log` and is exported from here.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_edu.advantages import degenerate_groups
from grpo_edu.run_log import RunLog, read_log

if TYPE_CHECKING:
    from grpo_edu.rollout import Rollout

__all__ = [
    "RunLog",
    "completion_metrics",
    "masked_mean",
    "read_log",
    "reward_metrics",
    "rollout_metrics",
]


def reward_metrics(
    rewards_per_func: Tensor, rewards: Tensor, num_generations: int, names: Sequence[str]
) -> dict[str, float]:
    """Means and sample standard deviations (ddof 1) of the rewards, over the whole batch, NaN left out.

    `reward_std` is the spread over all B rows, not the mean of the groups' spreads. A standard deviation of fewer
    than two values is NaN.

    Args:
        rewards_per_func: (B, K), NaN where a function does not apply.
        rewards: (B,), the weighted sums that advantages are made of.
        num_generations: G, rows a group; divides B.
        names: K distinct names of the reward functions.

    Raises:
        ValueError: shapes or the number of names do not fit, or a name occurs twice.

    >>> rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    >>> metrics = reward_metrics(rewards[:, None], rewards, 2, ["accuracy_reward"])
    >>> metrics["reward"], metrics["reward_std"], metrics["frac_reward_zero_std"]
    (0.75, 0.5, 0.5)
    """
    if rewards_per_func.dim() != 2 or rewards_per_func.shape[1] != len(names):
        shape = tuple(rewards_per_func.shape)
        raise ValueError(f"rewards_per_func must be (B, K) with K = {len(names)} names, got shape {shape}")
    if rewards.shape != rewards_per_func.shape[:1]:
        raise ValueError(f"rewards must be (B,) = ({len(rewards_per_func)},), got shape {tuple(rewards.shape)}")
    if len(set(names)) != len(names):
        raise ValueError(f"names must be distinct, got {list(names)}: give each reward function its own __name__")
    metrics = {}
    for name, column in zip(names, rewards_per_func.T, strict=True):
        metrics[f"rewards/{name}/mean"] = column.nanmean().item()
        metrics[f"rewards/{name}/std"] = _nanstd(column).item()
    metrics["reward"] = rewards.nanmean().item()
    metrics["reward_std"] = _nanstd(rewards).item()
    metrics["frac_reward_zero_std"] = degenerate_groups(rewards, num_generations).float().mean().item()
    return metrics


def completion_metrics(completion_mask: Tensor, is_truncated: Tensor) -> dict[str, float]:
    """Lengths in tokens, the closing EOS included, and the share of completions cut at the limit.

    The `terminated` lengths look only at completions that ended by themselves; they are 0 where none did.

    Args:
        completion_mask: (B, C), 1 through the first EOS inclusive.
        is_truncated: (B,) bool, True where no EOS came.

    Raises:
        ValueError: shapes do not fit or there are no completions.

    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> metrics = completion_metrics(mask, torch.tensor([False, True]))
    >>> metrics["completions/mean_length"], metrics["completions/mean_terminated_length"]
    (2.5, 2.0)
    """
    if completion_mask.dim() != 2 or completion_mask.shape[0] == 0:
        raise ValueError(f"completion_mask must be (B, C) with B ≥ 1, got shape {tuple(completion_mask.shape)}")
    if is_truncated.shape != completion_mask.shape[:1]:
        rows = completion_mask.shape[0]
        raise ValueError(f"is_truncated must be (B,) = ({rows},), got shape {tuple(is_truncated.shape)}")
    lengths = completion_mask.sum(dim=1).float()
    terminated = lengths[~is_truncated.bool()]
    if terminated.numel() == 0:
        terminated = torch.zeros(1)
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
    """`reward_metrics` and `completion_metrics` of one rollout in one dict.

    Args:
        rollout: the B completions, from `generate`.
        rewards_per_func: (B, K). rewards: (B,). names: K distinct names.

    Raises:
        ValueError: as the two functions do.
    """
    return {
        **reward_metrics(rewards_per_func, rewards, rollout.num_generations, names),
        **completion_metrics(rollout.completion_mask, rollout.is_truncated),
    }


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Mean over the tokens of all completions: TRL's reduction for `entropy`, `kl` and `clip_ratio/*`.

    Args:
        values: (B, C), one number a token; or (B, 1), one number a sequence, averaged without the mask.
        mask: (B, C), 1 where a token counts.

    Raises:
        ValueError: the shapes do not fit.

    >>> masked_mean(torch.tensor([[1.0, 9.0], [2.0, 3.0]]), torch.tensor([[1, 0], [1, 1]]))
    2.0
    """
    if values.shape != mask.shape:
        if values.shape == (mask.shape[0], 1):
            return values.float().mean().item()
        raise ValueError(f"values {tuple(values.shape)} must have the shape of mask {tuple(mask.shape)}")
    # where, not a product: padding may hold inf or NaN
    kept = torch.where(mask.bool(), values.float(), 0.0)
    return (kept.sum() / mask.sum().clamp(min=1)).item()


def _nanstd(values: Tensor) -> Tensor:
    """Sample standard deviation of a vector without its NaNs; NaN for fewer than two values."""
    kept = values[~values.isnan()]
    return kept.std() if kept.numel() > 1 else values.new_tensor(math.nan)
