"""Quantized rollouts: a quantized copy of the policy samples, and the policy itself is trained in full precision.

Sampling takes most of the time of a step, and a quantized copy samples faster. However, it is a slightly different
policy: the completions come from π_q, and the gradient is that of π. Each token is therefore weighted by the ratio of
its probabilities under π and π_q. The weight is truncated, so that no single token dominates the batch (truncated
importance sampling; Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; FlashRL, TRL's
``vllm_importance_sampling_correction`` with mode "token_truncate").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from grpo_edu.config import check_numbers
from grpo_edu.quantization.model import quantize_model
from grpo_edu.rollout import Rollout, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class QuantizedSampler(Sampler):
    """Samples each rollout from a fresh quantized copy of the policy, and corrects for the difference.

    The copy is in the config's `rollout_quantization`. It is made before each rollout, so that it has the weights of
    the last update; quantizing takes about as long as reading the weights twice.
    """

    def policy(self) -> PreTrainedModel:
        """A quantized copy of the policy as it is now."""
        assert self.config.rollout_quantization is not None
        return quantize_model(self.model, self.config.rollout_quantization)

    def importance_weights(self, old_per_token_logps: Tensor, sampling_per_token_logps: Tensor) -> Tensor | None:
        """Truncated importance weights (B, C); None where the config asks for no correction."""
        if not self.config.importance_sampling_correction:
            return None
        cap = self.config.importance_sampling_clip_max
        return truncated_importance_weights(old_per_token_logps, sampling_per_token_logps, cap)

    def metrics(self, old_per_token_logps: Tensor, rollout: Rollout) -> dict[str, float]:
        """`mismatch_metrics` of a step.

        Rows of `old_per_token_logps` (B, C) that are all 0 were not scored, because their rewards tie; they do not
        count.
        """
        scored = (old_per_token_logps != 0).any(dim=1, keepdim=True)
        return mismatch_metrics(
            old_per_token_logps,
            rollout.sampling_per_token_logps,
            rollout.completion_mask * scored,
            cap=self.config.importance_sampling_clip_max,
        )


def truncated_importance_weights(old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, cap: float) -> Tensor:
    r"""The ratio of each token's probability under the trained and the sampling policy, at most `cap`.

    .. math:: w_{it} = \min\big(e^{\log \pi(o_{it}) - \log \pi_q(o_{it})},\ c\big)

    Args:
        old_per_token_logps: (B, C), nats, of the policy that is trained, at the start of the update; detached here.
        sampling_per_token_logps: (B, C), nats, of the policy that sampled.
        cap: c > 0, `importance_sampling_clip_max`.

    Returns:
        (B, C), for `losses.grpo_loss(importance_weights=…)`.

    Raises ValueError: shapes that differ, a cap that is not positive.

    >>> import torch
    >>> sampled = torch.tensor([[0.5, 0.5, 0.1], [0.25, 0.5, 0.5]]).log()
    >>> truncated_importance_weights(torch.tensor([[0.5, 0.25, 0.9], [0.5, 0.5, 0.5]]).log(), sampled, 3.0)
    tensor([[1.0000, 0.5000, 3.0000],
            [2.0000, 1.0000, 1.0000]])
    """
    if old_per_token_logps.shape != sampling_per_token_logps.shape:
        raise ValueError(
            f"sampling_per_token_logps: expected shape {tuple(old_per_token_logps.shape)}, got "
            f"{tuple(sampling_per_token_logps.shape)}"
        )
    check_numbers(cap=cap)
    return (old_per_token_logps.detach() - sampling_per_token_logps).exp().clamp(max=cap)


def mismatch_metrics(
    old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, completion_mask: Tensor, *, cap: float
) -> dict[str, float]:
    """How far the sampling policy is from the policy that is trained, over the tokens of the mask, under TRL's keys.

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
