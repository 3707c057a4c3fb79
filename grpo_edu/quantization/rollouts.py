"""Rollouts from another policy than the one that is trained: from a quantized copy of it, or from an older state of it.

Sampling takes most of the time of a step. A quantized copy samples faster, and a sampler that does not wait for the
learner's last updates (asynchronous training) keeps both busy. However, both are a different policy: the completions
come from π_q, and the gradient is that of π. Each token is therefore weighted by the ratio of its probabilities under
π and π_q. The weight is truncated, so that no single token dominates the batch (truncated importance sampling; Yao et
al. 2025, https://fengyao.notion.site/off-policy-rl; FlashRL). For old samples this weight, times the ratio of PPO
between π at the start of the step and π now, is the decoupled objective of AReaL (https://arxiv.org/abs/2505.24298).
It is "token_truncate" among the modes of TRL's ``vllm_importance_sampling_mode``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from grpo_edu.config import GRPOConfig
from grpo_edu.rollout import Rollout, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def make_sampler(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: GRPOConfig) -> Sampler:
    """Return the sampler of the config: the policy itself, or one that corrects for the difference."""
    kind = Sampler
    if is_off_policy(config):
        kind = CorrectedSampler if config.rollout_quantization is None else QuantizedSampler
    return kind(model, tokenizer, config)


def is_off_policy(config: GRPOConfig) -> bool:
    """Return True if the policy that samples is not the one at the start of the step that learns from it."""
    return config.rollout_quantization is not None or config.rollout_lag > 0


@dataclass
class CorrectedSampler(Sampler):
    """Samples from the policy as it is now, and corrects for the difference when the policy learns later."""

    def importance_weights(self, old_per_token_logps: Tensor, rollout: Rollout, rows: Tensor) -> Tensor | None:
        """Return the `truncated_importance_weights` of these rows; None if the config has no correction."""
        if not self.config.importance_sampling_correction:
            return None
        sampled = rollout.sampling_per_token_logps[rows]
        return truncated_importance_weights(old_per_token_logps, sampled, self.config.importance_sampling_clip_max)

    def metrics(self, old_per_token_logps: Tensor, rollout: Rollout) -> dict[str, float]:
        """`mismatch_metrics` of a step, without those of the weights if there is no correction.

        Rows of `old_per_token_logps` (B, C) that are all 0 were not scored, because their rewards tie; they do not
        count.
        """
        scored = (old_per_token_logps != 0).any(dim=1, keepdim=True)
        found = mismatch_metrics(
            old_per_token_logps,
            rollout.sampling_per_token_logps,
            rollout.policy_mask * scored,
            cap=self.config.importance_sampling_clip_max,
        )
        corrects = self.config.importance_sampling_correction
        return {key: value for key, value in found.items() if corrects or "ratio" not in key}


@dataclass
class QuantizedSampler(CorrectedSampler):
    """Samples each rollout from a fresh quantized copy of the policy, and corrects for the difference.

    The copy is in the config's `rollout_quantization`. It is made before each rollout, so that it has the weights of
    the last update; quantizing takes about as long as reading the weights twice.
    """

    def policy(self) -> PreTrainedModel:
        """Return a quantized copy of the policy as it is now, with its adapters merged if it has some."""
        from grpo_edu.quantization.model import quantize_model  # most runs need no quantized layers

        assert self.config.rollout_quantization is not None
        return quantize_model(self.merged_policy(), self.config.rollout_quantization)


def truncated_importance_weights(old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, cap: float) -> Tensor:
    r"""Return the ratio of each token's probability under the trained and the sampling policy, at most `cap`.

    .. math:: w_{it} = \min\big(e^{\log \pi(o_{it}) - \log \pi_q(o_{it})},\ c\big)

    Args:
        old_per_token_logps: (B, C), nats, of the policy that is trained, at the start of the update; detached here.
        sampling_per_token_logps: (B, C), nats, of the policy that sampled.
        cap: c > 0, `importance_sampling_clip_max`.

    Returns:
        (B, C), for `losses.grpo_loss(importance_weights=…)`.

    Raises ValueError: shapes that differ.

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
    return (old_per_token_logps.detach() - sampling_per_token_logps).exp().clamp(max=cap)


def mismatch_metrics(
    old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, completion_mask: Tensor, *, cap: float
) -> dict[str, float]:
    """Return how far the sampling policy is from the trained policy, over the tokens of the mask, under TRL's keys.

    `sampling/sampling_logp_difference/mean` and `/max`: of |log π − log π_q|, nats.
    `sampling/importance_sampling_ratio/min`, `/mean`, `/max`: of the `truncated_importance_weights`.
    An empty mask gives no keys.

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
