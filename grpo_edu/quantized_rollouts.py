"""Quantized rollouts: a rounded copy of the policy samples, the policy itself learns in full precision.

Most of a step's time goes into sampling, and a quantized copy samples faster. It is another policy, though, a little
off: its completions come from π_q and the gradient is that of π. Each token is therefore weighted by how much likelier
π makes it than the copy that drew it, and the weight is cut off, so that no token rules the batch (truncated importance
sampling; Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; FlashRL, TRL's
``vllm_importance_sampling_correction`` with mode "token_truncate").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from grpo_edu.config import GRPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def sampling_policy(model: PreTrainedModel, config: GRPOConfig) -> PreTrainedModel:
    """Who samples: the model, or a fresh copy of it in the config's `rollout_quantization`.

    Called before each rollout, so that the copy has the weights of the last update; quantizing takes about as long as
    reading the weights twice.
    """
    if config.rollout_quantization is None:
        return model
    from grpo_edu.quantization import quantize_model

    return quantize_model(model, config.rollout_quantization)


def truncated_importance_weights(old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, cap: float) -> Tensor:
    r"""How much likelier the policy that learns makes each token than the one that sampled it, at most `cap`.

    .. math:: w_{it} = \min\big(e^{\log \pi(o_{it}) - \log \pi_q(o_{it})},\ c\big)

    Args:
        old_per_token_logps: (B, C), nats, of the policy that learns, at the start of the update; no gradient is kept.
        sampling_per_token_logps: (B, C), nats, of the policy that sampled.
        cap: c > 0, `importance_sampling_clip_max`.

    Returns:
        (B, C), for `losses.grpo_loss(importance_weights=…)`.

    Raises:
        ValueError: shapes that differ, a cap that is not positive.

    >>> import torch
    >>> sampled = torch.tensor([[0.5, 0.5, 0.1], [0.25, 0.5, 0.5]]).log()
    >>> truncated_importance_weights(torch.tensor([[0.5, 0.25, 0.9], [0.5, 0.5, 0.5]]).log(), sampled, 3.0)
    tensor([[1.0000, 0.5000, 3.0000],
            [2.0000, 1.0000, 1.0000]])
    """
    _check_pair(old_per_token_logps, sampling_per_token_logps)
    if not cap > 0:
        raise ValueError(f"cap: must be positive, got {cap}")
    return (old_per_token_logps.detach() - sampling_per_token_logps).exp().clamp(max=cap)


def rollout_weights(old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, config: GRPOConfig) -> Tensor | None:
    """The weights (B, C) that a config asks for; None where the policy itself sampled, or none are wanted."""
    if config.rollout_quantization is None or not config.importance_sampling_correction:
        return None
    cap = config.importance_sampling_clip_max
    return truncated_importance_weights(old_per_token_logps, sampling_per_token_logps, cap)


def mismatch_metrics(
    old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, completion_mask: Tensor, *, cap: float
) -> dict[str, float]:
    """How far the policy that sampled is from the one that learns, under TRL's keys, over the tokens of the mask.

    `sampling/sampling_logp_difference/mean` and `/max`: of |log π − log π_q|, nats.
    `sampling/importance_sampling_ratio/min`, `/mean`, `/max`: of the truncated weights. An empty mask gives no keys.

    >>> import torch
    >>> sampled = torch.tensor([[0.5, 0.5, 0.1], [0.25, 0.5, 0.5]]).log()
    >>> trained, mask = torch.tensor([[0.5, 0.25, 0.9], [0.5, 0.5, 0.5]]).log(), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> [round(value, 3) for value in mismatch_metrics(trained, sampled, mask, cap=3.0).values()]
    [0.462, 0.693, 0.5, 1.167, 2.0]
    """
    real = completion_mask != 0
    if not real.any():
        return {}
    difference = (old_per_token_logps - sampling_per_token_logps)[real].abs()
    ratio = truncated_importance_weights(old_per_token_logps, sampling_per_token_logps, cap)[real]
    return {
        "sampling/sampling_logp_difference/mean": difference.mean().item(),
        "sampling/sampling_logp_difference/max": difference.max().item(),
        "sampling/importance_sampling_ratio/min": ratio.min().item(),
        "sampling/importance_sampling_ratio/mean": ratio.mean().item(),
        "sampling/importance_sampling_ratio/max": ratio.max().item(),
    }


def _check_pair(old_per_token_logps: Tensor, sampling_per_token_logps: Tensor) -> None:
    if old_per_token_logps.shape != sampling_per_token_logps.shape:
        raise ValueError(
            f"sampling_per_token_logps: expected shape {tuple(old_per_token_logps.shape)}, got "
            f"{tuple(sampling_per_token_logps.shape)}"
        )


def batch_mismatch(old_per_token_logps: Tensor, sampling: Tensor, mask: Tensor, config: GRPOConfig) -> dict[str, float]:
    """`mismatch_metrics` of a step whose rollout was quantized; {} otherwise.

    Rows of `old_per_token_logps` (B, C) that are all 0 were not scored, because their group ties, and do not count.
    """
    if config.rollout_quantization is None:
        return {}
    scored = (old_per_token_logps != 0).any(dim=1, keepdim=True)
    return mismatch_metrics(old_per_token_logps, sampling, mask * scored, cap=config.importance_sampling_clip_max)
