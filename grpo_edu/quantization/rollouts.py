"""Rollouts from another policy than the one that is trained: from a quantized copy of it, or from an older state of it.

Sampling takes most of the time of a step. A quantized copy samples faster, and a sampler that does not wait for the
learner's last updates (asynchronous training) keeps both busy. However, both are a different policy: the completions
come from π_q, and the gradient is that of π. Each token is therefore weighted by the ratio of its probabilities under
π and π_q. The weight is truncated, so that no single token dominates the batch (truncated importance sampling; Yao et
al. 2025, https://fengyao.notion.site/off-policy-rl; FlashRL). For old samples this weight, times the ratio of PPO
between π at the start of the step and π now, is the decoupled objective of AReaL (https://arxiv.org/abs/2505.24298).
The four modes are those of TRL's ``vllm_importance_sampling_mode``, whose default is "sequence_mask"; without its lower
bound of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_edu.config import GRPOConfig, check_numbers
from grpo_edu.quantization.model import quantize_model
from grpo_edu.rollout import Rollout, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def make_sampler(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: GRPOConfig) -> Sampler:
    """The sampler that the config asks for: the policy itself, or one that corrects for the difference."""
    kind = Sampler
    if samples_differ(config):
        kind = CorrectedSampler if config.rollout_quantization is None else QuantizedSampler
    return kind(model, tokenizer, config)


def samples_differ(config: GRPOConfig) -> bool:
    """Whether the policy that samples is another one than the policy at the start of the step that learns from it."""
    return config.rollout_quantization is not None or config.rollout_lag > 0


@dataclass
class CorrectedSampler(Sampler):
    """Samples from the policy as it is when it is asked, and corrects for the difference when the policy learns later.

    Raises ValueError: `loss_type` "vespo", which multiplies the weights of a completion itself, with one weight per
    completion.
    """

    def __post_init__(self) -> None:
        mode = self.config.importance_sampling_mode
        corrects = self.config.importance_sampling_correction and mode.startswith("sequence")
        if corrects and self.config.loss_type == "vespo":
            raise ValueError(
                f"importance_sampling_mode must be token_truncate or token_mask with loss_type = 'vespo', got {mode!r}"
            )

    def importance_weights(self, old_per_token_logps: Tensor, rollout: Rollout, rows: Tensor) -> Tensor | None:
        """`correction_weights` of these rows; None where the config asks for no correction."""
        if not self.config.importance_sampling_correction:
            return None
        weights = correction_weights(
            old_per_token_logps,
            rollout.sampling_per_token_logps[rows],
            rollout.policy_mask[rows],
            mode=self.config.importance_sampling_mode,
            cap=self.config.importance_sampling_clip_max,
        )
        return weights.expand_as(old_per_token_logps)

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
            mode=self.config.importance_sampling_mode,
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
        """A quantized copy of the policy as it is now, with its adapters merged if it has some."""
        assert self.config.rollout_quantization is not None
        return quantize_model(self.merged_policy(), self.config.rollout_quantization)


def correction_weights(
    old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, completion_mask: Tensor, *, mode: str, cap: float
) -> Tensor:
    r"""The weights with which tokens of the sampling policy train the policy, in one of TRL's four modes.

    A weight is the ratio :math:`w_{it} = e^{\log \pi(o_{it}) - \log \pi_q(o_{it})}` of a token ("token_..."), or the
    product of those of a completion's tokens ("sequence_..."). Weights above `cap` become `cap` ("..._truncate") or 0
    ("..._mask").

    Args:
        old_per_token_logps, sampling_per_token_logps: (B, C), nats, as in `truncated_importance_weights`.
        completion_mask: (B, C), 1 for tokens that the policy wrote; the others have weight 1.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        cap: c > 0, `importance_sampling_clip_max`.

    Returns:
        (B, C), or (B, 1) for a weight per completion.

    Raises ValueError as `truncated_importance_weights` does, and for another mode.

    >>> import torch
    >>> trained, sampled = torch.tensor([[0.5, 0.8]]).log(), torch.tensor([[0.25, 0.4]]).log()
    >>> correction_weights(trained, sampled, torch.ones(1, 2), mode="token_mask", cap=3.0)
    tensor([[2., 2.]])
    >>> correction_weights(trained, sampled, torch.ones(1, 2), mode="sequence_mask", cap=3.0)
    tensor([[0.]])
    """
    modes = GRPOConfig.choices["importance_sampling_mode"]
    if mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}; got {mode!r}")
    if old_per_token_logps.shape != sampling_per_token_logps.shape:
        raise ValueError(
            f"sampling_per_token_logps: expected shape {tuple(old_per_token_logps.shape)}, got "
            f"{tuple(sampling_per_token_logps.shape)}"
        )
    check_numbers(cap=cap)
    difference = torch.where(completion_mask != 0, old_per_token_logps.detach() - sampling_per_token_logps, 0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=1, keepdim=True)
    ratio = difference.exp()
    return ratio.clamp(max=cap) if mode.endswith("truncate") else torch.where(ratio > cap, 0.0, ratio)


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
    every = torch.ones_like(old_per_token_logps)
    return correction_weights(old_per_token_logps, sampling_per_token_logps, every, mode="token_truncate", cap=cap)


def mismatch_metrics(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    mode: str = "token_truncate",
    cap: float,
) -> dict[str, float]:
    """How far the sampling policy is from the policy that is trained, over the tokens of the mask, under TRL's keys.

    `sampling/sampling_logp_difference/mean` and `/max`: of |log π − log π_q|, nats.
    `sampling/importance_sampling_ratio/min`, `/mean`, `/max`: of the `correction_weights`. An empty mask gives no keys.

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
    weights = correction_weights(old_per_token_logps, sampling_per_token_logps, completion_mask, mode=mode, cap=cap)
    ratio = weights[real.any(dim=1) if mode.startswith("sequence") else real]
    return {
        "sampling/sampling_logp_difference/mean": difference.mean().item(),
        "sampling/sampling_logp_difference/max": difference.max().item(),
        "sampling/importance_sampling_ratio/min": ratio.min().item(),
        "sampling/importance_sampling_ratio/mean": ratio.mean().item(),
        "sampling/importance_sampling_ratio/max": ratio.max().item(),
    }
